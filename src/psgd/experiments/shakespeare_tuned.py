"""Tiny Shakespeare with one budget of tuning for everyone: four numbers of each method, found in 18 short trials.

The GPT, the text and the schedule are those of `shakespeare`, where rates alone are tuned. Here everyone has 18 trials
of 200 iterations on held-out training text: six of the rate alone, all else as the package has it (those of
`shakespeare`), and then twelve of all four numbers, the first of them where the six ended. What is best in a short run
may not be in a long one: trials of 800 iterations follow, at the rate that was found, at half of it, and at twice
unless half was better. The numbers are:

- lr, up to three times less and more;
- memory: the gradients are averaged over so many iterations, β₁ = 1 − 1/memory (not those of Muon's AdamW);
- decay: the decoupled weight decay;
- second: in how many iterations what is known of second order follows: β₂ = 1 − 1/second of AdamW and SOAP,
  precond_lr = 1/second of all PSGDs. Muon has none; there 1/second is the rate of the AdamW that moves embeddings
  and gains, over Muon's.

`psgd-kron` is `psgd.kron()` with the options of `psgd.like_adamw`; `psgd-kron-newton` takes exact Hessian products, on
half as many iterations (`-half`: at half of its rate); `psgd-lra` and `psgd-xmat` whiten the gradient, with PSGD's
defaults. At the numbers of `psgd-kron`, `psgd-kron-quadratic` moves Q instead of P, as the trials did,
`psgd-kron-bfloat16` also multiplies matrices in bfloat16, `psgd-kron-short` has a matrix along the shorter axis alone
(128 of 512×128), `psgd-kron-every` updates its factors in every iteration, `psgd-kron-adaptive` pauses while the fit is
good, and `psgd-kron-fewer` begins to pause after 40 iterations instead of 100 (`-fewer-bfloat16`: in bfloat16).
`muon-bfloat16` is `muon`, at its numbers, that multiplies in bfloat16 as its package does (`muon` itself does so only
on a GPU). Everyone else is in float32.

The aim is that of `shakespeare`: AdamW's last loss in half of its iterations, and in less time than any other method.
What multiplies in float32 is held against others that do, and then against all; what rounds to bfloat16 against all.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
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
    "further",
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


Builder = Callable[[nn.Module, Config, int], Stepper]


def adamw(model: nn.Module, config: Config, seed: int) -> Stepper:
    """Return AdamW."""
    options: dict[str, Any] = {"lr": config.lr, "betas": config.betas, "weight_decay": config.decay}
    return Plain(torch.optim.AdamW(model.parameters(), **options), seed)


def muons(model: nn.Module, config: Config, seed: int, *, rounded: bool = False) -> Stepper:
    """Return Muon, and its AdamW for embeddings and gains."""
    stepper = muon(model, config.lr, seed, rest_lr=1 / config.second, rounded=rounded)
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


def ours(rule: Callable[[], Any], **options: Any) -> Builder:
    """Return a builder of PSGD."""

    def build(model: nn.Module, config: Config, seed: int) -> Stepper:
        numbers: dict[str, Any] = {"momentum": config.betas[0], "weight_decay": config.decay}
        numbers |= {"lr": config.lr, "precond_lr": 1 / config.second}
        return Preconditioned(psgd.PSGD(model.named_parameters(), rule(), seed=seed, **options, **numbers))

    return build


def kron(rule: Callable[[], Any] = psgd.kron, **options: Any) -> Builder:
    """Return a builder of PSGD with the options of `like_adamw`, but for the four numbers."""
    tuned = ("lr", "momentum", "weight_decay", "precond_lr")
    usual = {key: value for key, value in psgd.like_adamw().items() if key not in tuned}
    return ours(rule, **usual | options)


@dataclass(frozen=True)
class Variant:
    """Another way to build a method, at its numbers, or at a part of its rate."""

    of: str
    build: Builder
    rate: float = 1.0


NEWTON = kron(curvature=psgd.hessian, precond_prob=psgd.Decaying(start=50, floor=0.05))

FEWER = psgd.Decaying(start=40, floor=0.05)

QUADRATIC = functools.partial(psgd.kron, psgd.Quadratic())

COARSE = functools.partial(QUADRATIC, products=torch.bfloat16)

VARIANTS = {
    "psgd-kron-bfloat16": Variant("psgd-kron", kron(COARSE)),
    "psgd-kron-short": Variant("psgd-kron", kron(lambda: psgd.kron(max_skew=1.0))),
    "psgd-kron-every": Variant("psgd-kron", kron(precond_prob=1.0)),
    "psgd-kron-adaptive": Variant("psgd-kron", kron(precond_prob=psgd.Adaptive())),
    "psgd-kron-newton-half": Variant("psgd-kron-newton", NEWTON, rate=0.5),
    # last, so that the cells of earlier records keep their numbers
    "muon-bfloat16": Variant("muon", functools.partial(muons, rounded=True)),
    "psgd-kron-fewer": Variant("psgd-kron", kron(precond_prob=FEWER)),
    "psgd-kron-fewer-bfloat16": Variant("psgd-kron", kron(COARSE, precond_prob=FEWER)),
    "psgd-kron-quadratic": Variant("psgd-kron", kron(QUADRATIC)),
}

BUILDS: dict[str, Builder] = {
    "adamw": adamw,
    "muon": muons,
    "soap": soap,
    "heavyball-kron": heavyball_kron,
    "psgd-kron": kron(),
    "psgd-kron-newton": NEWTON,
    "psgd-lra": ours(lambda: psgd.lra(10), curvature=psgd.whiten),
    "psgd-xmat": ours(psgd.XMat, curvature=psgd.whiten),
    **{name: variant.build for name, variant in VARIANTS.items()},
}

DEFAULTS: dict[str, dict[str, float]] = {
    "adamw": {"memory": 10, "decay": 0.01, "second": 1000},
    "muon": {"memory": 20, "decay": 0.001, "second": 10},
    "soap": {"memory": 20, "decay": 0.01, "second": 20},
    "heavyball-kron": {"memory": 10, "decay": 0.001, "second": 10},
    "psgd-kron": {"memory": 10, "decay": 0.001, "second": 1 / 0.9},
    "psgd-kron-newton": {"memory": 10, "decay": 0.001, "second": 1 / 0.9},
    "psgd-lra": {"memory": 10, "decay": 0.001, "second": 10},
    "psgd-xmat": {"memory": 10, "decay": 0.001, "second": 10},
}
"""Of the packages, and of `shakespeare`. (Ranges are logarithmic: what has no decay starts at the least.)"""

SECONDS = {"adamw": (10.0, 1000.0), "muon": (3.0, 100.0), "soap": (5.0, 200.0)}
"""Where to look for the last number of methods that are not PSGD."""

LONG: dict[str, Any] = {"iterations": 800, "pieces": 160}
"""Of runs on a CPU."""


def cells(preset: Preset) -> list[Config]:
    """Return one for each method."""
    sizes = {
        "quick": shakespeare.TINY,
        "cpu": shakespeare.Config(**LONG),
        "paper": shakespeare.Config(),
    }
    base = dataclasses.asdict(sizes[preset])
    return [Config(**base | {"method": m} | numbers(m)) for m in BUILDS]


def numbers(method: str) -> dict[str, float]:
    """Return the four numbers that were found, or where the search starts."""
    if method in VARIANTS:
        known = numbers(VARIANTS[method].of)
        return known | {"lr": known["lr"] * VARIANTS[method].rate}
    return found("shakespeare-tuned", method, start(method))


def start(method: str) -> dict[str, float]:
    """Return the numbers of the first trial: the defaults, at the rate that was found with them."""
    if method not in DEFAULTS:
        raise ValueError(f"numbers are found for one of {', '.join(DEFAULTS)}, got {method!r}, which has another's")
    return {"lr": shakespeare.learning_rate(method), **DEFAULTS[method]}


def ranges(method: str) -> dict[str, tuple[float, float]]:
    """Return where to look for each number."""
    lr, second = start(method)["lr"], SECONDS.get(method, (1.1, 20.0))
    return {"lr": (lr / 3, lr * 3), "memory": (5.0, 40.0), "decay": (1e-3, 0.3), "second": second}


def tuning(method: str) -> Config:
    """Return a shorter run, on the training text alone."""
    return Config(**dataclasses.asdict(shakespeare.tuning(method)))


def further(method: str, fields: dict[str, float], scores: Sequence[float]) -> Config | None:
    """Return the next run as long as those on a CPU, on the training text alone.

    It is at the rate that was found, then at half of it, and then at twice, unless half was better.
    """
    if len(scores) == 3 or (len(scores) == 2 and scores[1] < scores[0]):
        return None
    config = Config(method, **LONG | fields, held=tuning(method).held)
    return dataclasses.replace(config, lr=config.lr * (1, 1 / 2, 2)[len(scores)])
