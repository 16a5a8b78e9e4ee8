"""Our numbers on a small network beside those of curvlinops, an independent library."""

import warnings

import pytest
import torch
from problems import batches, loss, network, operator
from torch import nn

from psgd import flatness, hessian_operator, lra
from psgd.diagnostics.spectral import extreme_eigenvalues, spectral_density, top_eigenvectors, trace

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    curvlinops = pytest.importorskip(
        "curvlinops",
        reason="`./run frameworks` installs curvlinops",
    )

pytestmark = [
    pytest.mark.frameworks,
    pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning"),  # theirs
]
DATA = batches(3)
DAMPING = 0.05


@pytest.fixture(scope="module")
def model():
    return network().eval()  # curvlinops evaluates as often as it likes: no batch statistics


@pytest.fixture(scope="module")
def theirs(model):
    params = list(model.parameters())
    return curvlinops.HessianLinearOperator(model, nn.CrossEntropyLoss(), params, DATA, check_deterministic=False)


@pytest.fixture(scope="module")
def dense(theirs):
    eye = torch.eye(theirs.shape[1], dtype=torch.float64)
    return theirs @ eye


@pytest.fixture(scope="module")
def ours(model):
    return hessian_operator([lambda b=b: loss(model, b) for b in DATA], model)


def test_products(ours, theirs):
    x = torch.randn(ours.n, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(ours(x), theirs @ x, rtol=1e-9, atol=1e-12)


def test_extreme_eigenvalues_within_one_percent(ours, dense):
    values = torch.linalg.eigvalsh(dense)
    ends = extreme_eigenvalues(ours)
    assert ends.converged
    assert ends.smallest == pytest.approx(float(values[0]), rel=0.01)
    assert ends.largest == pytest.approx(float(values[-1]), rel=0.01)


def test_top_eigenvectors(ours, theirs):
    ritz = top_eigenvectors(ours, 3, tol=1e-4)
    for value, vector in zip(ritz.values[-3:], ritz.vectors(slice(-3, None)), strict=True):
        assert (theirs @ vector - value * vector).norm() < 1e-3 * ritz.values[-1]


def test_trace_within_the_standard_error(ours, theirs, dense):
    estimate = trace(ours, probes=300)
    assert abs(estimate.value - float(dense.trace())) < 3 * estimate.error
    assert estimate.error < 0.05 * abs(float(dense.trace()))
    with torch.random.fork_rng():
        torch.manual_seed(0)
        other = float(curvlinops.hutchinson_trace(theirs, 100))
    assert abs(other - estimate.value) < 6 * estimate.error


def test_log_determinant_within_the_standard_error(model, dense):
    damped = dense + DAMPING * torch.eye(len(dense), dtype=torch.float64)
    expected = float(torch.linalg.slogdet(damped).logabsdet)
    estimate = spectral_density(operator(damped), probes=100).sum(lambda t: t.abs().log())
    assert abs(estimate.value - expected) < 3 * estimate.error

    def damped_loss(model, batch):
        return loss(model, batch) + DAMPING / 2 * sum(p.square().sum() for p in model.parameters())

    found = flatness(model, damped_loss, DATA, lra(10), steps=200)
    assert abs(found.corrected.value - expected / 2) < 3 * found.corrected.error
