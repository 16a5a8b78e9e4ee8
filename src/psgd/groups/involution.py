"""Q = diag(a) + diag(b)·σ for a permutation σ with σ∘σ = e: pairs of entries, each a 2×2 matrix."""

from __future__ import annotations

import functools
import math
from abc import abstractmethod
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from psgd.across import ALONE
from psgd.algebra import MatrixAlgebra
from psgd.group import How, Point
from psgd.linalg import CHUNK, batch_sum, chunks, goes, lift, plus


class Involution(MatrixAlgebra):
    """Q x = a∘x + b∘σ(x); Claim 3.1 with K = {e, σ}, in closed form."""

    @abstractmethod
    def sigma(self, x: Tensor) -> Tensor:
        """Return σ(x), on the last axis."""

    def off_diagonal(self, x: Tensor) -> Tensor:
        """Return x with zeros where σ has a fixed point: there b would repeat a."""
        return x

    def identity(self, n: int, **where: Any) -> Point:
        return {"a": torch.ones(n, **where), "b": torch.zeros(n, **where)}

    def apply(self, q: Point, x: Tensor) -> Tensor:
        return q["a"] * x + q["b"] * self.sigma(x)

    def apply_t(self, q: Point, x: Tensor) -> Tensor:
        return q["a"] * x + self.sigma(q["b"] * x)

    def solve(self, q: Point, x: Tensor) -> Tensor:
        return (self.sigma(q["a"]) * x - q["b"] * self.sigma(x)) / self._determinants(q)

    def solve_t(self, q: Point, x: Tensor) -> Tensor:
        return (self.sigma(q["a"]) * x - self.sigma(q["b"] * x)) / self._determinants(q)

    def logabsdet(self, q: Point, n: int) -> Tensor:
        return self._determinants(q).abs().log().sum() / 2  # every 2×2 block stands twice

    def singular_values(self, q: Point, n: int) -> Tensor:
        wide, entry = {k: q[k].double() for k in ("a", "b")}, torch.arange(n, device=q["a"].device)
        largest = self._norms(wide)
        smallest = self._determinants(wide).abs() / largest  # the difference of the two hypotenuses would cancel
        return torch.where(entry <= self.sigma(entry), largest, smallest).to(lift(q["a"]))  # one of each to a pair

    def _determinants(self, q: Point) -> Tensor:
        """c = a∘σ(a) − b∘σ(b), the determinant of each entry's 2×2 block."""
        return q["a"] * self.sigma(q["a"]) - q["b"] * self.sigma(q["b"])

    # --- the same, pair by pair and chunk by chunk: a vector is read and written a few times, not a hundred

    @abstractmethod
    def couples(self, x: Tensor, i: int, j: int) -> tuple[Tensor, Tensor]:
        """Return the first members of pairs i … j, and their partners."""

    @abstractmethod
    def lone(self, n: int) -> slice:
        """Return where the entry without a partner is, if n is odd."""

    @abstractmethod
    def put(self, x: Tensor, i: int, j: int, low: Tensor, high: Tensor) -> None:
        """Write the first members of pairs i … j, and their partners."""

    @property
    def probing(self) -> bool:
        return False

    def fitted(self, q: Point, v: Tensor, h: Tensor, how: How) -> Point:
        if v.ndim > 1 or h.ndim > 1 or lift(q["a"]) is not q["a"]:
            return super().fitted(q, v, h, how)
        return self._moved(q, v, h, how)

    def whitened(self, q: Point, v: Tensor, h: Tensor, how: How) -> Point:
        """As `fitted`, with the mean over v of what a random probe gives: that of (1, 0) and (0, 1), for each pair."""
        if h.ndim == 1 and lift(q["a"]) is q["a"]:
            return self._moved(q, None, h, how)
        entry = torch.arange(h.shape[-1], device=h.device)
        first = (entry <= self.sigma(entry)).to(lift(h))
        return super().fitted(q, math.prod(h.shape[:-1]) ** 0.5 * torch.stack((first, 1 - first)), h, how)

    def _moved(self, q: Point, v: Tensor | None, h: Tensor, how: How) -> Point:
        """Return the point after a step on one pair; without v, on the mean over all."""
        n = h.numel()
        pieces = chunks(n // 2, h)
        if len(pieces) == 1 and n % 2 == 0 and how.across is ALONE:
            return self._moved_at_once(q, v, h, how)
        middle, zero = self.lone(n), h.new_zeros(1)
        alone = [(q["a"][middle] * h[middle], (1 if v is None else v[middle]) / q["a"][middle])] if n % 2 else []

        def ends(i: int, j: int) -> tuple[list[Tensor], Pair, list[Pair]]:
            return self._ends(q, v, h, i, j)

        def norm() -> Tensor:
            found = [_symmetric(*_residual(*ends(i, j)[1:])).reshape(1) for i, j in pieces]
            found += [zero, *((y.square() - z.square()).abs() for y, z in alone)]
            return how.across.max(torch.cat(found).amax())[0]

        def bound() -> Tensor:
            ups, downs = [zero, *(y.square() for y, _ in alone)], [zero, *(z.square() for _, z in alone)]
            for i, j in pieces:
                _, y, zs = ends(i, j)
                ups.append(_largest([y]).reshape(1))
                downs.append(_largest(zs).reshape(1))
            up, down = how.across.max(torch.cat(ups).amax(), torch.cat(downs).amax())
            return up + down

        size, ell = how.rule(how.lr, q["ell"], norm, bound)
        if how.out is not None and not (goes(size) and how.across.curved):
            return q
        new = {k: torch.empty_like(q[k]) if how.out is None else how.out[k] for k in ("a", "b")} | {"ell": ell}
        for i, j in pieces:
            (a, a_, b, b_), y, zs = ends(i, j)
            e, e_, f = (t.mul_(-size) for t in _residual(y, zs))  # [[e, f], [f, e′]] times [[a, b], [b′, a′]]
            a_new = plus(torch.addcmul(a, e, a), f, b_), plus(torch.addcmul(a_, f, b), e_, a_)
            b_new = plus(torch.addcmul(b, e, b), f, a_), plus(torch.addcmul(b_, f, a), e_, b_)
            self.put(new["a"], i, j, *a_new)  # only now: the old ones may be views of it
            self.put(new["b"], i, j, *b_new)
        for one, other in alone:
            new["a"][middle] = q["a"][middle] * (1 - size * (one.square() - other.square()))
            new["b"][middle] = 0
        return new

    def _moved_at_once(self, q: Point, v: Tensor | None, h: Tensor, how: How) -> Point:
        """Do the same where a vector is so small that calls cost more than entries: all of it, pairs seen twice."""
        (a, b), (a_, b_) = (q["a"], q["b"]), (self.sigma(q["a"]), self.sigma(q["b"]))
        y, det = plus(a * h, b, self.sigma(h)), plus(a * a_, b, b_, value=-1)
        y_ = self.sigma(y)
        f, yy = y * y_, y.mul_(y)
        if v is None:
            inverse = det.reciprocal_()
            zz = plus(a_ * a_, b_, b_).mul_(inverse).mul_(inverse)
            f = plus(f, plus(a_ * b, b_, a).mul_(inverse), inverse)
        else:
            z = plus(a_ * v, b_, self.sigma(v), value=-1).div_(det)
            z_ = self.sigma(z)
            f, zz = plus(f, z, z_, value=-1), z.mul_(z)
        e = yy - zz

        def bound() -> Tensor:
            """Of traces, the sum over two partners."""
            up, down = (torch.add(*self.couples(t, 0, h.numel() // 2)).amax() for t in (yy, zz))
            return up + down

        size, ell = how.rule(how.lr, q["ell"], lambda: _symmetric(e, self.sigma(e), f), bound)
        if how.out is None:
            e, f = e * -size, f * -size
            return {"a": plus(torch.addcmul(a, e, a), f, b_), "b": plus(torch.addcmul(b, e, b), f, a_), "ell": ell}
        if not goes(size):
            return q
        back = -float(size)
        a = torch.addcmul(a, e, a, value=back, out=how.out["a"]).addcmul_(f, b_, value=back)
        b = torch.addcmul(b, e, b, value=back, out=how.out["b"]).addcmul_(f, a_, value=back)
        return {"a": a, "b": b, "ell": ell}

    def _ends(self, q: Point, v: Tensor | None, h: Tensor, i: int, j: int) -> tuple[list[Tensor], Pair, list[Pair]]:
        """Return a and b, y = Qh, and z = Q⁻ᵀv of each probe, of pairs i … j with the partners' after it."""
        (a, a_), (b, b_), (h, h_) = (self.couples(t, i, j) for t in (q["a"], q["b"], h))
        inverse = plus(a * a_, b, b_, value=-1).reciprocal_()
        y = plus(a * h, b, h_), plus(b_ * h, a_, h_)
        if v is None:
            zs = [(a_ * inverse, -b * inverse), (-b_ * inverse, a * inverse)]
        else:
            v, v_ = self.couples(v, i, j)
            z, z_ = plus(a_ * v, b_, v_, value=-1), plus(a * v_, b, v, value=-1)
            zs = [(z.mul_(inverse), z_.mul_(inverse))]
        return [a, a_, b, b_], y, zs

    def ready(self, q: Point, uses: float = math.inf) -> Point:
        """P itself, diag(p) + diag(r)·σ, where it takes no room to speak of."""
        a, n = q["a"], q["a"].numel()
        if uses == 1 or n % 2 or n > 4 * CHUNK or lift(a) is not a:
            return q
        b_, ab = self.sigma(q["b"]), a * q["b"]
        return {"p": plus(a * a, b_, b_), "r": ab + self.sigma(ab)}

    def precondition(self, q: Point, g: Tensor, out: Tensor | None = None) -> Tensor:
        if "p" in q:
            g_ = self.sigma(g)
            return plus(q["p"] * g if out is None else torch.mul(q["p"], g, out=out), q["r"], g_)
        if g.ndim > 1:
            return super().precondition(q, g)
        n = g.numel()
        pieces = chunks(n // 2, g)
        if len(pieces) == 1 and n % 2 == 0 and lift(q["a"]) is q["a"]:  # then calls cost more than entries
            x = self.sigma(q["b"] * (y := plus(q["a"] * g, q["b"], self.sigma(g))))
            return plus(x, q["a"], y) if out is None else torch.addcmul(x, q["a"], y, out=out)
        out = torch.empty_like(g) if out is None else out
        for i, j in pieces:
            (a, a_), (b, b_), (x, x_) = (self.couples(t, i, j) for t in (q["a"], q["b"], g))
            y, y_ = plus(a * x, b, x_), plus(b_ * x, a_, x_)
            self.put(out, i, j, plus(a * y, b_, y_), plus(b * y, a_, y_))
        if n % 2:
            middle = self.lone(n)
            out[middle] = q["a"][middle].square() * g[middle]
        return out

    def project(self, x: Tensor, y: Tensor) -> Point:
        return {"a": batch_sum(x * y), "b": self.off_diagonal(batch_sum(x * self.sigma(y)))}

    def compose(self, e: Point, q: Point) -> Point:
        return {
            "a": e["a"] * q["a"] + e["b"] * self.sigma(q["b"]),
            "b": e["a"] * q["b"] + e["b"] * self.sigma(q["a"]),
        }

    def norm(self, e: Point) -> Tensor:
        # Exact. The paper's max(max|a|, max|b|) may be half of it, which lets blocks turn over for μ > ½.
        return self._norms(e).amax()

    def _norms(self, e: Point) -> Tensor:
        """‖[[a, b], [b′, a′]]‖ = (|(a + a′, b − b′)| + |(a − a′, b + b′)|)/2 of each entry's 2×2 block."""
        a, b = lift(e["a"]), lift(e["b"])
        a_, b_ = self.sigma(a), self.sigma(b)
        return (torch.hypot(a + a_, b - b_) + torch.hypot(a - a_, b + b_)) / 2


@dataclass(frozen=True)
class XMat(Involution):
    """Q = diag(a) + adiag(b), σ the flip; Example 2, Algorithm 2. Any n: the centre of b is zero for odd n.

    >>> XMat().matrix({"a": torch.ones(3), "b": torch.tensor([2.0, 0.0, 3.0])}, 3)
    tensor([[1., 0., 2.],
            [0., 1., 0.],
            [3., 0., 1.]])
    """

    def sigma(self, x: Tensor) -> Tensor:
        return x.flip(-1)

    def lone(self, n: int) -> slice:
        return slice(n // 2, n // 2 + n % 2)

    def couples(self, x: Tensor, i: int, j: int) -> tuple[Tensor, Tensor]:
        return x[i:j], x[len(x) - j : len(x) - i].flip(-1)

    def put(self, x: Tensor, i: int, j: int, low: Tensor, high: Tensor) -> None:
        x[i:j] = low
        x[len(x) - j : len(x) - i] = high.flip(-1)

    def off_diagonal(self, x: Tensor) -> Tensor:
        if x.shape[-1] % 2 == 0:
            return x
        k = x.shape[-1] // 2
        return torch.cat((x[..., :k], torch.zeros_like(x[..., :1]), x[..., k + 1 :]), -1)


@dataclass(frozen=True)
class Butterfly(Involution):
    """Q = diag(a) + diag(b)·s, s the circular shift by n/2; Example 3, the block of Kaleidoscope matrices.

    >>> Butterfly().matrix({"a": torch.ones(2), "b": torch.tensor([2.0, 3.0])}, 2)
    tensor([[1., 2.],
            [3., 1.]])
    """

    def check(self, n: int) -> None:
        if n % 2:
            raise ValueError(f"Butterfly() needs an even n, got n={n}; XMat() takes any, Padded(Butterfly(), 2) pads")

    def sigma(self, x: Tensor) -> Tensor:
        return x.roll(x.shape[-1] // 2, -1)

    def lone(self, n: int) -> slice:
        return slice(n - n % 2, n)  # of a rank's part, which may be odd

    def couples(self, x: Tensor, i: int, j: int) -> tuple[Tensor, Tensor]:
        k = len(x) // 2
        return x[i:j], x[k + i : k + j]

    def put(self, x: Tensor, i: int, j: int, low: Tensor, high: Tensor) -> None:
        k = len(x) // 2
        x[i:j] = low
        x[k + i : k + j] = high


Pair = tuple[Tensor, Tensor]


def _largest(ys: list[Pair]) -> Tensor:
    """Return the largest trace of Σ yyᵀ, over the pairs of entries: the norm for one y, at most twice that for two."""
    return functools.reduce(torch.add, (plus(y * y, y_, y_) for y, y_ in ys)).amax()


def _residual(y: Pair, zs: list[Pair]) -> tuple[Tensor, Tensor, Tensor]:
    """Return the diagonal and the corner of each pair's 2×2 residual."""
    e, e_, f = y[0] * y[0], y[1] * y[1], y[0] * y[1]
    for z, z_ in zs:
        e, e_, f = plus(e, z, z, value=-1), plus(e_, z_, z_, value=-1), plus(f, z, z_, value=-1)
    return e, e_, f


def _symmetric(e: Tensor, e_: Tensor, f: Tensor) -> Tensor:
    """Return the largest norm of matrices [[e, f], [f, e′]]."""
    return ((e + e_).abs() / 2 + torch.hypot((e - e_) / 2, f)).amax()
