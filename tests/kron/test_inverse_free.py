"""Factors that move by products alone: their fixed points, their motions, and what must hold on the way."""

import dataclasses
import itertools
import math

import pytest
import torch

from psgd import (
    Blocks,
    Dense,
    Diagonal,
    Direct,
    Identity,
    InverseFree,
    Kronecker,
    Normalized,
    Positive,
    Procrustes,
    Quadratic,
    Smoothed,
    Triangular,
    linalg,
)
from psgd.groups.inverse_free import Motion
from psgd.points import leaves

COARSE = [Quadratic(), Procrustes()]
MOTIONS = [Direct(), *COARSE]


def matrix(q, i):
    """Return what is moved along an axis: P or Q."""
    return next(q[str(i)][key] for key in ("P", "Q") if key in q[str(i)])


def started(motion, matrices):
    """Return the point of these matrices."""
    key = "P" if motion == Direct() else "Q"
    return {str(i): {key: m, "ell": torch.zeros((), dtype=m.dtype)} for i, m in enumerate(matrices)}


def spd(n, decades, seed):
    q, _ = torch.linalg.qr(torch.randn(n, n, generator=torch.Generator().manual_seed(seed), dtype=torch.float64))
    return q @ torch.diag(torch.logspace(0, decades, n, dtype=torch.float64)) @ q.mT


def preconditioner(group, q, n):
    eye = torch.eye(n, dtype=next(iter(q["0"].values())).dtype)
    return torch.stack([group.precondition(q, e) for e in eye]).double()


def spread(p, h):
    """Return the condition number and the mean of the eigenvalues of PH."""
    values = torch.linalg.eigvals(p @ h).real
    return float(values.max() / values.min()), float(values.mean())


LEFT, RIGHT = spd(4, 1.5, 0), spd(5, 1.0, 1)


def walk(group, whitening, steps=1500, lr=0.5, dtype=torch.float64):
    """Fit to matrices G = A Z B, of covariance A² ⊗ B², or to products with the Hessian A ⊗ B."""
    rng, q = torch.Generator().manual_seed(2), group.init(20, dtype=dtype)
    for t in range(steps):
        v = torch.randn(4, 5, generator=rng, dtype=torch.float64)
        h = (LEFT @ v @ RIGHT).flatten().to(dtype)
        rate = lr * max(0.02, 1 - t / (0.9 * steps))
        if whitening:
            q = group.whiten(q, torch.randn(20, generator=rng, dtype=torch.float64).to(dtype), h, lr=rate)
        else:
            q = group.fit(q, v.flatten().to(dtype), h, lr=rate)
    return q


GROUPS = [InverseFree((4, 5), (motion.part,) * 2, motion, damping=0.0) for motion in MOTIONS]
GROUPS.append(Kronecker((4, 5), (Triangular(), Triangular())))
NAMES = ["direct", "quadratic", "procrustes", "triangular"]


@pytest.mark.parametrize("group", GROUPS, ids=NAMES)
def test_newton_pairs_lead_to_the_inverse_of_a_kronecker_product(group):
    p = preconditioner(group, walk(group, whitening=False, steps=2500), 20)
    condition, mean = spread(p, torch.kron(LEFT, RIGHT))
    bound = 1e-3 if isinstance(group, InverseFree) else 0.1  # the paper's is slower, by its bound of the norm
    assert condition < 1 + bound and abs(mean - 1) < bound


@pytest.mark.parametrize("group", GROUPS, ids=NAMES)
def test_whitening_leads_to_the_inverse_root_of_the_covariance(group):
    p = preconditioner(group, walk(group, whitening=True, steps=3000), 20)
    condition, mean = spread(p, torch.kron(LEFT, RIGHT))
    assert condition < 1.6 and 0.85 < mean < 1.15  # from 316


@pytest.mark.parametrize("motion", MOTIONS, ids=str)
def test_a_vector_is_whitened_entry_by_entry(motion):
    group = InverseFree((3,), (Diagonal(),), motion, damping=0.0)
    rng, q, sizes = torch.Generator().manual_seed(0), group.init(3), torch.tensor([0.1, 1.0, 10.0])
    for t in range(2000):
        h = sizes * torch.randn(3, generator=rng)
        q = group.whiten(q, h, h, lr=0.5 * max(0.01, 1 - t / 1800))
    torch.testing.assert_close(group.precondition(q, sizes), torch.ones(3), rtol=0.2, atol=0)


@pytest.mark.parametrize("group", GROUPS[1:3], ids=NAMES[1:3])
def test_in_bfloat16_too(group):
    for whitening, bound in ((False, 1.3), (True, 2.0)):
        q = walk(group, whitening, dtype=torch.bfloat16)
        assert all(t.dtype == torch.bfloat16 for f in q.values() for k, t in f.items() if k != "ell")
        condition, mean = spread(preconditioner(group, q, 20), torch.kron(LEFT, RIGHT))
        assert condition < bound and 0.8 < mean < 1.2


@pytest.mark.parametrize("group", GROUPS[1:3], ids=NAMES[1:3])
def test_products_may_be_coarser_than_the_factors(group):
    group = dataclasses.replace(group, products=torch.bfloat16)
    for whitening, bound in ((False, 1.2), (True, 1.8)):
        q = walk(group, whitening, dtype=torch.float32)
        assert all(t.dtype == torch.float32 for f in q.values() for t in f.values())
        condition, mean = spread(preconditioner(group, q, 20), torch.kron(LEFT, RIGHT))
        assert condition < bound and 0.85 < mean < 1.15  # from 316


@pytest.mark.parametrize("motion", COARSE, ids=str)
@pytest.mark.parametrize("whitening", [False, True], ids=["newton", "whitening"])
@pytest.mark.parametrize("shape", [(48, 16), (16, 48), (24, 24), (6, 24, 4)], ids=str)
def test_coarse_products_make_nearly_the_same_step(motion, whitening, shape):
    parts = (Dense(),) * len(shape)
    fine, coarse = (InverseFree(shape, parts, motion, products=p) for p in (None, torch.bfloat16))
    n, rng = math.prod(shape), torch.Generator().manual_seed(0)
    q = {str(i): {"Q": spd(m, 0.5, i).float(), "ell": torch.zeros(())} for i, m in enumerate(shape)}
    v, h, g = torch.randn(3, n, generator=rng)
    one, other = ((group.whiten if whitening else group.fit)(q, v, h, lr=0.5) for group in (fine, coarse))
    for i, f in q.items():
        move, error = one[i]["Q"] - f["Q"], other[i]["Q"] - one[i]["Q"]
        assert other[i]["Q"].dtype == torch.float32 and 1e-4 < error.norm() / move.norm() < 0.02
    for ready in (lambda group: q, lambda group: group.ready(q)):
        exact, d = (group.precondition(ready(group), g) for group in (fine, coarse))
        assert d.dtype == torch.float32 and 1e-4 < (d - exact).norm() / exact.norm() < 0.02


def test_p_stays_positive_however_coarse_its_products():
    group = InverseFree((64, 64), (Dense(), Identity()), products=torch.bfloat16)
    q = {"0": {"Q": spd(64, 3, 0).float(), "ell": torch.zeros(())}, "1": {}}  # P of condition 10⁶
    directions = torch.linalg.eigh(q["0"]["Q"]).eigenvectors.mT.bfloat16().float()
    for ready in (q, group.ready(q)):
        for g in directions:  # in one column of 64
            column = torch.outer(g, torch.eye(64)[0]).flatten()
            assert column @ group.precondition(ready, column) > 0
    p = (q["0"]["Q"].mT @ q["0"]["Q"]).bfloat16().float()
    assert not all(g @ p @ g > 0 for g in directions)  # as it would be, were P what is rounded


@pytest.mark.parametrize("lr", [0.1, 0.5, 0.9])
@pytest.mark.parametrize("motion", MOTIONS, ids=str)
@pytest.mark.parametrize("rule", [Normalized(), None], ids=str)
def test_factors_stay_positive_and_nearly_symmetric(motion, lr, rule):
    group = InverseFree((4, 5), (motion.part,) * 2, motion)
    rng, q = torch.Generator().manual_seed(1), group.init(20, dtype=torch.float64)
    options = {} if rule is None else {"rule": rule}
    for scale in (1e-3, 1.0, 1e4) * 20:
        h = scale * torch.randn(20, generator=rng, dtype=torch.float64)
        q = group.whiten(q, h, h, lr=lr, **options)
        for factor in (matrix(q, 0), matrix(q, 1)):
            assert torch.linalg.det(factor) > 0
            assert torch.linalg.eigvalsh(0.5 * (factor + factor.mT)).min() > 0
            asymmetry = (factor - factor.mT).norm() / factor.norm()
            assert asymmetry < 0.2 if motion == Procrustes() else torch.equal(factor, factor.mT)


def unkind(kind, t, rng, n=24, m=16):
    """Return gradients that leave much of P unknown, or that turn it around."""
    h = torch.randn(n, m, generator=rng)
    match kind:
        case "of one direction":
            h = torch.linspace(-1, 2, n).outer(torch.linspace(2, -1, m))
        case "mostly zero":
            h[n // 3 :], h[:, m // 3 :] = 0, 0
        case "of sixteen decades":
            h *= torch.logspace(-4, 4, n)[:, None] * torch.logspace(-4, 4, m)
        case "that change":
            h *= torch.logspace(-3, 3, n).roll(t // 200 * 7)[:, None]
    return h.flatten()


@pytest.mark.parametrize("newton", [False, True], ids=["whitening", "newton"])
@pytest.mark.parametrize("kind", ["of one direction", "mostly zero", "of sixteen decades", "that change"])
def test_p_itself_stays_positive_in_float32_for_gradients(kind, newton):
    """Damping bounds the condition of P far below what rounding allows: 10⁶."""
    group = InverseFree((24, 16), (Positive(), Positive()), Direct())
    rng, q, worst = torch.Generator().manual_seed(0), group.init(24 * 16), 1.0
    for t in range(1500):
        v, h = torch.randn(24 * 16, generator=rng), unkind(kind, t, rng)
        q = group.fit(q, v, h, lr=0.9) if newton else group.whiten(q, v, h, lr=0.9)
        if t % 10 == 9:
            q = group.balance(q)
        for i in range(2 if t % 25 == 24 else 0):
            values = torch.linalg.eigvalsh(matrix(q, i).double())
            worst = min(worst, float(values[0] / values[-1]))
    assert 2e-4 < worst < 0.2


def test_the_quadratic_form_is_what_it_says():
    q, g = spd(4, 1, 0), 0.1 * spd(4, 0.5, 1)
    eye = torch.eye(4, dtype=torch.float64)
    torch.testing.assert_close(Quadratic().matrix(q, q, g), (eye - g / 2) @ q @ (eye - g / 2))
    torch.testing.assert_close(Direct().matrix(q, q, g), (eye - g) @ q @ (eye - g))


def test_at_first_order_all_motions_move_p_by_the_same_where_g_commutes_with_it():
    q = spd(4, 1, 0)
    g = 1e-5 * q @ (q - torch.eye(4, dtype=torch.float64))
    p, d = q @ q, q.diagonal()
    moved = Direct().matrix(p, p, g), Direct().diagonal(d, g.diagonal())
    for motion in COARSE:
        root = motion.matrix(q, q, g)
        torch.testing.assert_close(
            root.mT @ root - p, moved[0] - p, rtol=1e-3, atol=1e-3 * float((moved[0] - p).norm())
        )
        torch.testing.assert_close(motion.diagonal(d, g.diagonal()) - d, moved[1] - d, rtol=1e-3, atol=0)


def test_a_positive_matrix_is_the_square_of_what_it_is_applied_as():
    group, x = Positive(), torch.randn(3, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    q = {"P": spd(5, 2, 0), "ell": torch.zeros(())}
    root, e = group.matrix(q, 5), torch.eye(5, dtype=torch.float64)
    torch.testing.assert_close(root @ root, q["P"])
    torch.testing.assert_close(root, root.mT)
    assert torch.linalg.eigvalsh(root).min() > 0
    for action, inverse in ((group.apply, group.solve), (group.apply_t, group.solve_t)):
        torch.testing.assert_close(action(q, x), x @ root)
        torch.testing.assert_close(inverse(q, action(q, x)), x)
    torch.testing.assert_close(group.precondition(q, x), x @ q["P"])
    torch.testing.assert_close(group.logabsdet(q, 5), torch.linalg.slogdet(root).logabsdet)
    torch.testing.assert_close(group.singular_values(q, 5).sort().values, torch.linalg.svdvals(root).flip(0))
    torch.testing.assert_close(group.matrix(group.scaled(q, 3.0), 5), 3 * root)
    torch.testing.assert_close(group.matrix(group.init(5, scale=2.0, dtype=torch.float64), 5), 2 * e)
    with pytest.raises(ValueError, match="a factor of InverseFree"):
        group.fit(q, x[0], x[1])


@pytest.mark.parametrize("motion", MOTIONS, ids=str)
def test_balance_evens_out_the_scales_of_factors(motion):
    group = InverseFree((4, 5), (motion.part,) * 2, motion)
    q = started(motion, (64 * spd(4, 1, 0), spd(5, 1, 1) / 64))
    even = group.balance(q)
    torch.testing.assert_close(preconditioner(group, even, 20), preconditioner(group, q, 20))
    norms = [
        float(part.norm({k: t for k, t in even[i].items() if k != "ell"}))
        for i, part in zip("01", group.parts, strict=True)
    ]
    assert norms[0] == pytest.approx(norms[1])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_p_itself_in_less_than_float32_is_refused(dtype):
    with pytest.raises(ValueError, match=rf"at least float32, got {dtype}.*kron\(Quadratic"):
        InverseFree((4, 5), (Positive(), Diagonal()), Direct()).init(20, dtype=dtype)


def test_the_turn_of_procrustes_leaves_p_alone_and_finds_the_symmetric_root():
    q = spd(5, 1, 3)
    upper, none = 0.3 * torch.ones(5, 5, dtype=torch.float64).triu(1), torch.zeros(5, 5, dtype=torch.float64)
    turned = torch.linalg.matrix_exp(upper - upper.mT) @ q
    p = turned.mT @ turned
    for _ in range(60):
        turned = Procrustes().matrix(turned, turned, none)
    torch.testing.assert_close(turned, q, rtol=1e-2, atol=1e-2)
    torch.testing.assert_close(turned.mT @ turned, p, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("motion", MOTIONS, ids=str)
@pytest.mark.parametrize("whitening", [False, True], ids=["newton", "whitening"])
@pytest.mark.parametrize("rule", [Smoothed(), Normalized()], ids=str)
@pytest.mark.parametrize(("m", "n"), [(3, 4), (9, 4), (2, 7)], ids=str)  # a long axis, and a short one
def test_one_fit_is_the_dense_formula(motion, m, n, rule, whitening):
    """G of factor i is the partial trace of P h hᵀ P − v vᵀ, and steps are μ/2 over the sum of norms, or its norm."""
    damping = 0.1
    group = InverseFree((m, n), (motion.part,) * 2, motion, damping=damping)
    rng, a, b = torch.Generator().manual_seed(0), spd(m, 0.5, 4), spd(n, 0.5, 5)
    q, (p, r) = started(motion, (a, b)), (a, b) if motion == Direct() else (a @ a, b @ b)
    v, h = torch.randn(2, m * n, generator=rng, dtype=torch.float64)
    new = (group.whiten if whitening else group.fit)(q, v, h, lr=0.2, rule=rule)
    noisy = h + damping * h.square().mean().sqrt() * v.roll(1)
    ph = (p @ noisy.view(m, n) @ r).contiguous()
    for i, (x, y) in enumerate([(ph, v.view(m, n)), (ph.mT, v.view(m, n).mT)]):
        up, down = x @ x.mT, y.shape[1] * torch.eye(len(y), dtype=y.dtype) if whitening else y @ y.mT
        bound = torch.linalg.matrix_norm(up, 2) + torch.linalg.matrix_norm(down, 2)
        size = torch.linalg.matrix_norm(up - down, 2) if rule == Normalized() else bound
        old = (a, b)[i]
        if rule == Smoothed():
            torch.testing.assert_close(new[str(i)]["ell"], bound, rtol=1e-6, atol=0)
        step = motion.matrix(old, old, 0.1 / size * (up - down))
        torch.testing.assert_close(matrix(new, i), step, rtol=1e-6, atol=1e-9)


def test_batches_count_as_their_sum_and_without_damping_the_probe_does_not_matter_in_whitening():
    group = InverseFree((3, 4), (Dense(), Diagonal()), damping=0.0)
    assert not group.probing and InverseFree((3,), (Dense(),), damping=1e-3).probing
    q = group.init(12)
    h = torch.randn(5, 12, generator=torch.Generator().manual_seed(0))
    once = group.whiten(q, torch.zeros(12), h[0])
    torch.testing.assert_close(group.whiten(q, torch.ones(1, 12), h[:1]), once)
    torch.testing.assert_close(group.whiten(q, torch.ones(5, 12), h[:1].expand(5, 12))["0"]["Q"], once["0"]["Q"])


@pytest.mark.parametrize("whitening", [True, False], ids=["whitening", "newton"])
def test_entries_without_gradient_do_not_let_p_grow_for_ever(whitening):
    group = InverseFree((6, 5), (Diagonal(), Dense()), damping=1e-2)
    rng, q = torch.Generator().manual_seed(0), group.init(30)
    for _ in range(2000):
        h = torch.randn(6, 5, generator=rng)
        v = h.flatten().clone()
        h[2] = 0
        q = (group.whiten if whitening else group.fit)(q, v, h.flatten(), lr=0.5)
    p = preconditioner(group, q, 30).diagonal().view(6, 5)
    assert 10 < p[2].mean() / p[0].mean() < 200


def test_axes_of_one_have_no_factor_and_other_factors_are_refused():
    group = InverseFree((1, 3), (Identity(), Dense()))
    q = group.whiten(group.init(3), torch.ones(3), torch.ones(3))
    assert q["0"] == {} and q["1"]["Q"].shape == (3, 3)
    with pytest.raises(ValueError, match=r"Dense\(\), Diagonal\(\) or Identity\(\), got Triangular"):
        InverseFree((3, 3), (Triangular(), Dense()))
    with pytest.raises(ValueError, match=r"with Direct\(\) needs factors Positive\(\), Diagonal\(\) or Identity"):
        InverseFree((3, 3), (Positive(), Dense()), Direct())
    with pytest.raises(ValueError, match=r"with Quadratic\(\) needs factors Dense\(\), .*got Positive"):
        InverseFree((3, 3), (Positive(), Dense()))
    with pytest.raises(ValueError, match="damping >= 0"):
        InverseFree((3,), (Dense(),), damping=-1.0)
    with pytest.raises(ValueError, match=r"which move Q, got torch.bfloat16 for Direct"):
        InverseFree((3,), (Diagonal(),), Direct(), products=torch.bfloat16)
    product = InverseFree((3,), (Dense(),)) @ Diagonal()
    with pytest.raises(ValueError, match="as a whole"):
        product.fit(product.init(3), torch.ones(3), torch.ones(3))


def test_a_motion_of_ones_own():
    class Still(Motion):
        def matrix(self, q, r, g):
            return q

        def diagonal(self, d, g):
            return d

    group = InverseFree((3, 2), (Dense(), Diagonal()), Still())
    q = group.init(6)
    moved = group.whiten(q, torch.ones(6), torch.ones(6))
    assert torch.equal(moved["0"]["Q"], q["0"]["Q"]) and torch.equal(moved["1"]["d"], q["1"]["d"])


@pytest.mark.parametrize(("motion", "products"), [*itertools.product(COARSE, (None, torch.bfloat16)), (Direct(), None)])
def test_motions_take_stacks(motion, products):
    rng = torch.Generator().manual_seed(0)
    q = torch.stack([spd(6, 0.5, i) for i in range(3)]).float()
    r, c = q if products is None else q.to(products), torch.rand(3, generator=rng) * 0.1
    x, g = (0.1 * torch.randn(3, 6, k, generator=rng).to(r) for k in (2, 6))
    stacks = motion.matrix(q, r, g + g.mT), motion.narrow(q, r, x, c), motion.diagonal(q[0], g[0].float())
    for i in range(3):
        alone = motion.matrix(q[i], r[i], (g + g.mT)[i]), motion.narrow(q[i], r[i], x[i], c[i])
        torch.testing.assert_close((stacks[0][i], stacks[1][i]), alone)
        torch.testing.assert_close(stacks[2][i], motion.diagonal(q[0, i], g[0, i].float()))
    rough = Motion.narrow(motion, q, r, x, c)  # which forms G
    torch.testing.assert_close(stacks[1], rough, rtol=0, atol=1e-5 if products is None else 0.02)


SHAPES = [(6, 4), (4, 6), (5, 5), (3, 2, 4), (2, 9, 3)]


@pytest.mark.parametrize(
    ("motion", "products"), [(Quadratic(), None), (Quadratic(), torch.bfloat16), (Direct(), None)], ids=str
)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_what_is_ready_for_one_use_serves_a_step_and_for_many_gives_the_same(shape, motion, products):
    group = InverseFree(shape, (motion.part,) * len(shape), motion, products=products)
    blocks, rng = Blocks(math.prod(shape), group), torch.Generator().manual_seed(0)
    for some, n in ((group, math.prod(shape)), (blocks, 3 * math.prod(shape))):
        q, v, h = some.init(n), torch.randn(n, generator=rng), torch.randn(n, generator=rng)
        for _ in range(4):
            q = some.whiten(q, v, torch.randn(n, generator=rng), lr=0.5)
        once = some.ready(q, 1)
        assert torch.equal(some.precondition(once, h), some.precondition(q, h))
        torch.testing.assert_close(some.precondition(some.ready(q), h), some.precondition(q, h))
        after, same = some.whiten(q, v, h), some.whiten(once, v, h)
        assert [*map(torch.equal, leaves(after), leaves(same))] == [True] * 2 * len(shape)


def test_what_is_ready_is_p_where_that_pays():
    group = InverseFree((8, 2), (Dense(), Dense()))
    q = group.init(16)
    assert [["P" in group.ready(q, uses)[i] for i in "01"] for uses in (1, 3, 4)] == [
        [False, True],
        [False, True],
        [True, True],
    ]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [(1, 3), (2, 5), (7, 4), (3, 9, 2), (2, 2, 8, 8), (3, 0)], ids=str)
def test_half_of_a_symmetric_product_is_enough(shape, dtype, monkeypatch):
    rng = torch.Generator().manual_seed(0)
    x = torch.randn(*shape, generator=rng, dtype=torch.float64).to(dtype)
    s = torch.randn(shape[-1], shape[-1], generator=rng, dtype=torch.float64).to(dtype)
    pairs = [(x, x.mT), (x, (s + s.mT) @ x.mT)]
    plain = [a @ b for a, b in pairs]
    monkeypatch.setattr(linalg, "SIDE", 1)
    for (a, b), whole in zip(pairs, plain, strict=True):
        product = linalg.symmetric_product(a, b)
        torch.testing.assert_close(product, whole)
        if dtype != torch.bfloat16:  # which is as quick in one piece
            assert torch.equal(product, product.mT) and product.is_contiguous()
