"""Checkpoints of sharded state: saved on four ranks, loaded on one, two and four, and from one process's file."""

import functools

import pytest
import torch
import torch.distributed.checkpoint as dcp
from cluster import ranks, shared_folder
from test_shards import batch, network, optimizer, shard, train, whole
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

import psgd
from psgd import Diagonal, XMat, kron, lra

GROUPS = {"diagonal": Diagonal(), "lra": lra(3), "kron": kron()}
BEFORE, AFTER = 14, 10


def fresh(group):
    return network(), lambda model: optimizer(model, group, curvature=psgd.whiten)


def saving(rank, world, folder, groups):
    """Train, save, and go on."""
    found = {}
    for name, group in groups.items():
        model, make = fresh(group)
        model = shard(model)
        opt = make(model)
        train(model, opt, *batch(rank, world), steps=BEFORE)
        parameters, state = get_state_dict(model, opt)
        dcp.save({"model": parameters, "optimizer": state}, checkpoint_id=f"{folder}/{name}-{world}")
        train(model, opt, *batch(rank, world), steps=AFTER)
        found[name] = whole(model)
    return found


def loading(rank, world, folder, groups, saved_on):
    """Load into a new model, and go on."""
    found = {}
    for name, group in groups.items():
        model, make = fresh(group)
        for p in model.parameters():
            p.data.zero_()  # nothing is left of what was
        model = shard(model)
        opt = make(model)
        parameters, state = get_state_dict(model, opt)
        everything = {"model": parameters, "optimizer": state}
        dcp.load(everything, checkpoint_id=f"{folder}/{name}-{saved_on}")
        set_state_dict(model, opt, model_state_dict=everything["model"], optim_state_dict=everything["optimizer"])
        train(model, opt, *batch(rank, world), steps=AFTER)
        found[name] = whole(model)
    return found


def from_a_file(rank, world, folder, groups):
    """Load what one process saved by torch.save."""
    found = {}
    for name, group in groups.items():
        model, make = fresh(group)
        parts = torch.load(f"{folder}/{name}.pt")
        model.load_state_dict(parts["model"])
        model = shard(model)
        opt = make(model)
        opt.load_state_dict(parts["optimizer"])
        train(model, opt, *batch(rank, world), steps=AFTER)
        found[name] = whole(model)
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return str(shared_folder(tmp_path_factory))


@pytest.fixture(scope="module")
def saved(tmp_path_factory, folder):
    return ranks(tmp_path_factory, 4, functools.partial(saving, folder=folder, groups=GROUPS), "saving")


@pytest.fixture(scope="module", params=[1, 2, 4])
def loaded(request, tmp_path_factory, folder, saved):
    load = functools.partial(loading, folder=folder, groups=GROUPS, saved_on=4)
    return ranks(tmp_path_factory, request.param, load, "loading")


@pytest.mark.parametrize("name", GROUPS)
def test_the_trajectory_goes_on(saved, loaded, name):
    for result in loaded:
        for mine, theirs in zip(result[name], saved[0][name], strict=True):
            assert (mine - theirs).abs().max() < 1e-5
            if len(loaded) == len(saved):
                assert torch.equal(mine, theirs)


def pairs(rank, world, folder, saved_on):
    """Load XMat's pairs; return whether a part of them is left, and whether training goes on."""
    model, make = fresh(XMat())
    model = shard(model)
    opt = make(model)
    parameters, state = get_state_dict(model, opt)
    everything = {"model": parameters, "optimizer": state}
    dcp.load(everything, checkpoint_id=f"{folder}/xmat-{saved_on}")
    set_state_dict(model, opt, model_state_dict=everything["model"], optim_state_dict=everything["optimizer"])
    left = any(bool(opt.state[p]["q"]["b"].to_local().any()) for p in model.parameters())
    train(model, opt, *batch(rank, world), steps=AFTER)
    return {"left": left, "finite": all(t.isfinite().all() for t in whole(model))}


@pytest.mark.parametrize("world", [2, 4])
def test_pairs_are_forgotten_where_entries_get_other_partners(tmp_path_factory, folder, world):
    name = functools.partial(saving, folder=folder, groups={"xmat": XMat()})
    ranks(tmp_path_factory, 4, name, "saving-pairs")
    load = functools.partial(pairs, folder=folder, saved_on=4)
    found = ranks(tmp_path_factory, world, load, "loading-pairs")
    assert any(result["left"] for result in found) == (world == 4) and all(result["finite"] for result in found)


@functools.cache
def in_one_process(folder):
    found = {}
    for name, group in GROUPS.items():
        model, make = fresh(group)
        opt = make(model)
        train(model, opt, *batch(0, 1), steps=BEFORE)
        torch.save({"model": model.state_dict(), "optimizer": opt.state_dict()}, f"{folder}/{name}.pt")
        train(model, opt, *batch(0, 1), steps=AFTER)
        found[name] = whole(model)
    return found


@pytest.mark.parametrize("name", GROUPS)
def test_from_the_file_of_one_process(tmp_path_factory, folder, name):
    expected = in_one_process(folder)
    load = functools.partial(from_a_file, folder=folder, groups=GROUPS)
    for result in ranks(tmp_path_factory, 2, load, "file"):
        for mine, theirs in zip(result[name], expected[name], strict=True):
            assert (mine - theirs).abs().max() < 1e-5


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("name", GROUPS)
def test_a_checkpoint_of_four_ranks_in_one_process_without_sharding(saved, folder, name):
    model, make = fresh(GROUPS[name])
    opt = make(model)
    parameters, state = get_state_dict(model, opt)
    everything = {"model": parameters, "optimizer": state}
    dcp.load(everything, checkpoint_id=f"{folder}/{name}-4")
    set_state_dict(model, opt, model_state_dict=everything["model"], optim_state_dict=everything["optimizer"])
    train(model, opt, *batch(0, 1), steps=AFTER)
    for mine, theirs in zip(whole(model), saved[0][name], strict=True):
        assert (mine - theirs).abs().max() < 1e-5
