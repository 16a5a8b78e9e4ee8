"""Kronecker products: one factor for each axis of a tensor."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from functools import reduce

import torch
from torch import Tensor

from psgd.algebra import MatrixAlgebra
from psgd.group import Group, Point, Residual, Where
from psgd.groups.composite import Composite
from psgd.groups.low_rank import LowRank
from psgd.groups.positive import Positive
from psgd.step_size import StepSize


@dataclass(frozen=True)
class Kronecker(Composite):
    """Q = A₁ ⊗ A₂ ⊗ …: part i acts along axis i of x reshaped to `shape`. PSGD_A, of any order.

    A factor sees the other axes as batch, over which `project` sums: partial traces need no rule of their own.
    The factors commute, so that each may count as the leftmost and meets the residual of the whole.

    >>> from psgd import Dense, Identity
    >>> group = Kronecker((2, 3), (Dense(), Identity()))
    >>> group.apply({"0": {"Q": torch.tensor([[0.0, 1.0], [1.0, 0.0]])}, "1": {}}, torch.arange(6.0))
    tensor([3., 4., 5., 0., 1., 2.])
    """

    shape: tuple[int, ...]
    parts: tuple[Group, ...]

    def __post_init__(self) -> None:
        if len(self.shape) != len(self.parts) or not self.parts:
            raise ValueError(f"Kronecker needs a factor for each axis, got {len(self.shape)} and {len(self.parts)}")
        if min(self.shape) < 1:
            raise ValueError(f"Kronecker needs axes of size >= 1, got shape={self.shape}")
        for size, part in zip(self.shape, self.parts, strict=True):
            part.check(size)

    def check(self, n: int) -> None:
        if n != math.prod(self.shape):
            raise ValueError(f"Kronecker of shape {self.shape} needs n={math.prod(self.shape)}, got n={n}")

    def origin(self, n: int, where: Where) -> Point:
        zipped = enumerate(zip(self.shape, self.parts, strict=True))
        return {str(i): part.origin(size, where) for i, (size, part) in zipped}

    def scaled(self, q: Point, s: float | Tensor) -> Point:
        able = [i for i, part in enumerate(self.parts) if part.scalable]
        if not able:
            raise ValueError(f"{self} has no factor that takes a scale, got {s}")
        return q | {str(i): self.parts[i].scaled(q[str(i)], s ** (1 / len(able))) for i in able}

    def balance(self, q: Point) -> Point:
        """Give the factors that are matrix algebras one common norm, besides balancing each."""
        q = super().balance(q)
        able = {str(i): part for i, part in enumerate(self.parts) if isinstance(part, (MatrixAlgebra, Positive))}
        if len(able) < 2:
            return q
        logs = torch.stack([part.norm(_coordinates(q[i])).log() for i, part in able.items()])
        factors = (logs.mean() - logs).exp()
        return q | {i: part.scaled(q[i], s) for (i, part), s in zip(able.items(), factors, strict=True)}

    def _move(self, x: Tensor, axis: int) -> Tensor:
        """View x as a tensor, with one axis last."""
        return x.unflatten(-1, self.shape).movedim(axis - len(self.shape), -1)

    def _each(self, action: str, q: Point, x: Tensor, skip: int = -1) -> Tensor:
        x = x.unflatten(-1, self.shape)
        for i, (part, p) in enumerate(self.pairs(q)):
            if i != skip:
                axis = i - len(self.shape)
                x = getattr(part, action)(p, x.movedim(axis, -1)).movedim(-1, axis)
        return x.flatten(-len(self.shape))

    def apply(self, q: Point, x: Tensor) -> Tensor:
        return self._each("apply", q, x)

    def apply_t(self, q: Point, x: Tensor) -> Tensor:
        return self._each("apply_t", q, x)

    def solve(self, q: Point, x: Tensor) -> Tensor:
        return self._each("solve", q, x)

    def solve_t(self, q: Point, x: Tensor) -> Tensor:
        return self._each("solve_t", q, x)

    def logabsdet(self, q: Point, n: int) -> Tensor:
        zipped = zip(self.shape, self.pairs(q), strict=True)
        return sum((part.logabsdet(p, size) * (n // size) for size, (part, p) in zipped), torch.zeros(()))

    def singular_values(self, q: Point, n: int) -> Tensor | None:
        values = self.values(q, self.shape)
        return None if values is None else reduce(lambda x, y: torch.outer(x, y).flatten(), values)

    def step(self, q: Point, r: Residual, lr: float | Tensor, coin: bool, rule: StepSize) -> Point:
        new, lr = {}, self.share(lr)
        for i, (part, p) in enumerate(self.pairs(q)):
            mine = r
            if part.moves and not isinstance(part, (MatrixAlgebra, LowRank)):  # these ignore what enters them
                mine = r._replace(h=self._each("apply", q, r.h, skip=i), v=self._each("solve_t", q, r.v, skip=i))
            new[str(i)] = part.step(p, mine.map(functools.partial(self._move, axis=i)), lr, coin, rule)
        return new


def _coordinates(q: Point) -> Point:
    return {k: t for k, t in q.items() if k != "ell"}
