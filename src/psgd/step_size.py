"""How far a factor moves: the step-size rules, chosen by object.

A factor moves as A ← A − s·E·A. Whatever the rule, s·‖E‖ ≤ μ, so that for 0 < μ < 1 the multiplier
I − s·E stays in the identity component: A remains invertible and keeps its orientation.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

Norm = Callable[[], Tensor]


class StepSize(ABC):
    """Turns the rate μ into a step s with s·‖E‖ ≤ μ, E = E₊ − E₋ the projected residual."""

    @abstractmethod
    def __call__(self, lr: float | Tensor, ell: Tensor, norm: Norm, bound: Norm) -> tuple[Tensor, Tensor]:
        """Return (s, the new ell), given norm() ≥ ‖E‖ and bound() ≥ ‖E₊‖ + ‖E₋‖, of which one is evaluated."""


@dataclass(frozen=True)
class Normalized(StepSize):
    """s = μ/‖E‖, the rule of the paper's algorithms.

    Every step has relative size μ, also at the optimum: the stationary error is proportional to μ, so anneal it.

    >>> import torch
    >>> size, _ = Normalized()(0.1, torch.tensor(0.0), lambda: torch.tensor(2.0), lambda: torch.tensor(6.0))
    >>> round(float(size), 4)
    0.05
    """

    def __call__(self, lr: float | Tensor, ell: Tensor, norm: Norm, bound: Norm) -> tuple[Tensor, Tensor]:
        """Return (μ/‖E‖, ell unchanged)."""
        return _divide(lr, norm()), ell


@dataclass(frozen=True)
class Smoothed(StepSize):
    """s = μ/L, L ← max(βL + (1−β)ℓ, ℓ), ℓ = ‖E₊‖ + ‖E₋‖, the curvature of c along a matrix algebra.

    With noise-free pairs of a definite H, E vanishes at the optimum and L does not: Q converges with a constant μ.
    Else (noise, or H indefinite) only the average of E vanishes, and the stationary error is proportional to √μ.

    >>> import torch
    >>> size, ell = Smoothed()(0.1, torch.tensor(8.0), lambda: torch.tensor(2.0), lambda: torch.tensor(6.0))
    >>> round(float(ell), 4), round(float(size), 4)
    (7.8, 0.0128)
    """

    beta: float = 0.9

    def __post_init__(self) -> None:
        if not 0 <= self.beta < 1:
            raise ValueError(f"Smoothed needs 0 <= beta < 1, got beta={self.beta}")

    def __call__(self, lr: float | Tensor, ell: Tensor, norm: Norm, bound: Norm) -> tuple[Tensor, Tensor]:
        """Return (μ/L, L)."""
        now = bound()
        ell = torch.maximum(torch.lerp(now, ell.to(now), self.beta), now)
        return _divide(lr, ell), ell


def _divide(lr: float | Tensor, size: Tensor) -> Tensor:
    # A zero residual moves nothing: s = μ/tiny is finite, and E = 0.
    return lr / size.clamp_min(torch.finfo(size.dtype).tiny)
