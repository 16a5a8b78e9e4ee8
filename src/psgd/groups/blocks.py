"""Many equal blocks on the diagonal, moved side by side."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from psgd.group import Group, How, Point, Residual, Where
from psgd.linalg import ordinary
from psgd.points import YES, each, overwrite, size
from psgd.step_size import StepSize

PIECE = 1 << 22
"""About the bytes of points that are moved at once, where the new may be written over the old: what is computed on the
way stays in the cache, and takes no fresh memory."""


@dataclass(frozen=True)
class Blocks(Group):
    """Q = A₁ ⊕ A₂ ⊕ …, k×k blocks of one group. Leaves of the point have a leading axis: the block.

    Each block has a step size of its own, as the paper's section on band Hessians allows. Written over `out`, those
    blocks remain as they are whose step is not finite.

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
        return each(lambda t: t.expand(n // self.k, *t.shape).clone(), self.part.origin(self.k, where))

    def scaled(self, q: Point, s: float | Tensor) -> Point:
        """Return the coordinates of s·Q, or of sᵢ·Aᵢ for each block."""
        if isinstance(s, Tensor) and s.ndim:
            return torch.vmap(self.part.scaled)(q, s)
        return self.part.scaled(q, s)

    def balance(self, q: Point) -> Point:
        return torch.vmap(self.part.balance)(q) if self.moves else q

    def _split(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, self.k))

    def _rows(self, x: Tensor) -> Tensor:
        """View x with the blocks along a leading axis, as leaves have them."""
        return self._split(x).movedim(-2, 0)

    def _each(self, action: Callable[[Point, Tensor], Tensor], q: Point, x: Tensor) -> Tensor:
        return torch.vmap(action)(q, self._rows(x)).movedim(0, -2).flatten(-2)

    def _stacked(self, action: Callable[..., Any]) -> Callable[..., Any]:
        """Return what does for all blocks what `action` does for one."""
        return action if self.part.stacks else torch.vmap(action)

    def apply(self, q: Point, x: Tensor) -> Tensor:
        return self._each(self.part.apply, q, x)

    def apply_t(self, q: Point, x: Tensor) -> Tensor:
        return self._each(self.part.apply_t, q, x)

    def solve(self, q: Point, x: Tensor) -> Tensor:
        return self._each(self.part.solve, q, x)

    def solve_t(self, q: Point, x: Tensor) -> Tensor:
        return self._each(self.part.solve_t, q, x)

    def ready(self, q: Point, uses: float = math.inf) -> Point:
        return self._stacked(lambda p: self.part.ready(p, uses))(q) if self.moves else q

    def precondition(self, q: Point, g: Tensor, out: Tensor | None = None) -> Tensor:
        all_of, rows = self._stacked(self.part.precondition), self._rows(g)
        pieces = _pieces(q, len(rows))
        if len(pieces) < 2 or out is None or not ordinary(g, out):
            return all_of(q, rows).movedim(0, -2).flatten(-2)
        for piece in pieces:
            self._rows(out)[piece].copy_(all_of(_cut(q, piece), rows[piece]))
        return out

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

        return None if one(_cut(q, 0)) is None else torch.vmap(one)(q).flatten()

    def fitted(self, q: Point, v: Tensor, h: Tensor, how: How) -> Point:
        return self._moved(self.part.fitted, q, v, h, how)

    def whitened(self, q: Point, v: Tensor, h: Tensor, how: How) -> Point:
        return self._moved(self.part.whitened, q, v, h, how)

    def _moved(self, move: Callable[..., Point], q: Point, v: Tensor, h: Tensor, how: How) -> Point:
        if not self.moves:
            return q
        v, h, out, how = self._rows(v), self._rows(h), how.out, how._replace(out=None)
        all_of = self._stacked(lambda p, v, h: move(p, v, h, how))
        if out is None or not ordinary(v, h):
            return all_of(q, v, h)
        for piece in _pieces(out, len(h)):
            new = all_of(_cut(q, piece), v[piece], h[piece])
            overwrite(_cut(out, piece), new, YES, len(h[piece]))
        return out

    def step(self, q: Point, r: Residual, lr: float | Tensor, coin: bool, rule: StepSize) -> Point:
        def one(p: Point, piece: Residual) -> Point:
            return self.part.step(p, piece, lr, coin, rule)

        return torch.vmap(one, in_dims=(0, -2))(q, r.map(self._split))


def _pieces(q: Point, blocks: int) -> list[slice]:
    """Return which blocks are moved at once."""
    count = math.ceil(blocks / max(1, round(size(q) / PIECE)))
    return [slice(start, start + count) for start in range(0, blocks, count)]


def _cut(q: Point, piece: slice | int) -> Point:
    return each(lambda t: t[piece], q)
