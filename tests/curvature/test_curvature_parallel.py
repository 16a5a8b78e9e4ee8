"""Data-parallel rows of the matrix, in two real processes: h is that of the whole batch, and the ranks stay equal."""

import contextlib
import warnings

import cluster
import pytest
import torch
from situations import Recorder, error
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

import psgd

WORLD, STEPS = 2, 20


class Net(nn.Module):
    """Two branches: each rank may take one, and one parameter is never used."""

    def __init__(self, branches=False, dropout=0.0):
        super().__init__()
        self.body, self.dropout = nn.Linear(6, 8), nn.Dropout(dropout)
        self.heads = nn.ModuleList([nn.Linear(8, 3), nn.Linear(8, 3)])
        self.idle = nn.Parameter(torch.ones(4)) if branches else None
        self.branches = branches

    def forward(self, x, rank, activation=torch.tanh):
        h = self.dropout(activation(self.body(x)))
        return self.heads[rank](h) if self.branches else sum(head(h) for head in self.heads)


def data():
    generator = torch.Generator().manual_seed(7)
    return torch.randn(WORLD, 8, 6, generator=generator), torch.randn(WORLD, 8, 3, generator=generator)


def whole_batch(theta, v, branches=False):
    """Hv of the mean loss over the ranks, in float64."""
    model = Net(branches).double()
    params = list(model.parameters())
    for p, t in zip(params, theta, strict=True):
        p.data.copy_(t)
    x, y = (t.double() for t in data())
    loss = sum(F.mse_loss(model(x[rank], rank), y[rank]) for rank in range(WORLD)) / WORLD
    _, h = psgd.hvp(loss, params, [t.double() for t in v])
    return [torch.zeros_like(p) if t is None else t for p, t in zip(params, h, strict=True)]


def train(rank, *, way="closure", dropout=0.0, branches=False, odd=None, options=None, **ddp):
    """Train with DDP and report parameters, pairs, source and warnings. Each rank has data and a seed of its own."""
    torch.manual_seed(0)
    net = Net(branches, dropout)
    model = DDP(net, find_unused_parameters=branches, **ddp)
    opt = Recorder(net.parameters(), lr=0.05, **(options or {}))
    x, y = (t[rank] for t in data())
    torch.manual_seed(100 + rank)

    def loss():
        activation = F.hardsigmoid if odd == "no second derivative" and rank == 1 else torch.tanh
        return F.mse_loss(model(x, rank, activation), y)

    def closure():
        opt.zero_grad()
        value = loss()
        value.backward()
        return torch.tensor(float("inf")) if odd == "loss" and rank == 1 else value

    def context():
        opt.zero_grad()
        with opt.curvature():
            loss().backward()
        opt.step()

    def micro_batches():
        opt.zero_grad()
        for last in (False, True):
            with contextlib.nullcontext() if last else model.no_sync(), opt.curvature():
                (loss() / 2).backward()
        opt.step()

    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for _ in range(STEPS):
            {"closure": lambda: opt.step(closure), "context": context, "micro": micro_batches}[way]()
    pairs = [[None if d is None else list(d.values()) for d in pair] for pair in opt.pairs]
    return {
        "params": [p.detach() for p in net.parameters()],
        "pairs": [pairs[0], pairs[-1]],
        "source": str(opt.source),
        "said": [str(w.message) for w in said if "PSGD" in str(w.message)],
        "iteration": opt.param_groups[0]["iteration"],
        "steps": float(opt.state[net.body.weight]["step"]),
        "diagonal": None if net.idle is None else opt.state[net.idle]["q"]["1"]["d"],
    }


FD = {"curvature": psgd.finite_difference}
SCENARIOS = {
    "closure": {},
    "dropout": {"dropout": 0.5},
    "context": {"way": "context"},
    "micro-batches": {"way": "micro"},
    "hessian": {"options": {"curvature": psgd.hessian}},
    "finite difference": {"options": FD},
    "whiten": {"options": {"curvature": psgd.whiten}},
    "static graph": {"static_graph": True},
    "static graph, context": {"static_graph": True, "way": "context"},
    "unused": {"branches": True},
    "unused, context": {"branches": True, "way": "context"},
    "bucket view": {"gradient_as_bucket_view": True},
    "bucket view, finite difference": {"gradient_as_bucket_view": True, "options": FD},
    "error on one rank": {"odd": "no second derivative"},
    "infinite loss on one rank": {"odd": "loss"},
}


def everything(rank, world):
    return {name: train(rank, **scenario) for name, scenario in SCENARIOS.items()}


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    """The results of all scenarios, rank by rank: one start of two processes serves every test and pytest worker."""
    return cluster.ranks(tmp_path_factory, WORLD, everything, "data-parallel")


@pytest.mark.parametrize("name", SCENARIOS)
def test_ranks_with_different_seeds_stay_bitwise_equal(ranks, name):
    a, b = (r[name] for r in ranks)
    assert all(p.equal(q) for p, q in zip(a["params"], b["params"], strict=True))
    assert a["source"] == b["source"]
    assert a["iteration"] == a["steps"] == STEPS


@pytest.mark.parametrize(
    "name, source, tolerance",
    [
        ("closure", "Hessian()", 1e-5),
        ("context", "Hessian()", 1e-5),
        ("micro-batches", "Hessian()", 1e-5),
        ("hessian", "Hessian()", 1e-5),
        ("unused", "Hessian()", 1e-5),
        ("unused, context", "Hessian()", 1e-5),
        ("bucket view", "Hessian()", 1e-5),
        ("finite difference", "FiniteDifference()", 1e-2),
        ("static graph", "FiniteDifference()", 1e-2),
        ("bucket view, finite difference", "FiniteDifference()", 1e-2),
    ],
)
def test_products_are_those_of_the_whole_batch(ranks, name, source, tolerance):
    for result in (r[name] for r in ranks):
        assert result["source"] == source
        for theta, v, h in result["pairs"]:
            h = [torch.zeros_like(t) if hi is None else hi for hi, t in zip(h, theta, strict=True)]
            assert error(h, whole_batch(theta, v, branches="unused" in name)) < tolerance


@pytest.mark.parametrize("name", ["closure", "finite difference"])
def test_views_of_buckets_make_the_same_steps(ranks, name):
    """The second backward pass overwrites them."""
    for result in ranks:
        viewed = result["bucket view" if name == "closure" else "bucket view, finite difference"]
        assert all(p.equal(q) for p, q in zip(result[name]["params"], viewed["params"], strict=True))


@pytest.mark.parametrize("name", SCENARIOS)
def test_only_what_falls_back_says_so_and_once(ranks, name):
    causes = {
        "static graph": "finite differences.*static_graph",
        "static graph, context": "whitening.*static_graph",
        "error on one rank": "finite differences.*(hardsigmoid|another rank)",
    }
    for result in (r[name] for r in ranks):
        assert len(result["said"]) == (name in causes)
        if name in causes:
            with pytest.warns(UserWarning, match=causes[name]):
                warnings.warn(result["said"][0], stacklevel=1)


@pytest.mark.parametrize("name", ["unused", "unused, context"])
def test_a_parameter_that_no_rank_uses_keeps_its_place(ranks, name):
    for result in (r[name] for r in ranks):
        assert torch.equal(result["params"][0], torch.ones(4))
        assert torch.allclose(result["diagonal"], result["diagonal"][0])  # no product, so no fit
