"""The networks of the experiments, with the paper's initial values."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class LeNet5(nn.Sequential):
    """LeNet5 for 28×28 images, 44,426 parameters: weights 0.1·N(0, 1), biases zero.

    >>> net = LeNet5(torch.Generator().manual_seed(0))
    >>> net(torch.zeros(2, 1, 28, 28)).shape, sum(p.numel() for p in net.parameters())
    (torch.Size([2, 10]), 44426)
    """

    def __init__(self, generator: torch.Generator) -> None:
        super().__init__(
            nn.Conv2d(1, 6, 5),
            nn.MaxPool2d(2),
            nn.ReLU(),
            nn.Conv2d(6, 16, 5),
            nn.MaxPool2d(2),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(256, 120),
            nn.ReLU(),
            nn.Linear(120, 84),
            nn.ReLU(),
            nn.Linear(84, 10),
        )
        with torch.no_grad():
            for p in self.parameters():
                p.copy_(0.1 * torch.randn(p.shape, generator=generator) if p.ndim > 1 else torch.zeros(p.shape))


class AffineLeNet5(nn.Module):
    """LeNet5 with one matrix (inputs + 1) × outputs for each layer, its bias the last row; all 0.1·N(0, 1).

    An affine preconditioner then sees weights and bias as one matrix, as in the authors' PSGD_A.

    >>> net = AffineLeNet5(torch.Generator().manual_seed(0))
    >>> [tuple(p.shape) for p in net.parameters()]
    [(26, 6), (151, 16), (257, 120), (121, 84), (85, 10)]
    """

    def __init__(self, generator: torch.Generator) -> None:
        super().__init__()
        shapes = (1 * 25 + 1, 6), (6 * 25 + 1, 16), (256 + 1, 120), (120 + 1, 84), (84 + 1, 10)
        self.layers = nn.ParameterList(nn.Parameter(0.1 * torch.randn(shape, generator=generator)) for shape in shapes)

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits."""
        layers: Sequence[Tensor] = list(self.layers)
        for matrix in layers[:2]:
            weight = matrix[:-1].mT.reshape(-1, x.shape[1], 5, 5)
            x = F.relu(F.max_pool2d(F.conv2d(x, weight, matrix[-1]), 2))
        x = x.flatten(1)
        for matrix in layers[2:4]:
            x = F.relu(torch.addmm(matrix[-1], x, matrix[:-1]))
        return torch.addmm(layers[4][-1], x, layers[4][:-1])
