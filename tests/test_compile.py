"""fit and precondition trace as one graph, agree with eager, and do not trace again when the rate changes."""

import pytest
import torch
from cases import CASES, ids, pair, walked
from graphs import Graphs
from laws import near, near_points
from torch import Tensor
from torch.utils._pytree import tree_leaves

from psgd import (
    Blocks,
    Dense,
    Group,
    Normalized,
    Point,
    Smoothed,
    StepSize,
    Triangular,
    XMat,
    affine,
    dct,
    lra,
)


def made_of(group: Group) -> frozenset[type]:
    """The classes of an expression."""
    inner = [getattr(group, k) for k in ("part", "by") if hasattr(group, k)]
    return frozenset({type(group)}).union(*map(made_of, (*inner, *getattr(group, "parts", ()))))


# A trace follows classes, not sizes: of the expressions, which are slow to trace, one of each make is enough.
MAKES: dict[frozenset[type], str] = {}
for name, group, _ in CASES:
    MAKES.setdefault(made_of(group), name)
TRACED = [case for case in CASES if len(made_of(case[1])) == 1 or MAKES[made_of(case[1])] == case[0]]


@pytest.fixture(autouse=True)
def _forget_graphs():
    torch.compiler.reset()
    yield
    torch.compiler.reset()


@pytest.mark.parametrize(("name", "group", "n"), TRACED, ids=ids(TRACED))
def test_one_step_is_one_graph_that_agrees_with_eager(name: str, group: Group, n: int):
    def one_step(q: Point, v: Tensor, h: Tensor, lr: Tensor) -> tuple[Point, Tensor]:
        new = group.fit(q, v, h, lr=lr)
        return new, group.precondition(new, h)

    graphs = Graphs()
    compiled = torch.compile(one_step, fullgraph=True, backend=graphs)
    q, (v, h) = walked(group, n), pair(n, 9)
    for lr in (0.1, 0.2, 0.3):
        (new, d), (expected_new, expected_d) = (f(q, v, h, torch.tensor(lr)) for f in (compiled, one_step))
        near_points(new, expected_new)
        near(d, expected_d)
        q = new
    assert graphs.count <= 1  # none for constants


@pytest.mark.parametrize("rule", [Normalized(), Smoothed(0.5)], ids=repr)
@pytest.mark.parametrize("coin", [True, False])
def test_rules_and_coins_trace(rule: StepSize, coin: bool):
    group, graphs = lra(2), Graphs()
    compiled = torch.compile(group.fit, fullgraph=True, backend=graphs)
    q, (v, h) = walked(group, 5), pair(5, 9)
    for lr in (0.1, 0.2):
        rate = torch.tensor(lr)
        new, expected = (f(q, v, h, lr=rate, coin=coin, rule=rule) for f in (compiled, group.fit))
        near_points(new, expected)
    assert graphs.count == 1


@pytest.mark.parametrize("group", [lra(2), affine((3, 4)), dct(XMat()), Blocks(3, Triangular())], ids=repr)
def test_graphs_pass_aot_autograd(group: Group):
    compiled = torch.compile(group.fit, fullgraph=True, backend="aot_eager")
    q, (v, h) = walked(group, 12), pair(12, 9)
    near_points(compiled(q, v, h, lr=torch.tensor(0.1)), group.fit(q, v, h, lr=torch.tensor(0.1)))
    assert not any(t.requires_grad for t in tree_leaves(compiled(q, v, h, lr=torch.tensor(0.1))))


def test_a_changing_float_rate_traces_twice_at_most():
    group, graphs = Dense(), Graphs()
    compiled = torch.compile(group.fit, fullgraph=True, backend=graphs)
    q, (v, h) = walked(group, 4), pair(4, 9)
    for lr in (0.1, 0.2, 0.3, 0.4, 0.5):
        near_points(compiled(q, v, h, lr=lr), group.fit(q, v, h, lr=lr))
    assert graphs.count <= 2
