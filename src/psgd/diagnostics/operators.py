"""Symmetric matrices known by their products with vectors: the Hessian, P, and what P makes of the Hessian."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from psgd.diagnostics.preserve import preserved
from psgd.evaluation import rng_states, set_rng_states
from psgd.group import Group, Point, tensors
from psgd.interception import Gradients, second
from psgd.unit import real

Loss = Callable[[], Tensor]


@dataclass(frozen=True)
class Operator:
    """A symmetric n×n matrix A, called as x ↦ Ax on flat vectors, or on a batch of them along the last axis.

    >>> double = Operator(3, lambda x: 2 * x)
    >>> double(torch.ones(3))
    tensor([2., 2., 2.])
    """

    n: int
    product: Callable[[Tensor], Tensor]
    dtype: torch.dtype = torch.float32
    device: torch.device | None = None

    def __call__(self, x: Tensor) -> Tensor:
        """A x."""
        return self.product(x)

    def normal(self, generator: torch.Generator) -> Tensor:
        """Return x ~ N(0, I), drawn on the CPU so that every device sees the same."""
        wide = torch.float64 if self.dtype == torch.float64 else torch.float32
        return torch.randn(self.n, generator=generator, dtype=wide).to(self.device, self.dtype)

    def signs(self, generator: torch.Generator) -> Tensor:
        """Return x with entries ±1, of which the diagonal of A has an exact estimate."""
        return self.normal(generator).sign()


def hessian_operator(loss: Loss | Sequence[Loss], of: nn.Module | Iterable[Tensor]) -> Operator:
    """x ↦ Hx of a loss, or of the mean of several (one to a batch), evaluated anew for every product.

    Random numbers are the same each time, so that H is one matrix under dropout, too. Given the model rather than its
    parameters, buffers are put back after every product. Entries follow the order of the trainable parameters.

    >>> x = torch.tensor([1.0, 2.0], requires_grad=True)
    >>> hessian_operator(lambda: (x**3).sum(), [x])(torch.ones(2))
    tensor([ 6., 12.])
    """
    params = trainable(of)
    model = of if isinstance(of, nn.Module) else nn.Module()
    losses = [loss] if callable(loss) else list(loss)
    if not losses:
        raise ValueError("hessian_operator needs at least one loss, got none")
    sizes, start = [real(p).numel() for p in params], rng_states(params)
    dtype = torch.float32
    for p in params:
        dtype = torch.promote_types(dtype, real(p).dtype)

    def product(x: Tensor) -> Tensor:
        probes = [split(row, params) for row in x.reshape(-1, x.shape[-1])]
        total = torch.zeros(len(probes), x.shape[-1]).to(x)
        with preserved(model, params):
            set_rng_states(params, start)
            for one in losses:
                products = hessian_products(one(), params, probes)
                total += torch.stack([flat(h, sizes, x) for h in products]) / len(losses)
        return total.view(x.shape)

    return Operator(sum(sizes), product, dtype, params[0].device)


def preconditioner_operator(group: Group, q: Point, n: int) -> Operator:
    """x ↦ Px = Qᵀ(Qx).

    >>> from psgd import Diagonal
    >>> preconditioner_operator(Diagonal(), Diagonal().init(2, scale=3.0), 2)(torch.ones(2))
    tensor([9., 9.])
    """
    return Operator(n, lambda x: group.precondition(q, x), *_place(q))


def inverse_operator(group: Group, q: Point, n: int) -> Operator:
    """x ↦ P⁻¹x = Q⁻¹(Q⁻ᵀx), the model of |H| that a fitted P is.

    >>> from psgd import Diagonal
    >>> inverse_operator(Diagonal(), Diagonal().init(2, scale=2.0), 2)(torch.ones(2))
    tensor([0.2500, 0.2500])
    """
    return Operator(n, lambda x: group.solve(q, group.solve_t(q, x)), *_place(q))


def preconditioned(hessian: Operator, group: Group, q: Point) -> Operator:
    """x ↦ QHQᵀx, which has the eigenvalues of P^½HP^½ (and of PH).

    >>> from psgd import Diagonal
    >>> preconditioned(Operator(2, lambda x: 5 * x), Diagonal(), Diagonal().init(2, scale=2.0))(torch.ones(2))
    tensor([20., 20.])
    """
    dtype = hessian.dtype if next(tensors(q), None) is None else _place(q)[0]

    def product(x: Tensor) -> Tensor:
        return group.apply(q, hessian(group.apply_t(q, x).to(hessian.dtype)).to(dtype))

    return Operator(hessian.n, product, dtype, hessian.device)


def augmented(operator: Operator, n: int) -> Operator:
    """A ⊕ I of size n: the Hessian of the paper's padded cost f(θ) + ½ϑᵀϑ.

    >>> augmented(Operator(2, lambda x: 5 * x), 3)(torch.ones(3))
    tensor([5., 5., 1.])
    """
    if n == operator.n:
        return operator

    def product(x: Tensor) -> Tensor:
        return torch.cat((operator(x[..., : operator.n]), x[..., operator.n :]), -1)

    return Operator(n, product, operator.dtype, operator.device)


def _place(q: Point) -> tuple[torch.dtype, torch.device | None]:
    like = next(tensors(q), None)
    return (torch.float32, None) if like is None else (torch.promote_types(like.dtype, torch.float32), like.device)


# --- models as flat vectors


def trainable(of: nn.Module | Iterable[Tensor]) -> list[Tensor]:
    """Return the parameters that require a gradient, or say that there are none."""
    given = list(of.parameters() if isinstance(of, nn.Module) else of)
    found = [p for p in given if p.requires_grad and p.numel()]
    if not found:
        raise ValueError(f"curvature needs parameters that require gradients, got {len(given)} without")
    return found


def hessian_products(loss: Any, params: Sequence[Tensor], probes: Sequence[Sequence[Tensor]]) -> list[Gradients]:
    """H v for each probe v, on one gradient; or an error that says why this loss has no curvature to look at."""
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        given = f"shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
        raise ValueError(f"the loss needs to be a tensor with one element, got {given}")
    if not loss.isfinite():
        raise ValueError(f"the loss needs to be finite, got {loss.item()}")
    if not loss.requires_grad:
        raise ValueError("the loss needs a graph to the parameters, got none (is it detached, or under no_grad?)")
    g = torch.autograd.grad(loss, params, create_graph=True, allow_unused=True)
    if all(t is None for t in g):
        raise ValueError("the loss needs to depend on the parameters, got a graph that reaches none of them")
    products = [second(g, params, v) for v in probes]
    if not all(t.isfinite().all() for h in products for t in h if t is not None):
        raise ValueError("Hessian products need to be finite, got one that is not")
    return products


def flat(parts: Sequence[Tensor | None], sizes: Sequence[int], like: Tensor) -> Tensor:
    """Concatenate one tensor for each parameter; None counts as zero."""
    pairs = zip(parts, sizes, strict=True)
    return torch.cat([like.new_zeros(k) if t is None else real(t).reshape(-1).to(like) for t, k in pairs])


def split(x: Tensor, params: Sequence[Tensor]) -> list[Tensor]:
    """Cut a flat vector into tensors like the parameters."""
    pieces = x.split([real(p).numel() for p in params])
    shaped = [piece.to(real(p)).view(real(p).shape) for piece, p in zip(pieces, params, strict=True)]
    return [torch.view_as_complex(t) if p.is_complex() else t for t, p in zip(shaped, params, strict=True)]
