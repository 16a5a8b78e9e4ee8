"""What products alone tell of a symmetric matrix: extreme eigenvalues, trace, spectral density, log determinant.

All of it is Lanczos' tridiagonalization A ≈ K T Kᵀ, whose eigenvalues θ (Ritz values) are near those of A from the
outside in, and whose first components give quadrature weights.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from psgd.diagnostics.operators import Operator
from psgd.probes import generator


class Estimate(NamedTuple):
    """A number with its standard error."""

    value: float
    error: float


@dataclass(frozen=True)
class Ritz:
    """Ritz pairs, by ascending value: |θ − λ| ≤ residual for some eigenvalue λ of A."""

    values: Tensor
    residuals: Tensor
    weights: Tensor
    """Squared first components, the quadrature weights; they sum to 1."""
    basis: Tensor
    """K, one row for each step."""
    small: Tensor
    """The eigenvectors of T, as columns."""

    def resolved(self, which: Tensor, tol: float) -> bool:
        """Whether the chosen values are within a relative tolerance of eigenvalues, or of zero within rounding."""
        rounding = 10 * torch.finfo(self.basis.dtype).eps * self.values.abs().amax()
        return bool((self.residuals[which] <= tol * self.values[which].abs() + rounding).all())

    def vectors(self, which: Tensor | slice) -> Tensor:
        """Return the chosen Ritz vectors as rows of length n."""
        return self.small[:, which].mT.to(self.basis) @ self.basis


def lanczos(operator: Operator, start: Tensor, steps: int, until: Callable[[Ritz], bool] = lambda _: False) -> Ritz:
    """Run at most `steps` steps of Lanczos, fully reorthogonalized, until a test of the Ritz pairs holds.

    It ends early, with exact eigenvalues, when the Krylov space is exhausted.

    >>> a = torch.tensor([1.0, 2.0, 5.0])
    >>> lanczos(Operator(3, lambda x: a * x), torch.ones(3), steps=10).values.float().round(decimals=3)
    tensor([1., 2., 5.])
    """
    if steps < 1:
        raise ValueError(f"lanczos needs steps >= 1, got steps={steps}")
    steps = min(steps, operator.n)
    basis = start.new_empty(steps, operator.n)
    basis[0] = start / start.norm()
    alphas: list[float] = []
    betas: list[float] = []
    size = 0.0
    while True:
        k = basis[: len(alphas) + 1]
        w = operator(k[-1])
        alphas.append(float(w.double() @ k[-1].double()))
        for _ in range(2):  # twice is enough
            w = w - k.mT @ (k @ w)
        beta = float(w.norm())
        size = max(size, abs(alphas[-1]) + beta)
        ended = beta <= 10 * torch.finfo(w.dtype).eps * size * math.sqrt(len(k)) or len(k) == operator.n
        ritz = _ritz(alphas, betas, 0.0 if ended else beta, k)
        if ended or len(k) == steps or until(ritz):
            return ritz
        betas.append(beta)
        basis[len(k)] = w / beta


def _ritz(alphas: list[float], betas: list[float], beta: float, basis: Tensor) -> Ritz:
    off = torch.tensor(betas, dtype=torch.float64)
    t = torch.diag(torch.tensor(alphas, dtype=torch.float64)) + torch.diag(off, 1) + torch.diag(off, -1)
    values, small = torch.linalg.eigh(t)
    return Ritz(values, beta * small[-1].abs(), small[0].square(), basis, small)


@dataclass(frozen=True)
class Extremes:
    """The two ends of a spectrum, with bounds of their errors and unit eigenvectors."""

    smallest: float
    largest: float
    residuals: tuple[float, float]
    converged: bool
    vectors: tuple[Tensor, Tensor]


def extreme_eigenvalues(operator: Operator, *, tol: float = 1e-2, steps: int = 100, seed: int = 0) -> Extremes:
    """Return the smallest and largest eigenvalue by Lanczos, stopping when both have a relative error below tol.

    A residual ρ bounds the error by ρ; often it is ρ² over the gap to the next eigenvalue.

    >>> a = torch.linspace(-1.0, 3.0, 50)
    >>> ends = extreme_eigenvalues(Operator(50, lambda x: a * x))
    >>> round(ends.smallest, 3), round(ends.largest, 3), ends.converged
    (-1.0, 3.0, True)
    """
    ends = torch.tensor([0, -1])

    def found(ritz: Ritz) -> bool:
        return len(ritz.values) > 1 and ritz.resolved(ends, tol)

    ritz = lanczos(operator, operator.normal(generator(seed)), steps, found)
    low, high = ritz.vectors(ends)
    return Extremes(
        float(ritz.values[0]),
        float(ritz.values[-1]),
        (float(ritz.residuals[0]), float(ritz.residuals[-1])),
        ritz.resolved(ends, tol),
        (low, high),
    )


def top_eigenvectors(operator: Operator, k: int, *, tol: float = 1e-2, steps: int = 100, seed: int = 0) -> Ritz:
    """Run Lanczos until the k eigenvalues of largest modulus have relative errors below tol.

    >>> a = torch.tensor([1.0, -9.0, 2.0, 8.0])
    >>> ritz = top_eigenvectors(Operator(4, lambda x: a * x), 2)
    >>> ritz.vectors(largest_modulus(ritz, 2)).abs().round(decimals=3)
    tensor([[0., 1., 0., 0.],
            [0., 0., 0., 1.]])
    """

    def found(ritz: Ritz) -> bool:
        return len(ritz.values) > k and ritz.resolved(largest_modulus(ritz, k), tol)

    return lanczos(operator, operator.normal(generator(seed)), steps, found)


def largest_modulus(ritz: Ritz, k: int) -> Tensor:
    """Return the indices of the k Ritz values of largest modulus, largest first."""
    return ritz.values.abs().argsort(descending=True)[:k]


def trace(operator: Operator, *, probes: int = 30, seed: int = 0) -> Estimate:
    """tr A ≈ mean of xᵀAx over random signs x (Hutchinson); exact for a diagonal A.

    >>> trace(Operator(3, lambda x: torch.tensor([1.0, 2.0, 3.0]) * x))
    Estimate(value=6.0, error=0.0)
    """
    signs = (operator.signs(generator(seed, i)) for i in range(_require(probes)))
    return mean([float(x.double() @ operator(x).double()) for x in signs])


def mean(samples: Sequence[float] | Tensor) -> Estimate:
    """Return the mean of independent samples and its standard error."""
    t = torch.as_tensor(samples, dtype=torch.float64)
    return Estimate(float(t.mean()), float(t.std() / math.sqrt(len(t))))


def _require(probes: int) -> int:
    if probes < 2:
        raise ValueError(f"a standard error needs probes >= 2, got probes={probes}")
    return probes


@dataclass(frozen=True)
class Density:
    """A spectrum as weighted points: for each probe, Ritz values and weights that sum to 1."""

    n: int
    values: tuple[Tensor, ...]
    weights: tuple[Tensor, ...]

    def sum(self, f: Callable[[Tensor], Tensor]) -> Estimate:
        """Σ f(λ) over the n eigenvalues: the trace of f(A), with its standard error over probes."""
        pairs = zip(self.values, self.weights, strict=True)
        return mean([self.n * float(w @ f(values)) for values, w in pairs])

    def smooth(self, grid: Tensor, width: float) -> Tensor:
        """Return the density at the points of a grid, each Ritz value a Gaussian of this width; it integrates to 1."""
        values, weights = torch.cat(self.values), torch.cat(self.weights) / len(self.weights)
        bumps = torch.exp(-0.5 * ((grid[:, None] - values) / width) ** 2) / (width * math.sqrt(2 * math.pi))
        return bumps @ weights


def spectral_density(operator: Operator, *, steps: int = 60, probes: int = 10, seed: int = 0) -> Density:
    """Estimate the spectrum by stochastic Lanczos quadrature: one run of Lanczos for each probe.

    >>> a = torch.tensor([1.0, 2.0, 4.0])
    >>> log_det = spectral_density(Operator(3, lambda x: a * x), probes=200).sum(torch.log)
    >>> abs(log_det.value - torch.log(a).sum()) < 3 * log_det.error
    tensor(True)
    """
    runs = [lanczos(operator, operator.normal(generator(seed, i)), steps) for i in range(_require(probes))]
    return Density(operator.n, tuple(r.values for r in runs), tuple(r.weights for r in runs))
