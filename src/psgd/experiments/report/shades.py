"""Colours for numbers: pale for small, dark for large, and an ink that can be read on them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from psgd.experiments.report.looks import INK
from psgd.experiments.show import HeatMap

NOTHING = "#f0f0f0"


def shades(heat: HeatMap) -> list[list[tuple[str, str]]]:
    """Return the colour of each cell, and that of its text.

    >>> shades(HeatMap(["a", "b"], ["c"], [[1.0, None]]))[0][1]
    ('#f0f0f0', '#1a1a1a')
    """
    there = [level(v, heat.log) for row in heat.values for v in row]
    drawn = [v for v in there if v is not None]
    low, high = min(drawn, default=0.0), max(drawn, default=0.0)
    return [[shade(level(v, heat.log), low, high) for v in row] for row in heat.values]


def level(value: Any, log: bool) -> float | None:
    """Return where a value stands on the scale, None if nowhere."""
    if value is None or not math.isfinite(value) or (log and value <= 0):
        return None
    return math.log(value) if log else float(value)


def shade(value: float | None, low: float, high: float) -> tuple[str, str]:
    """Return the colour of a number between two others, and that of its text."""
    if value is None:
        return NOTHING, INK
    from matplotlib import colormaps
    from matplotlib.colors import to_hex

    place = (value - low) / (high - low) if high > low else 0.0
    red, green, blue, _ = rgb = colormaps["YlGnBu"](0.05 + 0.9 * place)
    light = 0.299 * red + 0.587 * green + 0.114 * blue > 0.55
    return to_hex(rgb), INK if light else "#ffffff"


def contour_shades(levels: Sequence[float]) -> list[str]:
    """Return a pale colour for each space between levels, from low to high."""
    from matplotlib import colormaps
    from matplotlib.colors import to_hex

    spaces = max(len(levels) - 1, 1)
    return [to_hex(colormaps["Greys"](0.04 + 0.26 * i / spaces)) for i in range(spaces)]
