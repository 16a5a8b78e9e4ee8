"""Small linear algebra that several groups share: batch sums, lifted solves, safe steps."""

from __future__ import annotations

import functools
import math

import torch
from torch import Tensor


def batch_sum(t: Tensor, keep: int = 1) -> Tensor:
    """Sum over all but the last `keep` axes: the partial trace over batch dimensions."""
    return t if t.ndim == keep else t.sum(dim=tuple(range(t.ndim - keep)))


def rows(x: Tensor) -> Tensor:
    """View a batch of vectors as the rows of one matrix, of any width, also none."""
    return x.reshape(math.prod(x.shape[:-1]), x.shape[-1])


CHUNK = 1 << 15
"""Entries that are worked on at once where one pass after the other would go through memory: they stay in the cache."""


def chunks(n: int, like: Tensor, times: int = 1) -> list[tuple[int, int]]:
    """Return the ends of pieces of 0 … n; a compiler gets one piece, and finds its own, as does another device.

    Two pieces are not worth their calls.

    >>> chunks(70_000, torch.ones(()))
    [(0, 32768), (32768, 65536), (65536, 70000)]
    >>> chunks(65_536, torch.ones(()))
    [(0, 65536)]
    """
    size = times * CHUNK
    if n <= 2 * size or not like.is_cpu or torch.compiler.is_compiling():
        size = n
    return [(i, min(n, i + size)) for i in range(0, n, max(1, size))]


def ordinary(*tensors: Tensor) -> bool:
    """Whether these are numbers on a CPU, all float32 or all float64: not traced, not batched by vmap."""
    dtype, wrapped = tensors[0].dtype, torch._C._functorch.is_functorch_wrapped_tensor
    return (
        dtype in (torch.float32, torch.float64)
        and not torch.compiler.is_compiling()
        and all(type(t) is Tensor and t.dtype is dtype and t.is_cpu and not wrapped(t) for t in tensors)
    )


def goes(size: Tensor) -> bool:
    """Whether a step of this size may be written over what it starts from: the norm it comes from was finite.

    >>> goes(torch.tensor(0.1)), goes(torch.tensor(float("nan")))
    (True, False)
    """
    return 0 < float(size) < float("inf")


def plus(x: Tensor, y: Tensor, z: Tensor, value: float = 1.0) -> Tensor:
    """x + value·y∘z, written over x where that is possible: vmap has no rule for it, and a compiler no need.

    >>> plus(torch.ones(2), torch.ones(2), torch.arange(2.0))
    tensor([1., 2.])
    """
    if torch.compiler.is_compiling() or torch._C._functorch.is_functorch_wrapped_tensor(x):
        return torch.addcmul(x, y, z, value=value)
    return x.addcmul_(y, z, value=value)


def outer(x: Tensor, y: Tensor) -> Tensor:
    """Σ x yᵀ over the batch, for vectors on the last axis."""
    return rows(x).mT @ rows(y)


def lift(t: Tensor) -> Tensor:
    """At least float32: factorizations, Fourier transforms and norms do not exist, or do not hold, below."""
    return t if t.dtype in (torch.float32, torch.float64) else t.float()


def subtract(q: Tensor, size: float | Tensor, e: Tensor) -> Tensor:
    """q − size·e in q's dtype. Below float32 it rounds to either neighbour, on average to the difference.

    Rounded to the nearest, steps under half a unit in the last place of q would be lost, however many come.
    The dither that decides is a hash of the operands: no random state, and a zero step moves nothing.
    """
    step = size * lift(e)
    if q.dtype in (torch.float32, torch.float64):
        return (q - step).to(q.dtype)
    below = round(2**23 * torch.finfo(q.dtype).eps) - 1  # the bits of a float32 that q's dtype does not have
    bits = (q.float() - step).view(torch.int32)
    dither = bits ^ step.view(torch.int32)
    for shift in (13, -17, 5):  # xorshift
        dither = dither ^ (dither << shift if shift > 0 else dither >> -shift)
    return ((bits + (dither & below)) & ~below).view(torch.float32).to(q.dtype)


def subtract_product(q: Tensor, size: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """q − size·a·b, without forming the product where q's dtype needs no care."""
    if q.dtype == a.dtype == b.dtype:
        return torch.addmm(q.mT, (-size * b).mT, a.mT).mT  # rows of length n, as q has them
    return subtract(q, size, lift(a) @ b)


SIDE = 125
"""Rows of a symmetric matrix below which half of it takes as long as all."""


def symmetric_product(a: Tensor, b: Tensor) -> Tensor:
    """AB, known to be symmetric: on a CPU, what is above the diagonal is not multiplied, but copied, block by block.

    >>> x = torch.randn(300, 20)
    >>> p = symmetric_product(x, x.mT)
    >>> bool(torch.allclose(p, x @ x.mT, atol=1e-4)), torch.equal(p[150:, :150], p[:150, 150:].mT)
    (True, True)
    """
    n = a.shape[-2]
    if n < 2 * SIDE or not ordinary(a, b):
        return a @ b
    upper, lower, product = slice(0, n // 2), slice(n // 2, n), a.new_empty(*a.shape[:-1], n)
    for half in (upper, lower):
        product[..., half, half] = symmetric_product(a[..., half, :], b[..., half])
    product[..., lower, upper] = a[..., lower, :] @ b[..., upper]
    product[..., upper, lower] = product[..., lower, upper].mT
    return product


def solve(a: Tensor, x: Tensor) -> Tensor:
    """A⁻¹x for every vector x on the last axis, with one factorization of A."""
    y, _ = torch.linalg.solve_ex(lift(a).mT, rows(lift(x)), left=False)  # not finite if singular; never raises
    return y.reshape(x.shape).to(x.dtype)


def solve_triangular(a: Tensor, x: Tensor, upper: bool) -> Tensor:
    """A⁻¹x for every vector x on the last axis, A triangular."""
    y = torch.linalg.solve_triangular(lift(a).mT, rows(lift(x)), upper=not upper, left=False)
    return y.reshape(x.shape).to(x.dtype)


def frobenius(t: Tensor, axes: int | None = None) -> Tensor:
    """‖T‖_F, a true bound of the spectral norm, tight within √rank; of each T along the last axes, or of all."""
    over = _last(t, axes)
    if _finer(t):
        return torch.linalg.vector_norm(t, dim=over, dtype=torch.float64).float()  # where squares have a place
    size = magnitude(t, axes)
    return size * torch.linalg.vector_norm(lift(t) / size.view(*size.shape, *[1] * len(over)), dim=over)


def _last(t: Tensor, axes: int | None) -> tuple[int, ...]:
    """Return the last axes, or all."""
    return tuple(range(-t.ndim if axes is None else -axes, 0))


def _finer(t: Tensor) -> bool:
    """Whether float64 has more digits than t, and is to be had where t is."""
    return t.dtype != torch.float64 and t.device.type != "mps"


def maximum_modulus(t: Tensor, axes: int | None = None) -> Tensor:
    """max |tᵢ|, in at least float32 so that a bound stays a bound; not finite where an entry is not.

    Along the last axes, or of all. From the two ends: that reads t twice and writes nothing, where torch's ∞-norm is
    ten times slower on a CPU.
    """
    t, over = lift(t), _last(t, axes)
    return torch.maximum(t.amax(over), -t.amin(over))


def magnitude(t: Tensor, axes: int | None = None) -> Tensor:
    """max |tᵢ| > 0, to divide by before squaring: float32 has no square of 10²⁰, nor of 10⁻²³."""
    floor = torch.finfo(lift(t).dtype).tiny
    return maximum_modulus(t, axes).clamp_min(floor) if t.numel() else lift(t).new_ones(())


def product_norm(t: Tensor, gram: Tensor) -> Tensor:
    """‖T Oᵀ‖_F from the Gram matrix OᵀO, never below it.

    A T that meets only the small singular values of O drowns in the rounding of OᵀO: that is bounded, too.
    """
    slack = 4 * torch.finfo(gram.dtype).eps * gram.diagonal().sum()
    size = magnitude(t)
    t = t / size
    return size * ((t @ gram + slack * t) * t).sum().sqrt()


def spectral_norm(a: Tensor, width: int = 2, depth: int = 5) -> Tensor:
    """‖A‖ of a normal matrix (symmetric, skew, …), from below: within a few percent, in 2·width·depth products.

    A Krylov space is spanned from the largest row, pulled two pseudo-random ways, so that no start is orthogonal to
    the leading eigenvectors; on an orthonormal basis of it the largest singular value is found by squaring. A small
    matrix is squared as it is: n singular values bring the result down to n^(−1/64) at the worst. Of a stack of
    matrices, the norm of each.

    >>> bool((spectral_norm(torch.diag(torch.tensor([1.0, -3.0, 2.0]))) - 3).abs() < 1e-5)
    True
    """
    a, n = lift(a), a.shape[-1]
    tiny, unit = torch.finfo(a.dtype).tiny, None if _finer(a) else magnitude(a, 2)[..., None, None]
    if unit is None:  # the squares of A may have no place in its own dtype
        norms = torch.linalg.vector_norm(a, dim=-1, dtype=torch.float64)
    else:
        a = a / unit
        norms = torch.linalg.vector_norm(a, dim=-1)
    peak, place = norms.max(-1, keepdim=True)
    size = peak.to(a.dtype).clamp_min(tiny)[..., None]
    # the largest row of A/size has norm 1: neither its powers nor their squares overflow
    image = a / size if n <= _SMALL else _leading(a, place[..., None], size, width, depth)
    gram = image.mT @ image
    power = gram / torch.linalg.vector_norm(gram, dim=(-2, -1), keepdim=True).clamp_min(tiny)
    power = torch.linalg.matrix_power(power, 32)  # from eigenvalues up to one the leading one is all that is left
    trace = power.diagonal(dim1=-2, dim2=-1).sum(-1).clamp_min(tiny)
    norm = size[..., 0, 0] * ((power * gram).sum((-2, -1)) / trace).sqrt()
    return norm if unit is None else unit[..., 0, 0] * norm


_SMALL = 32
"""Rows of a matrix whose Gram matrix takes less time than a Krylov space, and whose 32nd power has a place."""


def _leading(a: Tensor, place: Tensor, size: Tensor, width: int, depth: int) -> Tensor:
    """Return (A/size)B for an orthonormal basis B of the Krylov space; row `place` is the largest, of norm `size`."""
    tiny = torch.finfo(a.dtype).tiny
    noise = _directions(a.shape[-1], width, a.dtype, a.device)
    row = torch.take_along_dim(a, place, -2) / size
    x = noise + row.mT * (row @ noise).sign()
    spanned: list[Tensor] = []
    for _ in range(depth):
        x = a @ (x / size)
        spanned.append(x)
    krylov = torch.cat(spanned, -1)
    basis, _ = torch.linalg.qr(krylov / torch.linalg.vector_norm(krylov, dim=-2, keepdim=True).clamp_min(tiny))
    return a @ (basis / size)


def _directions(n: int, width: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return pseudo-random vectors of norm about 1, always the same, as columns."""
    # what is made under a mode (a compiler's, inference_mode, fake tensors) is of no use outside
    odd = torch.compiler.is_compiling() or torch.is_inference_mode_enabled() or torch._C._len_torch_dispatch_stack()
    return (_new_directions if odd else _known_directions)(n, width, dtype, device)


def _new_directions(n: int, width: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    phase = torch.arange(1, n + 1, dtype=torch.float64)[:, None].square()
    vectors = torch.cos(phase * torch.arange(1, width + 1).sqrt()) * (2 / n) ** 0.5
    return vectors.to(device=device, dtype=dtype)


_known_directions = functools.lru_cache(maxsize=64)(_new_directions)
