"""Write docs/groups.md and its pictures from the code: `./run python docs/make_groups_page.py`.

The formulas of the columns are Python expressions, so that tests can evaluate them: storage is compared with the
points themselves, costs with the operations that `psgd.plan` counts (tests/test_docs.py).
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from psgd import (
    DCT,
    Blocks,
    Butterfly,
    Circulant,
    Conjugate,
    Dense,
    Diagonal,
    DirectSum,
    Group,
    Identity,
    IncompleteTriangular,
    Kronecker,
    LowerTriangular,
    LowRank,
    Normalization,
    Padded,
    Permute,
    Point,
    Scalar,
    Shift,
    Triangular,
    XMat,
    affine,
    band,
    dct,
    fishnet,
    kaleidoscope,
    lra,
    lra_duv,
    permutation,
    two_grid,
)

HERE = Path(__file__).parent
SIZES = {"n": 16, "k": 4, "r": 2, "m": 4, "c": 4, "s": 4}  # of the pictures; n = m·c


class Row(NamedTuple):
    """A line of the page. Storage and costs are expressions in n, k, r, m, c, s; costs are up to a constant."""

    name: str
    expression: str
    make: Callable[[dict[str, int]], Group | Padded]
    form: str
    parameters: str
    storage: str
    apply: str
    fit: str
    paper: str

    @property
    def picture(self) -> str:
        """The file's name; DCT and dct would be one where case does not count."""
        return f"{'' if self.name[0].isupper() else 'named_'}{self.name.lower()}.png"


def table(name: str) -> str:
    """Cite the paper's table of groups."""
    return f"Table “Useful Lie groups”, {name}"


SECTIONS: dict[str, tuple[str, list[Row]]] = {
    "Matrix algebras": (
        "The invertible elements of a linear space closed under products. The space is its own Lie algebra, "
        "and one step serves all: E = Π(aaᵀ) − Π(bbᵀ), Q ← Q − s·E·Q.",
        [
            Row(
                "Scalar",
                "Scalar()",
                lambda d: Scalar(),
                "s·I",
                "s > 0; any n",
                "1",
                "n",
                "n",
                "ρ of Claim 3.2",
            ),
            Row(
                "Diagonal",
                "Diagonal()",
                lambda d: Diagonal(),
                "diag(d)",
                "d ∈ ℝⁿ, no zeros; any n",
                "n",
                "n",
                "n",
                "Example 1",
            ),
            Row(
                "XMat",
                "XMat()",
                lambda d: XMat(),
                "diag(a) + adiag(b)",
                "a, b ∈ ℝⁿ, a∘flip(a) ≠ b∘flip(b); any n",
                "2*n",
                "n",
                "n",
                "Example 2, Algorithm 2",
            ),
            Row(
                "Butterfly",
                "Butterfly()",
                lambda d: Butterfly(),
                "diag(a) + diag(b)·S, S the circular shift by n/2",
                "a, b ∈ ℝⁿ, a∘Sa ≠ b∘Sb; even n",
                "2*n",
                "n",
                "n",
                "Example 3",
            ),
            Row(
                "Normalization",
                "Normalization()",
                lambda d: Normalization(),
                "diag(d) + u·eₙᵀ",
                "d ∈ ℝⁿ without zeros, u ∈ ℝⁿ⁻¹; any n",
                "2*n - 1",
                "n",
                "n",
                table("row 3"),
            ),
            Row(
                "Triangular",
                "Triangular()",
                lambda d: Triangular(),
                "upper triangular",
                "diagonal without zeros; any n",
                "n**2",
                "n**2",
                "n**3",
                "“Triangular matrix preconditioner”",
            ),
            Row(
                "LowerTriangular",
                "LowerTriangular()",
                lambda d: LowerTriangular(),
                "lower triangular",
                "diagonal without zeros; any n",
                "n**2",
                "n**2",
                "n**3",
                table("row 2"),
            ),
            Row(
                "IncompleteTriangular",
                "IncompleteTriangular(k)",
                lambda d: IncompleteTriangular(d["k"]),
                "[T B; 0 diag(d)], T upper triangular k×k",
                "diagonals without zeros; n > k",
                "n*k + n - k",
                "n*k",
                "n*k**2",
                table("row 4"),
            ),
            Row(
                "Dense",
                "Dense()",
                lambda d: Dense(),
                "any invertible matrix, GL(n)",
                "det Q ≠ 0; any n",
                "n**2",
                "n**2",
                "n**3",
                table("row 7"),
            ),
            Row(
                "Circulant",
                "Circulant()",
                lambda d: Circulant(),
                "C x = c ⊛ x, by FFT",
                "c ∈ ℝⁿ, no zero in its spectrum; any n",
                "n",
                "n*log2(n)",
                "n*log2(n)",
                table("row 8"),
            ),
        ],
    ),
    "Low rank": (
        "Two twin groups, A_V(U) with V fixed and A_U(V) with U fixed. A step moves on one of them, never on both.",
        [
            Row(
                "LowRank",
                "LowRank(r)",
                lambda d: LowRank(d["r"]),
                "I + UVᵀ",
                "U, V ∈ ℝⁿˣʳ, det(I + VᵀU) ≠ 0; any n",
                "2*n*r",
                "n*r",
                "n*r**2 + r**3",
                "Claims 3.2 and 3.3",
            ),
        ],
    ),
    "Constants": (
        "Orthogonal matrices that never move. They take no storage and bring together what the moving factors of "
        "a product would not reach.",
        [
            Row("Identity", "Identity()", lambda d: Identity(), "I", "none; any n", "0", "0", "0", "—"),
            Row(
                "Shift",
                "Shift(k)",
                lambda d: Shift(d["k"]),
                "circular shift by k",
                "none; any n",
                "0",
                "n",
                "0",
                "C of “Band Hessian”",
            ),
            Row(
                "Permute",
                "Permute(order)",
                lambda d: Permute(tuple((5 * i + 3) % d["n"] for i in range(d["n"]))),
                "(Qx)ᵢ = x at order[i]",
                "none; n the length of `order`",
                "0",
                "n",
                "0",
                "Claim 3.1, its σ",
            ),
            Row(
                "DCT",
                "DCT()",
                lambda d: DCT(),
                "the orthonormal cosine transform",
                "none; any n",
                "0",
                "n*log2(n)",
                "0",
                "U of “DCT preconditioner”",
            ),
        ],
    ),
    "Combinations": (
        "Groups made of groups; storage and costs are the sums of the parts'. Each row shows an example.",
        [
            Row(
                "Product",
                "Circulant() @ Diagonal()",
                lambda d: Circulant() @ Diagonal(),
                "A·B·…",
                "each factor on its own group; n as the factors need",
                "2*n",
                "n*log2(n)",
                "n*log2(n)",
                "Q = ACB of “Band Hessian”",
            ),
            Row(
                "DirectSum",
                "DirectSum((k, n − k), (Dense(), Diagonal()))",
                lambda d: DirectSum((d["k"], d["n"] - d["k"]), (Dense(), Diagonal())),
                "A ⊕ B ⊕ …",
                "different groups; n the sum of the sizes",
                "k**2 + n - k",
                "k**2 + n",
                "k**3 + n",
                table("row 13"),
            ),
            Row(
                "Blocks",
                "Blocks(k, Dense())",
                lambda d: Blocks(d["k"], Dense()),
                "A₁ ⊕ A₂ ⊕ …, k×k each",
                "one group, moved side by side; n divisible by k",
                "n*k",
                "n*k",
                "n*k**2",
                table("row 13"),
            ),
            Row(
                "Kronecker",
                "Kronecker((m, c), (Dense(), Circulant()))",
                lambda d: Kronecker((d["m"], d["c"]), (Dense(), Circulant())),
                "A₁ ⊗ A₂ ⊗ …",
                "one group for each axis of a tensor; n = m·c·…",
                "m**2 + c",
                "n*(m + log2(c))",
                "n*(m + log2(c)) + m**3",
                table("row 14"),
            ),
            Row(
                "Conjugate",
                "Conjugate(Normalization(), XMat())",
                lambda d: Conjugate(Normalization(), XMat()),
                "C⁻¹·A·C",
                "A moves, the point C stays; n as both need",
                "4*n - 1",
                "n",
                "n",
                table("row 11"),
            ),
        ],
    ),
    "Named expressions": (
        "The paper's composites, in `psgd.groups.named`: each is an expression of the groups above.",
        [
            Row(
                "permutation",
                "permutation(orbits=…)",
                lambda d: permutation(orbits=scattered(d["n"], d["s"])),
                "Σ aᵢ∘σᵢ over a subgroup of Sₙ: GL(s) on each orbit of s entries",
                "given by elements, generators or orbits; n their length",
                "n*s",
                "n*s",
                "n*s**2",
                "Claim 3.1",
            ),
            Row(
                "fishnet",
                "fishnet(n, levels)",
                lambda d: fishnet(d["n"], round(math.log2(d["s"]))),
                "nested X: GL(s) on orbits of s = 2^levels entries",
                "invertible; any n, the storage is for s a divisor of n",
                "n*s",
                "n*s",
                "n*s**2",
                "“X-matrix preconditioner”",
            ),
            Row(
                "kaleidoscope",
                "kaleidoscope(n)",
                lambda d: kaleidoscope(d["n"]),
                "X·(X ⊕ X)·(X ⊕ X ⊕ X ⊕ X)·…",
                "each X invertible; n ≥ 2, the storage is for powers of 2",
                "2*n*log2(n)",
                "n*log2(n)",
                "n*log2(n)",
                "“Kaleidoscope, FFT and DCT matrices”",
            ),
            Row(
                "lra",
                "lra(r)",
                lambda d: lra(d["r"]),
                "(I + UVᵀ)·diag(d)",
                "as LowRank and Diagonal; any n",
                "n*(2*r + 1)",
                "n*r",
                "n*r**2 + r**3",
                "Algorithm 3",
            ),
            Row(
                "lra_duv",
                "lra_duv(r)",
                lambda d: lra_duv(d["r"]),
                "diag(d)·(I + UVᵀ)",
                "the same matrices as lra(r), other steps",
                "n*(2*r + 1)",
                "n*r",
                "n*r**2 + r**3",
                "“Practical considerations”",
            ),
            Row(
                "affine",
                "affine((m, c))",
                lambda d: affine((d["m"], d["c"])),
                "A₁ ⊗ A₂ ⊗ …, triangular unless others are given",
                "one factor for each axis of a tensor; n = m·c·…",
                "m**2 + c**2",
                "n*(m + c)",
                "n*(m + c) + m**3 + c**3",
                table("row 14"),
            ),
            Row(
                "band",
                "band(k)",
                lambda d: band(d["k"]),
                "A·C·B, A and B of k×k blocks, C the shift by k/2",
                "blocks invertible; n divisible by k",
                "2*n*k",
                "n*k",
                "n*k**2",
                "“Band Hessian”",
            ),
            Row(
                "two_grid",
                "two_grid(m, c)",
                lambda d: two_grid(d["m"], d["c"]),
                "C⁻¹·(A ⊗ I)·C·(B ⊗ I), C the shift by c/2",
                "A, B ∈ GL(m); n = m·c",
                "2*m**2",
                "n*m",
                "n*m + m**3",
                "“The two-grid preconditioner”",
            ),
            Row(
                "dct",
                "dct(XMat())",
                lambda d: dct(XMat()),
                "A·U·B, U the DCT, A sparse, B diagonal",
                "as A and Diagonal; n as A needs",
                "3*n",
                "n*log2(n)",
                "n*log2(n)",
                "“DCT preconditioner”",
            ),
        ],
    ),
    "Padding": (
        "Not a group on ℝⁿ, but a group on a longer space, whose P is cut to n×n.",
        [
            Row(
                "Padded",
                "Padded(Blocks(k, Dense()), k)",
                lambda d: Padded(Blocks(d["k"], Dense()), d["k"]),
                "P = [I 0]·QᵀQ·[I 0]ᵀ",
                "any n: padded to the next multiple of k",
                "k**2*ceil(n/k)",
                "n*k",
                "n*k**2",
                "“Practical considerations and limitations”",
            ),
        ],
    ),
}

ROWS: dict[str, Row] = {row.name: row for _, rows in SECTIONS.values() for row in rows}

ELSEWHERE = {
    "diagonal": "`Diagonal`",
    "triangular": "`Triangular`, `LowerTriangular`",
    "normalization": "`Normalization`",
    "incomplete triangular": "`IncompleteTriangular`",
    "butterfly": "`Butterfly`",
    "X": "`XMat`",
    "GL(n)": "`Dense`",
    "C circulant": "`Circulant`, the cyclic ones. The anti-cyclic ones (c ⊛ x with a sign change at the wrap) have "
    "no class yet.",
    "U orthogonal": "No class: P = UᵀU = I, there is nothing to fit. As constant factors `Identity`, `Shift`, "
    "`Permute` and `DCT` are of use.",
    "\\|det A\\| = 1": "No class: the scale of P must be fitted, too; c(P) has its minimum at one scale only.",
    "C⁻¹AC": "`Conjugate`, for any C that is a point of a group.",
    "UᵀAU, U orthogonal": "No class: it is a product with a constant. In P = UᵀAᵀU·UᵀAU the inner U drop out, so "
    "that `A @ DCT()` has the same P as Uᵀ·A·U. (`Conjugate(DCT(), A)` keeps them.)",
    "A ⊕ B ⊕ …": "`DirectSum`, `Blocks`",
    "A ⊗ B ⊗ …": "`Kronecker`, `affine`",
    "I + UVᵀ": "`LowRank`, in products as `lra` and `lra_duv`",
    "[A B …; C D …], blocks on one group": "No class. Of diagonal blocks it is `permutation` with the orbits "
    "{i, i + c, i + 2c, …} (`Butterfly` is the case of 2×2 blocks); of c×c blocks that are multiples of one A it "
    "is `Kronecker((m, c), (Dense(), A))`.",
}

MISFITS: list[tuple[str, Callable[[], Any]]] = [
    ("Butterfly()", lambda: Butterfly().init(7)),
    ("Blocks(4, Dense())", lambda: Blocks(4, Dense()).init(10)),
    ("IncompleteTriangular(4)", lambda: IncompleteTriangular(4).init(4)),
    ("DirectSum((2, 3), (Dense(), XMat()))", lambda: DirectSum((2, 3), (Dense(), XMat())).init(6)),
    ("affine((3, 4))", lambda: affine((3, 4)).init(10)),
    ("Permute((1, 0))", lambda: Permute((1, 0)).init(3)),
    ("kaleidoscope(1)", lambda: kaleidoscope(1)),
]

PADDING = """\
import torch
from psgd import Blocks, Dense, Padded

group = Padded(Blocks(4, Dense()), 4)  # 4×4 blocks, for any n
q = group.init(10)  # three blocks: two entries of the last are padding
v = torch.randn(10)
q = group.fit(q, v, 3 * v)  # H = 3·I
assert group.precondition(q, v).shape == (10,)
"""


def scattered(n: int, s: int) -> list[tuple[int, ...]]:
    """Return orbits of s entries, n/s apart."""
    return [tuple(range(i, n, n // s)) for i in range(n // s)]


def evaluate(formula: str, sizes: dict[str, int]) -> float:
    """Return the value of a formula of the page."""
    return float(eval(formula, {"log2": math.log2, "ceil": math.ceil}, dict(sizes)))


def pretty(formula: str) -> str:
    """Return a formula as mathematics: `2*n*log2(n)` is 2n log₂ n."""
    formula = re.sub(r"\*?log2\((\w)\)", r" log₂ \1", formula)
    formula = re.sub(r"\*?ceil\(([^)]*)\)", r"⌈\1⌉", formula)
    formula = formula.replace("**2", "²").replace("**3", "³").replace("*", "").replace(" - ", " − ")
    return formula.replace("+  ", "+ ").strip()


def cost(formula: str) -> str:
    """Return a cost as it stands on the page."""
    return "—" if formula == "0" else f"O({pretty(formula)})"


def walked(group: Group | Padded, n: int, steps: int = 6) -> Point:
    """Return a point some steps away from the origin, towards no particular Hessian."""
    generator = torch.Generator().manual_seed(1)
    q = group.init(n, generator=generator, dtype=torch.float64)
    if isinstance(group, Conjugate):
        q |= {"C": walked(group.by, n)}
    for i in range(steps):
        v, h = torch.randn(2, 4, n, generator=generator, dtype=torch.float64)
        q = group.fit(q, v, h, lr=0.5, coin=i % 2 == 0)
    return q


def matrix(row: Row) -> Tensor:
    """Return Q of the row's picture, or P where there is no Q of that size."""
    group, n = row.make(SIZES), SIZES["n"]
    if isinstance(group, Padded):
        n -= 2
        return group.precondition(walked(group, n), torch.eye(n, dtype=torch.float64))
    return group.apply(walked(group, n), torch.eye(n, dtype=torch.float64)).mT


def draw(m: Tensor, path: Path, cell: int = 6) -> None:
    """Save a matrix as a small picture: white where it is zero, the darker the larger elsewhere."""
    from matplotlib.image import imsave

    size = m.abs() / m.abs().max()
    pale, dark = torch.tensor([0.70, 0.82, 0.91]), torch.tensor([0.03, 0.19, 0.42])
    colours = pale + (dark - pale) * size[..., None].sqrt()
    colours[size < 1e-12] = 1.0
    big = colours.repeat_interleave(cell, 0).repeat_interleave(cell, 1)
    framed = torch.full((big.shape[0] + 2, big.shape[1] + 2, 3), 0.75)
    framed[1:-1, 1:-1] = big
    imsave(path, framed.numpy(), pil_kwargs={"optimize": True})


def page() -> str:
    """Return the text of docs/groups.md."""
    lines = [
        "# The groups",
        "",
        "<!-- Written by docs/make_groups_page.py: edit that, then `./run python docs/make_groups_page.py`. -->",
        "",
        "The table “Useful Lie groups” of the paper, as the library has it. A preconditioner is P = QᵀQ with Q on",
        "one of these groups, or on a product of them, written `A @ B`.",
        "",
        "*Storage* counts the numbers that Q takes. *Apply* is the cost of Qx, *fit* that of one step from one pair",
        "(v, h). Tests compare the storage with the tensors themselves, and the growth of the costs with counted",
        "operations. Of triangular matrices both halves are stored. The pictures show |Q| for n = 16, with k = m =",
        "c = s = 4 and r = 2, after a few steps.",
    ]
    for title, (text, rows) in SECTIONS.items():
        lines += ["", f"## {title}", "", text, ""]
        lines += ["| | group | Q | parameters | storage | apply | fit | in the paper |", "|" + "---|" * 8]
        for row in rows:
            cells = (
                f"![{row.name}](groups/{row.picture})",
                f"`{row.expression}`",
                row.form,
                row.parameters,
                pretty(row.storage),
                cost(row.apply),
                cost(row.fit),
                row.paper,
            )
            lines.append(f"| {' | '.join(cells)} |")
    lines += ["", "## Sizes that do not fit", ""]
    lines += ["A group says so when a point is made, and what would fit:", ""]
    lines += ["| group | what it says |", "|---|---|"]
    for expression, attempt in MISFITS:
        try:
            attempt()
        except ValueError as error:
            lines.append(f"| `{expression}` | {error} |")
        else:
            raise AssertionError(f"{expression} was expected to refuse")
    lines += [
        "",
        "Three ways out. `XMat`, `kaleidoscope`, `fishnet`, `Circulant`, `DCT` and `lra` take any n. `DirectSum` joins",
        "parts of different sizes. `Padded` does what the paper does, and optimizes f(θ) + ½ϑᵀϑ over (θ, ϑ), of a",
        "length that fits. The Hessian of ϑ is I, known exactly, so that each padded entry j adds the pair (eⱼ, eⱼ) to",
        "the batch, instead of a random one.",
        "",
        "```python",
        *PADDING.splitlines(),
        "```",
        "",
        "## The rows of the paper's table",
        "",
        "| row | form | here |",
        "|---|---|---|",
        *(f"| {i} | {form} | {here} |" for i, (form, here) in enumerate(ELSEWHERE.items(), 1)),
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    """Write the page and its pictures."""
    folder = HERE / "groups"
    folder.mkdir(exist_ok=True)
    for row in ROWS.values():
        draw(matrix(row), folder / row.picture)
    (HERE / "groups.md").write_text(page(), encoding="utf-8")


if __name__ == "__main__":
    main()
