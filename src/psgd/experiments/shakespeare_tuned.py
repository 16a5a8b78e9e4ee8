"""Tiny Shakespeare with one budget of tuning for everyone: four numbers of each method, found in 18 trials.

The GPT, the text and the schedule are those of `shakespeare`, where rates alone are tuned, and where ours had more runs
than others. Here AdamW, Muon, SOAP, HeavyBall's PSGDKron and `psgd-kron` have 18 trials each of 200 iterations on
held-out training text: six of the rate alone, all else as the package has it (those of `shakespeare`; for `psgd-kron`
there were two such searches, of six each, with updates in every tenth iteration and by `Decaying()`: held-out losses
2.437 and 2.420), and then as many as make 18 of all four numbers, the first of them where the six ended:

- lr, up to three times less and more;
- memory: the gradients are averaged over so many iterations, β₁ = 1 − 1/memory (not those of Muon's AdamW);
- decay: the decoupled weight decay;
- second: in how many iterations what is known of second order follows: β₂ = 1 − 1/second of AdamW and SOAP,
  precond_lr = 1/second of the two PSGDs. Muon has none; there 1/second is the rate of the AdamW that moves embeddings
  and gains, over Muon's.

`psgd-kron` is `psgd.kron()` that whitens the momentum, with updates by `Decaying()`, as kron-torch published it. The
aim is that of `shakespeare`: AdamW's last loss in half of its iterations, and in less time than any other method.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

import psgd
from psgd.experiments import shakespeare
from psgd.experiments.experiment import Preset
from psgd.experiments.methods import Plain, Preconditioned, Stepper, muon
from psgd.experiments.shakespeare import plots, remarks, run, score, seeds, tables
from psgd.experiments.steppers import Noisy, imported
from psgd.experiments.tune import found

__all__ = [
    "TITLE",
    "Config",
    "cells",
    "plots",
    "ranges",
    "remarks",
    "run",
    "score",
    "seeds",
    "start",
    "tables",
    "tuning",
]

TITLE = "Tiny Shakespeare, all tuned alike"


@dataclass(frozen=True)
class Config(shakespeare.Config):
    """One way to train a GPT, with four numbers of its own."""

    memory: float = 10.0
    """Iterations that gradients are averaged over."""
    decay: float = 0.01
    """Of weights."""
    second: float = 10.0
    """Iterations in which what is known of second order follows."""

    def stepper(self, model: nn.Module, seed: int) -> Stepper:
        """Return the method at work on a model."""
        return BUILDS[self.method](model, self, seed)

    @property
    def betas(self) -> tuple[float, float]:
        """β₁ and β₂."""
        return 1 - 1 / self.memory, 1 - 1 / self.second


def adamw(model: nn.Module, config: Config, seed: int) -> Stepper:
    """Return AdamW."""
    options: dict[str, Any] = {"lr": config.lr, "betas": config.betas, "weight_decay": config.decay}
    return Plain(torch.optim.AdamW(model.parameters(), **options), seed)


def muons(model: nn.Module, config: Config, seed: int) -> Stepper:
    """Return Muon, and its AdamW for embeddings and gains."""
    stepper = muon(model, config.lr, seed, rest_lr=1 / config.second)
    for options in stepper.optimizer.param_groups:
        options["weight_decay"] = config.decay
        if "momentum" in options:
            options["momentum"] = config.betas[0]
    return stepper


def soap(model: nn.Module, config: Config, seed: int) -> Stepper:
    """Return SOAP."""
    package = imported("pytorch_optimizer", "pytorch-optimizer")
    options: dict[str, Any] = {"lr": config.lr, "betas": config.betas, "weight_decay": config.decay}
    return Plain(package.SOAP(model.parameters(), **options), seed)


def heavyball_kron(model: nn.Module, config: Config, seed: int) -> Stepper:
    """Return HeavyBall's PSGDKron."""
    package = imported("heavyball", "heavyball")
    package.utils.compile_mode = None
    options = {"beta": config.betas[0], "weight_decay": config.decay, "precond_lr": 1 / config.second}
    return Noisy(package.PSGDKron(model.parameters(), lr=config.lr, **options), seed)


def psgd_kron(model: nn.Module, config: Config, seed: int) -> Stepper:
    """Return ours."""
    optimizer = psgd.PSGD(
        model.named_parameters(),
        psgd.kron(),
        lr=config.lr,
        momentum=config.betas[0],
        weight_decay=config.decay,
        precond_lr=1 / config.second,
        precond_prob=psgd.Decaying(),
        curvature=psgd.whiten_momentum,
        seed=seed,
    )
    return Preconditioned(optimizer)


BUILDS: dict[str, Callable[[nn.Module, Config, int], Stepper]] = {
    "adamw": adamw,
    "muon": muons,
    "soap": soap,
    "heavyball-kron": heavyball_kron,
    "psgd-kron": psgd_kron,
}

STARTS: dict[str, dict[str, float]] = {
    "adamw": {"lr": 0.006086, "memory": 10, "decay": 0.01, "second": 1000},
    "muon": {"lr": 0.04057, "memory": 20, "decay": 0.001, "second": 10},
    "soap": {"lr": 0.02386, "memory": 20, "decay": 0.01, "second": 20},
    "heavyball-kron": {"lr": 0.005558, "memory": 10, "decay": 0.001, "second": 10},
    "psgd-kron": {"lr": 0.002029, "memory": 10, "decay": 0.001, "second": 10},
}
"""The packages' defaults at the best rate of six. (Ranges are logarithmic: what has no decay starts at the least.)"""

ALONE: dict[str, tuple[float, ...]] = {
    "adamw": (2.467,),
    "muon": (2.087,),
    "soap": (2.118,),
    "heavyball-kron": (2.455,),
    "psgd-kron": (2.437, 2.420),
}
"""The best held-out loss of each search of the rate alone, of six trials each."""

SECONDS = {
    "adamw": (10.0, 1000.0),
    "muon": (3.0, 100.0),
    "soap": (5.0, 200.0),
    "heavyball-kron": (1.1, 20.0),
    "psgd-kron": (1.1, 20.0),
}
"""Where to look for the last number."""


def cells(preset: Preset) -> list[Config]:
    """Return one for each method."""
    sizes = {
        "quick": shakespeare.TINY,
        "cpu": shakespeare.Config(iterations=800, pieces=160),
        "paper": shakespeare.Config(),
    }
    base = dataclasses.asdict(sizes[preset])
    return [Config(**base | {"method": m} | found("shakespeare-tuned", m, STARTS[m])) for m in BUILDS]


def start(method: str) -> dict[str, float]:
    """Return the numbers of the first trial."""
    return STARTS[method]


def ranges(method: str) -> dict[str, tuple[float, float]]:
    """Return where to look for each number."""
    lr = STARTS[method]["lr"]
    return {"lr": (lr / 3, lr * 3), "memory": (5.0, 40.0), "decay": (1e-3, 0.3), "second": SECONDS[method]}


def tuning(method: str) -> Config:
    """Return a shorter run, on the training text alone."""
    return Config(**dataclasses.asdict(shakespeare.tuning(method)))
