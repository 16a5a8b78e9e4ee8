"""Q = diag(a) + diag(b)·σ for a permutation σ with σ∘σ = e: pairs of entries, each a 2×2 matrix."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from psgd.algebra import MatrixAlgebra
from psgd.group import Point
from psgd.linalg import batch_sum, lift


class Involution(MatrixAlgebra):
    """Q x = a∘x + b∘σ(x); Claim 3.1 with K = {e, σ}, in closed form."""

    @abstractmethod
    def sigma(self, x: Tensor) -> Tensor:
        """Return σ(x), on the last axis."""

    def off_diagonal(self, x: Tensor) -> Tensor:
        """Return x with zeros where σ has a fixed point: there b would repeat a."""
        return x

    def identity(self, n: int, **where: Any) -> Point:
        return {"a": torch.ones(n, **where), "b": torch.zeros(n, **where)}

    def apply(self, q: Point, x: Tensor) -> Tensor:
        return q["a"] * x + q["b"] * self.sigma(x)

    def apply_t(self, q: Point, x: Tensor) -> Tensor:
        return q["a"] * x + self.sigma(q["b"] * x)

    def solve(self, q: Point, x: Tensor) -> Tensor:
        return (self.sigma(q["a"]) * x - q["b"] * self.sigma(x)) / self._determinants(q)

    def solve_t(self, q: Point, x: Tensor) -> Tensor:
        return (self.sigma(q["a"]) * x - self.sigma(q["b"] * x)) / self._determinants(q)

    def logabsdet(self, q: Point, n: int) -> Tensor:
        return self._determinants(q).abs().log().sum() / 2  # every 2×2 block stands twice

    def singular_values(self, q: Point, n: int) -> Tensor:
        wide, entry = {k: q[k].double() for k in ("a", "b")}, torch.arange(n, device=q["a"].device)
        largest = self._norms(wide)
        smallest = self._determinants(wide).abs() / largest  # the difference of the two hypotenuses would cancel
        return torch.where(entry <= self.sigma(entry), largest, smallest).to(lift(q["a"]))  # one of each to a pair

    def _determinants(self, q: Point) -> Tensor:
        """c = a∘σ(a) − b∘σ(b), the determinant of each entry's 2×2 block."""
        return q["a"] * self.sigma(q["a"]) - q["b"] * self.sigma(q["b"])

    def project(self, x: Tensor, y: Tensor) -> Point:
        return {"a": batch_sum(x * y), "b": self.off_diagonal(batch_sum(x * self.sigma(y)))}

    def compose(self, e: Point, q: Point) -> Point:
        return {
            "a": e["a"] * q["a"] + e["b"] * self.sigma(q["b"]),
            "b": e["a"] * q["b"] + e["b"] * self.sigma(q["a"]),
        }

    def norm(self, e: Point) -> Tensor:
        # Exact. The paper's max(max|a|, max|b|) may be half of it, which lets blocks turn over for μ > ½.
        return self._norms(e).amax()

    def _norms(self, e: Point) -> Tensor:
        """‖[[a, b], [b′, a′]]‖ = (|(a + a′, b − b′)| + |(a − a′, b + b′)|)/2 of each entry's 2×2 block."""
        a, b = lift(e["a"]), lift(e["b"])
        a_, b_ = self.sigma(a), self.sigma(b)
        return (torch.hypot(a + a_, b - b_) + torch.hypot(a - a_, b + b_)) / 2


@dataclass(frozen=True)
class XMat(Involution):
    """Q = diag(a) + adiag(b), σ the flip; Example 2, Algorithm 2. Any n: the centre of b is zero for odd n.

    >>> XMat().matrix({"a": torch.ones(3), "b": torch.tensor([2.0, 0.0, 3.0])}, 3)
    tensor([[1., 0., 2.],
            [0., 1., 0.],
            [3., 0., 1.]])
    """

    def sigma(self, x: Tensor) -> Tensor:
        return x.flip(-1)

    def off_diagonal(self, x: Tensor) -> Tensor:
        if x.shape[-1] % 2 == 0:
            return x
        k = x.shape[-1] // 2
        return torch.cat((x[..., :k], torch.zeros_like(x[..., :1]), x[..., k + 1 :]), -1)


@dataclass(frozen=True)
class Butterfly(Involution):
    """Q = diag(a) + diag(b)·s, s the circular shift by n/2; Example 3, the block of Kaleidoscope matrices.

    >>> Butterfly().matrix({"a": torch.ones(2), "b": torch.tensor([2.0, 3.0])}, 2)
    tensor([[1., 2.],
            [3., 1.]])
    """

    def check(self, n: int) -> None:
        if n % 2:
            raise ValueError(f"Butterfly() needs an even n, got n={n}; XMat() takes any, Padded(Butterfly(), 2) pads")

    def sigma(self, x: Tensor) -> Tensor:
        return x.roll(x.shape[-1] // 2, -1)
