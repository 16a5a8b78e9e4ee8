"""What groups made of parts have in common: a tuple of parts, and a point keyed "0", "1", …."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from psgd.group import Group, Point, tensors
from psgd.linalg import lift

if TYPE_CHECKING:
    from torch import Tensor


class Composite(Group):
    """A group with parts, each with its own point: q = {"0": …, "1": …, …}."""

    parts: tuple[Group, ...]

    def pairs(self, q: Point) -> Iterator[tuple[Group, Point]]:
        """Iterate over the parts with their points."""
        return ((part, q[str(i)]) for i, part in enumerate(self.parts))

    @property
    def moves(self) -> bool:
        return any(part.moves for part in self.parts)

    @property
    def scalable(self) -> bool:
        return any(part.scalable for part in self.parts)

    @property
    def orthogonal(self) -> bool:
        return all(part.orthogonal for part in self.parts)

    def values(self, q: Point, sizes: Sequence[int]) -> list[Tensor] | None:
        """Return the singular values of each part, on one device and in one dtype, or None if one has none."""
        found = [part.singular_values(p, n) for n, (part, p) in zip(sizes, self.pairs(q), strict=True)]
        known = [t for t in found if t is not None]
        if len(known) < len(found):
            return None
        like = lift(next(tensors(q), known[0]))
        return [t.to(like) for t in known]

    def share(self, lr: float | Tensor) -> float | Tensor:
        """μ over the number of parts that move, so that their relative moves add up to μ.

        Factors that move together from one residual add up: with μ each, two of them overshoot for μ > ½
        (the paper's joint step of d with U or V).
        """
        return lr / max(1, sum(part.moves for part in self.parts))

    def prepared(self, q: Point) -> Point:
        return {str(i): part.prepared(p) for i, (part, p) in enumerate(self.pairs(q))}

    def balance(self, q: Point) -> Point:
        return {str(i): part.balance(p) for i, (part, p) in enumerate(self.pairs(q))}
