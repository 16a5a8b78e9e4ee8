"""ResNet18 for images of 32×32."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class ResNet18(nn.Module):
    """He et al. (2016), with a stem of 3×3 and no pooling before the last layer: 11,173,962 parameters."""

    def __init__(self, classes: int = 10, width: int = 64) -> None:
        super().__init__()
        self.stem = conv(3, width)
        blocks, inputs = [], width
        for stage in range(4):
            outputs = width * 2**stage
            blocks += [Block(inputs, outputs, 2 if stage else 1), Block(outputs, outputs)]
            inputs = outputs
        self.blocks, self.last = nn.Sequential(*blocks), nn.Linear(inputs, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.blocks(F.relu(self.stem(x))).mean((2, 3)))


class Block(nn.Module):
    """x + two convolutions."""

    def __init__(self, inputs: int, outputs: int, stride: int = 1) -> None:
        super().__init__()
        self.first, self.second = conv(inputs, outputs, stride), conv(outputs, outputs)
        self.shortcut = nn.Identity() if inputs == outputs else conv(inputs, outputs, stride, size=1)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.shortcut(x) + self.second(F.relu(self.first(x))))


def conv(inputs: int, outputs: int, stride: int = 1, size: int = 3) -> nn.Sequential:
    """Return a convolution and the normalization of its outputs."""
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, size, stride, padding=size // 2, bias=False), nn.BatchNorm2d(outputs)
    )


def seeded(seed: int, width: int = 64) -> ResNet18:
    """Return one whose values are a function of the seed; the global generator is as before."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return ResNet18(width=width)
