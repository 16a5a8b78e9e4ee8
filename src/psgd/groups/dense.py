"""GL(n): every invertible matrix."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from psgd.algebra import MatrixAlgebra
from psgd.group import Point
from psgd.linalg import frobenius, lift, outer, solve


@dataclass(frozen=True)
class Dense(MatrixAlgebra):
    """GL(n), all of ℝⁿˣⁿ that is invertible. Solves with an LU: a kept inverse would drift.

    >>> Dense().init(2)["Q"]
    tensor([[1., 0.],
            [0., 1.]])
    """

    def identity(self, n: int, **where: Any) -> Point:
        return {"Q": torch.eye(n, **where)}

    def apply(self, q: Point, x: Tensor) -> Tensor:
        return x @ q["Q"].mT

    def apply_t(self, q: Point, x: Tensor) -> Tensor:
        return x @ q["Q"]

    def solve(self, q: Point, x: Tensor) -> Tensor:
        return solve(q["Q"], x)

    def solve_t(self, q: Point, x: Tensor) -> Tensor:
        return solve(q["Q"].mT, x)

    def logabsdet(self, q: Point, n: int) -> Tensor:
        return torch.linalg.slogdet(lift(q["Q"])).logabsdet

    def project(self, x: Tensor, y: Tensor) -> Point:
        return {"Q": outer(x, y)}

    def compose(self, e: Point, q: Point) -> Point:
        return {"Q": e["Q"] @ q["Q"]}

    def norm(self, e: Point) -> Tensor:
        return frobenius(e["Q"])  # E has rank two for a single pair
