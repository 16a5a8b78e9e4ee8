"""PSGD inside a real Lightning Trainer makes the steps of a plain loop, and resumes exactly."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import psgd
from psgd import PSGD

L = pytest.importorskip("lightning.pytorch", reason="needs the extra `frameworks`")
pytestmark = pytest.mark.frameworks

from psgd.integrations.lightning import CurvatureCallback  # noqa: E402

EPOCHS, BATCHES = 3, 6
OPTIONS = {"lr": 0.05, "precond_prob": 0.5}


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Linear(16, 2))


def data():
    x = torch.randn(16 * BATCHES, 6, generator=torch.Generator().manual_seed(1))
    return TensorDataset(x, torch.stack([x.sum(1), x.prod(1)], 1))


class Module(L.LightningModule):
    def __init__(self, **options):
        super().__init__()
        self.net, self.options, self.losses = net(), OPTIONS | options, []

    def loss(self, batch):
        value = F.mse_loss(self.net(batch[0]), batch[1])
        self.losses.append(value.item())
        return value

    def training_step(self, batch, _):
        return self.loss(batch)

    def configure_optimizers(self):
        return PSGD(self.parameters(), model=self, **self.options)


class Manual(Module):
    """Manual optimization; `inline` watches the backward pass itself, where no callback does."""

    def __init__(self, inline, **options):
        super().__init__(**options)
        self.automatic_optimization, self.inline = False, inline

    def training_step(self, batch, _):
        opt = self.optimizers()
        opt.zero_grad()
        if self.inline:
            with opt.curvature():
                self.manual_backward(self.loss(batch))
        else:
            self.manual_backward(self.loss(batch))
        opt.step()


@pytest.fixture
def fit(tmp_path):
    def run(module, epochs=EPOCHS, resume=None, batch=16, **options):
        trainer = L.Trainer(
            accelerator="cpu",
            max_epochs=epochs,
            default_root_dir=tmp_path,
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            **{"enable_checkpointing": False} | options,
        )
        trainer.fit(module, DataLoader(data(), batch), ckpt_path=resume, weights_only=True if resume else None)
        assert not torch.overrides._get_current_function_mode_stack()
        return trainer

    return run


def loop(clip=None, **options):
    """The same training without Lightning."""
    model = net()
    opt = PSGD(model.parameters(), model=model, **OPTIONS | options)

    def closure():
        opt.zero_grad()
        loss = F.mse_loss(model(x), y)
        loss.backward()
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        return loss

    for _ in range(EPOCHS):
        for x, y in DataLoader(data(), 16):  # noqa: B007 - the closure uses them
            opt.step(closure)
    return model


def same(a, b, **tolerance):
    states = (m.net.state_dict() if isinstance(m, Module) else m.state_dict() for m in (a, b))
    torch.testing.assert_close(*states, **tolerance or {"rtol": 0, "atol": 0})


CURVATURES = [psgd.automatic, psgd.hessian, psgd.finite_difference, psgd.whiten]


@pytest.mark.parametrize("curvature", CURVATURES)
@pytest.mark.parametrize("clip", [None, 0.5])
def test_automatic_optimization_makes_the_steps_of_a_plain_loop(fit, curvature, clip):
    module = Module(curvature=curvature)
    opt = fit(module, gradient_clip_val=clip).optimizers[0]
    assert opt.source is (psgd.hessian if curvature is psgd.automatic else curvature)
    assert module.losses[-1] < module.losses[0]
    same(module, loop(clip, curvature=curvature))


@pytest.mark.parametrize("inline", [False, True])
def test_manual_optimization_makes_newton_steps(fit, inline):
    module = Manual(inline, curvature=psgd.hessian)
    opt = fit(module, callbacks=[] if inline else [CurvatureCallback()]).optimizers[0]
    assert opt.source is psgd.hessian
    same(module, loop(curvature=psgd.hessian))


def test_manual_optimization_alone_whitens_and_says_so(fit):
    module = Manual(inline=False, curvature=psgd.hessian)
    with pytest.warns(UserWarning, match="falls back to gradient whitening"):
        opt = fit(module).optimizers[0]
    assert opt.source is psgd.whiten
    same(module, loop(curvature=psgd.whiten))


def test_two_optimizers_that_take_turns_make_newton_steps(fit):
    class Turns(Manual):
        def configure_optimizers(self):
            return [PSGD(layer.parameters(), curvature=psgd.hessian, **OPTIONS) for layer in (self.net[0], self.net[3])]

        def training_step(self, batch, _):
            for opt in self.optimizers():
                with opt.toggle_model():
                    opt.zero_grad()
                    self.manual_backward(self.loss(batch))
                    opt.step()

    module = Turns(inline=False)
    optimizers = fit(module, callbacks=[CurvatureCallback()]).optimizers
    assert all(opt.source is psgd.hessian for opt in optimizers)
    assert all(opt.param_groups[0]["updates"] == EPOCHS * BATCHES / 2 for opt in optimizers)
    assert module.losses[-1] < module.losses[0]


def test_the_callback_does_no_harm_where_it_is_not_needed(fit):
    module = Module()
    assert fit(module, callbacks=[CurvatureCallback()]).optimizers[0].source is psgd.hessian
    same(module, loop())


def test_accumulation_with_the_callback_takes_the_product_of_all_micro_batches(fit):
    """BatchNorm sees the micro-batches, so the twin has none."""
    module, twin = Module(), Module()
    for m in (module, twin):
        m.net[1] = nn.Identity()
    opt = fit(module, batch=8, accumulate_grad_batches=2, callbacks=[CurvatureCallback()]).optimizers[0]
    assert opt.source is psgd.hessian
    fit(twin)
    same(module, twin, rtol=1e-3, atol=1e-4)


def test_accumulation_without_the_callback_whitens_and_says_so(fit):
    module = Module()
    with pytest.warns(UserWarning, match="whitening.*accumulated before"):
        opt = fit(module, accumulate_grad_batches=2).optimizers[0]
    assert opt.source is psgd.whiten
    assert module.losses[-1] < module.losses[0]


def test_bfloat16_trains_with_exact_products(fit):
    module = Module()
    assert fit(module, precision="bf16-mixed").optimizers[0].source is psgd.hessian
    assert module.losses[-1] < module.losses[0]
    same(module, loop(), rtol=0.5, atol=0.1)


@pytest.mark.parametrize("curvature", CURVATURES)
def test_a_resumed_run_ends_with_the_weights_of_an_uninterrupted_one(fit, tmp_path, curvature):
    whole, first, second = (Module(curvature=curvature) for _ in range(3))
    fit(whole)
    fit(first, epochs=1).save_checkpoint(tmp_path / "middle.ckpt")
    fit(second, resume=tmp_path / "middle.ckpt")
    same(second, whole)


def test_schedulers_set_the_rate(fit):
    class Scheduled(Module):
        def configure_optimizers(self):
            opt = super().configure_optimizers()
            steps = torch.optim.lr_scheduler.OneCycleLR(opt, 0.05, total_steps=EPOCHS * BATCHES)
            return {"optimizer": opt, "lr_scheduler": {"scheduler": steps, "interval": "step"}}

    module = Scheduled()
    opt = fit(module).optimizers[0]
    assert opt.param_groups[0]["lr"] < 1e-3
    assert module.losses[-1] < module.losses[0]


def test_an_exception_in_training_leaves_no_watch_behind(fit):
    class Fails(Module):
        def on_before_backward(self, _):
            raise KeyError

    with pytest.raises(KeyError):
        fit(Fails(), accumulate_grad_batches=2, callbacks=[CurvatureCallback()])
    assert not torch.overrides._get_current_function_mode_stack()


def test_the_callback_needs_psgd(fit):
    class Other(Module):
        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters())

    with pytest.raises(TypeError, match="needs psgd"):
        fit(Other(), callbacks=[CurvatureCallback()])
