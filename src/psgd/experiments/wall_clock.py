"""What a step costs: time per iteration on LeNet5, over plain SGD's.

The paper: PSGD with an LRA of rank 10 that is updated in every tenth step takes about 1.2 times the time of SGD,
AdaHessian about twice (in theory 1 + 2p for updates with probability p, if a Hessian product takes two gradients).

All methods take turns on one thread, ten steps each, and the fastest turn of each counts: what else the machine does
can only add time. So there is one cell, and no other may run beside it.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional as F

import psgd
from psgd.experiments.experiment import Preset, Record, Result, State
from psgd.experiments.methods import Build, Loss, Stepper, method, preconditioned
from psgd.experiments.models import AffineLeNet5, LeNet5
from psgd.experiments.show import HeatMap, Plot, Table
from psgd.probes import generator

TITLE = "Wall-clock time per step"

TURN = 10
"""Steps of a turn: with p = 0.1, one of them updates the preconditioner."""

PAPER = {"psgd-lra, p = 0.1": 1.2, "adahessian": 2.0}
"""Time per iteration over SGD's."""

AIM = 1.2
"""Of PSGD with p = 0.1."""


def contestants() -> dict[str, tuple[type[LeNet5 | AffineLeNet5], Build]]:
    """Return what is timed: the form of the network, and the optimizer; SGD first."""
    groups: dict[str, Any] = {"lra": psgd.lra(10), "xmat": psgd.XMat(), "affine": psgd.affine}
    found: dict[str, tuple[type[LeNet5 | AffineLeNet5], Build]] = {}
    found |= {name: (LeNet5, method(name).build) for name in ("sgd", "adam", "adahessian")}
    for name, group in groups.items():
        for p in (0.1, 1.0):
            build = preconditioned(
                group,
                momentum=0.0,
                precond_prob=psgd.Regular(p),
                max_rms=None,
                max_norm=10.0,
                curvature=psgd.hessian,
                rule=psgd.Normalized(),
                init_scale=1.0,
            )
            found[f"psgd-{name}, p = {p:g}"] = (AffineLeNet5 if name == "affine" else LeNet5, build)
    return found


@dataclass(frozen=True)
class Config:
    """One comparison."""

    method: str = "all, in turns"
    batch: int = 64
    turns: int = 30


def cells(preset: Preset) -> list[Config]:
    """Return the one comparison."""
    return [Config(turns={"quick": 1, "cpu": 30, "paper": 100}[preset])]


def seeds(preset: Preset) -> range:
    """Return one: more would run at the same time, and disturb each other."""
    return range(1)


def run(config: Config, seed: int, state: State | None = None) -> Iterator[Record]:
    """Yield the seconds per step of each method, turn by turn."""
    inputs = torch.rand(config.batch, 1, 28, 28, generator=generator(seed))
    targets = torch.randint(10, (config.batch,), generator=generator(seed, 1))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        ready = {}
        for name, (kind, build) in contestants().items():
            model = kind(generator(seed, 2))
            ready[name] = (build(model, 1e-4, seed), Loss(model, inputs, targets, F.cross_entropy))
        for stepper, loss in ready.values():
            turn(stepper, loss)  # to warm up
        for i in range(0 if state is None else state["turns"], config.turns):
            seconds = {name: turn(*found) for name, found in ready.items()}
            yield Record(i + 1, seconds, functools.partial(dict, turns=i + 1))
    finally:
        torch.set_num_threads(threads)


def turn(stepper: Stepper, loss: Callable[[], torch.Tensor]) -> float:
    """Return the mean seconds of a turn's steps."""
    start = time.perf_counter()
    for _ in range(TURN):
        stepper.step(loss)
    return (time.perf_counter() - start) / TURN


def fastest(results: Sequence[Result]) -> dict[str, float]:
    """Return the seconds per step of each method's fastest turn."""
    names = [name for name in (results[0].records[0] if results else ()) if name != "step"]
    return {name: min(min(r.series(name)) for r in results) for name in names}


def tables(results: Sequence[Result]) -> list[Table]:
    """Return milliseconds, and ratios."""
    found = fastest(results)
    rows = [(name, 1000 * t, t / found["sgd"], PAPER.get(name)) for name, t in found.items()]
    columns = ("method", "ms per step", "over SGD's", "paper")
    note = f"LeNet5, one thread, the fastest of {len(results[0].records) if results else 0} turns of {TURN} steps."
    return [Table("Time per step", columns, rows, note)]


def plots(results: Sequence[Result]) -> list[Plot]:
    """Return the ratios."""
    found = fastest(results)
    if not found:
        return []
    ratios = [[t / found["sgd"] for t in found.values()]]
    return [Plot("Time per step over SGD's", "", "", [HeatMap(list(found), ["over SGD's"], ratios)])]


def remarks(results: Sequence[Result]) -> str:
    """Compare with the aim."""
    found = fastest(results)
    said = []
    for name, t in found.items():
        if name.endswith("p = 0.1"):
            ratio = t / found["sgd"]
            verdict = "meets" if ratio <= AIM else f"is {ratio / AIM - 1:.0%} above"
            said.append(f"- `{name}`: {ratio:.2f} times SGD's time per step; that {verdict} the aim of {AIM}.")
    if said:
        said.append(
            "- The network is small: its gradient takes a few milliseconds on a CPU, so that what an optimizer does "
            "by itself, which does not grow with the batch, weighs more than in a larger one."
        )
    return "\n".join(said)
