"""opt.diagnostics() of real Lightning and Hugging Face runs, and in TensorBoard."""

import json
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from psgd import PSGD, whiten
from psgd.diagnostics.loggers import JSONLines, TensorBoard

pytestmark = pytest.mark.frameworks
KEYS = {"fit_residual", "log_det_q", "smallest_p", "largest_p", "clipped", "skipped", "cosine", "step_norm"}


def data():
    x = torch.randn(96, 6, generator=torch.Generator().manual_seed(1))
    return x, x.sum(1, keepdim=True)


def rows(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


# --- Lightning


def lightning_run(tmp_path, callback, **options):
    L = pytest.importorskip("lightning.pytorch", reason="needs the extra `frameworks`")

    class Module(L.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = nn.Linear(6, 1)

        def training_step(self, batch, _):
            return F.mse_loss(self.net(batch[0]), batch[1])

        def configure_optimizers(self):
            return PSGD(self.parameters(), lr=0.05, precond_prob=1.0, curvature=whiten)

    module = Module()
    trainer = L.Trainer(
        accelerator="cpu",
        max_epochs=2,
        default_root_dir=tmp_path,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        callbacks=[callback],
        log_every_n_steps=1,
        **{"logger": False} | options,
    )
    trainer.fit(module, DataLoader(TensorDataset(*data()), 16))
    return trainer


def lightning_callback(*args, **kwargs):
    pytest.importorskip("lightning.pytorch", reason="needs the extra `frameworks`")
    from psgd.integrations.lightning import DiagnosticsCallback

    return DiagnosticsCallback(*args, **kwargs)


def test_lightning_to_a_file(tmp_path):
    lightning_run(tmp_path, lightning_callback(JSONLines(tmp_path / "run.jsonl"), every=4))
    found = rows(tmp_path / "run.jsonl")
    assert [row["step"] for row in found] == [4, 8, 12]
    assert {f"psgd/{key}" for key in KEYS} <= found[0].keys()
    assert all(found[-1][f"psgd/{key}"] is not None for key in KEYS)


def test_lightning_counts_steps_not_batches(tmp_path):
    log = JSONLines(tmp_path / "run.jsonl")
    lightning_run(tmp_path, lightning_callback(log, every=1), accumulate_grad_batches=3)
    assert [row["step"] for row in rows(tmp_path / "run.jsonl")] == [1, 2, 3, 4]


def test_lightning_to_its_own_loggers(tmp_path):
    pytest.importorskip("lightning.pytorch", reason="needs the extra `frameworks`")
    from lightning.pytorch.loggers import CSVLogger

    own = CSVLogger(tmp_path)
    lightning_run(tmp_path, lightning_callback(every=6), logger=own)
    own.save()
    heading = (Path(own.log_dir) / "metrics.csv").read_text().splitlines()[0].split(",")
    assert {f"psgd/{key}" for key in KEYS} <= set(heading)


def test_lightning_needs_a_positive_period():
    with pytest.raises(ValueError, match="needs every >= 1, got 0"):
        lightning_callback(every=0)


# --- Hugging Face


def huggingface_run(tmp_path, add):
    transformers = pytest.importorskip("transformers", reason="needs the extra `frameworks`")

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = nn.Linear(6, 1)

        def forward(self, x, labels):
            return {"loss": F.mse_loss(self.net(x), labels)}

    x, y = data()
    dataset = [{"x": a, "labels": b} for a, b in zip(x, y, strict=True)]
    model = Net()
    opt = PSGD(model.parameters(), lr=0.05, precond_prob=1.0, curvature=whiten)
    arguments = transformers.TrainingArguments(
        output_dir=str(tmp_path),
        num_train_epochs=2,
        per_device_train_batch_size=16,
        logging_steps=5,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        save_strategy="no",
    )
    trainer = transformers.Trainer(model=model, args=arguments, train_dataset=dataset, optimizers=(opt, None))
    add(trainer)
    trainer.train()
    return trainer


def huggingface_callback(*args, **kwargs):
    pytest.importorskip("transformers", reason="needs the extra `frameworks`")
    from psgd.integrations.huggingface import DiagnosticsCallback

    return DiagnosticsCallback(*args, **kwargs)


def test_huggingface_to_a_file(tmp_path):
    log = JSONLines(tmp_path / "run.jsonl")
    huggingface_run(tmp_path, lambda trainer: trainer.add_callback(huggingface_callback(log, every=4)))
    found = rows(tmp_path / "run.jsonl")
    assert [row["step"] for row in found] == [4, 8, 12]
    assert all(found[-1][f"psgd/{key}"] is not None for key in KEYS)


def test_huggingface_to_its_own_reports(tmp_path):
    def add(trainer):
        trainer.add_callback(huggingface_callback(lambda step, values: trainer.log(dict(values)), every=6))

    history = huggingface_run(tmp_path, add).state.log_history
    ours = [row for row in history if "psgd/cosine" in row]
    assert [row["step"] for row in ours] == [6, 12]


def test_huggingface_needs_a_positive_period():
    with pytest.raises(ValueError, match="needs every >= 1, got -1"):
        huggingface_callback(lambda step, values: None, every=-1)


# --- TensorBoard


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # theirs
def test_tensorboard(tmp_path):
    pytest.importorskip("tensorboard", reason="needs the extra `frameworks`")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    first = TensorBoard(tmp_path)
    for step in (1, 2, 3):
        first(step, {"loss": float(step)})
    second = TensorBoard(tmp_path)  # resumed after step 1
    second(2, {"loss": 20.0})
    events = EventAccumulator(str(tmp_path)).Reload()
    assert [(e.step, e.value) for e in events.Scalars("psgd/loss")] == [(1, 1.0), (2, 20.0)]
