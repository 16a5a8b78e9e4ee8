"""Q = (I + UVᵀ)diag(d) and one pair: what `LowRank(r) @ Diagonal()` does, with U and V read three times.

Chunk by chunk, so that no n×r temporary is made, and a chunk comes from memory once for all that is done with it.
Between the three sweeps there are only r-vectors, r×r matrices and maxima: sums over the chunks.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from psgd.across import ALONE, Across
from psgd.group import Group, How, Point
from psgd.groups.diagonal import Diagonal
from psgd.groups.low_rank import LowRank, rebalanced
from psgd.linalg import chunks, goes, ordinary, product_norm, solve
from psgd.step_size import Norm


def fits(parts: tuple[Group, ...], q: Point, *vectors: Tensor) -> bool:
    """Whether this is such a product, and such a pair."""
    if [type(p) for p in parts] != [LowRank, Diagonal] or not parts[0].moves:
        return False
    return all(x.ndim == 1 for x in vectors) and ordinary(q["0"]["U"], q["0"]["V"], q["1"]["d"], *vectors)


class Rows(NamedTuple):
    """Uᵀ and Vᵀ, r rows each, and d; of all entries, or of a chunk."""

    u: Tensor
    v: Tensor
    d: Tensor

    def cut(self, i: int, j: int) -> Rows:
        return Rows(self.u[:, i:j], self.v[:, i:j], self.d[i:j])


def rows(q: Point) -> Rows:
    """Return the coordinates as rows."""
    return Rows(q["0"]["U"].mT, q["0"]["V"].mT, q["1"]["d"])


def pieces(x: Tensor) -> list[tuple[int, int]]:
    """Return the ends of chunks: longer ones than where there is less to do with each."""
    return chunks(len(x), x, 2)


def precondition(q: Point, g: Tensor, out: Tensor | None = None, across: Across = ALONE) -> Tensor:
    """P g = D(I + VUᵀ)(I + UVᵀ)D g."""
    f, out, ends = rows(q), torch.empty_like(g) if out is None else out, pieces(g)
    vg, ut = f.d.new_zeros(2, len(f.u))
    for i, j in ends:
        _, v, d = f.cut(i, j)
        vg.addmv_(v, d * g[i:j])
    (vg,) = across.sum(vg)
    for i, j in ends:
        u, _, d = f.cut(i, j)
        ut.addmv_(u, torch.addmv(d * g[i:j], u.mT, vg, out=out[i:j]))
    (ut,) = across.sum(ut)
    for i, j in ends:
        _, v, d = f.cut(i, j)
        out[i:j].addmv_(v.mT, ut).mul_(d)
    return out


class Sums(NamedTuple):
    """What two sweeps find of y = d∘h, z = v/d, a = y + U·Vᵀy and b = z − Vβ; O is U or V, whichever stays."""

    small: Tensor  # I + VᵀU
    gram: Tensor  # OᵀO
    vy: Tensor  # Vᵀy
    beta: Tensor  # (I + VᵀU)⁻ᵀUᵀz
    ua: Tensor  # Uᵀa
    vb: Tensor  # Vᵀb
    total: Tensor  # Oᵀ(a + b)
    gap: Tensor  # Oᵀ(a − b)
    squares: Tensor  # of the norms of a, b, a + b and a − b, and the product of the last two


def sums(f: Rows, v: Tensor, h: Tensor, how: How) -> Sums:
    """Sweep twice; between, Q gets its scale, if there is any."""
    coin, across = how.coin, how.across
    rank, ends, new = len(f.u), pieces(h), f.d.new_zeros
    vy, uz = new(2, rank)
    small, gram = new(rank, rank), new(rank, rank)
    for i, j in ends:
        c = f.cut(i, j)
        vy.addmv_(c.v, c.d * h[i:j])
        uz.addmv_(c.u, v[i:j] / c.d)
        small.addmm_(c.v, c.u.mT)
        stays = c.v if coin else c.u
        gram.addmm_(stays, stays.mT)
    vy, uz, small, gram = across.sum(vy, uz, small, gram)
    if how.scale is not None:
        scale = how.scale().to(vy)
        f.d.mul_(scale)
        vy, uz = vy * scale, uz / scale
    small = small + torch.eye(rank).to(small)
    beta = solve(small.mT, uz)
    pair, other, squares = new(2, rank), new(rank), new(5)
    for i, j in ends:
        c, both = f.cut(i, j), f.d.new_empty(2, j - i)
        a = torch.addmv(c.d * h[i:j], c.u.mT, vy)
        b = torch.addmv(v[i:j] / c.d, c.v.mT, beta, alpha=-1)
        total, gap = torch.add(a, b, out=both[0]), torch.sub(a, b, out=both[1])
        pair.addmm_(both, (c.v if coin else c.u).mT)
        other.addmv_(c.u if coin else c.v, a if coin else b)
        squares += torch.stack([x.dot(y) for x, y in ((a, a), (b, b), (total, total), (gap, gap), (total, gap))])
    pair, other, squares = across.sum(pair, other, squares)
    total, gap = pair
    ua, vb = (other, (total - gap) / 2) if coin else ((total + gap) / 2, other)
    return Sums(small, gram, vy, beta, ua, vb, total, gap, squares)


def balanced(q: Point, u: Tensor, v: Tensor) -> Point:
    """Even out the norms of U and V, whose squares these are, as `LowRank.balance` does."""
    rho = torch.where((u > 0) & (v > 0), (u / v).sqrt().sqrt(), torch.ones_like(u))
    return q | {"0": rebalanced(q["0"], rho)}


def norms(s: Sums) -> tuple[Norm, Norm]:
    """‖(aaᵀ − bbᵀ)OOᵀ‖ and ‖aaᵀOOᵀ‖ + ‖bbᵀOOᵀ‖, both Frobenius.

    aaᵀ − bbᵀ = ½(tδᵀ + δtᵀ) of t = a + b and δ = a − b, which does not cancel where a ≈ ±b: at the optimum.
    """
    aa, bb, tt, gg, tg = s.squares
    eps, tiny = torch.finfo(tt.dtype).eps, torch.finfo(tt.dtype).tiny

    def norm() -> Tensor:
        length = tt.sqrt().clamp_min(tiny)
        along = tg / length
        aside = (gg - along.square()).clamp_min(4 * eps * gg).sqrt()  # never below, where δ is along t
        triangle = torch.stack((length, along, torch.zeros_like(along), aside)).view(2, 2)
        return product_norm(triangle @ torch.stack((s.gap, s.total)) / 2, s.gram)

    def bound() -> Tensor:
        a, b = (s.total + s.gap) / 2, (s.total - s.gap) / 2
        return product_norm(aa.sqrt() * a[None], s.gram) + product_norm(bb.sqrt() * b[None], s.gram)

    return norm, bound


def fitted(q: Point, v: Tensor, h: Tensor, how: How) -> Point | None:
    """Move U or V, and d, by lr each; None if the squares of this pair have no place in q's dtype."""
    f, coin, out, across = rows(q), how.coin, how.out, how.across
    moving, s = "U" if coin else "V", sums(f, v, h, how)
    size, ell = how.rule(how.lr, q["0"]["ell_" + moving], *norms(s))
    if not (goes(size) and across.curved):
        return None if across is ALONE else q
    a, b = (s.total + s.gap) / 2, (s.gap - s.total) / 2  # Oᵀa and −Oᵀb
    coefficients = -size * torch.stack((a, b))
    if coin:
        coefficients = coefficients @ s.small
    # Rows of vectors that start from y or z and get a part of U and one of V: first the two that U or V moves along,
    # last x = (I + VUᵀ)a and w = (I + UVᵀ)⁻¹b, with which d moves; a = Qh, b = Q⁻ᵀv.
    none, eta = torch.zeros_like(s.vy), solve(s.small, s.vb)
    on_u = torch.stack((s.vy, none, s.vy, -eta))
    on_v = torch.stack((none if coin else s.ua, -s.beta if coin else -s.beta - b, s.ua, -s.beta))
    factor = q["0"][moving]
    moved, e = torch.empty_like(factor) if out is None else out["0"][moving], torch.empty_like(f.d)
    most = []
    for i, j in pieces(h):
        c = f.cut(i, j)
        y, z, vectors = c.d * h[i:j], v[i:j] / c.d, torch.addmm(on_u @ c.u, on_v, c.v)
        vectors[::2] += y
        vectors[1::2] += z
        torch.addmm(factor.mT[:, i:j], coefficients.mT, vectors[:2], out=moved.mT[:, i:j])
        up, down = vectors[2].mul_(y), vectors[3].mul_(z)
        torch.sub(up, down, out=e[i:j])
        most.append(torch.stack([t.abs().amax() for t in (e[i:j], up, down)]))
    gap, up, down = across.max(*torch.stack([*most, h.new_zeros(3)]).amax(0))
    size, ell_d = how.rule(how.lr, q["1"]["ell"], lambda: gap, lambda: up + down)
    d = e if out is None else out["1"]["d"]
    if not goes(size):
        d, ell_d = q["1"]["d"], q["1"]["ell"]
    else:
        for i, j in pieces(h):
            torch.addcmul(f.d[i:j], e[i:j], f.d[i:j], value=-float(size), out=d[i:j])
    low_rank = {k: q["0"][k] for k in ("U", "V", "ell_U", "ell_V")} | {moving: moved, "ell_" + moving: ell}
    return {"0": low_rank, "1": {"d": d, "ell": ell_d}}
