"""The optimizers under comparison, one registry: ours, torch's, and those of packages.

All are used alike: `stepper.step(loss)` evaluates the loss, moves the parameters, and returns the loss as it was before
the move. What it took (gradients, Hessian products) is counted.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import psgd

Criterion = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Loss:
    """The loss of a model on one batch, called without arguments; methods that need more look inside.

    >>> loss = Loss(nn.Identity(), torch.tensor([3.0]), torch.tensor([1.0]), nn.functional.mse_loss)
    >>> loss()
    tensor(4.)
    """

    model: nn.Module
    inputs: Any
    targets: Any
    criterion: Callable[[Any, Any], Tensor]

    def __call__(self) -> Tensor:
        """Evaluate it, with a graph."""
        return self.criterion(self.model(self.inputs), self.targets)


class Stepper(Protocol):
    """An optimizer in use."""

    gradients: int
    """Gradients of one batch that were evaluated so far."""
    products: int
    """Hessian (or Gauss-Newton) products that were evaluated so far."""

    @property
    def optimizer(self) -> Optimizer:
        """Of which schedulers set the lr."""

    def step(self, loss: Callable[[], Tensor]) -> Tensor:
        """Evaluate, move, and return the loss before the move, detached."""

    def state_dict(self) -> dict[str, Any]:
        """Return what resuming needs, counters included."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume."""


@dataclass(frozen=True)
class Method:
    """A way to train: how to build it for a model at a learning rate, and where to look for a good one."""

    name: str
    build: Callable[[nn.Module, float], Stepper]
    lr: tuple[float, float]
    """The range that tuning searches, log-uniformly."""
    source: str = "torch"
    """The package that it comes from."""


class Plain:
    """Steps of an ordinary optimizer: one gradient, then `step()`."""

    create_graph = False

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer, self.gradients, self.products = optimizer, 0, 0

    def step(self, loss: Callable[[], Tensor]) -> Tensor:
        """Make one."""
        self.optimizer.zero_grad()
        value = loss()
        value.backward(create_graph=self.create_graph)
        self.optimizer.step()
        self.gradients += 1
        return value.detach()

    def state_dict(self) -> dict[str, Any]:
        """Return the optimizer's state, and the counters."""
        return {"optimizer": self.optimizer.state_dict(), "gradients": self.gradients, "products": self.products}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume."""
        self.optimizer.load_state_dict(state["optimizer"])
        self.gradients, self.products = state["gradients"], state["products"]


class Preconditioned(Plain):
    """Steps of PSGD through a closure: exact Hessian products on due steps."""

    optimizer: psgd.PSGD

    def step(self, loss: Callable[[], Tensor]) -> Tensor:
        """Make one."""
        before = self.optimizer.param_groups[0]["updates"]
        value = self.optimizer.step(loss)
        self.gradients += 1
        self.products += self.optimizer.param_groups[0]["updates"] - before
        return value.detach()


METHODS: dict[str, Method] = {}


def register(name: str, build: Callable[[nn.Module, float], Stepper], lr: tuple[float, float], source: str) -> None:
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


def plain(kind: Callable[..., Optimizer], **options: Any) -> Callable[[nn.Module, float], Stepper]:
    """Return a builder of an ordinary optimizer."""
    return lambda model, lr: Plain(kind(model.parameters(), lr=lr, **options))


def preconditioned(group: Any, **options: Any) -> Callable[[nn.Module, float], Stepper]:
    """Return a builder of PSGD with a group."""
    return lambda model, lr: Preconditioned(psgd.PSGD(model.parameters(), group, lr=lr, **options))


register("sgd", plain(torch.optim.SGD), (1e-4, 1.0), "torch")
register("momentum", plain(torch.optim.SGD, momentum=0.9), (1e-4, 1.0), "torch")
register("adam", plain(torch.optim.Adam), (1e-5, 1e-1), "torch")
