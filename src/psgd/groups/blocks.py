"""Many equal blocks on the diagonal, moved side by side."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from psgd.group import Group, How, Point, Residual, Where
from psgd.step_size import StepSize


@dataclass(frozen=True)
class Blocks(Group):
    """Q = A₁ ⊕ A₂ ⊕ …, k×k blocks of one group. Leaves of the point have a leading axis: the block.

    Each block has a step size of its own, as the paper's section on band Hessians allows.

    >>> from psgd import Dense
    >>> Blocks(2, Dense()).init(6)["Q"].shape
    torch.Size([3, 2, 2])
    """

    k: int
    part: Group

    def __post_init__(self) -> None:
        if self.k < 1:
            raise ValueError(f"Blocks needs a block size k >= 1, got k={self.k}")
        self.part.check(self.k)

    def check(self, n: int) -> None:
        if n % self.k:
            raise ValueError(f"Blocks({self.k}) needs n divisible by {self.k}, got n={n}; Padded pads it")

    @property
    def moves(self) -> bool:
        return self.part.moves

    @property
    def scalable(self) -> bool:
        return self.part.scalable

    @property
    def orthogonal(self) -> bool:
        return self.part.orthogonal

    @property
    def probing(self) -> bool:
        return self.part.probing

    @property
    def noisy(self) -> bool:
        return self.part.noisy

    def origin(self, n: int, where: Where) -> Point:
        return _repeat(self.part.origin(self.k, where), n // self.k)

    def scaled(self, q: Point, s: float | Tensor) -> Point:
        """Return the coordinates of s·Q, or of sᵢ·Aᵢ for each block."""
        if isinstance(s, Tensor) and s.ndim:
            return torch.vmap(self.part.scaled)(q, s)
        return self.part.scaled(q, s)

    def balance(self, q: Point) -> Point:
        return torch.vmap(self.part.balance)(q) if self.moves else q

    def _split(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, self.k))

    def _each(self, action: Callable[[Point, Tensor], Tensor], q: Point, x: Tensor) -> Tensor:
        return torch.vmap(action, in_dims=(0, -2), out_dims=-2)(q, self._split(x)).flatten(-2)

    def apply(self, q: Point, x: Tensor) -> Tensor:
        return self._each(self.part.apply, q, x)

    def apply_t(self, q: Point, x: Tensor) -> Tensor:
        return self._each(self.part.apply_t, q, x)

    def solve(self, q: Point, x: Tensor) -> Tensor:
        return self._each(self.part.solve, q, x)

    def solve_t(self, q: Point, x: Tensor) -> Tensor:
        return self._each(self.part.solve_t, q, x)

    def ready(self, q: Point) -> Point:
        return torch.vmap(self.part.ready)(q) if self.moves else q

    def precondition(self, q: Point, g: Tensor, out: Tensor | None = None) -> Tensor:
        del out
        return self._each(self.part.precondition, q, g)

    def logabsdet(self, q: Point, n: int) -> Tensor:
        if not self.moves:
            return torch.zeros(())  # constants are orthogonal, or conjugates of such
        return torch.vmap(lambda p: self.part.logabsdet(p, self.k))(q).sum()

    def singular_values(self, q: Point, n: int) -> Tensor | None:
        if self.orthogonal:
            return torch.ones(n)
        if not self.moves:
            return super().singular_values(q, n)

        def one(p: Point) -> Any:
            return self.part.singular_values(p, self.k)

        return None if one(_first(q)) is None else torch.vmap(one)(q).flatten()

    def fitted(self, q: Point, v: Tensor, h: Tensor, how: How) -> Point:
        return self._moved(self.part.fitted, q, v, h, how._replace(out=None))

    def whitened(self, q: Point, v: Tensor, h: Tensor, how: How) -> Point:
        return self._moved(self.part.whitened, q, v, h, how._replace(out=None))

    def _moved(self, move: Callable[..., Point], q: Point, v: Tensor, h: Tensor, how: How) -> Point:
        if not self.moves:
            return q
        each = torch.vmap(lambda p, v, h: move(p, v, h, how), in_dims=(0, -2, -2))
        return each(q, self._split(v), self._split(h))

    def step(self, q: Point, r: Residual, lr: float | Tensor, coin: bool, rule: StepSize) -> Point:
        def one(p: Point, piece: Residual) -> Point:
            return self.part.step(p, piece, lr, coin, rule)

        return torch.vmap(one, in_dims=(0, -2))(q, r.map(self._split))


def _repeat(q: Point, count: int) -> Point:
    return {k: _repeat(t, count) if isinstance(t, dict) else t.expand(count, *t.shape).clone() for k, t in q.items()}


def _first(q: Point) -> Point:
    return {k: _first(t) if isinstance(t, dict) else t[0] for k, t in q.items()}
