"""Points as data: leaf by leaf, alone or stacked, many equal ones along a leading axis of every leaf."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

Point = dict[str, Any]
"""Coordinates of Q: a string-keyed dict of tensors and of further such dicts."""

YES = torch.ones(1, dtype=torch.bool)
"""What was looked at, and holds."""


def leaves(point: Point) -> Iterator[Tensor]:
    """Iterate over a point's tensors in the order of their sorted keys."""
    return itertools.chain.from_iterable(
        leaves(point[k]) if isinstance(point[k], dict) else (point[k],) for k in sorted(point)
    )


def each(f: Callable[[Tensor], Tensor], point: Point) -> Point:
    """Return the point with f of every tensor."""
    return {k: each(f, t) if isinstance(t, dict) else f(t) for k, t in point.items()}


def size(point: Point) -> int:
    """Return the bytes of a point."""
    return sum(t.numel() * t.element_size() for t in leaves(point))


def stacked(points: Sequence[Point]) -> Point:
    """Stack equal points leaf by leaf."""
    first = points[0] if points else {}
    return {
        k: stacked([q[k] for q in points]) if isinstance(first[k], dict) else torch.stack([q[k] for q in points])
        for k in first
    }


def unstacked(point: Point, count: int) -> list[Point]:
    """Return the points of a stack, as views."""
    found: list[Point] = [{} for _ in range(count)]
    for key, leaf in point.items():
        parts = unstacked(leaf, count) if isinstance(leaf, dict) else leaf.unbind()
        for q, part in zip(found, parts, strict=True):
            q[key] = part
    return found


def overwrite(old: Point, new: Point, ok: Tensor, count: int) -> None:
    """Write a new point over an old one, but for those of `count` where `ok` is false or the new is not finite.

    >>> old = {"d": torch.zeros(2, 1)}
    >>> overwrite(old, {"d": torch.tensor([[1.0], [torch.nan]])}, torch.tensor([True, True]), count=2)
    >>> old["d"].tolist()
    [[1.0], [0.0]]
    """
    moved = [(was, leaf) for was, leaf in zip(leaves(old), leaves(new), strict=True) if leaf is not was]
    free = all(leaf.device.type == "cpu" for _, leaf in moved)  # then to look at a number takes no waiting
    if free and (ok is YES or bool(ok.all())) and all(math.isfinite(leaf.sum()) for _, leaf in moved):
        for was, leaf in moved:  # the sums tell, unless finite numbers overflow in them
            was.copy_(leaf)
        return
    for leaf in (leaf for _, leaf in moved if leaf.numel()):
        rows = leaf.reshape(count, -1) if count > 1 else leaf
        ends = (rows.amax(1), rows.amin(1)) if count > 1 else (rows.amax(), rows.amin())
        ok = ok & ends[0].isfinite() & ends[1].isfinite()  # nothing of n entries is written to find out
    for was, leaf in moved:
        fits = ok.view(-1, *[1] * (leaf.ndim - 1)) if count > 1 else ok[0]
        was.copy_(torch.where(fits, leaf, was))
