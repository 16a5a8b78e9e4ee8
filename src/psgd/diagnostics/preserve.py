"""Looking at a model without touching it."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from psgd.evaluation import rng_states, set_rng_states


@contextmanager
def preserved(model: nn.Module, params: Sequence[Tensor]) -> Iterator[None]:
    """Leave buffers, gradients, training modes and random numbers as they were, whatever happens inside.

    >>> norm = nn.BatchNorm1d(2)
    >>> with preserved(norm, []):
    ...     _ = norm(torch.ones(3, 2))
    >>> norm.running_mean
    tensor([0., 0.])
    """
    numpy = sys.modules.get("numpy")
    rng, python, other = rng_states(params), random.getstate(), numpy and numpy.random.get_state()
    modes = [(m, m.training) for m in model.modules()]
    buffers = [(m, name, b, b.clone()) for m in model.modules() for name, b in m._buffers.items() if b is not None]
    grads = [(p, p.grad, p.grad.clone() if p.grad is not None else None) for p in params]
    try:
        with torch.enable_grad():
            yield
    finally:
        with torch.no_grad():
            for module, name, buffer, kept in buffers:
                module._buffers[name] = buffer
                buffer.copy_(kept)
            for p, grad, content in grads:
                p.grad = grad
                if grad is not None and content is not None:
                    grad.copy_(content)
        for module, training in modes:
            module.training = training
        random.setstate(python)
        if numpy is not None:
            numpy.random.set_state(other)
        set_rng_states(params, rng)
