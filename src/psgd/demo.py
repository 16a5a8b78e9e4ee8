"""Fit every group to Hessians of known structure, and show how well each one preconditions each.

`python -m psgd.demo [picture.png]` prints one table and draws it. A cell is the condition number of P^½HP^½,
the ratio of its largest to its smallest |eigenvalue|: 1 is perfect, and a group gets there if it holds a Q
with QᵀQ = |H|⁻¹. Nobody tells a group which Hessian it meets; it sees pairs (v, Hv) only.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from psgd import (
    Blocks,
    Butterfly,
    Circulant,
    Dense,
    Diagonal,
    Group,
    IncompleteTriangular,
    Normalization,
    Normalized,
    Point,
    Triangular,
    XMat,
    affine,
    band,
    dct,
    fishnet,
    kaleidoscope,
    lra,
    two_grid,
)

N = 32
STEPS = 500
SPREAD = 100.0  # the condition number that most of the Hessians have
AS_GOOD = 1.5  # a cell within this factor of the column's best counts as good as the best


# --- the problems


def hessians(n: int, seed: int = 0) -> dict[str, Tensor]:
    """Return n×n Hessians by name, n a multiple of 8, with ∏|λᵢ| = 1: the structures groups can match."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    def geometric(size: int, spread: float = SPREAD) -> Tensor:
        """1, …, spread in equal ratios and random order."""
        ratios = torch.linspace(0, 1, size, dtype=torch.float64)[torch.randperm(size, generator=generator)]
        return spread**ratios

    def with_spectrum(eigenvalues: Tensor) -> Tensor:
        u: Tensor = torch.linalg.qr(normal(len(eigenvalues), len(eigenvalues))).Q
        return u * eigenvalues @ u.mT

    def blocks(size: int) -> Tensor:
        h = torch.zeros(n, n, dtype=torch.float64)
        for start, part in zip(range(0, n, size), geometric(n).reshape(-1, size), strict=True):
            h[start : start + size, start : start + size] = with_spectrum(part)
        return h

    def features() -> Tensor:
        """E[x xᵀ] of independent features with means, and a last one that is 1: what normalization undoes."""
        deviation = geometric(n - 1, SPREAD / 5).sqrt()
        mean = deviation * normal(n - 1) / 4
        rows = torch.cat((deviation.diag(), mean[:, None]), 1)
        x = torch.cat((rows, torch.eye(1, n, dtype=torch.float64).flip(-1)))
        return x @ x.mT

    def x_shaped() -> Tensor:
        """2×2 blocks, entry i coupled with entry n−1−i."""
        first = torch.arange(n // 2)
        order = torch.stack((first, n - 1 - first), 1).flatten().argsort()
        return blocks(2)[order][:, order]

    def circulant() -> Tensor:
        """A smoothing filter: λ falls with the frequency."""
        frequency = torch.fft.fftfreq(n, dtype=torch.float64).abs()
        column = torch.fft.ifft(SPREAD ** (-2 * frequency)).real
        return torch.stack([column.roll(i) for i in range(n)])

    def low_rank() -> Tensor:
        """A scaled I + UUᵀ, U of rank 3."""
        scale = geometric(n, SPREAD / 25).sqrt()
        u: Tensor = torch.linalg.qr(normal(n, 3)).Q * torch.tensor([3.0, 4.0, 5.0], dtype=torch.float64)
        return torch.outer(scale, scale) * (torch.eye(n, dtype=torch.float64) + u @ u.mT)

    def tridiagonal() -> Tensor:
        """−(k u′)′ + u/10 on a line, of random conductivity k."""
        k = (normal(n + 1) / 2).exp()
        inner = k[1:-1]
        return (k[1:] + k[:-1] + 0.1).diag() - inner.diag(1) - inner.diag(-1)

    alternating = torch.tensor([1.0, -1.0], dtype=torch.float64).repeat(n // 2)
    found = {
        "features": features(),
        "X-shaped": x_shaped(),
        "blocks": blocks(n // 4),
        "Kronecker": torch.kron(
            with_spectrum(geometric(4, SPREAD**0.5)), with_spectrum(geometric(n // 4, SPREAD**0.5))
        ),
        "circulant": circulant(),
        "band": tridiagonal(),
        "low rank": low_rank(),
        "dense": with_spectrum(geometric(n)),
        "indefinite": with_spectrum(geometric(n) * alternating),
    }
    return {name: h / torch.linalg.eigvalsh(h).abs().log().mean().exp() for name, h in found.items()}


def groups(n: int) -> dict[str, Group]:
    """Return one expression for each kind of group on ℝⁿ, n a multiple of 8, by what a user would type."""
    k = n // 4
    return {
        "Diagonal()": Diagonal(),
        "Normalization()": Normalization(),
        "XMat()": XMat(),
        "Butterfly()": Butterfly(),
        f"fishnet({n})": fishnet(n),
        "IncompleteTriangular(4)": IncompleteTriangular(4),
        f"Blocks({k}, Dense())": Blocks(k, Dense()),
        f"affine((4, {k}))": affine((4, k)),
        f"two_grid({k}, 4)": two_grid(k, 4),
        "Circulant()": Circulant(),
        "dct(XMat())": dct(XMat()),
        f"band({k})": band(k),
        f"kaleidoscope({n})": kaleidoscope(n),
        "lra(5)": lra(5),
        "Triangular()": Triangular(),
        "Dense()": Dense(),
    }


# --- the fit


def fit(group: Group, hessian: Tensor, steps: int = STEPS, seed: int = 0) -> Point:
    """Fit Q to each Hessian of a stack (k, n, n), and return the point of Blocks(n, group): a block for each.

    The Hessians stand side by side as one block-diagonal problem. The paper's step, of relative size μ, is
    annealed. A batch is n probes v ~ N(0, I), and in the last three quarters of the steps their expectation,
    v = e₁, …, eₙ, since Σvvᵀ = I. (Not in all steps: the noise of the first leads away from saddle points.)
    """
    k, n, _ = hessian.shape
    generator = torch.Generator().manual_seed(seed)
    many = Blocks(n, group)
    q = many.init(k * n, generator=generator, dtype=hessian.dtype)
    basis = torch.eye(n, dtype=hessian.dtype)[:, None].expand(n, k, n)
    for i in range(steps):
        v = basis
        if i < steps // 4:
            v = torch.randn(n, k, n, generator=generator, dtype=hessian.dtype)
        h = torch.einsum("kij,pkj->pki", hessian, v)
        lr = 0.5 * 0.002 ** (i / steps)
        coin = bool(torch.rand((), generator=generator) < 0.5)
        q = many.fit(q, v.flatten(1), h.flatten(1), lr=lr, coin=coin, rule=Normalized())
    return q


def condition(group: Group, q: Point, hessian: Tensor) -> Tensor:
    """max|λ| / min|λ| of P^½HP^½, which has the eigenvalues of QHQᵀ, for each of the stack."""
    k, n, _ = hessian.shape
    basis = torch.eye(n, dtype=hessian.dtype).repeat(1, k)
    columns = Blocks(n, group).apply(q, basis).reshape(n, k, n)
    matrix = columns.permute(1, 2, 0)
    return spread(matrix @ hessian @ matrix.mT)


def spread(hessian: Tensor) -> Tensor:
    """max|λ| / min|λ|, on the last two axes."""
    moduli: Tensor = torch.linalg.eigvalsh(hessian).abs()
    return moduli.amax(-1) / moduli.amin(-1)


# --- the report


class Row(NamedTuple):
    """A line of the table: how many numbers Q takes, and the condition number on each Hessian."""

    name: str
    floats: int
    conditions: list[float]


def rows(
    n: int = N, steps: int = STEPS, seed: int = 0, begin: Callable[[str], None] = lambda name: None
) -> Iterator[Row]:
    """Yield the rows of the table, "none" first; `begin` hears of each group before its fit."""
    stack = torch.stack(list(hessians(n, seed).values()))
    yield Row("none", 0, spread(stack).tolist())
    for name, group in groups(n).items():
        begin(name)
        q = fit(group, stack, steps, seed)
        one = group.init(n)
        yield Row(name, floats(one), condition(group, q, stack).tolist())


def floats(q: Point) -> int:
    """Count the coordinates of Q; the keys "ell…" only steer its step size."""
    return sum(floats(t) if isinstance(t, dict) else t.numel() for key, t in q.items() if not key.startswith("ell"))


def winners(table: Sequence[Row]) -> list[int]:
    """Return for each column the row with the fewest floats of those that are as good as the best."""
    best = [min(column) for column in zip(*(row.conditions for row in table), strict=True)]
    return [
        min(
            (i for i, row in enumerate(table) if row.conditions[j] <= AS_GOOD * least),
            key=lambda i: table[i].floats,
        )
        for j, least in enumerate(best)
    ]


def text(table: Sequence[Row], columns: Sequence[str]) -> str:
    """Return the table as aligned text; an asterisk marks the winner of each column."""
    marked = winners(table)
    width = max(len(row.name) for row in table)
    lines = [" ".join([f"{'group':{width}} floats", *(f"{name:>10}" for name in columns)])]
    lines.append("─" * len(lines[0]))
    for i, row in enumerate(table):
        cells = [f"{number(value):>9}{'*' if marked[j] == i else ' '}" for j, value in enumerate(row.conditions)]
        lines.append(" ".join([f"{row.name:{width}} {row.floats:6}", *cells]).rstrip())
    return "\n".join(lines)


def number(condition: float) -> str:
    """Return a condition number with the digits that matter."""
    return f"{condition:.2f}" if condition < 10 else f"{condition:.0f}"


def draw(table: Sequence[Row], problems: Mapping[str, Tensor], path: Path) -> None:
    """Save the table as a heat map of the logarithms, each Hessian above its column, the winners framed."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.colors import LogNorm
    from matplotlib.figure import Figure
    from matplotlib.patches import Rectangle

    figure = Figure(figsize=(9.6, 7.6))
    FigureCanvasAgg(figure)
    axes = figure.add_axes((0.255, 0.015, 0.735, 0.76))
    norm = LogNorm(1, SPREAD, clip=True)
    axes.imshow([row.conditions for row in table], cmap="YlGnBu", norm=norm, aspect="auto")
    for i, row in enumerate(table):
        for j, value in enumerate(row.conditions):
            ink = "white" if norm(value) > 0.55 else "black"
            axes.text(j, i, number(value), ha="center", va="center_baseline", color=ink, fontsize=10)
    for j, i in enumerate(winners(table)):
        axes.add_patch(Rectangle((j - 0.46, i - 0.44), 0.92, 0.88, fill=False, edgecolor="#d55e00", lw=2.5))
    for edge in range(1, max(len(table), len(problems))):
        axes.axhline(edge - 0.5, color="white", lw=1.5)
        axes.axvline(edge - 0.5, color="white", lw=1.5)
    axes.set(xlim=(-0.5, len(problems) - 0.5), ylim=(len(table) - 0.5, -0.5), xticks=[])
    axes.set_yticks(range(len(table)), [f"{row.name} {row.floats:5}" for row in table], family="monospace", fontsize=9)
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    axes.text(-0.008, 1.012, "group, floats", transform=axes.transAxes, ha="right", fontsize=9, color="0.35")
    for j, (name, h) in enumerate(problems.items()):
        picture = axes.inset_axes(((j + 0.09) / len(problems), 1.045, 0.82 / len(problems), 0.111))
        shades = h.abs().clamp_min(1e-9).log10().tolist()
        picture.imshow(shades, cmap="Greys", vmin=-2, vmax=1.5, aspect="auto")
        picture.set(xticks=[], yticks=[])
        picture.set_title(name, fontsize=10, pad=4)
        picture.spines[:].set_color("0.7")
    figure.text(0.012, 0.962, "Every structure has its group", fontsize=15, weight="bold")
    figure.text(
        0.012,
        0.932,
        "Condition number of $P^{1/2}HP^{1/2}$ after the fit; 1 is perfect. "
        "Framed: the fewest floats among those as good as the best.",
        fontsize=10,
        color="0.25",
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=100, pil_kwargs={"optimize": True})


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the table, save the picture."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    path = Path(given[0] if given else "out/demo.png")
    torch.set_num_threads(1)  # the matrices are small
    start, problems = time.perf_counter(), hessians(N)

    def begin(name: str) -> None:
        if sys.stderr.isatty():
            print(f"\r\033[Kfitting {name} …", end="", file=sys.stderr, flush=True)

    print(f"Condition number of P^½HP^½ for {N}×{N} Hessians, P = QᵀQ fitted in {STEPS} steps on each group.\n")
    table = list(rows(N, STEPS, begin=begin))
    if sys.stderr.isatty():
        print("\r\033[K", end="", file=sys.stderr, flush=True)
    print(text(table, list(problems)))
    print(f"\n* the fewest floats among those within a factor {AS_GOOD} of the column's best")
    try:
        draw(table, problems, path)
        print(f"picture: {path.resolve()}")
    except ImportError:
        print("for the picture: pip install 'psgd[plot]'")
    print(f"time: {time.perf_counter() - start:.0f} s")


if __name__ == "__main__":
    main()
