"""Constant orthogonal matrices: they cost no storage and mix what the moving factors cannot reach."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.fft import fft, ifft

from psgd.algebra import Orthogonal
from psgd.group import Point
from psgd.linalg import lift


@dataclass(frozen=True)
class Identity(Orthogonal):
    """Q = I.

    >>> Identity().apply({}, torch.arange(3))
    tensor([0, 1, 2])
    """

    def apply(self, q: Point, x: Tensor) -> Tensor:
        return x

    def apply_t(self, q: Point, x: Tensor) -> Tensor:
        return x


@dataclass(frozen=True)
class Shift(Orthogonal):
    """Circular shift: (Q x)ᵢ = xᵢ₋ₖ.

    >>> Shift(1).apply({}, torch.arange(3))
    tensor([2, 0, 1])
    """

    k: int

    def apply(self, q: Point, x: Tensor) -> Tensor:
        return x.roll(self.k, -1)

    def apply_t(self, q: Point, x: Tensor) -> Tensor:
        return x.roll(-self.k, -1)


@dataclass(frozen=True)
class Permute(Orthogonal):
    """(Q x)ᵢ = x at order[i].

    >>> Permute((2, 0, 1)).apply({}, torch.tensor([10, 20, 30]))
    tensor([30, 10, 20])
    """

    order: tuple[int, ...]

    def __post_init__(self) -> None:
        if sorted(self.order) != list(range(len(self.order))):
            raise ValueError(f"Permute needs each of 0, …, n−1 once, got {self.order}")

    def check(self, n: int) -> None:
        if n != len(self.order):
            raise ValueError(f"this Permute needs n={len(self.order)}, got n={n}")

    def apply(self, q: Point, x: Tensor) -> Tensor:
        return x[..., torch.tensor(self.order, device=x.device)]

    def apply_t(self, q: Point, x: Tensor) -> Tensor:
        return x[..., torch.tensor(self.order, device=x.device).argsort()]


@dataclass(frozen=True)
class DCT(Orthogonal):
    """The orthonormal discrete cosine transform (DCT-II), by one complex FFT of the same length, any n.

    >>> DCT().apply({}, torch.ones(4))
    tensor([2., 0., 0., 0.])
    """

    def apply(self, q: Point, x: Tensor) -> Tensor:
        n = x.shape[-1]
        even_then_odd_back = torch.cat((lift(x)[..., ::2], lift(x)[..., 1::2].flip(-1)), -1)
        return ((fft(even_then_odd_back) * _twiddle(n, lift(x))).real * _weights(n, lift(x))).to(x.dtype)

    def apply_t(self, q: Point, x: Tensor) -> Tensor:
        n = x.shape[-1]
        y = lift(x) / _weights(n, lift(x))
        mirrored = torch.cat((torch.zeros_like(y[..., :1]), y[..., 1:].flip(-1)), -1)
        t = ifft(torch.complex(y, -mirrored) * _twiddle(n, y).conj()).real
        half = (n + 1) // 2
        pairs = torch.stack((t[..., : n // 2], t[..., half:].flip(-1)), -1).flatten(-2)
        return torch.cat((pairs, t[..., n // 2 : half]), -1).to(x.dtype)  # the middle stands alone for odd n


def _twiddle(n: int, like: Tensor) -> Tensor:
    angle = torch.arange(n, dtype=like.dtype, device=like.device) * (-math.pi / (2 * n))
    return torch.polar(torch.ones_like(angle), angle)


def _weights(n: int, like: Tensor) -> Tensor:
    w = torch.full((n,), math.sqrt(2 / n), dtype=like.dtype, device=like.device)
    return torch.cat((w[:1] / math.sqrt(2), w[1:]))
