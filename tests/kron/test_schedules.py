"""Schedules that update less as the fit gets better."""

import io

import pytest
import torch
from torch import nn

import psgd
from psgd import PSGD, Adaptive, Decaying, kron
from psgd.trend import Trend, relative, sample


def test_a_fraction_that_decays_to_a_floor():
    schedule = Decaying(start=100, floor=0.02)
    due = [schedule.due(t, 0) for t in range(20_000)]
    assert all(due[:100])
    for t in (300, 1000, 3000):
        assert sum(due[t : 2 * t]) / t == pytest.approx(100 * torch.log(torch.tensor(2.0)).item() / t, abs=2 / t)
    assert sum(due[10_000:]) == pytest.approx(200, abs=1)
    assert due == [schedule.due(t, 99) for t in range(20_000)]  # no chance in it


@pytest.mark.parametrize("bad", [{"start": 0}, {"floor": 0.0}, {"floor": 1.5}])
def test_what_cannot_decay(bad):
    with pytest.raises(ValueError, match="Decaying needs"):
        Decaying(**bad)


@pytest.mark.parametrize("bad", [{"warmup": -1}, {"longest": -1}, {"noise": 0.0}])
def test_what_cannot_adapt(bad):
    with pytest.raises(ValueError, match="Adaptive needs"):
        Adaptive(**bad)


def updates(sizes, **options):
    """Return how many updates gradients of these sizes get."""
    p, rng = nn.Parameter(torch.zeros(16, 16)), torch.Generator().manual_seed(0)
    opt = PSGD([p], kron(), lr=1e-3, curvature=psgd.whiten, precond_prob=Adaptive(warmup=20, **options))
    for size in sizes:
        p.grad = size * torch.randn(16, 16, generator=rng)
        opt.step()
    return opt.param_groups[0]["updates"]


def test_updates_are_skipped_while_the_fit_is_good_and_not_while_the_target_moves():
    still = updates([1.0] * 1000)
    moving = updates([1.02**t for t in range(1000)])
    assert still < 200 < 400 < moving
    assert updates([1.0] * 1000, longest=0) == 1000


def test_no_pause_is_longer_than_one_step_for_each_of_the_warm_up_so_far():
    schedule = Adaptive(warmup=20, longest=30)
    found = {step: schedule.pause(25, step, significance=0.0) for step in (19, 20, 59, 100, 599, 600, 10000)}
    assert found == {19: 0, 20: 1, 59: 2, 100: 5, 599: 29, 600: 30, 10000: 30}
    assert schedule.pause(25, 100, significance=2.0) == 12
    assert Adaptive(warmup=0).pause(7, 50, significance=0.0) == 9


def test_a_trend_of_noise_is_about_one_and_of_a_steady_move_nineteen():
    trend, rng = Trend(torch.zeros(2, 5000)), torch.Generator().manual_seed(0)
    for _ in range(100):
        trend.add(torch.randn(5000, generator=rng))
    assert float(trend.significance) == pytest.approx(1.0, rel=0.1)


def test_a_sample_is_small_and_of_every_tensor_and_moves_are_relative():
    point = {"0": {"Q": 100 * torch.eye(50), "ell": torch.ones(())}, "1": {"d": torch.arange(3.0)}, "2": {}}
    before = sample(point)
    assert [len(t) for t in before] == [64, 3]
    point["1"]["d"] *= 2
    move = relative(before, sample(point))
    assert not move[:64].any() and float(move[64:].square().mean()) == pytest.approx(1.0)
    assert sample({}) == [] and relative([], []).numel() == 0


def test_pauses_go_on_after_a_checkpoint():
    def make():
        p = nn.Parameter(torch.zeros(8, 8))
        return p, PSGD([p], kron(), lr=1e-2, curvature=psgd.whiten, precond_prob=Adaptive(warmup=10))

    def go(p, opt, start, stop):
        for t in range(start, stop):
            p.grad = torch.randn(8, 8, generator=torch.Generator().manual_seed(t))
            opt.step()
        return p.detach().clone()

    p, opt = make()
    file = io.BytesIO()
    torch.save((go(p, opt, 0, 55), opt.state_dict()), file)
    expected, count = go(p, opt, 55, 120), opt.param_groups[0]["updates"]
    file.seek(0)
    weights, saved = torch.load(file, weights_only=True)
    q, other = make()
    with torch.no_grad():
        q.copy_(weights)
    other.load_state_dict(saved)
    assert saved["param_groups"][0]["pause"] > 0
    assert torch.equal(go(q, other, 55, 120), expected) and other.param_groups[0]["updates"] == count < 120
