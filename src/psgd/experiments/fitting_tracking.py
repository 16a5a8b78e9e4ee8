"""Fitting P to H⁻¹ from pairs (v, Hv): PSGD against BFGS and a closed form, when H stands still, is noisy, or drifts.

Not in the paper, but in its authors' repository: H is tridiagonal, 1 on the diagonal and ½ beside it (of condition
number 1053 at n = 50), and the error is ‖PH − I‖. Noise: h = Hv + 0.01 w, w ~ N(0, I). Drift: H ← H + uuᵀ at every
step; ours ends at about H + I, u ~ N(0, I/steps).

Without noise PSGD steps by μ/L (`Smoothed`), which needs no annealing, with μ = 0.9 (the script: 1); with noise by
μ/‖E‖ (`Normalized`), with μ from 0.5 to 0.001. The closed form is E[hhᵀ]^(−½), averaged with weights
min(t/(t+1), 0.999). BFGS is scipy's. LRA and Kron cannot hold the H⁻¹ of this H: what they show is what a restricted
group makes of it. All is float64.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from psgd import Dense, Group, Normalized, Smoothed, Triangular, affine, lra
from psgd.experiments.experiment import Preset, Record, Result, State
from psgd.experiments.fitting import ends, points
from psgd.experiments.show import Line, Plot, Table, band
from psgd.experiments.steppers import imported
from psgd.experiments.training import copied
from psgd.probes import generator

TITLE = "Fitting the inverse of a Hessian"

PROBLEMS = ("static", "noisy", "drifting")
METHODS = ("GL", "triangular", "LRA", "Kron", "BFGS", "closed form")
NOISE = 0.01


@dataclass(frozen=True)
class Config:
    """Who fits what."""

    method: str = "GL"
    problem: str = "static"
    n: int = 20
    steps: int = 20_000


def cells(preset: Preset) -> list[Config]:
    """Return every method on every problem."""
    n, steps = {"quick": (8, 200), "cpu": (20, 10_000), "paper": (50, 150_000)}[preset]
    return [Config(m, problem, n, steps) for problem in PROBLEMS for m in METHODS]


def seeds(preset: Preset) -> range:
    """Return a few."""
    return range({"quick": 1, "cpu": 3, "paper": 10}[preset])


# --- the problem


def tridiagonal(n: int) -> Tensor:
    """Return the Hessian.

    >>> tridiagonal(2)
    tensor([[1.0000, 0.5000],
            [0.5000, 1.0000]], dtype=torch.float64)
    """
    beside = torch.full((n - 1,), 0.5, dtype=torch.float64)
    return torch.eye(n, dtype=torch.float64) + beside.diag(1) + beside.diag(-1)


def floor(config: Config) -> float | None:
    """Return the error of the best P where there is noise: (H² + σ²I)^(−½) instead of H⁻¹."""
    if config.problem != "noisy":
        return None
    values = torch.linalg.eigvalsh(tridiagonal(config.n))
    return float((values / (values.square() + NOISE**2).sqrt() - 1).norm())


# --- the fits: each has a state, and an estimate P


def group(config: Config) -> Group | None:
    """Return the group of PSGD; None if the method is another."""
    n = config.n
    rows = max(d for d in range(1, math.isqrt(n) + 1) if n % d == 0)
    groups: dict[str, Group] = {
        "GL": Dense(),
        "triangular": Triangular(),
        "LRA": lra(max(1, n // 5)),
        "Kron": affine((rows, n // rows)),
    }
    if config.method not in METHODS:
        raise ValueError(f"a method is one of {', '.join(METHODS)}, got {config.method!r}")
    return groups.get(config.method)


def start(config: Config, seed: int) -> Any:
    """Return the state before the first pair."""
    mine = group(config)
    if mine is not None:
        return mine.init(config.n, generator=generator(seed, 0), dtype=torch.float64)
    return {"m": torch.zeros(config.n, config.n, dtype=torch.float64)}


def bfgs(p: Tensor, v: Tensor, h: Tensor, first: bool) -> Tensor:
    """Return scipy's update of an inverse Hessian; pairs of negative curvature are left out, as is its custom."""
    strategy = imported("scipy.optimize", "scipy").BFGS(init_scale=1.0 if first else p.numpy())
    strategy.initialize(len(v), "inv_hess")
    strategy.update(v.numpy(), h.numpy())
    return torch.from_numpy(strategy.get_matrix().copy())


def move(config: Config, s: Any, v: Tensor, h: Tensor, step: int, seed: int) -> Any:
    """Return the state after another pair."""
    mine = group(config)
    if mine is not None:
        coin = bool(torch.rand((), generator=generator(seed, step, 1)) < 0.5)
        if config.problem == "noisy":
            return mine.fit(s, v, h, lr=0.5 * 0.002 ** (step / config.steps), coin=coin, rule=Normalized())
        return mine.fit(s, v, h, lr=0.9, coin=coin, rule=Smoothed())
    if config.method == "BFGS":
        return {"m": bfgs(s["m"], v, h, first=step == 0)}
    weight = min(step / (step + 1), 0.999)
    return {"m": weight * s["m"] + (1 - weight) * torch.outer(h, h)}


def estimate(config: Config, s: Any) -> Tensor:
    """Return P."""
    mine = group(config)
    if mine is not None:
        q = mine.matrix(s, config.n)
        return q.mT @ q
    if config.method == "BFGS":
        p: Tensor = s["m"]
        return p
    values, vectors = torch.linalg.eigh(s["m"])
    return vectors * values.clamp_min(2.0**-23).rsqrt() @ vectors.mT


def run(config: Config, seed: int, state: State | None = None) -> Iterator[Record]:
    """Fit to one pair after the other."""
    h0 = tridiagonal(config.n)
    step, s, hessian = (0, start(config, seed), h0) if state is None else (state["step"], state["s"], state["hessian"])
    every, eye = max(1, config.steps // 100), torch.eye(config.n, dtype=torch.float64)
    while step < config.steps:
        draw = torch.randn(3, config.n, generator=generator(seed, step, 2), dtype=torch.float64)
        v, h = draw[0], hessian @ draw[0]
        if config.problem == "noisy":
            h = h + NOISE * draw[1]
        s = move(config, s, v, h, step, seed)
        step += 1
        if config.problem == "drifting":
            hessian = hessian + torch.outer(draw[2], draw[2]) / config.steps
        if step % every == 0 or step == config.steps:
            error = float((estimate(config, s) @ hessian - eye).norm())
            now = {"step": step, "s": s, "hessian": hessian}
            values = {"error": error if math.isfinite(error) else None}
            yield Record(step, values, lambda now=now: copied(now))  # type: ignore[misc]


# --- what came out


def grouped(results: Sequence[Result]) -> dict[str, dict[str, list[Result]]]:
    """Return the results by problem and method, in the order of the lists above."""
    found: dict[str, dict[str, list[Result]]] = {}
    for problem in PROBLEMS:
        for m in METHODS:
            some = [r for r in results if (r.config.problem, r.config.method) == (problem, m) and r.records]
            if some:
                found.setdefault(problem, {})[m] = sorted(some, key=lambda r: r.seed)
    return found


def tables(results: Sequence[Result]) -> list[Table]:
    """Return the errors at the end."""
    found = grouped(results)
    if not found:
        return []
    problems = list(found)
    known = [m for m in METHODS if any(m in some for some in found.values())]
    rows: list[tuple[Any, ...]] = [
        (m, *(ends(found[p][m]) if m in found[p] else None for p in problems)) for m in known
    ]
    config = next(iter(found[problems[0]].values()))[0].config
    lowest = [floor(Config(config.method, p, config.n, config.steps)) for p in problems]
    rows.append(("the best P there is", *(0.0 if x is None else x for x in lowest)))
    start = float((tridiagonal(config.n) - torch.eye(config.n, dtype=torch.float64)).norm())
    note = f"n = {config.n}, {config.steps} steps. P = I has {start:.3g} at the start."
    return [Table("‖PH − I‖ at the end", ("method", *problems), rows, note)]


def plots(results: Sequence[Result]) -> list[Plot]:
    """Return the errors over steps."""
    found = []
    for problem, some in grouped(results).items():
        marks = [band(m, [points(r) for r in runs], log=True) for m, runs in some.items()]
        config = next(iter(some.values()))[0].config
        lowest = floor(config)
        if lowest is not None:
            marks.append(Line("the best P there is", [1.0, float(config.steps)], [lowest, lowest], dashed=True))
        found.append(Plot(f"‖PH − I‖, {problem}", "pairs", "‖PH − I‖", marks, x_log=True, y_log=True))
    return found


def remarks(results: Sequence[Result]) -> str:
    """Compare with what the paper says."""
    found = {p: {m: ends(runs) for m, runs in some.items()} for p, some in grouped(results).items()}
    said = []
    for problem, some in found.items():
        known = {m: s.mean for m, s in some.items() if s is not None}
        if {"BFGS", "GL"} <= some.keys() and "GL" in known:
            theirs = f"{known['BFGS']:.2g}" if "BFGS" in known else "not a number"
            closed = f", the closed form {known['closed form']:.2g}" if "closed form" in known else ""
            said.append(f"{problem}: BFGS {theirs}, PSGD on GL {known['GL']:.2g}{closed}")
    if not said:
        return ""
    return f"‖PH − I‖ at the end: {'; '.join(said)}. The paper has no numbers for this."
