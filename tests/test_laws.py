"""Every law on every named group, in float64, a few steps from the origin."""

import laws
import pytest
import torch
from cases import ALGEBRAS, CASES, ids, pair, walked
from laws import RULES, dense, eye, factors, in_algebra, near, near_points, slack
from torch.utils._pytree import tree_flatten, tree_map

import psgd
from psgd import Group, LowRank, MatrixAlgebra, Normalized, Padded, Smoothed

of_every_group = pytest.mark.parametrize(("name", "group", "n"), CASES, ids=ids(CASES))
of_every_algebra = pytest.mark.parametrize(("name", "group", "n"), ALGEBRAS, ids=ids(ALGEBRAS))


@of_every_group
@pytest.mark.parametrize(
    "law",
    [
        laws.actions_are_those_of_one_matrix,
        laws.actions_work_on_any_batch,
        laws.step_is_the_gradient,
        laws.factors_move_by_at_most_their_share,
        laws.small_step_lowers_the_criterion,
        laws.pairs_count_as_their_sum,
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
def test_law(law, name, group, n):
    law(group, n)
