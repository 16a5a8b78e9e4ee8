"""When the preconditioner is updated: a function of the step, decided on the host."""

from __future__ import annotations

import itertools
import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

from psgd.probes import uniform


class Schedule(ABC):
    """Says which steps update the preconditioner."""

    @abstractmethod
    def due(self, step: int, seed: int) -> bool:
        """Whether step 0, 1, 2, … is such a step."""

    @property
    def ever(self) -> bool:
        """Whether any step is: without one, the optimizer is SGD."""
        return True

    def rest(self, step: int, seed: int, most: int = 8) -> int:
        """Return how long the pause is that a step without an update belongs to, as far as one sees `most` both ways.

        >>> [Regular(0.2).rest(t, seed=0) for t in (1, 3, 6)]
        [4, 4, 4]
        """
        sides = range(step + 1, step + 1 + most), range(step - 1, max(-1, step - 1 - most), -1)
        return 1 + sum(len([*itertools.takewhile(lambda t: not self.due(t, seed), side)]) for side in sides)


@dataclass(frozen=True)
class Regular(Schedule):
    """The first `warmup` steps, then a fraction `prob` of all steps, evenly spaced; step 0 is among them.

    >>> [t for t in range(10) if Regular(0.3).due(t, seed=0)]
    [0, 4, 7]
    """

    prob: float
    warmup: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.prob <= 1:
            raise ValueError(f"an update probability needs 0 <= prob <= 1, got {self.prob}")

    @property
    def ever(self) -> bool:
        return self.prob > 0

    def due(self, step: int, seed: int) -> bool:
        if step < max(1, self.warmup):
            return self.ever
        # the small term keeps 0.1·10 from falling below 1
        return math.floor(step * self.prob + 1e-9) > math.floor((step - 1) * self.prob + 1e-9)


@dataclass(frozen=True)
class Decaying(Schedule):
    """All of the first `start` steps, then a fraction start/t of them that falls to `floor`, without chance.

    >>> [sum(Decaying(start=100, floor=0.05).due(t, 0) for t in range(a, a + 1000)) for a in (0, 1000, 5000)]
    [330, 69, 50]
    """

    start: int = 250
    floor: float = 0.03

    def __post_init__(self) -> None:
        if not (self.start >= 1 and 0 < self.floor <= 1):
            raise ValueError(f"Decaying needs start >= 1 and 0 < floor <= 1, got {self.start} and {self.floor}")

    def due(self, step: int, seed: int) -> bool:
        return math.floor(self._updates(step + 1) + 1e-9) > math.floor(self._updates(step) + 1e-9)

    def _updates(self, step: int) -> float:
        """Return how many updates are due before a step: the integral of the fraction."""
        end = self.start / self.floor
        slow = min(max(step, self.start), end)
        return min(step, self.start) + self.start * math.log(slow / self.start) + self.floor * max(0.0, step - end)


@dataclass(frozen=True)
class Adaptive(Schedule):
    """All of the first `warmup` steps, then with pauses that grow while the fit is good, up to `longest`.

    Good is a fit whose moves are noise: `significance` (see `psgd.trend`) below `noise`. Each update then makes the
    next pause longer by a quarter; a significant one halves it. What was measured is read on the host, once for each
    update. And no pause is longer than one step for each `warmup` steps so far: where Q follows so fast that its moves
    are mostly noise, a drift does not show in them, and drifts are slower the longer the training.

    >>> schedule = Adaptive()
    >>> schedule.pause(8, step=5000, significance=1.0), schedule.pause(8, step=5000, significance=5.0)
    (11, 4)
    >>> schedule.pause(8, step=500, significance=1.0)
    5
    """

    warmup: int = 100
    longest: int = 100
    noise: float = 2.0

    def __post_init__(self) -> None:
        if not (self.warmup >= 0 and self.longest >= 0 and self.noise > 0):
            given = f"{self.warmup}, {self.longest} and {self.noise}"
            raise ValueError(f"Adaptive needs warmup >= 0, longest >= 0 and noise > 0, got {given}")

    def due(self, step: int, seed: int) -> bool:
        return True

    def pause(self, pause: int, step: int, significance: float) -> int:
        """Return for how many steps to leave Q alone after an update at this step, given the pause before it."""
        if step < self.warmup:
            return 0
        if significance >= self.noise:
            return pause // 2
        return min(self.longest, step // max(1, self.warmup), pause + 1 + pause // 4)


@dataclass(frozen=True)
class Bernoulli(Schedule):
    """Each step by chance, as in the paper's Algorithm 1, with a constant probability or one that follows the step.

    Step 0 always counts, unless the constant is 0: until then there would be no scale to step with.

    >>> sum(Bernoulli(0.1).due(t, seed=0) for t in range(10000)) / 10000
    0.1012
    >>> Bernoulli(lambda step: max(0.01, 0.99**step)).due(0, seed=0)
    True
    """

    prob: float | Callable[[int], float]

    def __post_init__(self) -> None:
        if not callable(self.prob):
            Regular(self.prob)

    @property
    def ever(self) -> bool:
        return callable(self.prob) or self.prob > 0

    def due(self, step: int, seed: int) -> bool:
        prob = self.prob(step) if callable(self.prob) else self.prob
        return self.ever and (step == 0 or uniform(seed, step, -1) < prob)
