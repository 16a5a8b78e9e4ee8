"""FSDP2: each rank holds a part of everything, and all together make the steps of one process."""

import functools
import itertools
import warnings

import pytest
import torch
from cluster import ranks
from torch import distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import psgd
from psgd import PSGD, Adaptive, Butterfly, Dense, Diagonal, Regular, XMat, lra
from psgd.across import local
from psgd.curvature import cosine
from psgd.distributed import like
from psgd.evaluation import Evaluation
from psgd.points import leaves
from psgd.unit import probe

STEPS, WIDTHS = 50, (6, 10, 5, 3)  # three rows on four ranks: parts differ, and some are empty


def network(dtype=torch.float32, widths=WIDTHS):
    torch.manual_seed(0)
    layers = []
    for a, b in itertools.pairwise(widths):
        layers += [nn.Linear(a, b), nn.Tanh()]
    return nn.Sequential(*layers[:-1]).to(dtype)


def batch(rank, world, dtype=torch.float32):
    rng = torch.Generator().manual_seed(1)
    x, y = torch.randn(16, WIDTHS[0], generator=rng), torch.randn(16, WIDTHS[-1], generator=rng)
    return tuple(t.to(dtype).chunk(world)[rank] for t in (x, y))


def shard(model, **options):
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, **options)
    return fully_shard(model, **options)


def optimizer(model, group, **options):
    options = {"lr": 0.1, "precond_prob": Regular(0.5, warmup=20), "seed": 3} | options
    return PSGD(model.parameters(), group, **options)


def train(model, opt, x, y, steps=STEPS):
    def closure():
        opt.zero_grad()
        loss = (model(x) - y).square().mean()
        loss.backward()
        return loss

    for _ in range(steps):
        opt.step(closure)


def whole(model):
    return [p.full_tensor() if isinstance(p, DTensor) else p.detach() for p in model.parameters()]


WAYS = {
    "diagonal": (Diagonal(), torch.float32, {"curvature": psgd.whiten}),
    "lra": (lra(3), torch.float32, {"curvature": psgd.whiten}),
    "lra, one scale": (lra(3), torch.float32, {"curvature": psgd.whiten, "init_scale": 0.5, "momentum": 0.0}),
    "lra, momentum": (lra(3), torch.float32, {"curvature": psgd.whiten_momentum, "max_norm": 1.0, "fresh": 0.1}),
    "lra, decay": (lra(3), torch.float32, {"curvature": psgd.whiten, "weight_decay": 0.1, "l2": 0.01}),
    "lra, normalized": (lra(2), torch.float32, {"curvature": psgd.whiten, "rule": psgd.Normalized()}),
    "lra, differences of float32": (lra(3), torch.float32, {"curvature": psgd.finite_difference}),
    "diagonal, differences": (Diagonal(), torch.float64, {"curvature": psgd.finite_difference}),
    "lra, differences": (lra(3), torch.float64, {"curvature": psgd.finite_difference}),
    "lra, automatic": (lra(3), torch.float64, {}),
}


def bound(way):
    """Return how far weights may be from those of one process: differences amplify the order of a sum, by 1/ε."""
    _, dtype, options = way
    rough = options.get("curvature") is psgd.finite_difference
    return 1e-7 if dtype == torch.float64 else 5e-4 if rough else 1e-5


def alone(name):
    group, dtype, options = WAYS[name]
    model = network(dtype)
    if name == "lra, automatic":
        options = {"curvature": psgd.finite_difference}
    train(model, optimizer(model, group, **options), *batch(0, 1, dtype))
    return whole(model)


def scenario(rank, world):
    found = {name: together(rank, world, *way) for name, way in WAYS.items()}
    found["xmat"] = together(rank, world, XMat(), torch.float32, {"curvature": psgd.whiten})
    found["refused"] = refused(lambda: together(rank, world, Dense(), torch.float32, {}))
    found["count"] = {
        source: count(rank, world, lra(3), getattr(psgd, source))
        for source in ("whiten", "finite_difference", "automatic")
    }
    found["spoiled"] = spoiled(rank, world)
    found["adaptive"] = refused(lambda: together(rank, world, lra(2), torch.float32, {"precond_prob": Adaptive()}))
    found["diagnostics"] = refused(optimizer(shard(network()), lra(2)).diagnostics)
    found["bytes"] = {name: held(rank, world, group) for name, group in (("diagonal", Diagonal()), ("lra", lra(3)))}
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    found["bfloat16"] = together(rank, world, lra(3), torch.float32, {}, mp_policy=policy)
    found["columns"] = tensor_parallel(world, ColwiseParallel, Diagonal())
    found["rows"] = refused(lambda: tensor_parallel(world, RowwiseParallel, lra(2)))
    found["rows of weights"] = refused(lambda: tensor_parallel(world, RowwiseParallel, Diagonal(), weights=True))
    found["partly whole"] = partly_whole(rank, world)
    found["product"] = product(rank, world, policy)
    found["idle"] = idle(rank, world)
    found["odd"] = odd(rank, world)
    found["few digits"] = {name: few_digits(rank, world, group) for name, group in FEW_DIGITS.items()}
    found["evened"] = evened(rank, world)
    found["changing"] = changing(rank, world)
    found["complex"] = refused(lambda: complex_numbers(rank, world))
    if world == 4:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        found["replicated"] = together(rank, world, *WAYS["lra"], mesh=mesh)
        found["other ranks"] = refused(lambda: other_ranks(mesh))
    return found


def together(rank, world, group, dtype, options, **sharding):
    model = shard(network(dtype), **sharding)
    opt = optimizer(model, group, **options)
    torch.manual_seed(100 + rank)  # ranks may have seeds of their own
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        train(model, opt, *batch(rank, world, dtype))
    held = [t for p in model.parameters() for t in [*leaves(opt.state[p]["q"]), opt.state[p].get("momentum")]]
    big = [t for t in held if isinstance(t, DTensor)]
    return {
        "params": whole(model),
        "said": [str(w.message) for w in said if "PSGD" in str(w.message)],
        "source": str(opt.source),
        "bytes": sum(t.to_local().numel() * t.element_size() for t in big),
        "all bytes": sum(t.numel() * t.element_size() for t in big),
        "placed": all(
            t.placements == p.placements and t.shape[: p.ndim] == p.shape
            for p in model.parameters()
            for t in leaves(opt.state[p]["q"])
            if isinstance(t, DTensor)
        ),
        "updates": opt.param_groups[0]["updates"],
    }


def tensor_parallel(world, style, group, weights=False):
    """Train with all layers split the same way, perhaps the weights alone; every rank has the whole batch."""
    model = network()
    layers = {str(i): style(output_layouts=Replicate()) for i, m in enumerate(model) if isinstance(m, nn.Linear)}
    if style is RowwiseParallel:
        layers = {i: RowwiseParallel(input_layouts=Replicate()) for i in layers}
    parallelize_module(model, init_device_mesh("cpu", (world,)), layers)
    for p in model.parameters():
        p.requires_grad_(p.ndim > 1 or not weights)
    train(model, optimizer(model, group, curvature=psgd.whiten), *batch(0, 1))
    return whole(model)


def by_layer(model):
    """The last layer has a preconditioner of its own."""
    *first, weight, bias = model.parameters()
    options = {"lr": 0.1, "precond_prob": Regular(0.5, warmup=20), "seed": 3, "curvature": psgd.whiten}
    return PSGD([{"params": first, "scope": "first"}, {"params": [weight, bias], "scope": "last"}], lra(2), **options)


def partly_whole(rank, world):
    """Train with a last layer that every rank has whole; a NaN in the part of one rank must not move it either."""
    model = network()
    for layer in model[:-1]:
        if isinstance(layer, nn.Linear):
            fully_shard(layer)
    opt = by_layer(model)
    train(model, opt, *batch(0, 1))
    trained, last = whole(model), model[-1].weight
    before = last.detach().clone()
    (model(batch(0, 1)[0]) - 1).square().mean().backward()
    if rank == 1:
        model[0].weight.grad.to_local().view(-1)[0] = float("nan")
    opt.step()
    return {"params": trained, "kept": torch.equal(last, before), "skipped": opt.skipped}


FEW_DIGITS = {"diagonal": Diagonal(), "xmat": XMat(), "lra": lra(2)}


def product(rank, world, policy):
    """Return Hv by finite differences, of weights that are computed with in bfloat16, and v."""
    model = shard(network(widths=(6, 32, 32, 3)), mp_policy=policy)
    params = list(model.parameters())
    x, y = batch(rank, world)
    v = [probe(p, 0, i) for i, p in enumerate(params)]
    evaluation = Evaluation(lambda: (model(x).float() - y).square().mean(), params, None)
    h = psgd.finite_difference.pair(evaluation, v, {})
    return [like(p, t).full_tensor() for p, t in zip(params, h, strict=True)]


def idle(rank, world):
    """A scope whose gradient is zero, beside one whose is not."""
    model = shard(network())
    opt = by_layer(model)
    opt.param_groups[0]["momentum"] = opt.param_groups[1]["momentum"] = 0.0
    x, y = batch(rank, world)
    last = list(model.parameters())[-2:]
    before = [p.to_local().detach().clone() for p in last]
    for _ in range(15):
        opt.zero_grad()
        (model(x) - y).square().mean().backward()
        for p in last:
            p.grad.to_local().zero_()
        opt.step()
    kept = all(torch.equal(p.to_local(), b) for p, b in zip(last, before, strict=True))
    rests = all((opt.state[p]["q"]["1"]["d"].to_local() == 1).all() for p in last)
    return kept and bool(rests) and not torch.equal(whole(model)[0], whole(network())[0])


def odd(rank, world):
    """An odd number of entries on each rank: one of them has no partner, and moves alone."""
    torch.manual_seed(0)
    model = fully_shard(nn.Linear(3, world, bias=False))
    start = model.weight.to_local().detach().clone()
    opt = PSGD(model.parameters(), Butterfly(), lr=0.1, curvature=psgd.whiten)
    x = torch.randn(8, 3, generator=torch.Generator().manual_seed(0))
    for _ in range(20):
        opt.zero_grad()
        model(x).square().sum().backward()
        opt.step()
    now = model.weight.to_local()
    return bool((now != start).all() and now.isfinite().all() and now.norm() < 0.5 * start.norm())


def evened(rank, world):
    """Return ‖U‖/‖V‖ before the tenth update, having made it 64 times what it was, and after."""
    model = network() if world == 1 else shard(network())
    opt = optimizer(model, lra(3), curvature=psgd.whiten, precond_prob=1.0)
    train(model, opt, *batch(rank, world), steps=9)
    factors = [opt.state[p]["q"]["0"] for p in model.parameters()]

    def ratio():
        full = {k: [q[k].full_tensor() if world > 1 else q[k] for q in factors] for k in ("U", "V")}
        return float(
            torch.cat([t.flatten() for t in full["U"]]).norm() / torch.cat([t.flatten() for t in full["V"]]).norm()
        )

    for q in factors:
        local(q["U"]).mul_(8)
        local(q["V"]).div_(8)
    before = ratio()
    train(model, opt, *batch(rank, world), steps=1)
    return before, ratio()


def few_digits(rank, world, group):
    """Return the step-size memories, and the weights, with Q in bfloat16; some ranks have nothing of a tensor."""
    model = network() if world == 1 else shard(network())
    opt = optimizer(model, group, curvature=psgd.whiten, precond_dtype=torch.bfloat16)
    train(model, opt, *batch(rank, world), steps=30)
    small = [t for p in model.parameters() for t in leaves(opt.state[p]["q"]) if not t.ndim]
    return [float(t) for t in small], whole(model)


def changing(rank, world):
    """Return the source that ranks settle on where a closure has another loss each time; one has no parameters."""
    torch.manual_seed(0)
    model = fully_shard(nn.Linear(4, 1, bias=False))
    opt = PSGD(model.parameters(), lra(2), lr=0.01)
    torch.manual_seed(rank)
    numbers = iter(range(1000))

    def closure():
        opt.zero_grad()
        rng = torch.Generator().manual_seed(next(numbers))
        loss = (model(torch.randn(4, 4, generator=rng)) - torch.randn(4, 1, generator=rng)).square().mean()
        loss.backward()
        return loss

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(3):
            opt.step(closure)
    return str(opt.source)


def complex_numbers(rank, world):
    mesh = init_device_mesh("cpu", (world,))
    p = nn.Parameter(distribute_tensor(torch.ones(4, 2, dtype=torch.complex64), mesh, [Shard(0)]))
    p.grad = distribute_tensor(torch.ones(4, 2, dtype=torch.complex64), mesh, [Shard(0)])
    PSGD([p], Diagonal(), curvature=psgd.whiten).step()


def other_ranks(mesh):
    """Two tensors, one split over the rows of a grid of ranks, one over its columns."""
    params = []
    for placements in ([Shard(0), Replicate()], [Replicate(), Shard(0)]):
        p = nn.Parameter(distribute_tensor(torch.ones(4, 4), mesh, placements))
        p.grad = distribute_tensor(torch.ones(4, 4), mesh, placements)
        params.append({"params": [p], "scope": str(placements)})
    PSGD(params, Diagonal()).step()


def held(rank, world, group):
    """Return the bytes of state on this rank, all of them, and those of one process."""

    def size(opt):
        found = [[*leaves(s["q"]), s["momentum"]] for s in opt.state.values()]
        return sum(t.numel() * t.element_size() for some in found for t in map(local, some))

    model, one = shard(network(widths=(8, 32, 16, 8))), network(widths=(8, 32, 16, 8))
    opts = []
    for m in (model, one):
        opts.append(optimizer(m, group, curvature=psgd.whiten))
        m(torch.ones(2, 8)).sum().backward()
        opts[-1].step()
    return size(opts[0]), size(opts[1])


def refused(f):
    try:
        f()
    except ValueError as e:
        return str(e)
    return ""


def count(rank, world, group, curvature):
    """Return how many sums ranks exchange in each of the steps with an update, and in those without."""
    model = shard(network())
    opt = optimizer(model, group, curvature=curvature, precond_prob=Regular(0.5))
    calls, reduce = [], dist.all_reduce
    dist.all_reduce = lambda *args, **kwargs: (calls.append(1), reduce(*args, **kwargs))[1]
    found = {True: [], False: []}
    try:
        for _ in range(44):  # the first ten pairs give Q its scale, and every tenth evens out U and V
            due = opt.due
            calls.clear()
            train(model, opt, *batch(rank, world), steps=1)
            found[due].append(len(calls))
    finally:
        dist.all_reduce = reduce
    return found


def spoiled(rank, world):
    """A gradient that is not finite on one rank."""
    model = shard(network())
    opt = optimizer(model, lra(3), curvature=psgd.whiten, precond_prob=1.0)
    x, y = batch(rank, world)
    train(model, opt, x, y, steps=3)
    before = [p.to_local().detach().clone() for p in model.parameters()]
    state = [
        t.to_local().clone() for p in model.parameters() for t in leaves(opt.state[p]["q"]) if isinstance(t, DTensor)
    ]
    momenta = [opt.state[p]["momentum"].to_local().clone() for p in model.parameters()]
    opt.zero_grad()
    (model(x) - y).square().mean().backward()
    if rank == 1:
        next(p for p in model.parameters() if p.grad.to_local().numel()).grad.to_local().view(-1)[0] = float("nan")
    opt.step()
    after = [t.to_local() for p in model.parameters() for t in leaves(opt.state[p]["q"]) if isinstance(t, DTensor)]
    kept = [
        *(torch.equal(p.to_local(), b) for p, b in zip(model.parameters(), before, strict=True)),
        *(torch.equal(t, b) for t, b in zip(after, state, strict=True)),
        *(
            torch.equal(opt.state[p]["momentum"].to_local(), m)
            for p, m in zip(model.parameters(), momenta, strict=True)
        ),
    ]
    skipped = opt.skipped
    train(model, opt, x, y, steps=3)
    moved = any(not torch.equal(p.to_local(), b) for p, b in zip(model.parameters(), before, strict=True) if b.numel())
    return {"kept": all(kept), "skipped": skipped, "moved": moved, "params": whole(model)}


@pytest.fixture(scope="module", params=[2, 4])
def found(request, tmp_path_factory):
    return ranks(tmp_path_factory, request.param, scenario, "shards")


@pytest.fixture(scope="module")
def four(tmp_path_factory):
    return ranks(tmp_path_factory, 4, scenario, "shards")


@functools.cache
def expected(name):
    return alone(name)


@pytest.mark.parametrize("name", WAYS)
def test_the_steps_are_those_of_one_process(found, name):
    for result in found:
        for mine, theirs in zip(result[name]["params"], expected(name), strict=True):
            assert (mine - theirs).abs().max() < bound(WAYS[name])


def test_two_dimensional_meshes(four):
    for mine, theirs in zip(four[0]["replicated"]["params"], expected("lra"), strict=True):
        assert (mine - theirs).abs().max() < 1e-5


@pytest.mark.parametrize("name", [*WAYS, "xmat", "bfloat16"])
def test_all_ranks_agree_and_learn(found, name):
    start = whole(network())
    for result in found:
        for mine, theirs, old in zip(result[name]["params"], found[0][name]["params"], start, strict=True):
            assert torch.equal(mine, theirs) and mine.isfinite().all() and not torch.equal(mine, old.to(mine.dtype))
    assert found[0][name]["updates"] > 10


@pytest.mark.parametrize("name", WAYS)
def test_state_is_placed_as_the_parameters(found, name):
    assert all(result[name]["placed"] for result in found)
    assert sum(result[name]["bytes"] for result in found) == found[0][name]["all bytes"] > 0


@pytest.mark.parametrize("name", ["diagonal", "lra"])
def test_state_shrinks_as_ranks_are_added(found, name):
    for result in found:
        mine, total = result["bytes"][name]
        assert 0.9 * total / len(found) < mine < 1.1 * total / len(found)


def test_automatic_finds_out_and_says_so_once(found):
    for result in found:
        (said,) = result["lra, automatic"]["said"]
        assert "finite differences" in said and "FSDP2" in said
        assert result["lra, automatic"]["source"] == "FiniteDifference()"
        assert not result["lra"]["said"]


def test_few_sums_are_exchanged(found):
    for result in found:
        for source, counts in result["count"].items():
            with_an_update = counts[True]
            if source == "automatic":  # asks once whether the closure can be repeated
                first, *with_an_update = with_an_update
                assert first <= 8
            assert set(counts[False]) == {3} and len(with_an_update) > 20
            assert set(with_an_update) == ({6} if source == "whiten" else {7})


def test_all_skip_what_is_not_finite_on_one(found):
    for result in (r["spoiled"] for r in found):
        assert result["kept"] and result["skipped"] == 1 and result["moved"]
        assert all(torch.equal(a, b) for a, b in zip(result["params"], found[0]["spoiled"]["params"], strict=True))


def test_what_is_whole_moves_with_what_is_sharded(found):
    model = network()
    train(model, by_layer(model), *batch(0, 1))
    for result in (r["partly whole"] for r in found):
        for mine, theirs in zip(result["params"], whole(model), strict=True):
            assert (mine - theirs).abs().max() < 1e-5
        assert result["kept"] and result["skipped"] == 1


def test_differences_know_in_how_many_digits_is_computed(found):
    """The steps of bfloat16 are long: a difference for float32 would lie between two of them."""
    model = network(widths=(6, 32, 32, 3))
    params, (x, y) = list(model.parameters()), batch(0, 1)
    _, exact = psgd.hvp((model(x) - y).square().mean(), params, [probe(p, 0, i) for i, p in enumerate(params)])
    for result in found:
        assert cosine(result["product"], exact) > 0.97


def test_a_scope_without_gradients_rests(found):
    assert all(result["idle"] for result in found)


def test_an_entry_without_a_partner_moves_alone(found):
    assert all(result["odd"] for result in found)


@pytest.mark.parametrize("name", FEW_DIGITS)
def test_a_preconditioner_of_few_digits(found, name):
    for result in found:
        memories, params = result["few digits"][name]
        assert memories == found[0]["few digits"][name][0]
        if name != "xmat":  # whose pairs are others
            for mine, theirs in zip(params, few_digits(0, 1, FEW_DIGITS[name])[1], strict=True):
                assert (mine - theirs).abs().max() < 0.05


def test_every_tenth_update_evens_out_the_factors(found):
    for before, after in (evened(0, 1), *(result["evened"] for result in found)):
        assert before > 30 and after == pytest.approx(1, abs=1e-4)


def test_all_ranks_find_that_a_closure_cannot_be_repeated(found):
    assert {result["changing"] for result in found} == {"Whiten()"}


def test_complex_shards_are_refused(found):
    assert all("real" in result["complex"] for result in found)


def test_sharded_over_other_ranks_is_refused(four):
    assert all("same ranks" in result["other ranks"] for result in four)


def test_tensor_parallel_by_columns(found):
    for result in found:
        for mine, theirs in zip(result["columns"], expected("diagonal"), strict=True):
            assert (mine - theirs).abs().max() < 1e-5


def test_tensor_parallel_by_rows_is_refused_clearly(found):
    for result in found:
        assert "LowRank(rank=2) @ Diagonal()" in result["rows"] and "rule from shape to group" in result["rows"]
        assert "first dimension" in result["rows of weights"] and "kron()" in result["rows of weights"]


def test_what_no_rank_could_answer_alone_is_refused(found):
    for result in found:
        assert "Adaptive" in result["adaptive"] and "diagnostics" in result["diagnostics"]


def test_other_groups_are_refused_by_name(found):
    for result in found:
        assert "Dense()" in result["refused"] and "lra" in result["refused"]
