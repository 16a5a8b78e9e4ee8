"""DDP: every rank has the whole model and a part of the batch, and all make the steps of one process on all of it."""

import contextlib
import functools

import pytest
import torch
from cluster import ranks
from test_shards import batch, network, whole
from torch import distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import psgd
from psgd import PSGD, Diagonal, Regular, XMat, kron, lra

STEPS = 50
GROUPS = {"diagonal": Diagonal(), "xmat": XMat(), "lra": lra(3), "kron": kron()}
HESSIAN, WHITEN, DIFFERENCE = ({"curvature": c} for c in (psgd.hessian, psgd.whiten, psgd.finite_difference))
WAYS = {
    **{f"{name}, exact": {"group": group, "options": HESSIAN} for name, group in GROUPS.items()},
    **{f"{name}, whitening": {"group": group, "options": WHITEN} for name, group in GROUPS.items()},
    "context": {"way": "context", "options": HESSIAN},
    "accumulated": {"way": "accumulated", "options": HESSIAN},
    "accumulated whitening": {"way": "accumulated", "options": WHITEN},
    "unused": {"options": HESSIAN, "ddp": {"find_unused_parameters": True}},
    "bucket view": {"options": HESSIAN, "ddp": {"gradient_as_bucket_view": True}},
    "static graph": {"options": WHITEN, "ddp": {"static_graph": True}},
    "differences": {"options": DIFFERENCE},
    "static graph, differences": {"options": DIFFERENCE, "ddp": {"static_graph": True}},
}


def train(model, wrapped, x, y, way="closure", group=None, options=None):
    opt = PSGD(model.parameters(), group or lra(3), lr=0.02, precond_prob=Regular(0.5, warmup=20), seed=3, **options)

    def backward(x, y, share=1.0):
        (share * (wrapped(x) - y).square().mean()).backward()

    def closure():
        opt.zero_grad()
        loss = (wrapped(x) - y).square().mean()
        loss.backward()
        return loss

    for _ in range(STEPS):
        if way == "closure":
            opt.step(closure)
            continue
        opt.zero_grad()
        halves = zip(x.chunk(2), y.chunk(2), strict=True)
        parts = [(x, y, 1.0)] if way == "context" else [(*half, 0.5) for half in halves]
        for i, part in enumerate(parts):
            alone = i + 1 < len(parts) and isinstance(wrapped, DDP)
            with wrapped.no_sync() if alone else contextlib.nullcontext(), opt.curvature():
                backward(*part)
        opt.step()
    return opt


def parallel(rank, world, dtype, ddp=None, **how):
    model = network(dtype)
    torch.manual_seed(100 + rank)
    opt = train(model, DDP(model, **ddp or {}), *batch(rank, world, dtype), **how)
    return {"params": whole(model), "source": str(opt.source)}


def scenario(rank, world):
    found = {(name, dtype): parallel(rank, world, dtype, **WAYS[name]) for name, dtype in CASES}
    found["count"] = count(rank, world)
    found["one number"] = one_number(rank, world)
    return found


BOUNDS = {torch.float32: 1e-5, torch.float64: 1e-12}
ROUGH = {torch.float32: 5e-4, torch.float64: 1e-7}  # differences amplify what the order of a sum changes, by 1/ε
CASES = [(name, torch.float64) for name in WAYS] + [
    (name, torch.float32)
    for name in (*(f"{name}, {way}" for name in GROUPS for way in ("exact", "whitening")), "differences")
]


def count(rank, world):
    """Return how many all-reduces of ours a step takes where h is exact; DDP's own are not made by this name."""
    calls, reduce = [], dist.all_reduce
    dist.all_reduce = lambda t, *args, **kwargs: (calls.append(t.numel()), reduce(t, *args, **kwargs))[1]
    try:
        model = network()
        opt = PSGD(model.parameters(), lra(3), lr=0.02, precond_prob=1.0, curvature=psgd.hessian)
        wrapped, (x, y) = DDP(model), batch(rank, world)
        for _ in range(3):
            calls.clear()
            opt.zero_grad()
            opt.step(lambda: (wrapped(x) - y).square().mean())
    finally:
        dist.all_reduce = reduce
    return calls


def one_number(rank, world):
    """A product of which all entries are one number in memory."""
    model = Sum()
    opt = PSGD(model.parameters(), Diagonal(), lr=0.01, curvature=psgd.hessian, precond_prob=1.0)
    wrapped = DDP(model)
    for _ in range(3):
        opt.zero_grad()
        loss = opt.step(lambda: wrapped(torch.ones(())))
    return float(loss)


class Sum(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.ones(4))

    def forward(self, x):
        return (self.w.sum() * x).square()


@pytest.fixture(scope="module", params=[2, 4])
def found(request, tmp_path_factory):
    return ranks(tmp_path_factory, request.param, scenario, "ddp")


@functools.cache
def alone(name, dtype):
    model, way = network(dtype), dict(WAYS[name])
    train(model, model, *batch(0, 1, dtype), **{k: v for k, v in way.items() if k in ("way", "group", "options")})
    return whole(model)


@pytest.mark.parametrize("name, dtype", CASES)
def test_the_steps_are_those_of_one_process(found, name, dtype):
    bound = (ROUGH if WAYS[name]["options"] is DIFFERENCE else BOUNDS)[dtype]
    start = whole(network(dtype))
    for result in found:
        for mine, theirs, old in zip(result[name, dtype]["params"], alone(name, dtype), start, strict=True):
            assert (mine - theirs).abs().max() < bound < (mine - old).abs().max()


@pytest.mark.parametrize("name, dtype", CASES)
def test_ranks_stay_bitwise_equal(found, name, dtype):
    for result in found:
        assert all(map(torch.equal, result[name, dtype]["params"], found[0][name, dtype]["params"]))
        assert result[name, dtype]["source"] == found[0][name, dtype]["source"]


def test_products_that_are_one_number(found):
    assert all(0 < result["one number"] < 16 for result in found)


def test_products_are_averaged_in_one_exchange(found):
    """Besides it, ranks tell each other in one of a few numbers whether all went well."""
    n = sum(p.numel() for p in network().parameters())
    for result in found:
        assert [k for k in result["count"] if k >= n] == [n] and sum(k < n for k in result["count"]) <= 1
