"""Which structure suits which Hessian: the condition number of P^½HP^½ after a fit on each group.

The picture of `psgd.demo`, over seeds, and with a Hessian that is diagonal in the cosine basis. The paper's appendix
lists the groups and has no numbers. Nobody tells a group which Hessian it meets; it sees pairs (v, Hv) only.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from psgd import DCT, demo
from psgd.experiments.experiment import Preset, Record, Result, State
from psgd.experiments.show import HeatMap, Plot, Table

TITLE = "Which structure suits which Hessian"

NONE = "none"
"""The row of the Hessians as they are."""


@dataclass(frozen=True)
class Config:
    """A group, by what a user would type, and the size of the Hessians."""

    method: str = "Dense()"
    n: int = 32
    steps: int = 500


def cells(preset: Preset) -> list[Config]:
    """Return one for each group."""
    n, steps = {"quick": (8, 30), "cpu": (32, 500), "paper": (64, 2000)}[preset]
    return [Config(name, n, steps) for name in (NONE, *demo.groups(n))]


def seeds(preset: Preset) -> range:
    """Return a few: of the Hessians, and of the probes."""
    return range({"quick": 1, "cpu": 3, "paper": 10}[preset])


def hessians(n: int, seed: int) -> dict[str, Tensor]:
    """Return the demo's Hessians, and one that is diagonal in the cosine basis.

    >>> list(hessians(8, 0))[-3:]
    ['DCT-sparse', 'dense', 'indefinite']
    """
    found = demo.hessians(n, seed)
    u = DCT().matrix({}, n).double()
    ratios = torch.linspace(0, 1, n, dtype=torch.float64)[
        torch.randperm(n, generator=torch.Generator().manual_seed(seed))
    ]
    sparse = u.mT * demo.SPREAD ** (ratios - 0.5) @ u
    last = ("dense", "indefinite")
    kept = {name: h for name, h in found.items() if name not in last}
    return {**kept, "DCT-sparse": sparse, **{name: found[name] for name in last}}


def run(config: Config, seed: int, state: State | None = None) -> Iterator[Record]:
    """Fit one group to all Hessians side by side."""
    problems = hessians(config.n, seed)
    stack = torch.stack(list(problems.values()))
    if config.method == NONE:
        found, floats = demo.spread(stack), 0
    else:
        groups = demo.groups(config.n)
        if config.method not in groups:
            raise ValueError(f"a group is one of {', '.join(groups)}, got {config.method!r}")
        group = groups[config.method]
        found = demo.condition(group, demo.fit(group, stack, config.steps, seed), stack)
        floats = demo.floats(group.init(config.n))
    if state is None:
        conditions = [x if math.isfinite(x) else None for x in found.tolist()]
        yield Record(config.steps, {"hessians": list(problems), "conditions": conditions, "floats": floats})


def rows(results: Sequence[Result]) -> tuple[list[str], list[demo.Row]]:
    """Return the Hessians, and a row for each group: geometric means over seeds, infinite where one is lost."""
    found: dict[str, list[Result]] = {}
    for r in results:
        if r.records:
            found.setdefault(r.config.method, []).append(r)
    columns: list[str] = next((r.records[-1]["hessians"] for some in found.values() for r in some), [])
    table = []
    for name, some in found.items():
        logs = [[math.log(c) if c is not None else math.inf for c in r.last("conditions")] for r in some]
        means = [math.exp(sum(column) / len(column)) for column in zip(*logs, strict=True)]
        table.append(demo.Row(name, some[0].last("floats"), means))
    order = [NONE, *(name for n in {r.config.n for r in results} for name in demo.groups(n))]
    return columns, sorted(table, key=lambda row: order.index(row.name))


def tables(results: Sequence[Result]) -> list[Table]:
    """Return the condition numbers, and the smallest group among the best for each Hessian."""
    columns, table = rows(results)
    if not table:
        return []
    everything = Table(
        "Condition number of P^½HP^½",
        ("group", "numbers in Q", *columns),
        [(row.name, row.floats, *(c if math.isfinite(c) else None for c in row.conditions)) for row in table],
        "Geometric means over seeds; 1 is perfect.",
    )
    best = Table(
        "The smallest group among the best",
        ("Hessian", "without", "group", "numbers in Q", "with it"),
        [
            (column, before(table, j), table[i].name, table[i].floats, table[i].conditions[j])
            for j, (column, i) in enumerate(zip(columns, demo.winners(table), strict=True))
        ],
        f"Of the groups within a factor {demo.AS_GOOD:g} of the best, the one with the fewest numbers.",
    )
    return [everything, best]


def before(table: Sequence[demo.Row], column: int) -> float | None:
    """Return the condition number without a preconditioner."""
    return next((row.conditions[column] for row in table if row.name == NONE), None)


def plots(results: Sequence[Result]) -> list[Plot]:
    """Return the picture."""
    columns, table = rows(results)
    if not table:
        return []
    grid = [[min(c, 1e9) for c in row.conditions] for row in table]
    title = "Every structure has its group"
    note = "Condition number of P^½HP^½ after the fit; 1 is perfect."
    return [Plot(title, "Hessian", "group", [HeatMap(columns, [row.name for row in table], grid, log=True)], note=note)]


def remarks(results: Sequence[Result]) -> str:
    """Say which group wins where."""
    columns, table = rows(results)
    if len(table) < 2:
        return ""
    winners = list(zip(columns, demo.winners(table), strict=True))
    without = [before(table, j) or math.nan for j in range(len(columns))]
    kept = [table[i].conditions[j] for j, (_, i) in enumerate(winners)]
    wins = [
        f"{column}: {table[i].name} with {table[i].floats} numbers ({demo.number(without[j])} → {demo.number(kept[j])})"
        for j, (column, i) in enumerate(winners)
    ]
    return (
        "The paper lists the groups, and has no numbers to compare with. Seen here: of condition numbers of "
        f"{demo.number(min(without))} to {demo.number(max(without))}, the smallest group among the best leaves "
        f"{demo.number(min(kept))} to {demo.number(max(kept))}. Which it is: {'; '.join(wins)}."
    )
