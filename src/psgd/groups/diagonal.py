"""Scaling: every coordinate alone, or all of them alike."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from psgd.algebra import MatrixAlgebra
from psgd.group import How, Point
from psgd.linalg import batch_sum, chunks, goes, lift, maximum_modulus


@dataclass(frozen=True)
class Diagonal(MatrixAlgebra):
    """Q x = d ∘ x; Claim 3.1 with K = {e}. The preconditioner of Jacobi, ESGD and AdaHessian.

    >>> q = Diagonal().init(3, scale=2.0)
    >>> Diagonal().precondition(q, torch.ones(3))
    tensor([4., 4., 4.])
    """

    def identity(self, n: int, **where: Any) -> Point:
        return {"d": torch.ones(n, **where)}

    def apply(self, q: Point, x: Tensor) -> Tensor:
        return q["d"] * x

    def apply_t(self, q: Point, x: Tensor) -> Tensor:
        return q["d"] * x

    def solve(self, q: Point, x: Tensor) -> Tensor:
        return x / q["d"]

    def solve_t(self, q: Point, x: Tensor) -> Tensor:
        return x / q["d"]

    def logabsdet(self, q: Point, n: int) -> Tensor:
        return q["d"].abs().log().sum()

    def singular_values(self, q: Point, n: int) -> Tensor:
        return lift(q["d"]).abs()

    def project(self, x: Tensor, y: Tensor) -> Point:
        return {"d": batch_sum(x * y)}

    def compose(self, e: Point, q: Point) -> Point:
        return {"d": e["d"] * q["d"]}

    def norm(self, e: Point) -> Tensor:
        return maximum_modulus(e["d"])

    def precondition(self, q: Point, g: Tensor, out: Tensor | None = None) -> Tensor:
        return (q["d"] * g if out is None else torch.mul(q["d"], g, out=out)).mul_(q["d"])

    @property
    def probing(self) -> bool:
        return False

    def whitened(self, q: Point, v: Tensor, h: Tensor, how: How) -> Point:
        return self.fitted(q, _mean(h), h, how)

    def fitted(self, q: Point, v: Tensor, h: Tensor, how: How) -> Point:
        """As for every algebra, chunk by chunk."""
        d = q["d"]
        if v.ndim > 1 or h.ndim > 1 or lift(d) is not d:
            return super().fitted(q, v, h, how)
        pieces, zero = chunks(len(d), d), d.new_zeros(())  # a shard may be empty

        def squares(i: int, j: int) -> tuple[Tensor, Tensor]:
            y, z = d[i:j] * h[i:j], v[i:j] / d[i:j]
            return y.mul_(y), z.mul_(z)

        def norm() -> Tensor:
            found = [torch.sub(*squares(i, j)).abs_().amax() for i, j in pieces]
            return how.across.max(torch.stack([*found, zero]).amax())[0]

        def bound() -> Tensor:
            found = [torch.stack([t.amax() for t in squares(i, j)]) for i, j in pieces]
            up, down = how.across.max(*torch.stack([*found, torch.stack((zero, zero))]).amax(0))
            return up + down

        size, ell = how.rule(how.lr, q["ell"], norm, bound)
        if how.out is not None and not (goes(size) and how.across.curved):
            return q
        new = torch.empty_like(d) if how.out is None else how.out["d"]
        for i, j in pieces:
            y, z = squares(i, j)
            new[i:j] = torch.addcmul(d[i:j], y.sub_(z).mul_(-size), d[i:j])
        return {"d": new, "ell": ell}


@dataclass(frozen=True)
class Scalar(MatrixAlgebra):
    """Q x = s x, the group ℝ₊ of a common scale.

    >>> Scalar().logabsdet(Scalar().init(4, scale=1.0), 4)
    tensor(0.)
    """

    def identity(self, n: int, **where: Any) -> Point:
        return {"s": torch.ones((), **where)}

    def apply(self, q: Point, x: Tensor) -> Tensor:
        return q["s"] * x

    def apply_t(self, q: Point, x: Tensor) -> Tensor:
        return q["s"] * x

    def solve(self, q: Point, x: Tensor) -> Tensor:
        return x / q["s"]

    def solve_t(self, q: Point, x: Tensor) -> Tensor:
        return x / q["s"]

    def logabsdet(self, q: Point, n: int) -> Tensor:
        return n * q["s"].abs().log()

    def singular_values(self, q: Point, n: int) -> Tensor:
        return lift(q["s"]).abs().expand(n)

    def project(self, x: Tensor, y: Tensor) -> Point:
        return {"s": (x * y).sum()}

    def compose(self, e: Point, q: Point) -> Point:
        return {"s": e["s"] * q["s"]}

    def norm(self, e: Point) -> Tensor:
        return maximum_modulus(e["s"])

    @property
    def probing(self) -> bool:
        return False

    def whitened(self, q: Point, v: Tensor, h: Tensor, how: How) -> Point:
        return self.fitted(q, _mean(h), h, how)


def _mean(h: Tensor) -> Tensor:
    """Return the probe that gives what random ones give in the mean, for as many pairs as there are."""
    return torch.full_like(h[(0,) * (h.ndim - 1)], math.prod(h.shape[:-1]) ** 0.5)
