"""Break the source on purpose, one line at a time, in a copy, and record which laws notice.

python tests/mutants.py            # all of them; writes the table of docs/mutants.md to stdout
python tests/mutants.py twiddle    # those whose name contains a word
"""

import os
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import NamedTuple


class Mutant(NamedTuple):
    """One wrong line: what is wrong, the file, the text, its replacement, a word of the cases it is in."""

    wrong: str
    file: str
    old: str
    new: str
    case: str = ""


MUTANTS = [
    Mutant(
        "pairs at once: σ(b) for b in Qh",
        "groups/involution.py",
        "y, det = plus(a * h, b, self.sigma(h)), ",
        "y, det = plus(a * h, b_, self.sigma(h)), ",
        "XMat",
    ),
    Mutant(
        "pairs at once: half of the bound",
        "groups/involution.py",
        "return plus(yy, y_, y_).amax() + down().amax()",
        "return (plus(yy, y_, y_).amax() + down().amax()) / 2",
        "XMat",
    ),
    Mutant("solve instead of solve_t in b", "group.py", "self.solve_t(q, v)\n", "self.solve(q, v)\n", "Dense"),
    Mutant(
        "P = QQᵀ",
        "group.py",
        "self.apply_t(q, self.apply(q, g))",
        "self.apply(q, self.apply_t(q, g))",
        "Dense",
    ),
    Mutant("matrix() transposed", "group.py", "device=device)).mT", "device=device))", "Dense"),
    Mutant("ascent", "algebra.py", "plus[k] - minus[k]", "minus[k] - plus[k]", "Diagonal"),
    Mutant("E₋ dropped", "algebra.py", "plus[k] - minus[k]", "plus[k]", "Diagonal"),
    Mutant(
        "residual transposed",
        "algebra.py",
        "self.project(r.x, r.y)",
        "self.project(r.y, r.x)",
        "Triangular() @",
    ),
    Mutant("ell not carried", "algebra.py", '| {"ell": ell}', '| {"ell": q["ell"]}', "Dense"),
    Mutant("ell scaled with Q", "algebra.py", 't if k == "ell" else (s * t)', "(s * t)", "Triangular"),
    Mutant("batch mean for batch sum", "linalg.py", "t.sum(dim", "t.mean(dim", "Diagonal"),
    Mutant("batch sum dropped", "linalg.py", "t if t.ndim == keep else", "t if t.ndim >= keep else", "Diagonal"),
    Mutant("solve with Aᵀ", "linalg.py", "solve_ex(lift(a).mT", "solve_ex(lift(a)", "Dense"),
    Mutant("triangle upside down", "linalg.py", "upper=not upper", "upper=upper", "Triangular"),
    Mutant(
        "max for Frobenius",
        "linalg.py",
        "size * torch.linalg.vector_norm(lift(t) / size.view(*size.shape, *[1] * len(over)), dim=over)",
        "size",
        "Dense",
    ),
    Mutant(
        "norm overflows",
        "linalg.py",
        "size * torch.linalg.vector_norm(lift(t) / size.view(*size.shape, *[1] * len(over)), dim=over)",
        "torch.linalg.vector_norm(lift(t), dim=over)",
        "Dense",
    ),
    Mutant(
        "L forgets the present",
        "step_size.py",
        "torch.maximum(torch.lerp(now, ell.to(now), self.beta), now)",
        "torch.lerp(now, ell.to(now), self.beta)",
        "Dense",
    ),
    Mutant(
        "L forgets the past",
        "step_size.py",
        "torch.maximum(torch.lerp(now, ell.to(now), self.beta), now)",
        "now",
        "Dense",
    ),
    Mutant("paper's rule by the bound", "step_size.py", "_divide(lr, norm())", "_divide(lr, bound())", "Diagonal"),
    Mutant(
        "zero divided by zero",
        "step_size.py",
        "size.clamp_min(torch.finfo(size.dtype).tiny)",
        "size",
        "Diagonal",
    ),
    Mutant("log det of a scalar, once", "groups/diagonal.py", 'n * q["s"]', 'q["s"]', "Scalar"),
    Mutant(
        "paper's norm of XMat",
        "groups/involution.py",
        "return self._norms(e).amax()",
        'return torch.maximum(e["a"].abs().amax(), e["b"].abs().amax())',
        "XMat",
    ),
    Mutant(
        "centre of b not zero",
        "groups/involution.py",
        "self.off_diagonal(batch_sum(x * self.sigma(y)))",
        "batch_sum(x * self.sigma(y))",
        "XMat",
    ),
    Mutant(
        "Qᵀ without σ on b",
        "groups/involution.py",
        'q["a"] * x + self.sigma(q["b"] * x)',
        'q["a"] * x + q["b"] * self.sigma(x)',
        "XMat",
    ),
    Mutant(
        "Q⁻ᵀ without σ on b",
        "groups/involution.py",
        '* x - self.sigma(q["b"] * x)',
        '* x - q["b"] * self.sigma(x)',
        "Butterfly",
    ),
    Mutant("log det counts blocks twice", "groups/involution.py", ".sum() / 2", ".sum()", "XMat"),
    Mutant(
        "product without σ on q",
        "groups/involution.py",
        'e["b"] * self.sigma(q["a"])',
        'e["b"] * q["a"]',
        "XMat",
    ),
    Mutant(
        "correlation as convolution",
        "groups/circulant.py",
        "rfft(lift(y)).conj(), x",
        "rfft(lift(y)), x",
        "Circulant",
    ),
    Mutant(
        "log det of half a spectrum",
        "groups/circulant.py",
        'fft(lift(q["c"])).abs().log()',
        'rfft(lift(q["c"])).abs().log()',
        "Circulant",
    ),
    Mutant(
        "norm of a filter by its taps",
        "groups/circulant.py",
        'rfft(lift(e["c"])).abs().amax()',
        'lift(e["c"]).abs().amax()',
        "Circulant",
    ),
    Mutant("triangle not kept", "groups/triangular.py", "self._keep(outer(x, y))", "outer(x, y)", "Triangular"),
    Mutant("wrong triangle", "groups/triangular.py", "t.tril()", "t.triu()", "LowerTriangular"),
    Mutant(
        "B without d",
        "groups/incomplete_triangular.py",
        'e["T"][:, self.k :] * q["d"]',
        'e["T"][:, self.k :]',
        "Incomplete",
    ),
    Mutant(
        "max of two blocks of rows",
        "groups/incomplete_triangular.py",
        "torch.hypot(frobenius",
        "torch.maximum(frobenius",
        "Incomplete",
    ),
    Mutant(
        "u scaled by the wrong d",
        "groups/normalization.py",
        'e["u"] * q["d"][-1]',
        'e["u"] * q["d"][:-1]',
        "Normalization",
    ),
    Mutant(
        "max of two sets of columns",
        "groups/normalization.py",
        "return torch.hypot(",
        "return torch.maximum(",
        "Normalization",
    ),
    Mutant(
        "U and V moved together",
        "groups/low_rank.py",
        '"ell_U": ell}',
        '"ell_U": ell, "V": subtract_product(v, size, self.apply_t(q, a).mT, b)}',
        "LowRank",
    ),
    Mutant(
        "Woodbury with Sᵀ",
        "groups/low_rank.py",
        "solve(self._small(q), x",
        "solve(self._small(q).mT, x",
        "LowRank",
    ),
    Mutant(
        "V moved as U", "groups/low_rank.py", "self.apply_t(q, a).mT, b)", "a.mT, b @ self._small(q).mT)", "LowRank"
    ),
    Mutant("both terms added", "groups/low_rank.py", "(r.y @ v, -(r.w @ v))", "(r.y @ v, r.w @ v)", "LowRank"),
    Mutant(
        "norm of all counts twice",
        "groups/low_rank.py",
        "+ product_norm(minus, gram)",
        "+ product_norm(plus + minus, gram)",
        "LowRank",
    ),
    Mutant("norm of G, not of G Vᵀ", "linalg.py", "t @ gram + slack * t", "t", "LowRank"),
    Mutant(
        "norm trusts the Gram matrix",
        "linalg.py",
        "(t @ gram + slack * t) * t).sum()",
        "(t @ gram) * t).sum().clamp_min(0)",
        "LowRank",
    ),
    Mutant("balance forgets ell", "groups/low_rank.py", 'q["ell_U"] * rho.square()', 'q["ell_U"]', "LowRank"),
    Mutant("V starts at zero", "groups/low_rank.py", '"V": normal()', '"V": 0 * normal()', "LowRank"),
    Mutant("global random state", "group.py", "normal(n, self.generator, width", "normal(n, None, width", "LowRank"),
    Mutant("twiddle sign of the DCT", "groups/constant.py", "(-math.pi / (2 * n))", "(math.pi / (2 * n))", "DCT"),
    Mutant("first row of the DCT too large", "groups/constant.py", "w[:1] / math.sqrt(2)", "w[:1]", "DCT"),
    Mutant("shift to the other side", "groups/constant.py", "x.roll(self.k, -1)", "x.roll(-self.k, -1)", "Shift"),
    Mutant(
        "permutation for its inverse",
        "groups/constant.py",
        "device=x.device).argsort()",
        "device=x.device)",
        "Permute",
    ),
    Mutant(
        "stale factor: sweep with the new one",
        "groups/product.py",
        "factor.apply_t(p, x), factor.solve(p, w)",
        "factor.apply_t(new[str(i)], x), factor.solve(new[str(i)], w)",
        "LowRank",
    ),
    Mutant("sweep with Q⁻ᵀ for Q⁻¹", "groups/product.py", "factor.solve(p, w)", "factor.solve_t(p, w)", "LowRank"),
    Mutant(
        "rate not shared by factors",
        "groups/product.py",
        "new, lr = {}, self.share(lr)",
        "new = {}",
        "LowRank",
    ),
    Mutant(
        "constants count as factors",
        "groups/composite.py",
        "max(1, sum(part.moves for part in self.parts))",
        "len(self.parts)",
        "Shift",
    ),
    Mutant(
        "product in the wrong order",
        "groups/product.py",
        "for factor, p in reversed(list(self.pairs(q))):\n            x = factor.apply(",
        "for factor, p in self.pairs(q):\n            x = factor.apply(",
        "LowRank",
    ),
    Mutant("log det multiplicity", "groups/kronecker.py", "* (n // size)", "* size", "Kronecker"),
    Mutant(
        "rate not shared by axes",
        "groups/kronecker.py",
        "new, lr = {}, self.share(lr)",
        "new = {}",
        "Kronecker",
    ),
    Mutant(
        "parts meet the pair of the whole",
        "groups/kronecker.py",
        "part.moves and not isinstance(part, (MatrixAlgebra, LowRank))",
        "isinstance(part, Composite)",
        "parts=(Blocks(k=2, part=LowRank",
    ),
    Mutant("scale not spread over axes", "groups/kronecker.py", "s ** (1 / len(able))", "s", "Kronecker"),
    Mutant("balance changes Q", "groups/kronecker.py", "logs.mean() - logs", "-logs", "Kronecker"),
    Mutant(
        "batch axes of a factor mixed up",
        "groups/kronecker.py",
        "movedim(axis - len(self.shape), -1)",
        "transpose(axis - len(self.shape), -1).flip(-1)",
        "Kronecker",
    ),
    Mutant(
        "blocks share memory",
        "groups/blocks.py",
        "t.expand(n // self.k, *t.shape).clone()",
        "t.expand(n // self.k, *t.shape)",
        "Blocks",
    ),
    Mutant(
        "rate shared by blocks",
        "groups/blocks.py",
        "piece, lr, coin, rule)",
        "piece, lr / 2, coin, rule)",
        "Blocks",
    ),
    Mutant(
        "rate shared by summands",
        "groups/direct_sum.py",
        "Residual(*piece), lr, coin",
        "Residual(*piece), self.share(lr), coin",
        "DirectSum",
    ),
    Mutant(
        "a constant summand takes a scale",
        "groups/direct_sum.py",
        "return all(part",
        "return any(part",
        "parts=(Shift",
    ),
    Mutant(
        "covectors as vectors",
        "groups/conjugate.py",
        'return self.by.solve_t(q["C"], x)',
        'return self.by.apply(q["C"], x)',
        "Conjugate",
    ),
    Mutant(
        "C for C⁻ᵀ in Qᵀ",
        "groups/conjugate.py",
        'self.by.apply_t(q["C"], self.part.apply_t',
        'self.by.apply(q["C"], self.part.apply_t',
        "Conjugate",
    ),
    Mutant(
        "order for its inverse",
        "groups/permutation.py",
        "Permute(tuple(back)) @",
        "Permute(tuple(order)) @",
        "Permute",
    ),
    Mutant(
        "orbits not followed to the end",
        "groups/permutation.py",
        "for i in reached:",
        "for i in list(reached):",
        "Permute",
    ),
    Mutant(
        "padding without its pairs",
        "groups/padded.py",
        "pad(units, (n, 0))",
        "0 * pad(units, (n, 0))",
        "Padded",
    ),
    Mutant(
        "lra in the other order",
        "groups/named.py",
        "return LowRank(rank) @ Diagonal()",
        "return Diagonal() @ LowRank(rank)",
        "named",
    ),
    Mutant(
        "fishnet without its halves",
        "groups/named.py",
        "for _ in range(levels):",
        "for _ in range(1):",
        "named",
    ),
]


def trials(word: str) -> Iterator[tuple[str, Callable[[], None]]]:
    """Every test of test_laws.py by the name of its law, on the first five cases that hold a word."""
    import test_laws

    tests = {name: f for name, f in vars(test_laws).items() if name.startswith("test_")}
    found = []
    for name, test in tests.items():
        rows: list[dict[str, object]] = [{}]
        for mark in getattr(test, "pytestmark", []):
            keys, values = mark.args[:2]
            keys, values = (keys, values) if isinstance(keys, tuple) else ((keys,), [(v,) for v in values])
            rows = [row | dict(zip(keys, v, strict=True)) for row in rows for v in values]
        for row in rows:
            if "group" not in row or word in repr(row["group"]):
                law = getattr(row.get("law"), "__name__", name.removeprefix("test_"))
                found.append((law, partial(test, **row)))
    found.sort(key=lambda trial: "orientation" in trial[0])
    seen = Counter()
    for law, trial in found:
        seen[law] += 1
        if seen[law] <= 5:
            yield law, trial


def caught(word: str) -> list[str]:
    """The laws that fail."""
    failed: list[str] = []
    for law, trial in trials(word):
        if law not in failed and not (len(failed) > 2 and "orientation" in law):
            try:
                trial()
            except BaseException as error:
                if isinstance(error, KeyboardInterrupt):
                    raise
                failed.append(law)
    return failed


def main(words: list[str]) -> None:
    """Print a row for each mutant."""
    home = Path(__file__).parent.parent
    print("| mutant | file | caught by |\n|---|---|---|", flush=True)
    for mutant in MUTANTS:
        if words and not any(word in mutant.wrong for word in words):
            continue
        with tempfile.TemporaryDirectory() as copy:
            for folder in ("src", "tests"):
                shutil.copytree(home / folder, Path(copy, folder))
            file = Path(copy, "src/psgd", mutant.file)
            text = file.read_text()
            if text.count(mutant.old) != 1:
                raise ValueError(f"{mutant.file} needs to hold {mutant.old!r} once, got {text.count(mutant.old)}")
            file.write_text(text.replace(mutant.old, mutant.new))
            inside = [sys.executable, Path(copy, "tests/mutants.py"), "--inside", mutant.case]
            path = {"PYTHONPATH": f"{copy}/src:{copy}/tests"}
            run = subprocess.run(inside, env=os.environ | path, capture_output=True, text=True, check=False)
        laws = run.stdout.split() if run.returncode == 0 else ["import"]
        names = ", ".join(law.replace("_", " ") for law in laws[:3]) or "**nothing**"
        more = f", and {len(laws) - 3} more" if len(laws) > 3 else ""
        print(f"| {mutant.wrong} | `{mutant.file}` | {names}{more} |", flush=True)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--inside"]:
        import torch

        torch.set_num_threads(1)
        print("\n".join(caught(sys.argv[2])))
    else:
        main(sys.argv[1:])
