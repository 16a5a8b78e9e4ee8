"""Triangular matrices: feature whitening."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from psgd.algebra import MatrixAlgebra
from psgd.group import Point
from psgd.linalg import frobenius, outer, solve_triangular


@dataclass(frozen=True)
class Triangular(MatrixAlgebra):
    """Upper triangular Q with a positive diagonal: the paper's dense preconditioner, and PSGD_A's factor.

    >>> Triangular().solve({"Q": torch.tensor([[2.0, 1.0], [0.0, 1.0]])}, torch.tensor([3.0, 1.0]))
    tensor([1., 1.])
    """

    _upper = True

    def _keep(self, t: Tensor) -> Tensor:
        return t.triu()

    def identity(self, n: int, **where: Any) -> Point:
        return {"Q": torch.eye(n, **where)}

    def apply(self, q: Point, x: Tensor) -> Tensor:
        return x @ q["Q"].mT

    def apply_t(self, q: Point, x: Tensor) -> Tensor:
        return x @ q["Q"]

    def solve(self, q: Point, x: Tensor) -> Tensor:
        return solve_triangular(q["Q"], x, self._upper)

    def solve_t(self, q: Point, x: Tensor) -> Tensor:
        return solve_triangular(q["Q"].mT, x, not self._upper)

    def logabsdet(self, q: Point, n: int) -> Tensor:
        return q["Q"].diagonal().abs().log().sum()

    def project(self, x: Tensor, y: Tensor) -> Point:
        return {"Q": self._keep(outer(x, y))}

    def compose(self, e: Point, q: Point) -> Point:
        return {"Q": e["Q"] @ q["Q"]}

    def norm(self, e: Point) -> Tensor:
        return frobenius(e["Q"])


@dataclass(frozen=True)
class LowerTriangular(Triangular):
    """Lower triangular Q with a positive diagonal.

    >>> LowerTriangular().project(torch.ones(2), torch.ones(2))["Q"]
    tensor([[1., 0.],
            [1., 1.]])
    """

    _upper = False

    def _keep(self, t: Tensor) -> Tensor:
        return t.tril()
