"""The protocol: a Lie group, a point Q on it, and one step that fits P = QᵀQ to a pair (v, h).

The criterion is c(P) = hᵀPh + vᵀP⁻¹v. With a = Qh and b = Q⁻ᵀv its gradient in left coordinates dQ = E·Q
is the residual aaᵀ − bbᵀ. A group is structure only (a frozen dataclass); a point is data only (a dict of tensors).
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from psgd.across import ALONE, Across
from psgd.linalg import lift
from psgd.points import Point as Point
from psgd.probes import Runs, normal
from psgd.step_size import Smoothed, StepSize

if TYPE_CHECKING:
    from psgd.groups.product import Product

DENSE_LIMIT = 4096
"""The largest n for which a matrix is written out to take it apart."""


class Where(NamedTuple):
    """How to make the tensors of a new point."""

    generator: torch.Generator | None
    dtype: torch.dtype
    device: torch.device | None
    runs: Runs | None = None
    """Which of the n rows are wanted, if another rank has the others."""

    @property
    def at(self) -> dict[str, Any]:
        """The keywords of a torch constructor."""
        return {"dtype": self.dtype, "device": self.device}

    def count(self, n: int) -> int:
        """How many of n rows are wanted."""
        return n if self.runs is None else sum(stop - start for start, stop in self.runs)

    def normal(self, n: int, width: int) -> Tensor:
        """Those of n rows of normal numbers that are wanted, in at least float32."""
        return normal(n, self.generator, width, dtype=self.zero().dtype, device=self.device, runs=self.runs)

    def zero(self) -> Tensor:
        """A scalar 0 in at least float32, the start of L in `Smoothed`."""
        return torch.zeros((), dtype=torch.promote_types(self.dtype, torch.float32), device=self.device)


class Residual(NamedTuple):
    """What a factor A of Q = L·A·R sees of a pair: the gradient x yᵀ − z wᵀ of c in dA = E·A, never formed.

    x = Lᵀa, y = A h, z = A⁻ᵀ v, w = L⁻¹b, where h and v are R h and R⁻ᵀ v: the pair as it enters the factor.
    """

    h: Tensor
    v: Tensor
    x: Tensor
    y: Tensor
    z: Tensor
    w: Tensor

    def map(self, f: Callable[[Tensor], Tensor]) -> Residual:
        """Apply f to each of the six vectors."""
        return Residual(*(f(t) for t in self))


class How(NamedTuple):
    """How a step is made: its rate, which twin group of a LowRank factor moves, the rule of its size.

    Tensors of `out` may be used for the result. `across` sums over the ranks, where each has a part of the vectors;
    `scale`, of use there alone, is what Q is multiplied by first: known only after the first exchange.
    """

    lr: float | Tensor
    coin: bool
    rule: StepSize
    out: Point | None = None
    across: Across = ALONE
    scale: Callable[[], Tensor] | None = None


class Group(ABC):
    """A Lie group of n×n matrices, or a product of some. Vectors lie on the last axis; other axes are batch.

    >>> import torch
    >>> from psgd import Diagonal
    >>> group, h_diag = Diagonal(), torch.tensor([1.0, 4.0, 25.0])
    >>> q = group.init(3)
    >>> for _ in range(200):
    ...     v = torch.randn(3)
    ...     q = group.fit(q, v, h_diag * v, lr=0.5)
    >>> group.precondition(q, h_diag * torch.ones(3)).round(decimals=2)  # P H 1 = 1
    tensor([1., 1., 1.])
    """

    # --- structure

    @property
    @abstractmethod
    def moves(self) -> bool:
        """Whether a step changes the point (constants do not move)."""

    @property
    @abstractmethod
    def scalable(self) -> bool:
        """Whether s·Q is in the group for every Q in it and s > 0."""

    @property
    def probing(self) -> bool:
        """Whether `whiten` looks at its probe."""
        return True

    @property
    def noisy(self) -> bool:
        """Whether `whiten` takes its probe as noise in h, which entries without a gradient need, too."""
        return False

    @property
    def orthogonal(self) -> bool:
        """Whether every Q in it is orthogonal, so that it leaves the singular values of a product alone."""
        return False

    @property
    def stacks(self) -> bool:
        """Whether `fitted`, `whitened`, `ready` and `precondition` take stacks, along a leading axis of all tensors."""
        return False

    def in_pieces(self, q: Point, *vectors: Tensor) -> bool:
        """Whether it goes through these in pieces that stay in the cache, which is quicker than if it were compiled."""
        del q, vectors  # most do not
        return False

    def check(self, n: int) -> None:
        """Raise a ValueError that says what fits, if this group has no n×n matrices."""
        del n  # most have them for every n

    # --- points

    @abstractmethod
    def origin(self, n: int, where: Where) -> Point:
        """Return the identity, or a point near it where the identity itself would not move."""

    def init(
        self,
        n: int,
        *,
        scale: float | Tensor = 1.0,
        generator: torch.Generator | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | None = None,
    ) -> Point:
        """Return the starting point Q = scale·I (times the constant factors of an expression)."""
        if n < 1:
            raise ValueError(f"{self} needs n >= 1, got n={n}")
        if isinstance(scale, (int, float)) and not scale > 0:
            raise ValueError(f"init needs scale > 0, got scale={scale}")
        self.check(n)
        q = self.origin(n, Where(generator, dtype or torch.get_default_dtype(), device))
        return q if isinstance(scale, (int, float)) and scale == 1 else self.scaled(q, scale)

    @abstractmethod
    def scaled(self, q: Point, s: float | Tensor) -> Point:
        """Return the coordinates of s·Q."""

    def balance(self, q: Point) -> Point:
        """Return other coordinates of the same Q, with redundant scales between its factors evened out."""
        return q

    # --- actions

    @abstractmethod
    def apply(self, q: Point, x: Tensor) -> Tensor:
        """Q x."""

    @abstractmethod
    def apply_t(self, q: Point, x: Tensor) -> Tensor:
        """Qᵀ x."""

    @abstractmethod
    def solve(self, q: Point, x: Tensor) -> Tensor:
        """Q⁻¹ x."""

    @abstractmethod
    def solve_t(self, q: Point, x: Tensor) -> Tensor:
        """Q⁻ᵀ x."""

    @abstractmethod
    def logabsdet(self, q: Point, n: int) -> Tensor:
        """log |det Q|, of the n×n matrix."""

    def singular_values(self, q: Point, n: int) -> Tensor | None:
        """Return the n singular values of Q in no order; None if they have no closed form and n is large."""
        return torch.linalg.svdvals(lift(self.matrix(q, n))) if n <= DENSE_LIMIT else None

    # --- fitting

    def prepared(self, q: Point) -> Point:
        """Return q, perhaps with what several actions would each compute anew; `step` drops it again."""
        return q

    @abstractmethod
    def step(self, q: Point, r: Residual, lr: float | Tensor, coin: bool, rule: StepSize) -> Point:
        """Move Q against the residual, by at most lr relative to Q. Pure: q is not changed."""

    def fit(
        self,
        q: Point,
        v: Tensor,
        h: Tensor,
        *,
        lr: float | Tensor = 0.1,
        coin: bool = True,
        rule: StepSize = Smoothed(),  # noqa: B008 - frozen
        out: Point | None = None,
    ) -> Point:
        """One step on c(P) from the pair (v, h); a batch of pairs counts as their sum.

        `coin` says which of its twin groups a LowRank factor moves on: toss it anew for every step. Tensors of `out`,
        which may be q, can be used for the result: that saves fresh memory. A step that is not finite writes none.
        """
        return self.fitted(q, v, h, How(lr, coin, rule, out))

    def whiten(
        self,
        q: Point,
        v: Tensor,
        h: Tensor,
        *,
        lr: float | Tensor = 0.1,
        coin: bool = True,
        rule: StepSize = Smoothed(),  # noqa: B008 - frozen
        out: Point | None = None,
    ) -> Point:
        """One step towards P = E[h hᵀ]^(−½): as `fit`, with a probe v ~ N(0, I) that is independent of h."""
        return self.whitened(q, v, h, How(lr, coin, rule, out))

    def fitted(self, q: Point, v: Tensor, h: Tensor, how: How) -> Point:
        """Do what `fit` says; what groups with a form of their own override."""
        q = self.prepared(q)
        a, b = self.apply(q, h), self.solve_t(q, v)
        return self.step(q, Residual(h, v, a, a, b, b), how.lr, how.coin, how.rule)

    def whitened(self, q: Point, v: Tensor, h: Tensor, how: How) -> Point:
        """Do what `whiten` says; what groups that need no probe override."""
        return self.fitted(q, v, h, how)

    def ready(self, q: Point, uses: float = math.inf) -> Point:
        """Return q with what so many calls of `precondition` would each compute anew; for one, so does a step."""
        del uses
        return q

    def precondition(self, q: Point, g: Tensor, out: Tensor | None = None) -> Tensor:
        """P g = Qᵀ(Q g). `out`, which may be g, can be used for the result: that saves fresh memory."""
        del out
        return self.apply_t(q, self.apply(q, g))

    def criterion(self, q: Point, v: Tensor, h: Tensor) -> Tensor:
        """c(P) = hᵀPh + vᵀP⁻¹v, for each pair of the batch."""
        return self.apply(q, h).square().sum(-1) + self.solve_t(q, v).square().sum(-1)

    def matrix(self, q: Point, n: int) -> Tensor:
        """Q as an n×n tensor, to look at and to test with."""
        like = next(tensors(q), None)
        dtype, device = (None, None) if like is None else (like.dtype, like.device)
        return self.apply(q, torch.eye(n, dtype=dtype, device=device)).mT

    def __matmul__(self, other: Group) -> Product:
        """Return the product Q = A·B, each factor moving on its own group."""
        from psgd.groups.product import Product

        return Product((self, other))


def tensors(q: Point) -> Any:
    """Iterate over the tensors of a point, depth first."""
    for leaf in q.values():
        if isinstance(leaf, dict):
            yield from tensors(leaf)
        else:
            yield leaf
