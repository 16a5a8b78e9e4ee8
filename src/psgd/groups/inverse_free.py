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
from psgd.linalg import frobenius, lift, maximum_modulus, ordinary, plus, spectral_norm, subtract
from psgd.step_size import StepSize


class Motion(ABC):
    """How a dense factor Q ≈ Qᵀ > 0 follows G = Π(Ph (Ph)ᵀ − v vᵀ), by a step s with s‖G‖ ≤ μ < 1.

    Matrices are multiplied in the dtype of sG, or of X, and added up in that of Q.
    """

    @abstractmethod
    def matrix(self, q: Tensor, g: Tensor) -> Tensor:
        """Return the new Q, given s·G."""

    @abstractmethod
    def diagonal(self, d: Tensor, g: Tensor) -> Tensor:
        """Return the new diagonal of Q, given that of s·G."""

    def narrow(self, q: Tensor, x: Tensor, c: Tensor) -> Tensor:
        """Return the new Q for s·G = XXᵀ − cI, X with few columns: a form of its own may never form G."""
        return self.matrix(q, x @ x.mT - c.to(x) * torch.eye(len(q)).to(x))


@dataclass(frozen=True)
class Quadratic(Motion):
    """Q ← (I − ½sG) Q (I − ½sG): symmetric, to the last bit, and positive by construction.

    >>> one = torch.ones(1, 1)
    >>> Quadratic().matrix(one, 0.5 * one)
    tensor([[0.5625]])
    """

    def matrix(self, q: Tensor, g: Tensor) -> Tensor:
        """Return Q − ½sGQ − ½sQG + ¼s²GQG."""
        left = g @ q.to(g)
        change = torch.addmm(left, left, g, alpha=-0.25)
        return torch.sub(q, change + change.mT, alpha=0.5)

    def narrow(self, q: Tensor, x: Tensor, c: Tensor) -> Tensor:
        """Return α²Q − XZᵀ − ZXᵀ, where α = 1 + ½c and Z = ½αQX − ⅛X(XᵀQX)."""
        alpha, qx = 1 + 0.5 * c, q.to(x) @ x
        less = torch.addmm(-0.5 * alpha.to(x) * qx, x, x.mT @ qx, alpha=0.125)  # −Z
        half = x @ less.mT
        return plus((half + half.mT).to(q), q, alpha.square())

    def diagonal(self, d: Tensor, g: Tensor) -> Tensor:
        """Return (1 − ½sg)²d."""
        return (1 - 0.5 * g).square() * d


@dataclass(frozen=True)
class Procrustes(Motion):
    """Q ← Q − sGQ, then turned towards Qᵀ = Q by one step on the orthogonal group, which leaves P alone.

    The turn I + αR + ½α²R², R the Qᵀ − Q of norm 1, raises tr Q the most for α ≤ 1/8; it is orthogonal up to α⁴/4.

    >>> turned = torch.tensor([[1.0, -0.05], [0.05, 1.0]])
    >>> after = Procrustes().matrix(turned, torch.zeros(2, 2))
    >>> bool((after - after.mT).norm() < 0.01 * (turned - turned.mT).norm())
    True
    """

    def matrix(self, q: Tensor, g: Tensor) -> Tensor:
        """Return Q − sGQ, turned."""
        return self._turned(q - g @ q.to(g), g.dtype)

    def narrow(self, q: Tensor, x: Tensor, c: Tensor) -> Tensor:
        """Return (1 + c)Q − X(XᵀQ), turned."""
        return self._turned((1 + c) * q - x @ (x.mT @ q.to(x)), x.dtype)

    def diagonal(self, d: Tensor, g: Tensor) -> Tensor:
        """Return d − sgd."""
        return d - g * d

    def _turned(self, q: Tensor, dtype: torch.dtype) -> Tensor:
        skew = q.mT - q
        skew = (skew / frobenius(skew).clamp_min(torch.finfo(q.dtype).tiny)).to(dtype)
        once = skew @ q.to(dtype)
        once, twice = once.to(q), (skew @ once).to(q)
        slope, bend = once.diagonal().sum(), twice.diagonal().sum()
        best = torch.where(bend < 0, slope / (-bend).clamp_min(torch.finfo(q.dtype).tiny), 0.125)
        angle = best.clamp(0, 0.125)
        return q + angle * (once + 0.5 * angle * twice)


@dataclass(frozen=True)
class InverseFree(Kronecker):
    """Q = A₁ ⊗ A₂ ⊗ …, fitted by products alone: factor i follows Gᵢ, what Ph (Ph)ᵀ − v vᵀ is along its axis.

    In left coordinates G is Q(aaᵀ − bbᵀ)Qᵀ: another metric on the same group, with the same fixed point where the
    covariance of h is a Kronecker product. Dense factors stay nearly symmetric, by `motion`. In whitening, where v is
    independent of h, the mean of v vᵀ is known and taken.

    To every entry of h is added noise of `damping` times their root mean square, made from the probe: directions
    without any gradient would let P grow for ever.

    With `products`, matrices are multiplied in that dtype, and added up in their own. P is then applied as Q and Qᵀ: a
    coarse P would not be positive.

    >>> group = InverseFree((2, 3), (Dense(), Diagonal()))
    >>> q = group.whiten(group.init(6), torch.ones(6), torch.ones(6))
    >>> q["0"]["Q"].shape, q["1"]["d"].shape
    (torch.Size([2, 2]), torch.Size([3]))
    """

    motion: Motion = Quadratic()
    damping: float = 1e-3
    products: torch.dtype | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_products(self.products)
        for part in self.parts:
            if not isinstance(part, (Dense, Diagonal, Identity)):
                raise ValueError(f"InverseFree needs factors Dense(), Diagonal() or Identity(), got {part}")
        if not self.damping >= 0:
            raise ValueError(f"InverseFree needs damping >= 0, got damping={self.damping}")

    @property
    def probing(self) -> bool:
        return self.noisy

    @property
    def noisy(self) -> bool:
        return self.damping > 0

    def step(self, q: Point, r: Residual, lr: float | Tensor, coin: bool, rule: StepSize) -> Point:
        raise ValueError(f"{self} moves as a whole, and cannot be a factor of a product or a sum")

    def fitted(self, q: Point, v: Tensor, h: Tensor, how: How) -> Point:
        return self._followed(q, self._noisy(h, v), v, how)

    def whitened(self, q: Point, v: Tensor, h: Tensor, how: How) -> Point:
        return self._followed(q, self._noisy(h, v), None, how)

    def ready(self, q: Point) -> Point:
        """Return P of each factor, or Q as it is multiplied."""
        if self.products:
            return {key: p | {"Q": self._rounded(p["Q"])} if "Q" in p else p for key, p in q.items()}
        return {key: {"P": self._roots(p, math.inf)[0]} if p else {} for key, p in q.items()}

    def precondition(self, q: Point, g: Tensor, out: Tensor | None = None) -> Tensor:
        del out
        x, axes = g.contiguous(), self._moving()
        roots = [self._roots(q[str(i)], g.numel() // self.shape[i]) for i in axes]
        if self.products:  # Q of all axes, and then Qᵀ: what is rounded in between cannot turn the step around
            roots, axes = [(root,) for root, *_ in roots] + [root[1:] for root in roots], 2 * axes
        for i, matrices in zip(axes, roots, strict=True):
            for p in matrices:
                x = self._multiplied(p, x, i)
        return x.to(g)

    def _roots(self, p: Point, columns: float) -> tuple[Tensor, ...]:
        """Return what to multiply vectors with, one after the other: P, or Q and Qᵀ for a few of them."""
        if "P" in p:
            return (p["P"],)
        if "d" in p:
            return (p["d"], p["d"]) if self.products else (p["d"].square(),)
        q = self._rounded(p["Q"])
        return (q, q.mT) if self.products or columns < len(q) else (q.mT @ q,)

    def _rounded(self, x: Tensor) -> Tensor:
        """Return x as it is multiplied."""
        return x if self.products is None else x.to(self.products)

    def _multiplied(self, p: Tensor, x: Tensor, i: int) -> Tensor:
        """Multiply one axis of x by a matrix or a diagonal: seen as (before, axis, after), none has to be moved."""
        batch, n, after = x.shape[:-1], self.shape[i], math.prod(self.shape[i + 1 :])
        x = x if p.ndim == 1 else x.to(p)
        if p.ndim == 1:
            y = x.view(*batch, -1, n) * p if after == 1 else x.view(*batch, -1, n, after) * p[:, None]
        elif x.ndim == 1 and x.numel() == n * after:  # no axis before it: a product of two matrices
            y = p @ x.view(n, after)
        elif after == 1:
            y = x.view(*batch, -1, n) @ p.mT
        elif after < n:  # a product wants long sides
            y = (x.view(*batch, -1, n, after).mT.reshape(*batch, -1, n) @ p.mT).view(*batch, -1, after, n).mT
        else:
            y = p @ x.view(*batch, -1, n, after)
        return y.reshape(x.shape)

    def _moving(self) -> list[int]:
        return [i for i, part in enumerate(self.parts) if part.moves]

    def _noisy(self, h: Tensor, v: Tensor) -> Tensor:
        """Return h with a little noise: the probe, moved by one entry lest it cancel a product with it."""
        if not self.damping:
            return h
        share = self.damping / h.numel() ** 0.5
        if ordinary(h, v):
            return torch.add(h, v.roll(1, -1), alpha=share * float(frobenius(h)))
        return h + (share * frobenius(h)).to(h.dtype) * v.roll(1, -1)

    def _followed(self, q: Point, h: Tensor, v: Tensor | None, how: How) -> Point:
        """Return the point after one step of each factor; without v, v vᵀ is what it is in the mean."""
        ph, lr, axes, new = self.precondition(q, h), self.share(how.lr), self._moving(), {}
        matrix = ph.ndim == 1 and len(axes) == len(self.shape) == 2 and all("Q" in q[str(i)] for i in axes)
        shared: list[Tensor] = []
        for i in axes:
            y, known = None if v is None else self._columns(v, i), shared if matrix else []
            new[str(i)] = self._moved(q[str(i)], self._columns(ph, i), y, lr, how.rule, known)
        return q | new

    def _columns(self, x: Tensor, i: int) -> Tensor:
        """Return x as a matrix with an axis first, and all others, the batch among them, second."""
        n = self.shape[i]
        if x.ndim == 1 and x.numel() == n * math.prod(self.shape[i + 1 :]):
            return lift(x.view(n, -1))
        return lift(self._move(x, i).reshape(-1, n).mT)

    def _moved(
        self, p: Point, x: Tensor, y: Tensor | None, lr: float | Tensor, rule: StepSize, known: list[Tensor]
    ) -> Point:
        """Return a factor's new point, for G = XXᵀ − YYᵀ, or its diagonal; without Y, with as many I as columns.

        ‖XXᵀ‖ may be known: X of one axis of a matrix is Xᵀ of the other.
        """
        (key,) = p.keys() - {"ell"}
        old, many = lift(p[key]), float(x.shape[1])
        norm: Callable[[Tensor], Tensor] = maximum_modulus if old.ndim == 1 else spectral_norm
        if old.ndim == 2:
            x, y = self._rounded(x), None if y is None else self._rounded(y)

        def largest(gram: Callable[[], Tensor]) -> Tensor:
            if not known:
                known.append(norm(gram()))
            return known[0]

        if old.ndim == 2 and y is None and 3 * many <= 2 * len(x):  # then it takes fewer operations
            full = lambda: norm(_square(x, old) - many * _one(old))  # noqa: E731
            size, ell = rule(lr, p["ell"], full, lambda: largest(lambda: x.mT @ x) + many)
            new = self.motion.narrow(old, size.sqrt().to(x) * x, size * many)
        else:
            up, down = _square(x, old), many * _one(old) if y is None else _square(y, old)
            least = many if y is None else norm(down)
            size, ell = rule(lr, p["ell"], lambda: norm(up - down), lambda: largest(lambda: up) + least)
            step = size * (up - down)
            new = self.motion.diagonal(old, step) if old.ndim == 1 else self.motion.matrix(old, self._rounded(step))
        return {key: new if new.dtype == p[key].dtype else subtract(p[key], 1.0, old - new), "ell": ell}


def check_products(products: torch.dtype | None) -> None:
    """Raise unless this is a dtype in which nothing overflows that does not in float32."""
    if products is not None and not (products.is_floating_point and torch.finfo(products).max > 1e38):
        raise ValueError(f"products needs a dtype of the range of float32, as torch.bfloat16, got {products}")


def _square(x: Tensor, like: Tensor) -> Tensor:
    """Return XXᵀ, or its diagonal for a factor that is one."""
    return x.square().sum(1) if like.ndim == 1 else lift(x @ x.mT)


def _one(like: Tensor) -> Tensor:
    """Return I, or its diagonal for a factor that is one."""
    return torch.ones_like(like) if like.ndim == 1 else torch.eye(len(like)).to(like)
