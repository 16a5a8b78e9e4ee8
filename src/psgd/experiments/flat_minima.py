"""Flat minima: where PSGD, Adam and ASAM end from the same start, on LeNet5 and MNIST.

The paper's figure has pairs of runs from the same start, in 20 epochs: the arrows from Adam, or ASAM, to PSGD point to
a lower cross entropy, a lower −log det P and a lower test error. It has no table. By the authors' code its axis is
−log det Q = −½ log det P ≈ ½ log det |H|; we report log det of P and of Q.

PSGD is LRA of rank 10 with the authors' settings (rates of 0.1 for parameters and preconditioner, both annealed to a
hundredth; p = 1; steps clipped at norm 10), Adam starts from 0.001 and falls to a tenth, as in their code. For ASAM
nothing is given: ρ = 0.5, momentum 0.9, and a rate tuned on validation images.

The authors fit a preconditioner along the whole of Adam's way, at three times the cost. We fit one where each run ends,
in the same way for everyone: from P = I, 1,000 steps on batches of 64 training images, μ₂ from 0.1 to 0.001, parameters
held. That fit of tens of thousands of eigenvalues is not complete, so it is for comparisons: directions of hardly any
curvature would let log det P rise for longer. The cross entropy is the sum over all training images.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import nn
from torch.nn import functional as F

import psgd
from psgd.experiments import classification
from psgd.experiments.classification import Examples, Rate, evaluate, score, task
from psgd.experiments.experiment import Preset, Record, Result, State
from psgd.experiments.methods import Loss, Preconditioned, Stepper, method, preconditioned
from psgd.experiments.models import LeNet5
from psgd.experiments.show import Line, Plot, Points, Table, spread
from psgd.experiments.training import batches, restore, snapshot
from psgd.experiments.tune import tuned
from psgd.probes import generator, mix

__all__ = ["TITLE", "Config", "cells", "lrs", "plots", "remarks", "run", "score", "seeds", "tables", "tuning"]

TITLE = "Flat minima"

PSGD = "psgd-lra"
OTHERS = ("adam", "asam")
MEASURES = {"cross_entropy": "cross entropy", "half_log_det_h": "−log det Q", "test_error": "test error, %"}
"""All of them better when lower."""


@dataclass(frozen=True)
class Config:
    """One way to train LeNet5, and how to measure where it ends."""

    method: str = PSGD
    lr: float = 0.1
    epochs: int = 20
    batch: int = 64
    fits: int = field(default=1000, metadata={"least": 0})
    """Steps that fit the preconditioner at the end."""
    examples: int = 0
    """How many training images to use, from the first; 0 for all."""
    validation: int = 0
    """How many of the last training images to hold out, instead of the test images."""
    source: str = "mnist"


def cells(preset: Preset) -> list[Config]:
    """Return one for each method."""
    rates = {PSGD: 0.1, "adam": 0.001, "asam": tuned("flat-minima", "asam") or lrs("asam")[0]}
    if preset == "quick":
        return [Config(m, lr, epochs=1, fits=5, examples=256, source="digits") for m, lr in rates.items()]
    return [Config(m, lr, epochs={"cpu": 10, "paper": 20}[preset]) for m, lr in rates.items()]


def seeds(preset: Preset) -> range:
    """Return the authors' ten, or fewer."""
    return range({"quick": 1, "cpu": 3, "paper": 10}[preset])


def lrs(method: str) -> tuple[float, float]:
    """Return where to look for the rate of ASAM, the only one that the authors do not give."""
    if method != "asam":
        raise ValueError(f"a rate is tuned for asam, since the others have the authors', got {method!r}")
    return (0.003, 0.3)


def tuning(method: str) -> Config:
    """Return a shorter run, on validation images."""
    return Config(method, epochs=4, fits=0, validation=10_000)


def run(config: Config, seed: int, state: State | None = None) -> Iterator[Record]:
    """Train, with a record after each epoch; then measure how flat it is, for a last record."""
    images = task(config.source, validation=config.validation, examples=config.examples)
    model = LeNet5(generator(seed)).to(images.train.inputs.device)
    stepper, rates = start(config, model, seed)
    steps = images.train.count // config.batch * config.epochs
    fitter, fits = still(model, seed), 0
    if state is not None and "fits" in state:
        restore(state, model, fitter)
        fits = state["fits"]
    else:
        yield from classification.train(
            model, stepper, images, seed, epochs=config.epochs, batch=config.batch, rates=rates, state=state
        )
    if not config.fits or not all(p.isfinite().all() for p in model.parameters()):
        return
    for done in fit(fitter, model, images.train, config, seed, fits):
        yield Record(steps + done, {}, functools.partial(snapshot, model, fitter, fits=done))
    loss, _ = evaluate(model, images.train)
    log_det = fitter.optimizer.diagnostics()["log_det_q"]
    values = {"cross_entropy": loss * images.train.count, "log_det_q": log_det, "log_det_p": 2 * log_det}
    yield Record(steps + config.fits, {**values, "half_log_det_h": -log_det})


def start(config: Config, model: nn.Module, seed: int) -> tuple[Stepper, dict[str, Rate]]:
    """Return the optimizer, and the rates to anneal."""
    if config.method != PSGD:
        return method(config.method).build(model, config.lr, seed), {"lr": FALLING[config.method](config.lr)}
    build = preconditioned(psgd.lra(10), momentum=0.0, max_norm=10.0, **FITTING)
    return build(model, config.lr, seed), {"lr": Rate(config.lr, 0.01), "precond_lr": Rate(0.2, 0.01)}


FALLING = {"adam": lambda lr: Rate(lr, 0.1), "asam": lambda lr: Rate(lr, 0.01)}

FITTING: dict[str, Any] = {
    "precond_lr": 0.2,  # 2μ₂, since two factors share it
    "precond_prob": 1.0,
    "max_rms": None,
    "curvature": psgd.hessian,
    "rule": psgd.Normalized(),
    "init_scale": 1.0,
}
"""The authors' settings of the preconditioner."""


def still(model: nn.Module, seed: int) -> Preconditioned:
    """Return an optimizer that does not move the model, to fit a preconditioner where it stands."""
    options = {"lr": 0.0, "momentum": 0.0, "seed": mix(seed, -1), **FITTING}
    return Preconditioned(psgd.PSGD(model.parameters(), psgd.lra(10), **options))


def fit(
    fitter: Preconditioned, model: nn.Module, examples: Examples, config: Config, seed: int, done: int = 0
) -> Iterator[int]:
    """Fit it, and yield after each step how many there were, with those that were done before."""
    epochs = (batches(examples.count, config.batch, mix(seed, -1), e) for e in itertools.count())
    order = itertools.chain.from_iterable(epochs)
    for i, chosen in enumerate(itertools.islice(order, done, config.fits), done):
        fitter.optimizer.param_groups[0]["precond_lr"] = Rate(0.2, 0.01).at(i, config.fits)
        these = examples[chosen]
        fitter.step(Loss(model, these.inputs, these.targets, F.cross_entropy))
        yield i + 1


# --- what came out


def ends(results: Sequence[Result]) -> dict[str, dict[int, dict[str, float]]]:
    """Return what was measured at the end of each run, by method and seed; the test error is the best over epochs."""
    found: dict[str, dict[int, dict[str, float]]] = {}
    for r in results:
        if r.series("half_log_det_h") and r.series("test_error"):
            values = {"cross_entropy": r.last("cross_entropy"), "half_log_det_h": r.last("half_log_det_h")}
            values |= {"test_error": min(r.series("test_error")), "last_error": r.last("test_error")}
            found.setdefault(r.config.method, {})[r.seed] = values
    return found


def pairs(results: Sequence[Result], other: str) -> list[tuple[dict[str, float], dict[str, float]]]:
    """Return the ends of another method and of PSGD, from the same starts."""
    found = ends(results)
    ours, theirs = found.get(PSGD, {}), found.get(other, {})
    return [(theirs[seed], ours[seed]) for seed in ours if seed in theirs]


def tables(results: Sequence[Result]) -> list[Table]:
    """Return where each method ends, and how often PSGD is lower."""
    rows = []
    for name, runs in ends(results).items():
        measured = {key: [end[key] for end in runs.values()] for key in (*MEASURES, "last_error")}
        log_det_p = spread([-2 * x for x in measured["half_log_det_h"]])
        rows.append((name, *(spread(measured[key]) for key in measured), log_det_p))
    columns = ("method", *MEASURES.values(), "last test error, %", "log det P")
    means = Table("Where training ends", columns, rows, "The test error is the best over epochs, as in the figure.")
    compared = [(other, found) for other in OTHERS if (found := pairs(results, other))]
    counts = [
        (f"PSGD below {other}", *(f"{sum(p[key] < o[key] for o, p in found)} of {len(found)}" for key in MEASURES))
        for other, found in compared
    ]
    return [means, Table("Pairs from the same start", ("pair", *MEASURES.values()), counts)]


def plots(results: Sequence[Result]) -> list[Plot]:
    """Return the pairs: a line from the other method's end to PSGD's."""
    drawn = []
    for other in OTHERS:
        found = pairs(results, other)
        for y in ("half_log_det_h", "test_error"):
            x = "cross_entropy"
            lines = [Line("same start", [o[x], p[x]], [o[y], p[y]], dashed=True) for o, p in found]
            dots = [
                Points(other, [o[x] for o, _ in found], [o[y] for o, _ in found]),
                Points("PSGD", [p[x] for _, p in found], [p[y] for _, p in found]),
            ]
            if found:
                title = f"From {other} to PSGD: {MEASURES[y]}"
                drawn.append(Plot(title, "cross entropy, over all training images", MEASURES[y], [*lines, *dots]))
    return drawn


def remarks(results: Sequence[Result]) -> str:
    """Say where the arrows point, and where not as in the paper, by how much."""
    said = []
    for other in OTHERS:
        found = pairs(results, other)
        if found:
            shares = {key: sum(p[key] < o[key] for o, p in found) for key in MEASURES}
            counts = ", ".join(f"{MEASURES[key]} on {count}" for key, count in shares.items())
            against = [contrary(other, key, found) for key, count in shares.items() if 2 * count <= len(found)]
            said.append(
                f"- Of {len(found)} pairs with {other}, PSGD is lower in {counts}. "
                f"{'Not in all as in the paper: ' if against else 'As in the paper'}{'; '.join(against)}."
            )
    return "\n".join(said)


def contrary(other: str, key: str, found: Sequence[tuple[dict[str, float], dict[str, float]]]) -> str:
    """Say by how much PSGD is not lower, and what may be behind it."""
    theirs, ours = (sum(end[key] for end in ends) / len(found) for ends in zip(*found, strict=True))
    said = f"in the mean {MEASURES[key]} is {ours:.5g} for PSGD and {theirs:.5g} for {other}"
    if key == "half_log_det_h" and abs(ours - theirs) < AS_FLAT * abs(theirs):
        said += f", so that {other} finds minima as flat, which is what it is made for"
    return said


AS_FLAT = 0.02
"""Values of log det that differ by a smaller fraction are those of minima as flat."""
