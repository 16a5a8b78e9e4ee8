"""Parameters as vectors, and a point on a group as their own parts of it.

The mathematics wants one flat vector and one point; checkpoints want everything per parameter. A leaf of a point whose
leading axis is as long as the vector holds a row for each entry, so that each parameter owns its rows, in its own
shape; any other leaf (step-size memories, Kronecker factors) is kept by the first parameter.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors

from psgd.across import local, sharded, taken
from psgd.group import Point
from psgd.probes import normal_like


def real(t: Tensor) -> Tensor:
    """View a complex tensor as pairs of reals; a real one as it is."""
    return torch.view_as_real(t.resolve_conj()) if t.is_complex() else t


def extent(p: Tensor) -> tuple[int, ...]:
    """Return the shape of p in reals: of the whole, if it is sharded.

    >>> extent(torch.ones(3, dtype=torch.complex64))
    (3, 2)
    """
    return (*p.shape, 2) if p.is_complex() else tuple(p.shape)


def placed(p: Tensor, part: Tensor) -> Tensor:
    """Return a part as what it is a part of: sharded as p, if p is."""
    if not sharded(p):
        return part
    from psgd.distributed import like

    return like(p, part)


def probe(p: Tensor, *numbers: int, whole: bool = False) -> Tensor:
    """Return v ~ N(0, I) for this rank's part of p, or for the whole, which depends on these numbers alone."""
    if not sharded(p):
        return normal_like(p, *numbers)
    from psgd.distributed import by_rows, part_of, places

    if by_rows(p) and not whole:
        return normal_like(local(p), *numbers, whole=p.numel(), runs=places(p))
    v = normal_like(torch.empty(p.shape, dtype=p.dtype, device=p.device), *numbers)
    return v if whole else part_of(v, p)


class Unit:
    """Parameters as one vector: end to end, or a weight and a bias as the rows of [W b].

    Of sharded ones it has this rank's parts, or all, if a rank owns the whole.
    """

    def __init__(self, params: Sequence[Tensor], affine: bool = False, owned: bool = False) -> None:
        self.params, self.owned = list(params), owned
        self.shapes = [torch.Size(extent(p)) if owned else real(local(p)).shape for p in self.params]
        self.sizes = [s.numel() for s in self.shapes]
        self.n = sum(self.sizes)
        self.whole = sum(map(math.prod, map(extent, self.params)))
        self.rows = self.shapes[0][0] if affine else 1
        self.shape = (self.rows, self.n // self.rows) if affine else extent(self.params[0]) or (1,)
        self.plain = self.rows == 1 and all(s == p.shape for s, p in zip(self.shapes, self.params, strict=True))

    def flat(self, tensors: Sequence[Tensor | None], dtype: torch.dtype) -> list[Tensor]:
        """Return pieces that make up the vector; None counts as zero."""
        if self.plain and all(t is not None and t.dtype == dtype for t in tensors):
            return [_flatten_dense_tensors(tensors)]  # the same as below, in one call
        like = self.params[0]
        pieces = [
            torch.zeros(size, dtype=dtype, device=like.device) if t is None else real(t).reshape(-1).to(dtype)
            for t, size in zip(tensors, self.sizes, strict=True)
        ]
        if self.rows == 1:
            return pieces
        return [torch.cat([t.view(self.rows, -1) for t in pieces], 1).view(-1)]

    def split(self, x: Tensor) -> list[Tensor]:
        """Cut a vector into the shapes of the parameters (complex ones as pairs of reals)."""
        if self.plain:
            return list(_unflatten_dense_tensors(x, self.params))
        if self.rows == 1:
            return [piece.view(shape) for piece, shape in zip(x.split(self.sizes), self.shapes, strict=True)]
        widths = [size // self.rows for size in self.sizes]
        pieces = x.view(self.rows, -1).split(widths, 1)
        return [piece.reshape(shape) for piece, shape in zip(pieces, self.shapes, strict=True)]

    # --- points

    def slices(self, point: Point) -> list[Point]:
        """Give each parameter its part of a point."""
        found: list[Point] = [{} for _ in self.params]
        for key, leaf in point.items():
            if isinstance(leaf, dict):
                for q, part in zip(found, self.slices(leaf), strict=True):
                    q[key] = part
            elif leaf.shape[:1] == (self.n,):
                for p, q, shape, rows in zip(self.params, found, self.shapes, leaf.split(self.sizes), strict=True):
                    whole = rows.view((*shape, *leaf.shape[1:]))
                    q[key] = whole if self.owned else placed(p, whole)
            else:
                found[0][key] = leaf
        return found

    def gather(self, template: Point, slices: Sequence[Point], group: Any) -> Point:
        """Put a point together again, as the template has it."""
        point: Point = {}
        extra = slices[0].keys() - template.keys()
        if extra:
            raise ValueError(f"the state was saved for another group: {group} has no {sorted(extra)}")
        for key, leaf in template.items():
            if isinstance(leaf, dict):  # checkpoint tools drop empty ones
                point[key] = self.gather(leaf, [q.get(key, {}) for q in slices], group)
                continue
            rows = leaf.shape[:1] == (self.n,)
            shapes = [(*shape, *leaf.shape[1:]) for shape in self.shapes] if rows else [leaf.shape]
            pieces: list[Any] = [q.get(key) for q in slices[: len(shapes)]]
            if rows and not self.owned:
                pieces = [t if t is None else taken(t, p) for t, p in zip(pieces, self.params, strict=True)]
            for piece, shape in zip(pieces, shapes, strict=True):
                if not isinstance(piece, Tensor) or piece.shape != shape:
                    got = tuple(piece.shape) if isinstance(piece, Tensor) else "none"
                    needs = f"{group} needs {key!r} of shape {tuple(shape)}, got {got}"
                    raise ValueError(f"the state was saved for another group: {needs}")
            value = torch.cat([t.reshape(-1, *leaf.shape[1:]) for t in pieces]) if rows else pieces[0]
            point[key] = torch.empty_like(leaf, device=self.params[0].device).copy_(value)  # laid out as the template
        return point
