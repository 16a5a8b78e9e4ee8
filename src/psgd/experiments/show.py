"""What an experiment shows: tables and plots as plain data, drawn by the report (HTML) and by matplotlib (PNG)."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Table:
    """Rows of text, numbers or None (shown as a dash) under headings; `Spread` is shown as mean ± deviation."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[Any]]
    note: str = ""


@dataclass(frozen=True)
class Spread:
    """A number over seeds."""

    mean: float
    deviation: float
    count: int

    def __str__(self) -> str:
        if self.count == 1:
            return f"{self.mean:.4g}"
        return f"{self.mean:.4g} ± {self.deviation:.2g} ({self.count})"


def spread(values: Sequence[float | None]) -> Spread | None:
    """Return mean, standard deviation and count of the values that are there; None if there are none.

    >>> str(spread([1.0, 2.0, None, 3.0]))
    '2 ± 1 (3)'
    """
    there = [float(v) for v in values if v is not None and math.isfinite(v)]
    if not there:
        return None
    return Spread(statistics.fmean(there), statistics.stdev(there) if len(there) > 1 else 0.0, len(there))


@dataclass(frozen=True)
class Line:
    """A named curve, with a band if low and high are given, or dashed (for a reference)."""

    name: str
    x: Sequence[float]
    y: Sequence[float]
    low: Sequence[float] = ()
    high: Sequence[float] = ()
    dashed: bool = False


@dataclass(frozen=True)
class Points:
    """Named points."""

    name: str
    x: Sequence[float]
    y: Sequence[float]


@dataclass(frozen=True)
class HeatMap:
    """Numbers on a grid with labels: one row of `values` for each of `y`, shown in the cells."""

    x: Sequence[str]
    y: Sequence[str]
    values: Sequence[Sequence[float]]
    log: bool = False


@dataclass(frozen=True)
class Contours:
    """Level lines of a function on a regular grid, behind trajectories."""

    x: Sequence[float]
    y: Sequence[float]
    values: Sequence[Sequence[float]]
    levels: Sequence[float]


@dataclass(frozen=True)
class Plot:
    """A picture: marks on one pair of axes."""

    title: str
    x: str
    y: str
    marks: Sequence[Line | Points | HeatMap | Contours]
    x_log: bool = False
    y_log: bool = False
    y_max: float | None = None
    """Where the picture ends; what is above it leaves it."""
    note: str = field(default="")


def band(name: str, runs: Sequence[tuple[Sequence[float], Sequence[float]]], *, log: bool = False) -> Line:
    """Return the median curve of several (x, y) with the range over them; where one ends early, the others go on.

    >>> line = band("sgd", [([0, 1], [1.0, 2.0]), ([0, 1], [3.0, 4.0]), ([0], [5.0])])
    >>> line.y, line.low, line.high
    ([3.0, 3.0], [1.0, 2.0], [5.0, 4.0])
    """
    at: dict[float, list[float]] = {}
    for xs, ys in runs:
        for x, y in zip(xs, ys, strict=True):
            if y is not None and math.isfinite(y) and not (log and y <= 0):
                at.setdefault(x, []).append(y)
    grid = sorted(at)
    middle = [statistics.median(at[t]) for t in grid]
    return Line(name, grid, middle, [min(at[t]) for t in grid], [max(at[t]) for t in grid])
