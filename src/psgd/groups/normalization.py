"""Feature normalization as a sparse affine group."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from psgd.algebra import MatrixAlgebra
from psgd.group import Point
from psgd.linalg import batch_sum, frobenius, lift


@dataclass(frozen=True)
class Normalization(MatrixAlgebra):
    """Q = diag(d) + u·eₙᵀ: diagonal and last column, as batch, layer and group normalization act on [x, 1].

    >>> Normalization().matrix({"d": torch.ones(3), "u": torch.tensor([4.0, 5.0])}, 3)
    tensor([[1., 0., 4.],
            [0., 1., 5.],
            [0., 0., 1.]])
    """

    def identity(self, n: int, **where: Any) -> Point:
        return {"d": torch.ones(n, **where), "u": torch.zeros(n - 1, **where)}

    def apply(self, q: Point, x: Tensor) -> Tensor:
        y = q["d"] * x
        return torch.cat((y[..., :-1] + q["u"] * x[..., -1:], y[..., -1:]), -1)

    def apply_t(self, q: Point, x: Tensor) -> Tensor:
        y = q["d"] * x
        return torch.cat((y[..., :-1], y[..., -1:] + (q["u"] * x[..., :-1]).sum(-1, keepdim=True)), -1)

    def solve(self, q: Point, x: Tensor) -> Tensor:
        last = x[..., -1:] / q["d"][-1]
        return torch.cat(((x[..., :-1] - q["u"] * last) / q["d"][:-1], last), -1)

    def solve_t(self, q: Point, x: Tensor) -> Tensor:
        y = x[..., :-1] / q["d"][:-1]
        return torch.cat((y, (x[..., -1:] - (q["u"] * y).sum(-1, keepdim=True)) / q["d"][-1]), -1)

    def logabsdet(self, q: Point, n: int) -> Tensor:
        return q["d"].abs().log().sum()

    def project(self, x: Tensor, y: Tensor) -> Point:
        return {"d": batch_sum(x * y), "u": batch_sum(x[..., :-1] * y[..., -1:])}

    def compose(self, e: Point, q: Point) -> Point:
        return {"d": e["d"] * q["d"], "u": e["d"][:-1] * q["u"] + e["u"] * q["d"][-1]}

    def norm(self, e: Point) -> Tensor:
        d, u = lift(e["d"]), lift(e["u"])
        column = torch.hypot(frobenius(u), d[-1].abs())
        return torch.hypot(torch.cat((d[:-1].abs(), torch.zeros_like(d[:1]))).amax(), column)  # two sets of columns
