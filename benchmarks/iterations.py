"""Whole training iterations: the time of one, gradient included, over that of plain SGD.

A turn is ten iterations of which the first updates the preconditioner (p = 0.1), or some that all do (p = 1). What has
no preconditioner that could wait (SGD, AdamW, Muon) stands in the first column. A floor is plain SGD that takes the
pair (v, Hv) where it would update: what is above it is the optimizer's own.
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
    """Iterations from one update to the next, for p = 0.1."""
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
                tasks |= turns(entry, problem, settings.between, (rarely, always))
        except Exception as e:
            errors |= {(entry.name, c): failure(e) for c in mine}
    times = contest(tasks, rounds=settings.rounds, budget=settings.budget)
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


def turns(entry: Contestant, problem: Problem, between: int, names: tuple[str, str]) -> dict[tuple[str, str], Task]:
    """Return the turns of a contestant on a problem, both with one optimizer."""
    require(0)
    network = problem.network()
    loss, runner = problem.loss(network, twice=entry.twice), entry.build(network)
    rarely, always = names
    tasks = {(entry.name, rarely): Task(turn(runner, loss, 1, between - 1), between)}
    if entry.updates:
        tasks[entry.name, always] = Task(turn(runner, loss, problem.turn, 0), problem.turn)
    return tasks


def turn(runner: Runner, loss: Callable[[], Tensor], updates: int, others: int) -> Callable[[], None]:
    """Return some iterations that update, and then some that do not."""

    def iterate() -> None:
        runner.due(True)
        for _ in range(updates):
            runner.iterate(loss)
        runner.due(False)
        for _ in range(others):
            runner.iterate(loss)

    return iterate
