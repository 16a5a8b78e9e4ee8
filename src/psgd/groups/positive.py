"""Symmetric positive matrices P, kept as they are: Q = P^½ is made only for who asks for it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from psgd.group import Group, Point, Residual, Where
from psgd.linalg import frobenius
from psgd.step_size import StepSize


@dataclass(frozen=True)
class Positive(Group):
    """P of a factor of `InverseFree`, which moves it by `Direct()`.

    Rounding leaves P positive up to a condition number of about 10⁶ in float32; coarser numbers are refused.

    >>> group = Positive()
    >>> q = group.init(2, scale=2.0)
    >>> q["P"], group.apply(q, torch.ones(2)), group.precondition(q, torch.ones(2))
    (tensor([[4., 0.],
            [0., 4.]]), tensor([2., 2.]), tensor([4., 4.]))
    """

    @property
    def moves(self) -> bool:
        return True

    @property
    def scalable(self) -> bool:
        return True

    def origin(self, n: int, where: Where) -> Point:
        if where.zero().dtype != where.dtype:
            raise ValueError(
                f"Positive() needs numbers of at least float32, got {where.dtype}, in which P would not stay positive: "
                "kron(Quadratic()) and kron(Procrustes()) move Q instead"
            )
        return {"P": torch.eye(n, **where.at), "ell": where.zero()}

    def scaled(self, q: Point, s: float | Tensor) -> Point:
        return q | {"P": (s * s * q["P"]).to(q["P"].dtype)}

    def precondition(self, q: Point, g: Tensor, out: Tensor | None = None) -> Tensor:
        del out
        return g @ q["P"]

    def apply(self, q: Point, x: Tensor) -> Tensor:
        return x @ _power(q, 0.5)

    def apply_t(self, q: Point, x: Tensor) -> Tensor:
        return self.apply(q, x)

    def solve(self, q: Point, x: Tensor) -> Tensor:
        return x @ _power(q, -0.5)

    def solve_t(self, q: Point, x: Tensor) -> Tensor:
        return self.solve(q, x)

    def logabsdet(self, q: Point, n: int) -> Tensor:
        return torch.linalg.slogdet(q["P"]).logabsdet / 2

    def singular_values(self, q: Point, n: int) -> Tensor:
        return torch.linalg.eigvalsh(q["P"]).abs().sqrt()

    def norm(self, q: Point) -> Tensor:
        """Return a size of Q."""
        return frobenius(q["P"]).sqrt()

    def step(self, q: Point, r: Residual, lr: float | Tensor, coin: bool, rule: StepSize) -> Point:
        raise ValueError(f"{self} moves as a factor of InverseFree, by Direct(), and of no other group")


def _power(q: Point, exponent: float) -> Tensor:
    values, vectors = torch.linalg.eigh(q["P"])
    return (vectors * values.abs().pow(exponent)[..., None, :]) @ vectors.mT
