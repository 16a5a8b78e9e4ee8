"""How cost grows: with n, with the rank, with the number of tensors, and whether a changing lr compiles anew."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from available import require
from measurement import Measurement, failure
from peers import Contestant, contestants
from step_cost import COLUMNS, Pairs, Parts, our_parts, psgd_torch_xmat, steps
from timing import Task, Timing, contest, progress, silence
from torch import Tensor, nn
from torch._dynamo.utils import counters

import psgd
from psgd.probes import generator


@dataclass(frozen=True)
class Settings:
    sizes: tuple[int, ...] = tuple(10**k for k in range(4, 9))
    ranks: tuple[int, ...] = (0, 1, 2, 5, 10, 20, 50, 100)
    rank_size: int = 10**6
    tensors: tuple[tuple[int, tuple[int, int]], ...] = (
        (1, (1000, 1000)),
        (10, (250, 400)),
        (100, (100, 100)),
        (1000, (25, 40)),
    )
    """How many of which shape: always as many numbers."""
    steps: int = 200
    """With a changing lr, while compilations are counted."""
    rounds: int = 10
    least: float = 2e-3
    budget: float = 10.0  # seconds for each column
    compiling: bool = True


FULL = Settings()
QUICK = Settings(
    sizes=(10**3, 10**4),
    ranks=(0, 2),
    rank_size=1000,
    tensors=((1, (20, 30)), (6, (10, 10))),
    steps=12,
    rounds=1,
    least=0.0,
    compiling=False,
)

N = "Growth with n, XMat"
RANKS = "Growth with the rank, psgd lra(r), n = {:,}"
TENSORS = "Growth with the number of tensors, step with update, n = {:,}"
COMPILATIONS = "Compilations over {} steps with a changing lr"


def run(settings: Settings) -> list[Measurement]:
    """Measure all four."""
    return [*with_n(settings), *with_rank(settings), *with_tensors(settings), *compilations(settings)]


def copying(n: int) -> Task:
    """Return a copy of n float32."""
    source, target = torch.randn(n), torch.zeros(n)
    return Task(lambda: target.copy_(source))


def parts_at(
    table: str, column: str, n: int, rows: dict[str, Callable[[Pairs], Parts]], need: float, settings: Settings
) -> list[Measurement]:
    """Time fits and preconditionings of vectors of length n: a column, in copies of n float32."""
    names = [f"{name}, {part}" for name in rows for part in COLUMNS[:2]]
    progress(f"{table}: {column}")
    try:
        require(need)
    except MemoryError as e:
        return [Measurement(table, name, column, None, "copies", error=failure(e)) for name in names]
    given, tasks = Pairs(n, (1, n)), {"copy": copying(n)}
    times: dict[str, Timing] = {}
    for name, build in rows.items():
        try:
            parts = build(given)
            tasks[f"{name}, {COLUMNS[0]}"] = Task(parts.fit, parts.fits)
            tasks[f"{name}, {COLUMNS[1]}"] = Task(parts.precondition)
        except Exception as e:
            times |= {f"{name}, {part}": Timing(None, error=failure(e)) for part in COLUMNS[:2]}
    times |= contest(tasks, rounds=settings.rounds, least=settings.least, budget=settings.budget)
    copy = times.pop("copy")
    return [
        Measurement(
            table, name, column, t.over(copy), "copies", t.seconds, t.rounds, t.error, ours=name.startswith("psgd ")
        )
        for name, t in sorted(times.items(), key=lambda item: names.index(item[0]))
    ]


def with_n(settings: Settings) -> list[Measurement]:
    """XMat, from small to as large as memory allows."""
    rows = {"psgd XMat": our_parts(lambda given: psgd.XMat()), "psgd-torch XMat": psgd_torch_xmat}
    sizes = settings.sizes
    return [m for n in sizes for m in parts_at(N, f"n = 1e{round(math.log10(n))}", n, rows, 4 * n * 30, settings)]


def with_rank(settings: Settings) -> list[Measurement]:
    """Low-rank approximations of growing rank."""
    n, found = settings.rank_size, []
    for rank in settings.ranks:
        rows = {"psgd lra(r)": our_parts(lambda given, rank=rank: psgd.lra(rank))}
        found += parts_at(RANKS.format(n), f"r = {rank}", n, rows, 4 * n * (30 + 8 * rank), settings)
    return found


def with_tensors(settings: Settings) -> list[Measurement]:
    """Step with an update, of all optimizers that take given gradients, on few large or many small tensors."""
    n = settings.tensors[0][0] * math.prod(settings.tensors[0][1])
    table, found = TENSORS.format(n), []
    entries = {c.name: c for c in contestants() if c.given and not c.compiles}
    for count, shape in settings.tensors:
        column = f"{count} of {shape[0]}×{shape[1]}"
        rng = generator(0)
        gradients = [torch.randn(shape, generator=rng) for _ in range(count)]
        tasks, times = {"copy": copying(n)}, {}
        for entry in entries.values():
            progress(f"{column}: building {entry.name}")
            try:
                require(4 * n * 100)
                with silence():
                    made = steps(entry, nn.ParameterList(torch.zeros_like(g) for g in gradients), gradients)
                tasks[entry.name] = next(iter(made.values()))
            except Exception as e:
                times[entry.name] = Timing(None, error=failure(e))
        times |= contest(tasks, rounds=settings.rounds, least=settings.least, budget=settings.budget)
        copy = times.pop("copy")
        found += [
            Measurement(
                table,
                name,
                column,
                t.over(copy),
                "copies",
                t.seconds,
                t.rounds,
                t.error,
                entries[name].families,
                entries[name].ours,
            )
            for name, t in times.items()
        ]
    return found


def compilations(settings: Settings) -> list[Measurement]:
    """Count the graphs that torch.compile made, in the first steps and in all: a fixed number is what should be."""
    first, found = min(10, settings.steps), []
    table = COMPILATIONS.format(settings.steps)
    rng = generator(0)
    gradients = [torch.randn(shape, generator=rng) for shape in ((20, 30), (20, 30), (30,))]
    for entry in contestants():
        if not entry.given:
            continue
        counts: list[int | None] = [None, None]
        error = None if settings.compiling or not entry.compiles else "not measured: compiling takes too long here"
        if error is None:
            progress(f"compilations: {entry.name}")
            try:
                with silence():
                    counts = list(graphs(entry, [g.clone() for g in gradients], (first, settings.steps)))
            except Exception as e:
                error = failure(e)
        found += [
            Measurement(table, entry.name, column, count, "graphs", error=error, ours=entry.ours)
            for column, count in zip((f"after {first} steps", f"after {settings.steps}"), counts, strict=True)
        ]
    return found


def graphs(entry: Contestant, gradients: list[Tensor], marks: tuple[int, ...]) -> list[int]:
    """Return how many graphs were compiled after so many steps; each has another lr, every other one updates."""
    torch.compiler.reset()
    counters.clear()
    runner, found = entry.build(nn.ParameterList(torch.zeros_like(g) for g in gradients)), []
    for step in range(1, max(marks) + 1):
        for options in getattr(runner.optimizer, "param_groups", ()):
            options["lr"] = 1e-6 / step
        runner.due(step % 2 == 1)
        runner.step(gradients)
        if step in marks:
            found.append(counters["stats"]["unique_graphs"])
    return found
