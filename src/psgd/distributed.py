"""Parameters of which each rank holds a part, the DTensors of FSDP2: their parts, and sums and maxima over all."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard

from psgd.across import Across
from psgd.group import Group, How, Point, Where
from psgd.groups import uvd
from psgd.groups.diagonal import Diagonal
from psgd.groups.involution import Involution
from psgd.groups.low_rank import LowRank
from psgd.groups.padded import Padded
from psgd.groups.product import Product
from psgd.linalg import lift
from psgd.points import leaves
from psgd.scope import Fit, Scope
from psgd.unit import Unit


def like(p: Tensor, part: Tensor) -> Tensor:
    """Return a DTensor that is placed as p, made of parts (*p.local.shape, …); a plain tensor if p is one."""
    if not isinstance(p, DTensor):
        return part
    shape = torch.Size((*p.shape, *part.shape[p.ndim :]))
    stride = tuple(torch.empty(shape, device="meta").stride())
    return DTensor.from_local(part, p.device_mesh, p.placements, run_check=False, shape=shape, stride=stride)


def part_of(t: Tensor, p: Tensor) -> Tensor:
    """Return the part of t, whole or a DTensor of any placement, that belongs to this rank's part of p."""
    if not isinstance(p, DTensor):
        return t.full_tensor() if isinstance(t, DTensor) else t
    if not isinstance(t, DTensor):  # all of it, on every rank
        t = DTensor.from_local(t.to(p.device), p.device_mesh, [Replicate()] * p.device_mesh.ndim, run_check=False)
    if t.placements != p.placements:
        t = t.redistribute(p.device_mesh, p.placements)
    return t.to_local()


def by_rows(p: Any) -> bool:
    """Whether p is sharded along its first dimension alone, so that a part of it is one run of its entries."""
    return all(isinstance(s, Replicate) or (isinstance(s, Shard) and s.dim == 0) for s in p.placements)


def places(p: Tensor) -> list[tuple[int, int]]:
    """Return which entries of p, flat, this rank holds, as the ends of runs.

    >>> places(torch.ones(2, 3))
    [(0, 6)]
    """
    if not isinstance(p, DTensor) or not p.ndim:
        return [(0, p.numel())]
    if not by_rows(p):
        raise ValueError(
            f"this group needs DTensors that are sharded along their first dimension, got {p.placements}; "
            "fully_shard and ColwiseParallel make such, RowwiseParallel does not: for these take a rule, such as kron()"
        )
    mesh, row = p.device_mesh, p.numel() // p.shape[0]
    rows = DTensor.from_local(torch.arange(p.shape[0]), mesh, [Replicate()] * mesh.ndim, run_check=False)
    mine = rows.redistribute(mesh, p.placements).to_local()
    return [(int(mine[0]) * row, (int(mine[-1]) + 1) * row)] if len(mine) else []


@dataclass
class Board:
    """What ranks tell each other in a step: whether anything is not finite, and where there is any curvature.

    Also sums that nobody has to wait for.
    """

    flags: Tensor | None = None
    bad: bool = False
    curved: list[bool] = field(default_factory=list)
    waiting: list[Waiting] = field(default_factory=list)


@dataclass
class Waiting:
    """Numbers that travel with the next sum."""

    parts: tuple[Tensor, ...]
    sums: tuple[Tensor, ...] = ()


class Shards(Across):
    """Sums over the ranks that hold parts of the same vector.

    What one of them meets that is not finite (`watch`) travels with the next collective, whatever that is.
    """

    def __init__(self, groups: Sequence[Any]) -> None:
        self.groups = list(groups)
        self._board, self._place = Board(), 0

    def join(self, others: Sequence[Shards]) -> None:
        """Share one board: what one of us learns holds for all."""
        for i, one in enumerate((self, *others)):
            one._board, one._place = self._board, i

    def watch(self, bad: Tensor, curved: Sequence[Tensor]) -> None:
        """Tell the others whether something is not finite here, and whether there is any curvature, for each joined."""
        self._board.flags = torch.stack((bad, *curved)).to(torch.float32)
        self._board.waiting = []

    @property
    def ok(self) -> bool:
        self._settle()
        return not self._board.bad

    @property
    def curved(self) -> bool:
        self._settle()
        return self._board.curved[self._place] and not self._board.bad

    def sum(self, *parts: Tensor) -> tuple[Tensor, ...]:
        return self._reduced(parts, dist.ReduceOp.SUM)

    def max(self, *parts: Tensor) -> tuple[Tensor, ...]:
        return self._reduced(parts, dist.ReduceOp.MAX)

    def later(self, *parts: Tensor) -> Callable[[], tuple[Tensor, ...]]:
        one = Waiting(parts)
        self._board.waiting.append(one)

        def sums() -> tuple[Tensor, ...]:
            if not one.sums:
                self._reduced((), dist.ReduceOp.SUM)
            return one.sums

        return sums

    def _settle(self) -> None:
        if self._board.flags is not None:
            self._reduced((), dist.ReduceOp.SUM)

    def _reduced(self, parts: Sequence[Tensor], op: Any) -> tuple[Tensor, ...]:
        board = self._board
        flags, board.flags = board.flags, None
        carried: list[Waiting] = []
        if op == dist.ReduceOp.SUM:
            carried, board.waiting = board.waiting, []
        everything = [*(() if flags is None else (flags,)), *(t for one in carried for t in one.parts), *parts]
        dtype = functools.reduce(torch.promote_types, (t.dtype for t in everything))
        flat = torch.cat([t.reshape(-1).to(dtype) for t in everything])
        if op == dist.ReduceOp.MAX:  # which may lose a NaN
            flat = flat.nan_to_num(nan=math.inf, posinf=math.inf, neginf=-math.inf)
        for group in self.groups:
            dist.all_reduce(flat, op, group=group)
        pieces = zip(flat.split([t.numel() for t in everything]), everything, strict=True)
        found = (piece.view(t.shape).to(t.dtype) for piece, t in pieces)
        if flags is not None:
            bad, *curved = next(found).tolist()
            board.bad, board.curved = bad > 0, [t > 0 for t in curved]
        for one in carried:
            one.sums = tuple(itertools.islice(found, len(one.parts)))
        return tuple(found)


def demand_real(params: Sequence[Tensor]) -> None:
    """Raise if any parameter is complex."""
    if any(p.is_complex() for p in params):
        raise ValueError("sharded parameters (FSDP2, DTensor) need to be real, got complex ones")


def summed(t: Tensor, params: Sequence[Tensor]) -> Tensor:
    """Return the sum of t over all ranks that these parameters, some of them sharded, are on; replicas count, too."""
    mesh = next(p.device_mesh for p in params if isinstance(p, DTensor))
    t = t.to(params[0].device)
    for i in range(mesh.ndim):
        dist.all_reduce(t, group=mesh.get_group(i))
    return t


def copies(p: Tensor, params: Sequence[Tensor]) -> int:
    """Return on how many of these ranks this rank's part of p is."""
    mesh = next(q.device_mesh for q in params if isinstance(q, DTensor))
    cut = [mesh.size(i) for i, s in enumerate(p.placements) if isinstance(s, Shard)] if isinstance(p, DTensor) else []
    return mesh.size() // math.prod(cut)


def across(params: Sequence[Tensor], group: object) -> Shards:
    """Return how to sum over a vector made of these parameters, which must be sharded alike."""
    meshes = {(p.device_mesh, tuple(p.placements)) if isinstance(p, DTensor) else None for p in params}
    if len(meshes) > 1:
        raise ValueError(
            f"{group} over several parameters needs them all whole, or all sharded alike, got "
            f"{' and '.join(sorted(str(m and m[1]) for m in meshes))}; "
            "give each its own by a rule from shape to group, as in PSGD(params, lambda shape: Diagonal())"
        )
    ((mesh, placements),) = (m for m in meshes if m)
    return Shards([mesh.get_group(i) for i, s in enumerate(placements) if not isinstance(s, Replicate)])


class ShardedScope(Scope):
    """A scope of which each rank holds its parameters' parts; the state has them as DTensors, placed alike."""

    def __init__(self, group: Group | Padded, units: Sequence[Unit], dtype: torch.dtype | None) -> None:
        super().__init__(group, units, dtype)
        parts = group.parts if isinstance(group, Product) else ()
        self._low_rank = [type(p) for p in parts] == [LowRank, Diagonal]
        if len(units) > 1 or not (self._low_rank or isinstance(group, (Diagonal, Involution))):
            raise ValueError(
                "sharded parameters (FSDP2, DTensor) need Diagonal(), XMat(), Butterfly() or lra(r) for all together, "
                f"or a rule for each, such as kron(), got {group}"
            )
        demand_real(self.params)
        self.across = self.shards = across(self.params, group)

    def _start(self, scale: float, rng: torch.Generator) -> Point:
        runs, base = [], 0
        for p in self.params:
            runs += [(base + start, base + stop) for start, stop in places(p)]
            base += p.numel()
        q = self.group.origin(self.whole, Where(rng, self.dtype, self.device, runs))
        return self.group.scaled(q, scale)

    def _template(self) -> Point:
        where = Where(None, self.dtype, torch.device("meta"), [(0, self.n)])
        return self.group.origin(self.whole, where)

    def precondition(
        self, x: Tensor, out: Tensor | None = None, pause: Callable[[], float] = lambda: math.inf
    ) -> Tensor:
        del pause
        if self._low_rank:
            return uvd.precondition(self.point, x, out, self.across)
        return self.group.precondition(self.point, x, out)

    @property
    def parts(self) -> int:
        ranks: int = math.prod([dist.get_world_size(group) for group in self.across.groups])  # type: ignore
        return ranks

    def fitted(self, fit: Fit, point: Point, v: Tensor, h: Tensor, how: How) -> Point:
        if not self._low_rank:  # whose own form does it
            point, v, h = {k: lift(t) for k, t in point.items()}, lift(v), lift(h)
            point = point if how.scale is None else self.group.scaled(point, how.scale())
        move = self.group.whitened if fit(self.group) == self.group.whiten else self.group.fitted
        return move(point, v, h, how._replace(out=point, across=self.across))

    def balance(self, ok: Tensor) -> Callable[[], None]:
        if not self._low_rank:
            return lambda: None
        squares = self.across.later(*(lift(self.point["0"][k]).square().sum() for k in ("U", "V")))

        def finish() -> None:
            if self.across.ok:
                self.move(uvd.balanced(self.point, *squares()), ok)

        return finish

    def move(self, new: Point, ok: Tensor) -> None:
        for old, leaf in zip(leaves(self.point), leaves(new), strict=True):
            if leaf is not old:  # a step that is not finite was refused, by all ranks
                old.copy_(leaf)

    @property
    def alone(self) -> bool:
        return True
