"""PSGD, the optimizer: curvature in, one point on a Lie group for each scope, preconditioned steps out."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from psgd.across import ALONE, Across, local, sharded, taken
from psgd.arrangement import arrange, exchanged
from psgd.curvature import (
    Curvature,
    FiniteDifference,
    Memory,
    Whiten,
    automatic,
    average,
    finite_difference,
    hessian,
    parallel,
    say,
    whiten,
    whiten_momentum,
)
from psgd.evaluation import Evaluation
from psgd.group import Group
from psgd.groups.named import lra
from psgd.groups.padded import Padded
from psgd.interception import Intercept
from psgd.lockstep import Lockstep
from psgd.options import OBJECTS, ParamGroup, agree, listed, plain, schedule, tensors, validate
from psgd.persistence import SOURCES, STATE_VERSION, check, restored, saved
from psgd.schedule import Adaptive, Regular, Schedule
from psgd.scope import Fit, Scope
from psgd.step_size import Smoothed, StepSize
from psgd.trend import Trend
from psgd.unit import probe
from psgd.update import Update, balance, clip, exact, finite, regularized

Vectors = dict[Scope, Tensor]
"""A vector for each scope."""

Rule = Callable[[tuple[int, ...]], Group]
"""From a tensor's shape to its own group, e.g. `psgd.affine`."""


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
        fresh: weight of the newest gradient beside the average: P is applied to m + fresh·(g − m). 0 is m alone, 1 − β
            is Nesterov's momentum.
        weight_decay: decoupled decay, θ ← (1 − lr·λ)θ.
        l2: coupled penalty ½λ‖θ‖², which adds λθ to g and λv to h.
        precond_lr: μ, the relative size of a step of Q, 0 < μ < 1.
        precond_prob: the fraction of steps that update Q, evenly spaced, or a `Schedule`; 0 is plain SGD.
        max_rms: bound of the root mean square of each preconditioner's output (1 is the size of a sign step).
        max_norm: bound of the norm of the whole preconditioned gradient, or None.
        max_value: bound of each of its entries, or None.
        curvature: `automatic`, `hessian`, `finite_difference`, `whiten` (the gradient) or `whiten_momentum`.
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
        fresh: float = 0.0,
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

            params = listed(params)
            group = richest(tensors(params), memory_budget)
        defaults = dict(
            group=lra(10) if group is None else group,
            lr=lr,
            momentum=momentum,
            fresh=fresh,
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
            pause=0,
            wait=0,
            version=STATE_VERSION,
        )
        validate(defaults)
        super().__init__(params, defaults)
        self._runtime: Memory = {"model": model}

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters, with options of their own; those that hold for all may not differ."""
        options = {**self.defaults, **param_group}
        validate(options)
        agree(options, self.param_groups)
        super().add_param_group(param_group)

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
        return lead["wait"] <= 0 and schedule(lead).due(lead["iteration"], lead["seed"])

    def plan(self) -> Any:
        """Say what the state and a step will cost, before the first step; see `psgd.plan`."""
        from psgd.plan import plan

        return plan(self.param_groups)

    def diagnostics(self) -> dict[str, float]:
        """Describe the last step and its preconditioner in a flat dict; steps that nobody looks at cost nothing.

        `fit_residual` of the last fit (see `psgd.fit_residual`; known from the second look on), `log_det_q`,
        `log_det_p`, `smallest_p`, `largest_p` and `condition_p` of P; `clipped`, the share of the steps looked at that
        met a bound, and `skipped`, of all steps; `cosine` between g and Pg; `step_norm`. NaN is not known.
        """
        from psgd.diagnostics.step_report import step_report

        if any(map(sharded, self._trainable())):
            raise ValueError("diagnostics() needs all of a preconditioner, got one of which this rank has a part")
        return step_report(self)

    def compile(self, **options: Any) -> None:
        """Compile how the preconditioner is fitted and applied, by `torch.compile(…, **options)`.

        Each of them is compiled once for each group of parameters, whatever lr does. Where no compiler works, one
        warning says so, and all goes on without. A copy of the optimizer, or an unpickled one, is not compiled. Nor is
        `lra` of many parameters on a CPU: it goes through them in pieces, three times as fast.
        """
        from psgd.compiled import Compiled

        self._runtime["compiled"] = Compiled(**options)
        self._runtime.pop("lockstep", None)  # whose scopes are not compiled

    @contextlib.contextmanager
    def curvature(self, scaler: torch.amp.GradScaler | None = None) -> Iterator[None]:
        """Take Hessian products from the backward passes inside: `with opt.curvature(): loss.backward()`.

        Any number of micro-batches: v stays the same until `step`, and h adds up. Where the next step does not
        update the preconditioner, this does nothing. Pass the GradScaler that scales the loss. `step` may also come
        inside.
        """
        memory, chosen = self._runtime, (self.param_groups[0]["curvature"], self._runtime.get("settled"))
        if not self.due or memory.get("stepping") or any(isinstance(c, (Whiten, FiniteDifference)) for c in chosen):
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

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Make one step, and return what the closure returned."""
        memory, lead, out = self._runtime, self.param_groups[0], None
        source: Curvature = lead["curvature"]
        due, params = self.due, self._trainable()
        v = self._probes(params) if due and not isinstance(source, Whiten) else []
        pending: Intercept | None = memory.pop("pending", None)
        h, probes = None, dict(zip(params, v, strict=False))
        if closure is not None:
            evaluation = Evaluation(closure, params, memory.get("model"))
            evaluation.earlier = pending
            memory["stepping"] = True
            try:
                with contextlib.nullcontext() if torch.is_grad_enabled() else torch.enable_grad():
                    if v:
                        h = source.pair(evaluation, v, memory)
                    else:
                        evaluation.plain(memory)
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
        if self._in_step(due, v, h, out):
            return
        options = {p: pg for pg in self.param_groups for p in pg["params"]}
        grads = {p: _gradient(p, pg) for p, pg in options.items() if p.grad is not None and p.numel()}
        if not grads:
            self._count(fitted=False)
            return
        with exact(next(iter(grads)).device.type):
            everything = self._scopes()
            scopes = [s for s in everything if any(p in grads for p in s.params)]
            products = [t for t in (h or {}).values() if t is not None]
            told = not parallel() or any(s.shards is not ALONE for s in scopes)  # else ranks have losses of their own
            ok = finite([*grads.values(), *products], out if told else None)
            shards = self._shards(scopes, ok, grads if h is None else h)
            fitting = due and self._decide(h)
            sure = ok.device.type == "cpu" and shards is ALONE  # where it costs nothing to look
            if shards is not ALONE and any(s.across is ALONE for s in scopes):  # what is whole cannot wait
                ok, sure = torch.full_like(ok, shards.ok), True
            if sure and not ok:
                self._skip(everything[0], torch.zeros_like(ok), fitting)
                return
            update = Update(self.state, options, grads, ok, sure, late=shards is not ALONE and not sure)
            averaged = update.averages(scopes)
            m = update.refreshed(averaged)
            fit: Fit = operator.attrgetter("fit" if h is not None else "whiten")
            if fitting and h is None:
                wanted = [(s.group.noisy, p) for s in scopes if s.probing(grads) for p in s.params]
                looked_at = [p for noisy, p in wanted if noisy or p in grads]
                late = [p for p in looked_at if p not in v]  # also gradients put on what does not require one
                drawn = v | dict(zip(late, self._probes(late), strict=True))
                v = {p: drawn[p] for p in looked_at}
                h = m if self.param_groups[0]["curvature"] == whiten_momentum else grads
            elif fitting and h is not None:
                known = ((p, t) for p, t in h.items() if t is not None and p in grads and p in v)
                h = {p: regularized(t, v[p], options[p]) for p, t in known}
                v = {p: v[p] for p in h}
            steps = self._stepped(update, scopes, m, (v, h, fit) if fitting and h is not None else None, shards)
            if update.late:
                if not shards.ok:
                    self._skip(everything[0], torch.zeros_like(ok), fitting)
                    return
                update = dataclasses.replace(update, ok=torch.ones_like(ok), sure=True)
                update.keep(averaged)
            self._count_skip(everything[0], update.ok, update.sure)
            update.write(steps)
            if self._runtime.get("lockstep") is None and scopes == everything:
                self._runtime["lockstep"] = Lockstep.of(everything, self.param_groups, self.state)
        self._finish(scopes, fitting)

    def _stepped(
        self, update: Update, scopes: Sequence[Scope], m: dict[Tensor, Tensor], pair: Any, shards: Across
    ) -> dict[Tensor, Tensor]:
        """Fit to the pair, if there is any, and return the clipped P m."""
        exchange = exchanged(scopes, self._runtime)
        if exchange is not None:
            m, pair = exchange.brought(m, pair, functools.partial(self._probes, whole=True))
        here = [scope for scope in scopes if scope.units]
        if pair is not None:
            *vectors, fit = pair
            v, h = ({scope: scope.gathered(found) for scope in here} for found in vectors)
            pair = (v, h, fit)
        m_flat = {scope: update.guarded(scope.gathered(m)) for scope in here}
        out = {scope: x for scope, x in m_flat.items() if len(scope.held) > 1}  # one alone may be the average itself
        directions = self._directions(update, here, m_flat, out, pair, ALONE if exchange is None else shards)
        steps = {p: t for s, d in zip(here, directions, strict=True) for p, t in zip(s.held, s.split(d), strict=True)}
        return steps if exchange is None else steps | exchange.scatter(steps)

    def _directions(
        self, update: Update, scopes: Sequence[Scope], m: Vectors, out: Vectors, pair: Any, owners: Across = ALONE
    ) -> list[Tensor]:
        """Fit each scope to its pair of vectors, if there is any, and return the clipped P m, perhaps in `out`."""
        if pair is not None:
            v, h, fit = pair
            for scope in scopes:
                update.fit(scope, v[scope], h[scope], fit)
        directions = [update.direction(scope, m[scope], out.get(scope)) for scope in scopes]
        balances = [] if pair is None else balance(scopes, self.param_groups[0], update.ok)
        clip(scopes, directions, self.param_groups[0], owners)
        for finish in balances:
            finish()
        return directions

    def _in_step(self, due: bool, v: dict[Tensor, Tensor], h: dict[Tensor, Any] | None, out: Any) -> bool:
        """Move all parameters by the same calls, if they are alike; if not, do nothing. Return which."""
        lockstep: Lockstep | None = self._runtime.get("lockstep")
        if lockstep is None:
            return False
        if not lockstep.holds(self.param_groups, self.state):
            del self._runtime["lockstep"]
            return False
        with exact("cpu"):
            return self._stepped_together(lockstep, due, v, h, out)

    def _stepped_together(
        self, lockstep: Lockstep, due: bool, v: dict[Tensor, Tensor], h: dict[Tensor, Any] | None, out: Any
    ) -> bool:
        """Make the step; nothing is written before it is known that all are alike, and finite."""
        given = () if h is None else (v, h)
        vectors = [lockstep.gradients(), *(lockstep.vector([t.get(p) for p in lockstep.params]) for t in given)]
        known = [t for t in vectors if t is not None]
        if len(known) < len(vectors):
            return False
        g, *newton = known
        ok = finite(known, None if parallel() else out)
        m = lockstep.averages(g) if ok else None
        if m is None:
            return False
        scratch, pair, fitting = lockstep.cut(g), None, due and self._decide(h)
        update = Update(self.state, lockstep.options, {}, ok, sure=True)
        if fitting and newton:
            pair = (*map(lockstep.cut, newton), operator.attrgetter("fit"))
        elif fitting:
            h_flat = m if self.param_groups[0]["curvature"] == whiten_momentum else scratch
            probes = lockstep.probes(self.param_groups[0]["seed"], self.param_groups[0]["iteration"])
            pair = (lockstep.cut(probes), h_flat, operator.attrgetter("whiten"))
        directions = self._directions(update, lockstep.scopes, m, scratch, pair)
        for pg, params, steps in lockstep.moves(g, directions):
            update.move(pg, params, steps)
        lockstep.count()
        self._finish(lockstep.scopes, fitting)
        return True

    def _finish(self, scopes: Sequence[Scope], fitting: bool) -> None:
        """Count a step, and set the pause after it."""
        adaptive = schedule(self.param_groups[0])
        if fitting and isinstance(adaptive, Adaptive):
            self._rest(scopes, adaptive)
        self._count(fitted=fitting)

    def _count(self, fitted: bool) -> None:
        for pg in self.param_groups:
            pg["iteration"] += 1
            pg["updates"] += int(fitted)
            pg["wait"] = pg["pause"] if fitted else max(0, pg["wait"] - 1)

    def _rest(self, scopes: Sequence[Scope], adaptive: Adaptive) -> None:
        """Set the pause until the next update by what the moves of the last ones say."""
        lead = self.param_groups[0]
        known = [Trend(self.state[s.params[0]]["trend"]).significance for s in scopes]
        mean = float(torch.stack([t.cpu() for t in known]).mean())
        pause = adaptive.pause(lead["pause"], lead["iteration"], mean)
        for pg in self.param_groups:
            pg["pause"] = pause

    def _skip(self, scope: Scope, ok: Tensor, fitting: bool) -> None:
        """Count a step that changes nothing."""
        self._count_skip(scope, ok, sure=False)
        self._count(fitted=fitting)

    def _shards(self, scopes: Sequence[Scope], ok: Tensor, h: dict[Tensor, Any]) -> Across:
        """Return what the scopes exchange sums by, having told it what is not finite here, and where h is not zero."""
        found = sorted((s for s in scopes if s.shards is not ALONE), key=lambda s: s.across is ALONE)
        if not found:
            return ALONE
        if isinstance(schedule(self.param_groups[0]), Adaptive):
            raise ValueError(
                "sharded parameters (FSDP2, DTensor) need another schedule than Adaptive: ranks would differ"
            )
        shards: Any = found[0].shards
        if any(scope.shards.groups != shards.groups for scope in found):  # type: ignore[attr-defined]
            raise ValueError("sharded parameters (DTensor) need to be sharded over the same ranks, got others")
        shards.join([scope.shards for scope in found[1:]])
        momenta = self.param_groups[0]["curvature"] == whiten_momentum
        curved = []
        for scope in (scope for scope in found if scope.across is not ALONE):  # owners look for themselves
            pair = [h[p] for p in scope.params if h.get(p) is not None]
            pair += [local(self.state[p]["momentum"]) for p in scope.params if momenta and "momentum" in self.state[p]]
            curved.append(torch.stack([ok.new_zeros(()), *(t.any() for t in pair)]).any())
        shards.watch(~ok, curved)
        return shards

    def _count_skip(self, scope: Scope, ok: Tensor, sure: bool) -> None:
        first = scope.params[0]
        count = self.state[first].setdefault("skipped", torch.zeros((), device=first.device))
        if not (sure and ok):
            count.add_(~ok)

    def _decide(self, h: Any) -> bool:
        """Whether to fit on a step that is due: always with h; by whitening unless Newton pairs are the custom."""
        memory, lead = self._runtime, self.param_groups[0]
        if h is None:
            if memory.get("in_use") in (hessian, finite_difference) and not isinstance(lead["curvature"], Whiten):
                return False
            # distributed checkpoints make the state by a step with lr = 0
            if lead["curvature"].newton and lead["lr"] and not memory.get("warned"):
                memory["warned"] = True
                say(
                    "PSGD falls back to gradient whitening: a plain step() holds no second-order information. "
                    "Use opt.step(closure) with a closure that returns the loss, or one that also calls backward(), "
                    "or `with opt.curvature(): loss.backward()` before opt.step()."
                )
            memory["in_use"] = lead["curvature"] if isinstance(lead["curvature"], Whiten) else whiten
        return True

    def _trainable(self) -> list[Tensor]:
        return [p for pg in self.param_groups for p in pg["params"] if p.requires_grad and p.numel()]

    def _probes(self, params: Sequence[Tensor], whole: bool = False) -> list[Tensor]:
        """Return v for this rank's parts, or for the whole, of some parameters."""
        lead = self.param_groups[0]
        place = {p: i for i, p in enumerate(p for pg in self.param_groups for p in pg["params"])}
        return [probe(p, lead["seed"], lead["iteration"], place[p], whole=whole) for p in params]

    def _scopes(self, create: bool = True) -> list[Scope]:
        cache: dict[int, Scope] = self._runtime.get("scopes", {})
        self._runtime["scopes"] = arrange(self.param_groups, self.state, cache, create)
        found = list(self._runtime["scopes"].values())
        for scope in found:
            scope.compiled = self._runtime.get("compiled")
        return found

    # --- persistence

    def state_dict(self) -> dict[str, Any]:
        """As for every optimizer; objects (group, rule, schedule, …) are the constructor's business, and stay out."""
        packed = super().state_dict()
        packed["param_groups"] = [saved(pg, self._runtime.get("settled")) for pg in packed["param_groups"]]
        return packed

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load, keeping every dtype as it was saved."""
        objects = [{k: pg[k] for k in OBJECTS} for pg in self.param_groups]
        final: list[dict[str, Any]] = []

        def before(_: Optimizer, state_dict: dict[str, Any]) -> None:
            final.append(state_dict)
            check(state_dict["param_groups"], objects)

        # hooks of our own: after the user's have changed what is to be loaded, and before they see what was
        hooks = (
            self.register_load_state_dict_pre_hook(before),
            self.register_load_state_dict_post_hook(lambda _: self._complete(final[0], objects), prepend=True),
        )
        try:
            super().load_state_dict(state_dict)
        finally:
            for hook in hooks:
                hook.remove()

    def _complete(self, loaded: dict[str, Any], objects: list[dict[str, Any]]) -> None:
        """Put back what the base class casts, and what is not saved."""
        for pg, kept in zip(self.param_groups, objects, strict=True):
            pg.update({k: v for k, v in kept.items() if pg.get(k) is None or not plain(v)})
        names = (n for pg in loaded["param_groups"] for n in pg["params"])
        for name, p in zip(names, (p for pg in self.param_groups for p in pg["params"]), strict=True):
            if name in loaded["state"]:
                self.state[p] = restored(loaded["state"][name], p)
        lead = self.param_groups[0]
        if lead["curvature"] == automatic:
            self._runtime["settled"] = SOURCES[int(lead.get("settled", 0))]
        self._scopes(create=False)

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore after a load, a deepcopy or unpickling: caches and findings are made anew."""
        super().__setstate__(state)
        for pg in self.param_groups:
            for key, value in self.defaults.items():
                pg.setdefault(key, value)
        model = self.__dict__.get("_runtime", {}).get("model")
        self._runtime = {"model": model}


def _gradient(p: Tensor, pg: ParamGroup) -> Tensor:
    assert p.grad is not None
    if p.grad.is_sparse:
        raise RuntimeError("PSGD does not support sparse gradients; use Embedding(..., sparse=False)")
    return regularized(taken(p.grad, p), local(p), pg)
