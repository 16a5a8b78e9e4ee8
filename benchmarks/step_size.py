"""The tables of docs/step-size.md: `python benchmarks/step_size.py`, or only those that are named.

One thread, float64 unless a table says otherwise, fixed seeds. All of them take about half an hour on one core.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from unittest import mock

import torch
from torch import Tensor

import psgd.algebra
from psgd import (
    Butterfly,
    Dense,
    Diagonal,
    Group,
    Kronecker,
    Normalized,
    Point,
    Residual,
    Smoothed,
    StepSize,
    Triangular,
    XMat,
    affine,
    band,
    dct,
    kaleidoscope,
    lra,
    lra_duv,
    two_grid,
)
from psgd.groups.composite import Composite
from psgd.groups.involution import Involution

RULES: list[StepSize] = [Normalized(), Smoothed()]


def table(*header: str) -> Callable[..., None]:
    """Print the head of a Markdown table, and return a function that prints a row."""
    print("\n| " + " | ".join(header) + " |\n|" + " --- |" * len(header))
    return lambda *row: print("| " + " | ".join(map(str, row)) + " |", flush=True)


def spectrum(n: int, condition: float, negative: int, seed: int) -> tuple[Tensor, Tensor]:
    """(H, |H|^½) with eigenvalues spaced evenly in their logarithm, some of them negative, in a random basis."""
    g = torch.Generator().manual_seed(seed)
    basis = torch.linalg.qr(torch.randn(n, n, generator=g))[0]
    size = torch.logspace(-0.5, 0.5, n, base=condition)
    sign = torch.ones(n)
    sign[torch.randperm(n, generator=g)[:negative]] = -1
    return (basis * (size * sign)) @ basis.mT, (basis * size.sqrt()) @ basis.mT


def error(group: Group, q: Point, root: Tensor) -> float:
    """‖|H|^½ P |H|^½ − I‖, the same in every basis and scale of the parameters."""
    a = group.matrix(q, len(root)) @ root
    return float(torch.linalg.matrix_norm(a.mT @ a - torch.eye(len(root)), 2))


# --- safety: how factors that move together share the rate


def shared(group: Group, q: Point, v: Tensor, h: Tensor, lr: float, coin: bool, rule: StepSize) -> Point:
    """Ours: all factors from one residual, μ over their number for each."""
    return group.fit(q, v, h, lr=lr, coin=coin, rule=rule)


def joint(group: Group, q: Point, v: Tensor, h: Tensor, lr: float, coin: bool, rule: StepSize) -> Point:
    """The paper's Algorithm 3: all factors from one residual, μ for each."""
    with mock.patch.object(Composite, "share", lambda self, lr: lr):
        return group.fit(q, v, h, lr=lr, coin=coin, rule=rule)


def exact_norm(group: Group, q: Point, v: Tensor, h: Tensor, lr: float, coin: bool, rule: StepSize) -> Point:
    """Ours, of one factor: the spectral norm of the X-matrix."""
    return group.fit(q, v, h, lr=lr, coin=coin, rule=rule)


def max_norm(group: Group, q: Point, v: Tensor, h: Tensor, lr: float, coin: bool, rule: StepSize) -> Point:
    """The paper's Algorithm 2: max(max|∇a|, max|∇b|) for the norm of an X-matrix, which may be twice as large."""
    with mock.patch.object(Involution, "norm", lambda self, e: torch.stack((e["a"], e["b"])).abs().amax()):
        return group.fit(q, v, h, lr=lr, coin=coin, rule=rule)


def sequential(group: Group, q: Point, v: Tensor, h: Tensor, lr: float, coin: bool, rule: StepSize) -> Point:
    """One factor after the other, μ for each, every residual from the factors as they are by then."""
    for i, part in enumerate(group.parts):
        if not part.moves:
            continue
        if isinstance(group, Kronecker):
            a, b = group.apply(q, h), group.solve_t(q, v)
            r = Residual(h, v, a, a, b, b).map(lambda t, i=i: group._move(t, i))
        else:
            pairs = group._forward(q, h, v)
            x, w = pairs[0]
            for left, p in list(group.pairs(q))[:i]:
                x, w = left.apply_t(p, x), left.solve(p, w)
            r = Residual(*pairs[i + 1], x, *pairs[i], w)
        q = q | {str(i): part.step(q[str(i)], r, lr, coin, rule)}
    return q


def criteria(
    group: Group,
    h: Tensor,
    noise: float,
    lr: Callable[[int], float],
    rule: StepSize,
    step: Callable,
    steps: int,
    seed: int = 3,
) -> Tensor:
    """E[c(P)] over fresh pairs, in closed form, every ten steps of a run."""
    n, g = len(h), torch.Generator().manual_seed(seed)
    q, costs = group.init(n, generator=g), []
    second_moment = h @ h + noise**2 * torch.eye(n)
    for t in range(steps):
        v, coin = torch.randn(n, generator=g), bool(torch.rand((), generator=g) < 0.5)
        pair = (v, v @ h + noise * torch.randn(n, generator=g))
        q = step(group, q, *pair, lr(t), coin, rule)
        if t % 10 == 9:
            a = group.matrix(q, n)
            inverse, _ = torch.linalg.inv_ex(a)
            cost = (a @ second_moment * a).sum() + inverse.square().sum()
            costs.append(cost if cost.isfinite() else torch.tensor(math.inf))
        if t % 100 == 0:
            q = group.balance(q)
    return torch.stack(costs)


def lowest(group: Group, h: Tensor, noise: float) -> Tensor:
    """The smallest E[c(P)] of an annealed run: the estimate of min c that the tables divide by."""
    return criteria(group, h, noise, lambda t: 0.5 * 0.002 ** (t / 8000), Normalized(), shared, 8000).min()


def safety() -> None:
    n, steps, rates = 20, 2000, (0.5, 0.9, 0.99)
    h, _ = spectrum(n, 100, 6, seed=1)
    groups = {
        "lra(3)": lra(3),
        "lra_duv(3)": lra_duv(3),
        "XMat()": XMat(),
        "Butterfly()": Butterfly(),
        "band(4)": band(4),
        "affine((4, 5))": affine((4, 5)),
        "two_grid(5, 4)": two_grid(5, 4),
        "dct(XMat())": dct(XMat()),
        "kaleidoscope(20)": kaleidoscope(20),
    }
    print(f"\nc(P)/min c over steps {steps // 2} to {steps}: median (maximum). n = {n}, condition 100, 6 negative.")
    row = table("group", "rule", "noise", "step", *(f"μ = {lr}" for lr in rates))
    for name, group in groups.items():
        for noise in (0.0, 0.3):
            best = lowest(group, h, noise)
            for rule in RULES:
                for step in (shared, joint, sequential) if isinstance(group, Composite) else (exact_norm, max_norm):
                    cells = []
                    for lr in rates:
                        late = criteria(group, h, noise, lambda t, lr=lr: lr, rule, step, steps)[steps // 20 :] / best
                        cells.append(f"{late.median():.3g} ({late.max():.2g})")
                    row(name, type(rule).__name__, noise, step.__name__, *cells)

    seeds, conditions = range(5), (1e1, 1e3, 1e5)
    print(f"\nOurs at μ = 0.99 without noise, the same ratio: largest median (maximum) of {len(seeds)} seeds.")
    row = table("group", "rule", *(f"condition {c:.0e}" for c in conditions))
    for name, group in groups.items():
        for rule in RULES:
            cells = []
            for condition in conditions:
                h, _ = spectrum(n, condition, 6, seed=1)
                best = lowest(group, h, 0.0)
                runs = [criteria(group, h, 0.0, lambda t: 0.99, rule, shared, steps, seed) for seed in seeds]
                late = torch.stack(runs)[:, steps // 20 :] / best
                cells.append(f"{late.median(1).values.max():.3g} ({late.max():.2g})")
            row(name, type(rule).__name__, *cells)


# --- condition: which probes


def probe(kind: str, group: Group, q: Point, n: int, batch: int, g: torch.Generator, t: int) -> Tensor:
    """v ~ N(0, I), v ~ N(0, P), or these in turn; a batch is orthonormal, so that Σ vvᵀ is I or P exactly."""
    u = torch.randn(batch, n, generator=g)
    if batch == n:
        u = torch.linalg.qr(u)[0]
    return group.apply_t(q, u) if kind == "P" or (kind == "I, P" and t % 2) else u


def steps_to(
    tolerance: float,
    condition: float,
    kind: str,
    rule: StepSize,
    lr: Callable[[int], float],
    most: int,
    batch: int = 1,
    scale: float = 1.0,
) -> tuple[int | None, float]:
    """(Steps until the error is below the tolerance, or None; the last error), Dense, n = 10, H definite."""
    n, group, g = 10, Dense(), torch.Generator().manual_seed(0)
    h, root = spectrum(n, condition, 0, seed=0)
    q, e = group.init(n, scale=scale), math.inf
    for t in range(most):
        v = probe(kind, group, q, n, batch, g, t)
        q = group.fit(q, v, v @ h, lr=lr(t), rule=rule)
        if t % 20 == 19 or t + 1 == most:
            e = error(group, q, root)
            if e < tolerance:
                return t + 1, e
    return None, e


def annealed(condition: float, kind: str, most: int) -> str:
    """The shortest schedule μ = 0.5 → 0.0002 of `Normalized`, of 100, 200, 400, … steps, that ends below 1e-3."""
    steps = 100
    while steps <= most:
        lr = lambda t, steps=steps: 0.5 * 0.0004 ** (t / steps)  # noqa: E731
        if steps_to(1e-3, condition, kind, Normalized(), lr, steps)[0]:
            return str(steps)
        steps *= 2
    return f"> {steps // 2}"


def condition(most: int = 200_000) -> None:
    print("\nSteps until the error is below 1e-3. Dense, n = 10, H definite. Smoothed at μ = 0.9; Normalized annealed.")
    kinds = {"v ~ N(0, I)": ("I", 1), "10 orthonormal v": ("I", 10), "v ~ N(0, P)": ("P", 1)}
    row = table("condition", *(f"Smoothed, {k}" for k in kinds), "Normalized, v ~ N(0, I)", "Normalized, v ~ N(0, P)")
    for exponent in range(1, 6):
        cells = []
        for kind, batch in kinds.values():
            steps, e = steps_to(1e-3, 10.0**exponent, kind, Smoothed(), lambda t: 0.9, most, batch)
            cells.append(steps or f"> {most} (error {e:.2g})")
        cells += [annealed(10.0**exponent, kind, most // 4) for kind in ("I", "P")]
        row(f"1e{exponent}", *cells)

    print("\nThe same for indefinite H, 3 of 10 negative, condition 10, Smoothed at μ = 0.3: the error after …")
    marks = (100, 300, 1000, 3000)
    row = table("probes", *(f"{m} steps" for m in marks))
    h, root = spectrum(10, 10, 3, seed=0)
    for kind, batch in (("I", 1), ("P", 1), ("I, P", 1), ("I", 10)):
        g, q, cells = torch.Generator().manual_seed(0), Dense().init(10), []
        for t in range(marks[-1]):
            v = probe(kind, Dense(), q, 10, batch, g, t)
            q = Dense().fit(q, v, v @ h, lr=0.3)
            if t + 1 in marks:
                cells.append(f"{error(Dense(), q, root):.2g}")
        row(f"{kind}, {batch} at a time", *cells)


def scale() -> None:
    print("\nSteps until the error is below 1e-3 from Q = scale·I. Dense, n = 10, H definite, condition 1e3, μ = 0.9.")
    scales = (0.01, 0.1, 1.0, 10.0, 100.0)
    row = table("probes", *(f"scale {s}" for s in scales))
    for kind in ("I", "P"):
        steps = (steps_to(1e-3, 1e3, kind, Smoothed(), lambda t: 0.9, 100_000, scale=s)[0] for s in scales)
        row(f"v ~ N(0, {kind})", *steps)


# --- stationary: what a constant rate leaves


def stationary() -> None:
    print("\nMedian error over steps 2000 to 4000 at a constant μ. Dense, n = 10, condition 10, single v ~ N(0, I).")
    rates = (0.4, 0.2, 0.1, 0.05)
    row = table("rule", "H", *(f"μ = {lr}" for lr in rates))
    for rule in RULES:
        for negative in (0, 3):
            h, root = spectrum(10, 10, negative, seed=0)
            cells = []
            for lr in rates:
                g, q, errors = torch.Generator().manual_seed(0), Dense().init(10), []
                for t in range(4000):
                    v = torch.randn(10, generator=g)
                    q = Dense().fit(q, v, v @ h, lr=lr, rule=rule)
                    if t >= 2000 and t % 20 == 0:
                        errors.append(error(Dense(), q, root))
                cells.append(f"{torch.tensor(errors).median():.2g}")
            row(type(rule).__name__, f"{negative} negative", *cells)


# --- bfloat16


def nearest(q: Tensor, size: Tensor, e: Tensor) -> Tensor:
    """q − size·e, rounded to the nearest."""
    return (q.float() - size * e.float()).to(q.dtype)


@contextmanager
def rounding(how: str) -> Iterator[None]:
    """With `how` = "nearest", steps that lose what is below half a unit in the last place."""
    with mock.patch.object(psgd.algebra, "subtract", nearest if how == "nearest" else psgd.algebra.subtract):
        yield


def eigenvalues(kind: str, n: int, g: torch.Generator) -> Tensor:
    if kind == "uniform":
        return torch.rand(n, generator=g, dtype=torch.float32)
    if kind == "exponential":
        return torch.empty(n, dtype=torch.float32).exponential_(generator=g)
    return torch.randn(n, generator=g, dtype=torch.float32).exp()


def fitting_losses(kind: str, n: int, steps: int, dtype: torch.dtype, rule: StepSize) -> tuple[float, float]:
    """|tr(PH² + P⁻¹ − 2|H|)|/tr|H| of the fit and of the closed form E[hhᵀ]^(−½), an average of weight ≤ 0.999."""
    g = torch.Generator().manual_seed(0)
    lam, diagonal = eigenvalues(kind, n, g), n > 1000
    basis = None if diagonal else torch.linalg.qr(torch.randn(n, n, generator=g, dtype=torch.float32))[0]
    h = (lam if basis is None else (basis * lam) @ basis.mT).to(dtype)
    group = Diagonal() if diagonal else Triangular()
    q, moment = None, torch.full((n,), 2.0**-23, dtype=dtype)
    moment = moment if diagonal else torch.diag(moment)
    for t in range(steps):
        v = torch.randn(n, generator=g, dtype=torch.float32).to(dtype)
        hv = h * v if diagonal else v @ h
        if q is None:
            q = group.init(n, scale=float((v.float().square().sum() / hv.float().square().sum()) ** 0.25), dtype=dtype)
        q = group.fit(q, v, hv, lr=0.1 * 0.1 ** (t / steps) if isinstance(rule, Normalized) else 0.5, rule=rule)
        weight = min(t / (t + 1), 0.999)
        moment = weight * moment + (1 - weight) * (hv * hv if diagonal else torch.outer(hv, hv))
    h64 = h.double()
    if diagonal:
        return tuple(
            float((p * h64**2 + 1 / p - 2 * h64).sum().abs() / h64.sum())
            for p in (q["d"].double() ** 2, moment.double() ** -0.5)
        )
    eig = torch.linalg.eigh(moment.double())
    closed = (eig.eigenvectors * eig.eigenvalues.clamp_min(2.0**-23) ** -0.5) @ eig.eigenvectors.mT
    size = torch.linalg.eigvalsh((h64 + h64.mT) / 2).abs().sum()
    fitted = q["Q"].double().mT @ q["Q"].double()
    return tuple(
        float(((p @ h64 @ h64.mT).trace() + torch.linalg.inv(p).trace() - 2 * size).abs() / size)
        for p in (fitted, closed)
    )


def bfloat16() -> None:
    print("\n|tr(PH² + P⁻¹ − 2H)|/tr H at the end. Normalized: μ = 0.1 → 0.01; Smoothed: μ = 0.5.")
    low = torch.bfloat16
    row = table("H", "spectrum", "rule", "float32", "bfloat16", "to the nearest", "closed, float32", "closed, bfloat16")
    for n, steps in ((100_000, 3000), (100, 6000)):
        for kind in ("uniform", "exponential", "lognormal"):
            for rule in RULES:
                full, closed_full = fitting_losses(kind, n, steps, torch.float32, rule)
                half, closed_half = fitting_losses(kind, n, steps, low, rule)
                with rounding("nearest"):
                    lost, _ = fitting_losses(kind, n, steps, low, rule)
                cells = (f"{x:.2g}" for x in (full, half, lost, closed_full, closed_half))
                row("diagonal 1e5" if n > 1000 else "dense 100", kind, type(rule).__name__, *cells)


if __name__ == "__main__":
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    tables = {f.__name__: f for f in (safety, condition, scale, stationary, bfloat16)}
    for name in sys.argv[1:] or tables:
        tables[name]()
