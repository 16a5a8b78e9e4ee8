"""The paper's algorithms, claims and identities, transcribed as dense or elementwise formulas, against the groups.

The transcriptions use nothing of psgd. Where our step differs from the paper's on purpose, the test states how.
"""

import itertools
import random
from typing import Any

import pytest
import torch
from cases import pair, walked
from torch import Tensor
from torch.utils._pytree import tree_leaves

from psgd import (
    DCT,
    Blocks,
    Butterfly,
    Dense,
    Diagonal,
    Group,
    Identity,
    IncompleteTriangular,
    Kronecker,
    LowRank,
    Normalization,
    Normalized,
    Padded,
    Point,
    Scalar,
    StepSize,
    Triangular,
    XMat,
    affine,
    band,
    dct,
    fishnet,
    kaleidoscope,
    lra,
    lra_duv,
    permutation,
    two_grid,
)

close = torch.testing.assert_close
inv = torch.linalg.inv


class Plain(StepSize):
    """s = μ: the step is μ times the bare gradient."""

    def __call__(self, lr: Any, ell: Tensor, norm: Any, bound: Any) -> tuple[Any, Tensor]:
        return lr, ell


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def eye(n: int) -> Tensor:
    return torch.eye(n, dtype=torch.float64)


def adiag(b: Tensor) -> Tensor:
    """The anti-diagonal matrix: row i holds bᵢ."""
    return torch.diag(b).flip(-1)


def x_matrix(a: Tensor, b: Tensor) -> Tensor:
    """diag(a) + adiag(b), the centre of b being zero for odd n."""
    return torch.diag(a) + adiag(centred(b))


def centred(b: Tensor) -> Tensor:
    b = b.clone()
    if len(b) % 2:
        b[len(b) // 2] = 0
    return b


def spectral(e: Tensor) -> Tensor:
    return torch.linalg.matrix_norm(e, 2)


def blkdiag(e: Tensor, k: int) -> Tensor:
    """The k×k blocks on the diagonal, as a batch."""
    return torch.stack([e[i : i + k, i : i + k] for i in range(0, len(e), k)])


def pattern(*rows: str) -> Tensor:
    """A sparsity pattern as the paper draws it: a dot for every entry that may be nonzero."""
    return torch.tensor([[c == "•" for c in row] for row in rows])


def support(group: Group, n: int) -> Tensor:
    """Where Q may be nonzero, seen at a point that random steps have led to."""
    return group.matrix(walked(group, n), n).abs() > 1e-12


# --- the algorithms


@pytest.mark.parametrize("n", [6, 7])
def test_algorithm_2_with_the_exact_norm_in_place_of_the_max_norm(n: int):
    a, b = 2 + normal(n, seed=1) / 4, centred(normal(n, seed=2) / 4)
    (v, h), mu = pair(n, 3), 0.1

    qh = a * h + b * h.flip(0)
    qv = (a.flip(0) * v - b.flip(0) * v.flip(0)) / (a * a.flip(0) - b * b.flip(0))
    grad_a, grad_b = qh * qh - qv * qv, centred(qh * qh.flip(0) - qv * qv.flip(0))
    max_norm = max(grad_a.abs().max(), grad_b.abs().max())
    paper_a = a - mu / max_norm * (grad_a * a + grad_b * b.flip(0))
    paper_b = b - mu / max_norm * (grad_a * b + grad_b * a.flip(0))

    ours = XMat().fit({"a": a, "b": b, "ell": torch.zeros(())}, v, h, lr=mu, rule=Normalized())
    shorter = max_norm / spectral(x_matrix(grad_a, grad_b))
    assert 0.5 <= shorter <= 1
    close(ours["a"] - a, shorter * (paper_a - a))
    close(ours["b"] - b, shorter * (paper_b - b))


@pytest.mark.parametrize("coin", [True, False])
def test_algorithm_3_is_ours_at_twice_its_rate(coin: bool):
    n, r, mu = 8, 3, 0.05
    u, v, d = normal(n, r, seed=1), normal(n, r, seed=2), 1 + normal(n, seed=3).abs()
    probe, h = pair(n, 4)

    q = (eye(n) + u @ v.mT) @ torch.diag(d)
    p, qh, qv = q.mT @ q, q @ h, inv(q).mT @ probe
    grad_d = (p @ h) * h - probe * (inv(p) @ probe)
    new_u, new_v, new_d = u, v, d - mu / grad_d.abs().max() * d * grad_d
    if coin:
        grad_u = qh[:, None] @ (qh @ v)[None] - qv[:, None] @ (qv @ v)[None]
        new_u = u - mu / torch.linalg.matrix_norm(grad_u @ v.mT) * grad_u @ (eye(r) + v.mT @ u)
    else:
        grad_v = qh[:, None] @ (qh @ u)[None] - qv[:, None] @ (qv @ u)[None]
        new_v = v - mu / torch.linalg.matrix_norm(u @ grad_v.mT) * (eye(n) + v @ u.mT) @ grad_v

    zero = torch.zeros(())
    point = {"0": {"U": u, "V": v, "ell_U": zero, "ell_V": zero}, "1": {"d": d, "ell": zero}}
    ours = lra(r).fit(point, probe, h, lr=2 * mu, coin=coin, rule=Normalized())
    close(ours["0"]["U"], new_u)
    close(ours["0"]["V"], new_v)
    close(ours["1"]["d"], new_d)


def test_the_affine_update_is_ours_at_twice_its_rate():
    """A = Q_l G Q_rᵀ, B = Q_l⁻ᵀ V Q_r⁻¹; triu(AAᵀ − BBᵀ) moves Q_l, triu(AᵀA − BᵀB) moves Q_r."""
    m, n, mu = 3, 4, 0.05
    left, right = (normal(k, k, seed=k).triu(1) + torch.diag(1 + normal(k, seed=k).abs()) for k in (m, n))
    probe, g = normal(m, n, seed=1), normal(m, n, seed=2)
    a, b = left @ g @ right.mT, inv(left).mT @ probe @ inv(right)
    grad_l, grad_r = (a @ a.mT - b @ b.mT).triu(), (a.mT @ a - b.mT @ b).triu()

    q = {"0": {"Q": left, "ell": torch.zeros(())}, "1": {"Q": right, "ell": torch.zeros(())}}
    ours = affine((m, n)).fit(q, probe.flatten(), g.flatten(), lr=2 * mu, rule=Normalized())
    close(ours["0"]["Q"], left - mu / torch.linalg.matrix_norm(grad_l) * grad_l @ left)
    close(ours["1"]["Q"], right - mu / torch.linalg.matrix_norm(grad_r) * grad_r @ right)


def test_the_gradients_of_band():
    """∇_A as in the paper; ours for B is in dB = E·B, the paper's in dB = B·E: the same up to conjugation by Bᵀ."""
    n, k = 12, 4
    group, (v, h) = band(k), pair(n, 1)
    q = walked(group, n)
    a_blocks, b_blocks = q["0"]["Q"], q["2"]["Q"]
    full = torch.block_diag(*a_blocks) @ eye(n).roll(k // 2, 0) @ torch.block_diag(*b_blocks)
    p, qh, qv = full.mT @ full, full @ h, inv(full).mT @ v
    grad_a = blkdiag(torch.outer(qh, qh) - torch.outer(qv, qv), k)
    grad_b = blkdiag(torch.outer(p @ h, h) - torch.outer(v, inv(p) @ v), k)

    mu = 1e-2
    new = group.fit(q, v, h, lr=2 * mu, rule=Plain())
    close(new["0"]["Q"], a_blocks - mu * grad_a @ a_blocks)
    close(new["2"]["Q"], b_blocks - mu * inv(b_blocks).mT @ grad_b @ b_blocks.mT @ b_blocks)


def test_the_gradients_of_the_dct_preconditioner():
    n, mu = 6, 1e-2
    group, (v, h) = dct(XMat()), pair(n, 1)
    q = walked(group, n)
    a, b, d = q["0"]["a"], q["0"]["b"], q["2"]["d"]
    full = x_matrix(a, b) @ dct_matrix(n) @ torch.diag(d)
    p, qh, qv = full.mT @ full, full @ h, inv(full).mT @ v
    e = torch.outer(qh, qh) - torch.outer(qv, qv)
    moved = x_matrix(a, b) - mu * x_matrix(e.diagonal(), e.flip(-1).diagonal()) @ x_matrix(a, b)

    new = group.fit(q, v, h, lr=2 * mu, rule=Plain())
    close(x_matrix(new["0"]["a"], new["0"]["b"]), moved)
    close(new["2"]["d"], d - mu * d * ((p @ h) * h - v * (inv(p) @ v)))


def test_the_closed_form_of_the_diagonal_is_where_its_gradient_vanishes():
    v, h = pair(5, 1, 20)
    p = (v.square().mean(0) / h.square().mean(0)).sqrt()
    q = Diagonal().init(5, dtype=torch.float64) | {"d": p.sqrt()}
    close(Diagonal().fit(q, v, h, lr=1e-2, rule=Plain())["d"], q["d"])


# --- Claim 3.1: permutations


def closure(generators: list[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """The group that some permutations generate."""
    known = {tuple(range(len(generators[0])))}
    while len(new := known | {tuple(s[i] for i in k) for k in known for s in generators}) > len(known):
        known = new
    return sorted(known)


def subgroup(seed: int, n: int = 6) -> list[tuple[int, ...]]:
    """A random subgroup of Sₙ, small because its generators leave most entries alone."""
    rng = random.Random(seed)
    generators = []
    for _ in range(rng.choice([1, 1, 2])):
        moved = rng.sample(range(n), rng.choice([2, 3, 4]))
        image = dict(zip(moved, rng.sample(moved, len(moved)), strict=True))
        generators.append(tuple(image.get(i, i) for i in range(n)))
    return closure(generators)


@pytest.mark.parametrize("seed", range(12))
def test_claim_3_1_is_closed_and_spans_what_permutation_spans(seed: int):
    n, k = 6, subgroup(seed)
    sigma = torch.stack([eye(n)[list(s)] for s in k])  # σ(x)ᵢ = x at s[i]
    mask = sigma.sum(0) > 0  # Σ diag(aᵢ)σᵢ reaches every matrix with this support

    def transform(salt: int) -> Tensor:
        return (normal(len(k), n, 1, seed=salt) * sigma).sum(0)

    assert not (transform(1) @ transform(2))[~mask].any()
    close(inv(transform(1))[~mask], torch.zeros(n * n)[~mask.flatten()], check_dtype=False, atol=1e-9, rtol=0)

    for group in (permutation(elements=k), permutation(generators=k)):
        assert torch.equal(support(group, n), mask)
        q = group.init(n, dtype=torch.float64)["1"]
        free = sum(t.numel() for t in tree_leaves(q) if t.ndim > 1)
        assert free == mask.sum()


# --- Claims 3.2 and 3.3: low rank


def low_rank(u: Tensor, v: Tensor) -> Tensor:
    """I + UVᵀ of the group."""
    return LowRank(u.shape[-1]).matrix({"U": u, "V": v}, len(u))


def test_claim_3_2_the_two_eigenvalues():
    u, v, rho = normal(5, 1, seed=1), normal(5, 1, seed=2), 0.7
    point = {"0": {"U": u, "V": v}, "1": {"s": torch.tensor(rho, dtype=torch.float64)}}
    q = (LowRank(1) @ Scalar()).matrix(point, 5)
    eigenvalues = torch.linalg.eigvalsh(q.mT @ q) / rho**2
    first, *others, second = eigenvalues
    close(torch.stack(others), torch.ones(3, dtype=torch.float64))
    inner, size = (u * v).sum(), u.square().sum() * v.square().sum()
    close(first * second, (1 + inner) ** 2)
    close(first + second, 2 + 2 * inner + size)


@pytest.mark.parametrize("size", [1e1, 1e2, 1e3])
def test_claim_3_2_both_tails_grow_without_bound(size: float):
    q = low_rank(size * eye(5)[:, :1], size * eye(5)[:, 1:2])  # uᵀv = 0
    eigenvalues = torch.linalg.eigvalsh(q.mT @ q)
    assert eigenvalues[-1] > size**4
    assert inv(q).square().sum() > size**4  # the smallest eigenvalue, through P⁻¹: below 1/size⁴


def test_claim_3_3_the_twin_groups():
    n, r = 6, 2
    (u1, u2), (v1, v2) = normal(2, n, r, seed=1), normal(2, n, r, seed=2)
    close(low_rank(0 * u1, v1), eye(n))
    close(low_rank(u1, 0 * v1), eye(n))
    close(low_rank(u1, v1) @ low_rank(u2, v1), low_rank(u1 + u2 + u1 @ v1.mT @ u2, v1))
    close(low_rank(u1, v1) @ low_rank(u1, v2), low_rank(u1, v1 + v2 + v2 @ u1.mT @ v1))
    close(inv(low_rank(u1, v1)), low_rank(-u1 @ inv(eye(r) + v1.mT @ u1), v1))
    close(inv(low_rank(u1, v1)), low_rank(u1, -v1 @ inv(eye(r) + u1.mT @ v1)))


def lra_coordinates(n: int, r: int) -> tuple[Tensor, Tensor, Tensor]:
    return normal(n, r, seed=1), normal(n, r, seed=2), 1 + normal(n, seed=3).abs()


def test_uvd_and_duv_are_the_same_matrices():
    u, v, d = lra_coordinates(6, 2)
    uvd = lra(2).matrix({"0": {"U": u, "V": v}, "1": {"d": d}}, 6)
    duv = lra_duv(2).matrix({"0": {"d": d}, "1": {"U": u / d[:, None], "V": v * d[:, None]}}, 6)
    close(uvd, duv)
    close(uvd, torch.diag(d) + u @ (d[:, None] * v).mT)


def test_the_woodbury_solve():
    (u, v, d), b = lra_coordinates(6, 2), normal(6, seed=4)
    y = torch.linalg.solve(eye(2) + v.mT @ u, v.mT @ b)
    x = (b - u @ y) / d
    point = {"0": {"U": u, "V": v}, "1": {"d": d}}
    close(lra(2).solve(point, b), x)
    close(lra(2).matrix(point, 6) @ x, b)


def test_lra_of_rank_0_is_the_diagonal_group():
    v, h = pair(5, 1)
    q = lra(0).init(5, dtype=torch.float64)
    new = lra(0).fit(q, v, h, lr=0.3, rule=Normalized())
    close(new["1"]["d"], Diagonal().fit(q["1"], v, h, lr=0.3, rule=Normalized())["d"])


# --- the group of X-matrices (appendix)


@pytest.mark.parametrize("n", [6, 7])
def test_the_identities_of_x_matrices(n: int):
    a, b, u, v = 2 + normal(n, seed=1) / 2, centred(normal(n, seed=2)), *normal(2, n, seed=3)
    v = centred(v)
    group, q = XMat(), {"a": a, "b": b}
    det = a * a.flip(0) - b * b.flip(0)

    close(group.matrix(q, n), x_matrix(a, b))
    close(group.apply(q, u), a * u + b * u.flip(0))
    close(torch.diag(a) @ adiag(b), adiag(a * b))
    close(adiag(a) @ torch.diag(b), adiag(a * b.flip(0)))
    close(adiag(a) @ adiag(b), torch.diag(a * b.flip(0)))
    close(x_matrix(a, b) @ x_matrix(u, v), x_matrix(a * u + b * v.flip(0), a * v + b * u.flip(0)))
    close(group.matrix(group.compose(q, {"a": u, "b": v}), n), x_matrix(a, b) @ x_matrix(u, v))
    close(inv(x_matrix(a, b)), x_matrix(a.flip(0) / det, -b / det))
    close(group.solve(q, eye(n)).mT, inv(x_matrix(a, b)))
    close(x_matrix(a, b).mT, x_matrix(a, b.flip(0)))
    close(group.apply_t(q, eye(n)).mT, x_matrix(a, b.flip(0)))

    max_norm, norm = max(a.abs().max(), b.abs().max()), spectral(x_matrix(a, b))
    assert max_norm <= norm <= a.abs().max() + b.abs().max()
    close(group.norm(q), norm)
    projected = group.project(u, v)
    close(x_matrix(projected["a"], projected["b"]), x_matrix(u * v, u * v.flip(0)))
    close(projected["b"], centred(projected["b"]))


# --- patterns


def test_the_fishnets_of_the_paper():
    odd, even = "•.•.•", ".•.•."
    assert torch.equal(support(fishnet(5), 5), pattern(odd, even, odd, even, odd))
    outer, inner = "•..••..•", ".••..••."
    assert torch.equal(support(fishnet(8), 8), pattern(*2 * (outer, inner, inner, outer)))


def test_the_kaleidoscope_of_the_paper():
    drawn = [
        pattern("•.....•", ".•...•.", "..•.•..", "...•...", "..•.•..", ".•...•.", "•.....•"),
        pattern("•.•....", ".•.....", "•.•....", "...•..•", "....••.", "....••.", "...•..•"),
        pattern("••.....", "••.....", "..••...", "..••...", "....•••", "....•••", "....•••"),
    ]
    factors = kaleidoscope(7).parts
    assert len(factors) == len(drawn)
    for factor, dots in zip(factors, drawn, strict=True):
        assert torch.equal(support(factor, 7), dots)


@pytest.mark.parametrize(
    ("group", "dots"),
    [
        (Normalization(), pattern("•..•", ".•.•", "..••", "...•")),
        (IncompleteTriangular(2), pattern("••••", ".•••", "..•.", "...•")),
        (Butterfly(), pattern("•.•.", ".•.•", "•.•.", ".•.•")),
        (XMat(), pattern("•..•", ".••.", ".••.", "•..•")),
    ],
)
def test_the_table_of_useful_groups(group: Group, dots: Tensor):
    assert torch.equal(support(group, 4), dots)


# --- other groups of the appendix


def test_two_grid_reduces_to_dense_for_one_entry_per_cell():
    m, (v, h) = 4, pair(4, 1)
    group = two_grid(m, 1)
    q = walked(group, m)
    a, b = q["1"]["0"]["Q"], q["3"]["0"]["Q"]
    close(group.matrix(q, m), a @ b)
    coarse = Kronecker((m, 1), (Dense(), Identity()))
    start: Point = walked(Dense(), m)
    ours = coarse.fit({"0": start, "1": {}}, v, h, lr=0.3)["0"]
    for key, expected in Dense().fit(start, v, h, lr=0.3).items():
        close(ours[key], expected)


def test_two_grid_shifts_its_second_coarse_grid_by_half_a_cell():
    m, c = 3, 4
    q = walked(two_grid(m, c), m * c)
    shift = eye(m * c).roll(c // 2, 0)
    a, b = (torch.kron(q[i]["0"]["Q"], eye(c)) for i in ("1", "3"))
    close(two_grid(m, c).matrix(q, m * c), inv(shift) @ a @ shift @ b)


def test_normalization_is_that_of_a_batch():
    x = normal(50, 3) * torch.tensor([1.0, 5.0, 0.2]) + torch.tensor([3.0, -1.0, 0.0])
    eps = 1e-5
    mean, std = x.mean(0), (x.var(0, correction=0) + eps).sqrt()
    q = {"d": torch.cat((1 / std, torch.ones(1))), "u": -mean / std}
    ones = torch.ones(50, 1, dtype=torch.float64)
    y = Normalization().apply(q, torch.cat((x, ones), -1))
    close(y[:, :-1], torch.nn.functional.batch_norm(x, None, None, training=True, eps=eps))
    close(y[:, -1:], ones)


def dct_matrix(n: int) -> Tensor:
    """The orthonormal DCT-II by its definition: rows √(2/n)·cos(π k (2j + 1)/(2n)), the first over √2."""
    k, j = torch.arange(n, dtype=torch.float64)[:, None], torch.arange(n, dtype=torch.float64)
    c = (2 / n) ** 0.5 * torch.cos(torch.pi * k * (2 * j + 1) / (2 * n))
    c[0] /= 2**0.5
    return c


@pytest.mark.parametrize("n", [1, 2, 3, 7, 8, 30])
def test_the_dct_is_scipys(n: int):
    fft = pytest.importorskip("scipy.fft")
    x = normal(3, n)
    close(DCT().apply({}, x), torch.from_numpy(fft.dct(x.numpy(), norm="ortho")))
    close(DCT().apply_t({}, x), torch.from_numpy(fft.idct(x.numpy(), norm="ortho")))
    close(DCT().apply({}, x), x @ dct_matrix(n).mT)


def test_padded_is_the_augmented_problem():
    """Of f(θ) + ½ϑᵀϑ: averaged over the signs of the probe of ϑ, its gradient is that of our extra pairs."""
    n, extra, part = 10, 2, Blocks(4, Triangular())
    group, (v, h), q = Padded(part, 4), pair(n, 1), walked(part, n + extra)
    ours = group.fit(q, v, h, lr=0.1, rule=Plain())["Q"]

    signs = [torch.tensor(s, dtype=torch.float64) for s in itertools.product((-1, 1), repeat=extra)]
    steps = [part.fit(q, torch.cat((v, s)), torch.cat((h, s)), lr=0.1, rule=Plain())["Q"] - q["Q"] for s in signs]
    close(ours - q["Q"], torch.stack(steps).mean(0))

    p = part.matrix(q, n + extra).mT @ part.matrix(q, n + extra)
    close(group.precondition(q, h), p[:n, :n] @ h)
