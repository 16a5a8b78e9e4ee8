"""Which parameters share a preconditioner, and which have equal ones."""

from __future__ import annotations

import itertools
from typing import Any, NamedTuple

import torch
from torch import Tensor

from psgd.across import local, sharded
from psgd.group import Group
from psgd.groups.padded import Padded
from psgd.kron import Kron
from psgd.options import SHARED, ParamGroup
from psgd.scope import Scope, State, Unit, placed, real


class Member(NamedTuple):
    """A parameter, its options, and its name if the optimizer was given any."""

    param: Tensor
    options: ParamGroup
    name: str = ""


def members(param_groups: list[ParamGroup]) -> list[Member]:
    """List all parameters."""
    found = []
    for pg in param_groups:
        names = pg.get("param_names") or [""] * len(pg["params"])
        found += [Member(p, pg, name) for p, name in zip(pg["params"], names, strict=True)]
    return found


def together(found: list[Member]) -> list[Scope]:
    """Return scopes without points: one for each joint group and "scope", and for each shape that a rule meets."""
    partners = _partners(found)
    taken = {bias.param for bias in partners.values()}
    shared: dict[Any, list[list[Tensor]]] = {}  # what is in one scope: a joint group's one unit, or units alike
    options = {m.param: m.options for m in found}
    for p, pg, name in found:
        group, place = pg["group"], (pg.get("scope"), p.device)
        if isinstance(group, (Group, Padded)):
            shared.setdefault((group, place), [[]])[0].append(p)
        elif p not in taken:
            unit = Unit([p, partners[p].param] if p in partners else [p], affine=p in partners)
            chosen = group(unit.shape, name) if isinstance(group, Kron) else group(unit.shape)
            key = (chosen, place, tuple(unit.shapes), p.dtype, *(pg.get(k) for k in SHARED))
            shared.setdefault(key, []).append(unit.params)
    scopes = []
    for (group, *_), units in shared.items():
        pg = options[units[0][0]]
        affine = not isinstance(pg["group"], (Group, Padded)) and len(units[0]) > 1
        kind = _sharded() if any(map(sharded, itertools.chain(*units))) else Scope
        scopes.append(kind(group, [Unit(params, affine) for params in units], pg.get("precond_dtype")))
    return scopes


def _sharded() -> type[Scope]:
    from psgd.distributed import ShardedScope  # only here: it needs torch.distributed

    return ShardedScope


def _partners(found: list[Member]) -> dict[Tensor, Member]:
    """Return the bias that shares a matrix [W b] with each weight, where a rule asks for that."""
    rules = {m.options["group"] for m in found if isinstance(m.options["group"], Kron)}
    layers = {weight: bias for rule in rules for weight, bias in rule.layers}
    if layers and not any(m.name for m in found):
        raise ValueError("kron(affine=model) needs names, as in PSGD(model.named_parameters(), …), got none")
    named = {m.name: m for m in found}
    pairs: dict[Tensor, Member] = {}
    for weight, bias in layers.items():
        if weight in named and bias in named:
            w, b = named[weight], named[bias]
            if all(w.options.get(k) == b.options.get(k) for k in ("group", *SHARED)) and w.param.dtype == b.param.dtype:
                pairs[w.param] = b
    return pairs


def arrange(
    param_groups: list[ParamGroup], state: State, cache: dict[int, Scope], create: bool = True
) -> dict[int, Scope]:
    """Return the numbered scopes, made or restored where needed. Parameters that come later get one of their own."""
    if _unchanged(param_groups, state, cache):
        return cache
    fresh: list[Member] = []
    known: dict[int, list[Member]] = {}
    for m in members(param_groups):
        p = m.param
        if p in state and "scope" in state[p]:
            known.setdefault(int(state[p]["scope"]), []).append(m)
        elif p.numel() and (p.requires_grad or p.grad is not None):
            fresh.append(m)
    scopes = {number: cache[number] for number in known if number in cache}
    for number, some in known.items():
        if number not in scopes or not scopes[number].intact(state, [m.param for m in some]):
            for i, scope in enumerate(together(some)):  # several, if options differ that were equal when it was saved
                scope.restore(state)
                at = number if i == 0 else max(max(scopes), *known) + 1
                scopes[at] = scope
                for p in scope.params:
                    state[p]["scope"] = at
    if create and fresh:
        options = {m.param: m.options for m in fresh}
        for scope in together(fresh):
            number = max(scopes, default=-1) + 1
            scopes[number] = scope
            _create(scope, state, number, options)
    return scopes


def _unchanged(param_groups: list[ParamGroup], state: State, cache: dict[int, Scope]) -> bool:
    """Whether the scopes of the last step hold all parameters, and the state their views: so it is at most steps."""
    mine = {p: q for scope in cache.values() for p, q in scope.installed}
    params = [p for pg in param_groups for p in pg["params"]]
    return len(mine) == len(params) and all(p in mine and p in state and state[p].get("q") is mine[p] for p in params)


def _create(scope: Scope, state: State, number: int, options: dict[Tensor, ParamGroup]) -> None:
    for p in scope.params:
        state[p].update(step=torch.zeros((), device=p.device), scope=number)
        if options[p]["momentum"]:
            part = torch.zeros(real(local(p)).shape, dtype=scope.wide(p), device=p.device)
            state[p]["momentum"] = placed(p, part)
    pg = options[scope.params[0]]
    scope.create(state, pg["init_scale"] or 1.0, pg["seed"], number)
