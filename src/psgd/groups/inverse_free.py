"""Kronecker factors that move by matrix products alone: no solves, and so in bfloat16, too."""

from __future__ import annotations

import functools
import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from psgd.group import How, Point, Residual
from psgd.groups.constant import Identity
from psgd.groups.dense import Dense
from psgd.groups.diagonal import Diagonal
from psgd.groups.kronecker import Kronecker
from psgd.groups.positive import Positive
from psgd.linalg import frobenius, lift, maximum_modulus, ordinary, plus, spectral_norm, subtract, symmetric_product
from psgd.step_size import StepSize


class Motion(ABC):
    """How a factor Q ≈ Qᵀ > 0, or its P, follows G = Π(Ph (Ph)ᵀ − v vᵀ), by a step s with s‖G‖ ≤ μ < 1.

    R is Q in the dtype in which matrices are multiplied, that of sG or of X; they are added up in that of Q. All may be
    stacks of matrices, along leading axes.
    """

    part: ClassVar[Dense | Positive] = Dense()
    """What is moved: Q, or P."""

    @abstractmethod
    def matrix(self, q: Tensor, r: Tensor, g: Tensor) -> Tensor:
        """Return the new Q, given s·G."""

    @abstractmethod
    def diagonal(self, d: Tensor, g: Tensor) -> Tensor:
        """Return the new diagonal of Q, given that of s·G."""

    def narrow(self, q: Tensor, r: Tensor, x: Tensor, c: Tensor) -> Tensor:
        """Return the new Q for s·G = XXᵀ − cI, X with few columns: a form of its own may never form G."""
        return self.matrix(q, r, _less(x @ x.mT, _wide(c)))


class Congruence(Motion):
    """M ← (I − σsG) M (I − σsG), M = Q or P: symmetric, to the last bit, and positive by construction."""

    share: ClassVar[float]
    """σ: with it, P moves by the same at first order whether it is M or MᵀM, where G and M commute."""

    def matrix(self, q: Tensor, r: Tensor, g: Tensor) -> Tensor:
        """Return M − σs(GM + MG) + σ²s²GMG."""
        left = g @ r
        change = torch.sub(left, symmetric_product(left, g), alpha=self.share / 2)
        return torch.sub(q, _symmetric(change), alpha=self.share)

    def narrow(self, q: Tensor, r: Tensor, x: Tensor, c: Tensor) -> Tensor:
        """Return α²M − XZᵀ − ZXᵀ, where α = 1 + σc and Z = σαMX − ½σ²X(XᵀMX)."""
        alpha, mx = _wide(1 + self.share * c), r @ x
        less = torch.add(-self.share * alpha.to(x) * mx, x @ symmetric_product(x.mT, mx), alpha=self.share**2 / 2)  # −Z
        return plus(_symmetric(x @ less.mT).to(q), q, alpha.square())


@dataclass(frozen=True)
class Quadratic(Congruence):
    """Q ← (I − ½sG) Q (I − ½sG).

    >>> one = torch.ones(1, 1)
    >>> Quadratic().matrix(one, one, 0.5 * one)
    tensor([[0.5625]])
    """

    share = 0.5

    def diagonal(self, d: Tensor, g: Tensor) -> Tensor:
        """Return (1 − ½sg)²d."""
        return (1 - 0.5 * g).square() * d


@dataclass(frozen=True)
class Direct(Congruence):
    """P ← (I − sG) P (I − sG): P itself is kept, so that Ph takes one product; in at least float32.

    >>> one = torch.ones(1, 1)
    >>> Direct().matrix(one, one, 0.5 * one)
    tensor([[0.2500]])
    """

    share = 1.0
    part = Positive()

    def diagonal(self, d: Tensor, g: Tensor) -> Tensor:
        """Return (1 − sg)d, the root of what P would be multiplied by."""
        return (1 - g) * d


@dataclass(frozen=True)
class Procrustes(Motion):
    """Q ← Q − sGQ, then turned towards Qᵀ = Q by one step on the orthogonal group, which leaves P alone.

    The turn I + αR + ½α²R², R the Qᵀ − Q of norm 1, raises tr Q the most for α ≤ 1/8; it is orthogonal up to α⁴/4.

    >>> turned = torch.tensor([[1.0, -0.05], [0.05, 1.0]])
    >>> after = Procrustes().matrix(turned, turned, torch.zeros(2, 2))
    >>> bool((after - after.mT).norm() < 0.01 * (turned - turned.mT).norm())
    True
    """

    def matrix(self, q: Tensor, r: Tensor, g: Tensor) -> Tensor:
        """Return Q − sGQ, turned."""
        return self._turned(q - g @ r, g.dtype)

    def narrow(self, q: Tensor, r: Tensor, x: Tensor, c: Tensor) -> Tensor:
        """Return (1 + c)Q − X(XᵀQ), turned."""
        return self._turned(_wide(1 + c) * q - x @ (x.mT @ r), x.dtype)

    def diagonal(self, d: Tensor, g: Tensor) -> Tensor:
        """Return d − sgd."""
        return d - g * d

    def _turned(self, q: Tensor, dtype: torch.dtype) -> Tensor:
        tiny = torch.finfo(q.dtype).tiny
        skew = q.mT - q
        skew = (skew / _wide(frobenius(skew, 2)).clamp_min(tiny)).to(dtype)
        once = skew @ q.to(dtype)
        once, twice = once.to(q), (skew @ once).to(q)
        slope, bend = _diagonal(once).sum(-1), _diagonal(twice).sum(-1)
        best = torch.where(bend < 0, slope / (-bend).clamp_min(tiny), 0.125)
        angle = _wide(best.clamp(0, 0.125))
        return q + angle * (once + 0.5 * angle * twice)


@dataclass(frozen=True)
class InverseFree(Kronecker):
    """Q = A₁ ⊗ A₂ ⊗ …, fitted by products alone: factor i follows Gᵢ, what Ph (Ph)ᵀ − v vᵀ is along its axis.

    In left coordinates G is Q(aaᵀ − bbᵀ)Qᵀ: another metric on the same group, with the same fixed point where the
    covariance of h is a Kronecker product. Whether matrices move as Q, nearly symmetric, or as P, says `motion`: they
    are `Dense()` or `Positive()` parts. In whitening, where v is independent of h, the mean of v vᵀ is known and taken.

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
        for part in self.parts:
            if not isinstance(part, (type(self.motion.part), Diagonal, Identity)):
                wanted = f"{self.motion.part}, Diagonal() or Identity()"
                raise ValueError(f"InverseFree with {self.motion} needs factors {wanted}, got {part}")
        check_products(self.products, self.motion)
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

    @property
    def stacks(self) -> bool:
        return True

    def fitted(self, q: Point, v: Tensor, h: Tensor, how: How) -> Point:
        return self._followed(q, self._noisy(q, h, v), v, how)

    def whitened(self, q: Point, v: Tensor, h: Tensor, how: How) -> Point:
        return self._followed(q, self._noisy(q, h, v), None, how)

    def ready(self, q: Point, uses: float = math.inf) -> Point:
        """Return q with P of those factors where that pays, or with Q as it is multiplied."""
        return self._rooted(q, uses * math.prod(self.shape))

    def precondition(self, q: Point, g: Tensor, out: Tensor | None = None) -> Tensor:
        del out
        return self._multiplied(self._rooted(q, math.prod(g.shape[self._units(q) :])), g).to(g)

    def _rooted(self, q: Point, entries: float) -> Point:
        """Return q with P = QᵀQ of each matrix that so many entries are multiplied by quicker, or with Q rounded."""
        new = {}
        for i in self._moving():
            p = q[str(i)]
            if "Q" in p and self.products and "R" not in p:
                new[str(i)] = p | {"R": p["Q"].to(self.products)}
            elif "Q" in p and not self.products and "P" not in p and entries >= self.shape[i] ** 2:
                new[str(i)] = p | {"P": symmetric_product(p["Q"].mT, p["Q"])}
        return q | new

    def _multiplied(self, q: Point, x: Tensor) -> Tensor:
        """P x, in the dtype in which it comes."""
        axes, units = self._moving(), self._units(q)
        roots = [self._roots(q[str(i)]) for i in axes]
        if self.products:  # Q of all axes, and then Qᵀ: what is rounded in between cannot turn the step around
            roots, axes = [(root,) for root, *_ in roots] + [root[1:] for root in roots], 2 * axes
        for i, matrices in zip(axes, roots, strict=True):
            for p in matrices:
                x = self._along(p, x, i, units)
        return x

    def _roots(self, p: Point) -> tuple[Tensor, ...]:
        """Return what to multiply vectors with, one after the other: P, or Q and Qᵀ."""
        if "d" in p:
            return (p["d"], p["d"]) if self.products else (p["d"].square(),)
        if "P" in p:
            return (p["P"],)
        q: Tensor = p["R"] if self.products else p["Q"]
        return q, q.mT

    def _along(self, p: Tensor, x: Tensor, i: int, units: int) -> Tensor:
        """Multiply axis i of x by a matrix or a diagonal: seen as (…, before, axis, after), none has to be moved."""
        shape, many = x.shape, x.shape[:units]
        if p.ndim == units + 1:
            return (self._seen(x, i, units) * p[..., None, :, None]).reshape(shape)
        x = self._seen(x.to(p), i, units)
        before, n, after = x.shape[units:]
        if before == 1:
            y = p @ x.squeeze(units)
        elif after == 1:
            y = x.squeeze(-1) @ p.mT
        elif after < n:  # a product wants long sides
            y = (x.mT.reshape(*many, -1, n) @ p.mT).view(*many, before, after, n).mT
        else:
            y = p.unsqueeze(units) @ x
        return y.reshape(shape)

    def _seen(self, x: Tensor, i: int, units: int) -> Tensor:
        """View x as (…, before, axis i, after); what comes before are also the pairs of a batch."""
        return x.reshape(*x.shape[:units], -1, self.shape[i], math.prod(self.shape[i + 1 :]))

    def _columns(self, x: Tensor, i: int, units: int) -> Tensor:
        """Return x as a matrix with an axis first, and all others, the batch among them, second."""
        x = self._seen(x, i, units)
        return x.squeeze(units) if x.shape[units] == 1 else x.mT.flatten(units, -2).mT

    def _moving(self) -> list[int]:
        return [i for i, part in enumerate(self.parts) if part.moves]

    def _units(self, q: Point) -> int:
        """Return how many leading axes the leaves of a point have."""
        for i in self._moving():
            leaf = next(leaf for key, leaf in q[str(i)].items() if key != "ell")
            return leaf.ndim - (1 if isinstance(self.parts[i], Diagonal) else 2)
        return 0

    def _noisy(self, q: Point, h: Tensor, v: Tensor) -> Tensor:
        """Return h with a little noise: the probe, moved by one entry lest it cancel a product with it."""
        if not self.damping:
            return h
        units = self._units(q)
        share = self.damping / math.prod(h.shape[units:]) ** 0.5
        if not units and ordinary(h, v):
            return torch.add(h, v.roll(1, -1), alpha=share * float(frobenius(h)))
        size = share * frobenius(h, h.ndim - units)
        return torch.addcmul(h, v.roll(1, -1), size.view(*size.shape, *[1] * (h.ndim - units)).to(h))

    def _followed(self, q: Point, h: Tensor, v: Tensor | None, how: How) -> Point:
        """Return the point after one step of each factor; without v, v vᵀ is what it is in the mean."""
        lr, axes, units, new = self.share(how.lr), self._moving(), self._units(q), {}
        q = self._rooted(q, math.prod(h.shape[units:]))
        ph = self._multiplied(q, h)
        matrix = ph.ndim == units + 1 and len(axes) == len(self.shape) == 2 and all("d" not in q[str(i)] for i in axes)
        shared: list[Tensor] = []
        for i in sorted(axes, key=self.shape.__getitem__):  # the shorter first, which takes less to know the norm
            y, known = None if v is None else self._columns(v, i, units), shared if matrix else []
            new[str(i)] = self._moved(q[str(i)], self._columns(ph, i, units), y, lr, how.rule, known)
        return q | new

    def _moved(
        self, p: Point, x: Tensor, y: Tensor | None, lr: float | Tensor, rule: StepSize, known: list[Tensor]
    ) -> Point:
        """Return a factor's new point, for G = XXᵀ − YYᵀ, or its diagonal; without Y, with as many I as columns.

        ‖XXᵀ‖ may be known: X of one axis of a matrix is Xᵀ of the other.
        """
        key = next(key for key in ("Q", "P", "d") if key in p)
        old, many, dense = lift(p[key]), float(x.shape[-1]), key != "d"
        norm: Callable[[Tensor], Tensor] = spectral_norm if dense else functools.partial(maximum_modulus, axes=1)
        square: Callable[[Tensor], Tensor] = _gram if dense else _squares
        x, *ys = (t.to((dense and self.products) or old.dtype) for t in (x, y) if t is not None)
        downs = [square(y) for y in ys]

        def largest(up: Callable[[], Tensor]) -> Tensor:
            if not known:
                known.append(norm(up()))
            return known[0] + (norm(downs[0]) if downs else many)

        if dense and not downs and 3 * many <= 2 * old.shape[-1]:  # then it takes fewer operations
            size, ell = rule(lr, p["ell"], lambda: norm(_less(_gram(x), many)), lambda: largest(lambda: _gram(x.mT)))
            new = self.motion.narrow(old, p.get("R", old), _wide(size.sqrt()).to(x) * x, size * many)
        else:
            up = square(x)

            def g(size: float | Tensor) -> Tensor:
                if downs:
                    return size * (up - downs[0])
                return _less(size * up, size * many) if dense else size * up - size * many

            size, ell = rule(lr, p["ell"], lambda: norm(g(1.0)), lambda: largest(lambda: up))
            if dense:
                new = self.motion.matrix(old, p.get("R", old), g(_wide(size)).to(x))
            else:
                new = self.motion.diagonal(old, g(size[..., None]))
        return {key: new if new.dtype == p[key].dtype else subtract(p[key], 1.0, old - new), "ell": ell}


def check_products(products: torch.dtype | None, motion: object) -> None:
    """Raise unless this is a dtype in which nothing overflows that does not in float32, and the motion is one of Q."""
    if products is None:
        return
    if not (products.is_floating_point and torch.finfo(products).max > 1e38):
        raise ValueError(f"products needs a dtype of the range of float32, as torch.bfloat16, got {products}")
    if not isinstance(motion, Motion) or isinstance(motion.part, Positive):
        raise ValueError(f"products are of Quadratic() and Procrustes(), which move Q, got {products} for {motion}")


def _gram(x: Tensor) -> Tensor:
    """Return XXᵀ."""
    return lift(symmetric_product(x, x.mT))


def _squares(x: Tensor) -> Tensor:
    """Return the diagonal of XXᵀ."""
    return x.square().sum(-1)


def _wide(x: Tensor) -> Tensor:
    """Return a number for each matrix in a form that multiplies it."""
    return x[..., None, None]


def _diagonal(x: Tensor) -> Tensor:
    return x.diagonal(dim1=-2, dim2=-1)


def _less(x: Tensor, c: float | Tensor) -> Tensor:
    """Return X − cI, written over X."""
    _diagonal(x).sub_(c[..., 0] if isinstance(c, Tensor) else c)
    return x


def _symmetric(x: Tensor) -> Tensor:
    """Return X + Xᵀ, equal to its transpose to the last bit."""
    return x + x.mT
