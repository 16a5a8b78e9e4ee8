"""The one step that serves most groups, and the constants that never step."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

import torch
from torch import Tensor

from psgd.group import Group, Point, Residual, Where
from psgd.linalg import subtract
from psgd.step_size import StepSize


class MatrixAlgebra(Group):
    """The invertible elements of a linear space of matrices that is closed under products.

    The space is its own Lie algebra: E has the coordinates of Q, and one step serves all,
    E = Π(x yᵀ) − Π(z wᵀ), Q ← Q − s·E·Q. The key "ell" of a point carries L of `Smoothed`.
    """

    @abstractmethod
    def identity(self, n: int, **where: Any) -> Point:
        """Return the coordinates of I; `where` holds dtype and device."""

    @abstractmethod
    def project(self, x: Tensor, y: Tensor) -> Point:
        """Π(x yᵀ), summed over the batch: the vector-Jacobian product of E ↦ E y at x."""

    @abstractmethod
    def compose(self, e: Point, q: Point) -> Point:
        """Return the coordinates of the matrix product E·Q."""

    @abstractmethod
    def norm(self, e: Point) -> Tensor:
        """Return an upper bound of the spectral norm ‖E‖, exact where that is cheap."""

    @property
    def moves(self) -> bool:
        return True

    @property
    def scalable(self) -> bool:
        return True

    def origin(self, n: int, where: Where) -> Point:
        return self.identity(where.count(n), **where.at) | {"ell": where.zero()}

    def scaled(self, q: Point, s: float | Tensor) -> Point:
        return {k: t if k == "ell" else (s * t).to(t.dtype) for k, t in q.items()}

    def step(self, q: Point, r: Residual, lr: float | Tensor, coin: bool, rule: StepSize) -> Point:
        del coin
        plus, minus = self.project(r.x, r.y), self.project(r.z, r.w)
        e = {k: plus[k] - minus[k] for k in plus}
        size, ell = rule(lr, q["ell"], lambda: self.norm(e), lambda: self.norm(plus) + self.norm(minus))
        return {k: subtract(q[k], size, t) for k, t in self.compose(e, q).items()} | {"ell": ell}


class Orthogonal(Group):
    """A constant orthogonal matrix C: no coordinates, never moves, C⁻¹ = Cᵀ."""

    @property
    def moves(self) -> bool:
        return False

    @property
    def scalable(self) -> bool:
        return False

    @property
    def orthogonal(self) -> bool:
        return True

    def origin(self, n: int, where: Where) -> Point:
        del n, where
        return {}

    def scaled(self, q: Point, s: float | Tensor) -> Point:
        raise ValueError(f"{self} is orthogonal and takes no scale, got {s}; compose it with Scalar() or Diagonal()")

    def solve(self, q: Point, x: Tensor) -> Tensor:
        return self.apply_t(q, x)

    def solve_t(self, q: Point, x: Tensor) -> Tensor:
        return self.apply(q, x)

    def logabsdet(self, q: Point, n: int) -> Tensor:
        del q, n
        return torch.zeros(())

    def singular_values(self, q: Point, n: int) -> Tensor:
        del q
        return torch.ones(n)

    def step(self, q: Point, r: Residual, lr: float | Tensor, coin: bool, rule: StepSize) -> Point:
        del r, lr, coin, rule
        return q
