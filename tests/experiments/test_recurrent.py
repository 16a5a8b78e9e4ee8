"""The fast recurrent networks against autograd through the plain loops."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

import psgd
from psgd.experiments.recurrent import LSTM, RNN, Gated, PlainLSTM, PlainRNN, Tanh, recurrence
from psgd.interception import hvp
from psgd.probes import generator

PAIRS = [pytest.param(RNN, PlainRNN, id="rnn"), pytest.param(LSTM, PlainLSTM, id="lstm")]


def problem(kind, plain, dtype=torch.float64):
    """Both networks with equal weights away from the start, and a batch."""
    fast, slow = (k(2, 5, generator(0)).to(dtype) for k in (kind, plain))
    with torch.no_grad():
        for p, q in zip(fast.parameters(), slow.parameters(), strict=True):
            p += 0.3 * torch.randn(p.shape, generator=generator(1), dtype=dtype)
            q.copy_(p)
    x = torch.randn(7, 6, 2, generator=generator(2), dtype=dtype)
    y = torch.randint(0, 2, (7, 1), generator=generator(3)).to(dtype)
    return fast, slow, lambda net: F.binary_cross_entropy_with_logits(net(x), y)


@pytest.mark.parametrize("cell", [pytest.param(Tanh(3), id="tanh"), pytest.param(Gated(3), id="gated")])
@pytest.mark.parametrize("time", [1, 2, 5])
def test_both_derivatives_are_those_of_finite_differences(cell, time):
    w = torch.randn(cell.gates, 2 + cell.states + 1, generator=generator(0), dtype=torch.float64, requires_grad=True)
    x = torch.randn(time, 2, 4, generator=generator(1), dtype=torch.float64)
    assert torch.autograd.gradcheck(lambda w: recurrence(cell, x, w), w)
    assert torch.autograd.gradgradcheck(lambda w: recurrence(cell, x, w), w)


@pytest.mark.parametrize(("kind", "plain"), PAIRS)
def test_loss_gradient_and_product_are_those_of_the_plain_loop(kind, plain):
    fast, slow, loss = problem(kind, plain)
    v = [torch.randn(p.shape, generator=generator(i), dtype=p.dtype) for i, p in enumerate(fast.parameters())]
    torch.testing.assert_close(loss(fast), loss(slow))
    for ours, theirs in zip(
        hvp(loss(fast), list(fast.parameters()), v), hvp(loss(slow), list(slow.parameters()), v), strict=True
    ):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize(("kind", "plain"), PAIRS)
def test_psgd_verifies_the_exact_product(kind, plain):
    fast, _, loss = problem(kind, plain, torch.float32)
    opt = psgd.PSGD(fast.parameters(), psgd.lra(2), lr=0.01)
    opt.step(lambda: loss(fast))  # a warning would be an error
    assert opt.source is psgd.hessian


@pytest.mark.parametrize(("kind", "plain"), PAIRS)
def test_psgd_makes_the_steps_of_the_plain_loop(kind, plain):
    fast, slow, loss = problem(kind, plain)
    for net in (fast, slow):
        opt = psgd.PSGD(net.parameters(), psgd.lra(2), lr=0.01, precond_prob=1.0, init_scale=1.0)
        for _ in range(5):
            opt.step(lambda net=net: loss(net))
    for p, q in zip(fast.parameters(), slow.parameters(), strict=True):
        torch.testing.assert_close(p, q)


def test_the_rnn_starts_as_in_the_paper():
    net = RNN(2, 30, generator(0))
    assert sum(p.numel() for p in net.parameters()) == 1021
    w = net.step.weight[:, 2:]
    torch.testing.assert_close(w @ w.t(), torch.eye(30), atol=1e-5, rtol=0)
    assert 0.07 < net.step.weight[:, :2].std() < 0.13 and not net.step.bias.any() and not net.out.bias.any()


def test_the_lstm_starts_as_in_the_paper():
    net = LSTM(2, 30, generator(0))
    assert net.step.weight.shape == (120, 62) and net.out.weight.shape == (1, 30)
    i, f, g, o = net.step.weight.view(4, 30, 62)
    assert all(0.09 < t.std() < 0.11 for t in (i, f, g / 2, o))
    assert 0.9 < net.step.bias[30:60].mean() < 1.1 and net.step.bias[:30].mean().abs() < 0.1
