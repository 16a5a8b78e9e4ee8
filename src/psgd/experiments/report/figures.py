"""Plots as files, drawn by matplotlib in the same looks as on the page."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from psgd.diagnostics.pictures import axes_in_style
from psgd.experiments.report.looks import FEW, INK, REFERENCE, Look, finite, number
from psgd.experiments.report.looks import looks as looks_of
from psgd.experiments.report.shades import contour_shades, shades
from psgd.experiments.show import Contours, HeatMap, Line, Plot, Points

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MARKERS = {"circle": "o", "square": "s", "triangle": "^", "diamond": "D"}
MANY = 6  # names of a legend that goes outside


def draw(plot: Plot, looks: Mapping[str, Look] | None = None) -> Figure:
    """Draw a plot.

    >>> draw(Plot("Loss", "step", "loss", [Line("sgd", [0, 1], [1.0, 0.1])], y_log=True)).axes[0].get_yscale()
    'log'
    """
    import matplotlib as mpl

    looks = looks or looks_of([plot])
    heat = next((mark for mark in plot.marks if isinstance(mark, HeatMap)), None)
    size = (1.8 + 0.62 * len(heat.x), 1.2 + 0.34 * len(heat.y)) if heat else (6.4, 3.8)
    # a name may hold a dollar
    with mpl.rc_context({"text.parse_math": False}), axes_in_style(1, 1, size) as (figure, ax):
        ax.set(title=plot.title, xlabel=plot.x, ylabel=plot.y)
        for mark in plot.marks:
            if isinstance(mark, HeatMap):
                draw_heat(ax, mark)
            elif isinstance(mark, Contours):
                draw_contours(ax, mark)
            elif isinstance(mark, Line):
                draw_line(ax, plot, mark, looks[mark.name])
            else:
                draw_points(ax, plot, mark, looks[mark.name])
        if not heat:
            ax.set(xscale="log" if plot.x_log else "linear", yscale="log" if plot.y_log else "linear")
            if plot.y_max is not None:
                ax.set_ylim(top=plot.y_max)
            for axis, log in ((ax.xaxis, plot.x_log), (ax.yaxis, plot.y_log)):
                if log:
                    label_short(axis)
        legend(figure, ax)
    return figure


def label_short(axis: Any) -> None:
    """Label a logarithmic axis of less than two decades by 1, 2 and 5, in plain numbers; matplotlib's crowd it."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    low, high = axis.get_view_interval()
    if not 0 < low < high < 100 * low:
        return
    axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_formatter(NullFormatter())


def save(plot: Plot, path: Path, looks: Mapping[str, Look] | None = None) -> Path:
    """Draw a plot into a file, whose suffix says of which kind: .png or .svg."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draw(plot, looks).savefig(path, metadata={"Software": None} if path.suffix == ".png" else {"Date": None})
    return path


def legend(figure: Figure, ax: Any) -> None:
    """Name what there is, each name once; outside, if there are many."""
    handles, labels = ax.get_legend_handles_labels()
    entries = dict(zip(labels, handles, strict=True))
    if len(entries) > MANY:
        columns = math.ceil(len(entries) / 22)
        figure.legend(entries.values(), entries, loc="outside right upper", ncols=columns)
        figure.set_figwidth(figure.get_figwidth() + 1.3 * columns)
    elif entries:
        ax.legend(entries.values(), entries, frameon=True, framealpha=0.85, edgecolor="none")


def draw_line(ax: Any, plot: Plot, mark: Line, look: Look) -> None:
    """Draw a curve, with its band, and with markers if it has few points."""
    x, y = finite(mark.x, positive=plot.x_log), finite(mark.y, positive=plot.y_log)
    if len(mark.low) and len(mark.high):
        low, high = (finite(values, positive=plot.y_log) for values in (mark.low, mark.high))
        ax.fill_between(x, low, high, color=look.colour, alpha=0.15, linewidth=0)
    dash = REFERENCE if mark.dashed else look.dash
    style = (0, [0.6 * length for length in dash]) if dash else "-"
    few = sum(map(math.isfinite, y)) <= (1 if mark.dashed else FEW)
    marker = MARKERS[look.marker] if few else None
    ax.plot(x, y, color=look.colour, linestyle=style, marker=marker, markersize=4, label=mark.name)


def draw_points(ax: Any, plot: Plot, mark: Points, look: Look) -> None:
    """Draw points."""
    x, y = finite(mark.x, positive=plot.x_log), finite(mark.y, positive=plot.y_log)
    ax.scatter(x, y, 26, color=look.colour, alpha=0.7, marker=MARKERS[look.marker], label=mark.name)


def draw_heat(ax: Any, mark: HeatMap) -> None:
    """Draw a heat map with its numbers."""
    from matplotlib.colors import to_rgb

    colours = shades(mark)
    ax.imshow([[to_rgb(fill) for fill, _ in row] for row in colours], aspect="auto", interpolation="nearest")
    for i, (row, inks) in enumerate(zip(mark.values, colours, strict=True)):
        for j, (value, (_, ink)) in enumerate(zip(row, inks, strict=True)):
            ax.text(j, i, number(value, 2), color=ink, ha="center", va="center", fontsize=8)
    ax.set_xticks(range(len(mark.x)), mark.x, rotation=30, ha="left", rotation_mode="anchor", color=INK)
    ax.set_yticks(range(len(mark.y)), mark.y, color=INK)
    ax.tick_params(length=0, top=True, bottom=False, labeltop=True, labelbottom=False)
    ax.xaxis.set_label_position("top")
    ax.grid(visible=False)
    ax.spines[:].set_visible(False)
    for i in range(1, len(mark.y)):
        ax.axhline(i - 0.5, color="white", linewidth=1.5)
    for j in range(1, len(mark.x)):
        ax.axvline(j - 0.5, color="white", linewidth=1.5)


def draw_contours(ax: Any, mark: Contours) -> None:
    """Draw level lines, and pale colours between them."""
    if len(mark.levels) > 1:
        ax.contourf(mark.x, mark.y, mark.values, mark.levels, colors=contour_shades(mark.levels), zorder=0)
    ax.contour(mark.x, mark.y, mark.values, mark.levels, colors="white", linewidths=0.7, zorder=0.5)
    ax.set(xlim=(min(mark.x), max(mark.x)), ylim=(min(mark.y), max(mark.y)))  # whatever leaves the grid
    ax.grid(visible=False)
