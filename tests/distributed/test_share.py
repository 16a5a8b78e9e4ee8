"""What `share` says before a run is what a run holds and sends, to the byte."""

import functools

import pytest
import torch
from cluster import ranks
from test_shards import network, optimizer, shard
from torch import distributed as dist

import psgd
from psgd import Butterfly, Diagonal, Regular, XMat, kron, lra
from psgd.across import local
from psgd.points import leaves

WIDTHS = (8, 32, 16, 16, 16, 8)  # all of them multiples of the ranks
GROUPS = {
    "diagonal": Diagonal(),
    "xmat": XMat(),
    "butterfly": Butterfly(),
    "lra": lra(3),
    "lra, another rank": lra(5),
    "kron": kron(),
    "triangular": kron(psgd.Triangular()),
}


def measured(name):
    """Train until updates have settled, and return the state, and what two steps send."""
    model = shard(network(widths=WIDTHS))
    opt = optimizer(model, GROUPS[name], curvature=psgd.whiten, precond_prob=Regular(0.5))
    x = torch.randn(8, WIDTHS[0], generator=torch.Generator().manual_seed(dist.get_rank()))

    def closure():
        opt.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        return loss

    for _ in range(22):
        opt.step(closure)
    found = {}
    for _ in range(2):
        due = opt.due
        closure()
        with Wire() as wire:
            opt.step()
        found[due] = (wire.sent, wire.calls)
    held = [[*leaves(s["q"]), s["momentum"]] for s in opt.state.values()]
    state = sum(t.numel() * t.element_size() for some in held for t in map(local, some))
    with Wire() as wire:
        closure()
    return {"state": state, "steps": found, "model": wire.sent}


class Wire:
    """Counts what this rank sends: a ring's share of sums, parts that go to others."""

    def __enter__(self):
        self.sent, self.calls = 0.0, 0
        gathers = ("all_gather_single", "all_gather_into_tensor")  # as newer and older versions of torch call them
        scatters = ("reduce_scatter_single", "reduce_scatter_tensor")
        names = ("all_reduce", "all_to_all_single", *gathers, *scatters)
        self.originals = {name: getattr(dist, name) for name in names if hasattr(dist, name)}
        for name in self.originals:
            setattr(dist, name, functools.partial(self.count, name))
        return self

    def __exit__(self, *_):
        for name, original in self.originals.items():
            setattr(dist, name, original)

    def count(self, name, *args, **kwargs):
        first = args[0] if args else kwargs["output"]
        world, here = dist.get_world_size(), dist.get_rank()
        size = first.numel() * first.element_size()
        if name == "all_to_all_single":
            size = sum(n for to, n in enumerate(args[3]) if to != here) * first.element_size()
        elif name.startswith("all_gather"):
            size = size * (world - 1) / world
        elif name.startswith("reduce_scatter"):
            size = size * (world - 1)
        else:
            size = 2 * size * (world - 1) / world
        self.sent += size
        self.calls += 1
        return self.originals[name](*args, **kwargs)


def scenario(rank, world):
    return {name: measured(name) for name in GROUPS}


@pytest.fixture(scope="module", params=[2, 4])
def found(request, tmp_path_factory):
    return ranks(tmp_path_factory, request.param, scenario, "share")


@pytest.mark.parametrize("name", GROUPS)
def test_what_is_held(found, name):
    said = psgd.share(network(widths=WIDTHS), GROUPS[name], ranks=len(found))
    assert max(result[name]["state"] for result in found) == pytest.approx(said.state, rel=1e-6)


@pytest.mark.parametrize("name", GROUPS)
def test_what_is_sent(found, name):
    said = psgd.share(network(widths=WIDTHS), GROUPS[name], ranks=len(found))
    for due, sent, calls in ((False, said.sent, said.exchanges), (True, said.sent_due, said.exchanges_due)):
        mean = sum(result[name]["steps"][due][0] for result in found) / len(found)
        assert mean == pytest.approx(sent, rel=1e-6)
        assert {result[name]["steps"][due][1] for result in found} == {calls}


def test_what_the_model_sends(found):
    """Layers are gathered before the backward pass again, but for the last."""
    said = psgd.share(network(widths=WIDTHS), Diagonal(), ranks=len(found))
    for result in found:
        assert 0.6 * said.model < result["diagonal"]["model"] <= said.model


def test_the_default_is_that_of_the_optimizer():
    assert psgd.share(network(), ranks=2) == psgd.share(network(), lra(10), ranks=2)


def test_a_model_sends_its_own_digits():
    wide, narrow = (psgd.share(network(dtype), Diagonal(), ranks=2) for dtype in (torch.float32, torch.bfloat16))
    assert narrow.model == wide.model / 2 and narrow.sent == wide.sent


def test_others_are_refused():
    with pytest.raises(ValueError, match="Padded"):
        psgd.share(network(), psgd.Padded(Butterfly(), 2), ranks=2)
    with pytest.raises(ValueError, match=r"kron\(\), got Dense\(\)"):
        psgd.share(network(), psgd.Dense(), ranks=2)
    with pytest.raises(ValueError, match="at least one rank, got 0"):
        psgd.share(network(), Diagonal(), ranks=0)
