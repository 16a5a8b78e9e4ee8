"""Incomplete triangular matrices: whitening of a few features, scaling of the rest."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from psgd.algebra import MatrixAlgebra
from psgd.group import Point
from psgd.linalg import batch_sum, frobenius, maximum_modulus, outer, solve_triangular


@dataclass(frozen=True)
class IncompleteTriangular(MatrixAlgebra):
    """Q = [[T, B], [0, diag(d)]]: the first k rows of an upper triangular matrix, the rest diagonal.

    >>> IncompleteTriangular(1).matrix({"T": torch.tensor([[1.0, 2.0, 3.0]]), "d": torch.tensor([4.0, 5.0])}, 3)
    tensor([[1., 2., 3.],
            [0., 4., 0.],
            [0., 0., 5.]])
    """

    k: int

    def __post_init__(self) -> None:
        if self.k < 1:
            raise ValueError(f"IncompleteTriangular needs k >= 1 whole rows, got k={self.k}; Diagonal() has none")

    def check(self, n: int) -> None:
        if n <= self.k:
            raise ValueError(f"{self} needs n > {self.k}, got n={n}; Triangular() is the whole one")

    def identity(self, n: int, **where: Any) -> Point:
        return {"T": torch.eye(self.k, n, **where), "d": torch.ones(n - self.k, **where)}

    def apply(self, q: Point, x: Tensor) -> Tensor:
        return torch.cat((x @ q["T"].mT, q["d"] * x[..., self.k :]), -1)

    def apply_t(self, q: Point, x: Tensor) -> Tensor:
        y = x[..., : self.k] @ q["T"]
        return torch.cat((y[..., : self.k], y[..., self.k :] + q["d"] * x[..., self.k :]), -1)

    def solve(self, q: Point, x: Tensor) -> Tensor:
        t, b = q["T"][:, : self.k], q["T"][:, self.k :]
        y = x[..., self.k :] / q["d"]
        return torch.cat((solve_triangular(t, x[..., : self.k] - y @ b.mT, upper=True), y), -1)

    def solve_t(self, q: Point, x: Tensor) -> Tensor:
        t, b = q["T"][:, : self.k], q["T"][:, self.k :]
        y = solve_triangular(t.mT, x[..., : self.k], upper=False)
        return torch.cat((y, (x[..., self.k :] - y @ b) / q["d"]), -1)

    def logabsdet(self, q: Point, n: int) -> Tensor:
        return q["T"].diagonal().abs().log().sum() + q["d"].abs().log().sum()

    def project(self, x: Tensor, y: Tensor) -> Point:
        return {"T": outer(x[..., : self.k], y).triu(), "d": batch_sum((x * y)[..., self.k :])}

    def compose(self, e: Point, q: Point) -> Point:
        t = e["T"][:, : self.k] @ q["T"]
        t = torch.cat((t[:, : self.k], t[:, self.k :] + e["T"][:, self.k :] * q["d"]), -1)
        return {"T": t, "d": e["d"] * q["d"]}

    def norm(self, e: Point) -> Tensor:
        return torch.hypot(frobenius(e["T"]), maximum_modulus(e["d"]))  # of two stacked blocks of rows
