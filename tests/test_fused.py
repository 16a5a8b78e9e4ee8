"""Forms made for speed are the derived ones: chunk by chunk, and beyond one chunk."""

import pytest
import torch

from psgd import Butterfly, Diagonal, Normalized, Smoothed, XMat, linalg
from psgd.group import Group

CASES = [
    (g, n) for g in (Diagonal(), XMat(), Butterfly()) for n in (1, 2, 3, 8, 21, 50) if n % 2 == 0 or g != Butterfly()
]


@pytest.mark.parametrize("size", [4, 1 << 15], ids=["chunks", "one chunk"])
@pytest.mark.parametrize("rule", [Smoothed(), Normalized()], ids=str)
@pytest.mark.parametrize(("group", "n"), CASES, ids=str)
def test_the_same_steps(group, n, rule, size, monkeypatch):
    monkeypatch.setattr(linalg, "CHUNK", size)
    rng, q = torch.Generator().manual_seed(n), group.init(n, dtype=torch.float64)
    for _ in range(5):
        v, h = torch.randn(2, n, generator=rng, dtype=torch.float64)
        new = group.fit(q, v, h, lr=0.4, rule=rule)
        torch.testing.assert_close(new, Group.fitted(group, q, v, h, 0.4, True, rule))
        torch.testing.assert_close(group.precondition(new, v), Group.precondition(group, new, v))
        q = new


@pytest.mark.parametrize("group", [Diagonal(), XMat(), Butterfly()], ids=str)
def test_nothing_that_was_given_changes(group, monkeypatch):
    monkeypatch.setattr(linalg, "CHUNK", 4)
    q = group.init(20)
    given = {k: t.clone() for k, t in q.items()}
    v, h = torch.randn(2, 20, generator=torch.Generator().manual_seed(0))
    before = v.clone(), h.clone()
    group.precondition(group.fit(q, v, h), v)
    assert all(torch.equal(q[k], t) for k, t in given.items())
    assert torch.equal(v, before[0]) and torch.equal(h, before[1])
