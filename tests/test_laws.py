"""Every law on every named group, in float64, a few steps from the origin."""

import laws
import pytest
import torch
from cases import ALGEBRAS, CASES, Case, ids, pair, walked
from laws import Plain, dense, eye, in_algebra, near, near_points, slack, without_ell
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

import psgd
from psgd import (
    DCT,
    Blocks,
    Butterfly,
    Circulant,
    Conjugate,
    Dense,
    Diagonal,
    DirectSum,
    Group,
    Identity,
    IncompleteTriangular,
    Kronecker,
    LowerTriangular,
    LowRank,
    MatrixAlgebra,
    Normalization,
    Normalized,
    Padded,
    Permute,
    Point,
    Scalar,
    Shift,
    Smoothed,
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

of_every_group = pytest.mark.parametrize(("name", "group", "n"), CASES, ids=ids(CASES))
of_every_algebra = pytest.mark.parametrize(("name", "group", "n"), ALGEBRAS, ids=ids(ALGEBRAS))
EQUIVARIANT: list[Case] = [case for case in CASES if laws.has_rightmost_algebra(case[1])]


@of_every_group
@pytest.mark.parametrize(
    "law",
    [
        laws.matrix_is_the_one_written_down,
        laws.actions_are_those_of_one_matrix,
        laws.actions_work_on_any_batch,
        laws.step_is_the_gradient,
        laws.factors_move_by_at_most_their_share,
        laws.small_step_lowers_the_criterion,
        laws.pairs_count_as_their_sum,
        laws.scale_of_the_pair_does_not_matter,
        laws.rate_may_be_a_tensor,
        laws.fused_fit_is_the_derived_one,
        laws.one_twin_moves_at_a_time,
        laws.balance_changes_coordinates_only,
        laws.scaled_is_s_times_q,
        laws.points_are_nested_dicts_of_tensors,
        laws.nothing_is_changed_in_place,
        laws.groups_are_values,
        laws.orientation_is_kept,
    ],
    ids=lambda law: law.__name__,
)
def test_law(law, name: str, group: Group, n: int):
    law(group, n)


@pytest.mark.parametrize(("name", "group", "n"), EQUIVARIANT, ids=ids(EQUIVARIANT))
def test_fit_is_equivariant(name: str, group: Group, n: int):
    laws.fit_is_equivariant(group, n)


BOUNDED = [case for case in CASES if not isinstance(case[1], LowRank)]  # whose ℓ bounds E, not the curvature


@pytest.mark.parametrize(("name", "group", "n"), BOUNDED, ids=ids(BOUNDED))
def test_smoothed_step_of_half_rate_lowers_the_criterion_of_any_pair(name: str, group: Group, n: int):
    q = walked(group, n)
    for i in range(2):
        x, y = pair(n, i)
        for v, h in laws.adversaries(i, x, y, lambda t: group.solve(q, group.solve_t(q, t))):
            new = group.fit(q, v, h, lr=0.5, coin=bool(i))
            assert group.criterion(new, v, h) <= group.criterion(q, v, h) * (1 + 1e-9)


LONG = ["diagonal", "xmat odd", "butterfly", "triangular", "dense", "normalization", "circulant even", "lra"]


@pytest.mark.parametrize(("name", "group", "n"), [case for case in CASES if case[0] in LONG], ids=LONG)
def test_orientation_is_kept_for_hundreds_of_steps(name: str, group: Group, n: int):
    laws.orientation_is_kept(group, n, seed=1, steps=200)


def test_every_public_group_is_a_case():
    def classes(group: Group) -> set[type]:
        inner = [getattr(group, k) for k in ("part", "by") if hasattr(group, k)]
        return {type(group)}.union(*map(classes, (*inner, *getattr(group, "parts", ()))))

    public = {t for t in vars(psgd).values() if isinstance(t, type) and issubclass(t, Group)}
    abstract = {t for t in public if getattr(t, "__abstractmethods__", None)}
    other = {psgd.InverseFree, psgd.Positive}  # Kronecker's matrices, moved by another rule: tests/kron
    assert public - abstract - other == set().union(*(classes(group) for _, group, _ in CASES))


# --- algebras


def element(group: MatrixAlgebra, n: int, seed: int) -> Point:
    """A random element of the algebra, invertible or not."""
    g = torch.Generator().manual_seed(seed)
    shapes = {k: t.shape for k, t in group.identity(n).items()}
    return in_algebra(group, n, {k: torch.randn(s, generator=g, dtype=torch.float64) for k, s in shapes.items()})


@of_every_algebra
def test_project_is_the_vector_jacobian_product(name: str, group: MatrixAlgebra, n: int):
    for batch in ((), (3,), (2, 3)):
        y, x = pair(n, 1, *batch)
        e = tree_map(lambda t: t.requires_grad_(), element(group, n, 2))
        grads = torch.autograd.grad((x * group.apply(e, y)).sum(), list(e.values()))
        near_points(group.project(x, y), in_algebra(group, n, dict(zip(e, grads, strict=True))))


@of_every_algebra
def test_compose_is_the_matrix_product(name: str, group: MatrixAlgebra, n: int):
    e, q = element(group, n, 1), walked(group, n)
    near(dense(group, group.compose(e, q), n), dense(group, e, n) @ dense(group, q, n), 1e-11)


@of_every_algebra
def test_algebra_holds_identity_products_and_inverses(name: str, group: MatrixAlgebra, n: int):
    unit = group.identity(n, dtype=torch.float64)
    near(dense(group, unit, n), eye(n))
    span = torch.stack([dense(group, e, n).flatten() for e in basis(group, n)], 1)
    a, b = (dense(group, walked(group, n, seed), n) for seed in (1, 2))
    for m in (a @ b, a.inverse()):
        coordinates = torch.linalg.lstsq(span, m.flatten()[:, None], driver="gelsd").solution
        near((span @ coordinates)[:, 0], m.flatten())


def basis(group: MatrixAlgebra, n: int) -> list[Point]:
    """The elements with one coordinate 1, of those that the algebra has."""
    zero = tree_map(torch.zeros_like, group.identity(n, dtype=torch.float64))
    units = []
    for k, t in zero.items():
        for i in range(t.numel()):
            unit = torch.zeros_like(t)
            unit.view(-1)[i] = 1
            units.append(in_algebra(group, n, zero | {k: unit}))
    return units


@of_every_algebra
def test_norm_brackets_the_spectral_norm(name: str, group: MatrixAlgebra, n: int):
    x, y = pair(n, 1)
    elements = [element(group, n, seed) for seed in range(20)] + basis(group, n)
    elements += [group.project(x, y), group.project(x, x), group.project(*pair(n, 2, 5))]
    for e in elements:
        norm, spectral = group.norm(e), torch.linalg.matrix_norm(dense(group, e, n), 2)
        assert spectral * (1 - 1e-12) <= norm <= slack(group, n) * spectral * (1 + 1e-12)


@of_every_algebra
def test_norm_neither_overflows_nor_vanishes(name: str, group: MatrixAlgebra, n: int):
    e = element(group, n, 1)
    for c in (2.0**600, 2.0**-600):
        near(group.norm(tree_map(lambda t, c=c: c * t, e)), c * group.norm(e))


@of_every_algebra
def test_smoothed_rule_remembers_the_largest_residuals(name: str, group: MatrixAlgebra, n: int):
    q, rule = group.init(n, dtype=torch.float64), Smoothed(0.75)
    ell = torch.zeros((), dtype=torch.float64)
    for i, scale in enumerate((1.0, 100.0, 0.01, 1.0)):
        v, h = (scale * t for t in pair(n, i))
        a, b = group.apply(q, h), group.solve_t(q, v)
        plus, minus = group.project(a, a), group.project(b, b)
        now = group.norm(plus) + group.norm(minus)
        ell = torch.maximum(0.75 * ell + 0.25 * now, now)
        step = group.compose({k: plus[k] - minus[k] for k in plus}, q)
        expected = {k: q[k] - 0.3 / ell * t for k, t in step.items()} | {"ell": ell}
        q = group.fit(q, v, h, lr=0.3, rule=rule)
        near_points(q, expected)


@of_every_algebra
def test_normalized_rule_remembers_nothing(name: str, group: MatrixAlgebra, n: int):
    q = walked(group, n)
    new, other = (group.fit(q | {"ell": c * q["ell"]}, *pair(n, 9), rule=Normalized()) for c in (1, 7))
    assert torch.equal(new["ell"], q["ell"])
    near_points(without_ell(other), without_ell(new))


# --- points


@of_every_group
def test_init_gives_the_scaled_identity(name: str, group: Group, n: int):
    def products(scale: float | Tensor) -> Tensor:
        q = group.init(n, scale=scale, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        return group.precondition(q, eye(n))

    exact = "LowRank" not in repr(group) or name == "low rank 0"
    for scale in (3.0, torch.tensor(3.0, dtype=torch.float64)) if group.scalable else (1.0,):
        near(products(scale), float(scale) ** 2 * eye(n), 1e-12 if exact else 0.5)


@of_every_group
def test_init_draws_from_the_generator_alone(name: str, group: Group, n: int):
    before = torch.get_rng_state()
    first, second = (group.init(n, generator=torch.Generator().manual_seed(5)) for _ in range(2))
    assert torch.equal(torch.get_rng_state(), before)
    assert all(torch.equal(a, b) for a, b in zip(tree_leaves(first), tree_leaves(second), strict=True))
    assert all(t.dtype == torch.get_default_dtype() for t in tree_leaves(first))


@of_every_group
def test_coin_is_for_low_rank_alone(name: str, group: Group, n: int):
    q = walked(group, n)
    heads, tails = (group.fit(q, *pair(n, 9), coin=coin) for coin in (True, False))
    same = all(torch.equal(a, b) for a, b in zip(tree_leaves(heads), tree_leaves(tails), strict=True))
    assert same == ("LowRank" not in repr(group) or name == "low rank 0")


TWINS: list[tuple[Group, Group, int]] = [
    (XMat(), permutation(generators=[(5, 4, 3, 2, 1, 0)]), 6),
    (XMat(), permutation(generators=[(4, 3, 2, 1, 0)]), 5),
    (Butterfly(), permutation(elements=[(0, 1, 2, 3), (2, 3, 0, 1)]), 4),
    (Diagonal(), Blocks(1, Dense()), 4),
    (Diagonal(), Blocks(1, Circulant()), 4),
    (Triangular(), IncompleteTriangular(3), 4),
    (Triangular(), Normalization(), 2),
    (LowerTriangular(), Conjugate(Permute((3, 2, 1, 0)), Triangular()), 4),
    (Dense(), Kronecker((4,), (Dense(),)), 4),
    (Dense(), Conjugate(Shift(1), Dense()), 4),
    (Dense(), fishnet(2), 2),
    (Scalar(), Kronecker((1, 4), (Dense(), Identity())), 4),
    (Blocks(2, lra(1)), DirectSum((2, 2), (lra(1), lra(1))), 4),
    (LowRank(2), Shift(-1) @ LowRank(2) @ Shift(1), 5),
]


@pytest.mark.parametrize(("group", "twin", "n"), TWINS, ids=[f"{a} = {b}" for a, b, _ in TWINS])
def test_two_names_of_a_group_walk_alike(group: Group, twin: Group, n: int):
    if isinstance(group, LowRank):  # start at the same Q
        q = group.init(n, dtype=torch.float64)
        p = {"0": {}, "1": q | {k: q[k].roll(1, 0) for k in "UV"}, "2": {}}
    elif isinstance(group, Blocks) and isinstance(twin, DirectSum):
        q = group.init(n, dtype=torch.float64)
        p = {str(i): tree_map(lambda t, i=i: t[i], q) for i in range(2)}
    else:
        q, p = group.init(n, dtype=torch.float64), twin.init(n, dtype=torch.float64)
    for i in range(6):
        v, h = pair(n, i)
        a, b = group.apply(q, h), group.solve_t(q, v)
        lr = 0.3 / float(a @ a + b @ b)
        q, p = (g.fit(r, v, h, lr=lr, coin=bool(i % 2), rule=Plain()) for g, r in ((group, q), (twin, p)))
        near(dense(twin, p, n), dense(group, q, n), 1e-9)


def test_permutation_mixes_within_orbits_only():
    group = permutation(orbits=[(0, 3, 5), (1,), (4, 2)])
    orbit = torch.tensor([0, 1, 2, 0, 2, 0])
    assert torch.equal(dense(group, walked(group, 6), 6) != 0, orbit[:, None] == orbit)


def test_named_groups_are_the_expressions_of_the_paper():
    blocks, coarse = Blocks(4, Dense()), Kronecker((3, 4), (Dense(), Identity()))
    assert lra(3) == LowRank(3) @ Diagonal()
    assert lra_duv(3) == Diagonal() @ LowRank(3)
    assert band(4) == blocks @ Shift(2) @ blocks
    assert two_grid(3, 4) == Shift(-2) @ coarse @ Shift(2) @ coarse
    assert dct(XMat()) == XMat() @ DCT() @ Diagonal()
    assert affine((3, 4)) == Kronecker((3, 4), (Triangular(), Triangular()))
    assert fishnet(8) == permutation(orbits=[(0, 3, 4, 7), (1, 2, 5, 6)])
    assert fishnet(8, levels=1) == permutation(generators=[(7, 6, 5, 4, 3, 2, 1, 0)])
    assert kaleidoscope(8) == XMat() @ Blocks(4, XMat()) @ Blocks(2, Dense())
    thirds = DirectSum((4, 3), (Blocks(2, Dense()), Dense()))
    assert kaleidoscope(7) == XMat() @ DirectSum((3, 4), (XMat(), XMat())) @ thirds


def test_low_rank_step_is_bounded_where_its_gram_matrix_is_not_accurate():
    n, group = 50, LowRank(2)
    g = torch.Generator().manual_seed(0)
    frame = torch.linalg.qr(torch.randn(n, 4, generator=g, dtype=torch.float64)).Q
    turn = torch.linalg.qr(torch.randn(2, 2, generator=g, dtype=torch.float64)).Q
    for ratio in (1e-2, 1e-3, 1e-4, 1e-5, 1e-6):
        v = (frame[:, :2] * torch.tensor([1, ratio])) @ turn
        zero = torch.zeros(())
        q = {"U": 0.1 * frame[:, 2:].float(), "V": v.float(), "ell_U": zero, "ell_V": zero}
        h = group.solve(q, frame[:, 1].float())  # a meets the small singular value of V alone
        new = group.fit(q, torch.zeros(n), h, lr=0.9, coin=True, rule=Normalized())
        change = group.matrix(new, n).double() @ group.matrix(q, n).double().inverse() - eye(n)
        assert torch.linalg.matrix_norm(change, 2) < 0.91


@pytest.mark.parametrize("coin", [True, False])
def test_low_rank_memory_is_the_norm_of_both_terms(coin: bool):
    """ℓ = ‖E₊‖_F + ‖E₋‖_F of Smoothed, with E₊ = a aᵀVVᵀ on A_V(U) and UUᵀa aᵀ on A_U(V), and E₋ of b."""
    group = LowRank(2)
    q = walked(group, 6) | {"ell_U": torch.zeros(()), "ell_V": torch.zeros(())}
    v, h = pair(6, 3)
    matrix, (u, w) = group.matrix(q, 6), (q["U"], q["V"])
    terms = []
    for x in (matrix @ h, torch.linalg.solve(matrix.mT, v)):
        e = torch.outer(x, x)
        terms.append(torch.linalg.matrix_norm(e @ w @ w.mT if coin else u @ u.mT @ e))
    near(group.fit(q, v, h, coin=coin)["ell_U" if coin else "ell_V"], terms[0] + terms[1], 1e-7)


def test_a_huge_pair_does_not_freeze_a_float32_fit():
    for group in (Dense(), Triangular(), Normalization(), IncompleteTriangular(2), lra(2)):
        q = walked(group, 4, dtype=torch.float32)
        v, h = pair(4, 1, dtype=torch.float32)
        q = group.fit(q, v, 1e12 * h)
        assert all(t.isfinite().all() for t in tree_leaves(q))


def test_a_singular_matrix_gives_no_error():
    q = {"Q": torch.zeros(2, 2)}
    assert not Dense().solve(q, torch.ones(2)).isfinite().any()


# --- padding


def test_padded_group_of_a_fitting_size_is_the_group():
    group, padded = Blocks(2, Dense()), Padded(Blocks(2, Dense()), 2)
    q, (v, h) = walked(group, 6), pair(6, 1, 3)
    near_points(padded.fit(q, v, h), group.fit(q, v, h))
    near(padded.precondition(q, h), group.precondition(q, h))
    assert padded.size(6) == 6 and padded.size(7) == 8


def test_padding_is_a_parameter_with_unit_hessian():
    group = Padded(Butterfly(), 4)
    q = group.init(6, scale=2.0, dtype=torch.float64)
    hessian = torch.linspace(0.5, 3, 6, dtype=torch.float64)
    for i in range(500):
        v, _ = pair(6, i)
        q = group.fit(q, v, hessian * v, lr=0.5)
    whole = group.part.precondition(q, eye(8))
    near(whole, torch.cat((1 / hessian, torch.ones(2))).diag(), 1e-4)
    near(group.precondition(q, eye(6)), whole[:6, :6])


def test_padding_leaves_whole_blocks_alone():
    group = Padded(Blocks(4, Triangular()), 4)
    q, p = group.init(10, dtype=torch.float64), group.part.init(8, dtype=torch.float64)
    for i in range(5):
        v, h = pair(10, i)
        q, p = group.fit(q, v, h), group.part.fit(p, v[:8], h[:8])
    near(q["Q"][:2], p["Q"])
