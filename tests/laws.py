"""The laws that every group obeys, once: tried on the named cases and on random expressions.

Each law takes a group, a size n and a seed, in float64, at a point a few steps from the origin.
"""

import copy
import pickle
from collections.abc import Callable, Iterator
from functools import reduce
from itertools import product
from typing import Any

import pytest
import torch
from cases import pair, walked
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

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
    Orthogonal,
    Permute,
    Point,
    Product,
    Scalar,
    Shift,
    Smoothed,
    StepSize,
    Triangular,
    XMat,
)
from psgd.groups.composite import Composite
from psgd.groups.involution import Involution

RULES: list[StepSize] = [Normalized(), Smoothed()]


class Plain(StepSize):
    """s = μ: the bare gradient, which no norm can hide."""

    def __call__(self, lr: Any, ell: Tensor, norm: Any, bound: Any) -> tuple[Any, Tensor]:
        """Return (μ, ell unchanged)."""
        return lr, ell


def near(actual: Tensor, expected: Tensor, tol: float = 1e-9) -> None:
    """Raise unless two tensors agree, to a part of the largest entry."""
    scale = float(expected.abs().amax()) if expected.numel() else 0.0
    torch.testing.assert_close(actual, expected, rtol=0, atol=tol * max(scale, 1e-300), check_dtype=False)


def near_points(actual: Point, expected: Point, tol: float = 1e-9) -> None:
    """Raise unless two points have the same keys and agree leaf by leaf."""
    (a, a_spec), (b, b_spec) = tree_flatten(actual), tree_flatten(expected)
    assert a_spec == b_spec
    for x, y in zip(a, b, strict=True):
        near(x, y, tol)


def eye(n: int) -> Tensor:
    """I, whose rows are the unit vectors."""
    return torch.eye(n, dtype=torch.float64)


def dense(group: Group, q: Point, n: int) -> Tensor:
    """Q, column by column."""
    return group.apply(q, eye(n)).mT


# --- actions


def written(group: Group, q: Point, n: int) -> Tensor:
    """Q from its coordinates, as the definitions write it; no code is shared with the groups."""
    match group:
        case Diagonal():
            return q["d"].diag()
        case Scalar():
            return q["s"] * eye(n)
        case XMat():
            return q["a"].diag() + q["b"].diag().flip(1)
        case Butterfly():
            return q["a"].diag() + q["b"].diag() @ eye(n).roll(n // 2, 0)
        case Triangular() | Dense():
            return q["Q"]
        case IncompleteTriangular():
            return torch.cat((q["T"], torch.cat((torch.zeros(n - group.k, group.k), q["d"].diag()), 1)))
        case Normalization():
            return q["d"].diag() + torch.cat((q["u"], q["u"].new_zeros(1))).outer(eye(n)[-1])
        case Circulant():
            return torch.stack([q["c"].roll(i) for i in range(n)], 1)
        case LowRank():
            return eye(n) + q["U"] @ q["V"].mT
        case Identity():
            return eye(n)
        case Shift():
            return eye(n).roll(group.k, 0)
        case Permute():
            return eye(n)[list(group.order)]
        case DCT():
            k = torch.arange(n, dtype=torch.float64)
            scale = (2 - (k == 0).double()).div(n).sqrt()[:, None]
            return scale * torch.cos(torch.pi / n * k[:, None] * (k + 0.5))
        case Conjugate():
            c = written(group.by, q["C"], n)
            return c.inverse() @ written(group.part, q["A"], n) @ c
        case Blocks():
            blocks = (tree_map(lambda t, i=i: t[i], q) for i in range(n // group.k))
            return torch.block_diag(*(written(group.part, p, group.k) for p in blocks))
    assert isinstance(group, Composite)
    matrices = [written(part, q[key], size) for key, part, size in parts_of(group, n)]
    if isinstance(group, DirectSum):
        return torch.block_diag(*matrices)
    return reduce(torch.kron if isinstance(group, Kronecker) else torch.matmul, matrices)


def matrix_is_the_one_written_down(group: Group, n: int, seed: int = 0) -> None:
    """Qx is the product of x with the matrix of the definition."""
    q = walked(group, n, seed)
    near(dense(group, q, n), written(group, q, n), 1e-10)
    if tree_leaves(q):
        near(group.matrix(q, n), written(group, q, n), 1e-10)


def actions_are_those_of_one_matrix(group: Group, n: int, seed: int = 0) -> None:
    """apply, apply_t, solve, solve_t, precondition, criterion and logabsdet all speak of the same Q."""
    q = walked(group, n, seed)
    m = dense(group, q, n)
    near(group.apply_t(q, eye(n)), m, 1e-11)
    near(m @ group.solve(q, eye(n)).mT, eye(n), 1e-8)
    near(m.mT @ group.solve_t(q, eye(n)).mT, eye(n), 1e-8)
    near(group.solve(q, m.mT), eye(n), 1e-8)
    near(group.solve_t(q, m), eye(n), 1e-8)
    assert abs(group.logabsdet(q, n) - torch.linalg.slogdet(m).logabsdet) < 1e-8
    v, h = pair(n, seed, 3)
    near(group.precondition(q, h), h @ m.mT @ m, 1e-10)
    over = h[0].clone()
    near(group.precondition(q, over, over), h[0] @ m.mT @ m, 1e-10)
    near(group.criterion(q, v, h), (h @ m.mT).square().sum(-1) + (v @ m.inverse()).square().sum(-1), 1e-8)


def actions_work_on_any_batch(group: Group, n: int, seed: int = 0) -> None:
    """A batched action is a loop over the vectors, for every batch shape."""
    q = walked(group, n, seed)
    x, _ = pair(n, seed, 2, 3)
    for action in (group.apply, group.apply_t, group.solve, group.solve_t):
        near(action(q, x), torch.stack([torch.stack([action(q, t) for t in row]) for row in x]), 1e-10)


# --- the step


def moved(group: Group, q: Point, e: Point, coin: bool, lr: float | None = None) -> Point:
    """(I + E)·A for every moving factor A, E given by coordinates; with lr, shared as the docs say."""
    match group:
        case MatrixAlgebra():
            shift = group.compose(without_ell(e), q)
            return q | {k: q[k] + (lr or 1) * t for k, t in shift.items()}
        case LowRank():
            u, v, one = q["U"], q["V"], lr or 1
            if coin:  # (I + G Vᵀ)(I + U Vᵀ)
                return q | {"U": u + one * (e["U"] + e["U"] @ (v.mT @ u))}
            return q | {"V": v + one * (e["V"] + v @ (u.mT @ e["V"]))}  # (I + U Gᵀ)(I + U Vᵀ)
        case Orthogonal():
            return q
        case Conjugate():
            return q | {"A": moved(group.part, q["A"], e["A"], coin, lr)}
        case Blocks():
            return torch.vmap(lambda p, d: moved(group.part, p, d, coin, lr))(q, e) if group.moves else q
    if lr and not isinstance(group, DirectSum):
        lr = lr / max(1, sum(part.moves for part in group.parts))
    return {str(i): moved(p, q[str(i)], e[str(i)], coin, lr) for i, p in enumerate(group.parts)}


def step_is_the_gradient(group: Group, n: int, seed: int = 0) -> None:
    """A step with s = μ moves each factor A to A − μ·E·A, E = ½ ∂c/∂E by autograd, summed over the batch."""
    q = walked(group, n, seed)
    for coin in (True, False):
        for batch in ((), (2, 2)):
            v, h = pair(n, seed + 50, *batch)
            e = tree_map(lambda t: torch.zeros_like(t, requires_grad=True), q)
            leaves, spec = tree_flatten(e)
            c = group.criterion(moved(group, q, e, coin), v, h).sum()
            if not c.requires_grad:
                assert not group.moves
                continue
            grads = torch.autograd.grad(c / 2, leaves, materialize_grads=True)
            grads = in_algebra(group, n, tree_unflatten(grads, spec))
            expected = moved(group, q, tree_map(torch.neg, grads), coin, lr=0.01)
            near_points(group.fit(q, v, h, lr=0.01, coin=coin, rule=Plain()), expected, 1e-7)


def in_algebra(group: Group, n: int, e: Point) -> Point:
    """E without the entries that are zero throughout its algebra: autograd does not know of those."""
    match group:
        case LowerTriangular():
            return e | {"Q": e["Q"].tril()}
        case Triangular():
            return e | {"Q": e["Q"].triu()}
        case IncompleteTriangular():
            return e | {"T": e["T"].triu()}
        case XMat() if n % 2:
            return e | {"b": e["b"] * (torch.arange(n) != n // 2)}
        case Blocks():
            return in_algebra(group.part, group.k, e)
        case Conjugate():
            return e | {"A": in_algebra(group.part, n, e["A"])}
        case Composite():
            return {key: in_algebra(part, size, e[key]) for key, part, size in parts_of(group, n)}
    return e


def parts_of(group: Composite, n: int) -> list[tuple[str, Group, int]]:
    """The parts of a group with their keys and sizes."""
    sizes = {DirectSum: "sizes", Kronecker: "shape"}
    each = getattr(group, sizes[type(group)]) if type(group) in sizes else [n] * len(group.parts)
    return [(str(i), part, size) for i, (part, size) in enumerate(zip(group.parts, each, strict=True))]


def factors(group: Group, n: int, q: Point, lr: float = 1.0) -> Iterator[tuple[Group, int, Point, float]]:
    """The matrices that an expression is made of: leaf, size, point, and the share of lr that is its own."""
    match group:
        case Blocks():
            for i in range(n // group.k):
                yield from factors(group.part, group.k, tree_map(lambda t, i=i: t[i], q), lr)
        case Conjugate():
            yield from factors(group.part, n, q["A"], lr)
        case Composite():
            share = 1 if isinstance(group, DirectSum) else max(1, sum(part.moves for part in group.parts))
            for key, part, size in parts_of(group, n):
                yield from factors(part, size, q[key], lr / share)
        case _:
            yield group, n, q, lr


def factors_move_by_at_most_their_share(group: Group, n: int, seed: int = 0) -> None:
    """‖A′A⁻¹ − I‖ ≤ μ for every factor, in the spectral norm, whatever the rule, the rate and the pair."""
    q = walked(group, n, seed)
    for rule in RULES:
        for coin, lr in ((True, 0.1), (False, 0.99)):
            new = group.fit(q, *pair(n, seed + 50), lr=lr, coin=coin, rule=rule)
            for (leaf, size, a, mu), (_, _, b, _) in zip(
                factors(group, n, q, lr), factors(group, n, new, lr), strict=True
            ):
                ratio = dense(leaf, b, size) @ dense(leaf, a, size).inverse()
                change = torch.linalg.matrix_norm(ratio - eye(size), 2)
                assert change <= mu * (1 + 1e-8), f"{leaf} moved by {change:.3g} > {mu:.3g}"
                if isinstance(rule, Normalized) and isinstance(leaf, MatrixAlgebra):
                    assert change >= mu / slack(leaf, size) * (1 - 1e-8), f"{leaf} moved by {change:.3g} only"


def slack(group: MatrixAlgebra, n: int) -> float:
    """The largest norm(E)/‖E‖: 1 where the norm is exact, √rank for Frobenius, √2 for two sets of columns."""
    match group:
        case Triangular() | Dense():
            return n**0.5
        case IncompleteTriangular():
            return (group.k + 1) ** 0.5
        case Normalization():
            return 2**0.5
    return 1.0


def small_step_lowers_the_criterion(group: Group, n: int, seed: int = 0) -> None:
    """c falls on the pair of the step, under each rule and either coin; half a step, half the fall."""
    q = walked(group, n, seed)
    v, h = pair(n, seed + 50)
    c = group.criterion(q, v, h)
    for rule in RULES:
        for coin in (True, False):
            news = (group.fit(q, v, h, lr=lr, coin=coin, rule=rule) for lr in (1e-5, 5e-6))
            whole, half = (c - group.criterion(new, v, h) for new in news)
            if group.moves:
                assert whole > 0
                near(half / whole, torch.tensor(0.5, dtype=torch.float64), 0.02)
            else:
                assert whole == 0


def pairs_count_as_their_sum(group: Group, n: int, seed: int = 0) -> None:
    """The order and the shape of a batch, zero pairs, and pairs split in two do not matter."""
    q = walked(group, n, seed)
    v, h = pair(n, seed + 50, 2, 3)
    for rule in RULES:
        expected = group.fit(q, v, h, rule=rule)
        flat_v, flat_h = v.reshape(6, n), h.reshape(6, n)
        near_points(group.fit(q, flat_v.flip(0), flat_h.flip(0), rule=rule), expected)
        zero = torch.zeros(2, n, dtype=v.dtype)
        near_points(group.fit(q, torch.cat((flat_v, zero)), torch.cat((flat_h, zero)), rule=rule), expected)
        twice = [torch.cat((t, t)) / 2**0.5 for t in (flat_v, flat_h)]
        near_points(group.fit(q, *twice, rule=rule), expected)


def scale_of_the_pair_does_not_matter(group: Group, n: int, seed: int = 0) -> None:
    """fit(q, cv, ch) = fit(q, v, h) before L remembers a scale, though squares of E overflow or vanish."""
    q = group.init(n, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    v, h = pair(n, seed + 50)
    for rule in RULES:
        for coin in (True, False):
            expected = without_ell(group.fit(q, v, h, coin=coin, rule=rule))
            for c in (2.0**300, 2.0**-300):
                new = group.fit(q, c * v, c * h, coin=coin, rule=rule)
                assert all(t.isfinite().all() for t in tree_leaves(new))
                near_points(without_ell(new), expected)


def without_ell(q: Point) -> Point:
    """The coordinates of a point, without the memory of its steps."""
    return {k: without_ell(t) if isinstance(t, dict) else t for k, t in q.items() if not k.startswith("ell")}


def rate_may_be_a_tensor(group: Group, n: int, seed: int = 0) -> None:
    """A 0-d tensor, also a float32 one, moves a float64 point as the number does, and keeps its dtype."""
    q = walked(group, n, seed)
    v, h = pair(n, seed + 50)
    expected = group.fit(q, v, h, lr=0.25)
    for dtype in (torch.float64, torch.float32):
        new = group.fit(q, v, h, lr=torch.tensor(0.25, dtype=dtype))
        near_points(new, expected, 1e-6)
        same_structure(new, expected)


def fused_fit_is_the_derived_one(group: Group, n: int, seed: int = 0) -> None:
    """A group that overrides fit or precondition computes what the protocol says."""
    q = walked(group, n, seed)
    v, h = pair(n, seed + 50, 2)
    for coin in (True, False):
        near_points(group.fit(q, v, h, coin=coin), Group.fit(group, q, v, h, coin=coin))
    near(group.precondition(q, h), Group.precondition(group, q, h))


def fit_is_equivariant(group: Group, n: int, seed: int = 0) -> None:
    """fit(QD, Dᵀv, D⁻¹h) = fit(Q, v, h)·D for D in the (rightmost) algebra."""
    key = str(len(group.parts) - 1) if isinstance(group, Product) else None
    algebra = group.parts[-1] if isinstance(group, Product) else group
    q, d = walked(group, n, seed), walked(algebra, n, seed + 1)
    v, h = pair(n, seed + 50)

    def times_d(p: Point) -> Point:
        right = p if key is None else p[key]
        right = right | algebra.compose(right, d)
        return right if key is None else p | {key: right}

    for rule in RULES:
        for coin in (True, False):
            expected = times_d(group.fit(q, v, h, lr=0.3, coin=coin, rule=rule))
            moved_pair = algebra.apply_t(d, v), algebra.solve(d, h)
            near_points(group.fit(times_d(q), *moved_pair, lr=0.3, coin=coin, rule=rule), expected, 1e-7)


def has_rightmost_algebra(group: Group) -> bool:
    """Whether the law of equivariance speaks of this group."""
    return isinstance(group, MatrixAlgebra) or (
        isinstance(group, Product) and isinstance(group.parts[-1], MatrixAlgebra)
    )


def one_twin_moves_at_a_time(group: Group, n: int, seed: int = 0) -> None:
    """A LowRank factor moves U or V, never both, and carries its ell; at the origin, too."""
    v, h = pair(n, seed + 50)
    origin = group.init(n, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    for q, coin in product((origin, walked(group, n, seed)), (True, False)):
        new = group.fit(q, v, h, coin=coin)
        for (leaf, _, a, _), (_, _, b, _) in zip(factors(group, n, q), factors(group, n, new), strict=True):
            if isinstance(leaf, LowRank) and leaf.moves:
                moves, stays = ("U", "V") if coin else ("V", "U")
                assert not torch.equal(a[moves], b[moves])
                assert torch.equal(a[stays], b[stays])
                assert not torch.equal(a["ell_" + moves], b["ell_" + moves])
                assert torch.equal(a["ell_" + stays], b["ell_" + stays])


# --- coordinates


def balance_changes_coordinates_only(group: Group, n: int, seed: int = 0) -> None:
    """Balance keeps Q, and every later step; redundant scales are even afterwards."""
    q = unbalanced(group, walked(group, n, seed))
    even = group.balance(q)
    near(dense(group, even, n), dense(group, q, n))
    near_points(group.balance(even), even)
    for rule in RULES:
        for coin in (True, False):
            v, h = pair(n, seed + 50)
            new, new_even = (group.fit(p, v, h, lr=0.3, coin=coin, rule=rule) for p in (q, even))
            near(dense(group, new_even, n), dense(group, new, n), 1e-7)
    for leaf, _, p, _ in factors(group, n, even):
        if isinstance(leaf, LowRank) and leaf.moves:
            near(p["U"].norm(), p["V"].norm())
    for kron, p in kroneckers(group, even):
        norms = [
            part.norm(without_ell(p[str(i)])) for i, part in enumerate(kron.parts) if isinstance(part, MatrixAlgebra)
        ]
        for norm in norms[1:]:
            near(norm, norms[0])


def unbalanced(group: Group, q: Point) -> Point:
    """The same Q with its redundant scales upset."""
    match group:
        case LowRank():
            return q | {"U": q["U"] * 4, "V": q["V"] / 4, "ell_U": q["ell_U"] / 16, "ell_V": q["ell_V"] * 16}
        case Kronecker():
            able = [i for i, part in enumerate(group.parts) if isinstance(part, MatrixAlgebra)]
            q = {str(i): unbalanced(part, q[str(i)]) for i, part in enumerate(group.parts)}
            if len(able) > 1:
                for i, s in ((able[0], 8.0), (able[-1], 1 / 8)):
                    q |= {str(i): group.parts[i].scaled(q[str(i)], s)}
            return q
        case Composite():
            return {str(i): unbalanced(part, q[str(i)]) for i, part in enumerate(group.parts)}
        case Blocks():
            return unbalanced(group.part, q)
        case Conjugate():
            return q | {"A": unbalanced(group.part, q["A"])}
    return q


def kroneckers(group: Group, q: Point) -> Iterator[tuple[Kronecker, Point]]:
    """The Kronecker products of an expression that are not within blocks."""
    if isinstance(group, Conjugate):
        yield from kroneckers(group.part, q["A"])
    if isinstance(group, Composite):
        for i, part in enumerate(group.parts):
            yield from kroneckers(part, q[str(i)])
    if isinstance(group, Kronecker):
        yield group, q


def scaled_is_s_times_q(group: Group, n: int, seed: int = 0) -> None:
    """scaled(q, s) has the matrix s·Q, for a float and for a tensor, or says that there is none."""
    q = walked(group, n, seed)
    for s in (3.0, torch.tensor(0.25, dtype=torch.float64)):
        if group.scalable:
            new = group.scaled(q, s)
            near(dense(group, new, n), s * dense(group, q, n), 1e-12)
            same_structure(new, q)
        else:
            with pytest.raises(ValueError, match="scale"):
                group.scaled(q, s)


def same_structure(actual: Point, expected: Point) -> None:
    """Raise unless two points have the same keys, shapes, dtypes."""
    (a, a_spec), (b, b_spec) = tree_flatten(actual), tree_flatten(expected)
    assert a_spec == b_spec
    assert [(t.shape, t.dtype) for t in a] == [(t.shape, t.dtype) for t in b]


def points_are_nested_dicts_of_tensors(group: Group, n: int, seed: int = 0) -> None:
    """Only dicts with string keys and tensors of their own; a step keeps keys, shapes and dtypes."""

    def plain(q: Any) -> bool:
        if type(q) is dict:
            return all(type(k) is str and plain(t) for k, t in q.items())
        return type(q) is Tensor

    q = group.init(n, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    assert plain(q)
    for t in tree_leaves(q):  # no leaf shares memory, with another or with itself
        assert t.untyped_storage().nbytes() == t.numel() * t.element_size()
    for rule in RULES:
        for coin in (True, False):
            new = group.fit(q, *pair(n, seed), coin=coin, rule=rule)
            assert plain(new)
            same_structure(new, q)
    same_structure(group.balance(q), q)


def nothing_is_changed_in_place(group: Group, n: int, seed: int = 0) -> None:
    """fit, precondition, balance and scaled leave q, v, h and g as they were."""
    q = walked(group, n, seed)
    v, h = pair(n, seed + 50, 2)
    before = tree_map(torch.clone, (q, v, h))
    for rule in RULES:
        for coin in (True, False):
            group.fit(q, v, h, coin=coin, rule=rule)
    group.precondition(q, h)
    group.balance(q)
    if group.scalable:
        group.scaled(q, 2.0)
    for a, b in zip(tree_leaves((q, v, h)), tree_leaves(before), strict=True):
        assert torch.equal(a, b)


def groups_are_values(group: Group, n: int, seed: int = 0) -> None:
    """Hashable, equal by value, and the same after pickle and deepcopy."""
    for twin in (pickle.loads(pickle.dumps(group)), copy.deepcopy(group)):
        assert twin == group and hash(twin) == hash(group) and repr(twin) == repr(group)
    assert group != Blocks(1, Blocks(1, group)) if n == 1 else group != Blocks(n, Blocks(n, group))


# --- walks

RATES = (0.1, 0.5, 0.9, 0.99)


Pairs = list[tuple[Tensor, Tensor]]


def adversaries(i: int, x: Tensor, y: Tensor, inverse: Callable[[Tensor], Tensor]) -> Pairs:
    """The i-th pairs (v, h) of as many walks; inverse(v) = P⁻¹v, whose residual is zero.

    Those that drive Q to zero rest after 40 steps: a hundred steps by 1 − 0.99 are more than a float holds.
    """
    drive = i < 40
    zero, ramp = torch.zeros_like(x), torch.logspace(-4, 4, len(x), dtype=x.dtype)
    return [
        (x, y),  # unrelated
        (x, ramp * x),  # an ill-conditioned Hessian
        (x, -ramp.flip(0) * x + 1e-3 * y),  # a negative one, with noise
        (x / y, y / x),  # heavy tails
        (x, 1e8 * y if i % 2 else 1e-8 * y),  # bad scales
        (x, zero if i % 3 else y),  # often no h
        (zero if i % 3 and drive else x, y),  # often no v
        (zero, zero) if i % 2 else (x, y),  # often nothing
        (torch.ones_like(x), ramp),  # ever the same pair
        (x * (x.abs() >= x.abs().amax()), y * (y.abs() >= y.abs().amax())),  # one entry each
        (x, inverse(x) * (1 + 1e-9 * y) if drive else y),  # a ≈ b
    ]


def orientation_is_kept(group: Group, n: int, seed: int = 0, steps: int = 40) -> None:
    """Every factor stays finite and keeps its orientation, for 0 < μ < 1, both rules, the worst of pairs."""
    if not group.moves:
        return
    start = walked(group, n, seed)
    kinds = len(adversaries(0, *torch.ones(2, n), torch.clone))
    lr = torch.tensor(RATES, dtype=torch.float64).repeat_interleave(kinds)
    kind = torch.arange(kinds).repeat(len(RATES))
    signs = [t.expand(len(lr), *t.shape) for t in orientations(group, n, start)]
    for rule in RULES:
        g = torch.Generator().manual_seed(seed)
        q = tree_map(lambda t: t.expand(len(lr), *t.shape), start)
        for i in range(steps):
            x, y = torch.randn(2, len(lr), n, generator=g, dtype=torch.float64)
            coin = bool(torch.randint(2, (), generator=g))

            def walk(q: Point, x: Tensor, y: Tensor, lr: Tensor, kind: Tensor, i=i, coin=coin, rule=rule):
                pairs = adversaries(i, x, y, lambda t: group.solve(q, group.solve_t(q, t)))
                v, h = (torch.stack(t)[kind] for t in zip(*pairs, strict=True))
                return group.fit(q, v, h, lr=lr, coin=coin, rule=rule)

            q = torch.vmap(walk)(q, x, y, lr, kind)
            if i % 10 == 9:
                bad = [~t.isfinite().reshape(len(lr), -1).all(1) for t in tree_leaves(q)]
                assert not torch.stack(bad).any(), f"{rule}, step {i}: {where(bad, lr, kind)} not finite"
                now = torch.vmap(lambda p: orientations(group, n, p))(q)
                bad = [(a != b).reshape(len(lr), -1).any(1) for a, b in zip(now, signs, strict=True)]
                assert not torch.stack(bad).any(), f"{rule}, step {i}: {where(bad, lr, kind)} turned over"


def where(bad: list[Tensor], lr: Tensor, kind: Tensor) -> str:
    """The walks that went wrong, by rate and adversary."""
    any_bad = torch.stack(bad).any(0)
    return ", ".join(f"μ = {m:.2g} adversary {k}" for m, k in zip(lr[any_bad], kind[any_bad], strict=True))


def orientations(group: Group, n: int, q: Point) -> tuple[Tensor, ...]:
    """The signs that no path in the group can change: of the determinant of each block of each factor."""
    match group:
        case Blocks() if group.moves:
            return torch.vmap(lambda p: orientations(group.part, group.k, p))(q)
        case Conjugate():
            return orientations(group.part, n, q["A"])
        case Composite():
            return tuple(t for key, p, size in parts_of(group, n) for t in orientations(p, size, q[key]))
    if not group.moves:
        return ()
    m = dense(group, q, n)
    if isinstance(group, (Diagonal, Scalar, Triangular, Normalization, IncompleteTriangular)):
        return (m.diagonal().sign(),)
    if isinstance(group, Involution):
        at = torch.arange(n)
        to = group.sigma(at)
        blocks = m[at, at] * m[to, to] - torch.where(at == to, 0.0, m[at, to] * m[to, at])
        return (blocks.sign(),)
    return (torch.linalg.slogdet(m).sign,)
