"""The measures of the paper's tables against their definitions."""

import math

import pytest
import torch
from torch import nn

from psgd.diagnostics.measures import (
    Summary,
    correlations,
    distance,
    entropy,
    forgetting_events,
    margin,
    never_learned,
    summary,
)

LOGITS = 5 * torch.randn(50, 7, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def test_entropy():
    p = LOGITS.softmax(-1)
    torch.testing.assert_close(entropy(LOGITS), -(p * p.log()).sum(-1))
    assert entropy(torch.zeros(10)).item() == pytest.approx(math.log(10))


def test_entropy_of_certainty_is_zero_and_has_no_nan():
    assert entropy(torch.tensor([1e4, 0.0, -1e4])).item() == 0
    assert entropy(torch.tensor([0.0, -math.inf])).item() == 0


def test_margin():
    p = LOGITS.softmax(-1).sort(descending=True).values
    torch.testing.assert_close(margin(LOGITS), p[:, 0] - p[:, 1])
    with pytest.raises(ValueError, match="at least two classes, got 1"):
        margin(torch.zeros(3, 1))


def test_summary():
    assert summary(torch.tensor([3.0, 1.0, 2.0])) == Summary(1, 2, 3)
    with pytest.raises(ValueError, match="at least one value, got none"):
        summary(torch.empty(0))


def test_forgetting():
    histories = {
        "never forgotten": [0, 0, 1, 1, 1],
        "never learned": [0, 0, 0, 0, 0],
        "once": [0, 1, 0, 1, 1],
        "twice": [1, 0, 1, 0, 0],
        "at the end": [1, 1, 1, 1, 0],
    }
    correct = torch.tensor(list(histories.values())).T
    assert forgetting_events(correct).tolist() == [0, 0, 1, 2, 1]
    assert never_learned(correct).tolist() == [False, True, False, False, False]
    assert forgetting_events(correct[:1]).tolist() == [0] * 5


def test_distance():
    model = nn.Linear(3, 2)
    start = [p.detach().clone() for p in model.parameters()]
    with torch.no_grad():
        model.weight[0, 0] += 3
        model.bias[1] -= 4
    assert distance(model.parameters(), start) == pytest.approx(5, rel=1e-5)
    assert distance([], []) == 0
    with pytest.raises(ValueError, match=r"equal shapes, got \(2,\) and \(3,\)"):
        distance([torch.ones(2)], [torch.ones(3)])


def test_correlations():
    pytest.importorskip("scipy")
    g = torch.Generator().manual_seed(0)
    x = torch.randn(40, generator=g, dtype=torch.float64)
    y = x + torch.randn(40, generator=g, dtype=torch.float64)
    found = correlations(x, y)
    assert found.keys() == {"pearson", "spearman", "kendall", "weighted", "pearson_p", "spearman_p", "kendall_p"}
    both = torch.stack((x, y))
    assert found["pearson"] == pytest.approx(float(torch.corrcoef(both)[0, 1]))
    ranks = both.argsort(1).argsort(1).double()
    assert found["spearman"] == pytest.approx(float(torch.corrcoef(ranks)[0, 1]))
    signs = (x[:, None] - x).sign() * (y[:, None] - y).sign()
    assert found["kendall"] == pytest.approx(float(signs.sum() / (40 * 39)))
    assert all(0 <= found[key] <= 1 for key in found if key.endswith("_p"))
    perfect = correlations([1, 2, 3, 4], [2, 4, 6, 8])
    assert all(perfect[key] == pytest.approx(1) for key in ("pearson", "spearman", "kendall", "weighted"))
    with pytest.raises(ValueError, match="two equally long sequences"):
        correlations([1.0, 2.0], [1.0])
