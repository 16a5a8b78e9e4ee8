"""What the state holds, and that it survives every way of saving, loading and copying."""

import copy
import io
import pickle
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from toys import batches, mlp, regression, same, snapshot, train

from psgd import (
    PSGD,
    Bernoulli,
    Dense,
    Diagonal,
    Kronecker,
    Padded,
    Regular,
    Scalar,
    Triangular,
    XMat,
    affine,
    band,
    finite_difference,
    hessian,
    lra,
    lra_duv,
    whiten,
)

GROUPS = {"lra": lra(3), "xmat": XMat(), "dense": Dense(), "scalar": Scalar(), "affine": affine}
GROUPS["padded band"] = Padded(band(2), 2)  # with a constant inside, whose point is empty
make = partial(PSGD, lr=0.1, precond_prob=1.0)


def trained(group=None, steps=12, dtype=torch.float32, **options):
    model = mlp(dtype)
    opt = make(model.parameters(), group, **options)
    train(opt, model, steps)
    return model, opt


def continued(model, opt, steps=5):
    """Train a little more and return everything that there is."""
    train(opt, model, steps)
    return snapshot(opt)


def twin(model, opt, **options):
    """Return a copy of the model and a fresh optimizer for it, of the same group."""
    model = copy.deepcopy(model)
    return model, make(model.parameters(), opt.defaults["group"], **options)


# --- what it holds


def leaves(value, path=()):
    if isinstance(value, dict):
        for key, item in value.items():
            yield from leaves(item, (*path, key))
    elif isinstance(value, (list, tuple)):
        for i, item in enumerate(value):
            yield from leaves(item, (*path, i))
    else:
        yield path, value


@pytest.mark.parametrize("group", GROUPS)
def test_a_state_dict_holds_tensors_numbers_and_none(group):
    _, opt = trained(GROUPS[group], precond_prob=Bernoulli(lambda t: 1.0), curvature=hessian)
    packed = opt.state_dict()
    assert set(packed) == {"state", "param_groups"}
    for path, value in leaves(packed):
        assert isinstance(value, (Tensor, int, float, type(None))), path
    for state in packed["state"].values():
        assert all(isinstance(key, str) for path, _ in leaves(state) for key in path)


@pytest.mark.parametrize("group", GROUPS)
def test_a_state_dict_loads_with_weights_only(group):
    model, opt = trained(GROUPS[group])
    buffer = io.BytesIO()
    torch.save(opt.state_dict(), buffer)
    buffer.seek(0)
    again, fresh = twin(model, opt)
    fresh.load_state_dict(torch.load(buffer, weights_only=True))
    assert same(continued(model, opt), continued(again, fresh))


def test_state_has_the_shape_of_its_parameter():
    params = [torch.ones(2, 3), torch.ones(()), torch.ones(4), torch.ones(2, dtype=torch.complex64)]
    for p in params:
        p.requires_grad_()
    joint = make(params, lra(5), curvature=hessian)
    joint.step(lambda: sum(p.abs().square().sum() for p in params))
    for p, shape in zip(params, [(2, 3), (), (4,), (2, 2)], strict=True):
        state = joint.state[p]
        assert state["momentum"].shape == state["q"]["1"]["d"].shape == shape
        assert state["q"]["0"]["U"].shape == state["q"]["0"]["V"].shape == (*shape, 5)


def test_xmat_and_dense_hold_rows_of_each_parameter():
    params = [torch.ones(2, 3, requires_grad=True), torch.ones(4, requires_grad=True)]
    for group, key, tail in ((XMat(), "a", ()), (XMat(), "b", ()), (Dense(), "Q", (10,))):
        opt = make(params, group)
        opt.step(lambda: sum(p.square().sum() for p in params))
        assert [opt.state[p]["q"][key].shape for p in params] == [(2, 3, *tail), (4, *tail)]


def test_state_exists_for_all_parameters_after_the_first_step():
    used, unused = torch.ones(3, requires_grad=True), torch.ones(2, requires_grad=True)
    opt = make([used, unused], lra(2))
    used.sum().backward()
    opt.step()
    assert opt.state[unused].keys() <= opt.state[used].keys()
    assert {"q", "momentum", "step"} <= opt.state[unused].keys()


def test_the_state_of_each_parameter_is_a_view_of_the_point_in_use():
    model, opt = trained(lra(2))
    before = opt.state[model[2].bias]["q"]["1"]["d"]
    kept = before.clone()
    train(opt, model, 3)
    assert opt.state[model[2].bias]["q"]["1"]["d"] is before
    assert not torch.equal(before, kept)


# --- versions


def test_a_state_dict_carries_a_version():
    _, opt = trained(Diagonal())
    assert opt.state_dict()["param_groups"][0]["version"] == 1


def test_a_newer_version_is_refused_and_nothing_changes():
    _, opt = trained(Diagonal())
    packed = copy.deepcopy(opt.state_dict())
    packed["param_groups"][0]["version"] = 2
    packed["state"][0]["momentum"].fill_(7.0)
    before = snapshot(opt)
    with pytest.raises(ValueError, match="reads state version 1, got version 2"):
        opt.load_state_dict(packed)
    assert same(snapshot(opt), before)


def test_options_that_an_older_checkpoint_lacks_take_their_defaults():
    model, opt = trained(Diagonal())
    packed = opt.state_dict()
    for pg in packed["param_groups"]:
        for key in ("max_value", "l2", "settled", "version", "updates"):
            del pg[key]
    again, fresh = twin(model, opt)
    fresh.load_state_dict(packed)
    assert fresh.param_groups[0]["l2"] == 0.0
    train(fresh, again, 2)


def test_state_that_an_older_checkpoint_lacks_is_made_anew():
    model, opt = trained(Diagonal())
    packed = opt.state_dict()
    packed["state"] = {
        i: {k: v for k, v in s.items() if k not in ("level", "pairs", "skipped", "momentum", "step")}
        for i, s in packed["state"].items()
    }
    again, fresh = twin(model, opt)
    fresh.load_state_dict(packed)
    train(fresh, again, 2)
    assert fresh.skipped == 0


def test_unknown_keys_of_a_param_group_survive():
    model, opt = trained(Diagonal())
    opt.param_groups[0]["swa_lr"] = 0.5
    _, fresh = twin(model, opt)
    fresh.load_state_dict(opt.state_dict())
    assert fresh.param_groups[0]["swa_lr"] == 0.5


def test_step_may_be_a_number_in_a_checkpoint():
    model, opt = trained(Diagonal())
    packed = opt.state_dict()
    packed["state"] = {i: s | {"step": float(s["step"])} for i, s in packed["state"].items()}
    again, fresh = twin(model, opt)
    fresh.load_state_dict(packed)
    assert same(continued(model, opt), continued(again, fresh))


# --- another group


@pytest.mark.parametrize(
    ("saved", "loaded"),
    [
        (lra(3), Diagonal()),
        (Diagonal(), lra(3)),
        (lra(3), lra(2)),
        (lra(3), lra_duv(3)),
        (XMat(), Diagonal()),
        (Scalar(), Diagonal()),
        (Dense(), Diagonal()),
        (affine, lra(3)),
        (lra(3), affine),
        (Diagonal(), Scalar()),
    ],
    ids=lambda group: getattr(group, "__name__", str(group)),
)
def test_a_checkpoint_of_another_group_is_refused(saved, loaded):
    model, opt = trained(saved)
    fresh = make(model.parameters(), loaded)
    with pytest.raises(ValueError, match="saved for another group"):
        fresh.load_state_dict(opt.state_dict())


def test_a_checkpoint_of_another_group_of_the_same_shapes_is_refused():
    model, opt = trained(Dense())
    with pytest.raises(ValueError, match="saved for another group"):
        make(model.parameters(), Triangular()).load_state_dict(opt.state_dict())


def test_a_checkpoint_of_another_model_is_refused():
    _, opt = trained(lra(3))
    fresh = make(mlp(width=6).parameters(), lra(3))
    with pytest.raises(ValueError, match="saved for another group"):
        fresh.load_state_dict(opt.state_dict())


# --- dtypes


@pytest.mark.parametrize("group", [lra(3), XMat(), affine], ids=["lra", "xmat", "affine"])
@pytest.mark.parametrize(
    ("dtype", "asked", "q"),
    [
        (torch.bfloat16, None, torch.float32),
        (torch.bfloat16, torch.bfloat16, torch.bfloat16),
        (torch.float32, torch.bfloat16, torch.bfloat16),
        (torch.float32, None, torch.float32),
        (torch.float32, torch.float64, torch.float64),
        (torch.float16, None, torch.float32),
        (torch.float64, None, torch.float64),
    ],
    ids=str,
)
def test_every_dtype_is_kept_by_a_load(dtype, asked, q, group):
    model, opt = trained(group, steps=3, dtype=dtype, precond_dtype=asked, curvature=whiten)
    _, fresh = twin(model, opt, precond_dtype=asked, curvature=whiten)
    fresh.load_state_dict(opt.state_dict())
    mine, loaded = (list(leaves(o.state_dict()["state"])) for o in (opt, fresh))
    for (path, a), (_, b) in zip(mine, loaded, strict=True):
        assert type(a) is type(b) and (not isinstance(a, Tensor) or a.dtype == b.dtype), path
    matrices = [t for path, t in loaded if "q" in path and t.ndim and "ell" not in path[-1]]
    assert matrices and all(t.dtype == q for t in matrices)


def test_the_averaged_gradient_keeps_the_precision_of_the_parameter():
    model, opt = trained(lra(2), precond_dtype=torch.bfloat16)
    assert all(opt.state[p]["momentum"].dtype == torch.float32 for p in model.parameters())


def test_a_loaded_q_takes_the_dtype_that_the_new_optimizer_asks_for():
    model, opt = trained(lra(2), precond_dtype=torch.bfloat16)
    again, fresh = twin(model, opt)
    fresh.load_state_dict(opt.state_dict())
    train(fresh, again, 2)
    assert fresh.state[again[0].weight]["q"]["1"]["d"].dtype == torch.float32


# --- options


def test_the_constructors_objects_win_and_the_checkpoints_numbers_do():
    model, opt = trained(Diagonal(), lr=0.1, curvature=hessian)
    fresh = make(model.parameters(), Diagonal(), lr=0.3, curvature=finite_difference)
    fresh.load_state_dict(opt.state_dict())
    assert fresh.param_groups[0]["lr"] == 0.1
    assert fresh.param_groups[0]["curvature"] == finite_difference


@pytest.mark.parametrize("saved", [0.3, Bernoulli(0.3), Regular(0.7)], ids=str)
@pytest.mark.parametrize("chosen", [0.6, Bernoulli(0.5), Regular(0.2)], ids=str)
def test_a_schedule_is_the_constructors_and_a_number_the_checkpoints(saved, chosen):
    model = mlp()
    opt, fresh = (make(model.parameters(), Diagonal(), precond_prob=prob) for prob in (saved, chosen))
    train(opt, model, 2)
    fresh.load_state_dict(opt.state_dict())
    assert fresh.param_groups[0]["precond_prob"] == (0.3 if saved == 0.3 and chosen == 0.6 else chosen)


def test_scopes_by_name_survive_a_load():
    def two(model):
        return [{"params": m.parameters(), "scope": name} for name, m in (("a", model[0]), ("b", model[2]))]

    model = mlp()
    opt = make(two(model), lra(2))
    train(opt, model, 3)
    again = copy.deepcopy(model)
    fresh = make(two(again), lra(2))
    fresh.load_state_dict(opt.state_dict())
    assert [pg["scope"] for pg in fresh.param_groups] == ["a", "b"]
    assert same(continued(model, opt), continued(again, fresh))


def test_a_users_own_entry_of_a_param_group_survives():
    p = torch.ones(3, requires_grad=True)
    opt, fresh = (make([{"params": [p], "name": "decay", "betas": (0.9, 0.99)}], Diagonal()) for _ in range(2))
    fresh.load_state_dict(opt.state_dict())
    assert fresh.param_groups[0]["name"] == "decay" and fresh.param_groups[0]["betas"] == (0.9, 0.99)


def test_a_tensor_lr_survives_a_load():
    model, opt = trained(Diagonal(), lr=torch.tensor(0.1))
    _, fresh = twin(model, opt, lr=torch.tensor(0.5))
    fresh.load_state_dict(opt.state_dict())
    assert fresh.param_groups[0]["lr"] == torch.tensor(0.1)


def test_what_automatic_settled_on_survives_a_load():
    model, opt = trained(Diagonal())
    again, fresh = twin(model, opt)
    fresh.load_state_dict(opt.state_dict())
    calls = []
    x, y = next(batches())
    fresh.step(lambda: calls.append(1) or regression(again, x, y)())
    assert len(calls) == 1


def test_names_of_parameters_are_saved():
    model = mlp()
    opt = make(model.named_parameters(), Diagonal())
    train(opt, model, 2)
    names = [name for name, _ in model.named_parameters()]
    assert opt.state_dict()["param_groups"][0]["param_names"] == names
    fresh = make(model.named_parameters(), Diagonal())
    fresh.load_state_dict(opt.state_dict())
    assert fresh.param_groups[0]["param_names"] == names


def test_a_fresh_optimizer_reloads_itself():
    model = mlp()
    opt = make(model.parameters())
    opt.load_state_dict(opt.state_dict())
    reference = mlp()
    other = make(reference.parameters())
    assert same(continued(model, opt), continued(reference, other))


def test_an_optimizer_and_its_reloaded_twin_may_be_interleaved():
    model, opt = trained(lra(2))
    again, fresh = twin(model, opt)
    fresh.load_state_dict(copy.deepcopy(opt.state_dict()))
    for _, (x, y) in zip(range(5), batches(), strict=False):
        opt.step(regression(model, x, y))
        fresh.step(regression(again, x, y))
    assert same(snapshot(opt), snapshot(fresh))


def test_a_loaded_state_is_a_copy():
    model, opt = trained(lra(2))
    packed = opt.state_dict()
    again, fresh = twin(model, opt)
    fresh.load_state_dict(packed)
    before = snapshot(opt)
    train(fresh, again, 3)
    assert same(snapshot(opt), before)


# --- hooks


def test_a_pre_hook_may_change_what_is_loaded():
    model, opt = trained(Diagonal())
    _, fresh = twin(model, opt)

    def scale(_, packed):
        packed = copy.deepcopy(packed)
        packed["state"][0]["momentum"].fill_(7.0)
        return packed

    fresh.register_load_state_dict_pre_hook(scale)
    fresh.load_state_dict(opt.state_dict())
    assert (fresh.state[fresh.param_groups[0]["params"][0]]["momentum"] == 7).all()


def test_a_post_hook_sees_the_final_dtypes():
    model, opt = trained(Diagonal(), steps=2, dtype=torch.bfloat16, curvature=whiten)
    _, fresh = twin(model, opt)
    seen = []
    first = fresh.param_groups[0]["params"][0]
    fresh.register_load_state_dict_post_hook(lambda o: seen.append(o.state[first]["q"]["d"].dtype))
    fresh.load_state_dict(opt.state_dict())
    assert seen == [torch.float32]


# --- copies


@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize(
    "copied", [copy.deepcopy, lambda both: pickle.loads(pickle.dumps(both))], ids=["deepcopy", "pickle"]
)
def test_a_copy_continues_bitwise_and_leaves_the_original_alone(copied, group):
    model, opt = trained(GROUPS[group])
    again, other = copied((model, opt))
    before = snapshot(opt)
    theirs = continued(again, other)
    assert same(snapshot(opt), before)
    assert same(continued(model, opt), theirs)


def test_clearing_the_state_starts_anew():
    model, opt = trained(lra(2))
    weights = copy.deepcopy(model.state_dict())
    opt.state.clear()
    again = mlp()
    again.load_state_dict(weights)
    fresh = make(again.parameters(), lra(2))
    for pg, new in zip(opt.param_groups, fresh.param_groups, strict=True):
        new.update(iteration=pg["iteration"], updates=pg["updates"])
    assert same(continued(model, opt), continued(again, fresh))


def test_parameters_may_be_swapped_in_place():
    """As accelerate does: the list of a param_group gets other tensors."""
    model, opt = trained(lra(2))
    other = copy.deepcopy(model)
    opt.param_groups[0]["params"][:] = list(other.parameters())
    before = copy.deepcopy(model.state_dict())
    train(opt, other, 2)
    assert same(list(model.state_dict().values()), list(before.values()))
    assert not torch.equal(other[0].weight, model[0].weight)


# --- distributed checkpoints


@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("flat", [False, True], ids=["nested", "flattened"])
def test_a_distributed_checkpoint_goes_round(flat, group):
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    model, opt = trained(GROUPS[group])
    packed = copy.deepcopy(get_optimizer_state_dict(model, opt, options=options))
    again, fresh = twin(model, opt)
    set_optimizer_state_dict(again, fresh, packed, options=options)
    assert same(continued(model, opt), continued(again, fresh))


@pytest.mark.parametrize("flat", [False, True], ids=["nested", "flattened"])
def test_a_distributed_checkpoint_of_a_model_with_an_unused_parameter(flat):
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    model = mlp()
    model.register_parameter("unused", nn.Parameter(torch.ones(2)))
    opt = make(model.parameters(), lra(2))
    train(opt, model, 3)
    packed = copy.deepcopy(get_optimizer_state_dict(model, opt, options=options))
    again, fresh = twin(model, opt)
    set_optimizer_state_dict(again, fresh, packed, options=options)
    assert same(continued(model, opt), continued(again, fresh))


def test_a_distributed_checkpoint_of_a_fresh_optimizer_moves_nothing():
    model = mlp()
    before = copy.deepcopy(model.state_dict())
    for curvature in (hessian, whiten):
        opt = make(model.parameters(), lra(2), weight_decay=0.1, l2=0.0, curvature=curvature)
        get_optimizer_state_dict(model, opt)
        assert same(list(model.state_dict().values()), list(before.values()))
        assert opt.skipped == 0


@pytest.mark.parametrize("group", GROUPS)
def test_a_step_with_zero_gradients_and_zero_lr_moves_nothing_but_makes_the_state(group):
    model = mlp()
    opt = make(model.parameters(), GROUPS[group], lr=0.0, weight_decay=0.1)
    before = copy.deepcopy(model.state_dict())
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    opt.step(closure=None)
    assert same(list(model.state_dict().values()), list(before.values()))
    for scope in opt._scopes():
        assert all(t.isfinite().all() for _, t in leaves(scope.point))
        if scope.group != lra(3):  # which starts near I, not at I
            start = scope.group.init(scope.n, dtype=scope.dtype)
            assert same([t for _, t in leaves(scope.point)], [t for _, t in leaves(start)])


def test_a_kronecker_group_over_two_parameters_is_kept_by_the_first():
    model = nn.Linear(3, 2, bias=False)
    other = nn.Parameter(torch.ones(3))
    opt = make([model.weight, other], Kronecker((3, 3), (Triangular(), Triangular())))
    opt.step(lambda: model.weight.square().sum() + other.square().sum())
    assert set(opt.state[model.weight]["q"]["0"]) == {"Q", "ell"}
    assert opt.state[other]["q"] == {"0": {}, "1": {}}
