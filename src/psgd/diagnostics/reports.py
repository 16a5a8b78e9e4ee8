"""What a preconditioner says of the curvature, alone and beside the true Hessian: reports are flat dicts of floats."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from psgd.diagnostics.operators import Operator, augmented, inverse_operator, preconditioned, preconditioner_operator
from psgd.diagnostics.secular import diagonal_plus_low_rank
from psgd.diagnostics.spectral import Ritz, lanczos, largest_modulus, mean, top_eigenvectors
from psgd.group import Group, Point
from psgd.groups.diagonal import Diagonal, Scalar
from psgd.groups.low_rank import LowRank
from psgd.groups.padded import Padded
from psgd.groups.product import Product
from psgd.linalg import lift
from psgd.probes import generator

Report = dict[str, float]

_SMALL = 256  # up to here a dense decomposition is quicker than anything clever


# --- P alone


def eigenvalues(group: Group, q: Point, n: int) -> Tensor | None:
    """Return all eigenvalues of P, ascending; None if they have no closed form and n is large.

    >>> from psgd import Diagonal
    >>> eigenvalues(Diagonal(), {"d": torch.tensor([3.0, 1.0])}, 2)
    tensor([1., 9.], dtype=torch.float64)
    """
    values = group.singular_values(q, n)
    return None if values is None else values.double().square().sort().values


class Tails(NamedTuple):
    """The ends of a spectrum, each from the outside in."""

    smallest: Tensor
    largest: Tensor


def tails(group: Group, q: Point, n: int, k: int = 1, *, tol: float = 1e-3, steps: int = 100, seed: int = 0) -> Tails:
    """Return the k smallest and the k largest eigenvalues of P, each to a relative tolerance.

    In closed form where the group has one; for LRA from 2r×2r matrices; by Lanczos on P and on P⁻¹ otherwise.

    >>> from psgd import lra
    >>> low, high = tails(lra(2), lra(2).init(1000, generator=generator(0)), 1000)
    >>> bool(0.9 < low < 1 < high < 1.1)
    True
    """
    k = min(k, n)
    structured = diagonal_plus_low_rank(group, q, n) if n > _SMALL else None
    if structured is not None:
        ends = [[structured.eigenvalue(i, tol) for i in which] for which in (range(k), range(n - 1, n - 1 - k, -1))]
        return Tails(*(torch.tensor(end, dtype=torch.float64) for end in ends))
    values = eigenvalues(group, q, n)
    if values is not None:
        return Tails(values[:k], values.flip(0)[:k])
    operators = inverse_operator(group, q, n), preconditioner_operator(group, q, n)
    low, high = (top_eigenvectors(a, k, tol=tol, steps=steps, seed=seed).values.flip(0)[:k] for a in operators)
    return Tails(1 / low, high)


def effective_rank(group: Group, q: Point, n: int, *, probes: int = 30, seed: int = 0) -> float:
    """(tr P)²/tr P²: n if all eigenvalues are equal, 1 if one dominates. By random signs where they are unknown.

    >>> from psgd import Diagonal
    >>> effective_rank(Diagonal(), {"d": torch.tensor([1.0, 1.0, 0.0])}, 3)
    2.0
    """
    values = eigenvalues(group, q, n) if n <= _SMALL or diagonal_plus_low_rank(group, q, n) is None else None
    if values is not None:
        return float(values.sum() ** 2 / values.square().sum())
    operator = preconditioner_operator(group, q, n)
    signs = torch.stack([operator.signs(generator(seed, i)) for i in range(probes)])
    images = operator(signs).double()
    return float((signs * images).sum(-1).mean() ** 2 / images.square().sum(-1).mean())


def preconditioner_report(group: Group | Padded, q: Point, n: int, *, tol: float = 1e-3) -> Report:
    """Describe P = QᵀQ: log determinants, extreme eigenvalues, condition number, effective rank.

    A `Padded` group is described on the padded problem, whose padding has the Hessian I.

    >>> from psgd import Diagonal
    >>> report = preconditioner_report(Diagonal(), {"d": torch.tensor([1.0, 2.0])}, 2)
    >>> report["largest_p"], report["condition_p"], round(report["log_det_p"], 3)
    (4.0, 4.0, 1.386)
    """
    (group, n), q = unpadded(group, n), lifted(q)
    log_det = float(group.logabsdet(q, n))
    smallest, largest = (float(end) for end in tails(group, q, n, tol=tol))
    return {
        "log_det_q": log_det,
        "log_det_p": 2 * log_det,
        "smallest_p": smallest,
        "largest_p": largest,
        "condition_p": largest / smallest,
        "effective_rank_p": effective_rank(group, q, n),
    }


def fit_residual(group: Group, q: Point, v: Tensor, h: Tensor) -> Tensor:
    """‖aaᵀ − bbᵀ‖/‖aaᵀ + bbᵀ‖ of each pair, a = Qh, b = Q⁻ᵀv: 0 where Ph = ±v, 1 where P knows nothing of the pair.

    (Under whitening v and h = g are independent, and it is near 1 whatever the fit.)

    >>> from psgd import Diagonal
    >>> fit_residual(Diagonal(), Diagonal().init(2, scale=0.5), torch.ones(2), 4 * torch.ones(2))
    tensor(0.)
    """
    a, b = group.apply(q, h).double(), group.solve_t(q, v).double()
    aa, bb, ab = (a * a).sum(-1), (b * b).sum(-1), (a * b).sum(-1)
    minus, plus = aa**2 + bb**2 - 2 * ab**2, aa**2 + bb**2 + 2 * ab**2
    return (minus.clamp_min(0) / plus).sqrt().to(h.dtype)


# --- beside the Hessian


def hessian_report(
    hessian: Operator, group: Group | Padded, q: Point, *, steps: int = 100, probes: int = 30, seed: int = 0
) -> Report:
    """Compare P with the true Hessian, by products alone: about 2·steps + probes of them.

    Extreme eigenvalues and spreads max|λ|/min|λ| of H and of P^½HP^½, each with the largest residual of its two ends;
    a spread is NaN where Lanczos did not resolve the smallest |λ|. Then the trace, and on the same fresh pairs the
    criterion c(P), the fit residual, and the root mean square of PH − I, beside the best that any P = c·I could do.
    For LRA, the share of H's top eigenvectors inside P's subspace.

    >>> from psgd import Diagonal
    >>> a = torch.tensor([1.0, 4.0, 100.0])
    >>> report = hessian_report(Operator(3, lambda x: a * x), Diagonal(), {"d": a.rsqrt()})
    >>> round(report["spread_h"], 3), round(report["spread_php"], 3), round(report["inverse_error"], 3)
    (100.0, 1.0, 0.0)
    """
    (hessian, group), q = beside(hessian, group), lifted(q)
    before = lanczos(hessian, hessian.normal(generator(seed, -1)), steps)
    both = preconditioned(hessian, group, q)
    after = lanczos(both, both.normal(generator(seed, -1)), steps)
    v = torch.stack([hessian.signs(generator(seed, i)) for i in range(probes)])
    h, v = hessian(v).to(both.dtype), v.to(both.dtype)
    traces, squares = mean((v * h).sum(-1)), h.double().square().sum(-1).mean()
    criterion = mean(group.criterion(q, v, h))
    error = (group.precondition(q, h) - v).double().square().mean().sqrt()
    report = {
        **_ends("h", before),
        **_ends("php", after),
        "trace_h": traces.value,
        "trace_error": traces.error,
        "criterion": criterion.value,
        "criterion_error": criterion.error,
        "fit_residual": float(fit_residual(group, q, v, h).mean()),
        "inverse_error": float(error),
        "inverse_error_scalar": math.sqrt(max(0.0, 1 - traces.value**2 / (hessian.n * float(squares)))),
    }
    basis = curvature_subspace(group, q)
    if basis is not None and basis.shape[-1]:
        rank = basis.shape[-1] // 2
        report["alignment"] = alignment(basis, before.vectors(largest_modulus(before, rank)))
    return report


def _ends(name: str, ritz: Ritz) -> Report:
    sizes = ritz.values.abs()
    least = int(sizes.argmin())
    resolved = ritz.residuals[least] <= 0.1 * sizes[least]
    return {
        f"smallest_{name}": float(ritz.values[0]),
        f"largest_{name}": float(ritz.values[-1]),
        f"residual_{name}": float(torch.maximum(ritz.residuals[0], ritz.residuals[-1])),
        f"spread_{name}": float(sizes.amax() / sizes[least]) if resolved else math.nan,
    }


def curvature_subspace(group: Group, q: Point) -> Tensor | None:
    """Return the 2r columns in which P⁻¹ ≈ |H| of an LRA preconditioner is more than diagonal; None for other groups.

    P⁻¹ − D⁻² has the range of D⁻¹[U V] for Q = (I + UVᵀ)D, and of [U D⁻²V] for Q = D(I + UVᵀ).

    >>> from psgd import lra
    >>> curvature_subspace(lra(3), lra(3).init(7)).shape
    torch.Size([7, 6])
    """
    match group:
        case LowRank():
            return torch.cat((q["U"], q["V"]), -1)
        case Product(parts=(LowRank(), (Diagonal() | Scalar()) as d)):
            return d.solve(q["1"], torch.cat((q["0"]["U"], q["0"]["V"]), -1).mT).mT
        case Product(parts=((Diagonal() | Scalar()) as d, LowRank())):
            v = d.solve(q["0"], d.solve(q["0"], q["1"]["V"].mT)).mT
            return torch.cat((q["1"]["U"], v), -1)
    return None


def alignment(basis: Tensor, vectors: Tensor) -> float:
    """Return the mean share ‖Ze‖²/‖e‖² of vectors e (rows) in the span of a basis (columns); k/n is chance.

    >>> alignment(torch.eye(3)[:, :2], torch.tensor([[1.0, 0.0, 0.0], [0.0, 0.0, 1.0]]))
    0.5
    """
    z, _ = torch.linalg.qr(basis.double())
    vectors = vectors.double()
    return float(((vectors @ z).square().sum(-1) / vectors.square().sum(-1)).mean())


def beside(hessian: Operator, group: Group | Padded) -> tuple[Operator, Group]:
    """Return a Hessian and a group of the same size: `Padded` stands for the cost f(θ) + ½ϑᵀϑ."""
    inner, n = unpadded(group, hessian.n)
    return augmented(hessian, n), inner


def unpadded(group: Group | Padded, n: int) -> tuple[Group, int]:
    """Return a group and its size: of `Padded`, the padded ones."""
    return (group.part, group.size(n)) if isinstance(group, Padded) else (group, n)


def lifted(q: Point) -> Point:
    """Return the point in at least float32."""
    return {k: lifted(t) if isinstance(t, dict) else lift(t) for k, t in q.items()}
