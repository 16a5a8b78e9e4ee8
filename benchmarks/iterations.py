"""Whole training iterations: the time of one, gradient included, over that of plain SGD.

A turn is some iterations that all update the preconditioner (p = 1), or some of which none does; p = 0.1 is a tenth of
the one and nine tenths of the other. What has no preconditioner that could wait (SGD, AdamW, Muon) stands in the first
column. A floor is plain SGD that takes the pair (v, Hv) where it would update: what is above it is the optimizer's own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from available import require
from measurement import Measurement, failure
from peers import Contestant, Runner, contestants, floors
from timing import Task, Timing, contest, progress, silence
from torch import Tensor
from workloads import GPT_, LENET5, RESNET18, TINY, Problem


@dataclass(frozen=True)
class Settings:
    problems: tuple[Problem, ...] = (LENET5, GPT_, RESNET18)
    between: int = 10
    """Iterations for each update, in the first column."""
    rounds: int = 20
    budget: float = 300.0  # seconds for each problem


FULL = Settings()
QUICK = Settings(problems=TINY, between=2, rounds=1)


def run(settings: Settings) -> list[Measurement]:
    """Time all on each problem."""
    return [m for problem in settings.problems for m in on(problem, settings)]


def title(problem: Problem) -> str:
    """Return the name of the table."""
    return f"Iteration, {problem.name}"


def columns(between: int) -> tuple[str, str]:
    """Return the names of the columns."""
    return f"p = {1 / between:g}", "p = 1"


def on(problem: Problem, settings: Settings) -> list[Measurement]:
    """Time all on one problem."""
    rarely, always = columns(settings.between)
    tasks: dict[tuple[str, str], Task] = {}
    errors: dict[tuple[str, str], str] = {}
    entries = {c.name: c for c in (*contestants(), *floors())}
    for entry in entries.values():
        mine = (rarely, always) if entry.updates else (rarely,)
        if entry.compiles and not problem.compiling:
            errors |= {(entry.name, c): "not measured: compiling takes too long here" for c in mine}
            continue
        progress(f"{problem.name}: building {entry.name}")
        try:
            with silence():
                tasks |= turns(entry, problem, (rarely, always))
        except Exception as e:
            errors |= {(entry.name, c): failure(e) for c in mine}
    times = mixed(contest(tasks, rounds=settings.rounds, budget=settings.budget), 1 / settings.between, always)
    sgd = times["torch SGD", rarely]
    times |= {key: Timing(None, error=error) for key, error in errors.items()}
    found = []
    for (name, column), time in times.items():
        entry, value = entries[name], time.over(sgd)
        found.append(
            Measurement(
                title(problem),
                name,
                column,
                value,
                "iterations of plain SGD",
                time.seconds,
                time.rounds,
                time.error,
                entry.families,
                entry.ours,
            )
        )
    return found


def turns(entry: Contestant, problem: Problem, names: tuple[str, str]) -> dict[tuple[str, str], Task]:
    """Return the turns of a contestant on a problem, both with one optimizer: first one with updates, to have a P."""
    require(0)
    network = problem.network()
    loss, runner = problem.loss(network, twice=entry.twice), entry.build(network)
    rarely, always = names
    tasks = {(entry.name, always): Task(turn(runner, loss, True, problem.turn), problem.turn)} if entry.updates else {}
    return tasks | {(entry.name, rarely): Task(turn(runner, loss, False, problem.turn), problem.turn)}


def turn(runner: Runner, loss: Callable[[], Tensor], updating: bool, count: int) -> Callable[[], None]:
    """Return some iterations that update, or do not."""

    def iterate() -> None:
        runner.due(updating)
        for _ in range(count):
            runner.iterate(loss)

    return iterate


def mixed(times: dict[tuple[str, str], Timing], share: float, always: str) -> dict[tuple[str, str], Timing]:
    """Return the times of iterations of which some update, from those of which none does, and the others as they are.

    >>> found = mixed({("a", "p = 1"): Timing(3.0, 5), ("a", "p = 0.5"): Timing(1.0, 4)}, 0.5, "p = 1")
    >>> found["a", "p = 0.5"]
    Timing(seconds=2.0, rounds=4, error=None)
    """
    found = {}
    for (name, column), without in times.items():
        update = times.get((name, always), without)
        if column == always or without.seconds is None or update.seconds is None:
            found[name, column] = without if update.error is None else update
            continue
        seconds = share * update.seconds + (1 - share) * without.seconds
        found[name, column] = Timing(seconds, min(update.rounds, without.rounds))
    return found
