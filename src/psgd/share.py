"""What sharding a model will cost: bytes that each rank holds and sends, by formulas that tests compare with runs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from psgd.arrangement import assigned, cost, together
from psgd.group import Group, Point
from psgd.groups.diagonal import Diagonal
from psgd.groups.involution import Involution
from psgd.groups.low_rank import LowRank
from psgd.groups.named import lra
from psgd.groups.padded import Padded
from psgd.groups.product import Product
from psgd.plan import members_of
from psgd.points import leaves
from psgd.scope import Scope


@dataclass(frozen=True)
class Share:
    """What one of so many ranks holds, and sends in a step, in bytes (after the first ten updates).

    `state` is of the rank that holds most, Q and the averaged gradient. `sent` is for a step without an update of Q,
    `sent_due` for one with an update by whitening, in `exchanges` and `exchanges_due` collectives. `model` is what
    FSDP2 itself sends for a step: parts of all parameters, twice, and of all gradients.
    """

    ranks: int
    state: float
    sent: float
    sent_due: float
    exchanges: int
    exchanges_due: int
    model: float


def share(model: Any, group: Any = None, *, ranks: int) -> Share:
    """Say what each rank will hold and send if a model, or its parameters, are sharded by FSDP2.

    A sum of b bytes over R ranks sends 2b(R−1)/R from each of them, as a ring does; a tensor of b bytes whose parts
    travel to one rank, or back, sends b(R−1)/R in all.

    >>> import psgd
    >>> psgd.share(torch.nn.Linear(100, 100, bias=False), psgd.Diagonal(), ranks=4).state
    20004.0
    """
    if ranks < 1:
        raise ValueError(f"share needs at least one rank, got {ranks}")
    group = lra(10) if group is None else group
    scopes = together(members_of(model, group, {"precond_prob": 0.1, "momentum": 0.9}))
    n, width = sum(scope.n for scope in scopes), max(scope.dtype.itemsize for scope in scopes)
    others = (ranks - 1) / ranks
    part = width * others * n / ranks  # what a rank sends of a vector of which every tensor gets to its owner
    averaged = sum(scope.wide(p).itemsize * p.numel() for scope in scopes for p in scope.params) / ranks
    if isinstance(group, (Group, Padded)):
        numbers, numbers_due, calls, calls_due = _sums(group)
        held = _held(_point(scopes[0], n), n, ranks)
        sent, sent_due = (2 * width * others * k for k in (numbers, numbers_due))
    else:
        calls, calls_due = 3, 3
        held = max(_owned(scopes, ranks))
        flags = 2 * 4 * others  # one number: is anything not finite
        sent, sent_due = flags + 2 * part, flags + 3 * part
    model_bytes = sum(p.numel() * p.element_size() for scope in scopes for p in scope.params)
    return Share(ranks, held + averaged, sent, sent_due, calls, calls_due, 3 * others * model_bytes)


def _sums(group: Group | Padded) -> tuple[int, int, int, int]:
    """Return how many numbers, and in how many collectives, ranks sum without an update of Q, and with one.

    With either go two flags (is anything not finite, is there any curvature) and the norm of P m.
    """
    if isinstance(group, (Diagonal, Involution)):
        return 3, 5, 1, 2
    if isinstance(group, Product) and [type(p) for p in group.parts] == [LowRank, Diagonal]:
        r = group.parts[0].rank  # type: ignore[attr-defined]
        return 2 * r + 3, 2 * r * r + 7 * r + 11, 3, 6
    raise ValueError(f"share needs Diagonal(), XMat(), Butterfly(), lra(r) or a rule such as kron(), got {group}")


def _point(scope: Scope, n: int) -> Any:
    return scope.group.init(n, dtype=scope.dtype, device=torch.device("meta"))


def _held(point: Point, n: int, ranks: int) -> float:
    """Return the bytes of a rank: its part of what has a row for each entry, all of the rest."""
    return sum(t.numel() * t.element_size() / (ranks if t.shape[:1] == (n,) else 1) for t in leaves(point))


def _owned(scopes: list[Scope], ranks: int) -> list[float]:
    """Return the bytes of Q on each rank, where each tensor belongs to one."""
    sizes = [sum(t.numel() * t.element_size() for t in leaves(_point(s, s.n))) / len(s.units) for s in scopes]
    units = [(cost(s.kind, unit.n), size) for s, size in zip(scopes, sizes, strict=True) for unit in s.units]
    (owners,) = assigned([[c for c, _ in units]], ranks)
    held = [0.0] * ranks
    for owner, (_, size) in zip(owners, units, strict=True):
        held[owner] += size
    return held
