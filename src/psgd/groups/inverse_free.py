"""Kronecker factors that move by matrix products alone: no solves, and so in bfloat16, too."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from psgd.group import How, Point, Residual
from psgd.groups.constant import Identity
from psgd.groups.dense import Dense
from psgd.groups.diagonal import Diagonal
from psgd.groups.kronecker import Kronecker
from psgd.linalg import batch_sum, frobenius, lift, maximum_modulus, outer, spectral_norm, subtract
from psgd.step_size import StepSize


class Motion(ABC):
    """How a dense factor Q ≈ Qᵀ > 0 follows G = Π(Ph (Ph)ᵀ − v vᵀ), by a step s with s‖G‖ ≤ μ < 1."""

    @abstractmethod
    def matrix(self, q: Tensor, g: Tensor) -> Tensor:
        """Return what to subtract from Q, given s·G."""

    @abstractmethod
    def diagonal(self, d: Tensor, g: Tensor) -> Tensor:
        """Return what to subtract from the diagonal of Q, given that of s·G."""


@dataclass(frozen=True)
class Quadratic(Motion):
    """Q ← (I − ½sG) Q (I − ½sG): symmetric and positive by construction.

    >>> one = torch.ones(1, 1)
    >>> 1 - Quadratic().matrix(one, 0.5 * one)
    tensor([[0.5625]])
    """

    def matrix(self, q: Tensor, g: Tensor) -> Tensor:
        """Return ½sGQ + ½sQG − ¼s²GQG, symmetric to the last bit."""
        left = g @ q
        change = left - 0.25 * left @ g
        return 0.5 * (change + change.mT)

    def diagonal(self, d: Tensor, g: Tensor) -> Tensor:
        """Return d − (1 − ½sg)²d."""
        return g * d - 0.25 * g * g * d


@dataclass(frozen=True)
class Procrustes(Motion):
    """Q ← Q − sGQ, then turned towards Qᵀ = Q by one step on the orthogonal group, which leaves P alone.

    The turn I + αR + ½α²R², R the Qᵀ − Q of norm 1, raises tr Q the most for α ≤ 1/8; it is orthogonal up to α⁴/4.

    >>> turned = torch.tensor([[1.0, -0.05], [0.05, 1.0]])
    >>> after = turned - Procrustes().matrix(turned, torch.zeros(2, 2))
    >>> bool((after - after.mT).norm() < 0.01 * (turned - turned.mT).norm())
    True
    """

    def matrix(self, q: Tensor, g: Tensor) -> Tensor:
        """Return sGQ, and what the turn changes."""
        change = g @ q
        moved = q - change
        skew = moved.mT - moved
        skew = skew / frobenius(skew).clamp_min(torch.finfo(q.dtype).tiny)
        once = skew @ moved
        twice = skew @ once
        slope, bend = once.diagonal().sum(), twice.diagonal().sum()
        best = torch.where(bend < 0, slope / (-bend).clamp_min(torch.finfo(q.dtype).tiny), 0.125)
        angle = best.clamp(0, 0.125)
        return change - angle * (once + 0.5 * angle * twice)

    def diagonal(self, d: Tensor, g: Tensor) -> Tensor:
        """Return sgd."""
        return g * d


@dataclass(frozen=True)
class InverseFree(Kronecker):
    """Q = A₁ ⊗ A₂ ⊗ …, fitted by products alone: factor i follows Gᵢ, what Ph (Ph)ᵀ − v vᵀ is along its axis.

    In left coordinates G is Q(aaᵀ − bbᵀ)Qᵀ: another metric on the same group, with the same fixed point where the
    covariance of h is a Kronecker product. Dense factors stay nearly symmetric, by `motion`. In whitening, where v is
    independent of h, the mean of v vᵀ is known and taken: it needs no probes.

    A factor has no direction with more than 1/damping of the tensor's mean preconditioner in it: entries without any
    gradient would let it grow for ever.

    >>> group = InverseFree((2, 3), (Dense(), Diagonal()))
    >>> q = group.whiten(group.init(6), torch.ones(6), torch.ones(6))
    >>> q["0"]["Q"].shape, q["1"]["d"].shape
    (torch.Size([2, 2]), torch.Size([3]))
    """

    motion: Motion = Procrustes()
    damping: float = 1e-3

    def __post_init__(self) -> None:
        super().__post_init__()
        for part in self.parts:
            if not isinstance(part, (Dense, Diagonal, Identity)):
                raise ValueError(f"InverseFree needs factors Dense(), Diagonal() or Identity(), got {part}")
        if not self.damping >= 0:
            raise ValueError(f"InverseFree needs damping >= 0, got damping={self.damping}")

    @property
    def probing(self) -> bool:
        return False

    def step(self, q: Point, r: Residual, lr: float | Tensor, coin: bool, rule: StepSize) -> Point:
        raise ValueError(f"{self} moves as a whole, and cannot be a factor of a product or a sum")

    def fitted(self, q: Point, v: Tensor, h: Tensor, how: How) -> Point:
        return self._followed(q, h, lambda i: self._trace(v, i), how.lr, how.rule)

    def whitened(self, q: Point, v: Tensor, h: Tensor, how: How) -> Point:
        del v
        identity = h.numel() / h.shape[-1] * math.prod(self.shape)
        return self._followed(q, h, lambda i: identity / self.shape[i], how.lr, how.rule)

    def ready(self, q: Point) -> Point:
        """Return P of each factor."""
        point: Point = {str(i): {} for i in range(len(self.parts))}
        for i in self._moving():
            p = q[str(i)]
            point[str(i)] = {"P": p["Q"].mT @ p["Q"] if "Q" in p else p["d"].square()}
        return point

    def precondition(self, q: Point, g: Tensor, out: Tensor | None = None) -> Tensor:
        del out
        moving = self._moving()
        if moving and "P" not in q[str(moving[0])]:
            q = self.ready(q)
        x, batch = g.contiguous(), g.shape[:-1]
        for i in moving:  # seen as (before, axis, after), no axis has to be moved
            p, after = q[str(i)]["P"], math.prod(self.shape[i + 1 :])
            y = x.view(*batch, -1, self.shape[i], after)
            if p.ndim == 1:
                y = y * p[:, None]
            elif after < len(p):  # a product wants long sides, and P is symmetric
                y = (y.mT.reshape(*batch, -1, len(p)) @ p).view(*batch, -1, after, len(p)).mT
            else:
                y = p @ y
            x = y.reshape(*batch, -1)
        return x

    def _moving(self) -> list[int]:
        return [i for i, part in enumerate(self.parts) if part.moves]

    def _trace(self, x: Tensor, i: int) -> Tensor:
        """Return the partial trace of x xᵀ over all axes but one, summed over the batch."""
        x = self._move(x, i)
        return lift(outer(x, x) if isinstance(self.parts[i], Dense) else batch_sum(x * x))

    def _followed(
        self, q: Point, h: Tensor, down: Callable[[int], Tensor | float], lr: float | Tensor, rule: StepSize
    ) -> Point:
        """Return the point after one step of each factor, `down` being what v vᵀ is along an axis."""
        ready, lr = self.ready(q), self.share(lr)
        ph = self.precondition(ready, h)
        squares = {i: _squared(ready[str(i)]["P"]) for i in self._moving()}
        totals = {i: t.sum() if t.ndim == 1 else t.diagonal().sum() for i, t in squares.items()}
        noise = self.damping**2 * lift(h).square().sum() / math.prod(self.shape)  # as if every entry of h had some
        moved = {}
        for i, square in squares.items():
            rest = math.prod([t for j, t in totals.items() if j != i], start=noise)
            moved[str(i)] = self._moved(q[str(i)], self._trace(ph, i) + rest * square, down(i), lr, rule)
        return q | moved

    def _moved(self, p: Point, up: Tensor, down: Tensor | float, lr: float | Tensor, rule: StepSize) -> Point:
        """Return a factor's new point, for G = up − down; a number stands for as many times I."""
        (key,) = p.keys() - {"ell"}
        diagonal = up.ndim == 1
        norm: Callable[[Tensor], Tensor] = maximum_modulus if diagonal else spectral_norm
        change = self.motion.diagonal if diagonal else self.motion.matrix
        if isinstance(down, Tensor):
            g, below = up - down, norm(down)
        else:
            g, below = up - (down if diagonal else down * torch.eye(len(up)).to(up)), torch.full_like(up.sum(), down)
        size, ell = rule(lr, p["ell"], lambda: norm(g), lambda: norm(up) + below)
        return {key: subtract(p[key], 1.0, change(lift(p[key]), size * g)), "ell": ell}


def _squared(p: Tensor) -> Tensor:
    """P² of a factor, P symmetric."""
    return lift(p).square() if p.ndim == 1 else lift(p) @ lift(p)
