"""Whether a preconditioner still goes somewhere: the mean of its last moves against their noise.

The residual moves Q. Where the fit is good its mean is zero, and Q only jitters; where it is not, moves agree. That can
be seen in a few entries of Q.
"""

from __future__ import annotations

import torch
from torch import Tensor

from psgd.group import Point
from psgd.linalg import lift

ENTRIES = 64
"""How many of each tensor are looked at, evenly spaced."""

BETA = 0.9
"""Of the averages over moves."""


def sample(point: Point) -> list[Tensor]:
    """Return some entries of each tensor of a point.

    >>> [t.shape for t in sample({"0": {"Q": torch.eye(50), "ell": torch.ones(())}, "1": {"d": torch.ones(3)}})]
    [torch.Size([64]), torch.Size([3])]
    """
    found = []
    for key, leaf in sorted(point.items()):
        if isinstance(leaf, dict):
            found += sample(leaf)
        elif key != "ell" and leaf.numel():
            found.append(lift(leaf.reshape(-1)[:: max(1, leaf.numel() // ENTRIES)][:ENTRIES]).clone())
    return found


def relative(before: list[Tensor], after: list[Tensor]) -> Tensor:
    """Return the move from one sample to another, each entry over the size of its tensor's."""
    sizes = [t.square().mean().sqrt().clamp_min(torch.finfo(t.dtype).tiny) for t in before]
    moves = [(b - a) / size for a, b, size in zip(before, after, sizes, strict=True)]
    return torch.cat(moves) if moves else torch.zeros(0)


class Trend:
    """Averages of moves and of their squares, and what they say.

    >>> steady, noise = Trend(torch.zeros(2, 100)), Trend(torch.zeros(2, 100))
    >>> for t in range(50):
    ...     steady.add(torch.ones(100))
    ...     noise.add(torch.ones(100) * (-1) ** t)
    >>> round(float(steady.significance)), round(float(noise.significance))
    (19, 0)
    """

    def __init__(self, averages: Tensor) -> None:
        self.averages = averages

    def add(self, move: Tensor) -> None:
        """Take in one more move."""
        self.averages.lerp_(torch.stack((move, move.square())).to(self.averages), 1 - BETA)

    @property
    def significance(self) -> Tensor:
        """(Mean)² over the mean square, times (1 + β)/(1 − β): about 1 for noise, up to 19 for a steady move."""
        mean, square = self.averages
        tiny = torch.finfo(square.dtype).tiny
        return mean.square().sum() / square.sum().clamp_min(tiny) * ((1 + BETA) / (1 - BETA))
