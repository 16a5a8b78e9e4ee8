"""Hessian products, and models left alone."""

import random

import numpy
import pytest
import torch
from cases import walked
from problems import batches, dense_hessian, loss, network, operator, symmetric
from torch import nn

import psgd
from psgd import XMat, lra
from psgd.diagnostics.operators import (
    augmented,
    hessian_operator,
    inverse_operator,
    preconditioned,
    preconditioner_operator,
    trainable,
)
from psgd.diagnostics.preserve import preserved


def test_products_are_those_of_the_hessian_of_the_mean():
    model, data = network(), batches(3)
    expected = dense_hessian(model, data)
    h = hessian_operator([lambda b=b: loss(model, b) for b in data], model)
    assert (h.n, h.dtype) == (len(expected), torch.float64)
    torch.testing.assert_close(h(torch.eye(h.n, dtype=torch.float64)), expected, rtol=1e-9, atol=1e-10)
    x = torch.randn(h.n, dtype=torch.float64)
    torch.testing.assert_close(h(x), expected @ x, rtol=1e-9, atol=1e-10)


def test_parameters_instead_of_a_model():
    x = torch.tensor([1.0, 2.0], requires_grad=True)
    frozen = torch.ones(3)
    h = hessian_operator(lambda: (x**3).sum(), [frozen, x])
    assert h(torch.ones(2)).tolist() == [6.0, 12.0]


def test_complex_parameters_count_as_pairs_of_reals():
    z = torch.tensor([1.0 + 2.0j], requires_grad=True)
    h = hessian_operator(lambda: (z.real**2 + 3 * z.imag**2).sum(), [z])
    assert h(torch.ones(2)).tolist() == [2.0, 6.0]


def test_parameters_that_the_loss_does_not_reach_have_no_curvature():
    x, y = (torch.ones(2, requires_grad=True) for _ in range(2))
    assert hessian_operator(lambda: x.square().sum(), [x, y])(torch.ones(4)).tolist() == [2, 2, 0, 0]


def test_a_linear_loss_has_no_curvature():
    x = torch.ones(2, requires_grad=True)
    assert hessian_operator(lambda: x.sum(), [x])(torch.ones(2)).tolist() == [0, 0]


def test_one_matrix_under_dropout():
    model = nn.Sequential(nn.Linear(3, 20), nn.Dropout(0.5), nn.Tanh(), nn.Linear(20, 1))
    data = torch.randn(10, 3)
    h = hessian_operator(lambda: model(data).square().mean(), model)
    x = torch.randn(h.n)
    first = h(x)
    torch.rand(7)
    assert first.equal(h(x))


def snapshot(model):
    return (
        [p.detach().clone() for p in model.parameters()],
        [b.clone() for b in model.buffers()],
        [None if p.grad is None else p.grad.clone() for p in model.parameters()],
        [m.training for m in model.modules()],
        (torch.get_rng_state(), random.getstate(), numpy.random.get_state()[1].tolist()),
    )


def equal(a, b):
    if isinstance(a, torch.Tensor):
        return a.equal(b)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(equal, a, b))
    return a == b


def test_a_model_is_left_alone():
    model = network()
    model.weight_that_is_frozen = nn.Parameter(torch.ones(1), requires_grad=False)
    model[0].weight.grad = torch.ones_like(model[0].weight)
    grad, before = model[0].weight.grad, snapshot(model)
    h = hessian_operator(lambda: loss(model, batches()[0]), model)
    h(torch.randn(h.n, dtype=torch.float64, generator=torch.Generator().manual_seed(0)))
    assert equal(snapshot(model), before)
    assert model[0].weight.grad is grad


def test_preserved_puts_back_what_was_changed_or_replaced():
    model = network()
    model[0].weight.grad = torch.ones_like(model[0].weight)
    before, buffer = snapshot(model), model[1].running_mean
    with pytest.raises(KeyError), preserved(model, trainable(model)):
        model.eval()
        model[1].running_mean = torch.full((9,), 7.0)
        buffer.add_(1)
        model[0].weight.grad.add_(1)
        model[3].weight.grad = torch.ones_like(model[3].weight)
        torch.rand(1), random.random(), numpy.random.rand()
        raise KeyError
    assert equal(snapshot(model), before)
    assert model[1].running_mean is buffer


def test_preserved_turns_gradients_on():
    with torch.no_grad(), preserved(nn.Module(), []):
        assert torch.is_grad_enabled()


BAD = {
    "no graph": (lambda x: x.detach().sum(), "needs a graph to the parameters"),
    "not a tensor": (lambda x: 1.0, "needs to be a tensor with one element, got float"),
    "several numbers": (lambda x: x * 2, r"needs to be a tensor with one element, got shape \(2,\)"),
    "nan": (lambda x: x.sum() * float("nan"), "needs to be finite, got nan"),
    "inf": (lambda x: x.sum() / 0, "needs to be finite, got inf"),
    "elsewhere": (lambda x: torch.ones((), requires_grad=True) * 2, "needs to depend on the parameters"),
    "singular": (lambda x: (x - x).abs().pow(1.5).sum() + x.sum(), "Hessian products need to be finite"),
}


@pytest.mark.parametrize(("function", "message"), BAD.values(), ids=BAD.keys())
def test_bad_losses(function, message):
    x = torch.ones(2, requires_grad=True)
    with pytest.raises(ValueError, match=message):
        hessian_operator(lambda: function(x), [x])(torch.ones(2))


def test_no_parameters():
    with pytest.raises(ValueError, match="needs parameters that require gradients, got 0 without"):
        hessian_operator(lambda: None, nn.Module())
    with pytest.raises(ValueError, match="got 2 without"):
        hessian_operator(lambda: None, nn.Linear(2, 2).requires_grad_(False))


def test_no_losses():
    with pytest.raises(ValueError, match="needs at least one loss, got none"):
        hessian_operator([], nn.Linear(2, 2))


@pytest.mark.parametrize("group", [XMat(), lra(2)], ids=repr)
def test_p_and_its_inverse(group):
    q = walked(group, 9)
    p = group.matrix(q, 9).mT @ group.matrix(q, 9)
    eye = torch.eye(9, dtype=torch.float64)
    torch.testing.assert_close(preconditioner_operator(group, q, 9)(eye), p)
    torch.testing.assert_close(inverse_operator(group, q, 9)(eye), torch.linalg.inv(p))


@pytest.mark.parametrize("group", [XMat(), lra(2)], ids=repr)
def test_preconditioned_has_the_eigenvalues_of_ph(group):
    q, h = walked(group, 9), symmetric(torch.linspace(-3, 5, 9))
    p = group.matrix(q, 9).mT @ group.matrix(q, 9)
    both = preconditioned(operator(h), group, q)(torch.eye(9, dtype=torch.float64))
    torch.testing.assert_close(both, both.mT)
    expected = torch.linalg.eigvals(p @ h).real.sort().values
    torch.testing.assert_close(torch.linalg.eigvalsh(both), expected)


def test_a_preconditioner_of_another_precision():
    group = lra(2)
    q = walked(group, 9, dtype=torch.float32)
    both = preconditioned(operator(symmetric(torch.linspace(1, 5, 9))), group, q)
    assert both.dtype == torch.float32
    assert both(torch.ones(9)).dtype == torch.float32


def test_augmented_is_a_direct_sum_with_the_identity():
    a = symmetric(torch.linspace(1, 2, 4))
    big = augmented(operator(a), 6)(torch.eye(6, dtype=torch.float64))
    torch.testing.assert_close(big, torch.block_diag(a, torch.eye(2, dtype=torch.float64)))


def test_public():
    assert psgd.hessian_operator is hessian_operator
