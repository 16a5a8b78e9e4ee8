"""Rosenbrock's valley, with and without noise, from every seed, in one documented setting (the docstring of PSGD)."""

import itertools

import pytest
import torch
from toys import rosenbrock

from psgd import PSGD, Dense, Normalized

SETTING = {"lr": 1.0, "precond_lr": 0.5, "momentum": 0.0, "precond_prob": 1.0, "rule": Normalized()}
SEEDS = range(20)
NOISES = [(0.0, 1.0), (0.0, 3.0), (0.5, 1.5)]


def descend(start, seed, noise=(1.0, 1.0)):
    """Iterate over the true losses of a descent on (1 − x₀)² + 100ε(x₁ − x₀²)², ε ~ U(noise) anew on each call."""
    x = torch.tensor(start, dtype=torch.float64, requires_grad=True)
    opt, rng, (low, high) = (
        PSGD([x], Dense(), seed=seed, **SETTING),
        torch.Generator().manual_seed(seed),
        noise,
    )

    def noisy():
        epsilon = low + (high - low) * torch.rand((), generator=rng, dtype=torch.float64)
        return (1 - x[0]) ** 2 + 100 * epsilon * (x[1] - x[0] ** 2) ** 2

    while True:
        opt.step(noisy)
        yield rosenbrock(x.detach()).item()


def steps_until(losses, small, most):
    """Return how many steps it takes, or None."""
    return next((t + 1 for t, loss in enumerate(itertools.islice(losses, most)) if loss < small), None)


@pytest.mark.parametrize("start", [(-1.0, 1.0), (-2.0, 2.0)], ids=str)
def test_every_seed_finds_the_minimum_within_three_hundred_steps(start):
    found = [steps_until(descend(start, seed), 1e-10, 300) for seed in SEEDS]
    assert None not in found


@pytest.mark.parametrize("noise", NOISES, ids=str)
def test_every_seed_finds_the_minimum_under_noise(noise):
    found = [steps_until(descend((-2.0, 2.0), seed, noise), 1e-10, 2000) for seed in SEEDS]
    assert None not in found


@pytest.mark.parametrize("noise", NOISES, ids=str)
def test_what_is_found_under_noise_is_kept(noise):
    for seed in range(2):
        losses = list(itertools.islice(descend((-2.0, 2.0), seed, noise), 400))
        assert losses[-1] < 1e-8
