"""The paper's table of linear solvers: r equations, as in the update of a low-rank preconditioner, on one thread here.

The update solves with I + VᵀU and with its transpose: "both" is what that takes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy
import torch
from measurement import Measurement
from timing import Task, contest

from psgd.probes import generator

PAPER = {
    "Matlab, CPU, double": (0.0078, 0.10, 14.2),
    "numpy, CPU, double": (0.17, 6.7, 57.2),
    "scipy, CPU, double": (0.016, 0.14, 20.5),
    "torch, GPU, single": (0.17, 0.53, 6.2),
    "TensorFlow, GPU, single": (0.67, 0.92, 6.6),
}
"""Milliseconds for r = 10, 100, 1000: the paper's table of wall times (Xeon W-2135, RTX 2080; mean of 3000 runs)."""

PAPER_SIZES = (10, 100, 1000)
TIMES, RATIOS = "Linear solvers", "Linear solvers, ratios"
UNIT = "torch solve, float32"
"""What the ratios are of."""


@dataclass(frozen=True)
class Settings:
    sizes: tuple[int, ...] = PAPER_SIZES
    rounds: int = 30
    least: float = 5e-3


FULL = Settings()
QUICK = Settings(sizes=(5, 10), rounds=2, least=0.0)


def run(settings: Settings) -> list[Measurement]:
    """Time them at each r."""
    found: list[Measurement] = []
    for r in settings.sizes:
        times = contest(tasks(r), rounds=settings.rounds, least=settings.least)
        for name, t in times.items():
            ms = None if t.seconds is None else 1e3 * t.seconds
            found += [
                Measurement(TIMES, name, f"r = {r}", ms, "ms", t.seconds, t.rounds, t.error),
                Measurement(RATIOS, name, f"r = {r}", t.over(times[UNIT]), UNIT, t.seconds, t.rounds, t.error),
            ]
    for name, values in PAPER.items():
        for r, value in zip(PAPER_SIZES, values, strict=True):
            found.append(Measurement(TIMES, f"the paper: {name}", f"r = {r}", value, "ms"))
    return found


def tasks(r: int) -> dict[str, Task]:
    """Return the solvers, on one well-conditioned matrix."""
    found: dict[str, Task] = {}
    for dtype in (torch.float32, torch.float64):
        rng = generator(0)
        a = torch.eye(r, dtype=dtype) + torch.randn(r, r, generator=rng, dtype=dtype) / (2 * r**0.5)
        b = torch.randn(r, 1, generator=rng, dtype=dtype)
        found |= {
            f"{name}, {str(dtype).removeprefix('torch.')}": Task(lambda f=f, a=a, b=b: f(a, b))
            for name, f in SOLVERS.items()
        }
    return found


def lu(a: torch.Tensor, b: torch.Tensor) -> Any:
    return torch.linalg.lu_solve(*torch.linalg.lu_factor(a), b)


def both_by_solve(a: torch.Tensor, b: torch.Tensor) -> Any:
    return torch.linalg.solve(a, b), torch.linalg.solve(a.mT, b)


def both_by_lu(a: torch.Tensor, b: torch.Tensor) -> Any:
    factors, pivots = torch.linalg.lu_factor(a)
    return torch.linalg.lu_solve(factors, pivots, b), torch.linalg.lu_solve(factors, pivots, b, adjoint=True)


def scipy_solve(a: torch.Tensor, b: torch.Tensor) -> Any:
    import scipy.linalg

    return scipy.linalg.solve(a.numpy(), b.numpy())


def scipy_lu(a: torch.Tensor, b: torch.Tensor) -> Any:
    import scipy.linalg

    return scipy.linalg.lu_solve(scipy.linalg.lu_factor(a.numpy()), b.numpy())


def numpy_solve(a: torch.Tensor, b: torch.Tensor) -> Any:
    return numpy.linalg.solve(a.numpy(), b.numpy())


SOLVERS = {
    "torch solve": torch.linalg.solve,
    "torch lu_factor + lu_solve": lu,
    "torch solve, both": both_by_solve,
    "torch lu_factor + two lu_solve, both": both_by_lu,
    "scipy solve": scipy_solve,
    "scipy lu_factor + lu_solve": scipy_lu,
    "numpy solve": numpy_solve,
}
