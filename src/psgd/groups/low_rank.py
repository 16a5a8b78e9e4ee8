"""Low-rank corrections of the identity: two twin groups that take turns."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from psgd.group import Group, Point, Residual, Where
from psgd.linalg import lift, product_norm, rows, solve, subtract_product
from psgd.step_size import StepSize


@dataclass(frozen=True)
class LowRank(Group):
    """Q = I + U Vᵀ, U and V of shape (n, r); Claims 3.2 and 3.3.

    With V fixed it is the group A_V(U), with U fixed the group A_U(V): a step moves on one of them, never on both.
    Its scale is that of I, so it is used in a product, as in lra(r) = LowRank(r) @ Diagonal().

    >>> u, v = torch.tensor([[1.0], [0.0]]), torch.tensor([[0.0], [3.0]])
    >>> LowRank(1).matrix({"U": u, "V": v}, 2)
    tensor([[1., 3.],
            [0., 1.]])
    """

    rank: int

    def __post_init__(self) -> None:
        if self.rank < 0:
            raise ValueError(f"LowRank needs rank >= 0, got rank={self.rank}")

    @property
    def moves(self) -> bool:
        return self.rank > 0

    @property
    def scalable(self) -> bool:
        return False

    @property
    def orthogonal(self) -> bool:
        return self.rank == 0

    def scaled(self, q: Point, s: float | Tensor) -> Point:
        raise ValueError(f"{self} = I + UVᵀ takes no scale, got {s}; compose it with Scalar() or Diagonal()")

    def origin(self, n: int, where: Where) -> Point:
        # Neither may start at zero: U = 0 does not move on A_U(V), nor V = 0 on A_V(U). The 10 keeps ‖UVᵀ‖ ≪ 1.
        size = (n * (self.rank + 10)) ** -0.5

        def normal() -> Tensor:
            t = (size * where.normal(n, self.rank)).to(**where.at)
            return t.mT.contiguous().mT  # r rows of length n: that is fast to go through

        return {"U": normal(), "V": normal(), "ell_U": where.zero(), "ell_V": where.zero()}

    def balance(self, q: Point) -> Point:
        """(U, V) → (U/ρ, ρV), so that ‖U‖ = ‖V‖: each factor's gradient is multiplied by the other."""
        u, v = torch.linalg.vector_norm(lift(q["U"])), torch.linalg.vector_norm(lift(q["V"]))
        rho = torch.where((u > 0) & (v > 0), (u / v).sqrt(), torch.ones_like(u))
        return rebalanced(q, rho)

    def prepared(self, q: Point) -> Point:
        return q | {"small": self._small(q)}

    def apply(self, q: Point, x: Tensor) -> Tensor:
        return x + (x @ q["V"]) @ q["U"].mT

    def apply_t(self, q: Point, x: Tensor) -> Tensor:
        return x + (x @ q["U"]) @ q["V"].mT

    def solve(self, q: Point, x: Tensor) -> Tensor:
        return x - solve(self._small(q), x @ q["V"]) @ q["U"].mT  # Woodbury

    def solve_t(self, q: Point, x: Tensor) -> Tensor:
        return x - solve(self._small(q).mT, x @ q["U"]) @ q["V"].mT

    def logabsdet(self, q: Point, n: int) -> Tensor:
        return torch.linalg.slogdet(self._small(q)).logabsdet

    def singular_values(self, q: Point, n: int) -> Tensor:
        u, v = lift(q["U"]), lift(q["V"])
        z, _ = torch.linalg.qr(torch.cat((u, v), -1))  # Q = I on the complement of these 2r columns
        inside = torch.linalg.svdvals((z.mT @ u) @ (v.mT @ z) + torch.eye(z.shape[-1]).to(z))
        return torch.cat((inside, torch.ones(n - z.shape[-1]).to(z)))

    def _small(self, q: Point) -> Tensor:
        """I + VᵀU, whose determinant is that of Q."""
        if "small" in q:
            return q["small"]
        small = lift(q["V"]).mT @ lift(q["U"])
        return small + torch.eye(self.rank, dtype=small.dtype, device=small.device)

    def step(self, q: Point, r: Residual, lr: float | Tensor, coin: bool, rule: StepSize) -> Point:
        """Move on A_V(U) or A_U(V). The step has the rank of the residual, A·B, and is never formed."""
        u, v = q["U"], q["V"]
        if coin:  # E = G Vᵀ, G = (x yᵀ − z wᵀ)V, and E·Q = G (I + VᵀU) Vᵀ
            left, right, stays, ell = (r.x, r.z), (r.y @ v, -(r.w @ v)), v, q["ell_U"]
        else:  # E = U Gᵀ, G = (x yᵀ − z wᵀ)ᵀU, and E·Q = U ((I + VUᵀ)G)ᵀ
            left, right, stays, ell = (r.y, r.w), (r.x @ u, -(r.z @ u)), u, q["ell_V"]
        a, b = torch.cat([rows(t) for t in left]), lift(torch.cat([rows(t) for t in right]))
        pairs, gram = len(a) // 2, lift(stays).mT @ lift(stays)
        # Orthogonal columns for A's: ‖ABOᵀ‖ = ‖RBOᵀ‖, without the cancellation of AᵀA.
        triangle = torch.linalg.qr(lift(a).mT).R  # mode="r" fails under vmap
        plus, minus = triangle[:, :pairs] @ b[:pairs], triangle[:, pairs:] @ b[pairs:]
        bound = lambda: product_norm(plus, gram) + product_norm(minus, gram)  # noqa: E731
        size, ell = rule(lr, ell, lambda: product_norm(plus + minus, gram), bound)
        if coin:
            new = {"U": subtract_product(u, size, a.mT, b @ self._small(q)), "ell_U": ell}
        else:
            new = {"V": subtract_product(v, size, self.apply_t(q, a).mT, b), "ell_V": ell}
        return {key: q[key] for key in ("U", "V", "ell_U", "ell_V")} | new


def rebalanced(q: Point, rho: Tensor) -> Point:
    """(U, V) → (U/ρ, ρV), and what remembers their sizes with them."""
    return {
        "U": (q["U"] / rho).to(q["U"].dtype),
        "V": (q["V"] * rho).to(q["V"].dtype),
        "ell_U": q["ell_U"] * rho.square(),  # ‖(xyᵀ − zwᵀ)VVᵀ‖ grows with V
        "ell_V": q["ell_V"] / rho.square(),
    }
