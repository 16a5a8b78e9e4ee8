"""The core laws on random expressions: products, sums, Kronecker products, blocks, conjugates of leaves."""

import laws
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

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
    Normalization,
    Permute,
    Product,
    Scalar,
    Shift,
    Triangular,
    XMat,
)

SIZES = (1, 2, 3, 4, 5, 6, 8, 12)


def leaves(n: int) -> st.SearchStrategy[Group]:
    """The small classes that have n×n matrices."""
    fixed = [
        Diagonal(),
        Scalar(),
        XMat(),
        Triangular(),
        LowerTriangular(),
        Dense(),
        Normalization(),
        Circulant(),
    ]
    fixed += [Butterfly()] if n % 2 == 0 else []
    constants = [st.just(Identity()), st.just(DCT()), st.integers(-n, n).map(Shift)]
    constants += [st.permutations(range(n)).map(lambda order: Permute(tuple(order)))]
    numbered = [st.integers(0, min(n, 3)).map(LowRank)]
    numbered += [st.integers(1, n - 1).map(IncompleteTriangular)] if n > 1 else []
    return st.one_of(st.sampled_from(fixed), *numbered, st.one_of(*constants))


@st.composite
def expressions(draw: st.DrawFn, n: int, depth: int) -> Group:
    """An expression of at most this depth with n×n matrices."""
    if depth == 0:
        return draw(leaves(n))
    kind = draw(st.sampled_from(("leaf", "product", "sum", "kronecker", "blocks", "conjugate")))
    cuts = [k for k in range(1, n + 1) if n % k == 0]
    match kind:
        case "product":
            return Product(tuple(draw(st.lists(expressions(n, depth - 1), min_size=2, max_size=3))))
        case "sum" if n > 1:
            first = draw(st.integers(1, n - 1))
            sizes = (first, n - first)
            return DirectSum(sizes, tuple(draw(expressions(size, depth - 1)) for size in sizes))
        case "kronecker":
            k = draw(st.sampled_from(cuts))
            shape = draw(st.sampled_from([(k, n // k), (n // k, k), (1, k, n // k)]))
            return Kronecker(shape, tuple(draw(expressions(size, depth - 1)) for size in shape))
        case "blocks":
            k = draw(st.sampled_from(cuts))
            return Blocks(k, draw(expressions(k, depth - 1)))
        case "conjugate":
            return Conjugate(draw(expressions(n, 0)), draw(expressions(n, depth - 1)))
    return draw(leaves(n))


@pytest.mark.parametrize(
    ("law", "examples"),
    [
        (laws.matrix_is_the_one_written_down, 60),
        (laws.actions_are_those_of_one_matrix, 60),
        (laws.actions_work_on_any_batch, 30),
        (laws.step_is_the_gradient, 60),
        (laws.factors_move_by_at_most_their_share, 40),
        (laws.small_step_lowers_the_criterion, 40),
        (laws.pairs_count_as_their_sum, 30),
        (laws.scale_of_the_pair_does_not_matter, 30),
        (laws.fused_fit_is_the_derived_one, 30),
        (laws.one_twin_moves_at_a_time, 30),
        (laws.balance_changes_coordinates_only, 40),
        (laws.scaled_is_s_times_q, 30),
        (laws.points_are_nested_dicts_of_tensors, 30),
        (laws.nothing_is_changed_in_place, 30),
        (laws.groups_are_values, 30),
    ],
    ids=lambda law: getattr(law, "__name__", ""),
)
def test_law_of_random_expressions(law, examples: int):
    @settings(
        max_examples=examples,
        derandomize=True,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(st.data())
    def holds(data: st.DataObject) -> None:
        n = data.draw(st.sampled_from(SIZES))
        law(data.draw(expressions(n, 3)), n)

    holds()
