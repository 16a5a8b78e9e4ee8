"""What the experiments on images share: training by epochs at annealed rates, and the error on other images."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from psgd.experiments import data
from psgd.experiments.experiment import Record, Result, State
from psgd.experiments.methods import Loss, Stepper
from psgd.experiments.training import batches, evaluations, restore, snapshot


@dataclass(frozen=True)
class Examples:
    """Images as numbers from 0 to 1, of shape (count, 1, 28, 28), and their classes."""

    inputs: Tensor
    targets: Tensor

    def __getitem__(self, chosen: slice | Tensor) -> Examples:
        return Examples(self.inputs[chosen], self.targets[chosen])

    @property
    def count(self) -> int:
        """How many."""
        return len(self.targets)


class Task(NamedTuple):
    """What to learn from, and what to be judged by."""

    train: Examples
    held_out: Examples
    name: str
    """Of what is held out: "test", or "validation" for the last training images."""


@functools.cache
def images(source: str) -> tuple[Examples, Examples]:
    """Return the training and test images of "mnist", or of "digits", the 4,000 + 1,000 that come with a package."""
    sources: Mapping[str, Callable[[], Any]] = {"mnist": data.mnist, "digits": data.embedded_mnist}
    if source not in sources:
        raise ValueError(f"images come from one of {', '.join(sources)}, got {source!r}")
    found = sources[source]()
    where = "cuda" if torch.cuda.is_available() else "cpu"

    def scaled(x: Any, y: Any) -> Examples:
        inputs, targets = torch.as_tensor(x, device=where), torch.as_tensor(y, device=where)
        return Examples(inputs[:, None].float() / 255, targets.long())

    return scaled(found.train_x, found.train_y), scaled(found.test_x, found.test_y)


def task(source: str, *, validation: int = 0, examples: int = 0) -> Task:
    """Return a task: trained on the first `examples` (0 for all) that are not held out, judged by the test images.

    Where some of the last training images are kept for validation, nobody sees a test image.
    """
    train, test = images(source)
    if validation:
        task = Task(train[:-validation], train[-validation:], "validation")
    else:
        task = Task(train, test, "test")
    return task._replace(train=task.train[:examples]) if examples else task


class Rate(NamedTuple):
    """A number of the optimizer that falls by equal factors, epoch by epoch, to `final` times its start."""

    start: float
    final: float = 1.0

    def at(self, epoch: int, epochs: int) -> float:
        """Return it.

        >>> round(Rate(0.1, 0.01).at(9, epochs=10), 6)
        0.001
        """
        return self.start * self.final ** (epoch / max(1, epochs - 1))


def train(
    model: nn.Module,
    stepper: Stepper,
    task: Task,
    seed: int,
    *,
    epochs: int,
    batch: int,
    rates: Mapping[str, Rate],
    state: State | None = None,
    inputs: Callable[[Tensor, int, int], Tensor] = lambda x, epoch, index: x,
    look: Callable[[], dict[str, Any]] = dict,
    every: int = 0,
) -> Iterator[Record]:
    """Train, and yield after each epoch its mean loss and the error (%) on what is held out.

    Training that diverged ends, with an error of 100 %. A checkpoint may be saved after every step.

    Args:
        rates: options of the optimizer that are set before each epoch, by name.
        state: of the record after which to go on.
        inputs: what to make of a batch of inputs, given the epoch and the batch's place in it.
        look: what else to record, after an epoch,
        every: and within it, after every so many steps; 0 for never.
    """
    start = 0
    losses: list[Tensor] = []
    if state is not None:
        restore(state, model, stepper)
        start, losses = state["epoch"], state["losses"]
    for epoch in range(start, epochs):
        for options in stepper.optimizer.param_groups:
            options.update({name: rate.at(epoch, epochs) for name, rate in rates.items()})
        order = batches(task.train.count, batch, seed, epoch)
        for i in range(len(losses), len(order)):
            these = task.train[order[i]]
            losses.append(stepper.step(Loss(model, inputs(these.inputs, epoch, i), these.targets, F.cross_entropy)))
            seen = look() if every and (i + 1) % every == 0 and i + 1 < len(order) else {}
            saved = functools.partial(snapshot, model, stepper, epoch=epoch, losses=losses)
            yield Record(epoch * len(order) + i + 1, seen, saved)
        mean = float(torch.stack(losses).mean())
        loss, error = evaluate(model, task.held_out)
        finite = math.isfinite(mean) and math.isfinite(loss)
        values = {
            "epoch": epoch + 1,
            "train_loss": mean if finite else None,
            f"{task.name}_loss": loss if finite else None,
            f"{task.name}_error": error if finite else 100.0,
            **evaluations(stepper),
            **look(),
        }
        losses = []
        saved = functools.partial(snapshot, model, stepper, epoch=epoch + 1, losses=losses)
        yield Record((epoch + 1) * len(order), values, saved if finite else None)  # no way on from there
        if not finite:
            return


@torch.no_grad()
def evaluate(model: nn.Module, examples: Examples, size: int = 1000) -> tuple[float, float]:
    """Return the mean cross entropy, and the error in percent."""
    loss, wrong = 0.0, 0
    for x, y in zip(examples.inputs.split(size), examples.targets.split(size), strict=True):
        logits = model(x)
        loss += float(F.cross_entropy(logits, y, reduction="sum"))
        wrong += int((logits.argmax(-1) != y).sum())
    return loss / examples.count, 100 * wrong / examples.count


def score(result: Result) -> float:
    """Return the validation error at the end, which tuning minimizes; ties go to the smaller validation loss."""
    loss = result.series("validation_loss")
    error = result.series("validation_error")
    diverged = not loss or result.records[-1].get("validation_loss") is None
    return math.inf if diverged else error[-1] + 1e-3 * loss[-1]
