"""One step, from gradients to parameters: fit Q, average, precondition, clip, write. Never waits for the device."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from psgd.across import ALONE, Across, local
from psgd.group import How
from psgd.linalg import CHUNK, lift
from psgd.options import ParamGroup, schedule
from psgd.points import YES
from psgd.probes import mix
from psgd.schedule import Adaptive
from psgd.scope import Fit, Scope, State
from psgd.trend import Trend, relative, sample
from psgd.unit import placed, real

_SCALE_PAIRS = 10  # the initial scale is the most cautious of the first ten pairs: one unlucky pair must not set it
_BALANCE_EVERY = 10
_FINITE = YES[0]
_TINY = torch.finfo(torch.bfloat16).tiny


@dataclass(frozen=True)
class Update:
    """The gradients of one step, with each parameter's options, and whether all is finite: if not, nothing moves.

    In lockstep, where all parameters have gradients, none are listed.
    """

    state: State
    options: dict[Tensor, ParamGroup]
    grads: dict[Tensor, Tensor]
    ok: Tensor
    sure: bool = False
    """Whether `ok` was looked at, and is true: where that is free, nothing needs to be guarded."""
    late: bool = False
    """Whether it is known only after the first exchange with other ranks: until then nothing may be written."""

    def guarded(self, x: Tensor, otherwise: Tensor | float = 0.0) -> Tensor:
        """Return x, if all is finite."""
        return x if self.sure or self.late else torch.where(self.ok, x, otherwise)

    def fit(self, scope: Scope, v_flat: Tensor, h_flat: Tensor, fit: Fit) -> None:
        """Move the scope's point by one step on its pair; entries with h = 0 have no part in it.

        A pair without curvature says nothing: Q would grow for ever.
        """
        pg, curved = self.options[scope.params[0]], True
        if self.grads and scope.probing(self.grads) and not scope.group.probing:
            fit = operator.attrgetter("fit")
        if scope.across is not ALONE:  # which finds out for itself what is finite, from all ranks
            ok = torch.ones(1, dtype=torch.bool, device=scope.device)
        elif self.sure and scope.alone:
            ok, curved = YES, float(h_flat.amax()) > 0 or float(h_flat.amin()) < 0  # any() takes longer
        else:
            each = scope.each(h_flat)
            most = torch.maximum(each.amax(1), -each.amin(1))
            ok = self.ok & most.isfinite() & (most > 0)
            if not (scope.free and bool(ok.all())):
                h_flat = torch.where(ok[:, None], each, 0).view(-1)
        if scope.pair is not None:
            own = fit(scope.group) != scope.group.whiten  # else h may be what P m is written over, and v is drawn over
            scope.pair = (v_flat, h_flat) if own else (v_flat.clone(), h_flat.clone())
        if not curved:
            return
        scope.fresh = True
        point, group, out = scope.taken(), scope.group, scope.point
        if not scope.settled and (scope.across is not ALONE or scope.free):  # then there is no more to exchange
            scope.settled = bool((scope.scale["pairs"] >= _SCALE_PAIRS).all())
        coin = bool(mix(pg["seed"], pg["iteration"], -3) & 1)
        how = How(pg["precond_lr"], coin, pg["rule"])
        if pg["init_scale"] is None and group.scalable and not scope.settled:
            noise = group.noisy and fit(group) == group.whiten  # which says nothing of the size of h
            factors = _rescale(scope, None if noise else v_flat, h_flat, ok)
            if scope.across is not ALONE:
                how = how._replace(scale=lambda: factors()[0])
            else:
                found = factors()
                if not (scope.free and bool((found == 1).all())):
                    point = out = scope.scaled(found)
        if scope.alone:
            lr = how.lr if ok is YES else how.lr * ok[0].to(torch.promote_types(scope.dtype, torch.float32))
            how = how._replace(lr=lr, out=out)
        elif scope.free and bool(ok.all()):
            how = how._replace(out=out)
        before = sample(scope.point) if isinstance(schedule(pg), Adaptive) else None
        scope.move(scope.fitted(fit, point, v_flat, h_flat, how), ok)
        if before is not None:
            self._watch(scope, relative(before, sample(scope.point)))

    def _watch(self, scope: Scope, move: Tensor) -> None:
        """Keep the trend of the moves of the scope's point."""
        state = self.state[scope.params[0]]
        if "trend" not in state or state["trend"].shape[1] != len(move):
            state["trend"] = torch.zeros(2, len(move), dtype=move.dtype, device=move.device)
        Trend(state["trend"]).add(move)

    def direction(self, scope: Scope, x: Tensor, out: Tensor | None) -> Tensor:
        """Return P x, x the averaged gradient (zero where the step is skipped), in new memory or in `out`."""
        pg = self.options[scope.params[0]]
        if schedule(pg).ever:
            # a function of the step alone: what is resumed goes on alike
            d = scope.precondition(x, out, lambda: pg["pause"] or schedule(pg).rest(pg["iteration"], pg["seed"]))
            return d.clone() if d.data_ptr() == x.data_ptr() and out is not x else d  # some groups return x itself
        return x.clone() if self.sure or self.late else x

    def averages(self, scopes: Sequence[Scope]) -> dict[Tensor, Tensor]:
        """m ← βm + (1−β)g, as a plain mean while that weighs g more; if `late`, in new memory, for `keep`."""
        found: dict[Tensor, Tensor] = {}
        means: list[Tensor] = []
        news: list[Tensor] = []
        weights: list[Tensor] = []
        least: list[float] = []
        for scope, p in ((one, p) for one in scopes for p in one.params if p in self.grads):
            g, beta, state = real(self.grads[p]), self.options[p]["momentum"], self.state[p]
            if not beta:
                found[p] = g
                continue
            if "momentum" in state:
                m = local(state["momentum"]).clone() if self.late else local(state["momentum"])
            else:  # turned on after some steps: the warm-up is over
                m = self.guarded(g).to(scope.wide(p), copy=True).contiguous()
                if not self.late:
                    state["momentum"] = placed(p, m)
            found[p] = m
            means.append(m)
            news.append(self.guarded(g.to(m.dtype), m))
            weights.append(1 + state["step"].to(m))
            least.append(1 - beta)
        if means:
            torch._foreach_reciprocal_(weights)
            torch._foreach_clamp_min_(weights, least)
            torch._foreach_lerp_(means, news, weights)
        return found

    def refreshed(self, averaged: dict[Tensor, Tensor]) -> dict[Tensor, Tensor]:
        """Return m + fresh·(g − m), in new memory unless that is m."""
        found = dict(averaged)
        for p, m in averaged.items():
            if self.options[p]["momentum"] and self.options[p]["fresh"]:
                found[p] = torch.lerp(m, self.guarded(real(self.grads[p]).to(m.dtype), m), self.options[p]["fresh"])
        return found

    def keep(self, averaged: dict[Tensor, Tensor]) -> None:
        """Write the averages, now that all is known to be finite."""
        for p, m in averaged.items():
            if self.options[p]["momentum"] and "momentum" in self.state[p]:
                local(self.state[p]["momentum"]).copy_(m)
            elif self.options[p]["momentum"]:
                self.state[p]["momentum"] = placed(p, m)

    def write(self, steps: dict[Tensor, Tensor]) -> None:
        """θ ← (1 − lr·λ)θ − lr·d."""
        together: dict[int, tuple[ParamGroup, list[Tensor]]] = {}
        for p in (p for p in steps if p in self.grads):
            pg = self.options[p]
            together.setdefault(id(pg), (pg, []))[1].append(p)
        for pg, params in together.values():
            self.move(pg, [real(local(p)) for p in params], [steps[p] for p in params])
            counters = [self.state[p]["step"] for p in params]
            if self.sure:
                torch._foreach_add_(counters, 1)
            else:
                for counter in counters:
                    counter.add_(self.ok)

    def move(self, pg: ParamGroup, targets: list[Tensor], steps: list[Tensor]) -> None:
        """Move the parameters of a param_group: what this rank has of them, in reals."""
        lr = pg["lr"]
        if not schedule(pg).ever:  # then this is SGD, to the last bit
            steps = [t.to(p.dtype) for t, p in zip(steps, targets, strict=True)]
        rates = [lr.reshape(()).to(t) for t in steps] if isinstance(lr, Tensor) else None
        if pg["weight_decay"]:
            decay = pg["weight_decay"]
            for p, rate in zip(targets, rates or [lr] * len(targets), strict=True):
                fine = torch.promote_types(p.dtype, torch.float32)  # a factor near 1 has no place in bfloat16
                p.mul_(1 - rate * decay * self.ok.to(p.device, fine))
        if rates is None:
            torch._foreach_add_(targets, steps, alpha=-lr)
        else:
            torch._foreach_sub_(targets, torch._foreach_mul(steps, rates))


def clip(scopes: Sequence[Scope], directions: Sequence[Tensor], lead: ParamGroup, owners: Across = ALONE) -> None:
    """Bound the directions in place: each unit's root mean square, the norm of all, every entry.

    What other ranks own counts for the norm of all, and is summed by `owners`.
    """
    bounded = lead["max_rms"] is not None and schedule(lead).ever
    if bounded or lead["max_norm"] is not None:
        norms = _norms(scopes, directions)
        if bounded:
            for i, (scope, d) in enumerate(zip(scopes, directions, strict=True)):
                root = scope.units[0].whole ** 0.5
                if scope.free and all(norm <= lead["max_rms"] * root for norm in norms[i].view(-1).tolist()):
                    continue  # as on most steps
                rms = norms[i] / root
                factor = (lead["max_rms"] / rms.clamp_min(_TINY)).clamp_max(1)
                scope.each(d).mul_(factor)
                norms[i] = norms[i] * factor
        if lead["max_norm"] is not None:
            norm = _total(scopes, norms, owners, lead["params"][0].device)
            for d in directions:
                d.mul_((lead["max_norm"] / norm.clamp_min(_TINY)).clamp_max(1).to(d))
    if lead["max_value"] is not None:
        for d in directions:
            d.clamp_(-lead["max_value"], lead["max_value"])


def _norms(scopes: Sequence[Scope], directions: Sequence[Tensor]) -> list[Tensor]:
    """Return the norm of each unit's direction, in columns; those of all sharded scopes by one exchange."""
    found = [
        torch.linalg.vector_norm(scope.each(d), dim=1, keepdim=True)
        for scope, d in zip(scopes, directions, strict=True)
    ]
    parted = [i for i, scope in enumerate(scopes) if scope.across is not ALONE]
    if parted:
        sums = scopes[parted[0]].across.sum(*(lift(found[i]).square() for i in parted))
        for i, t in zip(parted, sums, strict=True):
            found[i] = t.sqrt()
    return found


def _total(scopes: Sequence[Scope], norms: Sequence[Tensor], owners: Across, device: torch.device) -> Tensor:
    """Return the norm of all; what other ranks own is summed by `owners`."""
    if owners is ALONE:
        return torch.cat([t.to(norms[0]).view(-1) for t in norms]).norm()
    squares = [torch.zeros((), dtype=torch.float64, device=device)] * 2
    for scope, t in zip(scopes, norms, strict=True):
        owned = scope.shards is not scope.across
        squares[owned] = squares[owned] + t.double().square().sum().to(device)
    return (squares[0] + owners.sum(squares[1])[0]).sqrt()


def exact(device: str) -> AbstractContextManager[Any]:
    """Keep a user's autocast out of our mathematics."""
    return torch.autocast(device, enabled=False) if torch.is_autocast_enabled(device) else nullcontext()


def regularized(t: Tensor, x: Tensor, pg: ParamGroup) -> Tensor:
    """±g + λθ or ±h + λv, the derivatives of ±f + ½λ‖θ‖²."""
    t = -t if pg["maximize"] else t
    return t.add(x, alpha=pg["l2"]) if pg["l2"] else t


def finite(tensors: Sequence[Tensor], out: Any) -> Tensor:
    """Whether gradients, products and the loss are finite."""
    parts = [real(t) for t in tensors]
    loss = out[0] if isinstance(out, (tuple, list)) and out else out
    if isinstance(loss, (float, Tensor)):
        parts.append(loss.detach() if isinstance(loss, Tensor) else torch.tensor(loss))
    # the sum tells, unless finite numbers overflow in it
    if all(t.is_cpu for t in parts) and all(math.isfinite(t.sum()) for t in parts):
        return _FINITE
    place, ends = parts[0].device, [end.isfinite() for t in parts if t.numel() for end in (t.amax(), t.amin())]
    return torch.stack([torch.ones((), dtype=torch.bool, device=place), *(t.to(place) for t in ends)]).all()


def balance(scopes: Sequence[Scope], lead: ParamGroup, ok: Tensor) -> list[Callable[[], None]]:
    """Begin to even out the coordinates of some scopes, on every tenth update, and return what ends it."""
    return [scope.balance(ok) for scope in scopes if lead["updates"] % _BALANCE_EVERY == _BALANCE_EVERY - 1]


def _rescale(scope: Scope, v: Tensor | None, h: Tensor, ok: Tensor) -> Callable[[], Tensor]:
    """Return what gives the factors that bring each unit's Q to the scale P ≈ 1/level.

    The level is the largest curvature met so far. Without v, it is that of h alone.
    """
    h = scope.each(h)
    if scope.across is ALONE:
        most = torch.maximum(h.amax(1), -h.amin(1)).clamp_min(torch.finfo(h.dtype).tiny)
    else:  # in float64, powers need no care, nor another exchange
        h, most = h.double(), torch.ones(1, dtype=torch.float64, device=h.device)
    fourth = _sums(h, lambda part: (part / most[:, None]).square_().square_())
    second = torch.zeros_like(fourth) if v is None else _sums(scope.each(v).to(h), Tensor.square)
    sums = scope.across.later(fourth, second)

    def factors() -> Tensor:
        (fourth, second), count = sums(), scope.units[0].whole
        moment, spread = (fourth / count).pow(0.25), (second / count).sqrt()  # the fourth: heavy tails count
        level = (most * moment / torch.where(spread > 0, spread, 1.0)).to(scope.scale["level"])
        fits = ok & scope.across.curved & (level > 0) & (scope.scale["pairs"] < _SCALE_PAIRS)
        old = scope.scale["level"].clone()
        scope.scale["level"].copy_(torch.where(fits, torch.maximum(old, level), old))
        scope.scale["pairs"].add_(fits)
        new = torch.where(fits, scope.scale["level"], 1.0)
        return torch.where(fits, torch.where(old > 0, old / new, 1 / new).sqrt(), 1.0)

    return factors


def _sums(x: Tensor, f: Callable[[Tensor], Tensor]) -> Tensor:
    """Return Σ f(xᵢ) of each row, some columns at a time, for which fresh memory is little."""
    return torch.stack([f(part).sum(1) for part in x.split(max(1, CHUNK // len(x)), 1)]).sum(0)
