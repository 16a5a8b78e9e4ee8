"""What `opt.diagnostics()` says: a look at the last step, computed when asked and never before."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from psgd.diagnostics.reports import Report, fit_residual, lifted, tails, unpadded
from psgd.linalg import lift
from psgd.options import ParamGroup, schedule
from psgd.scope import Scope
from psgd.update import clip, regularized

if TYPE_CHECKING:
    from psgd.optimizer import PSGD


@torch.no_grad()
def step_report(opt: PSGD, tol: float = 1e-2) -> Report:
    """Describe the last step and its preconditioners; NaN stands for what is not known.

    The state still holds all that the step came from, so that it is made again here. Only the pairs of the last fit
    are gone: scopes keep them from the first look on.
    """
    scopes, lead = opt._scopes(create=False), opt.param_groups[0]
    options = {p: pg for pg in opt.param_groups for p in pg["params"]}

    def gradient(p: Tensor) -> Tensor | None:
        return None if p.grad is None else regularized(p.grad, p, options[p])

    def averaged(p: Tensor) -> Tensor | None:
        return opt.state[p].get("momentum") if options[p]["momentum"] else gradient(p)

    g, pg = _through(scopes, options, gradient)
    _, d = _through(scopes, options, averaged)
    looks: dict[int, float] = opt._runtime.setdefault("looks", {})  # by iteration: two looks at one step are one
    if d:
        free = [t.clone() for t in d]
        clip(scopes, d, lead)
        bounded = [not torch.equal(t, old) for t, old in zip(d, free, strict=True)]
        looks[lead["iteration"]] = sum(bounded) / len(bounded)
    return {
        "fit_residual": _fit_residual(scopes),
        **_spectrum(scopes, tol),
        "clipped": sum(looks.values()) / len(looks) if looks else math.nan,
        "skipped": opt.skipped / max(1, lead["iteration"]),
        "cosine": _dot(g, pg) / math.sqrt(_dot(g, g) * _dot(pg, pg)) if _dot(g, pg) else math.nan,
        "step_norm": _step_norm(scopes, options, d),
    }


def _through(
    scopes: list[Scope], options: dict[Tensor, ParamGroup], vector: Callable[[Tensor], Tensor | None]
) -> tuple[list[Tensor], list[Tensor]]:
    """Return a vector and P times it, in each scope; nothing if no parameter has a part in it."""
    known = [[vector(p) for p in scope.params] for scope in scopes]
    if all(t is None for parts in known for t in parts):
        return [], []
    x = [scope.flat(parts) for scope, parts in zip(scopes, known, strict=True)]
    images = [
        scope.group.precondition(scope.point, t) if schedule(options[scope.params[0]]).ever else t.clone()
        for scope, t in zip(scopes, x, strict=True)
    ]
    return x, images


def _dot(x: list[Tensor], y: list[Tensor]) -> float:
    return sum(float((a.double() * b.double()).sum()) for a, b in zip(x, y, strict=True))


def _step_norm(scopes: list[Scope], options: dict[Tensor, ParamGroup], d: list[Tensor]) -> float:
    """‖lr·d‖, without decoupled weight decay."""
    if not d:
        return math.nan
    total = 0.0
    for scope, x in zip(scopes, d, strict=True):
        for p, t in zip(scope.params, scope.split(x), strict=True):
            total += (float(options[p]["lr"]) * float(t.double().norm())) ** 2
    return math.sqrt(total)


def _fit_residual(scopes: list[Scope]) -> float:
    found = []
    for scope in scopes:
        if scope.pair:
            group, n = unpadded(scope.group, scope.n)
            v, h = (lift(torch.cat((t, t.new_zeros(n - scope.n)))) for t in scope.pair)
            found.append(float(fit_residual(group, lifted(scope.point), v, h)))
        else:
            scope.pair = ()
    return sum(found) / len(found) if found else math.nan


def _spectrum(scopes: list[Scope], tol: float) -> Report:
    log_det, smallest, largest = 0.0, math.inf, 0.0
    for scope in scopes:
        (group, n), q = unpadded(scope.group, scope.n), lifted(scope.point)
        low, high = tails(group, q, n, tol=tol)
        log_det += float(group.logabsdet(q, n))
        smallest, largest = min(smallest, float(low)), max(largest, float(high))
    if not scopes:
        log_det = smallest = largest = math.nan
    return {
        "log_det_q": log_det,
        "log_det_p": 2 * log_det,
        "smallest_p": smallest,
        "largest_p": largest,
        "condition_p": largest / smallest,
    }
