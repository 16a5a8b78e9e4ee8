"""Conjugation by a fixed matrix: the same group in other coordinates."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from psgd.group import Group, Point, Residual, Where
from psgd.step_size import StepSize


@dataclass(frozen=True)
class Conjugate(Group):
    """Q = C⁻¹ A C: A moves, the point C of another group stays. Useful where C⁻¹ is cheap.

    C starts at its group's origin; put any other point in its place with `q | {"C": point}`.

    >>> import torch
    >>> from psgd import Diagonal, Normalization
    >>> group = Conjugate(Normalization(), Diagonal())
    >>> q = group.init(2) | {"C": {"d": torch.ones(2), "u": torch.tensor([3.0])}}
    >>> q["A"]["d"] = torch.tensor([1.0, 2.0])
    >>> group.matrix(q, 2)
    tensor([[ 1., -3.],
            [ 0.,  2.]])
    """

    by: Group
    part: Group

    def check(self, n: int) -> None:
        self.by.check(n)
        self.part.check(n)

    @property
    def moves(self) -> bool:
        return self.part.moves

    @property
    def scalable(self) -> bool:
        return self.part.scalable

    @property
    def orthogonal(self) -> bool:
        return self.by.orthogonal and self.part.orthogonal

    def origin(self, n: int, where: Where) -> Point:
        c = self.by.origin(n, where)
        return {"A": self.part.origin(n, where), "C": c}

    def scaled(self, q: Point, s: float | Tensor) -> Point:
        return q | {"A": self.part.scaled(q["A"], s)}

    def balance(self, q: Point) -> Point:
        return q | {"A": self.part.balance(q["A"])}

    def apply(self, q: Point, x: Tensor) -> Tensor:
        return self.by.solve(q["C"], self.part.apply(q["A"], self.by.apply(q["C"], x)))

    def apply_t(self, q: Point, x: Tensor) -> Tensor:
        return self.by.apply_t(q["C"], self.part.apply_t(q["A"], self.by.solve_t(q["C"], x)))

    def solve(self, q: Point, x: Tensor) -> Tensor:
        return self.by.solve(q["C"], self.part.solve(q["A"], self.by.apply(q["C"], x)))

    def solve_t(self, q: Point, x: Tensor) -> Tensor:
        return self.by.apply_t(q["C"], self.part.solve_t(q["A"], self.by.solve_t(q["C"], x)))

    def logabsdet(self, q: Point, n: int) -> Tensor:
        return self.part.logabsdet(q["A"], n)

    def singular_values(self, q: Point, n: int) -> Tensor | None:
        return self.part.singular_values(q["A"], n) if self.by.orthogonal else super().singular_values(q, n)

    def step(self, q: Point, r: Residual, lr: float | Tensor, coin: bool, rule: StepSize) -> Point:
        def right(x: Tensor) -> Tensor:  # h, y and w live in the space of A's vectors …
            return self.by.apply(q["C"], x)

        def left(x: Tensor) -> Tensor:  # … and v, z and x in that of its covectors
            return self.by.solve_t(q["C"], x)

        inner = Residual(right(r.h), left(r.v), left(r.x), right(r.y), left(r.z), right(r.w))
        return q | {"A": self.part.step(q["A"], inner, lr, coin, rule)}
