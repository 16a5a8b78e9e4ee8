"""One step, from gradients to parameters: fit Q, average, precondition, clip, write. Never waits for the device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from psgd.curvature import parallel
from psgd.options import ParamGroup, schedule
from psgd.probes import mix
from psgd.schedule import Adaptive
from psgd.scope import Scope, State, real
from psgd.trend import Trend, relative, sample

Fit = Callable[[Any], Callable[..., Any]]
"""Which of a group's steps: `fit` or `whiten`."""

_SCALE_PAIRS = 10  # the initial scale is the most cautious of the first ten pairs: one unlucky pair must not set it
_BALANCE_EVERY = 10


@dataclass(frozen=True)
class Update:
    """The gradients of one step, with each parameter's options, and whether all is finite: if not, nothing moves."""

    state: State
    options: dict[Tensor, ParamGroup]
    grads: dict[Tensor, Tensor]
    ok: Tensor

    def fit(self, scope: Scope, v: dict[Tensor, Tensor], h: dict[Tensor, Tensor], fit: Fit) -> None:
        """Move the scope's point by one step on its pair; parameters without h have no part in it."""
        pg, known = self.options[scope.params[0]], [p if p in h else None for p in scope.params]
        v_flat = scope.flat([None if p is None else v.get(p) for p in known])
        h_flat = scope.flat([None if p is None else h[p] for p in known])
        # a pair without curvature says nothing: Q would grow for ever
        each = scope.each(h_flat)
        most = torch.linalg.vector_norm(each, float("inf"), dim=1)
        ok = self.ok & most.isfinite() & (most > 0)
        h_flat = torch.where(ok[:, None], each, 0).view(-1)
        if scope.pair is not None:
            scope.pair = (v_flat, h_flat)
        point, group = scope.point, scope.group
        if pg["init_scale"] is None and group.scalable:
            point = scope.scaled(_rescale(scope, v_flat, h_flat, ok))
        coin = bool(mix(pg["seed"], pg["iteration"], -3) & 1)
        lr, out = pg["precond_lr"], None
        if scope.alone and not isinstance(schedule(pg), Adaptive):
            lr, out = lr * ok[0].to(torch.promote_types(scope.dtype, torch.float32)), point
        point = fit(group)(point, v_flat, h_flat, lr=lr, coin=coin, rule=pg["rule"], out=out)
        if pg["updates"] % _BALANCE_EVERY == _BALANCE_EVERY - 1:
            point = group.balance(point)
        if isinstance(schedule(pg), Adaptive):
            self._watch(scope, point, ok)
        else:
            scope.move(point, ok)

    def _watch(self, scope: Scope, point: Any, ok: Tensor) -> None:
        """Move the scope's point, and keep the trend of its moves."""
        before, state = sample(scope.point), self.state[scope.params[0]]
        scope.move(point, ok)
        move = relative(before, sample(scope.point))
        if "trend" not in state or state["trend"].shape[1] != len(move):
            state["trend"] = torch.zeros(2, len(move), dtype=move.dtype, device=move.device)
        Trend(state["trend"]).add(move)

    def direction(self, scope: Scope, m: dict[Tensor, Tensor]) -> Tensor:
        """Return P m, m the averaged gradient; zero where the step is skipped."""
        x = torch.where(self.ok, scope.flat([m.get(p) for p in scope.params]), 0)
        return scope.precondition(x) if schedule(self.options[scope.params[0]]).ever else x

    def average(self, scope: Scope, p: Tensor) -> Tensor:
        """m ← βm + (1−β)g, as a plain mean while that weighs g more."""
        g, beta, state = real(self.grads[p]), self.options[p]["momentum"], self.state[p]
        if not beta:
            return g
        if "momentum" not in state:  # turned on after some steps: the warm-up is over
            state["momentum"] = torch.where(self.ok, g, 0).to(scope.wide(p)).contiguous()
        m: Tensor = state["momentum"]
        weight = (1 / (1 + state["step"].to(m))).clamp_min(1 - beta)
        return m.lerp_(torch.where(self.ok, g.to(m.dtype), m), weight)

    def write(self, scope: Scope, d: Tensor) -> None:
        """θ ← (1 − lr·λ)θ − lr·d."""
        for p, step in zip(scope.params, scope.split(d), strict=True):
            if p not in self.grads:
                continue
            pg, lr = self.options[p], self.options[p]["lr"]
            if not schedule(pg).ever:
                step = step.to(real(p).dtype)  # now this is SGD to the last bit
            lr = lr.reshape(()).to(step) if isinstance(lr, Tensor) else lr
            if pg["weight_decay"]:
                fine = torch.promote_types(real(p).dtype, torch.float32)  # a factor near 1 has no place in bfloat16
                p.mul_(1 - lr * pg["weight_decay"] * self.ok.to(p.device, fine))
            if isinstance(lr, Tensor):
                real(p).sub_(step * lr)
            else:
                real(p).add_(step, alpha=-lr)
            self.state[p]["step"].add_(self.ok)


def clip(scopes: Sequence[Scope], directions: Sequence[Tensor], lead: ParamGroup) -> None:
    """Bound the directions in place: each unit's root mean square, the norm of all, every entry."""
    tiny = torch.finfo(torch.bfloat16).tiny
    if lead["max_rms"] is not None and schedule(lead).ever:
        for scope, d in zip(scopes, directions, strict=True):
            each = scope.each(d)
            rms = torch.linalg.vector_norm(each, dim=1, keepdim=True) / each.shape[1] ** 0.5
            each.mul_((lead["max_rms"] / rms.clamp_min(tiny)).clamp_max(1))
    if lead["max_norm"] is not None and directions:
        norm = torch.stack([torch.linalg.vector_norm(d).to(directions[0]) for d in directions]).norm()
        for d in directions:
            d.mul_((lead["max_norm"] / norm.clamp_min(tiny)).clamp_max(1).to(d))
    if lead["max_value"] is not None:
        for d in directions:
            d.clamp_(-lead["max_value"], lead["max_value"])


def regularized(t: Tensor, x: Tensor, pg: ParamGroup) -> Tensor:
    """±g + λθ or ±h + λv, the derivatives of ±f + ½λ‖θ‖²."""
    t = -t if pg["maximize"] else t
    return t.add(x, alpha=pg["l2"]) if pg["l2"] else t


def finite(tensors: Sequence[Tensor], out: Any) -> Tensor:
    """Whether gradients, products and the loss are finite."""
    checks = [torch.linalg.vector_norm(real(t), float("inf")).isfinite() for t in tensors]
    loss = out[0] if isinstance(out, (tuple, list)) and out else out
    if isinstance(loss, (float, Tensor)) and not parallel():  # ranks have losses of their own, but act as one
        checks.append(torch.as_tensor(loss).detach().isfinite().all())
    return torch.stack([t.to(checks[0].device) for t in checks]).all()


def _rescale(scope: Scope, v: Tensor, h: Tensor, ok: Tensor) -> Tensor:
    """Return the factors that bring each unit's Q to the scale P ≈ 1/level, level the largest curvature met so far."""
    v, h = scope.each(v), scope.each(h)
    most = h.abs().amax(1).clamp_min(torch.finfo(h.dtype).tiny)
    moment = (h / most[:, None]).square().square().mean(1).pow(0.25)  # the fourth: heavy tails count
    spread = v.square().mean(1).sqrt()
    level = most * moment / torch.where(spread > 0, spread, 1.0)
    ok = ok & (scope.scale["pairs"] < _SCALE_PAIRS)
    old = scope.scale["level"].clone()
    scope.scale["level"].copy_(torch.where(ok, torch.maximum(old, level), old))
    scope.scale["pairs"].add_(ok)
    new = torch.where(ok, scope.scale["level"], 1.0)
    return torch.where(ok, torch.where(old > 0, old / new, 1 / new).sqrt(), 1.0)
