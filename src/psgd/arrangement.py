"""Which parameters share a preconditioner, and which have equal ones."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

import torch
from torch import Tensor

from psgd.across import local, sharded
from psgd.group import Group
from psgd.groups.padded import Padded
from psgd.kron import Kron
from psgd.options import SHARED, ParamGroup
from psgd.points import leaves
from psgd.scope import Scope, State
from psgd.unit import Unit, placed, real


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


def together(found: list[Member], owner: Mapping[Tensor, int] | None = None) -> list[Scope]:
    """Return scopes without points: one for each joint group and "scope", and for each shape that a rule meets.

    Of sharded tensors with a rule, each belongs to the rank that `owner` names.
    """
    ruled = {unit.params[0]: (unit, group) for unit, group, _ in _ruled(found)}
    shared: dict[Any, list[Unit]] = {}  # what is in one scope: units alike, or one
    joint: dict[Any, list[Tensor]] = {}  # what is in that one
    options = {m.param: m.options for m in found}
    for p, pg, _ in found:
        place = (pg.get("scope"), p.device)
        if isinstance(pg["group"], (Group, Padded)):
            key: Any = (pg["group"], place)
            joint.setdefault(key, []).append(p)
            shared.setdefault(key, [])
        elif p in ruled:
            unit, group = ruled[p]
            key = (group, place, tuple(unit.shapes), unit.owned, p.dtype, *(pg.get(k) for k in SHARED))
            shared.setdefault(key, []).append(unit)
    scopes: list[Scope] = []
    for key, units in shared.items():
        units = units or [Unit(joint[key])]
        dtype = options[units[0].params[0]].get("precond_dtype")
        if units[0].owned:
            from psgd.owners import OwnedScope  # only here: it needs torch.distributed

            owner = owners(found) if owner is None else owner
            scopes.append(OwnedScope(key[0], units, dtype, owner))
        elif key in joint and any(map(sharded, joint[key])):
            from psgd.distributed import ShardedScope

            scopes.append(ShardedScope(key[0], units, dtype))
        else:
            scopes.append(Scope(key[0], units, dtype))
    return scopes


def _ruled(found: list[Member]) -> Iterator[tuple[Unit, Any, ParamGroup]]:
    """Iterate over the tensors, or pairs of weight and bias, to which a rule gives a group of their own."""
    partners = _partners(found)
    biases = {bias.param for bias in partners.values()}
    for p, pg, name in found:
        if p in biases or isinstance(pg["group"], (Group, Padded)):
            continue
        params = [p, partners[p].param] if p in partners else [p]
        unit = Unit(params, affine=p in partners, owned=any(map(_split, params)))
        yield unit, pg["group"](unit.shape, name) if isinstance(pg["group"], Kron) else pg["group"](unit.shape), pg


def _split(p: Tensor) -> bool:
    """Whether this rank has but a part of p."""
    if not sharded(p):
        return False
    from psgd.owners import split_by

    return split_by(p) is not None


def owners(found: list[Member]) -> dict[Tensor, int]:
    """Return the rank that each sharded tensor with a rule belongs to; the same from any of their states."""
    found = [m for m in found if m.param.numel()]
    if not any(sharded(m.param) for m in found):
        return {}
    costs: dict[int, list[tuple[Unit, float]]] = {}
    for unit, group, pg in _ruled(found):
        if unit.owned:
            costs.setdefault(id(pg), []).append((unit, cost(group, unit.n)))
    if not costs:
        return {}
    import torch.distributed as dist

    from psgd.owners import sharing

    world = dist.get_world_size(sharing([p for some in costs.values() for unit, _ in some for p in unit.params]))
    ranks = assigned([[c for _, c in some] for some in costs.values()], world)
    pairs = zip(itertools.chain(*costs.values()), itertools.chain(*ranks), strict=True)
    return {p: rank for (unit, _), rank in pairs for p in unit.params}


def cost(group: Group | Padded, n: int) -> float:
    """Return about how many operations a step on n entries takes: each of them meets a row of every matrix.

    >>> import psgd
    >>> cost(psgd.Diagonal(), 6), cost(psgd.kron()((2, 3)), 6)
    (12.0, 36.0)
    """
    point = group.init(n, dtype=torch.float32, device=torch.device("meta"))
    matrices = [t.shape[-1] for t in leaves(point) if t.ndim > 1 and t.shape[-1] == t.shape[-2]]
    return float(n * (1 + (sum(matrices) or 1)))


def assigned(costs: Sequence[Sequence[float]], world: int) -> list[list[int]]:
    """Return an owner for each unit, so that their costs are about the same.

    What comes in a later list does not change the owners of an earlier one: they hold its state already.

    >>> assigned([[1, 3, 1, 1], [5]], 2)
    [[1, 0, 1, 1], [0]]
    """
    loads, found = [0.0] * world, []
    for some in costs:
        owners = [0] * len(some)
        for i in sorted(range(len(some)), key=lambda i: -some[i]):  # the largest first
            owners[i] = loads.index(min(loads))
            loads[owners[i]] += some[i]
        found.append(owners)
    return found


def exchanged(scopes: Sequence[Scope], memory: dict[str, Any]) -> Any:
    """Return how parts of tensors reach the ranks that own the whole; None if there are none."""
    owned = [scope for scope in scopes if scope.shards is not scope.across]
    if not owned:
        return None
    from psgd.owners import Exchange

    known = memory.get("exchange")
    if known is None or known.scopes != owned:
        memory["exchange"] = known = Exchange(owned)  # type: ignore[arg-type]
    return known


def check_names(found: Sequence[Member]) -> None:
    """Raise a ValueError where a rule goes by names, and they do not fit."""
    names = [m.name for m in found if m.name]
    for rule in {m.options["group"] for m in found if isinstance(m.options["group"], Kron)}:
        asks = "affine=model" if rule.layers else "overrides=…"
        if (rule.layers or rule.overrides) and not names:
            raise ValueError(f"kron({asks}) needs names, as in PSGD(model.named_parameters(), …), got none")
        if rule.layers and not {weight for weight, _ in rule.layers} & set(names):
            raise ValueError(f"kron(affine=model) needs names of its layers, as {rule.layers[0][0]}, got {names[0]}")
        for pattern, _ in rule.overrides:
            if not any(fnmatchcase(name, pattern) for name in names):
                raise ValueError(f"kron(overrides=…) needs patterns that fit a name, as {names[0]}, got {pattern!r}")


def _partners(found: list[Member]) -> dict[Tensor, Member]:
    """Return the bias that shares a matrix [W b] with each weight, where a rule asks for that."""
    rules = {m.options["group"] for m in found if isinstance(m.options["group"], Kron)}
    layers = {weight: bias for rule in rules for weight, bias in rule.layers}
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
        elif _needed(p):
            fresh.append(m)
    scopes = {number: cache[number] for number in known if number in cache}
    everyone = members(param_groups)
    check_names(everyone)
    owner = owners(everyone)
    for number, some in known.items():
        if number not in scopes or not scopes[number].intact(state, [m.param for m in some]):
            for i, scope in enumerate(
                together(some, owner)
            ):  # several, if options differ that were equal when it was saved
                scope.restore(state)
                at = number if i == 0 else max(max(scopes), *known) + 1
                scopes[at] = scope
                for p in scope.params:
                    state[p]["scope"] = at
    if create and fresh:
        options = {m.param: m.options for m in fresh}
        made = together(fresh, owner)
        for scope in made:
            scope.check()  # all of them, before any has a state
        for scope in made:
            number = max(scopes, default=-1) + 1
            scopes[number] = scope
            _create(scope, state, number, options)
    return scopes


def _unchanged(param_groups: list[ParamGroup], state: State, cache: dict[int, Scope]) -> bool:
    """Whether the scopes of the last step hold all parameters, and the state their views: so it is at most steps."""
    mine = {p: q for scope in cache.values() for p, q in scope.installed}
    params = [p for pg in param_groups for p in pg["params"] if _needed(p) or (p in state and "scope" in state[p])]
    return len(mine) == len(params) and all(p in mine and p in state and state[p].get("q") is mine[p] for p in params)


def _needed(p: Tensor) -> bool:
    """Whether a parameter is to be moved, so that it needs a preconditioner."""
    return bool(p.numel()) and (p.requires_grad or p.grad is not None)


def _create(scope: Scope, state: State, number: int, options: dict[Tensor, ParamGroup]) -> None:
    for p in scope.params:
        state[p].update(step=torch.zeros((), device=p.device), scope=number)
        if options[p]["momentum"]:
            part = torch.zeros(real(local(p)).shape, dtype=scope.wide(p), device=p.device)
            state[p]["momentum"] = placed(p, part)
    pg = options[scope.params[0]]
    scope.create(state, pg["init_scale"] or 1.0, pg["seed"], number)
