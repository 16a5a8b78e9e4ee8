"""How a name looks, the same in all pictures of a page: colours that everybody can tell apart, then dashes."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from psgd.diagnostics.pictures import BLUE, GREEN, ORANGE
from psgd.experiments.show import Line, Plot, Points

COLOURS = (BLUE, ORANGE, GREEN, "#CC79A7", "#E69F00", "#882255", "#56B4E9", "#444444")  # of Okabe and Ito, and of Tol
DASHES: tuple[tuple[int, ...], ...] = ((), (2, 2), (8, 3, 2, 3), (8, 3, 2, 3, 2, 3))
REFERENCE = (6, 4)
MARKERS = ("circle", "square", "triangle", "diamond")
INK, SOFT, GRID = "#1a1a1a", "#666666", "#e6e6e6"


@dataclass(frozen=True)
class Look:
    """Of a line or of points."""

    colour: str
    dash: tuple[int, ...]
    """Lengths of strokes and gaps; none for a solid line."""
    marker: str


def looks(plots: Iterable[Plot]) -> dict[str, Look]:
    """Return how each name looks; those in most plots get the looks that are easiest to tell apart.

    >>> a, b = (Line(name, [0], [0]) for name in ("a", "b"))
    >>> looks([Plot("", "", "", [a, b]), Plot("", "", "", [b])])["b"].colour == BLUE
    True
    """
    counts = Counter(name for plot in plots for name in dict.fromkeys(names(plot)))
    return {name: look(i) for i, (name, _) in enumerate(counts.most_common())}


def names(plot: Plot) -> list[str]:
    """Return the names in a plot."""
    return [mark.name for mark in plot.marks if isinstance(mark, (Line, Points))]


def look(i: int) -> Look:
    """Return the i-th."""
    round_, colour = divmod(i, len(COLOURS))
    return Look(COLOURS[colour], DASHES[round_ % len(DASHES)], MARKERS[(i + round_) % len(MARKERS)])


def number(value: Any, digits: int = 4) -> str:
    """Return a number as short text.

    >>> [number(x) for x in (None, 3, 12000, 0.123456, 1.5e-7, 2.0e30, math.nan, math.inf, -0.5)]
    ['–', '3', '12,000', '0.1235', '1.5e−7', '2e30', '–', '∞', '−0.5']
    """
    if value is None or value != value:
        return "–"
    if isinstance(value, int):
        text = f"{value:,}" if abs(value) >= 10000 else str(value)
    elif math.isinf(value):
        text = "∞" if value > 0 else "-∞"
    else:
        mantissa, _, exponent = f"{value:.{digits}g}".partition("e")
        text = f"{mantissa}e{int(exponent)}" if exponent else mantissa
    return text.replace("-", "−")


def finite(values: Sequence[Any], *, positive: bool = False) -> list[float]:
    """Return numbers with NaN, which is drawn as a gap, for what cannot be drawn: on a log axis, what is not positive.

    >>> finite([1, None, math.inf, -2.0], positive=True)
    [1.0, nan, nan, nan]
    """
    return [math.nan if v is None or not math.isfinite(v) or (positive and v <= 0) else float(v) for v in values]


def drawable(plot: Plot) -> bool:
    """Return whether there is anything to see."""
    for mark in plot.marks:
        if isinstance(mark, (Line, Points)):
            xs, ys = finite(mark.x, positive=plot.x_log), finite(mark.y, positive=plot.y_log)
            if any(math.isfinite(x + y) for x, y in zip(xs, ys, strict=True)):
                return True
        elif any(len(row) for row in mark.values):
            return True
    return False
