"""Measures of certainty, forgetting and distance from the paper's experiments: small pure functions."""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor


class Summary(NamedTuple):
    """Smallest, mean and largest of some values, as in the paper's tables."""

    min: float
    mean: float
    max: float


def summary(values: Tensor) -> Summary:
    """Return (min, mean, max).

    >>> summary(torch.tensor([1.0, 2.0, 6.0]))
    Summary(min=1.0, mean=3.0, max=6.0)
    """
    if not values.numel():
        raise ValueError("a summary needs at least one value, got none")
    values = values.double()
    return Summary(float(values.min()), float(values.mean()), float(values.max()))


def entropy(logits: Tensor) -> Tensor:
    """−Σ p log p of the softmax of each row, in nats: 0 is certain, log(classes) knows nothing.

    >>> entropy(torch.tensor([[0.0, 0.0, 0.0, 0.0], [0.0, 1.0, 0.0, 0.0]]))
    tensor([1.3863, 1.2683])
    """
    log_p = logits.log_softmax(-1)
    return torch.special.entr(log_p.exp()).sum(-1)


def margin(logits: Tensor) -> Tensor:
    """Return the gap between the two largest softmax probabilities of each row: 1 is certain.

    >>> margin(torch.tensor([[0.0, 0.0], [100.0, 0.0]]))
    tensor([0., 1.])
    """
    if logits.shape[-1] < 2:
        raise ValueError(f"a margin needs at least two classes, got {logits.shape[-1]}")
    first, second = logits.softmax(-1).topk(2).values.unbind(-1)
    return first - second


def forgetting_events(correct: Tensor) -> Tensor:
    """Count how often each example was learned and then forgotten (Toneva et al. 2019).

    Args:
        correct: whether each example (columns) was classified correctly at each presentation (rows), in order.

    >>> forgetting_events(torch.tensor([[0, 1, 0], [1, 1, 0], [0, 1, 0], [1, 1, 0]]))
    tensor([1, 0, 0])
    """
    correct = correct.bool()
    return (correct[:-1] & ~correct[1:]).sum(0)


def never_learned(correct: Tensor) -> Tensor:
    """Say which examples were never classified correctly: without an event, yet the least memorable.

    >>> never_learned(torch.tensor([[0, 1, 0], [1, 1, 0]]))
    tensor([False, False,  True])
    """
    return ~correct.bool().any(0)


def distance(params: Iterable[Tensor], start: Iterable[Tensor]) -> float:
    """‖θ − θ₀‖, how far training went.

    >>> distance([torch.tensor([3.0]), torch.tensor([[4.0]])], [torch.zeros(1), torch.zeros(1, 1)])
    5.0
    """
    pairs = list(zip(params, start, strict=True))
    for p, p0 in pairs:
        if p.shape != p0.shape:
            raise ValueError(f"a distance needs parameters of equal shapes, got {tuple(p.shape)} and {tuple(p0.shape)}")
    wide = [torch.linalg.vector_norm((p.detach() - p0.detach()).cpu()).double() for p, p0 in pairs]
    return float(torch.stack(wide).norm()) if wide else 0.0


def correlations(x: Sequence[float] | Tensor, y: Sequence[float] | Tensor) -> dict[str, float]:
    """Return Pearson's, Spearman's, Kendall's and the weighted correlation, the first three with their p-values.

    >>> found = correlations([1.0, 2.0, 3.0, 4.0], [1.0, 3.0, 2.0, 4.0])
    >>> round(found["spearman"], 3), round(found["kendall"], 3)
    (0.8, 0.667)
    """
    stats: Any = importlib.import_module("scipy.stats")
    a, b = (torch.as_tensor(t).detach().double().cpu().numpy() for t in (x, y))
    if a.ndim != 1 or a.shape != b.shape or len(a) < 2:
        raise ValueError(f"correlations need two equally long sequences of numbers, got shapes {a.shape} and {b.shape}")
    found = {"pearson": stats.pearsonr(a, b), "spearman": stats.spearmanr(a, b), "kendall": stats.kendalltau(a, b)}
    values = {name: float(result.statistic) for name, result in found.items()}
    p_values = {f"{name}_p": float(result.pvalue) for name, result in found.items()}
    return {**values, "weighted": float(stats.weightedtau(a, b).statistic), **p_values}
