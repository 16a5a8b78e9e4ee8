"""The optimizers under comparison, one registry: ours, torch's, and those of packages.

All are used alike: `stepper.step(loss)` evaluates the loss, moves the parameters, and returns the loss as it was before
the move. What it took (gradients, Hessian products) is counted. Packages are imported when a method is built.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

import psgd
from psgd.experiments.steppers import (
    KFAC,
    Curved,
    Dated,
    HessianFree,
    Loss,
    Noisy,
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
register("radam", plain(torch.optim.RAdam), (1e-4, 1.0), "torch")
register("nadam", plain(torch.optim.NAdam), (1e-5, 1e-1), "torch")
register("adafactor", plain(torch.optim.Adafactor), (1e-4, 1.0), "torch")
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
modern("soap", "SOAP", (1e-4, 1e-1))
modern("lion", "Lion", (1e-6, 1e-2))


def muon(model: nn.Module, lr: float, seed: int = 0, *, rest_lr: float = 3e-4 / 2e-2, rounded: bool = False) -> Stepper:
    """Return Muon for matrices that are no embeddings, and its AdamW for the rest.

    The rate of that is `rest_lr` times Muon's: unless given, the ratio of the package's defaults. `rounded`: in
    bfloat16, as the package does, also on a CPU.
    """
    package = imported("pytorch_optimizer", "pytorch-optimizer")
    embeddings = {m.weight for m in model.modules() if isinstance(m, nn.Embedding)}
    matrices: list[nn.Parameter] = []
    rest: list[nn.Parameter] = []
    for p in model.parameters():
        (matrices if p.ndim >= 2 and p not in embeddings else rest).append(p)
    groups = [
        {"params": matrices, "lr": lr, "use_muon": True},
        {"params": rest, "lr": lr * rest_lr, "use_muon": False},
    ]
    kind = package.Muon if rounded else unrounded(package.Muon)
    return Plain(kind([group for group in groups if group["params"]]), seed)


def unrounded(kind: Any) -> Any:
    """Return Muon that orthogonalizes in the dtype of the gradient on a CPU.

    Few CPUs have arithmetic in bfloat16; on one without, the package's way takes twenty times the time.
    """
    matrix = imported("pytorch_optimizer.optimizer.utils.matrix", "pytorch-optimizer")

    class Unrounded(kind):  # type: ignore[misc]
        @staticmethod
        def _orthogonalize(group: dict[str, Any], updates: list[Tensor]) -> list[Tensor]:
            if any(u.is_cuda for u in updates):
                return kind._orthogonalize(group, updates)
            steps, weights = group["ns_steps"], group["ns_coeffs"]
            return [
                matrix.zero_power_via_newton_schulz_5(u.flatten(1), steps, weights=weights, dtype=u.dtype)
                for u in updates
            ]

    return Unrounded


def lookahead_yogi(model: nn.Module, lr: float, seed: int = 0) -> Stepper:
    """Return Lookahead around Yogi."""
    package = imported("pytorch_optimizer", "pytorch-optimizer")
    return Plain(package.Lookahead(package.Yogi(model.parameters(), lr=lr)), seed)


register("muon", muon, (1e-4, 1.0), "pytorch_optimizer")
register("lookahead-yogi", lookahead_yogi, (1e-4, 1.0), "pytorch_optimizer")

# --- torch_optimizer, for the rest of the paper's Rosenbrock table


def older(name: str, kind: str, lr: tuple[float, float] = (1e-4, 1.0), **options: Any) -> None:
    """Add an optimizer of torch_optimizer."""
    register(name, packaged("torch_optimizer", "torch-optimizer", kind, Dated, **options), lr, "torch_optimizer")


older("adabound", "AdaBound")
older("adamod", "AdaMod")
older("adamp", "AdamP")
older("diffgrad", "DiffGrad")
older("lamb", "Lamb")
older("madgrad", "MADGRAD")
older("novograd", "NovoGrad")
older("yogi", "Yogi")
older("accsgd", "AccSGD")
older("sgdw", "SGDW")
older("sgdp", "SGDP")
older("pid", "PID")
older("qhm", "QHM")
older("qhadam", "QHAdam")
older("ranger", "Ranger")
older("rangerqh", "RangerQH")
older("rangerva", "RangerVA")
older("aggmo", "AggMo")
older("swats", "SWATS")


def a2grad(kind: str) -> Build:
    """Return a builder of an optimizer that takes a Lipschitz constant in place of a learning rate: the inverse."""

    def build(model: nn.Module, lr: float, seed: int = 0) -> Stepper:
        package = imported("torch_optimizer", "torch-optimizer")
        return Dated(getattr(package, kind)(model.parameters(), lr=lr, lips=1 / lr), seed)

    return build


register("a2grad-uni", a2grad("A2GradUni"), (1e-4, 1.0), "torch_optimizer")
register("a2grad-inc", a2grad("A2GradInc"), (1e-4, 1.0), "torch_optimizer")
register("a2grad-exp", a2grad("A2GradExp"), (1e-4, 1.0), "torch_optimizer")

# --- others


def kfac(model: nn.Module, lr: float, seed: int = 0) -> Stepper:
    """Return K-FAC; damping and average are those of the paper's authors."""
    imported("curvlinops", "curvlinops-for-pytorch")
    return KFAC(model, SGD(model.parameters(), lr=lr), seed, damping=1e-3, average=0.95, every=1)


def heavyball_kron(model: nn.Module, lr: float, seed: int = 0) -> Stepper:
    """Return HeavyBall's PSGD Kron, not compiled: on a CPU that takes a minute, and then saves 3 % of its time."""
    package = imported("heavyball", "heavyball")
    package.utils.compile_mode = None
    return Noisy(package.PSGDKron(model.parameters(), lr=lr), seed)


register("kfac", kfac, (1e-4, 1e-1), "curvlinops")
register("heavyball-kron", heavyball_kron, (1e-4, 1e-1), "heavyball")
register("hessian-free", plain(SGD, HessianFree), (1e-2, 1e1), "scipy")

# --- ours, with default settings; experiments that pin the paper's build their own

register("psgd-diagonal", preconditioned(psgd.Diagonal()), (1e-3, 1.0), "psgd")
register("psgd-xmat", preconditioned(psgd.XMat()), (1e-3, 1.0), "psgd")
register("psgd-lra", preconditioned(psgd.lra(10)), (1e-3, 1.0), "psgd")
register("psgd-affine", preconditioned(psgd.affine), (1e-3, 1.0), "psgd")
register("psgd-dense", preconditioned(psgd.Dense()), (1e-3, 1.0), "psgd")
register("psgd-triangular", preconditioned(psgd.Triangular()), (1e-3, 1.0), "psgd")
