"""What results cost, and the settings that they were had with, as tables."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Sequence
from typing import Any

from psgd.experiments.experiment import Result
from psgd.experiments.show import Table, spread


def costs(results: Sequence[Result], processors: Sequence[str] = ()) -> Table:
    """Return what each method took: per run, and in all.

    Args:
        results: Of the runs.
        processors: Those they ran on, each once, as far as is known.

    >>> @dataclasses.dataclass
    ... class Config:
    ...     method: str
    >>> runs = [Result(Config("sgd"), seed, [{"step": 9, "gradients": 10, "products": 0}], 2.0) for seed in (0, 1)]
    >>> costs(runs).rows
    [['sgd', 2, 2, Spread(mean=2.0, deviation=0.0, count=2), 10, 0, 4.0]]
    """
    methods: dict[str, list[Result]] = {}
    for r in results:
        methods.setdefault(str(getattr(r.config, "method", "–")), []).append(r)
    rows = [
        [
            name,
            len(runs),
            len({r.seed for r in runs}),
            spread([r.seconds for r in runs]),
            typical(runs, "gradients"),
            typical(runs, "products"),
            sum(r.seconds for r in runs),
        ]
        for name, runs in methods.items()
    ]
    columns = ["method", "runs", "seeds", "seconds per run", "gradients", "Hessian products", "seconds in all"]
    where = f", on {' and '.join(processors)}" if processors else ""
    unlike = ": seconds do not compare across these" if len(processors) > 1 else ""
    note = f"Wall time of runs{where}{unlike}; gradients and products of one batch, the median over runs."
    return Table("Cost", columns, rows, note)


def typical(results: Sequence[Result], key: str) -> int | None:
    """Return the median of what the last records say, None if they say nothing."""
    counts = [r.last(key) for r in results if r.series(key)]
    return round(statistics.median(counts)) if counts else None


def settings(results: Sequence[Result]) -> tuple[dict[str, Any], Table]:
    """Return the settings that all runs share, and a table of those in which they differ.

    >>> @dataclasses.dataclass(frozen=True)
    ... class Config:
    ...     method: str
    ...     steps: int = 10
    >>> shared, differing = settings([Result(Config(m), 0, []) for m in ("sgd", "adam")])
    >>> shared, differing.columns, differing.rows
    ({'steps': 10}, ['method', 'seeds'], [['sgd', '0'], ['adam', '0']])
    """
    seeds: dict[str, set[int]] = {}
    fields: dict[str, dict[str, Any]] = {}
    for r in results:
        values = {f.name: getattr(r.config, f.name) for f in dataclasses.fields(r.config)}
        seeds.setdefault(repr(values), set()).add(r.seed)
        fields[repr(values)] = values
    configs = list(fields.values())
    names = list(configs[0]) if configs else []
    shared = {n: configs[0][n] for n in names if all(c[n] == configs[0][n] for c in configs)}
    differing = [n for n in names if n not in shared]
    rows = [[*(c[n] for n in differing), ranges(s)] for c, s in zip(configs, seeds.values(), strict=True)]
    return shared, Table("What differs", [*differing, "seeds"], rows)


def ranges(numbers: set[int]) -> str:
    """Return numbers as text, those in sequence as ranges.

    >>> ranges({0, 1, 2, 5, 7, 8})
    '0–2, 5, 7–8'
    """
    runs: list[list[int]] = []
    for n in sorted(numbers):
        if runs and runs[-1][-1] == n - 1:
            runs[-1].append(n)
        else:
            runs.append([n])
    return ", ".join(f"{r[0]}–{r[-1]}" if len(r) > 1 else str(r[0]) for r in runs)
