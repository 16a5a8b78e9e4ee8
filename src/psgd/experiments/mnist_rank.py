"""LeNet5 on MNIST: what the rank of LRA is worth.

The paper's figure has 50 runs for each of r = 0, 1, 2, 5, 10, with settings as in the table (see `mnist`). Read off the
earlier version of the figure: medians of the best test error over epochs of 0.82, 0.81, 0.795, 0.78 and 0.78 %.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from psgd.experiments.experiment import Preset, Result
from psgd.experiments.mnist import COSTS, Config, best, by_rank, costs, curves, last, run
from psgd.experiments.show import Plot, Points, Table

__all__ = ["TITLE", "Config", "cells", "plots", "remarks", "run", "seeds", "tables"]

TITLE = "MNIST with LeNet5: the rank of LRA"

PAPER = {0: 0.82, 1: 0.81, 2: 0.795, 5: 0.78, 10: 0.78}
"""Median test errors in percent, read off the figure of the NeurIPS 2023 submission."""


def cells(preset: Preset) -> list[Config]:
    """Return one for each rank."""
    if preset == "quick":
        return [Config(rank=r, epochs=2, examples=256, source="digits") for r in (0, 2)]
    return [Config(rank=r) for r in PAPER]


def seeds(preset: Preset) -> range:
    """Return the paper's fifty, or fewer."""
    return range({"quick": 1, "cpu": 2, "paper": 50}[preset])


def medians(results: Sequence[Result]) -> dict[int, float]:
    """Return the median of the best errors, by rank."""
    grouped = by_rank(results).values()
    return {f[0].config.rank: statistics.median(min(r.series("test_error")) for r in f) for f in grouped}


def tables(results: Sequence[Result]) -> list[Table]:
    """Return the errors by rank."""
    found = medians(results)
    rows = [
        (name, found[rank], best(runs), last(runs), PAPER.get(rank), *costs(runs))
        for name, runs in by_rank(results).items()
        for rank in [runs[0].config.rank]
    ]
    columns = ("rank", "median of the best, %", "best error, %", "last error, %", "paper, %", *COSTS)
    return [Table("Test error by rank", columns, rows, "The paper's are medians, read off a figure.")]


def plots(results: Sequence[Result]) -> list[Plot]:
    """Return the errors by rank, and the curves."""
    grouped = by_rank(results)
    if not grouped:
        return []
    runs = [(r.config.rank, min(r.series("test_error"))) for found in grouped.values() for r in found]
    marks = [
        Points("one run", [x for x, _ in runs], [y for _, y in runs]),
        Points("median", list(medians(results)), list(medians(results).values())),
        Points("the paper's median", list(PAPER), list(PAPER.values())),
    ]
    errors = Plot("Test error by rank", "rank of LRA", "best test error over epochs, %", marks)
    return [errors, *curves(grouped, "LeNet5 on MNIST")]


def remarks(results: Sequence[Result]) -> str:
    """Say whether a higher rank is better."""
    found = medians(results)
    if len(found) < 2:
        return ""
    low, high = min(found), max(found)
    trend = (
        "as in the paper, a higher rank is better" if found[high] < found[low] else "a higher rank is no better here"
    )
    ranges = [max(errors) - min(errors) for errors in by_rank_errors(results)]
    return (
        f"The median goes from {found[low]:.2f} % at rank {low} to {found[high]:.2f} % at rank {high}: {trend}. "
        f"But the seed alone moves the error of a rank by up to {max(ranges):.2f}, and the paper's whole effect is "
        f"{PAPER[0] - PAPER[10]:.2f}, of 50 runs for each rank: a few seeds cannot decide it."
    )


def by_rank_errors(results: Sequence[Result]) -> list[list[float]]:
    """Return the best errors of each rank's runs."""
    return [[min(r.series("test_error")) for r in found] for found in by_rank(results).values()]
