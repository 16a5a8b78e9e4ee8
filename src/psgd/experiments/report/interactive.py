"""Plots for a page, drawn by Bokeh in the browser."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from bokeh.core.properties import value
from bokeh.core.types import ID
from bokeh.embed import json_item
from bokeh.models import BoxZoomTool, HoverTool, PanTool, PlainText, Range1d, ResetTool, SaveTool, WheelZoomTool
from bokeh.plotting import figure
from bokeh.resources import Resources

from psgd.experiments.report.looks import FEW, GRID, INK, REFERENCE, SOFT, Look, finite, number
from psgd.experiments.report.shades import contour_shades, shades
from psgd.experiments.show import Contours, HeatMap, Line, Plot, Points

POINTS = 600  # of a line: more than there are pixels across
MUTED = 0.1  # what is left of a line while another is pointed at
FONT = "system-ui, sans-serif"


@dataclass(frozen=True)
class Entry:
    """A line of a legend, and the parts of the drawing that it stands for: a click hides them."""

    name: str
    look: Look
    mark: Line | Points
    parts: list[str]


@dataclass(frozen=True)
class Drawing:
    """What the browser draws, ready for JSON, and its legend."""

    item: Any
    legend: list[Entry]


def library() -> str:
    """Return Bokeh's JavaScript: its core alone."""
    return "\n".join(Resources(mode="inline", components=["bokeh"]).js_raw)


def draw(plot: Plot, looks: Mapping[str, Look], target: str) -> Drawing:
    """Draw a plot into the element with the id `target`.

    >>> plot = Plot("Loss", "step", "loss", [Line("sgd", [0, 1], [1.0, 0.1])])
    >>> [entry.name for entry in draw(plot, {"sgd": Look(SOFT, (), "circle")}, "here").legend]
    ['sgd']
    """
    fig = axes(plot)
    legend: dict[str, Entry] = {}
    for mark in plot.marks:
        if isinstance(mark, HeatMap):
            draw_heat(fig, mark)
        elif isinstance(mark, Contours):
            draw_contours(fig, mark)
        else:
            look = looks[mark.name]
            parts = draw_line(fig, plot, mark, look) if isinstance(mark, Line) else draw_points(fig, plot, mark, look)
            legend.setdefault(mark.name, Entry(mark.name, look, mark, [])).parts.extend(part.id for part in parts)
    named = [part for part in fig.renderers if part.name]
    if named:
        tips = [("", "$name"), (plot.x or "x", "@x{%.5g}"), (plot.y or "y", "@y{%.4g}")]
        printf: Any = {"@x": "printf", "@y": "printf"}
        fig.add_tools(HoverTool(renderers=named, tooltips=tips, formatters=printf, visible=False))
    return Drawing(json_item(fig, ID(target)), list(legend.values()))


def axes(plot: Plot) -> Any:
    """Return an empty drawing."""
    heat = next((mark for mark in plot.marks if isinstance(mark, HeatMap)), None)
    options: dict[str, Any] = {
        "x_axis_type": "log" if plot.x_log else "linear",
        "y_axis_type": "log" if plot.y_log else "linear",
    }
    if heat:
        options = {"x_range": list(heat.x), "y_range": list(heat.y)[::-1], "x_axis_location": "above"}
    tools = [] if heat else [PanTool(), BoxZoomTool(), WheelZoomTool(), SaveTool(), ResetTool()]
    # No tool is active at first, so that a finger on a plot scrolls the page.
    options |= {"active_drag": None, "active_scroll": None, "toolbar_location": None if heat else "above"}
    fig: Any = figure(sizing_mode="stretch_both", tools=tools, **options)
    fig.toolbar.logo = None
    fig.toolbar.autohide = True  # and out of the way on paper
    fig.outline_line_color = None
    fig.min_border_right = 12
    fig.xgrid.grid_line_color = fig.ygrid.grid_line_color = None if heat else GRID
    for axis, label in ((fig.xaxis[0], plot.x), (fig.yaxis[0], plot.y)):
        axis.axis_label = PlainText(text=label)
        axis.axis_label_text_font = axis.major_label_text_font = FONT
        axis.axis_label_text_font_style = "normal"
        axis.axis_label_text_font_size, axis.major_label_text_font_size = "14px", "12px"
        axis.axis_label_text_color, axis.major_label_text_color = INK, SOFT
        axis.axis_line_color = axis.major_tick_line_color = None if heat else SOFT
        axis.minor_tick_line_color = None
    if plot.y_max is not None:
        fig.y_range.end = plot.y_max
    if heat:
        fig.xaxis[0].major_label_orientation = 0.6
        fig.xaxis[0].major_label_text_color = fig.yaxis[0].major_label_text_color = INK
    return fig


def draw_line(fig: Any, plot: Plot, mark: Line, look: Look) -> list[Any]:
    """Draw a curve, with its band, and with markers if it has few points."""
    keep = thinned(mark.x, log=plot.x_log)
    columns = {"x": finite(mark.x, positive=plot.x_log)}
    for key in ("y", "low", "high"):
        if len(values := getattr(mark, key)):
            columns[key] = finite(values, positive=plot.y_log)
    data = {key: np.array(values)[keep] for key, values in columns.items()}
    parts: list[Any] = []
    if "low" in data and "high" in data:
        inside = {key: values[np.isfinite(data["low"] + data["high"] + data["x"])] for key, values in data.items()}
        parts.append(
            fig.varea("x", "low", "high", source=inside, color=look.colour, fill_alpha=0.15, muted_fill_alpha=0.02)
        )
    style = {"color": look.colour, "muted_alpha": MUTED, "name": mark.name, "source": data}
    dash = list(REFERENCE if mark.dashed else look.dash)
    parts.append(fig.line("x", "y", line_width=2, line_dash=dash, line_join="round", **style))
    if np.isfinite(data["y"]).sum() <= (1 if mark.dashed else FEW):
        parts.append(fig.scatter("x", "y", size=6, marker=look.marker, **style))
    return parts


def draw_points(fig: Any, plot: Plot, mark: Points, look: Look) -> list[Any]:
    """Draw points."""
    data = {"x": finite(mark.x, positive=plot.x_log), "y": finite(mark.y, positive=plot.y_log)}
    return [
        fig.scatter(
            "x",
            "y",
            source=data,
            size=9,
            marker=look.marker,
            color=look.colour,
            fill_alpha=0.7,
            muted_alpha=MUTED,
            name=mark.name,
        )
    ]


def draw_heat(fig: Any, mark: HeatMap) -> None:
    """Draw a heat map with its numbers."""
    cells = [
        (x, y, number(value, 2), *colours)
        for y, row, line in zip(mark.y, mark.values, shades(mark), strict=True)
        for x, value, colours in zip(mark.x, row, line, strict=True)
    ]
    data = dict(zip(("x", "y", "text", "fill", "ink"), map(list, zip(*cells, strict=True)), strict=False))
    fig.rect("x", "y", 1, 1, source=data, fill_color="fill", line_color="#ffffff", line_width=2)
    font = {"text_font": value(FONT), "text_font_size": "12px", "text_align": "center", "text_baseline": "middle"}
    fig.text("x", "y", "text", source=data, text_color="ink", **font)
    fig.add_tools(HoverTool(tooltips=[("", "@y, @x"), ("", "@text")], renderers=fig.renderers[:1], visible=False))


def draw_contours(fig: Any, mark: Contours) -> None:
    """Draw level lines, and pale colours between them."""
    drawn = fig.contour(
        np.array(mark.x), np.array(mark.y), np.array(mark.values), list(mark.levels),
        fill_color=contour_shades(mark.levels), line_color="#ffffff", line_width=1,
    )  # fmt: skip
    drawn.level = "underlay"
    # What leaves the grid is not worth a larger picture.
    fig.x_range, fig.y_range = (Range1d(start=min(t), end=max(t)) for t in (mark.x, mark.y))
    fig.xgrid.grid_line_color = fig.ygrid.grid_line_color = None


def thinned(x: Sequence[float], *, log: bool) -> np.ndarray[Any, Any]:
    """Return which points of a long curve to draw: evenly spread on the axis, the first and the last included.

    >>> len(thinned(range(10_000), log=False)), len(thinned(range(10), log=True))
    (600, 10)
    """
    n = len(x)
    if n <= POINTS:
        return np.arange(n)
    if not log:
        return np.linspace(0, n - 1, POINTS).round().astype(int)
    return np.unique(np.geomspace(1, n, POINTS).round().astype(int) - 1)
