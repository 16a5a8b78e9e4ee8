"""Delayed XOR: how the rank of PSGD's low-rank correction decides over success.

The paper has success rates of 0.1, 0.4, 0.8, 1 and 1 for the ranks 0 (a diagonal preconditioner), 1, 2, 5 and 10, of
ten runs of at most 100,000 iterations with the RNN; it does not say the length of the sequences.
"""

from __future__ import annotations

from collections.abc import Sequence

from psgd.experiments.experiment import Preset, Result
from psgd.experiments.show import Plot, Points, Table
from psgd.experiments.xor import Config, costs, grouped, lines, rate, run, solved

__all__ = ["TITLE", "Config", "cells", "plots", "remarks", "run", "seeds", "tables"]

TITLE = "Delayed XOR: the rank"

PAPER = {0: 0.1, 1: 0.4, 2: 0.8, 5: 1.0, 10: 1.0}
"""Success rates by rank."""

LENGTH = 32
"""Where the iterations of the preset `cpu` may show the trend."""


def cells(preset: Preset) -> list[Config]:
    """Return one for each rank."""
    if preset == "quick":
        return [Config(rank=rank, length=4, iterations=20, hidden=8, batch=32) for rank in PAPER]
    return [Config(rank=rank, length=LENGTH, iterations=15_000 if preset == "cpu" else 100_000) for rank in PAPER]


def seeds(preset: Preset) -> range:
    """Return the paper's ten, or fewer."""
    return range({"quick": 1, "cpu": 3, "paper": 10}[preset])


def tables(results: Sequence[Result]) -> list[Table]:
    """Return success rates beside the paper's, and what success took."""
    by_rank = grouped(results, "rank")
    rows = [(rank, rate(found), PAPER.get(rank)) for (rank,), found in by_rank.items()]
    return [Table("Success by rank", ("rank", "success", "paper"), rows), costs(by_rank)] if by_rank else []


def plots(results: Sequence[Result]) -> list[Plot]:
    """Return the success rate by rank, and the loss by iteration."""
    by_rank = {rank: found for (rank,), found in grouped(results, "rank").items()}
    if not by_rank:
        return []
    rates = [sum(map(solved, found)) / len(found) for found in by_rank.values()]
    marks = [Points("ours", list(by_rank), rates), Points("paper", list(PAPER), list(PAPER.values()))]
    return [
        Plot("Success by rank", "rank", "success rate", marks),
        Plot("Loss by rank", "iteration", "loss, mean of 100 iterations", lines(results, "rank"), y_log=True),
    ]


def remarks(results: Sequence[Result]) -> str:
    """Say whether success grows with the rank."""
    by_rank = {rank: found for (rank,), found in sorted(grouped(results, "rank").items())}
    if not by_rank:
        return ""
    config = next(iter(by_rank.values()))[0].config
    counts = [sum(map(solved, found)) / len(found) for found in by_rank.values()]
    grows, few = counts == sorted(counts) and counts[0] < counts[-1], max(map(len, by_rank.values()))
    return (
        f"- Success {'grows' if grows else 'does not grow'} with the rank{', as in the paper' if grows else ''}: "
        + ", ".join(f"{rate(found)} with rank {rank}" for rank, found in by_rank.items())
        + f". Of so few runs ({few} with a rank; the paper has ten), each decides much."
        + f"\n- The paper does not say its length; ours is {config.length}, with {config.iterations:,} iterations."
    )
