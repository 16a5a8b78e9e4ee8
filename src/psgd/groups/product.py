"""Products: the chain rule, as in back-propagation."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from psgd.across import ALONE, Across
from psgd.group import Group, How, Point, Residual, Where
from psgd.groups import uvd
from psgd.groups.composite import Composite
from psgd.step_size import StepSize


@dataclass(frozen=True)
class Product(Composite):
    """Q = A·B·…, each factor on its own group; written A @ B.

    Factor A of Q = L·A·R sees x yᵀ − z wᵀ. A sweep from right to left computes y and z on the way to a = Qh and
    b = Q⁻ᵀv; a sweep back computes x = Lᵀa and w = L⁻¹b. (Solving back for y and z would lose three digits of
    float32 on an ill-conditioned low-rank factor.)

    >>> from psgd import Diagonal, LowRank
    >>> LowRank(3) @ Diagonal()
    LowRank(rank=3) @ Diagonal()
    """

    parts: tuple[Group, ...]

    def __post_init__(self) -> None:
        if not self.parts:
            raise ValueError("Product needs at least one factor, got none")
        flat = (p.parts if isinstance(p, Product) else (p,) for p in self.parts)
        object.__setattr__(self, "parts", tuple(factor for parts in flat for factor in parts))

    def __repr__(self) -> str:
        return " @ ".join(map(repr, self.parts))

    def check(self, n: int) -> None:
        for factor in self.parts:
            factor.check(n)

    def origin(self, n: int, where: Where) -> Point:
        return {str(i): f.origin(n, where) for i, f in enumerate(self.parts)}

    def scaled(self, q: Point, s: float | Tensor) -> Point:
        for i, (factor, p) in reversed(list(enumerate(self.pairs(q)))):
            if factor.scalable:
                return q | {str(i): factor.scaled(p, s)}
        raise ValueError(f"{self} has no factor that takes a scale, got {s}; add Scalar() or Diagonal()")

    def apply(self, q: Point, x: Tensor) -> Tensor:
        for factor, p in reversed(list(self.pairs(q))):
            x = factor.apply(p, x)
        return x

    def apply_t(self, q: Point, x: Tensor) -> Tensor:
        for factor, p in self.pairs(q):
            x = factor.apply_t(p, x)
        return x

    def solve(self, q: Point, x: Tensor) -> Tensor:
        for factor, p in self.pairs(q):
            x = factor.solve(p, x)
        return x

    def solve_t(self, q: Point, x: Tensor) -> Tensor:
        for factor, p in reversed(list(self.pairs(q))):
            x = factor.solve_t(p, x)
        return x

    def logabsdet(self, q: Point, n: int) -> Tensor:
        return sum((factor.logabsdet(p, n) for factor, p in self.pairs(q)), torch.zeros(()))

    def singular_values(self, q: Point, n: int) -> Tensor | None:
        others = [(factor, p) for factor, p in self.pairs(q) if not factor.orthogonal]
        if len(others) > 1:
            return super().singular_values(q, n)
        factor, p = next(iter(others or self.pairs(q)))
        return factor.singular_values(p, n)

    def in_pieces(self, q: Point, *vectors: Tensor) -> bool:
        return uvd.fits(self.parts, q, *vectors) and len(uvd.pieces(vectors[0])) > 1

    def fitted(self, q: Point, v: Tensor, h: Tensor, how: How) -> Point:
        if uvd.fits(self.parts, q, v, h) or how.across is not ALONE:
            new = uvd.fitted(q, v, h, how._replace(lr=self.share(how.lr)))
            if new is not None:
                return new
        q = self.prepared(q)
        pairs = self._forward(q, h, v)
        return self._backward(q, pairs, *pairs[0], how.lr, how.coin, how.rule)

    def precondition(self, q: Point, g: Tensor, out: Tensor | None = None, across: Across = ALONE) -> Tensor:
        if uvd.fits(self.parts, q, g) or across is not ALONE:
            return uvd.precondition(q, g, out, across)
        return super().precondition(q, g)

    def step(self, q: Point, r: Residual, lr: float | Tensor, coin: bool, rule: StepSize) -> Point:
        return self._backward(q, self._forward(q, r.h, r.v), r.x, r.w, lr, coin, rule)

    def _forward(self, q: Point, h: Tensor, v: Tensor) -> list[tuple[Tensor, Tensor]]:
        """[(y, z) as they leave the first factor, …, as they leave the last, (h, v)]."""
        pairs = [(h, v)]
        for factor, p in reversed(list(self.pairs(q))):
            h, v = factor.apply(p, h), factor.solve_t(p, v)
            pairs.insert(0, (h, v))
        return pairs

    def _backward(
        self,
        q: Point,
        pairs: list[tuple[Tensor, Tensor]],
        x: Tensor,
        w: Tensor,
        lr: float | Tensor,
        coin: bool,
        rule: StepSize,
    ) -> Point:
        new, lr = {}, self.share(lr)
        for i, (factor, p) in enumerate(self.pairs(q)):
            (y, z), (h, v) = pairs[i], pairs[i + 1]
            new[str(i)] = factor.step(p, Residual(h, v, x, y, z, w), lr, coin, rule)
            if i + 1 < len(self.parts):
                x, w = factor.apply_t(p, x), factor.solve(p, w)
        return new
