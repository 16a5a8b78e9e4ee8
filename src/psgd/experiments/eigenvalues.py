"""The eigenvalues of the preconditioner P ≈ |H|⁻¹ while LeNet5 learns MNIST.

The paper, in words: from P = I the largest eigenvalue rises and saturates; the smallest rises at first, drops now and
then, and rises in the last stage, where the Hessian vanishes. The settings are those of `mnist`.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence

from psgd.experiments import classification, mnist
from psgd.experiments.classification import task
from psgd.experiments.experiment import Preset, Record, Result, State
from psgd.experiments.methods import Preconditioned
from psgd.experiments.mnist import PRECONDITIONERS, Config
from psgd.experiments.show import Line, Plot, Table, band

TITLE = "Eigenvalues of the preconditioner"

KEYS = ("largest", "mean", "smallest")
"""The extremes, and the geometric mean."""

LOOKS = 20
"""In each epoch."""


def cells(preset: Preset) -> list[Config]:
    """Return one for each group."""
    if preset == "quick":
        return [Config(m, epochs=2, examples=640, source="digits") for m in ("psgd-xmat", "psgd-lra")]
    return [Config(m, rank=10) for m in PRECONDITIONERS]


def seeds(preset: Preset) -> range:
    """Return one seed: the picture is of single runs."""
    return range({"quick": 1, "cpu": 1, "paper": 3}[preset])


def run(config: Config, seed: int, state: State | None = None) -> Iterator[Record]:
    """Train as in `mnist`, and look at P twenty times in each epoch."""
    images = task(config.source, validation=config.validation, examples=config.examples)
    model, stepper, rates = mnist.start(config, seed)
    assert isinstance(stepper, Preconditioned)
    count = sum(p.numel() for p in model.parameters())
    every = max(1, images.train.count // config.batch // LOOKS)

    def look() -> dict[str, float]:
        found = stepper.optimizer.diagnostics()
        mean = math.exp(found["log_det_p"] / count)
        return {"largest": found["largest_p"], "mean": mean, "smallest": found["smallest_p"]}

    yield from classification.train(
        model.to(images.train.inputs.device),
        stepper,
        images,
        seed,
        epochs=config.epochs,
        batch=config.batch,
        rates=rates,
        state=state,
        look=look,
        every=every,
    )


def tables(results: Sequence[Result]) -> list[Table]:
    """Return the eigenvalues after the first look, in the middle and at the end."""
    rows = []
    for r in results:
        for key in KEYS:
            found = r.series(key)
            if found:
                rows.append((r.config.method, r.seed, key, found[0], found[len(found) // 2], max(found), found[-1]))
    columns = ("method", "seed", "eigenvalue of P", "first look", "half-way", "highest", "end")
    return [Table("Eigenvalues of P", columns, rows, "From P = I; the mean is geometric, (det P)^(1/n).")]


def plots(results: Sequence[Result]) -> list[Plot]:
    """Return a picture for each method."""
    found: dict[str, list[Result]] = {}
    for r in results:
        if r.series("largest"):
            found.setdefault(r.config.method, []).append(r)
    return [
        Plot(f"Eigenvalues of P: {method}", "step", "eigenvalue", [line(runs, key) for key in KEYS], y_log=True)
        for method, runs in found.items()
    ]


def line(results: Sequence[Result], key: str) -> Line:
    """Return the history of an eigenvalue."""
    return band(key, [([v["step"] for v in r.records if key in v], r.series(key)) for r in results], log=True)


STILL = 0.1
"""What changes by less than this fraction stands still."""


def remarks(results: Sequence[Result]) -> str:
    """Say which of the paper's claims on the extremes hold."""
    return "\n".join(f"- {remark(r)}" for r in results if len(r.series("largest")) >= 4)


def remark(result: Result) -> str:
    """Say it of one run."""
    largest, smallest, losses = (result.series(key) for key in ("largest", "smallest", "train_loss"))
    third, tenth = len(largest) * 2 // 3, max(1, len(largest) // 10)
    rise, last = largest[-1] / largest[third], smallest[-1] / smallest[third]
    low, high = min(smallest[:tenth]), max(largest)
    drops = sum(b < (1 - STILL) * a for a, b in itertools.pairwise(smallest))
    fall = losses[len(losses) * 2 // 3] / losses[-1] if losses else math.nan
    claims = {
        f"the largest rises (from {largest[0]:.3g} to {largest[-1]:.3g})": largest[-1] > largest[0],
        f"the largest saturates (here it is {rise:.2f} times that at two thirds of the run, {high:.3g} at its highest, "
        f"while the training loss falls by another factor of {fall:.2f})": rise < 1 + STILL,
        f"the smallest rises at first (here from 1 to {low:.3g} at its lowest, in the first tenth)": low > 1 - STILL,
        f"the smallest drops now and then (by a tenth or more between two looks {drops} times)": drops > 0,
        f"the smallest rises in the last stage (to {smallest[-1]:.3g}, {last:.2f} times that at two thirds)": last
        > 1 + STILL,
    }
    said = []
    for wanted, name in ((True, "hold"), (False, "do not hold")):
        found = [claim for claim, holds in claims.items() if holds is wanted]
        said += [f"{name}: {'; '.join(found)}"] if found else []
    return (
        f"`{result.config.method}`, seed {result.seed}. Of the paper's claims on eigenvalues {'. These '.join(said)}."
    )
