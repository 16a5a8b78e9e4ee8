"""Sizes that do not fit: pad the problem, as the paper does."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from psgd.group import Group, Point


@dataclass(frozen=True)
class Padded:
    """Fits a group that needs a multiple of `multiple` to any n, by the paper's augmented cost f(θ) + ½ϑᵀϑ.

    The padding ϑ has the Hessian I, known exactly, so that it needs no probes: each padded entry j adds the pair
    (eⱼ, eⱼ) to the batch, its expectation. Not a group on ℝⁿ: P is cut out of the padded QᵀQ.

    >>> from psgd import Blocks, Dense
    >>> group = Padded(Blocks(4, Dense()), 4)
    >>> q = group.init(10)
    >>> q["Q"].shape, group.precondition(q, torch.ones(10)).shape
    (torch.Size([3, 4, 4]), torch.Size([10]))
    """

    part: Group
    multiple: int

    def __post_init__(self) -> None:
        if self.multiple < 1:
            raise ValueError(f"Padded needs multiple >= 1, got multiple={self.multiple}")
        self.part.check(self.multiple)

    def size(self, n: int) -> int:
        """Return the padded length: the next multiple."""
        return -(-n // self.multiple) * self.multiple

    def init(self, n: int, **options: Any) -> Point:
        """Return the starting point of the padded group, with the options of `Group.init`."""
        return self.part.init(self.size(n), **options)

    @property
    def scalable(self) -> bool:
        """As `Group.scalable`."""
        return self.part.scalable

    @property
    def probing(self) -> bool:
        """As `Group.probing`."""
        return True

    @property
    def noisy(self) -> bool:
        """As `Group.noisy`."""
        return False

    def scaled(self, q: Point, s: float | Tensor) -> Point:
        """As `Group.scaled`."""
        return self.part.scaled(q, s)

    def balance(self, q: Point) -> Point:
        """As `Group.balance`."""
        return self.part.balance(q)

    def fit(self, q: Point, v: Tensor, h: Tensor, **options: Any) -> Point:
        """One step of the padded group on (v, h) and the padding's own pairs, with the options of `Group.fit`."""
        n, extra = v.shape[-1], self.size(v.shape[-1]) - v.shape[-1]
        units = torch.eye(extra, dtype=v.dtype, device=v.device)
        v, h = (torch.cat((pad(t.reshape(-1, n), (0, extra)), pad(units, (n, 0)).to(t.dtype))) for t in (v, h))
        return self.part.fit(q, v, h, **options)

    def whiten(self, q: Point, v: Tensor, h: Tensor, **options: Any) -> Point:
        """As `fit`, for a probe v that is independent of h."""
        return self.fit(q, v, h, **options)

    def ready(self, q: Point, uses: float = math.inf) -> Point:
        """As `Group.ready`."""
        return self.part.ready(q, uses)

    def precondition(self, q: Point, g: Tensor, out: Tensor | None = None) -> Tensor:
        """P g, the padding's gradient being zero at ϑ = 0."""
        del out
        n = g.shape[-1]
        return self.part.precondition(q, pad(g, (0, self.size(n) - n)))[..., :n]
