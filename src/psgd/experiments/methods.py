"""The optimizers under comparison, one registry: ours, torch's, and those of packages.

All are used alike: `stepper.step(loss)` evaluates the loss, moves the parameters, and returns the loss as it was before
the move. What it took (gradients, Hessian products) is counted. Packages are imported when a method is built.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn
from torch.optim import SGD, Optimizer

import psgd
from psgd.experiments.steppers import (
    KFAC,
    Curved,
    HessianFree,
    Loss,
    Perturbed,
    Plain,
    Preconditioned,
    Repeated,
    Stepper,
    imported,
)

__all__ = [
    "METHODS",
    "Build",
    "Loss",
    "Method",
    "Plain",
    "Preconditioned",
    "Stepper",
    "method",
    "plain",
    "preconditioned",
    "register",
]


class Build(Protocol):
    """What makes a stepper."""

    def __call__(self, model: nn.Module, lr: float, seed: int = 0) -> Stepper:
        """Return it, for a model at a learning rate; what is random in it is a function of the seed."""


@dataclass(frozen=True)
class Method:
    """A way to train: how to build it for a model at a learning rate, and where to look for a good one."""

    name: str
    build: Build
    lr: tuple[float, float]
    """The range that tuning searches, log-uniformly."""
    source: str = "torch"
    """The package that it comes from."""


METHODS: dict[str, Method] = {}


def register(name: str, build: Build, lr: tuple[float, float], source: str) -> None:
    """Add a method to the registry."""
    METHODS[name] = Method(name, build, lr, source)


def method(name: str) -> Method:
    """Return a method by name.

    >>> method("adam").source
    'torch'
    """
    if name not in METHODS:
        raise ValueError(f"a method is one of {', '.join(METHODS)}, got {name!r}")
    return METHODS[name]


def plain(kind: Callable[..., Optimizer], wrap: Callable[..., Stepper] = Plain, **options: Any) -> Build:
    """Return a builder of an optimizer, used as `wrap` does."""
    return lambda model, lr, seed=0: wrap(kind(model.parameters(), lr=lr, **options), seed)


def preconditioned(group: Any, **options: Any) -> Build:
    """Return a builder of PSGD with a group."""
    return lambda model, lr, seed=0: Preconditioned(psgd.PSGD(model.parameters(), group, lr=lr, seed=seed, **options))


def packaged(module: str, package: str, kind: str, wrap: Callable[..., Stepper] = Plain, **options: Any) -> Build:
    """Return a builder of an optimizer of a package."""
    return lambda model, lr, seed=0: plain(getattr(imported(module, package), kind), wrap, **options)(model, lr, seed)


# --- torch

register("sgd", plain(SGD), (1e-4, 1.0), "torch")
register("momentum", plain(SGD, momentum=0.9), (1e-4, 1.0), "torch")
register("adam", plain(torch.optim.Adam), (1e-5, 1e-1), "torch")
register("adamw", plain(torch.optim.AdamW), (1e-5, 1e-1), "torch")
register("lbfgs", plain(torch.optim.LBFGS, Repeated), (1e-3, 1.0), "torch")
register("lbfgs-wolfe", plain(torch.optim.LBFGS, Repeated, line_search_fn="strong_wolfe"), (1e-3, 1.0), "torch")

# --- pytorch_optimizer


def modern(name: str, kind: str, lr: tuple[float, float], wrap: Callable[..., Stepper] = Plain, **options: Any) -> None:
    """Add an optimizer of pytorch_optimizer."""
    register(name, packaged("pytorch_optimizer", "pytorch-optimizer", kind, wrap, **options), lr, "pytorch_optimizer")


modern("adahessian", "AdaHessian", (1e-3, 1.0), Curved)
modern("adabelief", "AdaBelief", (1e-5, 1e-1))
modern("adan", "Adan", (1e-5, 1e-1))
modern("apollo", "ApolloDQN", (1e-4, 1.0))
modern("shampoo", "Shampoo", (1e-4, 1.0))
modern("sam", "SAM", (1e-4, 1.0), Perturbed, base_optimizer=SGD, momentum=0.9, rho=0.05)
modern("asam", "SAM", (1e-4, 1.0), Perturbed, base_optimizer=SGD, momentum=0.9, rho=0.5, adaptive=True)

# --- others


def kfac(model: nn.Module, lr: float, seed: int = 0) -> Stepper:
    """Return K-FAC; damping and average are those of the paper's authors."""
    imported("curvlinops", "curvlinops-for-pytorch")
    return KFAC(model, SGD(model.parameters(), lr=lr), seed, damping=1e-3, average=0.95, every=1)


register("kfac", kfac, (1e-4, 1e-1), "curvlinops")
register("hessian-free", plain(SGD, HessianFree), (1e-2, 1e1), "scipy")

# --- ours, with default settings; experiments that pin the paper's build their own

register("psgd-diagonal", preconditioned(psgd.Diagonal()), (1e-3, 1.0), "psgd")
register("psgd-xmat", preconditioned(psgd.XMat()), (1e-3, 1.0), "psgd")
register("psgd-lra", preconditioned(psgd.lra(10)), (1e-3, 1.0), "psgd")
register("psgd-affine", preconditioned(psgd.affine), (1e-3, 1.0), "psgd")
register("psgd-dense", preconditioned(psgd.Dense()), (1e-3, 1.0), "psgd")
register("psgd-triangular", preconditioned(psgd.Triangular()), (1e-3, 1.0), "psgd")
