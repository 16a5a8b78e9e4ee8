"""The training problems: a network, one fixed batch, and the loss on it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass

import resnet
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from psgd.experiments.gpt import GPT, twice_differentiable
from psgd.experiments.models import LeNet5
from psgd.probes import generator


@dataclass(frozen=True)
class Problem:
    """A network to train on one batch: what is in it makes no difference in time."""

    name: str
    network: Callable[[], nn.Module]
    batch: Callable[[], tuple[Tensor, Tensor]]
    turn: int = 10
    """Iterations of a turn."""
    compiling: bool = True
    """Whether optimizers that compile for each shape of tensors are waited for."""

    def loss(self, network: nn.Module, twice: bool) -> Callable[[], Tensor]:
        """Return the loss; `twice` if it will be differentiated twice, which fused attention cannot."""
        inputs, targets = self.batch()

        def evaluate() -> Tensor:
            with twice_differentiable() if twice else nullcontext():
                return F.cross_entropy(network(inputs).flatten(0, -2), targets.flatten())

        return evaluate


def images(count: int, channels: int, size: int) -> tuple[Tensor, Tensor]:
    """Return noise, and labels of ten classes."""
    inputs = torch.rand(count, channels, size, size, generator=generator(0))
    return inputs, torch.randint(10, (count,), generator=generator(1))


def text(count: int, block: int) -> tuple[Tensor, Tensor]:
    """Return sequences of 65 characters, and the same moved by one."""
    characters = torch.randint(65, (count, block + 1), generator=generator(0))
    return characters[:, :-1].contiguous(), characters[:, 1:].contiguous()


LENET5 = Problem("LeNet5, batch 64", lambda: LeNet5(generator(2)), lambda: images(64, 1, 28), compiling=False)
GPT_ = Problem(
    "GPT of 0.8 M parameters, batch 12, 64 tokens",
    lambda: GPT(65, generator(2), block=64),
    lambda: text(12, 64),
    turn=3,
    compiling=False,
)
RESNET18 = Problem("ResNet18, batch 32", lambda: resnet.seeded(2), lambda: images(32, 3, 32), turn=1, compiling=False)

TINY = (
    Problem("LeNet5, batch 2", LENET5.network, lambda: images(2, 1, 28), turn=1, compiling=False),
    Problem(
        "tiny GPT, batch 2, 8 tokens",
        lambda: GPT(65, generator(2), block=8, width=8, layers=1, heads=2),
        lambda: text(2, 8),
        turn=1,
        compiling=False,
    ),
)
