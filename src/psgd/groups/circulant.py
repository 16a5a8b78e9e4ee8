"""Circulant matrices: filters, diagonal in the Fourier basis."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fft import fft, irfft, rfft

from psgd.algebra import MatrixAlgebra
from psgd.group import Point
from psgd.linalg import batch_sum, lift


def _filter(response: Tensor, x: Tensor) -> Tensor:
    """Multiply the spectrum of x by a frequency response."""
    return irfft(response * rfft(lift(x)), n=x.shape[-1]).to(x.dtype)


@dataclass(frozen=True)
class Circulant(MatrixAlgebra):
    """Q x = c ⊛ x, circular convolution by FFT; c is the first column. The cyclic group of the paper's table.

    >>> Circulant().matrix({"c": torch.tensor([1.0, 2.0, 3.0])}, 3).round()
    tensor([[1., 3., 2.],
            [2., 1., 3.],
            [3., 2., 1.]])
    """

    def identity(self, n: int, **where: Any) -> Point:
        return {"c": torch.eye(1, n, **where)[0]}

    def apply(self, q: Point, x: Tensor) -> Tensor:
        return _filter(rfft(lift(q["c"])), x)

    def apply_t(self, q: Point, x: Tensor) -> Tensor:
        return _filter(rfft(lift(q["c"])).conj(), x)

    def solve(self, q: Point, x: Tensor) -> Tensor:
        return _filter(1 / rfft(lift(q["c"])), x)

    def solve_t(self, q: Point, x: Tensor) -> Tensor:
        return _filter(1 / rfft(lift(q["c"])).conj(), x)

    def logabsdet(self, q: Point, n: int) -> Tensor:
        return fft(lift(q["c"])).abs().log().sum()

    def singular_values(self, q: Point, n: int) -> Tensor:
        return fft(lift(q["c"])).abs()

    def project(self, x: Tensor, y: Tensor) -> Point:
        return {"c": batch_sum(_filter(rfft(lift(y)).conj(), x))}  # the correlation of x with y

    def compose(self, e: Point, q: Point) -> Point:
        return {"c": _filter(rfft(lift(e["c"])), q["c"])}

    def norm(self, e: Point) -> Tensor:
        return rfft(lift(e["c"])).abs().amax()  # exact: circulants are normal
