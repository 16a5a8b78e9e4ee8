"""Lanczos, trace, quadrature and density against dense linear algebra."""

import math

import pytest
import torch
from problems import operator, symmetric

from psgd.diagnostics.operators import Operator
from psgd.diagnostics.spectral import (
    Density,
    extreme_eigenvalues,
    lanczos,
    largest_modulus,
    mean,
    spectral_density,
    top_eigenvectors,
    trace,
)
from psgd.probes import generator

SPECTRA = {
    "definite": torch.logspace(-2, 2, 60),
    "indefinite": torch.cat((-torch.logspace(-1, 1, 20), torch.logspace(-2, 2, 40))),
    "clustered": torch.cat((torch.ones(55), torch.tensor([10.0, 20.0, 30.0, 40.0, 50.0]))),
    "negative": -torch.linspace(1, 9, 60),
}
of_every_spectrum = pytest.mark.parametrize("values", SPECTRA.values(), ids=SPECTRA.keys())


@of_every_spectrum
def test_run_to_the_end_it_is_exact(values):
    a = symmetric(values)
    ritz = lanczos(operator(a), operator(a).normal(generator(0)), steps=1000)
    expected = torch.linalg.eigvalsh(a)
    distinct = expected if len(ritz.values) == 60 else expected.unique_consecutive()
    if len(ritz.values) == 60:
        torch.testing.assert_close(ritz.values, expected, rtol=1e-8, atol=1e-8)
    else:  # equal eigenvalues are one to a Krylov space
        assert all((distinct - theta).abs().min() < 1e-6 for theta in ritz.values)
    assert math.isclose(float(ritz.weights.sum()), 1, rel_tol=1e-10)


@of_every_spectrum
@pytest.mark.parametrize("steps", [5, 15, 40])
def test_a_residual_bounds_the_distance_to_an_eigenvalue(values, steps):
    a = symmetric(values)
    ritz = lanczos(operator(a), operator(a).normal(generator(1)), steps)
    expected = torch.linalg.eigvalsh(a)
    gaps = (ritz.values[:, None] - expected).abs().amin(1)
    assert (gaps <= ritz.residuals + 1e-9).all()
    vectors = ritz.vectors(slice(None))
    residuals = (vectors @ a - ritz.values[:, None] * vectors).norm(dim=1)
    torch.testing.assert_close(residuals, ritz.residuals, rtol=1e-6, atol=1e-8)


@of_every_spectrum
def test_the_basis_stays_orthonormal(values):
    a = symmetric(values)
    basis = lanczos(operator(a), operator(a).normal(generator(1)), 50).basis
    torch.testing.assert_close(basis @ basis.mT, torch.eye(len(basis), dtype=basis.dtype), rtol=0, atol=1e-10)


@of_every_spectrum
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_extreme_eigenvalues_within_one_percent(values, dtype):
    ends = extreme_eigenvalues(operator(symmetric(values).to(dtype)))
    assert ends.converged
    assert abs(ends.smallest / float(values.amin()) - 1) < 0.01
    assert abs(ends.largest / float(values.amax()) - 1) < 0.01


def test_too_few_steps_are_said_to_be_too_few():
    a = symmetric(torch.linspace(0, 1, 400))
    ends = extreme_eigenvalues(operator(a), steps=5)
    assert not ends.converged
    assert max(ends.residuals) > 1e-3


def test_size_one():
    ends = extreme_eigenvalues(Operator(1, lambda x: -3 * x))
    assert (ends.smallest, ends.largest, ends.converged) == (-3.0, -3.0, True)


def test_the_zero_matrix():
    ends = extreme_eigenvalues(Operator(7, torch.zeros_like))
    assert (ends.smallest, ends.largest, ends.converged) == (0.0, 0.0, True)


def test_top_eigenvectors_are_those_of_largest_modulus():
    values = SPECTRA["indefinite"]
    a = symmetric(values)
    ritz = top_eigenvectors(operator(a), 4)
    which = largest_modulus(ritz, 4)
    expected = values.double()[values.abs().argsort(descending=True)[:4]]
    torch.testing.assert_close(ritz.values[which], expected, rtol=1e-2, atol=0)
    for vector, value in zip(ritz.vectors(which), ritz.values[which], strict=True):
        assert (a @ vector - value * vector).norm() <= 0.011 * value.abs()


@of_every_spectrum
def test_trace_within_its_standard_error(values):
    a = symmetric(values)
    estimate = trace(operator(a), probes=200)
    assert estimate.error > 0
    assert abs(estimate.value - float(a.trace())) < 3 * estimate.error


@of_every_spectrum
def test_log_determinant_within_its_standard_error(values):
    a = symmetric(values)
    estimate = spectral_density(operator(a), probes=100).sum(lambda t: t.abs().log())
    assert 0 < estimate.error < 20
    assert abs(estimate.value - float(torch.linalg.slogdet(a).logabsdet)) < 3 * estimate.error


def test_standard_errors_are_right():
    """Over many seeds the errors have the size that is claimed."""
    a = symmetric(SPECTRA["indefinite"])
    exact = float(a.trace())
    found = [trace(operator(a), probes=20, seed=s) for s in range(100)]
    claimed = sum(e.error for e in found) / 100
    actual = math.sqrt(sum((e.value - exact) ** 2 for e in found) / 100)
    assert 0.8 < actual / claimed < 1.25


def test_density_is_a_density_in_the_right_place():
    a = symmetric(SPECTRA["clustered"])
    density = spectral_density(operator(a), probes=50)
    grid = torch.linspace(-20, 70, 4000, dtype=torch.float64)
    smooth = density.smooth(grid, 0.5)
    assert abs(float(torch.trapezoid(smooth, grid)) - 1) < 1e-3
    below = grid < 5
    assert abs(float(torch.trapezoid(smooth[below], grid[below])) - 55 / 60) < 0.03


def test_everything_is_a_function_of_the_seed_alone():
    a = operator(symmetric(SPECTRA["definite"]))
    state = torch.get_rng_state()
    assert trace(a, seed=3) == trace(a, seed=3) != trace(a, seed=4)
    assert spectral_density(a, probes=2).values[0].equal(spectral_density(a, probes=2).values[0])
    assert extreme_eigenvalues(a).largest == extreme_eigenvalues(a).largest
    assert torch.get_rng_state().equal(state)


def test_mean():
    assert mean([1.0, 3.0]) == (2.0, 1.0)


@pytest.mark.parametrize("call", [trace, spectral_density])
def test_one_probe_has_no_standard_error(call):
    with pytest.raises(ValueError, match="needs probes >= 2, got probes=1"):
        call(Operator(3, lambda x: x), probes=1)


def test_no_steps():
    with pytest.raises(ValueError, match="needs steps >= 1, got steps=0"):
        lanczos(Operator(3, lambda x: x), torch.ones(3), 0)


def test_sums_of_functions():
    values = torch.tensor([1.0, 2.0], dtype=torch.float64)
    density = Density(4, (values, values), (torch.tensor([0.5, 0.5]).double(),) * 2)
    assert density.sum(lambda t: t**2) == (10.0, 0.0)
