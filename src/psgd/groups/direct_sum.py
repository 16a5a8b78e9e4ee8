"""Block-diagonal groups: different blocks, and many alike."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from psgd.group import Group, Point, Residual, Where
from psgd.groups.composite import Composite
from psgd.step_size import StepSize


@dataclass(frozen=True)
class DirectSum(Composite):
    """Q = A ⊕ B ⊕ …: the i-th part acts on the next sizes[i] entries. Each part has a step size of its own.

    >>> from psgd import Diagonal, Shift
    >>> DirectSum((2, 3), (Diagonal(), Shift(1))).apply({"0": {"d": torch.zeros(2)}, "1": {}}, torch.arange(5))
    tensor([0., 0., 4., 2., 3.])
    """

    sizes: tuple[int, ...]
    parts: tuple[Group, ...]

    def __post_init__(self) -> None:
        if len(self.sizes) != len(self.parts) or not self.parts:
            raise ValueError(f"DirectSum needs a size for each part, got {len(self.sizes)} and {len(self.parts)}")
        if min(self.sizes) < 1:
            raise ValueError(f"DirectSum needs sizes >= 1, got sizes={self.sizes}")
        for size, part in zip(self.sizes, self.parts, strict=True):
            part.check(size)

    def check(self, n: int) -> None:
        if n != sum(self.sizes):
            raise ValueError(f"DirectSum of sizes {self.sizes} needs n={sum(self.sizes)}, got n={n}")

    @property
    def scalable(self) -> bool:
        return all(part.scalable for part in self.parts)

    def origin(self, n: int, where: Where) -> Point:
        zipped = enumerate(zip(self.sizes, self.parts, strict=True))
        return {str(i): part.origin(size, where) for i, (size, part) in zipped}

    def scaled(self, q: Point, s: float | Tensor) -> Point:
        return {str(i): part.scaled(p, s) for i, (part, p) in enumerate(self.pairs(q))}

    def _each(self, action: str, q: Point, x: Tensor) -> Tensor:
        pieces = zip(self.pairs(q), x.split(self.sizes, -1), strict=True)
        return torch.cat([getattr(part, action)(p, piece) for (part, p), piece in pieces], -1)

    def apply(self, q: Point, x: Tensor) -> Tensor:
        return self._each("apply", q, x)

    def apply_t(self, q: Point, x: Tensor) -> Tensor:
        return self._each("apply_t", q, x)

    def solve(self, q: Point, x: Tensor) -> Tensor:
        return self._each("solve", q, x)

    def solve_t(self, q: Point, x: Tensor) -> Tensor:
        return self._each("solve_t", q, x)

    def logabsdet(self, q: Point, n: int) -> Tensor:
        zipped = zip(self.sizes, self.pairs(q), strict=True)
        return sum((part.logabsdet(p, size) for size, (part, p) in zipped), torch.zeros(()))

    def singular_values(self, q: Point, n: int) -> Tensor | None:
        values = self.values(q, self.sizes)
        return None if values is None else torch.cat(values)

    def step(self, q: Point, r: Residual, lr: float | Tensor, coin: bool, rule: StepSize) -> Point:
        pieces = zip(*(t.split(self.sizes, -1) for t in r), strict=True)
        zipped = enumerate(zip(self.pairs(q), pieces, strict=True))
        return {str(i): part.step(p, Residual(*piece), lr, coin, rule) for i, ((part, p), piece) in zipped}
