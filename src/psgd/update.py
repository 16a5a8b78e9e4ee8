"""One step, from gradients to parameters: fit Q, average, precondition, clip, write. Never waits for the device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from psgd.curvature import parallel
from psgd.options import ParamGroup, schedule
from psgd.probes import mix
from psgd.scope import Scope, State, real

SCALE_STATE = ("level", "pairs")
_SCALE_PAIRS = 10  # the initial scale is the most cautious of the first ten pairs: one unlucky pair must not set it
_BALANCE_EVERY = 10


@dataclass(frozen=True)
class Update:
    """The gradients of one step, with each parameter's options, and whether all is finite: if not, nothing moves."""

    state: State
    options: dict[Tensor, ParamGroup]
    grads: dict[Tensor, Tensor]
    ok: Tensor

    def fit(self, scope: Scope, v: dict[Tensor, Tensor], h: dict[Tensor, Tensor]) -> None:
        """Move the scope's point by one step on its pair; parameters without h have no part in it."""
        pg, known = self.options[scope.params[0]], [p if p in h else None for p in scope.params]
        v_flat = scope.flat([None if p is None else v[p] for p in known])
        h_flat = scope.flat([None if p is None else h[p] for p in known])
        # a pair without curvature says nothing: Q would grow for ever
        ok = self.ok & h_flat.isfinite().all() & (h_flat != 0).any()
        h_flat = torch.where(ok, h_flat, 0)
        if scope.pair is not None:
            scope.pair = (v_flat, h_flat)
        point, group = scope.point, scope.group
        if pg["init_scale"] is None and group.scalable:
            point = group.scaled(point, _rescale(self.state[scope.params[0]], v_flat, h_flat, ok))
        coin = bool(mix(pg["seed"], pg["iteration"], -3) & 1)
        point = group.fit(point, v_flat, h_flat, lr=pg["precond_lr"], coin=coin, rule=pg["rule"])
        if pg["updates"] % _BALANCE_EVERY == _BALANCE_EVERY - 1:
            point = group.balance(point)
        scope.move(point, ok)

    def direction(self, scope: Scope) -> Tensor:
        """Return P m, m the averaged gradient; zero where the step is skipped."""
        averaged = [self._average(scope, p) if p in self.grads else None for p in scope.params]
        x = torch.where(self.ok, scope.flat(averaged), 0)
        return scope.group.precondition(scope.point, x) if schedule(self.options[scope.params[0]]).ever else x

    def _average(self, scope: Scope, p: Tensor) -> Tensor:
        """m ← βm + (1−β)g, as a plain mean while that weighs g more."""
        g, beta, state = real(self.grads[p]), self.options[p]["momentum"], self.state[p]
        if not beta:
            return g
        if "momentum" not in state:  # turned on after some steps: the warm-up is over
            state["momentum"] = torch.where(self.ok, g, 0).to(scope.wide(p)).contiguous()
        m: Tensor = state["momentum"]
        weight = (1 / (1 + state["step"].to(m))).clamp_min(1 - beta)
        return m.copy_(torch.where(self.ok, m.lerp(g.to(m.dtype), weight), m))

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


def clip(directions: Sequence[Tensor], lead: ParamGroup) -> None:
    """Bound the directions in place: each one's root mean square, the norm of all, every entry."""
    tiny = torch.finfo(torch.bfloat16).tiny
    if lead["max_rms"] is not None and schedule(lead).ever:
        for d in directions:
            rms = torch.linalg.vector_norm(d) / d.numel() ** 0.5
            d.mul_((lead["max_rms"] / rms.clamp_min(tiny)).clamp_max(1))
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


def _rescale(state: dict[str, Any], v: Tensor, h: Tensor, ok: Tensor) -> Tensor:
    """Return the factor that brings Q to the scale P ≈ 1/level, level the largest curvature met so far."""
    most = h.abs().amax().clamp_min(torch.finfo(h.dtype).tiny)
    level = most * (h / most).pow(4).mean().pow(0.25) / v.square().mean().sqrt()  # fourth moment: heavy tails count
    exact = torch.promote_types(level.dtype, torch.float32)
    for key in SCALE_STATE:
        state.setdefault(key, torch.zeros((), dtype=exact, device=level.device))
    ok = ok & (state["pairs"] < _SCALE_PAIRS)
    old = state["level"].clone()
    state["level"].copy_(torch.where(ok, torch.maximum(old, level), old))
    state["pairs"].add_(ok)
    new = torch.where(ok, state["level"], 1.0)
    return torch.where(ok, torch.where(old > 0, old / new, 1 / new).sqrt(), 1.0)
