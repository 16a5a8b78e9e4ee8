"""Stopping and going on: the same bits as without, in a new process, for every curvature, group and dtype."""

import copy
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
import resume_job
import torch
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from toys import mlp, same, snapshot, train

from psgd import PSGD, XMat, affine, hessian, lra


@pytest.fixture(scope="module")
def finals(tmp_path_factory):
    """The final weights of a run, and of one that was resumed in a new process under another global seed."""
    folder = tmp_path_factory.mktemp("resume")
    for what, seed in (("train", "1"), ("resume", "2")):
        subprocess.run([sys.executable, resume_job.__file__, what, seed, str(folder)], check=True, timeout=250)
    return folder, torch.load(folder / "train.final"), torch.load(folder / "resume.final")


@pytest.mark.parametrize("name", resume_job.SETTINGS)
def test_a_run_resumed_in_a_new_process_has_the_same_bits(finals, name):
    _, whole, resumed = finals
    assert same(whole[name], resumed[name])


@pytest.mark.parametrize("name", ["automatic", "bfloat16 Q"])
def test_two_processes_with_different_global_seeds_have_the_same_bits(finals, name, tmp_path):
    assert same(finals[1][name], resume_job.run(name, tmp_path / "half.pt", 0))


def test_a_checkpoint_holds_tensors_numbers_and_dicts_only(finals):
    def walk(value, path="opt"):
        if isinstance(value, dict):
            for key, inner in value.items():
                assert isinstance(key, (str, int)), path
                walk(inner, f"{path}.{key}")
        elif isinstance(value, list):
            for inner in value:
                walk(inner, path)
        else:
            assert value is None or isinstance(value, (bool, int, float, torch.Tensor)), (path, value)

    folder, *_ = finals
    for i, _ in enumerate(resume_job.SETTINGS):
        walk(torch.load(folder / f"{i}.pt", weights_only=True)["opt"])


@pytest.mark.parametrize("param, q", [(torch.float32, torch.bfloat16), (torch.bfloat16, torch.float32)])
def test_every_dtype_survives_a_load(param, q):
    model, twin = mlp(param), mlp(param)
    opt = PSGD(model.parameters(), lra(2), precond_dtype=q, precond_prob=1.0)
    train(opt, model, 3)
    new = PSGD(twin.parameters(), lra(2), precond_dtype=q, precond_prob=1.0)
    new.load_state_dict(opt.state_dict())
    assert {t.dtype for p in twin.parameters() for t in new.state[p]["q"]["1"].values() if t.ndim} == {q}
    for p, r in zip(model.parameters(), twin.parameters(), strict=True):
        assert same(snapshot_of(opt.state[p]), snapshot_of(new.state[r]))


def snapshot_of(state):
    return [snapshot_of(state[k]) if isinstance(state[k], dict) else state[k] for k in sorted(state)]


@pytest.mark.parametrize("again", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))], ids=["deepcopy", "pickle"])
@pytest.mark.parametrize("group", [lra(2), XMat(), affine], ids=["lra", "xmat", "affine"])
def test_a_copy_goes_on_as_the_original(again, group):
    model = mlp()
    opt = PSGD(model.parameters(), group, precond_prob=1.0, curvature=hessian)
    train(opt, model, 4)
    model2, opt2 = again((model, opt))
    assert train(opt, model, 4) == train(opt2, model2, 4)
    assert same(snapshot(opt), snapshot(opt2))


def test_state_is_kept_per_parameter_in_its_own_shape():
    model = mlp()
    opt = PSGD(model.parameters(), lra(3), precond_prob=1.0)
    train(opt, model, 2)
    for p in model.parameters():
        assert opt.state[p]["q"]["0"]["U"].shape == (*p.shape, 3)
        assert opt.state[p]["q"]["1"]["d"].shape == p.shape == opt.state[p]["momentum"].shape


@pytest.mark.parametrize("flatten", [False, True])
@pytest.mark.parametrize("group", [lra(2), affine], ids=["lra", "affine"])
def test_distributed_checkpoints_read_by_name_and_fill_a_fresh_optimizer(flatten, group):
    options = StateDictOptions(flatten_optimizer_state_dict=flatten)
    model, twin = mlp(), mlp()
    opt = PSGD(model.parameters(), group, precond_prob=1.0, curvature=hessian)
    train(opt, model, 4)
    saved = get_optimizer_state_dict(model, opt, options=options)
    assert any("0.weight" in str(key) for key in (saved if flatten else saved["state"]))
    twin.load_state_dict(model.state_dict())
    new = PSGD(twin.parameters(), group, precond_prob=1.0, curvature=hessian)
    before = [p.detach().clone() for p in twin.parameters()]
    set_optimizer_state_dict(twin, new, saved, options=options)
    assert same(before, [p.detach() for p in twin.parameters()])  # torch makes the state by a step with lr = 0
    assert train(opt, model, 4) == train(new, twin, 4)


def test_a_newer_version_is_refused_and_changes_nothing():
    model = mlp()
    opt = PSGD(model.parameters(), precond_prob=1.0)
    train(opt, model, 2)
    saved, before = opt.state_dict(), snapshot(opt)
    saved["param_groups"][0]["version"] += 1
    with pytest.raises(ValueError, match="reads state version 1, got version 2"):
        opt.load_state_dict(saved)
    assert same(before, snapshot(opt))


def test_a_checkpoint_from_before_an_option_existed_loads_with_its_default():
    model, twin = mlp(), mlp()
    opt = PSGD(model.parameters(), precond_prob=1.0)
    train(opt, model, 3)
    saved = opt.state_dict()
    for key in ("version", "max_rms", "settled"):
        del saved["param_groups"][0][key]
    twin.load_state_dict(model.state_dict())
    new = PSGD(twin.parameters(), precond_prob=1.0)
    new.load_state_dict(saved)
    assert train(opt, model, 3) == train(new, twin, 3)


def test_state_of_another_group_is_refused_by_name(tmp_path: Path):
    model = mlp()
    opt = PSGD(model.parameters(), lra(2), precond_prob=1.0)
    train(opt, model, 2)
    with pytest.raises(ValueError, match="saved for another group"):
        PSGD(mlp().parameters(), XMat()).load_state_dict(opt.state_dict())


def test_loading_before_the_first_step_is_allowed():
    model = mlp()
    opt = PSGD(model.parameters(), precond_prob=1.0)
    opt.load_state_dict(opt.state_dict())  # accelerate does this in prepare()
    assert train(opt, model, 3)[-1] > 0
