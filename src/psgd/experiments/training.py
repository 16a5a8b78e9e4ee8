"""What training experiments share: the order of examples, and checkpoints."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from psgd.experiments.methods import Stepper
from psgd.probes import generator


def batches(examples: int, size: int, seed: int, epoch: int) -> list[Tensor]:
    """Return the indices of an epoch's batches, shuffled by (seed, epoch) alone; a last short batch is left out.

    >>> [len(b) for b in batches(10, 4, seed=0, epoch=0)]
    [4, 4]
    """
    order = torch.randperm(examples, generator=generator(seed, epoch))
    return list(order[: examples // size * size].split(size))


def snapshot(model: nn.Module, stepper: Stepper, **more: Any) -> dict[str, Any]:
    """Return a training state; it is copied, so that training may go on."""
    state = {"model": model.state_dict(), "stepper": stepper.state_dict(), **more}
    return copied(state)


def restore(state: dict[str, Any], model: nn.Module, stepper: Stepper) -> None:
    """Go back to a snapshot."""
    model.load_state_dict(state["model"])
    stepper.load_state_dict(state["stepper"])


def copied(value: Any) -> Any:
    """Return a nest of dicts and lists with copies of its tensors."""
    if isinstance(value, dict):
        return {k: copied(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(copied(v) for v in value)
    return value.detach().clone() if isinstance(value, Tensor) else value


def evaluations(stepper: Stepper) -> dict[str, int]:
    """Return the cost so far, for a record."""
    return {"gradients": stepper.gradients, "products": stepper.products}
