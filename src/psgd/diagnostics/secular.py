"""Eigenvalues of a diagonal matrix plus one of low rank: any of them, exactly, at any n.

P of an LRA preconditioner is D² + W C Wᵀ, W = D[V U] with 2r columns. Sylvester's law of inertia, used on a bordered
matrix, counts its eigenvalues below λ by those of a 2r×2r matrix, and bisection finds the k-th.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from psgd.group import Group, Point
from psgd.groups.diagonal import Diagonal, Scalar
from psgd.groups.low_rank import LowRank
from psgd.groups.product import Product

_ROWS = 1 << 16  # of W in double precision at a time


@dataclass(frozen=True)
class DiagonalPlusLowRank:
    """D² + D(VUᵀ + UVᵀ + V UᵀU Vᵀ)D = D(I + VUᵀ)(I + UVᵀ)D.

    >>> u = torch.tensor([[1.0], [0.0]])
    >>> a = DiagonalPlusLowRank(torch.ones(2), u, u)  # diag(4, 1)
    >>> a.count(2.0), round(a.eigenvalue(1), 4)
    (1, 4.0)
    """

    d: Tensor
    u: Tensor
    v: Tensor

    @property
    def n(self) -> int:
        """The size."""
        return len(self.d)

    @cached_property
    def _w(self) -> Tensor:
        return self.d[:, None] * torch.cat((self.v, self.u), -1)

    @cached_property
    def _inverse_of_c(self) -> Tensor:
        gram = self.u.double().mT @ self.u.double()
        eye = torch.eye(len(gram)).to(gram)
        return torch.cat((torch.cat((torch.zeros_like(eye), eye), 1), torch.cat((eye, -gram), 1)))

    def count(self, level: float) -> int:
        """How many eigenvalues are below λ: #{d² < λ} + n₊(C⁻¹ + Wᵀ(D² − λ)⁻¹W) − r, n₊ counting positive ones."""
        below, small = 0, self._inverse_of_c.clone()
        for d, w in zip(self.d.split(_ROWS), self._w.split(_ROWS), strict=True):
            gap, w = d.double().square() - level, w.double()
            nearest = torch.full_like(gap, 1e-10 * level)  # nearer to a pole, the other terms would be rounded away
            gap = torch.where(gap < 0, gap.minimum(-nearest), gap.maximum(nearest))
            below += int((gap < 0).sum())
            small += w.mT @ (w / gap[:, None])
        rank = self.u.shape[-1]
        return below + int((torch.linalg.eigvalsh(small) > 0).sum()) - rank if rank else below

    def eigenvalue(self, k: int, tol: float = 1e-6) -> float:
        """Return the k-th smallest eigenvalue, k = 0, …, n − 1, to a relative tolerance."""
        squares = self.d.double().square()
        low = high = float(squares.kthvalue(k + 1).values)
        while self.count(low) > k:
            low /= 4
        while self.count(high) <= k:
            high *= 4
        while high > low * (1 + tol):
            middle = (low * high) ** 0.5
            low, high = (low, middle) if self.count(middle) > k else (middle, high)
        return (low * high) ** 0.5


def diagonal_plus_low_rank(group: Group, q: Point, n: int) -> DiagonalPlusLowRank | None:
    """Return QᵀQ, or QQᵀ with the same eigenvalues, in this form, if Q = (I + UVᵀ)D or D(I + UVᵀ).

    >>> from psgd import lra
    >>> diagonal_plus_low_rank(lra(2), lra(2).init(5), 5).n
    5
    """
    if not isinstance(group, Product) or len(group.parts) != 2:
        return None
    for i, j in (0, 1), (1, 0):
        if isinstance(group.parts[i], LowRank) and isinstance(group.parts[j], (Diagonal, Scalar)):
            d = group.parts[j].singular_values(q[str(j)], n)
            assert d is not None
            factors = (q[str(i)]["U"], q[str(i)]["V"])
            return DiagonalPlusLowRank(d, *(factors if i == 0 else factors[::-1]))
    return None
