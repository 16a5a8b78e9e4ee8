"""A scope: parameters that share one preconditioner.

The mathematics wants one flat vector and one point. Checkpoints want everything per parameter. Both are views of one
storage: a leaf whose leading axis has length n holds a row for each entry of the parameters, so that each parameter
owns its rows, in its own shape; any other leaf (step-size memories, Kronecker factors) is kept by the first parameter.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from psgd.group import Group, Point
from psgd.groups.padded import Padded
from psgd.probes import generator, mix

State = Mapping[Tensor, dict[str, Any]]


def real(t: Tensor) -> Tensor:
    """View a complex tensor as pairs of reals; a real one as it is."""
    return torch.view_as_real(t.resolve_conj()) if t.is_complex() else t


class Scope:
    """One group's point over the concatenation of some parameters, in lockstep with their entries of the state."""

    def __init__(self, group: Group | Padded, params: Sequence[Tensor], dtype: torch.dtype | None) -> None:
        self.group, self.params = group, list(params)
        self.sizes = [real(p).numel() for p in self.params]
        self.n, self.device = sum(self.sizes), self.params[0].device
        default = torch.float32
        for p in self.params:
            default = torch.promote_types(default, real(p).dtype)
        self.dtype = dtype or default
        self.point: Point = {}
        self.pair: tuple[Tensor, ...] | None = None  # (v, h) of the last fit, once somebody looks: see step_report
        self._wanted = dtype or torch.float32
        self._installed: list[Any] = []

    # --- storage

    def create(self, state: State, scale: float, seed: int, index: int) -> None:
        """Start at Q = scale·I."""
        rng = generator(mix(seed, index), -2)
        self.point = self.group.init(self.n, scale=scale, generator=rng, dtype=self.dtype, device=self.device)
        self._install(state)

    def restore(self, state: State) -> None:
        """Take the point from the per-parameter state, as after a load, a copy or a move."""
        try:
            template = self.group.init(self.n, dtype=self.dtype, device=torch.device("meta"))
        except ValueError as e:
            raise ValueError(f"the state was saved for another group: {e}") from e
        self.point = self._gather(template, [state[p].get("q", {}) for p in self.params])
        self._install(state)

    def intact(self, state: State, params: Sequence[Tensor]) -> bool:
        """Whether these are still the parameters, and the state still holds the views that were installed."""
        return len(params) == len(self.params) and all(
            p is mine and state[p].get("q") is q
            for p, mine, q in zip(params, self.params, self._installed, strict=True)
        )

    def _install(self, state: State) -> None:
        self._installed = self._slices(self.point)
        for p, q in zip(self.params, self._installed, strict=True):
            state[p]["q"] = q

    def _slices(self, point: Point) -> list[Point]:
        slices: list[Point] = [{} for _ in self.params]
        for key, leaf in point.items():
            if isinstance(leaf, dict):
                for q, inner in zip(slices, self._slices(leaf), strict=True):
                    q[key] = inner
            elif leaf.shape[:1] == (self.n,):
                for q, p, rows in zip(slices, self.params, leaf.split(self.sizes), strict=True):
                    q[key] = rows.view((*real(p).shape, *leaf.shape[1:]))
            else:
                slices[0][key] = leaf
        return slices

    def _gather(self, template: Point, slices: Sequence[Point]) -> Point:
        point: Point = {}
        extra = slices[0].keys() - template.keys()
        if extra:
            raise ValueError(f"the state was saved for another group: {self.group} has no {sorted(extra)}")
        for key, leaf in template.items():
            if isinstance(leaf, dict):  # checkpoint tools drop empty ones
                point[key] = self._gather(leaf, [q.get(key, {}) for q in slices])
                continue
            rows = leaf.shape[:1] == (self.n,)
            shapes = [(*real(p).shape, *leaf.shape[1:]) for p in self.params] if rows else [leaf.shape]
            pieces: list[Any] = [q.get(key) for q in slices[: len(shapes)]]
            for piece, shape in zip(pieces, shapes, strict=True):
                if not isinstance(piece, Tensor) or piece.shape != shape:
                    got = tuple(piece.shape) if isinstance(piece, Tensor) else "none"
                    needs = f"{self.group} needs {key!r} of shape {tuple(shape)}, got {got}"
                    raise ValueError(f"the state was saved for another group: {needs}")
            value = torch.cat([t.reshape(-1, *leaf.shape[1:]) for t in pieces]) if rows else pieces[0].clone()
            point[key] = value.to(self.device, leaf.dtype)
        return point

    # --- vectors

    def wide(self, p: Tensor) -> torch.dtype:
        """Return the dtype of p's averaged gradient: a low-precision Q must not coarsen it below p's own."""
        return torch.promote_types(self._wanted, real(p).dtype)

    def flat(self, tensors: Sequence[Tensor | None]) -> Tensor:
        """Concatenate one tensor for each parameter; None counts as zero."""
        pieces = [
            torch.zeros(size, dtype=self.dtype, device=self.device) if t is None else real(t).reshape(-1).to(self.dtype)
            for t, size in zip(tensors, self.sizes, strict=True)
        ]
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces)

    def split(self, x: Tensor) -> list[Tensor]:
        """Cut a flat vector into the shapes of the parameters (complex ones as pairs of reals)."""
        return [piece.view(real(p).shape) for p, piece in zip(self.params, x.split(self.sizes), strict=True)]

    # --- fitting

    def move(self, new: Point, ok: Tensor) -> None:
        """Write a new point in place, or leave the old one where `ok` is false or the new one is not finite."""
        moved = [(old, leaf) for old, leaf in zip(leaves(self.point), leaves(new), strict=True) if leaf is not old]
        ok = torch.stack([ok, *(leaf.isfinite().all() for _, leaf in moved)]).all()
        for old, leaf in moved:
            old.copy_(torch.where(ok, leaf, old))


def leaves(point: Point) -> Iterator[Tensor]:
    """Iterate over a point's tensors in the order of their sorted keys."""
    return itertools.chain.from_iterable(
        leaves(point[k]) if isinstance(point[k], dict) else (point[k],) for k in sorted(point)
    )
