"""Memory: bytes of state, and the most that a step takes beyond what is there before it, for each parameter.

Measured by what torch's CPU allocator reports to `torch.profiler` (profile_memory=True): every allocation and every
release, those inside of operators, too. What is still there after some steps, without gradients, is the state, caches
included; the highest sum during a step is its peak. Buffers that LAPACK and BLAS keep for themselves are not seen.
"""

from __future__ import annotations

import gc
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from available import require
from measurement import Measurement, failure
from peers import Contestant, Runner, contestants
from timing import progress, silence
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile, record_function
from workloads import GPT_, TINY, Problem

from psgd.probes import generator


@dataclass(frozen=True)
class Settings:
    count: int = 10
    matrix: tuple[int, int] = (250, 400)
    problem: Problem = GPT_
    compiling: bool = False


FULL = Settings()
QUICK = Settings(count=2, matrix=(12, 20), problem=TINY[1], compiling=False)

MARK = "psgd benchmark "


@dataclass(frozen=True)
class Usage:
    """Bytes at the most, and in the end, beyond what was there before."""

    peak: int
    kept: int


def usages(*runs: Callable[[], object]) -> list[Usage]:
    """Run some things, one after the other, and return what memory each took of torch's CPU allocator."""
    gc.collect()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        for i, run in enumerate(runs):
            with record_function(f"{MARK}{i}"):
                run()
                gc.collect()
    assert profiler.profiler is not None and profiler.profiler.kineto_results is not None
    events = profiler.profiler.kineto_results.events()
    changes = sorted((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]")
    spans = sorted((e.start_ns(), e.end_ns()) for e in events if e.name().startswith(MARK))
    return [usage([size for at, size in changes if start <= at <= end]) for start, end in spans]


def usage(changes: Sequence[int]) -> Usage:
    """Return what allocations and releases, in their order, come to.

    >>> usage([4, 8, -8, 2])
    Usage(peak=12, kept=6)
    """
    sums = list(itertools.accumulate(changes, initial=0))
    return Usage(max(sums), sums[-1])


def run(settings: Settings) -> list[Measurement]:
    """Measure the state and a step on given gradients, and a whole iteration."""
    n = settings.count * settings.matrix[0] * settings.matrix[1]
    shape = f"{settings.count} matrices of {settings.matrix[0]}×{settings.matrix[1]}"
    size = sum(p.numel() for p in settings.problem.network().parameters())
    found: list[Measurement] = []
    for entry in contestants():
        waits = not entry.compiles or settings.compiling
        if entry.given:
            table, columns = f"Memory, {shape}", ("state", "step without update", "step with update")
            found += measured(entry, table, columns, waits, lambda entry=entry: alone(entry, settings), n)
        table, columns = f"Memory of an iteration, {settings.problem.name}", ("state", "p = 0", "p = 1")
        found += measured(entry, table, columns, waits, lambda entry=entry: whole(entry, settings.problem), size)
    return found


def measured(
    entry: Contestant,
    table: str,
    columns: tuple[str, ...],
    waits: bool,
    bytes_of: Callable[[], tuple[int, int, int]],
    n: int,
) -> list[Measurement]:
    """Return a row, in bytes for each of n parameters."""
    values: tuple[float | None, ...] = (None,) * 3
    error = None if waits else "not measured: compiling takes too long here"
    if waits:
        progress(f"memory: {entry.name}")
        try:
            with silence():
                gc.freeze()  # or each collection looks at all that was ever imported
                require(100 * n)
                values = tuple(v / n for v in bytes_of())
        except Exception as e:
            error = failure(e)
        finally:
            gc.unfreeze()
    return [
        Measurement(
            table, entry.name, column, value, "bytes per parameter", None, None, error, entry.families, entry.ours
        )
        for column, value in zip(columns, values, strict=True)
        if entry.updates or column not in ("step with update", "p = 1")
    ]


def alone(entry: Contestant, settings: Settings) -> tuple[int, int, int]:
    """Return the bytes of state, and the peaks of steps on given gradients without and with an update."""
    rng = generator(0)
    gradients = [torch.randn(settings.matrix, generator=rng) for _ in range(settings.count)]
    model = nn.ParameterList(torch.zeros_like(g) for g in gradients)
    return three(entry, model, lambda runner: runner.step(gradients))


def whole(entry: Contestant, problem: Problem) -> tuple[int, int, int]:
    """Return the bytes of state, and the peaks of iterations: gradients, graph and activations included."""
    network = problem.network()
    loss: Callable[[], Tensor] = problem.loss(network, twice=entry.twice)
    return three(entry, network, lambda runner: runner.iterate(loss))


def three(entry: Contestant, model: nn.Module, step: Callable[[Runner], None]) -> tuple[int, int, int]:
    """Build an optimizer, make some steps, and look at two more."""
    made: list[Runner] = []

    def forget() -> None:
        for p in model.parameters():
            p.grad = None

    def build() -> None:
        made.append(entry.build(model))
        for updating in (True, True, False, True):
            made[0].due(updating)
            step(made[0])
        forget()

    def again(updating: bool) -> Callable[[], None]:
        def run() -> None:
            made[0].due(updating)
            step(made[0])
            forget()

        return run

    state, without, with_update = usages(build, again(False), again(True))
    return state.kept, without.peak, with_update.peak
