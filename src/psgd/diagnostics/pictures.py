"""Pictures of curvature, one function each: matplotlib figures in colours that everybody can tell apart."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from psgd.diagnostics.spectral import Density
from psgd.group import Group, Point

if TYPE_CHECKING:
    from matplotlib.figure import Figure

BLUE, ORANGE, GREEN, GREY = "#0072B2", "#D55E00", "#009E73", "#666666"  # of Okabe and Ito

_STYLE: dict[Any, Any] = {
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlesize": 9,
    "axes.titlelocation": "left",
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#e6e6e6",
    "grid.linewidth": 0.6,
    "legend.frameon": False,
    "lines.linewidth": 1.6,
}


@contextmanager
def axes_in_style(rows: int, columns: int, size: tuple[float, float], **options: Any) -> Iterator[tuple[Figure, Any]]:
    """Yield a figure and its axes, to be drawn on in the style of all pictures here."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    with mpl.rc_context(_STYLE):
        figure = Figure(figsize=size, dpi=150, layout="constrained")
        yield figure, figure.subplots(rows, columns, **options)


def spectra(before: Density, after: Density) -> Figure:
    """Show the spectra of H and of P^½HP^½ on log axes: how many eigenvalues of each size and sign.

    >>> exact = Density(3, (torch.tensor([1.0, 10.0, -2.0]),), (torch.full((3,), 1 / 3),))
    >>> spectra(exact, exact).axes[0].get_xscale()
    'log'
    """
    ends = [t.abs() for density in (before, after) for t in density.values]
    most = max(float(t.amax()) for t in ends)
    least = max(min(float(t.amin()) for t in ends), most * 1e-7)  # nearer to zero is rounding
    width = max(0.03, math.log10(most / least) / 80)  # of a Gaussian, in decades
    grid = torch.arange(math.log10(least) - 5 * width, math.log10(most) + 5 * width, width / 4, dtype=torch.float64)
    with axes_in_style(2, 1, (5.2, 4.2), sharex=True, sharey=True) as (figure, axes):
        highest, titles = 1.0, (r"$H$", r"$P^{1/2}HP^{1/2}$")
        for ax, density, title in zip(axes, (before, after), titles, strict=True):
            for sign, colour, name in ((1, BLUE, r"$\lambda>0$"), (-1, ORANGE, r"$\lambda<0$")):
                count = density.n * _log_density(density, sign, grid, width, least)
                highest = max(highest, float(count.amax()))
                ax.fill_between(10**grid, count, color=colour, alpha=0.2, linewidth=0)
                ax.plot(10**grid, count, color=colour, linestyle="-" if sign > 0 else "--", label=name)
            ax.set(title=title, xscale="log", yscale="log", ylabel="eigenvalues per decade")
        axes[0].set_ylim(0.5, 4 * highest)
        axes[1].axvline(1, color=GREY, linewidth=1, linestyle=":")
        axes[1].set_xlabel(r"$|\lambda|$")
        axes[0].legend(loc="upper left", ncols=2)
    return figure


def _log_density(density: Density, sign: int, grid: Tensor, width: float, least: float) -> Tensor:
    """Return the density of log₁₀|λ| of one sign."""
    values, weights = torch.cat(density.values).double(), torch.cat(density.weights).double() / len(density.weights)
    mine = values * sign > 0
    logs = values[mine].abs().clamp_min(least).log10()
    return Density(density.n, (logs,), (weights[mine],)).smooth(grid, width)


def eigenvalue_dynamics(rows: Sequence[Mapping[str, float]], n: int | None = None) -> Figure:
    """Show the extreme eigenvalues of P over training, from logged `opt.diagnostics()` with their "step".

    With the number n of parameters, also their geometric mean, det(P)^(1/n).

    >>> rows = [{"step": t, "smallest_p": 1.0, "largest_p": t + 1.0} for t in range(3)]
    >>> eigenvalue_dynamics(rows).axes[0].get_yscale()
    'log'
    """
    if not rows:
        raise ValueError("eigenvalue_dynamics needs at least one row, got none")
    steps = [row["step"] for row in rows]
    low, high = ([row[key] for row in rows] for key in ("smallest_p", "largest_p"))
    with axes_in_style(1, 1, (5.2, 3.0)) as (figure, ax):
        ax.fill_between(steps, low, high, color=GREY, alpha=0.12, linewidth=0)
        curves = [(high, BLUE, r"$\lambda_{\max}(P)$"), (low, ORANGE, r"$\lambda_{\min}(P)$")]
        if n is not None:
            means = [math.exp(row["log_det_p"] / n) for row in rows]
            curves.insert(1, (means, GREEN, r"$\det(P)^{1/n}$"))
        for values, colour, name in curves:
            ax.plot(steps, values, color=colour)
            ax.annotate(name, (steps[-1], values[-1]), (5, 0), textcoords="offset points", va="center", color=colour)
        ax.set(yscale="log", xlabel="step", ylabel="eigenvalues of P")
        ax.margins(x=0)
    return figure


def flatness_pairs(
    first: Sequence[tuple[float, float, float]],
    second: Sequence[tuple[float, float, float]],
    names: tuple[str, str] = ("Adam", "PSGD"),
) -> Figure:
    """Show pairs of minima from equal starts, joined by arrows: the paper's cube, seen from two of its sides.

    Args:
        first: (training loss, ½ log det |H|, test error) of the minima that the first optimizer found.
        second: those of the second, in the same order.
        names: of the two.

    >>> len(flatness_pairs([(1.0, 5.0, 0.02)], [(0.5, 4.0, 0.01)]).axes)
    2
    """
    if len(first) != len(second) or not first:
        raise ValueError(f"flatness_pairs needs as many of the first as of the second, got {len(first)}, {len(second)}")
    with axes_in_style(1, 2, (6.6, 3.2), sharey=True) as (figure, axes):
        for ax, i, label in zip(axes, (0, 2), ("training loss", "test error"), strict=True):
            for a, b in zip(first, second, strict=True):
                arrow = {"arrowstyle": "-|>", "color": GREY, "alpha": 0.6, "linewidth": 0.9, "shrinkA": 3, "shrinkB": 3}
                ax.annotate("", (b[i], b[1]), (a[i], a[1]), arrowprops=arrow)
            for points, colour, marker, name in ((first, ORANGE, "s", names[0]), (second, BLUE, "o", names[1])):
                ax.scatter([p[i] for p in points], [p[1] for p in points], 26, color=colour, marker=marker, label=name)
            ax.set_xlabel(label)
        axes[0].set_ylabel(r"$\frac{1}{2}\log\det|H|\approx-\frac{1}{2}\log\det P$  (lower is flatter)")
        axes[1].legend(loc="best")
        figure.set_layout_engine("constrained", wspace=0.06)
    return figure


def directions(
    distances: Tensor, losses: Mapping[str, Tensor], curvatures: Mapping[str, float] | None = None
) -> Figure:
    """Show the loss along some lines through the parameters, e.g. the sharpest and the flattest (`loss_along`).

    With curvatures eᵀP⁻¹e, also what the fitted P expects: a parabola with the slope of the loss at 0.

    >>> t = torch.linspace(-1, 1, 5)
    >>> len(directions(t, {"sharpest": t**2}, {"sharpest": 2.0}).axes[0].lines)
    3
    """
    with axes_in_style(1, 1, (5.2, 3.2)) as (figure, ax):
        for (name, values), colour in zip(losses.items(), (ORANGE, BLUE, GREEN, GREY) * len(losses), strict=False):
            ax.plot(distances, values, color=colour, label=name)
            if curvatures and name in curvatures:
                near = int(distances.abs().argmin())
                slope = torch.gradient(values, spacing=(distances.to(values),))[0][near]
                t = (distances - distances[near]).to(values)
                expected = values[near] + slope * t + curvatures[name] / 2 * t**2
                ax.plot(distances, expected, color=colour, linestyle=":", label=f"{name}, expected from P")
        top = max(float(v.amax()) for v in losses.values())
        bottom = min(float(v.amin()) for v in losses.values())
        ax.set_ylim(bottom - 0.05 * (top - bottom), top + 0.05 * (top - bottom))
        ax.axvline(0, color=GREY, linewidth=0.8)
        ax.set(xlabel="distance from the parameters", ylabel="loss")
        ax.legend(loc="upper center", frameon=True, edgecolor="none", framealpha=1)
    return figure


def matrices(group: Group, q: Point, n: int) -> Figure:
    """Show a small Q and its P: where they are not zero, and how large.

    >>> from psgd import XMat
    >>> len(matrices(XMat(), XMat().init(4), 4).axes)
    6
    """
    from matplotlib.colors import ListedColormap

    matrix = group.matrix(q, n).detach().double().cpu()
    with axes_in_style(2, 2, (5.4, 5.0)) as (figure, axes):
        for row, name, m in zip(axes, ("Q", "P=Q^TQ"), (matrix, matrix.mT @ matrix), strict=True):
            limit = float(m.abs().amax())
            there = m.abs() > 1e-7 * limit
            row[0].imshow(there.numpy(), cmap=ListedColormap(["white", GREY]), vmin=0, vmax=1, interpolation="nearest")
            row[0].set_title(f"${name}$: {int(there.sum())} of {n * n} entries")
            image = row[1].imshow(m.numpy(), cmap="RdBu_r", vmin=-limit, vmax=limit, interpolation="nearest")
            row[1].set_title(f"${name}$: values")
            figure.colorbar(image, ax=row[1], shrink=0.85)
            for ax in row:
                ax.grid(visible=False)
                ax.set(xticks=[], yticks=[])
                ax.spines[:].set(visible=True, color=GREY, linewidth=0.8)
    return figure
