"""The loss beside the parameters: along a line, and back."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from psgd.diagnostics.operators import inverse_operator, preconditioner_operator, split, trainable
from psgd.diagnostics.preserve import preserved
from psgd.diagnostics.spectral import top_eigenvectors
from psgd.group import Group, Point


def loss_along(model: nn.Module, loss: Callable[[], Tensor], direction: Tensor, distances: Tensor) -> Tensor:
    """Return the loss at θ + t·e for every distance t, e a flat unit vector; the model is left as it was.

    >>> model = nn.Linear(1, 1, bias=False)
    >>> _ = nn.init.constant_(model.weight, 2.0)
    >>> loss_along(model, lambda: model.weight.square().sum(), torch.ones(1), torch.tensor([-2.0, 0.0, 1.0]))
    tensor([0., 4., 9.], dtype=torch.float64)
    """
    params = trainable(model)
    e = split(direction / direction.norm(), params)
    kept = [p.detach().clone() for p in params]
    found = []
    with preserved(model, params), torch.no_grad():
        try:
            for t in distances.tolist():
                for p, start, step in zip(params, kept, e, strict=True):
                    p.copy_(start + t * step)
                found.append(float(loss()))
        finally:
            for p, start in zip(params, kept, strict=True):
                p.copy_(start)
    return torch.tensor(found, dtype=torch.float64)


def sharpest_and_flattest(group: Group, q: Point, n: int, *, steps: int = 100, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Return the top eigenvectors of P⁻¹ and of P: where the fitted curvature is largest, and where it is smallest.

    >>> from psgd import Diagonal
    >>> sharp, flat = sharpest_and_flattest(Diagonal(), {"d": torch.tensor([0.1, 1.0, 9.0])}, 3)
    >>> sharp.abs().round(decimals=2), flat.abs().round(decimals=2)
    (tensor([1., 0., 0.]), tensor([0., 0., 1.]))
    """
    operators = inverse_operator(group, q, n), preconditioner_operator(group, q, n)
    sharp, flat = (top_eigenvectors(a, 1, steps=steps, seed=seed).vectors(torch.tensor([-1]))[0] for a in operators)
    return sharp, flat
