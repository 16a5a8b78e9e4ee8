"""Rosenbrock's valley, R(u, v) = (1 − u)² + 100ε(v − u²)², with ε = 1 or ε ~ U(low, high) anew at every step.

The paper's table has the best loss of 32 optimizers: PSGD 0.0, RAdam 1.95e-6, L-BFGS 4.92e-6 ("4.92-6"), …, SGDW 3.45.
Names and order of the baselines are those of torch-optimizer's example, whose protocol we take for theirs: from
(−2, 2), 500 steps, gradients clipped to norm 1, and of the settings only the learning rate tuned, in 200 trials of
100 steps.

Where we differ, it is in favour of the baselines, and the same for all of them. Rates are tuned for what the table
reports, the best loss of 500 steps (there: the distance from (1, 1) after 100), over one wide range, with equal trials.
A2Grad has no rate; we tune its Lipschitz constant. What relies on differences of gradients or on Hessian products
of the function itself (L-BFGS, Hessian-free, PSGD) is not clipped: a clipped gradient is not one of any function.
PSGD is not tuned: its setting is that of the class's docstring, with default options for the rest. All is float64.

The paper does not say what noise it has; U(0, 1) and U(0, 3) are those of the CurveBall paper, which it follows.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import psgd
from psgd.experiments.experiment import Preset, Record, Result, State
from psgd.experiments.methods import Build, Stepper, method, plain, preconditioned
from psgd.experiments.show import Contours, Line, Plot, Table, band
from psgd.experiments.steppers import Repeated
from psgd.experiments.training import evaluations, restore, snapshot
from psgd.experiments.tune import tuned
from psgd.probes import uniform

TITLE = "Rosenbrock"

PAPER = {
    "adam": 7.7e-4, "sgd": 1.59, "adabound": 1.45e-4, "adahessian": 1.1e-3, "adamod": 2.06, "adamp": 6.74e-4,
    "diffgrad": 2.8e-3, "lamb": 2.06, "madgrad": 1.04e-4, "novograd": 6.38e-5, "radam": 1.95e-6, "yogi": 1.3e-3,
    "accsgd": 0.55, "sgdw": 3.45, "sgdp": 3.45, "pid": 1.59, "qhm": 0.78, "qhadam": 9.11e-4, "ranger": 1.35,
    "rangerqh": 0.67, "rangerva": 7.80e-5, "shampoo": 0.074, "lookahead-yogi": 0.025, "aggmo": 7.13e-4,
    "swats": 5.48e-4, "adafactor": 7.48e-3, "a2grad-uni": 6.77e-3, "a2grad-inc": 5.53e-3, "a2grad-exp": 7.15e-3,
    "adabelief": 1.6e-3, "lbfgs": 4.92e-6, "psgd": 0.0,
}  # fmt: skip
"""The paper's best losses, in its order."""

OTHERS = ("momentum", "adan", "apollo", "hessian-free", "lbfgs-wolfe")
"""Not in the paper's table."""

NOISES = ((0.0, 1.0), (0.0, 3.0), (0.5, 1.5))
NOISY = ("psgd", "sgd", "adam", "adahessian", "lbfgs", "hessian-free")
"""Which methods meet the noise."""

UNCLIPPED = ("psgd", "lbfgs", "lbfgs-wolfe", "hessian-free")
SMALL = 1e-30
"""What counts as the minimum."""
BLOCK = 50
"""Steps in a record."""

LBFGS = {"max_iter": 1, "max_eval": 100, "history_size": 10, "tolerance_grad": 0.0, "tolerance_change": 0.0}
"""A step is one iteration, with as many evaluations as its line search wants, and there is always another."""

BUILDERS: dict[str, Build] = {
    "psgd": preconditioned(
        psgd.Dense(), precond_lr=0.5, momentum=0.0, precond_prob=1.0, rule=psgd.Normalized(), curvature=psgd.hessian
    ),
    "lbfgs": plain(torch.optim.LBFGS, Repeated, **LBFGS),
    "lbfgs-wolfe": plain(torch.optim.LBFGS, Repeated, **LBFGS, line_search_fn="strong_wolfe"),
}


@dataclass(frozen=True)
class Config:
    """Where it starts, what noise it meets, and for how long."""

    method: str = "psgd"
    lr: float = 1.0
    start_u: float = -2.0
    start_v: float = 2.0
    noise_low: float = 1.0
    noise_high: float = 1.0
    steps: int = 500

    @property
    def noisy(self) -> bool:
        """Return whether there is noise."""
        return self.noise_low < self.noise_high

    @property
    def every(self) -> int:
        """Return how many steps lie between those that are kept: runs with noise are many and long."""
        return 10 if self.noisy else 1


# --- what is run


def cells(preset: Preset) -> list[Config]:
    """Return the table's, PSGD from another start, and the noisy ones."""
    if preset == "quick":
        names = ("psgd", "adam", "lbfgs-wolfe")
        return [Config(name, rate(name), steps=300) for name in names] + [Config(noise_low=0.5, noise_high=1.5)]
    table = [Config(name, rate(name)) for name in (*PAPER, *OTHERS)]
    noisy = [Config(m, rate(m), noise_low=a, noise_high=b, steps=2000) for a, b in NOISES for m in NOISY]
    return [*table, Config(start_u=-1.0, start_v=1.0), *noisy]


def seeds(preset: Preset) -> range:
    """Return twenty: of PSGD's probes, of AdaHessian's, and of the noise."""
    return range(2 if preset == "quick" else 20)


def seeds_for(config: Config, preset: Preset) -> range:
    """Return one seed where nothing depends on it."""
    return seeds(preset) if config.noisy or config.method in ("psgd", "adahessian") else range(1)


def rate(name: str) -> float:
    """Return the learning rate of a method."""
    if name == "psgd":
        return 1.0
    return tuned("rosenbrock", name) or math.sqrt(math.prod(lrs(name)))


def lrs(name: str) -> tuple[float, float]:
    """Return where to look for it: for all alike."""
    return (1e-5, 1e2)


def tuning(name: str) -> Config:
    """Return the config that is tuned: the table's."""
    if name == "psgd":
        raise ValueError("the learning rate of PSGD is 1 and not tuned")
    return Config(name)


def score(result: Result) -> float:
    """Return the best loss."""
    return best(result)


class Point(nn.Module):
    """A point on the plane."""

    def __init__(self, u: float, v: float) -> None:
        super().__init__()
        self.x = nn.Parameter(torch.tensor([u, v], dtype=torch.float64))


def rosenbrock(u: Any, v: Any, noise: float = 1.0) -> Any:
    """Return the height of the valley.

    >>> rosenbrock(1.0, 1.0), rosenbrock(-2.0, 2.0)
    (0.0, 409.0)
    """
    return (1 - u) ** 2 + 100 * noise * (v - u**2) ** 2


def clip(gradient: Tensor) -> Tensor:
    """Return a gradient of norm at most 1."""
    return gradient / gradient.detach().norm().clamp_min(1.0)


def build(config: Config, seed: int) -> tuple[Point, Stepper]:
    """Return where it starts, and what moves it."""
    point = Point(config.start_u, config.start_v)
    if config.method not in UNCLIPPED:
        point.x.register_hook(clip)
    make = BUILDERS[config.method] if config.method in BUILDERS else method(config.method).build
    return point, make(point, config.lr, seed)


def run(config: Config, seed: int, state: State | None = None) -> Iterator[Record]:
    """Descend; a record has the points and true losses after its steps, or after every tenth."""
    point, stepper = build(config, seed)
    step = 0
    if state is not None:
        restore(state, point, stepper)
        step = state["step"]
    while step < config.steps:
        path: list[tuple[float, float, float]] = []
        lost = False
        for _ in range(min(BLOCK, config.steps - step)):
            stepper.step(loss(config, seed, step, point))
            u, v = point.x.tolist()
            step += 1
            lost = not max(abs(u), abs(v)) < 1e50
            if lost:
                break
            if step % config.every == 0:
                path.append((u, v, rosenbrock(u, v)))
        us, vs, losses = ([float(f"{row[i]:.6g}") for row in path] for i in range(3))  # as much as a picture shows
        values = {"u": us, "v": vs, "losses": losses, **evaluations(stepper)}
        yield Record(step, values, lambda at=step: snapshot(point, stepper, step=at))  # type: ignore[misc]
        if lost:
            break


def loss(config: Config, seed: int, step: int, point: Point) -> Callable[[], Tensor]:
    """Return the loss that a step sees: with its own noise, which stays if the step evaluates more than once."""
    low, high = config.noise_low, config.noise_high
    noise = low + (high - low) * uniform(seed, step)
    return lambda: rosenbrock(point.x[0], point.x[1], noise)


# --- what came out


def losses(result: Result) -> list[float]:
    """Return the loss after every step that was kept."""
    return [x for block in result.series("losses") for x in block]


def best(result: Result) -> float:
    """Return the least of them."""
    return min(losses(result), default=math.inf)


def final(result: Result) -> float:
    """Return the last one, infinite if it was lost before the end."""
    found = losses(result)
    return found[-1] if len(found) == result.config.steps // result.config.every else math.inf


def until(result: Result, small: float) -> int | None:
    """Return how many steps it took to get below something, None if it never did."""
    return next(((i + 1) * result.config.every for i, x in enumerate(losses(result)) if x < small), None)


def median(values: Sequence[float]) -> float | None:
    """Return the median, if it is a number."""
    found = statistics.median(values)
    return found if math.isfinite(found) else None


def chosen(results: Sequence[Result], **fields: Any) -> dict[str, list[Result]]:
    """Return the results whose configs have these fields, by method, in the table's order."""
    order = [*PAPER, *OTHERS]
    found: dict[str, list[Result]] = {}
    for r in sorted(results, key=lambda r: (order.index(r.config.method), r.seed)):
        if r.records and all(getattr(r.config, key) == value for key, value in fields.items()):
            found.setdefault(r.config.method, []).append(r)
    return found


def tables(results: Sequence[Result]) -> list[Table]:
    """Return the table of optimizers, PSGD's starts, and the noisy runs."""
    return [t for t in (optimizers(results), starts(results), noises(results)) if t.rows]


def optimizers(results: Sequence[Result]) -> Table:
    """Return ours beside the paper's: the best loss of 500 steps."""
    rows = []
    for name, found in chosen(results, noisy=False, start_u=-2.0).items():
        bests = [best(r) for r in found]
        rows.append(
            (
                name,
                "psgd" if name == "psgd" else method(name).source,
                found[0].config.lr,
                PAPER.get(name),
                median(bests),
                max(bests) if math.isfinite(max(bests)) else None,
                median([final(r) for r in found]),
                f"{sum(b < SMALL for b in bests)} of {len(found)}",
                median([r.last("gradients") for r in found]),
                median([r.last("products") for r in found]),
            )
        )
    columns = (
        "method", "package", "rate", "paper's best loss", "best loss", "worst seed", "last loss", f"below {SMALL:g}",
        "gradients", "Hessian products",
    )  # fmt: skip
    note = "Medians over seeds. Without noise only PSGD and AdaHessian depend on the seed."
    return Table("Best loss in 500 steps from (−2, 2)", columns, rows, note)


def starts(results: Sequence[Result]) -> Table:
    """Return how soon PSGD arrives."""
    rows = []
    for start in sorted({(r.config.start_u, r.config.start_v) for r in results}):
        for found in chosen(results, method="psgd", noisy=False, start_u=start[0]).values():
            steps = {small: [until(r, small) for r in found] for small in (1e-10, SMALL)}
            arrived = {small: [s for s in all if s is not None] for small, all in steps.items()}
            rows.append(
                (
                    f"({start[0]:g}, {start[1]:g})",
                    *(f"{len(a)} of {len(found)}" for a in arrived.values()),
                    *(f"{statistics.median(a):g} ({min(a)} to {max(a)})" if a else None for a in arrived.values()),
                )
            )
    columns = ("start", "below 1e-10", f"below {SMALL:g}", "steps to 1e-10", f"steps to {SMALL:g}")
    return Table("PSGD from two starts", columns, rows, "Steps: the median over seeds, and the range.")


def noises(results: Sequence[Result]) -> Table:
    """Return how many seeds converge under noise."""
    rows = []
    for low, high in sorted({(r.config.noise_low, r.config.noise_high) for r in results if r.config.noisy}):
        for name, found in chosen(results, noise_low=low, noise_high=high).items():
            ends = [final(r) for r in found]
            rows.append(
                (
                    f"U({low:g}, {high:g})",
                    name,
                    f"{sum(e < 1e-10 for e in ends)} of {len(found)}",
                    f"{sum(e < SMALL for e in ends)} of {len(found)}",
                    median([best(r) for r in found]),
                    median(ends),
                    max(ends) if math.isfinite(max(ends)) else "diverged",
                )
            )
    columns = ("noise ε", "method", "ends below 1e-10", f"ends below {SMALL:g}", "best loss", "last loss", "worst seed")
    note = "Losses without the noise; medians over seeds. Rates are those tuned without noise."
    return Table("With noise, from (−2, 2)", columns, rows, note)


SHOWN = ("psgd", "lbfgs-wolfe", "lbfgs", "hessian-free", "radam", "adam", "adahessian", "sgd")
"""What pictures have: all would hide each other."""


def plots(results: Sequence[Result]) -> list[Plot]:
    """Return trajectories over the valley, and the losses."""
    clean = {n: f for n, f in chosen(results, noisy=False, start_u=-2.0).items() if n in SHOWN}
    if not clean:
        return []
    found = [trajectories(clean), curves("Loss from (−2, 2)", clean)]
    for low, high in sorted({(r.config.noise_low, r.config.noise_high) for r in results if r.config.noisy}):
        noisy = chosen(results, noise_low=low, noise_high=high)
        found.append(curves(f"Loss from (−2, 2), with noise ε ~ U({low:g}, {high:g})", noisy))
    return found


def trajectories(found: dict[str, list[Result]]) -> Plot:
    """Return the first seed's paths over the contours."""
    us = [-2.5 + 4.5 * i / 90 for i in range(91)]
    vs = [-1.5 + 5.5 * i / 90 for i in range(91)]
    heights = [[rosenbrock(u, v) for u in us] for v in vs]
    marks: list[Any] = [Contours(us, vs, heights, [10 ** (k / 2) for k in range(-2, 7)])]
    for name, results in found.items():
        first = results[0]
        path = [(first.config.start_u, first.config.start_v)]
        for xs, ys in zip(first.series("u"), first.series("v"), strict=True):
            path += [(x, y) for x, y in zip(xs, ys, strict=True) if us[0] <= x <= us[-1] and vs[0] <= y <= vs[-1]]
        marks.append(Line(name, [x for x, _ in path], [y for _, y in path]))
    return Plot("Paths down the valley", "u", "v", marks, note="One seed; what leaves the picture is left out.")


def curves(title: str, found: dict[str, list[Result]]) -> Plot:
    """Return the losses over steps, with their range over seeds."""
    floor = 1e-34  # zero has no place on a logarithmic axis
    marks = []
    for name, results in found.items():
        runs = []
        for r in results:
            heights = losses(r)
            shown = range(0, len(heights), max(1, r.config.steps // r.config.every // 250))
            runs.append(([float(i + 1) * r.config.every for i in shown], [max(heights[i], floor) for i in shown]))
        marks.append(band(name, runs, log=True))
    return Plot(title, "step", "loss", marks, y_log=True, note="Losses below 1e-34, among them 0, are drawn there.")


def remarks(results: Sequence[Result]) -> str:
    """Compare with the paper."""
    clean = chosen(results, noisy=False, start_u=-2.0)
    said = []
    if "psgd" in clean:
        bests = [best(r) for r in clean["psgd"]]
        said.append(
            f"PSGD gets below {SMALL:g} on {sum(b < SMALL for b in bests)} of {len(bests)} seeds "
            f"(the paper: 0.0), in {span([until(r, SMALL) for r in clean['psgd']])} steps."
        )
    middle = {n: statistics.median(best(r) for r in f) for n, f in clean.items() if n != "psgd"}
    also = [n for n, b in middle.items() if b < SMALL]
    if middle:
        said.append(
            f"Of the others, {' and '.join(also) if also else 'none'} get{'s' if len(also) == 1 else ''} there too"
            f"{', which the paper does not say' if also else ''}."
        )
    both = {n: b for n, b in middle.items() if n in PAPER}
    if both:
        better = [n for n, b in both.items() if b < PAPER[n]]
        nearest = min((n for n in middle if n not in also), key=lambda n: middle[n], default=None)
        said.append(
            f"Tuned for what is reported, {len(better)} of {len(both)} baselines do better here than in the paper, "
            "whose rates were probably tuned for the distance after 100 steps."
        )
        if nearest is not None:
            said.append(f"The best of the rest is {nearest} with {middle[nearest]:.2g}.")
    for low, high in sorted({(r.config.noise_low, r.config.noise_high) for r in results if r.config.noisy}):
        noisy = chosen(results, noise_low=low, noise_high=high)
        count = {n: f"{sum(final(r) < 1e-10 for r in f)} of {len(f)}" for n, f in noisy.items()}
        if "psgd" in count:
            rest = ", ".join(f"{n} {c}" for n, c in count.items() if n != "psgd")
            rest = f" ({rest})" if rest else ""
            said.append(f"With ε ~ U({low:g}, {high:g}) PSGD converges on {count['psgd']} seeds{rest}.")
    return " ".join(said)


def span(steps: Sequence[int | None]) -> str:
    """Return a range in words.

    >>> span([3, 5, None])
    '3 to 5'
    """
    known = [s for s in steps if s is not None]
    return f"{min(known)} to {max(known)}" if known else "no number of"
