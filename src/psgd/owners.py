"""Whole tensors over ranks: each belongs to one rank, which alone holds its preconditioner and moves it.

Where every tensor has a preconditioner of its own (a rule, such as `kron()`), a part of one tells nothing. So the parts
of m and h travel to the tensor's owner, and the parts of P m back, each in one exchange for all tensors together.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard

from psgd.distributed import Shards, demand_real
from psgd.group import Group, Point
from psgd.groups.padded import Padded
from psgd.scope import Scope
from psgd.unit import Unit, extent, real

Owner = Mapping[Tensor, int]
"""The rank that a parameter belongs to, among those that share it."""

Probes = Callable[[Sequence[Tensor]], list[Tensor]]
"""From parameters to their whole probes, the same on every rank."""


def split_by(p: Tensor) -> tuple[Any, int] | None:
    """Return the ranks that share a parameter, and along which axis; None if all of it is here."""
    if not isinstance(p, DTensor):
        return None
    cuts = [(i, s) for i, s in enumerate(p.placements) if not isinstance(s, Replicate)]
    if not cuts:
        return None
    i, cut = cuts[0]
    if len(cuts) > 1 or not isinstance(cut, Shard) or type(cut) is not Shard:  # FSDP2 with tensor parallel: strided
        raise ValueError(f"PSGD needs DTensors that are split along one axis, got {p.placements}")
    return p.device_mesh.get_group(i), cut.dim


class OwnedScope(Scope):
    """A scope of which this rank moves the units that belong to it; of the others it holds parts of the momentum."""

    def __init__(self, group: Group | Padded, units: Sequence[Unit], dtype: torch.dtype | None, owner: Owner) -> None:
        super().__init__(group, units, dtype)
        demand_real(self.params)
        self.ranks = sharing(self.params)
        self.shards = Shards([self.ranks])
        self.owner = {p: owner[p] for p in self.params}
        here = dist.get_rank(self.ranks)
        self.hold([unit for unit in self.units if owner[unit.params[0]] == here])

    def _start(self, scale: float, rng: torch.Generator) -> Point:
        return super()._start(scale, rng) if self.units else {}


def sharing(params: Sequence[Tensor]) -> Any:
    """Return the ranks that share all of these parameters."""
    groups = [found[0] for p in params if (found := split_by(p))]
    if len(groups) < len(params) or len(set(groups)) > 1:
        raise ValueError("sharded tensors with a rule of their own need to be split over the same ranks, got others")
    return groups[0]


class Exchange:
    """How parts of tensors travel to the owners of the whole, and back."""

    def __init__(self, scopes: Sequence[OwnedScope]) -> None:
        self.scopes = list(scopes)
        self.params = [p for scope in scopes for p in scope.params]
        self.ranks = sharing(self.params)
        self.owner = {p: rank for scope in scopes for p, rank in scope.owner.items()}
        self.here, self.world = dist.get_rank(self.ranks), dist.get_world_size(self.ranks)
        self.mine = [p for p in self.params if self.owner[p] == self.here]
        self.regions = {p: [self._region(p, rank) for rank in range(self.world)] for p in self.params}
        self.dtype = torch.float32
        for scope in scopes:
            for t in (scope.dtype, *(scope.wide(p) for p in scope.params)):
                self.dtype = torch.promote_types(self.dtype, t)

    def _region(self, p: Tensor, rank: int) -> tuple[slice, ...]:
        """Return where a rank's part of p lies in the whole."""
        _, axis = split_by(p)  # type: ignore[misc]
        step = math.ceil(p.shape[axis] / self.world)
        start = min(rank * step, p.shape[axis])
        return (*[slice(None)] * axis, slice(start, min(start + step, p.shape[axis])))

    def brought(self, m: dict[Tensor, Tensor], pair: Any, probes: Probes) -> tuple[dict[Tensor, Tensor], Any]:
        """Return the averages, and the pair (v, h, …) if there is one, with the whole of what this rank owns."""
        if pair is None:
            return m | self.gather(m)[0], None
        v, h, fit = pair
        same = all(h.get(p) is m.get(p) for p in self.params)  # nothing travels twice
        wholes = self.gather(m) if same else self.gather(m, h)
        looked_at = [p for p in self.mine if p in v]
        v = v | dict(zip(looked_at, probes(looked_at), strict=True))
        return m | wholes[0], (v, h | {p: t for p, t in wholes[-1].items() if p in h}, fit)

    def gather(self, *parts: Mapping[Tensor, Tensor]) -> list[dict[Tensor, Tensor]]:
        """Return the whole of what belongs to this rank, from all ranks' parts; what has no part is zero."""
        to: list[list[Tensor]] = [[] for _ in range(self.world)]
        for some in parts:
            for p in self.params:
                part = real(some[p]) if p in some else torch.zeros_like(self._part(p), device=p.device)
                to[self.owner[p]].append(part.to(self.dtype))
        wholes = [{p: torch.empty(extent(p), dtype=self.dtype, device=p.device) for p in self.mine} for _ in parts]
        places = [[whole[p][self.regions[p][r]] for whole in wholes for p in self.mine] for r in range(self.world)]
        for views, arrived in zip(places, self._travel(to, places), strict=True):
            for view, part in zip(views, arrived, strict=True):
                view.copy_(part)
        return wholes

    def scatter(self, wholes: Mapping[Tensor, Tensor]) -> dict[Tensor, Tensor]:
        """Return this rank's parts of what its owners know the whole of."""
        to = [[wholes[p][self.regions[p][r]].to(self.dtype) for p in self.mine] for r in range(self.world)]
        theirs = [[p for p in self.params if self.owner[p] == r] for r in range(self.world)]
        found: dict[Tensor, Tensor] = {}
        for some, arrived in zip(
            theirs, self._travel(to, [[self._part(p) for p in some] for some in theirs]), strict=True
        ):
            found |= dict(zip(some, arrived, strict=True))
        return found

    def _travel(self, to: list[list[Tensor]], like: list[list[Tensor]]) -> list[list[Tensor]]:
        """Send some tensors to each rank, and return what came from each, which has the shapes of `like`."""
        nothing = torch.empty(0, dtype=self.dtype, device=self.params[0].device)  # all there is, where a rank owns none
        sent = torch.cat([nothing, *(t.reshape(-1) for some in to for t in some)])
        sizes = [sum(t.numel() for t in some) for some in like]
        got = torch.empty(sum(sizes), dtype=self.dtype, device=sent.device)
        dist.all_to_all_single(got, sent, sizes, [sum(t.numel() for t in some) for some in to], group=self.ranks)
        found = []
        for some, flat in zip(like, got.split(sizes), strict=True):
            pieces = flat.split([t.numel() for t in some]) if some else ()
            found.append([piece.view(t.shape) for piece, t in zip(pieces, some, strict=True)])
        return found

    def _part(self, p: Tensor) -> Tensor:
        """Return a tensor without memory in the shape of this rank's part."""
        return torch.empty(extent(p), dtype=self.dtype, device="meta")[self.regions[p][self.here]]
