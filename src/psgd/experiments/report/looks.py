"""How a name looks, the same in all pictures of a chapter: colours that everybody can tell apart, then dashes."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from psgd.diagnostics.pictures import BLUE, GREEN, ORANGE
from psgd.experiments.show import Line, Plot, Points

COLOURS = (BLUE, ORANGE, GREEN, "#CC79A7", "#E69F00", "#882255", "#56B4E9", "#444444")  # of Okabe and Ito, and of Tol
DASHES: tuple[tuple[int, ...], ...] = ((), (2, 2), (8, 3, 2, 3), (14, 4), (8, 3, 2, 3, 2, 3), (14, 3, 4, 3))
REFERENCE = (6, 4)
MARKERS = ("circle", "square", "triangle", "diamond")
FEW = 12  # points of a line that are marked
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

    >>> [number(x) for x in (None, 3, 12000, 0.123456, 12345.6, 1.5e-7, 2.0e30, math.nan, math.inf, -0.5)]
    ['–', '3', '12,000', '0.1235', '12,350', '1.5e−7', '2e30', '–', '∞', '−0.5']
    """
    if value is None or value != value:
        return "–"
    if math.isinf(value):
        text = "∞" if value > 0 else "-∞"
    elif isinstance(value, int) or 1e4 <= abs(value) < 1e5:
        text = thousands(value if isinstance(value, int) else int(float(f"{value:.{digits}g}")))
    elif value == 0 or 1e-4 <= abs(value) < 1e4:
        text = f"{float(f'{value:.{digits}g}'):g}"
    else:
        mantissa, _, exponent = f"{value:.{digits - 1}e}".partition("e")
        text = f"{float(mantissa):g}e{int(exponent)}"
    return text.replace("-", "−")


def thousands(value: int) -> str:
    """Return a whole number, with commas if it is long."""
    return f"{value:,}" if abs(value) >= 10000 else str(value)


def spread(mean: float, deviation: float) -> tuple[str, str]:
    """Return a mean and its deviation, both with as many decimals as the deviation has two digits.

    >>> spread(2.71234, 0.267), spread(107.0, 7.0), spread(1.5e-9, 2e-10), spread(938.0, 0.0)
    (('2.71', '0.27'), ('107.0', '7.0'), ('1.5e−9', '2e−10'), ('938', '0'))
    """
    if not 1e-4 <= deviation < 1e4 or abs(mean) >= 1e5:
        return number(mean), number(deviation, 2)
    decimals = max(0, 1 - math.floor(math.log10(deviation)))
    return f"{mean:.{decimals}f}".replace("-", "−"), f"{deviation:.{decimals}f}"


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
