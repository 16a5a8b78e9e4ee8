"""Kronecker preconditioning for whole models: which factor each axis of each tensor gets."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase

import torch
from torch import nn

from psgd.curvature import Curvature, whiten_momentum
from psgd.group import Group
from psgd.groups.constant import Identity
from psgd.groups.diagonal import Diagonal
from psgd.groups.inverse_free import Direct, InverseFree, Motion, check_products
from psgd.groups.kronecker import Kronecker
from psgd.groups.triangular import Triangular
from psgd.schedule import Decaying

Shape = tuple[int, ...]
Override = Callable[[Shape], Group]

_KERNEL = 16
"""The longest axis of a convolution's kernel; longer ones are of stacked matrices."""


@dataclass(frozen=True)
class Kron:
    """A rule from a tensor's shape, and its name, to Q = A₁ ⊗ A₂ ⊗ …; made by `kron`."""

    factor: Triangular | Motion = Direct()  # noqa: RUF009 - frozen
    max_size: int = 8192
    max_skew: float = 4.0
    memory: float = 4.5
    damping: float = 1e-3
    layers: tuple[tuple[str, str], ...] = ()
    overrides: tuple[tuple[str, Override], ...] = ()
    products: torch.dtype | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.factor, (Triangular, Motion)):
            wanted = "Direct(), Quadratic(), Procrustes() or Triangular()"
            raise ValueError(f"kron needs a factor {wanted}, got {self.factor!r}")
        check_products(self.products, self.factor)
        for key in ("max_size", "max_skew", "memory", "damping"):
            if not getattr(self, key) >= 0:
                raise ValueError(f"kron needs {key} >= 0, got {getattr(self, key)}")

    def __call__(self, shape: Shape, name: str = "") -> Group:
        """Return the group of a tensor."""
        for pattern, override in self.overrides:
            if fnmatchcase(name, pattern):
                return override(tuple(shape))
        shape = tuple(shape) or (1,)
        if len(shape) > 3 and max(shape[2:]) <= _KERNEL:  # one axis: its own are too short for a product each
            shape = (*shape[:2], math.prod(shape[2:]))
        dense = self.dense(shape)
        matrix = self.factor if isinstance(self.factor, Triangular) else self.factor.part
        parts = tuple(matrix if i in dense else Diagonal() if n > 1 else Identity() for i, n in enumerate(shape))
        if max(shape) == 1:
            parts = (Diagonal(), *parts[1:])
        if isinstance(self.factor, Triangular):
            return Kronecker(shape, parts)
        return InverseFree(shape, parts, self.factor, self.damping, self.products)

    def dense(self, shape: Shape) -> set[int]:
        """Return the axes that get a matrix: those within the caps, the smallest first, while memory lasts.

        None of a vector does: what its entries share is not seen in one gradient.

        >>> kron().dense((512, 128)), kron().dense((128, 128)), kron().dense((50257, 768)), kron().dense((768,))
        ({0, 1}, {0, 1}, {1}, set())
        """
        count, found, used = math.prod(shape), set[int](), 0
        if max(shape) == count:
            return found
        for i in sorted(range(len(shape)), key=lambda i: shape[i]):
            size = shape[i] ** 2
            fits = (
                1 < shape[i] <= self.max_size and size <= self.max_skew * count and used + size <= self.memory * count
            )
            if fits:
                found.add(i)
                used += size
        return found


def kron(
    factor: Triangular | Motion = Direct(),  # noqa: B008 - frozen
    *,
    max_size: int = 8192,
    max_skew: float = 4.0,
    memory: float = 4.5,
    damping: float = 1e-3,
    products: torch.dtype | None = None,
    affine: nn.Module | None = None,
    overrides: Mapping[str, Override] | None = None,
) -> Kron:
    """Kronecker preconditioning of every tensor: a matrix along each axis that is not too long, else a diagonal.

    Args:
        factor: how a matrix moves: `Direct()` moves P, `Quadratic()` and `Procrustes()` a symmetric Q, by products
            alone, the last two in bfloat16, too; `Triangular()` is the paper's, with solves.
        max_size: no matrix along an axis longer than this.
        max_skew: no matrix with more than max_skew times the entries of the tensor.
        memory: the matrices of a tensor have at most this many times its entries together.
        damping: noise in every entry of a gradient, relative to their root mean square (not for `Triangular`): where
            there is no gradient at all, P would grow for ever without.
        products: in which dtype matrices are multiplied, all else being done in their own, as in
            `kron(psgd.Quadratic(), products=torch.bfloat16)`, where that is much faster; for what moves Q by products.
        affine: a module whose layers' weights and biases are preconditioned together, as one matrix [W b].
            The optimizer then needs names: `PSGD(model.named_parameters(), …)`.
        overrides: from patterns of names (as of files) to a rule from shape to group, the first that fits.

    >>> import psgd
    >>> kron()((3, 4))
    InverseFree(shape=(3, 4), parts=(Positive(), Positive()), motion=Direct(), damping=0.001, products=None)
    >>> kron(psgd.Triangular())((4, 4))
    Kronecker(shape=(4, 4), parts=(Triangular(), Triangular()))
    >>> kron(overrides={"*.bias": lambda shape: psgd.XMat()})((4,), "head.bias")
    XMat()
    """
    layers = () if affine is None else affine_layers(affine)
    return Kron(factor, max_size, max_skew, memory, damping, layers, tuple((overrides or {}).items()), products)


def affine_layers(model: nn.Module) -> tuple[tuple[str, str], ...]:
    """Return the names of the weight and the bias of every layer that maps x to Wx + b.

    >>> affine_layers(nn.Sequential(nn.Linear(3, 2), nn.ReLU(), nn.Linear(2, 1, bias=False)))
    (('0.weight', '0.bias'),)
    """
    kinds = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
    found = [name for name, m in model.named_modules() if isinstance(m, kinds) and m.bias is not None]
    return tuple((f"{name}.weight".lstrip("."), f"{name}.bias".lstrip(".")) for name in found)


def like_adamw(
    lr: float = 1e-3,
    betas: tuple[float, float] = (0.9, 0.999),
    weight_decay: float = 1e-2,
    curvature: Curvature = whiten_momentum,
) -> dict[str, object]:
    """Return options of PSGD whose steps have the size of AdamW's with this setting, where noise dominates gradients.

    Then AdamW's step is lr·√((1 − β₁)/(1 + β₁)) in each entry: a mean of about (1 + β₁)/(1 − β₁) gradients over the
    size of one. Ours is lr times the size of the average m over that of one gradient where P whitens gradients, and lr
    where it whitens m itself. The decay lr·λ of a step stays the same. A fifth of what is preconditioned is the newest
    gradient, the rest the average.

    Factors follow quickly, and in each of the first hundred steps: at PSGD's own μ = 0.1 they are still on their way
    after hundreds of updates. No entry moves by more than ten times the rate: a row of an embedding that was never seen
    before is small beside the others, for which P was made.

    >>> like_adamw(3e-3, weight_decay=0.1)["lr"]
    0.000688...
    """
    beta, fresh = betas[0], 0.2
    theirs = math.sqrt((1 - beta) / (1 + beta))
    newest, rest = fresh + (1 - fresh) * (1 - beta), (1 - fresh) * beta * theirs  # of m, in units of a gradient
    ratio = theirs if curvature == whiten_momentum else theirs / math.hypot(newest, rest)
    return {
        "lr": ratio * lr,
        "momentum": beta,
        "fresh": fresh,
        "weight_decay": weight_decay / ratio,
        "curvature": curvature,
        "precond_lr": 0.9,
        "precond_prob": Decaying(start=100, floor=0.05),
        "max_value": 10.0,
    }
