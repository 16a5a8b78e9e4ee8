"""PSGD in an unmodified Hugging Face Trainer, on a tiny GPT with random weights: nothing is downloaded."""

import pytest
import torch

import psgd
from psgd import PSGD

transformers = pytest.importorskip("transformers", reason="needs the extra `frameworks`")
pytest.importorskip("accelerate", reason="needs the extra `frameworks`")
pytestmark = pytest.mark.frameworks

from psgd.integrations.huggingface import CurvatureCallback  # noqa: E402

STEPS = 12
WHITEN = {"lr": 0.02, "precond_prob": 0.5}
NEWTON = WHITEN | {"lr": 0.5}


def gpt(attention="eager"):
    torch.manual_seed(0)
    sizes = dict(n_layer=1, n_head=2, n_embd=16, n_positions=16, vocab_size=32, bos_token_id=0, eos_token_id=0)
    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(attn_implementation=attention, attn_pdrop=0.0, embd_pdrop=0.0, resid_pdrop=0.0, **sizes)
    )


class Counting(torch.utils.data.Dataset):
    """Sequences that count upwards."""

    def __len__(self):
        return 64

    def __getitem__(self, i):
        ids = (torch.arange(12) + i) % 32
        return {"input_ids": ids, "labels": ids}


class Losses(transformers.TrainerCallback):
    def __init__(self):
        self.values = []

    def on_log(self, args, state, control, logs, **_):
        if "loss" in logs:
            self.values.append(logs["loss"])


@pytest.fixture
def trainer(tmp_path):
    def make(model, callbacks=(), **options):
        groups = {k: options.pop(k) for k in ("optimizers", "optimizer_cls_and_kwargs") if k in options}
        args = transformers.TrainingArguments(
            output_dir=tmp_path,
            use_cpu=True,
            report_to=[],
            disable_tqdm=True,
            max_steps=STEPS,
            logging_steps=1,
            lr_scheduler_type="constant",
            dataloader_pin_memory=False,
            **{"save_strategy": "no", "per_device_train_batch_size": 8} | options,
        )
        return transformers.Trainer(model, args, train_dataset=Counting(), callbacks=list(callbacks), **groups)

    return make


def inner(trainer):
    return trainer.optimizer.optimizer


def train(trainer, **options):
    """Train and check that the loss falls."""
    losses = Losses()
    trainer.add_callback(losses)
    trainer.train(**options)
    assert losses.values[-1] < losses.values[0] - 0.1
    assert not torch.overrides._get_current_function_mode_stack()
    return trainer


def same(a, b, **tolerance):
    torch.testing.assert_close(a.state_dict(), b.state_dict(), **tolerance or {"rtol": 0, "atol": 0})


def test_an_optimizer_of_ones_own_whitens(trainer):
    model = gpt()
    opt = PSGD(model.parameters(), **WHITEN)
    train(trainer(model, optimizers=(opt, None)))
    assert opt.source is psgd.whiten
    assert opt.param_groups[0]["iteration"] == STEPS


def test_class_and_options_make_one_preconditioner_over_two_param_groups(trainer):
    run = train(trainer(gpt(), optimizer_cls_and_kwargs=(PSGD, WHITEN), weight_decay=0.01))
    opt = inner(run)
    assert isinstance(opt, PSGD)
    assert [pg["weight_decay"] for pg in opt.param_groups] == [0.01, 0.0]
    assert {s["scope"] for s in opt.state.values()} == {0}


@pytest.mark.parametrize("curvature", [psgd.automatic, psgd.hessian])
def test_the_callback_makes_newton_steps(trainer, curvature):
    options = NEWTON | {"curvature": curvature}
    run = train(trainer(gpt(), [CurvatureCallback()], optimizer_cls_and_kwargs=(PSGD, options)))
    assert inner(run).source is psgd.hessian
    assert inner(run).param_groups[0]["updates"] == STEPS / 2


def test_accumulation_takes_the_product_of_all_micro_batches(trainer):
    """All sequences count alike, so that eight at once, or four and four, are the same batch."""
    runs = [
        train(
            trainer(
                gpt(),
                [CurvatureCallback()],
                optimizer_cls_and_kwargs=(PSGD, NEWTON),
                per_device_train_batch_size=size,
                gradient_accumulation_steps=8 // size,
            )
        )
        for size in (8, 4)
    ]
    assert all(inner(run).source is psgd.hessian for run in runs)
    assert inner(runs[1]).param_groups[0]["iteration"] == STEPS
    same(runs[1].model, runs[0].model, rtol=1e-2, atol=1e-3)


def test_attention_without_second_derivatives_is_whitened_and_says_so(trainer):
    with pytest.warns(UserWarning, match="whitening.*flash_attention"):
        run = train(trainer(gpt("sdpa"), [CurvatureCallback()], optimizer_cls_and_kwargs=(PSGD, WHITEN)))
    assert inner(run).source is psgd.whiten


def test_bfloat16_makes_newton_steps(trainer):
    run = train(trainer(gpt(), [CurvatureCallback()], optimizer_cls_and_kwargs=(PSGD, NEWTON), bf16=True))
    assert inner(run).source is psgd.hessian


@pytest.mark.parametrize("callbacks", [(), (CurvatureCallback,)], ids=["whiten", "newton"])
def test_a_resumed_run_ends_with_the_weights_of_an_uninterrupted_one(trainer, tmp_path, callbacks):
    kwargs = NEWTON if callbacks else WHITEN
    options = dict(optimizer_cls_and_kwargs=(PSGD, kwargs), save_strategy="steps", save_steps=5)
    whole = train(trainer(gpt(), [c() for c in callbacks], **options))
    resumed = trainer(gpt(), [c() for c in callbacks], **options)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-5"))
    assert inner(resumed).source is (psgd.hessian if callbacks else psgd.whiten)
    same(resumed.model, whole.model)


def test_an_exception_in_training_is_cleaned_up_by_the_next_run(trainer):
    class Fails(transformers.TrainerCallback):
        def on_substep_end(self, *_, **__):
            raise KeyError

    options = dict(optimizer_cls_and_kwargs=(PSGD, NEWTON), gradient_accumulation_steps=2)
    run = trainer(gpt(), [CurvatureCallback(), Fails()], **options)
    with pytest.raises(KeyError):
        run.train()
    run.remove_callback(Fails)
    train(run)


def test_the_callback_needs_psgd(trainer):
    with pytest.raises(TypeError, match=r"needs psgd\.PSGD"):
        trainer(gpt(), [CurvatureCallback()]).train()
