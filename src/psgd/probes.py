"""Randomness as a function of (seed, step, index): ranks agree, resuming is exact, the user's RNG is untouched."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

_MASK = (1 << 64) - 1


def mix(*numbers: int, state: int = 0) -> int:
    """Return a 64-bit hash of integers (SplitMix64 over the sequence), also of those that came before.

    >>> mix(2, state=mix(0, 1)) == mix(0, 1, 2) != mix(0, 2, 1)
    True
    """
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


BLOCK = 1 << 16
"""Rows that are drawn together: who holds a part of them draws no more than the blocks it meets."""

Runs = Sequence[tuple[int, int]]


def normal(
    n: int,
    rng: torch.Generator | None,
    width: int = 1,
    *,
    dtype: torch.dtype,
    device: torch.device | None = None,
    runs: Runs | None = None,
) -> Tensor:
    """Return n×width normal numbers, or those of some runs of the n rows: the same, whichever are asked for.

    >>> whole, part = (normal(9, generator(1), dtype=torch.float32, runs=runs) for runs in (None, [(2, 5)]))
    >>> whole[2:5].equal(part)
    True
    """
    place = device if rng is None else rng.device
    if runs is None and n <= BLOCK:
        return torch.randn(n, width, generator=rng, dtype=dtype, device=place)
    runs = [(0, n)] if runs is None else runs
    out = torch.empty(sum(stop - start for start, stop in runs), width, dtype=dtype, device=place)
    if out.is_meta:
        return out
    first = torch.randn(min(n, BLOCK), width, generator=rng, dtype=dtype, device=place)
    seed = int(torch.randint(1 << 62, (), generator=rng, device=place)) if n > BLOCK else 0
    done = 0
    for start, stop in runs:
        for block in range(start // BLOCK, -(-stop // BLOCK)):
            base = block * BLOCK
            later = min(BLOCK, n - base), width
            drawn = torch.randn(later, generator=generator(seed, block), dtype=dtype) if block else first
            part = drawn[max(start - base, 0) : stop - base]
            out[done : done + len(part)] = part
            done += len(part)
    return out


def normal_like(p: Tensor, *numbers: int, whole: int | None = None, runs: Runs | None = None) -> Tensor:
    """Return v ~ N(0, I) in the shape, dtype and place of p, drawn on the CPU so that every device sees the same.

    If p is but a part, it consists of these runs of the entries of a `whole`.

    >>> normal_like(torch.zeros(2, 3), 0, 1).shape
    torch.Size([2, 3])
    """
    dtype = torch.float64 if p.dtype in (torch.float64, torch.complex128) else torch.float32
    shape = (*p.shape, 2) if p.is_complex() else p.shape
    n = math.prod(shape) if whole is None else whole
    v = normal(n, generator(*numbers), dtype=dtype, runs=runs).view(shape)
    return (torch.view_as_complex(v) if p.is_complex() else v).to(dtype=p.dtype, device=p.device)


def fill(out: Tensor, rng: torch.Generator) -> None:
    """Write to a vector what `normal` returns.

    >>> x = torch.zeros(6)
    >>> fill(x, generator(0, 1))
    >>> x.view(2, 3).equal(normal_like(torch.zeros(2, 3), 0, 1))
    True
    """
    if out.numel() <= BLOCK:
        out.normal_(generator=rng)
    else:
        out.copy_(normal(out.numel(), rng, dtype=out.dtype).view(-1))
