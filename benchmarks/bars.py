"""What issue 7 asks for, beside what was measured."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from iterations import title
from measurement import Measurement
from workloads import GPT_, LENET5

SIZE = "Step cost, n = 1e7"
NEWTON = ("hessian", "finite difference")


@dataclass(frozen=True)
class Bar:
    """A bound on a cell of a table."""

    table: str
    row: str
    column: str
    at_most: float
    reference: str
    """What it was before, as the issue says."""
    floor: str = "–"
    """What the traffic of memory alone would cost."""


def iteration(problem: str, row: str, at_most: float, reference: str) -> list[Bar]:
    """Return the bars of whole iterations: one for each source of curvature."""
    return [Bar(problem, f"{row}, {how}", "p = 0.1", at_most, reference) for how in (*NEWTON, "whitening")]


BARS = (
    Bar(SIZE, "psgd XMat", "fit", 45, "250 copies", "about 5"),
    Bar(SIZE, "psgd XMat, compiled", "fit", 25, "250 copies", "about 5"),
    Bar(SIZE, "psgd XMat", "precondition", 20, "83 copies", "about 2"),
    Bar(SIZE, "psgd XMat, compiled", "precondition", 10, "83 copies", "about 2"),
    Bar(SIZE, "psgd lra(10)", "fit", 150, "1,100 copies", "about 40 to 70"),
    Bar(SIZE, "psgd lra(10)", "precondition", 30, "72 copies", "about 15 to 20"),
    *iteration(title(LENET5), "psgd XMat", 1.10, "1.13 of SGD"),
    *iteration(title(LENET5), "psgd lra(10)", 1.20, "1.30 of SGD"),
    *iteration(title(GPT_), "psgd XMat", 1.15, "1.26 of SGD"),
    *iteration(title(GPT_), "psgd lra(10)", 1.30, "above 2 of SGD"),
    *iteration(title(GPT_), "psgd kron", 1.35, "1.6 of SGD"),
    *iteration(title(GPT_), "psgd kron along short axes", 1.35, "1.6 of SGD"),
    *iteration(title(GPT_), "psgd kron in bfloat16", 1.35, "1.6 of SGD"),
)


@dataclass(frozen=True)
class Verdict:
    """A bar, and what was measured there, if anything was."""

    bar: Bar
    measured: Measurement | None

    @property
    def met(self) -> bool | None:
        """Whether it holds; None where nothing was measured."""
        if self.measured is None or self.measured.value is None:
            return None
        return self.measured.value <= self.bar.at_most


def verdicts(found: Sequence[Measurement]) -> list[Verdict]:
    """Hold what was measured against the bars; what an optimizer does compiled, against those of the eager one."""
    cells = {(m.table, m.row, m.column): m for m in found}
    own = {at(bar) for bar in BARS}
    bars = []
    for bar in BARS:
        compiled = replace(bar, row=f"{bar.row}, compiled")
        bars += [bar, compiled] if at(compiled) in cells.keys() - own else [bar]
    return [Verdict(bar, cells.get(at(bar))) for bar in bars]


def at(bar: Bar) -> tuple[str, str, str]:
    """Return where a bar is."""
    return bar.table, bar.row, bar.column


@dataclass(frozen=True)
class Rivalry:
    """A cell of ours beside a peer's of the same family."""

    ours: Measurement
    peer: Measurement

    @property
    def ratio(self) -> float:
        """The peer's over ours: above 1, ours is better."""
        assert self.ours.value is not None and self.peer.value is not None
        return self.peer.value / self.ours.value if self.ours.value else float("inf")


def rivalries(found: Sequence[Measurement]) -> list[Rivalry]:
    """Compare each peer with the best of ours that is of its family, in each cell that both have."""
    pairs = []
    measured = [m for m in found if m.value is not None]
    for peer in measured:
        mine = [
            m
            for m in measured
            if m.ours
            and not peer.ours
            and (m.table, m.column) == (peer.table, peer.column)
            and set(m.families) & set(peer.families)
        ]
        if mine:
            pairs.append(Rivalry(min(mine, key=lambda m: m.value or 0.0), peer))
    return pairs
