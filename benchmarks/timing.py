"""The stopwatch: all take turns, on one thread, and the least time of each counts.

What else the machine does can only add time, and it disturbs those who take turns alike: so minima, and ratios of them.
The clock is the CPU time of the process. On one thread, with nothing to wait for, that is the time on the wall of a
machine that has nothing else to do.
"""

from __future__ import annotations

import contextlib
import gc
import math
import os
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from measurement import failure

SLOW = 1.0  # seconds of a call, above which one is enough to warm up


@dataclass(frozen=True)
class Task:
    """What is timed, and for how many steps one call of it counts."""

    run: Callable[[], object]
    steps: int = 1


@dataclass(frozen=True)
class Timing:
    """The least seconds for a step, over so many rounds; or an error."""

    seconds: float | None
    rounds: int = 0
    error: str | None = None

    def over(self, unit: Timing) -> float | None:
        """Return the ratio to another."""
        return None if self.seconds is None or not unit.seconds else self.seconds / unit.seconds


def contest(
    tasks: Mapping[str, Task],
    *,
    rounds: int,
    least: float = 2e-3,
    budget: float = math.inf,
    clock: Callable[[], float] = time.process_time,
) -> dict[str, Timing]:
    """Time tasks in turns. One that raises is out, and its error is its result.

    Args:
        tasks: by name; each is called before the first round, a quick one twice, to build what it builds once.
        rounds: how often each has a turn. Each round starts with another task, so that none always follows the same.
        least: seconds that a turn takes at least: a quick task is called several times in it.
        budget: seconds of the clock after which no further round starts; there are at least two.
        clock: returns seconds.
    """
    calls: dict[str, int] = {}
    times: dict[str, list[float]] = {name: [] for name in tasks}
    errors: dict[str, str] = {}

    def turn(name: str, count: int) -> float:
        """Return the seconds of one call."""
        gc.collect()
        try:
            start = clock()
            for _ in range(count):
                tasks[name].run()
            return (clock() - start) / count
        except Exception as e:
            errors[name] = failure(e)
            return math.inf

    with silence():
        gc.collect()
        gc.freeze()  # or each collection looks at all that was ever imported
        try:
            for name in tasks:
                progress(f"warming up {name}")
                took = turn(name, 1)
                if took < SLOW:  # the first call may have built something
                    took = turn(name, 1)
                if name not in errors:
                    calls[name] = max(1, min(1000, math.ceil(least / max(took, 1e-9))))
            gc.freeze()
            names, start = list(calls), clock()
            for r in range(rounds):
                if r >= 2 and clock() - start > budget:
                    break
                progress(f"round {r + 1} of {rounds}")
                first = r % max(1, len(names))
                for name in names[first:] + names[:first]:
                    if name not in errors:
                        times[name].append(turn(name, calls[name]) / tasks[name].steps)
        finally:
            gc.unfreeze()
            progress("")
    return {
        name: Timing(None, len(found), errors[name]) if name in errors else Timing(min(found), len(found))
        for name, found in times.items()
    }


@contextlib.contextmanager
def silence() -> Iterator[None]:
    """Keep packages from printing and warning in between."""
    with (
        open(os.devnull, "w") as nowhere,
        contextlib.redirect_stdout(nowhere),
        contextlib.redirect_stderr(nowhere),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")
        yield


def progress(message: str) -> None:
    """Show it on a terminal, in one line that is written anew."""
    terminal = sys.__stderr__
    if terminal is not None and terminal.isatty():
        print(f"\r\x1b[K{message[:100]}", end="", file=terminal, flush=True)
