"""LeNet5 on the 5,000 images of MNIST that come with a package: a small but real comparison, without a download.

Not of the paper. 4,000 images to learn from and 1,000 to be judged by; 20 epochs of batches of 64, the rate annealed to
a hundredth. `momentum` is SGD with a momentum of 0.9. PSGD has the package's defaults, whatever the group: Hessian
products in the first 100 steps and in every tenth after that, momentum 0.9. The products are exact by
`curvature=psgd.hessian`: from biases of zero, blank corners of an image sit on the kinks of ReLUs, where the default,
at its first look, may find that finite differences disagree, and choose those. `psgd-affine` has the paper's Kronecker
factors; `psgd-kron` has those of `psgd.kron()`, with the options of `psgd.like_adamw` but its decay: it whitens
gradients, and takes no Hessian products. All rates are tuned alike, on 800 of the 4,000 images.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import psgd
from psgd.experiments import classification
from psgd.experiments.classification import Rate, score, task
from psgd.experiments.experiment import Preset, Record, Result, State
from psgd.experiments.methods import Build, method, preconditioned
from psgd.experiments.mnist import COSTS, best, by_method, costs, curves, last
from psgd.experiments.models import LeNet5
from psgd.experiments.show import Plot, Table
from psgd.experiments.tune import tuned
from psgd.probes import generator

__all__ = ["TITLE", "Config", "cells", "lrs", "plots", "remarks", "run", "score", "seeds", "tables", "tuning"]

TITLE = "Five thousand digits"

WHITENING = {k: v for k, v in psgd.like_adamw().items() if k not in ("lr", "weight_decay")}

BUILDS: dict[str, Build] = {
    "momentum": method("momentum").build,
    "adam": method("adam").build,
    "psgd-diagonal": preconditioned(psgd.Diagonal(), curvature=psgd.hessian),
    "psgd-xmat": preconditioned(psgd.XMat(), curvature=psgd.hessian),
    "psgd-lra": preconditioned(psgd.lra(10), curvature=psgd.hessian),
    "psgd-affine": preconditioned(psgd.affine, curvature=psgd.hessian),
    "psgd-kron": preconditioned(psgd.kron(), **WHITENING),
}


@dataclass(frozen=True)
class Config:
    """One way to train LeNet5."""

    method: str = "psgd-lra"
    lr: float = 0.1
    epochs: int = 20
    batch: int = 64
    examples: int = 0
    """How many training images to use, from the first; 0 for all."""
    validation: int = 0
    """How many of the last training images to hold out, instead of the test images."""


def cells(preset: Preset) -> list[Config]:
    """Return one for each method."""
    if preset == "quick":
        return [Config(m, learning_rate(m), epochs=2, examples=512) for m in BUILDS]
    return [Config(m, learning_rate(m)) for m in BUILDS]


def seeds(preset: Preset) -> range:
    """Return three, or ten with time to spare."""
    return range({"quick": 1, "cpu": 3, "paper": 10}[preset])


def learning_rate(method: str) -> float:
    """Return a tuned one."""
    return tuned("digits", method) or lrs(method)[0]


def lrs(method: str) -> tuple[float, float]:
    """Return where to look for it: two decades for everyone."""
    others = {"momentum": (0.003, 0.3), "adam": (0.0003, 0.03), "psgd-kron": (0.0001, 0.01)}
    return others.get(method, (0.01, 1.0))


def tuning(method: str) -> Config:
    """Return a run on validation images."""
    return Config(method, validation=800)


def run(config: Config, seed: int, state: State | None = None) -> Iterator[Record]:
    """Train, with a record after each epoch."""
    images = task("digits", validation=config.validation, examples=config.examples)
    model = LeNet5(generator(seed)).to(images.train.inputs.device)
    stepper = BUILDS[config.method](model, config.lr, seed)
    rates = {"lr": Rate(config.lr, 0.01)}
    yield from classification.train(
        model, stepper, images, seed, epochs=config.epochs, batch=config.batch, rates=rates, state=state
    )


def tables(results: Sequence[Result]) -> list[Table]:
    """Return errors and costs."""
    rows = [
        (name, last(found), best(found), found[0].config.lr, *costs(found))
        for name, found in by_method(results).items()
    ]
    columns = ("method", "test error, %", "best over epochs, %", "lr", *COSTS)
    note = "± is over seeds. momentum is SGD with momentum; psgd-affine and psgd-kron have Kronecker factors."
    return [Table("LeNet5 on 4,000 digits, judged by 1,000 others", columns, rows, note)]


def plots(results: Sequence[Result]) -> list[Plot]:
    """Return the test error and the training loss by epoch."""
    return curves(by_method(results), TITLE)


def remarks(results: Sequence[Result]) -> str:
    """Say who won, and by how much more than chance."""
    errors = {name: s for name, found in by_method(results).items() if (s := last(found)) is not None}
    if not errors:
        return ""
    ranked = sorted(errors, key=lambda name: errors[name].mean)
    first, final = errors[ranked[0]], errors[ranked[-1]]
    return (
        f"From best to worst: {', '.join(f'`{name}`' for name in ranked)}; {first.mean:.2f} to {final.mean:.2f} %. "
        f"One image of the 1,000 is 0.1 %, and the seed alone moves an error by about "
        f"{max(s.deviation for s in errors.values()):.2f} %: closer results do not differ."
    )
