"""When the preconditioner is updated: a function of the step, decided on the host."""

from __future__ import annotations

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
