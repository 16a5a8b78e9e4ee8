"""½ log det |H| from a fitted preconditioner; the model left as it was; bad input said to be bad."""

import math

import pytest
import torch
from problems import Quadratic, batches, dense_hessian, loss, network, operator, quadratic_loss, symmetric
from test_operators import equal, snapshot
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import psgd
from psgd import Blocks, Dense, Diagonal, DirectSum, LowRank, Padded, Triangular, XMat, affine, flatness, lra
from psgd.diagnostics.flatness import fit, joint

ONE = [torch.tensor(1.0)]


def half_log_det(matrix):
    return float(torch.linalg.slogdet(matrix.double()).logabsdet / 2)


def low_rank_plus_diagonal(n):
    g = torch.Generator().manual_seed(0)
    w = torch.randn(n, 3, generator=g, dtype=torch.float64)
    return torch.diag(torch.linspace(2, 4, n).double()) + w @ w.mT


KNOWN = {
    "diagonal": (torch.diag(torch.logspace(-1, 2, 40)), Diagonal()),
    "definite": (symmetric(torch.linspace(0.5, 5, 30)), Dense()),
    "definite, triangular": (symmetric(torch.linspace(0.5, 5, 30)), Triangular()),
    "indefinite": (symmetric(torch.cat((-torch.linspace(1, 4, 10), torch.linspace(1, 8, 20)))), Dense()),
    "low rank": (low_rank_plus_diagonal(60), lra(10)),
    "blocks": (torch.block_diag(*[symmetric(torch.linspace(1, 6, 4), s) for s in range(6)]), Blocks(4, Dense())),
}


@pytest.mark.parametrize(("hessian", "group"), KNOWN.values(), ids=KNOWN.keys())
def test_known_hessians_within_one_percent(hessian, group):
    model = Quadratic(hessian)
    found = flatness(model, quadratic_loss, ONE, group)
    expected = half_log_det(hessian)
    assert found.half_log_det_h == pytest.approx(expected, rel=0.01)
    assert abs(found.corrected.value - expected) < 3 * found.corrected.error + 1e-3 * abs(expected)
    assert found.corrected.value == pytest.approx(expected, rel=0.01)
    assert found.converged
    assert found.log_det_p == 2 * found.log_det_q == -2 * found.half_log_det_h
    values = torch.linalg.eigvalsh(hessian.double()).abs().sort(descending=True).values
    assert found.sharpest[0] == pytest.approx(float(values[0]), rel=0.1)
    assert found.flattest[0] == pytest.approx(float(values[-1]), rel=0.25)
    assert len(found.sharpest) == len(found.flattest) == 5


def test_what_a_poor_group_misses_is_measured():
    hessian = symmetric(torch.logspace(-1, 1.5, 40))
    found = flatness(Quadratic(hessian), quadratic_loss, ONE, Diagonal(), steps=300)
    expected = half_log_det(hessian)
    assert not found.converged
    assert abs(found.half_log_det_h - expected) > 10
    assert abs(found.corrected.value - expected) < 3 * found.corrected.error


def test_description_length():
    model = Quadratic(torch.diag(torch.tensor([4.0, 9.0])))
    found = flatness(model, quadratic_loss, ONE, Diagonal(), examples=100)
    with torch.no_grad():
        value = float(model(1.0))
    assert found.loss == pytest.approx(value)
    assert found.description_length == pytest.approx(100 * value + math.log(6), rel=1e-3)


def test_the_hessian_is_that_of_the_mean_of_some_batches():
    model = Quadratic(torch.eye(3))
    data = [torch.tensor(s) for s in (1.0, 3.0, 100.0)]
    found = flatness(model, quadratic_loss, data, Diagonal(), batches=2)
    assert found.half_log_det_h == pytest.approx(1.5 * math.log(2), abs=0.01)
    assert found.sharpest[0] == pytest.approx(2, rel=0.02)


def test_a_rule_gives_each_tensor_a_group_of_its_own():
    model, data = network(), batches(1)
    found = flatness(model, loss, data, affine, steps=30)
    assert isinstance(found.group, DirectSum)
    assert [tuple(part.shape) for part in found.group.parts] == [tuple(p.shape) for p in model.parameters()]
    assert joint(affine, [torch.tensor(1.0)]).sizes == (1,)


def test_padded_groups_pad_the_cost():
    hessian = torch.diag(torch.logspace(-0.5, 1, 10))
    found = flatness(Quadratic(hessian), quadratic_loss, ONE, Padded(Blocks(4, Dense()), 4), steps=600)
    assert found.half_log_det_h == pytest.approx(half_log_det(hessian), rel=0.02)


def test_groups_without_a_scale():
    hessian = low_rank_plus_diagonal(20) / 3
    found = flatness(Quadratic(hessian), quadratic_loss, ONE, LowRank(3), steps=300)
    assert math.isfinite(found.half_log_det_h)


def test_a_network_of_which_the_hessian_is_known():
    model, data = network(), batches(2)
    hessian = dense_hessian(model, data) + 0.05 * torch.eye(123)

    def damped(model, batch):
        return loss(model, batch) + 0.025 * sum(p.square().sum() for p in model.parameters())

    found = flatness(model, damped, data, steps=300)
    assert len(hessian) == 123 == sum(p.numel() for p in model.parameters())
    assert abs(found.corrected.value - half_log_det(hessian)) < 3 * found.corrected.error


def test_reproducible_and_seeded():
    def run(seed):
        return flatness(Quadratic(torch.diag(torch.ones(4))), quadratic_loss, ONE, lra(1), steps=5, seed=seed).log_det_q

    assert run(0) == run(0) != run(1)


@pytest.mark.parametrize("training", [True, False])
def test_the_model_is_left_as_it_was(training):
    model = network().train(training)
    model[0].weight.grad = torch.ones_like(model[0].weight)
    x, y = batches(1)[0]
    loader = DataLoader(TensorDataset(x, y), 10, shuffle=True)  # draws from the global generator
    before, grad = snapshot(model), model[0].weight.grad
    versions = [p._version for p in model.parameters()]
    found = flatness(model, loss, loader, lra(2), steps=5)
    assert equal(snapshot(model), before)
    assert model[0].weight.grad is grad
    assert [p._version for p in model.parameters()] == versions
    assert math.isfinite(found.log_det_q)


def test_dropout_is_one_fixed_mask():
    model = nn.Sequential(nn.Linear(3, 8), nn.Dropout(0.5), nn.Linear(8, 1))
    data = [torch.randn(10, 3)]
    state = torch.get_rng_state()
    found = flatness(model, lambda m, x: (m(x) - 1).square().mean(), data, Diagonal(), steps=10)
    assert torch.get_rng_state().equal(state)
    assert math.isfinite(found.log_det_q)


class Exhausted:
    """A loader whose iterator has run out."""

    def __iter__(self):
        return iter(())


def _nan(model, batch):
    return loss(model, batch) * float("nan")


def _late_nan(model, batch):
    model.calls = getattr(model, "calls", 0) + 1
    return loss(model, batch) * (float("nan") if model.calls > 5 else 1.0)


BAD = {
    "exhausted loader": (loss, Exhausted(), "needs at least one batch, got none .is the loader exhausted"),
    "exhausted iterator": (loss, iter([]), "needs at least one batch"),
    "nan": (_nan, batches(1), "needs to be finite, got nan"),
    "nan in the middle": (_late_nan, batches(1), "needs to be finite, got nan"),
    "no graph": (lambda m, b: loss(m, b).detach(), batches(1), "needs a graph to the parameters"),
    "a number": (lambda m, b: 1.0, batches(1), "one element, got float"),
    "not a scalar": (lambda m, b: m(b[0]), batches(1), "one element"),
}


@pytest.mark.parametrize(("bad_loss", "data", "message"), BAD.values(), ids=BAD.keys())
def test_bad_input_is_said_to_be_bad_and_nothing_is_touched(bad_loss, data, message):
    model = network()
    model[0].weight.grad = torch.ones_like(model[0].weight)
    before = snapshot(model)
    with pytest.raises(ValueError, match=message):
        flatness(model, bad_loss, data)
    assert equal(snapshot(model), before)


def test_no_parameters():
    with pytest.raises(ValueError, match="needs parameters that require gradients, got 0"):
        flatness(nn.Tanh(), loss, batches(1))
    with pytest.raises(ValueError, match="needs parameters that require gradients"):
        flatness(network().requires_grad_(False), loss, batches(1))


@pytest.mark.parametrize("options", [{"steps": 0}, {"probes": 0}])
def test_fits_need_steps_and_probes(options):
    with pytest.raises(ValueError, match="needs steps >= 1 and probes >= 1"):
        flatness(network(), loss, batches(1), **options)


def test_errors_of_the_group_come_through():
    model = network()
    before = snapshot(model)
    with pytest.raises(ValueError, match="Blocks"):
        flatness(model, loss, batches(1), Blocks(4, Dense()))
    assert equal(snapshot(model), before)


def test_fit_is_a_function_of_products_alone():
    h = symmetric(torch.linspace(1, 5, 12))
    q = fit(operator(h), XMat(), steps=50, probes=2)
    assert q["a"].dtype == torch.float64


def test_public():
    assert psgd.Flatness.__name__ == "Flatness"
