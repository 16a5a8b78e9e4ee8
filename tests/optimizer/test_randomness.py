"""Randomness is a function of (seed, step, parameter): the user's generators are never touched, nor do they matter."""

import random

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from toys import batches, mlp, regression, same, snapshot, train

from psgd import PSGD, Bernoulli, automatic, finite_difference, hessian, lra, whiten
from psgd.probes import generator, mix, normal_like, uniform

SOURCES = [automatic, hessian, finite_difference, whiten]
each_source = pytest.mark.parametrize("curvature", SOURCES, ids=str)


def generators():
    return torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()


@each_source
def test_a_plain_step_leaves_the_users_generators_alone(curvature):
    model = mlp()
    opt = PSGD(model.parameters(), precond_prob=Bernoulli(0.5), curvature=curvature)
    before = generators()
    train(opt, model, 5)
    assert same(list(generators()), list(before))


@each_source
def test_a_step_advances_the_generators_by_one_evaluation_of_the_closure(curvature):
    model = nn.Sequential(mlp(), nn.Dropout(0.5))
    opt = PSGD(model.parameters(), lra(2), precond_prob=1.0, curvature=curvature)
    x, y = next(batches())
    for _ in range(3):
        torch.manual_seed(7)
        regression(model, x, y)()
        expected = torch.get_rng_state()
        torch.manual_seed(7)
        opt.step(regression(model, x, y))
        assert torch.equal(torch.get_rng_state(), expected)


@each_source
def test_global_seeds_do_not_change_the_trajectory(curvature):
    found = []
    for seed in (0, 999):
        torch.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed)
        model = mlp()
        opt = PSGD(model.parameters(), lra(3), curvature=curvature, precond_prob=Bernoulli(0.7))
        train(opt, model, 8)
        found.append(snapshot(opt))
    assert same(*found)


def test_the_default_dtype_does_not_change_the_trajectory():
    found = []
    for dtype in (torch.float32, torch.float64):
        model = mlp()
        stream = [next(batches()) for _ in range(3)]
        opt = PSGD(model.parameters(), lra(3))
        try:
            torch.set_default_dtype(dtype)
            for x, y in stream:
                opt.step(regression(model, x, y))
        finally:
            torch.set_default_dtype(torch.float32)
        found.append(list(model.parameters()))
    assert same(*found)


def test_the_optimizers_own_seed_does():
    found = []
    for seed in (0, 1):
        model = mlp()
        train(PSGD(model.parameters(), lra(3), seed=seed), model, 8)
        found.append(list(model.parameters()))
    assert not same(*found)


def test_probes_differ_between_steps_and_parameters_of_one_shape():
    a, b = torch.ones(5, requires_grad=True), torch.ones(5, requires_grad=True)
    opt = PSGD([a, b])
    first = opt._probes([a, b])
    opt.param_groups[0]["iteration"] += 1
    probes = [*first, *opt._probes([a, b])]
    assert len({tuple(v.tolist()) for v in probes}) == 4


def test_the_probe_of_a_parameter_does_not_depend_on_the_others_that_are_trained():
    a, b = torch.ones(5, requires_grad=True), torch.ones(5, requires_grad=True)
    opt = PSGD([a, b])
    both = opt._probes([a, b])
    assert torch.equal(opt._probes([b])[0], both[1])


def test_probes_are_standard_normal():
    v = normal_like(torch.zeros(20_000), 1, 2, 3)
    assert abs(v.mean()) < 0.03 and abs(v.square().mean() - 1) < 0.04 and abs(v.pow(4).mean() - 3) < 0.3


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.complex64], ids=str)
def test_probes_of_every_dtype_are_one_draw_rounded(dtype):
    reference = normal_like(torch.zeros(8, 2), 5)
    v = normal_like(torch.zeros(8, dtype=dtype) if dtype.is_complex else torch.zeros(8, 2, dtype=dtype), 5)
    assert torch.equal(torch.view_as_real(v) if dtype.is_complex else v, reference.to(v.real.dtype))


integers = st.integers(-(2**63), 2**64)


@settings(max_examples=50, deadline=None)
@given(st.lists(integers, min_size=1, max_size=4), integers)
def test_mix_depends_on_every_number_and_their_order(numbers, other):
    assert 0 <= mix(*numbers) < 2**64
    assert 0 <= uniform(*numbers) < 1
    assert mix(*numbers) == mix(*numbers)
    if (numbers[0] - other) % 2**64:
        assert mix(*numbers) != mix(other, *numbers[1:])
    generator(*numbers)


def test_neighbouring_numbers_give_unrelated_bits():
    bits = torch.tensor([[mix(i, j) >> k & 1 for k in range(64)] for i in range(20) for j in range(20)]).float()
    assert (bits.mean(0) - 0.5).abs().max() < 0.12
    assert (torch.corrcoef(bits.mT) - torch.eye(64)).abs().max() < 0.25


def test_the_coin_is_fair_and_not_in_step_with_the_schedule():
    coins = [mix(0, t, -3) & 1 for t in range(2000)]
    for stride in (1, 2, 10):
        assert abs(sum(coins[::stride]) / len(coins[::stride]) - 0.5) < 0.1
