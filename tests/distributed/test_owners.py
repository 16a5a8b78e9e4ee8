"""A rule for each tensor under FSDP2: a tensor belongs to one rank, and all together make the steps of one process."""

import functools

import pytest
import torch
from cluster import ranks
from test_shards import batch, network, refused, shard, train, whole
from torch import distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import psgd
from psgd import PSGD, Diagonal, Quadratic, Regular, Triangular, XMat, kron, lra
from psgd.arrangement import assigned, cost
from psgd.points import leaves

EVEN = (6, 8, 8, 8, 3)  # torch's tensor parallelism wants widths that ranks divide
WIDE = (6, 10, 10, 10, 3)  # two layers of one shape: they are moved side by side, where they have one owner


OPTIONS = {"lr": 0.03, "precond_prob": Regular(0.5, warmup=20), "seed": 3}  # slow: or rounding grows by itself


def plain(model, group, **options):
    return PSGD(model.parameters(), group, **OPTIONS | options)


def affine(model, group, **options):
    return PSGD(model.named_parameters(), kron(affine=model), **OPTIONS | options)


def later(model, group, **options):
    """The last layer is added after the first: who owns the others may not change by that."""
    *first, weight, bias = model.parameters()
    opt = PSGD(first, group, **OPTIONS | options)
    opt.add_param_group({"params": [weight, bias]})
    return opt


def mixed(model, group, **options):
    """A joint preconditioner for some, and one for each of the others."""
    first, *rest = model.parameters()
    return PSGD([{"params": [first], "group": lra(2)}, {"params": rest, "group": group}], **OPTIONS | options)


WAYS = {
    "whitening": (plain, kron(), torch.float32, {"curvature": psgd.whiten}),
    "momentum": (plain, kron(Quadratic()), torch.float32, {"curvature": psgd.whiten_momentum}),
    "momentum, exactly": (plain, kron(), torch.float64, {"curvature": psgd.whiten_momentum, "fresh": 0.1}),
    "clipped": (plain, kron(), torch.float32, {"curvature": psgd.whiten, "max_norm": 0.5, "max_value": 0.1}),
    "no momentum": (plain, kron(), torch.float64, {"curvature": psgd.whiten, "momentum": 0.0, "init_scale": 0.5}),
    "triangular": (plain, kron(Triangular()), torch.float32, {"curvature": psgd.whiten}),
    "affine": (affine, kron(), torch.float32, {"curvature": psgd.whiten}),
    "later": (later, kron(), torch.float32, {"curvature": psgd.whiten}),
    "mixed": (mixed, kron(), torch.float32, {"curvature": psgd.whiten}),
    "diagonal": (plain, lambda shape: Diagonal(), torch.float32, {"curvature": psgd.whiten}),
    "differences": (plain, kron(), torch.float64, {"curvature": psgd.finite_difference}),
    "triangular, differences": (plain, kron(Triangular()), torch.float64, {"curvature": psgd.finite_difference}),
}


def alone(make, group, dtype, options, widths=WIDE):
    model = network(dtype, widths)
    opt = make(model, group, **options)
    train(model, opt, *batch(0, 1, dtype))
    return model, opt


def held(opt):
    """Return the bytes of Q here, for each parameter."""
    params = [p for pg in opt.param_groups for p in pg["params"]]
    return [sum(t.numel() * t.element_size() for t in leaves(opt.state[p]["q"])) for p in params]


def together(rank, world, make, group, dtype, options, **sharding):
    model = shard(network(dtype, WIDE), **sharding)
    opt = make(model, group, **options)
    torch.manual_seed(100 + rank)
    train(model, opt, *batch(rank, world, dtype))
    return {"params": whole(model), "held": held(opt), "updates": opt.param_groups[0]["updates"]}


def scenario(rank, world):
    found = {name: together(rank, world, *way) for name, way in WAYS.items()}
    found["count"] = {name: count(rank, world, *WAYS[name]) for name in ("whitening", "momentum")}
    found["spoiled"] = spoiled(rank, world)
    found["by rows and columns"] = tensor_parallel(world, kron())
    found["few"] = few(rank, world)
    found["automatic"] = tensor_parallel(world, kron(), curvature=psgd.automatic)
    found["loaded"] = loaded(rank, world)
    found["on a grid"] = refused(lambda: on_a_grid(world))
    model = shard(network())
    opt = plain(model, kron(), curvature=psgd.whiten)
    said = opt.plan().state
    train(model, opt, *batch(rank, world), steps=1)
    momenta = sum(opt.state[p]["momentum"].to_local().numel() * 4 for p in model.parameters())
    found["plan"] = said, sum(held(opt)) + momenta
    if world == 4:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        found["replicated"] = together(rank, world, *WAYS["whitening"], mesh=mesh)
    return found


def count(rank, world, make, group, dtype, options):
    """Return how many exchanges, and entries that travel from here, a step takes with an update and without."""
    model = shard(network(dtype, WIDE))
    opt = make(model, group, **options | {"precond_prob": Regular(0.5)})
    train(model, opt, *batch(rank, world), steps=22)
    calls, originals = [], {name: getattr(dist, name) for name in ("all_reduce", "all_to_all_single")}

    def counting(name):
        def call(first, *args, **kwargs):
            calls.append((name, (args[0] if name == "all_to_all_single" else first).numel()))
            return originals[name](first, *args, **kwargs)

        return call

    found = {}
    try:
        for name in originals:
            setattr(dist, name, counting(name))
        for _ in range(2):
            due = opt.due
            calls.clear()
            train(model, opt, *batch(rank, world), steps=1)
            found[due] = list(calls)
    finally:
        for name, original in originals.items():
            setattr(dist, name, original)
    return found


def spoiled(rank, world):
    """A gradient that is not finite on one rank."""
    model = shard(network(widths=WIDE))
    opt = plain(model, kron(), curvature=psgd.whiten, precond_prob=1.0)
    x, y = batch(rank, world)
    train(model, opt, x, y, steps=3)
    params = list(model.parameters())

    def now():
        state = [t.clone() for p in params for t in leaves(opt.state[p]["q"])]
        return [*(t.to_local().clone() for p in params for t in (p.detach(), opt.state[p]["momentum"])), *state]

    before = now()
    opt.zero_grad()
    (model(x) - y).square().mean().backward()
    if rank == 1:
        next(p for p in params if p.grad.to_local().numel()).grad.to_local().view(-1)[0] = float("nan")
    opt.step()
    kept = all(torch.equal(a, b) for a, b in zip(before, now(), strict=True))
    skipped = opt.skipped
    train(model, opt, x, y, steps=3)
    return {"kept": kept, "skipped": skipped, "params": whole(model)}


def few(rank, world):
    """Fewer tensors than ranks: some own none."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 3, bias=False))
    model = shard(model) if world > 1 else model
    train(model, plain(model, kron(), curvature=psgd.whiten, max_norm=0.5), *batch(rank, world))
    return whole(model)


def loaded(rank, world):
    """Load what one process has saved in its first updates; return whether copies that nobody moves are left."""
    one = network(widths=WIDE)
    saved = plain(one, kron(), curvature=psgd.whiten, precond_prob=1.0)
    train(one, saved, *batch(0, 1), steps=2)
    model = shard(network(widths=WIDE))
    opt = plain(model, kron(), curvature=psgd.whiten, precond_prob=1.0)
    opt.load_state_dict(saved.state_dict())
    train(model, opt, *batch(rank, world), steps=1)
    params = list(model.parameters())
    return {"level": ["level" in opt.state[p] for p in params], "q": [bool(opt.state[p]["q"]) for p in params]}


def tensor_parallel(world, group, curvature=psgd.whiten):
    """Train with layers that are split by columns and by rows in turn; every rank has the whole batch."""
    model, styles = network(widths=EVEN), (ColwiseParallel(), RowwiseParallel())
    layers = [str(i) for i, m in enumerate(model) if isinstance(m, nn.Linear)]
    parallelize_module(model, init_device_mesh("cpu", (world,)), dict(zip(layers, styles * 2, strict=True)))
    train(model, plain(model, group, curvature=curvature), *batch(0, 1))
    return whole(model)


def on_a_grid(world):
    """A tensor that is split along both axes has no owner."""
    mesh = init_device_mesh("cpu", (2, world // 2))
    p = nn.Parameter(distribute_tensor(torch.ones(4, 4), mesh, [Shard(0), Shard(1)]))
    p.grad = distribute_tensor(torch.ones(4, 4), mesh, [Shard(0), Shard(1)])
    PSGD([p], kron()).step()


@pytest.fixture(scope="module", params=[2, 4])
def found(request, tmp_path_factory):
    return ranks(tmp_path_factory, request.param, scenario, "owners")


@pytest.fixture(scope="module")
def four(tmp_path_factory):
    return ranks(tmp_path_factory, 4, scenario, "owners")


@functools.cache
def expected(name):
    model, opt = alone(*WAYS[name])
    return whole(model), held(opt)


def near(mine, theirs):
    bound = 3e-5 if theirs[0].dtype == torch.float32 else 1e-7  # differences amplify the order of a sum, so do 50 steps
    return all((a - b).abs().max() < bound for a, b in zip(mine, theirs, strict=True))


@pytest.mark.parametrize("name", WAYS)
def test_the_steps_are_those_of_one_process(found, name):
    start = whole(network(WAYS[name][2], WIDE))
    for result in found:
        assert near(result[name]["params"], expected(name)[0]) and result[name]["updates"] > 10
        assert not near(result[name]["params"], start)


@pytest.mark.parametrize("name", WAYS)
def test_ranks_stay_bitwise_equal(found, name):
    for result in found:
        assert all(map(torch.equal, result[name]["params"], found[0][name]["params"]))


@pytest.mark.parametrize("name", [name for name in WAYS if name != "mixed"])
def test_each_point_is_held_by_one_rank_alone(found, name):
    for each, all_of_it in zip(zip(*(r[name]["held"] for r in found), strict=True), expected(name)[1], strict=True):
        assert sum(each) == max(each) == all_of_it


def test_no_rank_holds_it_all(found):
    for result in found:
        assert 0 < sum(result["whitening"]["held"]) < 0.8 * sum(expected("whitening")[1])


def test_a_step_takes_three_exchanges(found):
    """Whether all is finite, the parts to their owners, the directions back; what whitens m sends nothing more."""
    entries = sum(p.numel() for p in network(widths=WIDE).parameters())
    sent = {(way, due): 0 for way in ("whitening", "momentum") for due in (False, True)}
    for result in found:
        for way, counts in result["count"].items():
            for due, calls in counts.items():
                assert sorted(name for name, _ in calls) == ["all_reduce", "all_to_all_single", "all_to_all_single"]
                sent[way, due] += sum(n for name, n in calls if name == "all_to_all_single")
    assert sent == {
        ("whitening", False): 2 * entries,
        ("whitening", True): 3 * entries,
        ("momentum", False): 2 * entries,
        ("momentum", True): 2 * entries,
    }


def test_all_skip_what_is_not_finite_on_one(found):
    for result in (r["spoiled"] for r in found):
        assert result["kept"] and result["skipped"] == 1
        assert all(map(torch.equal, result["params"], found[0]["spoiled"]["params"]))


def test_replicas_of_shards(four):
    for result in four:
        assert near(result["replicated"]["params"], expected("whitening")[0])


def test_tensor_parallel_by_rows_and_columns(found):
    model, _ = alone(*WAYS["whitening"], widths=EVEN)
    for result in found:
        assert near(result["by rows and columns"], whole(model))


def test_a_grid_is_refused(found):
    for result in found:
        assert "one axis" in result["on a grid"]


def test_the_plan_is_of_what_this_rank_holds(found):
    for result in found:
        said, held = result["plan"]
        assert said == held > 0


def test_more_ranks_than_tensors(found):
    for result in found:
        assert near(result["few"], few(0, 1))


def test_finite_differences_of_tensors_that_are_split_in_several_ways(found):
    start = whole(network(widths=EVEN))
    for result in found:
        assert all(t.isfinite().all() for t in result["automatic"]) and not near(result["automatic"], start)
        assert all(map(torch.equal, result["automatic"], found[0]["automatic"]))


def test_only_owners_keep_what_the_scale_is_found_from(found):
    for result in (r["loaded"] for r in found):
        assert result["level"] == result["q"]
    assert all(sum(each) == 1 for each in zip(*(r["loaded"]["q"] for r in found), strict=True))


@pytest.mark.parametrize("world", [2, 4, 8, 64])
def test_costs_are_balanced(world):
    """The tensors of GPT-2 small: each owner has its share, unless one tensor alone is more."""
    layer = [(2304, 768), (768, 768), (3072, 768), (768, 3072), *[(768,)] * 6]
    shapes = [(50257, 768), (1024, 768), *layer * 12]
    costs = [cost(kron()(shape), torch.Size(shape).numel()) for shape in shapes]
    (owners,) = assigned([costs], world)
    loads = [sum(c for c, owner in zip(costs, owners, strict=True) if owner == rank) for rank in range(world)]
    assert max(loads) <= max(1.1 * sum(costs) / world, max(costs))


def test_every_group_has_a_cost():
    assert cost(Diagonal(), 10) < cost(kron()((2, 5)), 10) < cost(psgd.Dense(), 10)
    assert cost(XMat(), 10) == cost(Diagonal(), 10)
