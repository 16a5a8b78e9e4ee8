"""Which parameters share a preconditioner."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from psgd.group import Group
from psgd.groups.padded import Padded
from psgd.options import ParamGroup
from psgd.scope import Scope, State, real
from psgd.update import SCALE_STATE

Members = list[tuple[Tensor, ParamGroup]]


def together(members: Members) -> list[Members]:
    """Gather the parameters of equal joint groups and equal "scope" on one device; a rule's stay alone."""
    gathered: dict[Any, Members] = {}
    for p, pg in members:
        joint = isinstance(pg["group"], (Group, Padded))
        key = (pg["group"], pg.get("scope"), p.device) if joint else id(p)
        gathered.setdefault(key, []).append((p, pg))
    return list(gathered.values())


def scope_of(members: Members) -> Scope:
    """Return the scope of parameters that share one preconditioner, as yet without a point."""
    (first, pg), params = members[0], [p for p, _ in members]
    group = pg["group"]
    if not isinstance(group, (Group, Padded)):
        group = group(tuple(real(first).shape) or (1,))
    return Scope(group, params, pg.get("precond_dtype"))


def arrange(
    param_groups: list[ParamGroup], state: State, cache: dict[int, Scope], create: bool = True
) -> dict[int, Scope]:
    """Return the numbered scopes, made or restored where needed. Parameters that come later get one of their own."""
    fresh: Members = []
    known: dict[int, Members] = {}
    for pg in param_groups:
        for p in pg["params"]:
            if p in state and "scope" in state[p]:
                known.setdefault(int(state[p]["scope"]), []).append((p, pg))
            elif p.numel() and (p.requires_grad or p.grad is not None):
                fresh.append((p, pg))
    scopes = {number: cache[number] for number in known if number in cache}
    for number, members in known.items():
        if number not in scopes or not scopes[number].intact(state, [p for p, _ in members]):
            scopes[number] = scope_of(members)
            scopes[number].restore(state)
    for members in together(fresh) if create else ():
        number = max(scopes, default=-1) + 1
        scopes[number] = scope_of(members)
        _create(scopes[number], state, number, members[0][1])
    return scopes


def _create(scope: Scope, state: State, number: int, pg: ParamGroup) -> None:
    for p in scope.params:
        state[p].update(step=torch.zeros((), device=p.device), scope=number)
        if pg["momentum"]:
            state[p]["momentum"] = torch.zeros(real(p).shape, dtype=scope.wide(p), device=p.device)
    for key in SCALE_STATE:
        exact = torch.promote_types(scope.dtype, torch.float32)
        state[scope.params[0]][key] = torch.zeros((), dtype=exact, device=scope.device)
    scope.create(state, pg["init_scale"] or 1.0, pg["seed"], number)
