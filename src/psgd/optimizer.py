"""PSGD, the optimizer: curvature in, one point on a Lie group for each scope, preconditioned steps out."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from psgd.curvature import (
    Curvature,
    Memory,
    automatic,
    average,
    finite_difference,
    hessian,
    parallel,
    say,
    whiten,
)
from psgd.evaluation import Evaluation, Intercept
from psgd.group import Group
from psgd.groups.named import lra
from psgd.groups.padded import Padded
from psgd.probes import mix, normal_like
from psgd.schedule import Regular, Schedule
from psgd.scope import Scope, real
from psgd.step_size import Smoothed, StepSize

Rule = Callable[[tuple[int, ...]], Group]
"""From a tensor's shape to its own group, e.g. `psgd.affine`."""

STATE_VERSION = 1
_SCALE_PAIRS = 10  # the initial scale is the most cautious of the first ten pairs: one unlucky pair must not set it
_SCALE_STATE = ("level", "pairs")
_BALANCE_EVERY = 10
_SOURCES = (None, hessian, finite_difference, whiten)  # as numbers in a checkpoint


class PSGD(Optimizer):
    """Preconditioned SGD: θ ← θ − lr·P m, with P = QᵀQ fitted online to pairs (v, Hv), m the averaged gradient.

    Works in an ordinary loop (`loss.backward(); opt.step()`, gradient whitening) and, with second-order
    information, through `opt.step(closure)` or `with opt.curvature(): loss.backward()`.

    Args:
        params: parameters, named parameters or param_groups, as for any torch optimizer.
        group: one group for all parameters together (`lra(10)` unless given; param_groups with an equal group, and
            an equal "scope" if they name one, share one preconditioner), or a rule from a tensor's shape to its own.
        lr: step size, a number or a 0-d tensor.
        momentum: β of the averaged gradient m ← βm + (1−β)g, warmed up as a plain mean; 0 for none.
        weight_decay: decoupled decay, θ ← (1 − lr·λ)θ.
        l2: coupled penalty ½λ‖θ‖², which adds λθ to g and λv to h.
        precond_lr: μ, the relative size of a step of Q, 0 < μ < 1.
        precond_prob: the fraction of steps that update Q, evenly spaced, or a `Schedule`; 0 is plain SGD.
        max_rms: bound of the root mean square of each preconditioner's output (1 is the size of a sign step).
        max_norm: bound of the norm of the whole preconditioned gradient, or None.
        max_value: bound of each of its entries, or None.
        curvature: `automatic`, `hessian`, `finite_difference` or `whiten`.
        rule: the step-size rule of Q, `Smoothed()` or the paper's `Normalized()`.
        init_scale: Q₀ = init_scale·I; None takes it from the first ten pairs.
        precond_dtype: dtype of Q, at least float32 unless given.
        seed: of the probes and coins; the global generators are never used.
        maximize: ascend instead.
        model: kept from advancing its buffers (BatchNorm) twice where a loss is evaluated twice.
        memory_budget: bytes of state; takes the richest group that fits them, instead of `group`.

    >>> x = torch.tensor([-1.0, 1.0], requires_grad=True)
    >>> def rosenbrock():
    ...     return (1 - x[0]) ** 2 + 100 * (x[1] - x[0] ** 2) ** 2
    >>> from psgd import Dense, Normalized
    >>> opt = PSGD([x], Dense(), lr=1.0, momentum=0.0, precond_prob=1.0, precond_lr=0.5, rule=Normalized())
    >>> for _ in range(300):
    ...     loss = opt.step(rosenbrock)
    >>> bool(loss < 1e-10)
    True
    """

    def __init__(
        self,
        params: Any,
        group: Group | Padded | Rule | None = None,
        *,
        lr: float | Tensor = 0.01,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        l2: float = 0.0,
        precond_lr: float = 0.1,
        precond_prob: float | Schedule = Regular(0.1, warmup=100),  # noqa: B008 - frozen
        max_rms: float | None = 1.0,
        max_norm: float | None = None,
        max_value: float | None = None,
        curvature: Curvature = automatic,
        rule: StepSize = Smoothed(),  # noqa: B008 - frozen
        init_scale: float | None = None,
        precond_dtype: torch.dtype | None = None,
        seed: int = 0,
        maximize: bool = False,
        model: nn.Module | None = None,
        memory_budget: float | None = None,
    ) -> None:
        if memory_budget is not None:
            if group is not None:
                raise ValueError("PSGD takes a group or a memory_budget, got both")
            from psgd.plan import richest

            params = _listed(params)
            group = richest(_tensors(params), memory_budget)
        defaults = dict(
            group=lra(10) if group is None else group,
            lr=lr,
            momentum=momentum,
            weight_decay=weight_decay,
            l2=l2,
            precond_lr=precond_lr,
            precond_prob=precond_prob,
            max_rms=max_rms,
            max_norm=max_norm,
            max_value=max_value,
            curvature=curvature,
            rule=rule,
            init_scale=init_scale,
            precond_dtype=precond_dtype,
            seed=seed,
            maximize=maximize,
            scope=None,
            iteration=0,
            updates=0,
            version=STATE_VERSION,
        )
        _validate(defaults)
        super().__init__(params, defaults)
        self._runtime: Memory = {"model": model}

    # --- what the user asks

    @property
    def source(self) -> Curvature | None:
        """The curvature in use: `hessian`, `finite_difference`, `whiten`, or None before the first update."""
        return self._runtime.get("in_use")

    @property
    def skipped(self) -> int:
        """How many steps changed nothing, because a loss, gradient or Hessian product was not finite."""
        return int(sum(s["skipped"].item() for s in self.state.values() if "skipped" in s))

    @property
    def due(self) -> bool:
        """Whether the next step updates the preconditioner."""
        lead = self.param_groups[0]
        return _schedule(lead).due(lead["iteration"], lead["seed"])

    def plan(self) -> Any:
        """Say what the state and a step will cost, before the first step; see `psgd.plan`."""
        from psgd.plan import plan

        return plan(self.param_groups)

    @contextlib.contextmanager
    def curvature(self, scaler: torch.amp.GradScaler | None = None) -> Iterator[None]:
        """Take Hessian products from the backward passes inside: `with opt.curvature(): loss.backward()`.

        Any number of micro-batches: v stays the same until `step`, and h adds up. Where the next step does not
        update the preconditioner, this does nothing. Pass the GradScaler that scales the loss. `step` may also come
        inside.
        """
        memory, chosen = self._runtime, (self.param_groups[0]["curvature"], self._runtime.get("settled"))
        if not self.due or memory.get("stepping") or whiten in chosen or finite_difference in chosen:
            yield
            return
        params = self._trainable()
        if "pending" not in memory or all(p.grad is None for p in params):  # gradients start anew, so does h
            memory["pending"] = Intercept(params, self._probes(params))
        seen: Intercept = memory["pending"]
        seen.scale = 1.0 if scaler is None else scaler.get_scale()
        with seen:
            yield

    # --- the step

    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """Make one step, and return what the closure returned."""
        memory, lead, out = self._runtime, self.param_groups[0], None
        source: Curvature = lead["curvature"]
        due, params = self.due, self._trainable()
        v = self._probes(params) if due else []
        pending: Intercept | None = memory.pop("pending", None)
        h, probes = None, dict(zip(params, v, strict=False))
        if closure is not None:
            evaluation = Evaluation(closure, params, memory.get("model"))
            evaluation.earlier = pending
            memory["stepping"] = True
            try:
                with torch.enable_grad():
                    if due and params:
                        h = source.pair(evaluation, v, memory)
                    else:
                        evaluation.plain()
            finally:
                memory["stepping"] = False
            out = evaluation.out
            pending = pending if h is None else evaluation.earlier
        products: dict[Tensor, Any] | None = None if h is None else dict(zip(params, h, strict=True))
        if pending is not None and products is None:  # Lightning's manual mode passes a closure that does nothing
            h = source.accept(pending, memory)
            products = None if h is None else dict(zip(pending.params, h, strict=True))
        elif pending is not None and products is not None:  # micro-batches before the closure's own
            for p, t in zip(pending.params, average(pending.h, pending.params), strict=True):
                if t is not None:
                    products[p] = t if products.get(p) is None else products[p] + t
        self._update(due, probes, products, out)
        return out

    @torch.no_grad()
    def _update(self, due: bool, v: dict[Tensor, Tensor], h: dict[Tensor, Any] | None, out: Any) -> None:
        index = {p: pg for pg in self.param_groups for p in pg["params"]}
        grads = {p: self._gradient(p, pg) for p, pg in index.items() if p.grad is not None and p.numel()}
        if not grads:
            self._count(due=False)
            return
        with torch.autocast(next(iter(grads)).device.type, enabled=False):
            scopes = self._scopes()
            ok = _finite([*grads.values(), *(t for t in (h or {}).values() if t is not None)], out)
            self._count_skip(scopes[0], ok)
            fitting = due and self._decide(h)
            if fitting and h is None:  # a gradient may also have been put on a tensor that does not require one
                h, late = grads, [p for p in grads if p not in v]
                v = v | dict(zip(late, self._probes(late), strict=True))
            elif fitting and h is not None:
                known = ((p, t) for p, t in h.items() if t is not None and p in grads and p in v)
                h = {p: _regularized(t, v[p], index[p]) for p, t in known}
            outputs = []
            for scope in scopes:
                if not any(p in grads for p in scope.params):
                    continue
                if fitting and h is not None:
                    self._fit(scope, index[scope.params[0]], ok, v, h)
                outputs.append((scope, self._direction(scope, index, ok, grads)))
            self._clip(outputs)
            for scope, d in outputs:
                self._write(scope, d, index, ok, grads)
        self._count(due=fitting)

    def _count(self, due: bool) -> None:
        for pg in self.param_groups:
            pg["iteration"] += 1
            pg["updates"] += int(due)

    def _decide(self, h: Any) -> bool:
        """Whether to fit on a step that is due: always with h; by whitening unless Newton is the custom here."""
        memory = self._runtime
        if h is None:
            if memory.get("in_use") in (hessian, finite_difference):
                return False
            lead = self.param_groups[0]  # distributed checkpoints make the state by a step with lr = 0
            if lead["curvature"].newton and lead["lr"] and not memory.get("warned"):
                memory["warned"] = True
                say(
                    "PSGD falls back to gradient whitening: a plain step() holds no second-order information. Use "
                    "opt.step(closure) with a closure that returns the loss, or one that also calls backward(), "
                    "or `with opt.curvature(): loss.backward()` before opt.step()."
                )
            memory["in_use"] = whiten
        return True

    def _gradient(self, p: Tensor, pg: dict[str, Any]) -> Tensor:
        g = p.grad
        assert g is not None
        if g.is_sparse:
            raise RuntimeError("PSGD does not support sparse gradients; use Embedding(..., sparse=False)")
        return _regularized(g, p, pg)

    def _fit(
        self,
        scope: Scope,
        pg: dict[str, Any],
        ok: Tensor,
        probes: dict[Tensor, Tensor],
        products: dict[Tensor, Any],
    ) -> None:
        found = [products.get(p) for p in scope.params]
        h = scope.flat(found)
        v = scope.flat([None if t is None else probes[p] for p, t in zip(scope.params, found, strict=True)])
        ok = ok & h.isfinite().all() & (h != 0).any()  # a pair without curvature says nothing: Q would grow for ever
        h = torch.where(ok, h, 0)
        point, group = scope.point, scope.group
        if pg["init_scale"] is None and group.scalable:
            point = group.scaled(point, self._rescale(self.state[scope.params[0]], v, h, ok))
        coin = bool(mix(pg["seed"], pg["iteration"], -3) & 1)
        point = group.fit(point, v, h, lr=pg["precond_lr"], coin=coin, rule=pg["rule"])
        if pg["updates"] % _BALANCE_EVERY == _BALANCE_EVERY - 1:
            point = group.balance(point)
        scope.move(point, ok)

    @staticmethod
    def _rescale(state: dict[str, Any], v: Tensor, h: Tensor, ok: Tensor) -> Tensor:
        """Return the factor that brings Q to the scale P ≈ 1/level, level the largest curvature so far."""
        most = h.abs().amax().clamp_min(torch.finfo(h.dtype).tiny)
        level = most * (h / most).pow(4).mean().pow(0.25) / v.square().mean().sqrt()  # fourth moment: heavy tails count
        for key in _SCALE_STATE:
            state.setdefault(key, torch.zeros((), device=level.device))
        ok = ok & (state["pairs"] < _SCALE_PAIRS)
        old = state["level"].clone()
        state["level"].copy_(torch.where(ok, torch.maximum(old, level), old))
        state["pairs"].add_(ok)
        new = torch.where(ok, state["level"], 1.0)
        return torch.where(ok, torch.where(old > 0, old / new, 1 / new).sqrt(), 1.0)

    def _direction(
        self, scope: Scope, index: dict[Tensor, dict[str, Any]], ok: Tensor, grads: dict[Tensor, Tensor]
    ) -> Tensor:
        """P m, or zero where the step is skipped."""
        averaged: list[Tensor | None] = []
        for p in scope.params:
            g, beta, state = grads.get(p), index[p]["momentum"], self.state[p]
            if g is not None and beta:
                if "momentum" not in state:  # turned on after some steps: the warm-up is over
                    state["momentum"] = torch.where(ok, real(g), 0).to(scope.wide(p)).contiguous()
                m = state["momentum"]
                # a mean of the first gradients, then an exponential average; no change where a step is skipped
                weight = (1 / (1 + state["step"])).clamp_min(1 - beta)
                m.copy_(torch.where(ok, m.lerp(real(g).to(m.dtype), weight.to(m)), m))
                g = m
            averaged.append(g)
        x = scope.flat([None if t is None else t for t in averaged])
        x = torch.where(ok, x, 0)
        return scope.group.precondition(scope.point, x) if self._preconditioned(index[scope.params[0]]) else x

    @staticmethod
    def _preconditioned(pg: dict[str, Any]) -> bool:
        return _schedule(pg).ever

    def _clip(self, outputs: list[tuple[Scope, Tensor]]) -> None:
        lead = self.param_groups[0]
        if lead["max_rms"] is not None and self._preconditioned(lead):
            for _, d in outputs:
                rms = torch.linalg.vector_norm(d) / d.numel() ** 0.5
                d.mul_((lead["max_rms"] / rms.clamp_min(torch.finfo(d.dtype).tiny)).clamp_max(1))
        if lead["max_norm"] is not None and outputs:
            norm = torch.stack([torch.linalg.vector_norm(d).to(outputs[0][1]) for _, d in outputs]).norm()
            for _, d in outputs:
                d.mul_((lead["max_norm"] / norm.clamp_min(torch.finfo(d.dtype).tiny)).clamp_max(1).to(d))
        if lead["max_value"] is not None:
            for _, d in outputs:
                d.clamp_(-lead["max_value"], lead["max_value"])

    def _write(
        self,
        scope: Scope,
        d: Tensor,
        index: dict[Tensor, dict[str, Any]],
        ok: Tensor,
        grads: dict[Tensor, Tensor],
    ) -> None:
        for p, step in zip(scope.params, scope.split(d), strict=True):
            if p not in grads:
                continue
            pg, lr = index[p], index[p]["lr"]
            lr = lr.reshape(()).to(step) if isinstance(lr, Tensor) else lr
            if pg["weight_decay"]:
                p.mul_(torch.where(ok, 1 - lr * pg["weight_decay"], 1.0).to(p.device))
            if isinstance(lr, Tensor):
                real(p).sub_(step * lr)
            else:
                real(p).add_(step, alpha=-lr)
            self.state[p]["step"].add_(ok)

    def _count_skip(self, scope: Scope, ok: Tensor) -> None:
        state = self.state[scope.params[0]]
        state.setdefault("skipped", torch.zeros((), device=scope.device)).add_(~ok)

    # --- scopes and probes

    def _trainable(self) -> list[Tensor]:
        found = [p for pg in self.param_groups for p in pg["params"] if p.requires_grad and p.numel()]
        if any(hasattr(p, "device_mesh") for p in found):
            raise NotImplementedError("PSGD does not support DTensor parameters (FSDP2, tensor parallel) yet; use DDP")
        return found

    def _probes(self, params: Sequence[Tensor]) -> list[Tensor]:
        lead = self.param_groups[0]
        place = {p: i for i, p in enumerate(p for pg in self.param_groups for p in pg["params"])}
        return [normal_like(p, lead["seed"], lead["iteration"], place[p]) for p in params]

    def _scopes(self, create: bool = True) -> list[Scope]:
        """Return the scopes, made or restored where needed. Parameters that come later get their own."""
        fresh: dict[Any, list[tuple[Tensor, dict[str, Any]]]] = {}
        known: dict[int, list[tuple[Tensor, dict[str, Any]]]] = {}
        for pg in self.param_groups:
            for p in pg["params"]:
                if p in self.state and "scope" in self.state[p]:
                    known.setdefault(int(self.state[p]["scope"]), []).append((p, pg))
                elif p.numel() and (p.requires_grad or p.grad is not None):
                    joint = isinstance(pg["group"], (Group, Padded))
                    key = (pg["group"], pg["scope"], p.device) if joint else (id(p),)
                    fresh.setdefault(key, []).append((p, pg))
        old: dict[int, Scope] = self._runtime.get("scopes", {})
        cache = self._runtime["scopes"] = {n: old[n] for n in known if n in old}
        for number, members in known.items():
            if number not in cache or not cache[number].intact(self.state, [p for p, _ in members]):
                cache[number] = self._scope(members)
                cache[number].restore(self.state)
        for members in fresh.values() if create else ():
            number = max(cache, default=-1) + 1
            cache[number] = scope = self._scope(members)
            self._create(scope, number, members[0][1])
        return list(cache.values())

    @staticmethod
    def _scope(members: list[tuple[Tensor, dict[str, Any]]]) -> Scope:
        (first, pg), params = members[0], [p for p, _ in members]
        group = pg["group"]
        if not isinstance(group, (Group, Padded)):
            group = group(tuple(real(first).shape) or (1,))
        return Scope(group, params, pg["precond_dtype"])

    def _create(self, scope: Scope, number: int, pg: dict[str, Any]) -> None:
        for p in scope.params:
            self.state[p].update(step=torch.zeros((), device=p.device), scope=number)
            if pg["momentum"]:
                zero = torch.zeros_like(real(p), dtype=scope.wide(p), memory_format=torch.contiguous_format)
                self.state[p]["momentum"] = zero
        for key in _SCALE_STATE:
            self.state[scope.params[0]][key] = torch.zeros((), device=scope.device)
        scope.create(self.state, pg["init_scale"] or 1.0, pg["seed"], number)

    # --- persistence

    def state_dict(self) -> dict[str, Any]:
        """As for every optimizer; objects (group, rule, schedule, …) are the constructor's business, and stay out."""
        packed = super().state_dict()
        settled = _SOURCES.index(self._runtime.get("settled"))
        packed["param_groups"] = [
            {k: v for k, v in pg.items() if _plain(k, v)} | {"settled": settled} for pg in packed["param_groups"]
        ]
        return packed

    @torch._disable_dynamo
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load, keeping every dtype as it was saved."""
        objects = [{k: v for k, v in pg.items() if not _plain(k, v)} for pg in self.param_groups]
        final: list[dict[str, Any]] = []

        def check(_: Optimizer, state_dict: dict[str, Any]) -> None:
            final.append(state_dict)
            for pg in state_dict["param_groups"]:
                if pg.get("version", STATE_VERSION) > STATE_VERSION:
                    raise ValueError(f"this psgd reads state version {STATE_VERSION}, got version {pg['version']}")

        # hooks of our own: after the user's have changed what is to be loaded, and before they see what was
        hooks = (
            self.register_load_state_dict_pre_hook(check),
            self.register_load_state_dict_post_hook(lambda _: self._complete(final[0], objects), prepend=True),
        )
        try:
            super().load_state_dict(state_dict)
        finally:
            for hook in hooks:
                hook.remove()

    def _complete(self, loaded: dict[str, Any], objects: list[dict[str, Any]]) -> None:
        """Put back what the base class casts (it knows only the parameter's dtype) and what is not saved."""
        for pg, kept in zip(self.param_groups, objects, strict=True):
            pg.update(kept)
        names = (n for pg in loaded["param_groups"] for n in pg["params"])
        for name, p in zip(names, (p for pg in self.param_groups for p in pg["params"]), strict=True):
            if name in loaded["state"]:
                state = _copied(loaded["state"][name], p.device)
                state["step"] = torch.as_tensor(state.get("step", 0.0), dtype=torch.float32, device=p.device)
                self.state[p] = state
        lead = self.param_groups[0]
        if lead["curvature"] == automatic:
            self._runtime["settled"] = _SOURCES[int(lead.get("settled", 0))]
        self._scopes(create=False)

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore after a load, a deepcopy or unpickling: caches and findings are made anew."""
        super().__setstate__(state)
        for pg in self.param_groups:
            for key, value in self.defaults.items():
                pg.setdefault(key, value)
        model = self.__dict__.get("_runtime", {}).get("model")
        self._runtime = {"model": model}


def _schedule(pg: dict[str, Any]) -> Schedule:
    prob = pg["precond_prob"]
    return prob if isinstance(prob, Schedule) else Regular(prob)


def _listed(params: Any) -> list[Any]:
    """Return the same parameters or param_groups, with lists where generators could be read only once."""
    if isinstance(params, Tensor):
        return [params]
    return [item | {"params": _listed(item["params"])} if isinstance(item, dict) else item for item in params]


def _tensors(params: Iterable[Any]) -> list[Tensor]:
    found: list[Tensor] = []
    for item in params:
        if isinstance(item, dict):
            found += _tensors(item["params"])
        else:
            found.append(item[1] if isinstance(item, tuple) else item)
    return found


def _plain(key: str, value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return key == "param_names" or all(_plain(key, item) for item in value)
    return value is None or isinstance(value, (bool, int, float, Tensor))


def _copied(value: Any, device: torch.device) -> Any:
    if isinstance(value, dict):
        return {k: _copied(v, device) for k, v in value.items()}
    return value.detach().to(device, copy=True) if isinstance(value, Tensor) else value


def _regularized(t: Tensor, x: Tensor, pg: dict[str, Any]) -> Tensor:
    """±g + λθ or ±h + λv, the derivatives of ±f + ½λ‖θ‖²."""
    t = -t if pg["maximize"] else t
    return t.add(x, alpha=pg["l2"]) if pg["l2"] else t


def _finite(tensors: Sequence[Tensor], out: Any) -> Tensor:
    """Whether gradients, products and the loss are finite: on the device, without a wait."""
    checks = [torch.linalg.vector_norm(real(t), float("inf")).isfinite() for t in tensors]
    loss = out[0] if isinstance(out, (tuple, list)) and out else out
    if isinstance(loss, (float, Tensor)) and not parallel():  # ranks have losses of their own, but act as one
        checks.append(torch.as_tensor(loss).detach().isfinite().all())
    return torch.stack([t.to(checks[0].device) for t in checks]).all()


def _validate(options: dict[str, Any]) -> None:
    lr = options["lr"]
    if isinstance(lr, Tensor):
        if lr.numel() != 1:
            raise ValueError("Tensor lr must be 1-element")
    if not lr >= 0:
        raise ValueError(f"PSGD needs lr >= 0, got {lr}")
    for key in ("weight_decay", "l2"):
        if not options[key] >= 0:
            raise ValueError(f"PSGD needs {key} >= 0, got {options[key]}")
    if not 0 <= options["momentum"] < 1:
        raise ValueError(f"PSGD needs 0 <= momentum < 1, got {options['momentum']}")
    if not 0 < options["precond_lr"] < 1:
        raise ValueError(f"PSGD needs 0 < precond_lr < 1, got {options['precond_lr']}")
    for key in ("max_rms", "max_norm", "max_value", "init_scale"):
        if options[key] is not None and not options[key] > 0:
            raise ValueError(f"PSGD needs {key} > 0 or None, got {options[key]}")
    if not isinstance(options["curvature"], Curvature):
        raise ValueError(
            f"curvature needs to be one of automatic, hessian, finite_difference, whiten, got {options['curvature']!r}"
        )
    if not isinstance(options["rule"], StepSize):
        raise ValueError(f"rule needs to be a StepSize, as Smoothed() or Normalized(), got {options['rule']!r}")
    if options["precond_dtype"] is not None and not options["precond_dtype"].is_floating_point:
        raise ValueError(f"precond_dtype needs to be a floating-point dtype, got {options['precond_dtype']}")
    if not callable(options["group"]) and not isinstance(options["group"], (Group, Padded)):
        raise ValueError(f"group needs to be a Group or a rule from shape to group, got {options['group']!r}")
    _schedule(options)
