"""Fitting a diagonal preconditioner: PSGD against closed forms, in float32 and bfloat16.

Two experiments of the paper in one. (1) H = diag(λ), with λ uniform, exponential or lognormal: is a fit by
multiplication, P = QᵀQ, better in few digits than P = E[h²]^(−½) from a running average? (2) H dense, 100×100,
eigenvalues U(0, 1): the closed form p = √(E[v²]/E[h²]), a single relative step of p, and one of the sign only.
The paper has curves and no numbers. It says of (1) that PSGD has a significantly lower loss than the closed form for
all three, in float32 and in bfloat16, with a minimal gap between these two; and of (2) that the closed form is best,
and the single step slightly better than the sign. Sizes, rates and lengths are not given: ours are those of the
authors' scripts where there is one (μ = 0.1 → 0.01, averages of weight min(t/(t+1), 0.999)).

The error is the mean over coordinates of p m + 1/p − 2√m, m = E[h²]: 0 at the best p = 1/√m, and positive elsewhere.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from psgd import Diagonal, Normalized
from psgd.experiments.experiment import Preset, Record, Result, State
from psgd.experiments.fitting import ends, points
from psgd.experiments.show import Plot, Table, band
from psgd.experiments.training import copied
from psgd.probes import generator

TITLE = "Fitting a diagonal"

METHODS = ("psgd", "sign", "closed form", "closed form with v")
PROBLEMS = ("uniform", "exponential", "lognormal", "dense")
PRECISIONS = ("float32", "bfloat16")


@dataclass(frozen=True)
class Config:
    """Who fits what, and in how many digits."""

    method: str = "psgd"
    problem: str = "uniform"
    precision: str = "float32"
    n: int = 10_000
    steps: int = 10_000
    first_lr: float = 0.1
    last_lr: float = 0.01


def cells(preset: Preset) -> list[Config]:
    """Return all of them; the dense Hessian has the paper's size."""
    size = {"quick": (64, 200), "cpu": (10_000, 5_000), "paper": (100_000, 10_000)}[preset]
    return [
        Config(m, problem, precision, min(size[0], 100) if problem == "dense" else size[0], size[1])
        for problem in PROBLEMS
        for precision in PRECISIONS
        for m in METHODS
    ]


def seeds(preset: Preset) -> range:
    """Return a few."""
    return range({"quick": 1, "cpu": 3, "paper": 10}[preset])


# --- the problem


def hessian(config: Config, seed: int) -> Tensor:
    """Return λ of a diagonal Hessian, or a dense one."""
    g = generator(seed, 0)
    if config.problem == "dense":
        u = torch.linalg.qr(torch.randn(config.n, config.n, generator=g, dtype=torch.float64)).Q
        return u * torch.rand(config.n, generator=g, dtype=torch.float64) @ u.mT
    draw = {
        "uniform": lambda: torch.rand(config.n, generator=g, dtype=torch.float64),
        "exponential": lambda: -torch.rand(config.n, generator=g, dtype=torch.float64).clamp_min(1e-12).log(),
        "lognormal": lambda: torch.randn(config.n, generator=g, dtype=torch.float64).exp(),
    }
    if config.problem not in draw:
        raise ValueError(f"a problem is one of {', '.join(PROBLEMS)}, got {config.problem!r}")
    return draw[config.problem]()


def moment(h: Tensor) -> Tensor:
    """E[h²] for v ~ N(0, I): what a diagonal can know of a Hessian."""
    return h.square() if h.ndim == 1 else h.square().sum(0)


def error(p: Tensor, m: Tensor) -> float | None:
    """Return how far p is from 1/√m, None if it is lost."""
    p = p.double()
    found = float((p * m + 1 / p - 2 * m.sqrt()).mean())
    return max(found, 0.0) if math.isfinite(found) else None


# --- the fits: each has a state, made of tensors in the precision under test, and an estimate p


def start(config: Config, v: Tensor, h: Tensor) -> State:
    """Return the state after the first pair, in its precision; what moves by steps starts at a common scale."""
    scale = (v.double().square().sum() / h.double().square().sum()).sqrt()
    if config.method == "psgd":
        return Diagonal().init(config.n, scale=scale.sqrt().item(), dtype=v.dtype)
    if config.method == "sign":
        return {"p": torch.full_like(v, scale.item())}
    if config.method not in METHODS:
        raise ValueError(f"a method is one of {', '.join(METHODS)}, got {config.method!r}")
    return {"hh": torch.full_like(h, 2.0**-23), "vv": torch.full_like(v, 2.0**-23)}


def move(config: Config, s: State, v: Tensor, h: Tensor, lr: float, weight: float) -> State:
    """Return the state after another pair."""
    if config.method == "psgd":
        return Diagonal().fit(s, v, h, lr=lr, rule=Normalized())
    if config.method == "sign":
        p = s["p"]
        return {"p": p - lr * (h * h * p - v * v / p).sign() * p}
    return {"hh": weight * s["hh"] + (1 - weight) * h * h, "vv": weight * s["vv"] + (1 - weight) * v * v}


def estimate(config: Config, s: State) -> Tensor:
    """Return p."""
    if config.method == "psgd":
        return s["d"].square()
    if config.method == "sign":
        return s["p"]
    return (s["vv"] / s["hh"]).sqrt() if config.method == "closed form with v" else s["hh"].rsqrt()


def run(config: Config, seed: int, state: State | None = None) -> Iterator[Record]:
    """Fit to one pair after the other."""
    matrix = hessian(config, seed)
    m, dtype = moment(matrix), getattr(torch, config.precision)
    rounded = matrix.float()
    step, s = (0, None) if state is None else (state["step"], state["s"])
    every = max(1, config.steps // 50)
    while step < config.steps:
        v = torch.randn(config.n, generator=generator(seed, step + 1))
        h = (rounded * v if matrix.ndim == 1 else rounded @ v).to(dtype)
        v = v.to(dtype)
        s = start(config, v, h) if s is None else s
        lr = config.first_lr * (config.last_lr / config.first_lr) ** (step / config.steps)
        s = move(config, s, v, h, lr, min(step / (step + 1), 0.999))
        step += 1
        if step % every == 0 or step == config.steps:
            now = {"step": step, "s": s}
            yield Record(step, {"error": error(estimate(config, s), m)}, lambda now=now: copied(now))  # type: ignore[misc]


# --- what came out


def grouped(results: Sequence[Result]) -> dict[tuple[str, str], dict[str, list[Result]]]:
    """Return the results by problem and precision, and by method, in the order of the lists above."""
    found: dict[tuple[str, str], dict[str, list[Result]]] = {}
    for problem in PROBLEMS:
        for precision in PRECISIONS:
            for m in METHODS:
                key = (problem, precision, m)
                some = [r for r in results if (r.config.problem, r.config.precision, r.config.method) == key]
                if some:
                    found.setdefault((problem, precision), {})[m] = sorted(some, key=lambda r: r.seed)
    return found


def tables(results: Sequence[Result]) -> list[Table]:
    """Return the errors at the end."""
    rows = [
        (f"{problem}, {precision}", *(ends(found[m]) if m in found else None for m in METHODS))
        for (problem, precision), found in grouped(results).items()
    ]
    if not rows:
        return []
    note = "closed form: E[h²]^(−½); with v: √(E[v²]/E[h²]), exact for a diagonal H. A dash: not a number."
    return [Table("Error at the end: mean of p m + 1/p − 2√m", ("Hessian", *METHODS), rows, note)]


def plots(results: Sequence[Result]) -> list[Plot]:
    """Return the errors over steps."""
    return [
        Plot(
            f"Fitting a diagonal: {problem}, {precision}",
            "step",
            "error",
            [band(m, [points(r) for r in some], log=True) for m, some in found.items()],
            x_log=True,
            y_log=True,
        )
        for (problem, precision), found in grouped(results).items()
    ]


def remarks(results: Sequence[Result]) -> str:
    """Compare with what the paper says."""
    last = {key: {m: s for m, some in found.items() if (s := ends(some))} for key, found in grouped(results).items()}
    said = []
    pairs = {
        key: (found["psgd"].mean, found["closed form"].mean)
        for key, found in last.items()
        if key[0] != "dense" and {"psgd", "closed form"} <= found.keys()
    }
    if pairs:
        better = sum(mine < closed for mine, closed in pairs.values())
        numbers = "; ".join(f"{a}, {b}: {mine:.2g} and {other:.2g}" for (a, b), (mine, other) in pairs.items())
        said.append(
            f"PSGD ends with a smaller error than the closed form E[h²]^(−½) in {better} of {len(pairs)} cases, "
            f"in the paper in all: {numbers}."
        )
        said.append(
            "Much of that is the sampling noise of v, which the closed form keeps and a fit to pairs does not: "
            "√(E[v²]/E[h²]) has none of it on a diagonal Hessian."
        )
    dense = last.get(("dense", "float32"), {})
    three = [m for m in ("closed form with v", "psgd", "sign") if m in dense]
    if len(three) == 3:
        order = sorted(three, key=lambda m: dense[m].mean)
        ranking = ", ".join(f"{m} ({dense[m].mean:.2g})" for m in order)
        paper = "as in the paper" if order == three else f"in the paper: {', '.join(three)}"
        said.append(f"On the dense Hessian, from best to worst: {ranking}, {paper}.")
    return " ".join(said)
