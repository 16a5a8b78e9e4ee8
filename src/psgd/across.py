"""Sums and maxima over a vector of which a rank may hold but a part: all that groups over shards need of each other."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor
from torch.nn import Parameter


class Across:
    """All of the vector is at hand: what was summed here is the sum.

    >>> import torch
    >>> ALONE.sum(torch.ones(2))
    (tensor([1., 1.]),)
    """

    @property
    def ok(self) -> bool:
        """Whether no rank has met anything that is not finite, as far as is known."""
        return True

    def sum(self, *parts: Tensor) -> tuple[Tensor, ...]:
        """Return the sums over ranks of each of these, in one collective."""
        return parts

    def max(self, *parts: Tensor) -> tuple[Tensor, ...]:
        """Return the maxima over ranks of each of these, in one collective."""
        return parts

    def later(self, *parts: Tensor) -> Callable[[], tuple[Tensor, ...]]:
        """Return what gives the sums of these: they travel with the next sum, or on their own if asked for before."""
        return lambda: parts

    @property
    def curved(self) -> bool:
        """Whether, besides, there is any curvature in this step's pair."""
        return True


ALONE = Across()


def sharded(t: Tensor) -> bool:
    """Whether a tensor is a DTensor, of which each rank has a part."""
    return type(t) not in (Tensor, Parameter) and hasattr(t, "device_mesh")


def local(t: Tensor) -> Tensor:
    """Return this rank's part of a DTensor, sharing its memory; any other tensor as it is.

    >>> import torch
    >>> local(torch.ones(2))
    tensor([1., 1.])
    """
    return t.to_local() if sharded(t) else t  # type: ignore[attr-defined]


def taken(t: Tensor, p: Tensor) -> Tensor:
    """Return the part of t that belongs to this rank's part of p, if either is sharded."""
    if not sharded(p) and not sharded(t):
        return t
    from psgd.distributed import part_of

    return part_of(t, p)
