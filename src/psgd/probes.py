"""Randomness as a function of (seed, step, index): ranks agree, resuming is exact, the user's RNG is untouched."""

from __future__ import annotations

import torch
from torch import Tensor

_MASK = (1 << 64) - 1


def mix(*numbers: int) -> int:
    """Return a 64-bit hash of integers (SplitMix64 over the sequence).

    >>> mix(0, 1, 2) == mix(0, 1, 2) != mix(0, 2, 1)
    True
    """
    state = 0
    for number in numbers:
        state = (state + number + 0x9E3779B97F4A7C15) & _MASK
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK
        state ^= state >> 31
    return state


def uniform(*numbers: int) -> float:
    """Return a number in [0, 1) that depends on the integers alone.

    >>> 0 <= uniform(1, 2) < 1
    True
    """
    return (mix(*numbers) >> 11) / (1 << 53)


def generator(*numbers: int) -> torch.Generator:
    """Return a generator of its own, seeded by the integers.

    >>> torch.randn(2, generator=generator(3)).equal(torch.randn(2, generator=generator(3)))
    True
    """
    return torch.Generator().manual_seed(mix(*numbers))


def normal_like(p: Tensor, *numbers: int) -> Tensor:
    """Return v ~ N(0, I) in the shape, dtype and place of p, drawn on the CPU so that every device sees the same.

    >>> normal_like(torch.zeros(2, 3), 0, 1).shape
    torch.Size([2, 3])
    """
    dtype = torch.float64 if p.dtype in (torch.float64, torch.complex128) else torch.float32
    shape = (*p.shape, 2) if p.is_complex() else p.shape
    v = torch.randn(shape, generator=generator(*numbers), dtype=dtype)
    return (torch.view_as_complex(v) if p.is_complex() else v).to(dtype=p.dtype, device=p.device)
