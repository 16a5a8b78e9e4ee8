"""PSGD under a real Accelerator: prepared, accumulating, in bfloat16, saved and loaded."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import psgd
from psgd import PSGD

accelerate = pytest.importorskip("accelerate", reason="needs the extra `frameworks`")
pytestmark = pytest.mark.frameworks

EPOCHS = 3
OPTIONS = {"lr": 0.05, "precond_prob": 0.5}


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 2))


def batches(size=16):
    x = torch.randn(96, 6, generator=torch.Generator().manual_seed(1))
    return DataLoader(TensorDataset(x, torch.stack([x.sum(1), x.prod(1)], 1)), size)


def accelerator(**options):
    return accelerate.Accelerator(cpu=True, **options)


def plain(accelerator, model, opt, x, y):
    accelerator.backward(loss := F.mse_loss(model(x), y))
    opt.step()
    opt.zero_grad()
    return loss


def context(accelerator, model, opt, x, y):
    with accelerator.accumulate(model), opt.optimizer.curvature():
        return plain(accelerator, model, opt, x, y)


def closure(accelerator, model, opt, x, y):
    def evaluate():
        opt.zero_grad()
        accelerator.backward(loss := F.mse_loss(model(x), y))
        values.append(loss)
        return loss

    values = []
    opt.step(evaluate)
    return values[0]


def train(accelerator, way=plain, epochs=EPOCHS, size=16, between=None, **options):
    """Train, and return model, optimizer and losses; `between` is called after the first epoch."""
    model = net()
    opt = PSGD(model.parameters(), **OPTIONS | options)
    model, opt, loader = accelerator.prepare(model, opt, batches(size))
    losses = []
    for epoch in range(epochs):
        losses += [way(accelerator, model, opt, x, y).item() for x, y in loader]
        if epoch == 0 and between is not None:
            between()
    assert not torch.overrides._get_current_function_mode_stack()
    return model, opt.optimizer, losses


def loop(newton=True, **options):
    """The same training without accelerate."""
    model = net()
    opt = PSGD(model.parameters(), **OPTIONS | options)
    for _ in range(EPOCHS):
        for x, y in batches():
            opt.zero_grad()
            if newton:
                with opt.curvature():
                    F.mse_loss(model(x), y).backward()
            else:
                F.mse_loss(model(x), y).backward()
            opt.step()
    return model


def same(a, b, **tolerance):
    torch.testing.assert_close(a.state_dict(), b.state_dict(), **tolerance or {"rtol": 0, "atol": 0})


@pytest.mark.parametrize("way, source", [(plain, psgd.whiten), (context, psgd.hessian), (closure, psgd.hessian)])
def test_a_prepared_optimizer_makes_the_steps_of_a_plain_loop(way, source):
    model, opt, losses = train(accelerator(), way)
    assert opt.source is source
    assert losses[-1] < losses[0]
    same(model, loop(newton=source is psgd.hessian))


def test_accumulation_takes_the_product_of_all_micro_batches():
    model, opt, _ = train(accelerator(gradient_accumulation_steps=2), context, size=8)
    assert opt.source is psgd.hessian
    assert opt.param_groups[0]["iteration"] == EPOCHS * len(batches())
    same(model, loop(), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("way, source", [(plain, psgd.whiten), (context, psgd.hessian)])
def test_bfloat16_trains(way, source):
    _, opt, losses = train(accelerator(mixed_precision="bf16"), way)
    assert opt.source is source
    assert losses[-1] < losses[0]


@pytest.mark.parametrize("way", [plain, context, closure])
def test_a_loaded_state_continues_with_the_same_weights(forget, tmp_path, way):
    saving = accelerator()
    whole, _, _ = train(saving, way, between=lambda: saving.save_state(tmp_path))
    forget()
    resuming = accelerator()
    resumed, _, _ = train(resuming, way, between=lambda: resuming.load_state(tmp_path), seed=5)
    same(resumed, whole)
