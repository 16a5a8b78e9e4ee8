"""What it costs: memory that does not grow, state that is what the plan says, and no noise."""

import ast
import gc
import resource
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from toys import batches, mlp, regression, train

import psgd
from psgd import (
    PSGD,
    Dense,
    Diagonal,
    Regular,
    Scalar,
    XMat,
    affine,
    automatic,
    finite_difference,
    hessian,
    lra,
    plan,
    richest,
    whiten,
)


def held(opt):
    """Return the bytes of state, by each tensor's own size."""
    return sum(t.numel() * t.element_size() for t in tree_leaves(dict(opt.state)) if isinstance(t, Tensor))


# --- memory


def alive():
    """Return the number of tensors, of all Python objects, and the kilobytes of the process."""
    gc.collect()
    objects = gc.get_objects()
    tensors = sum(issubclass(type(o), Tensor) for o in objects)
    return tensors, len(objects), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


@pytest.mark.parametrize(
    ("curvature", "backward", "steps"),
    [(hessian, False, 500), (hessian, True, 100), (finite_difference, True, 100), (automatic, False, 100)],
    ids=str,
)
def test_five_hundred_curvature_steps_leak_nothing(curvature, backward, steps):
    model = mlp(width=1000)  # so that a graph that stays is seen in the memory of the process
    opt = PSGD(model.parameters(), lra(2), curvature=curvature, precond_prob=1.0)
    x, y = next(batches())

    def closure():
        loss = regression(model, x, y)()
        if backward:
            opt.zero_grad()
            loss.backward()
        return loss

    def run(steps):
        for _ in range(steps):
            opt.step(closure)
        return alive()

    run(10)
    before = run(10)
    after = run(steps)
    assert after[0] <= before[0]
    assert after[1] - before[1] < 50
    assert after[2] - before[2] < 8_000


def test_parameters_die_with_their_optimizer_after_exact_products():
    """A backward pass with create_graph=True would keep every parameter alive."""
    import weakref

    model = mlp()
    opt = PSGD(model.parameters(), lra(2), curvature=hessian, precond_prob=1.0)
    train(opt, model, 3)
    kept = [weakref.ref(p) for p in model.parameters()]
    del model, opt
    gc.collect()
    assert not any(ref() is not None for ref in kept)


def test_with_the_curvature_context_nothing_leaks_either():
    model = mlp()
    opt = PSGD(model.parameters(), lra(2), precond_prob=1.0)
    x, y = next(batches())

    def run(steps):
        for _ in range(steps):
            with opt.curvature():
                regression(model, x, y)().backward()
            opt.step()
            opt.zero_grad()
        return alive()[:2]

    (tensors, objects), (then, more) = run(20), run(100)
    assert then <= tensors and more - objects < 50


# --- the plan


GROUPS = {
    "lra": lra(10),
    "xmat": XMat(),
    "diagonal": Diagonal(),
    "scalar": Scalar(),
    "dense": Dense(),
    "affine": affine,
}
small_change = 200  # bytes: counters, one number each


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("group", GROUPS)
def test_the_plan_says_how_much_state_there_will_be(group, dtype, momentum):
    model = mlp(dtype)
    opt = PSGD(model.parameters(), GROUPS[group], momentum=momentum, curvature=whiten)
    expected = opt.plan().state
    train(opt, model, 1)
    assert 0 <= held(opt) - expected < small_change


@pytest.mark.parametrize("asked", [torch.bfloat16, torch.float64], ids=str)
def test_the_plan_knows_the_dtype_of_q(asked):
    model = mlp()
    opt = PSGD(model.parameters(), lra(3), precond_dtype=asked)
    expected = opt.plan().state
    train(opt, model, 1)
    assert 0 <= held(opt) - expected < small_change


def test_the_plan_knows_scopes_frozen_and_complex_parameters():
    params = [
        {"params": [torch.ones(3, 4, requires_grad=True)], "group": affine},
        {"params": [torch.ones(5), torch.ones(0, requires_grad=True)]},
        {"params": [torch.ones(6, dtype=torch.complex64, requires_grad=True), torch.ones((), requires_grad=True)]},
    ]
    opt = PSGD(params, lra(2))
    expected = opt.plan()
    assert [row.entries for row in expected.rows] == [12, 13]
    opt.step(lambda: sum(p.abs().square().sum() for pg in opt.param_groups for p in pg["params"]))
    assert 0 <= held(opt) - expected.state < small_change


def test_the_plan_compares_with_adam():
    model = mlp()
    adam = torch.optim.Adam(model.parameters())
    regression(model, *next(batches()))().backward()
    adam.step()
    moments = sum(s[k].numel() * 4 for s in adam.state.values() for k in ("exp_avg", "exp_avg_sq"))
    assert plan(model).adam == moments


def test_the_default_state_is_at_most_eleven_times_adams():
    """lra(10): U and V of ten columns, d, and the averaged gradient: 22 numbers a parameter against two."""
    model = nn.Sequential(nn.Linear(100, 100), nn.Linear(100, 100))
    costs = PSGD(model.parameters()).plan()
    assert costs.state <= 11 * costs.adam + small_change


def test_operations_grow_with_the_rank():
    model = nn.Linear(100, 100)
    found = [plan(model, lra(r)).operations for r in (1, 2, 5, 10, 20, 50)]
    assert found == sorted(found) and found[-1] > 5 * found[0]


@pytest.mark.parametrize("rank", [5, 20])
def test_operations_of_lra_are_what_counting_by_hand_says(rank):
    """P g = Qᵀ(Q g): four products with n×r matrices, two operations each, and a few passes over n."""
    n = 101 * 100
    row = plan(nn.Linear(100, 100), lra(rank)).rows[0]
    assert 8 * n * rank <= row.precondition <= 8 * n * rank + 10 * n
    assert 4 * n * rank**2 < row.fit < 4 * n * rank**2 + 80 * n * rank  # VᵀU and VᵀV, and vectors through U and V


def test_operations_of_dense_are_quadratic_and_a_solve():
    row = plan([torch.ones(50, requires_grad=True)], Dense()).rows[0]
    assert 4 * 50**2 <= row.precondition <= 6 * 50**2
    assert row.fit > 2 / 3 * 50**3


def test_hessian_products_a_step_are_the_schedules():
    model = mlp()
    assert PSGD(model.parameters(), precond_prob=0.25).plan().hvps == pytest.approx(0.25)
    assert PSGD(model.parameters(), precond_prob=Regular(0.1, warmup=100)).plan().hvps == pytest.approx(0.109)
    assert PSGD(model.parameters(), precond_prob=0.0).plan().hvps == 0


def test_a_plan_is_a_table():
    text = str(plan(mlp(), affine))
    assert len(text.splitlines()) == 6
    assert "0.weight" in text and "Adam" in text and "Hessian products per step" in text


def test_a_plan_makes_no_state_and_takes_models_too_large_to_hold():
    with torch.device("meta"):
        model = nn.Linear(100_000, 100_000)
    assert plan(model).state > 2e11
    opt = PSGD(mlp().parameters())
    opt.plan()
    assert not opt.state


def test_a_plan_of_nothing_is_refused():
    with pytest.raises(ValueError, match="parameters"):
        plan([])


# --- a budget


@pytest.mark.parametrize("budget", [1_000, 5_000, 20_000, 100_000, 1e9])
def test_a_budget_is_kept_and_used(budget):
    model = mlp(width=20)
    opt = PSGD(model.parameters(), memory_budget=budget)
    train(opt, model, 1)
    assert held(opt) <= budget + small_change


def test_more_memory_buys_a_richer_group():
    params = list(nn.Linear(100, 100).parameters())
    n = 101 * 100 * 4
    found = [richest(params, (k + 0.1) * n) for k in (1, 2, 3, 22)]
    assert found == [Scalar(), Diagonal(), XMat(), lra(10)]


def test_a_budget_takes_param_groups_of_generators_and_names():
    model = mlp()
    for params in (
        [{"params": model[0].parameters()}, {"params": model[2].parameters(), "lr": 0.1}],
        [{"params": model.named_parameters()}],
        model.named_parameters(),
        model.parameters(),
        [{"params": model[0].weight}, {"params": [p for m in (model[0].bias, *model[2].parameters()) for p in [m]]}],
    ):
        opt = PSGD(params, memory_budget=1e6)
        assert sum(p.numel() for pg in opt.param_groups for p in pg["params"]) == 43


def test_a_budget_that_is_too_small_says_how_much_is_needed():
    model = mlp()
    least = plan(model, Scalar()).state
    with pytest.raises(ValueError, match=f"at least {least} bytes"):
        PSGD(model.parameters(), memory_budget=least - 1)
    PSGD(model.parameters(), memory_budget=least)


# --- no noise


def test_training_is_silent(capsys, recwarn):
    model = mlp()
    train(PSGD(model.parameters()), model, 5)
    train(PSGD(model.parameters()), model, 5, closure=False)
    out, err = capsys.readouterr()
    assert out == err == "" and not list(recwarn)


def test_no_module_of_the_optimizer_prints():
    for name in ("optimizer", "scope", "curvature", "evaluation", "probes", "schedule", "plan", "update", "options"):
        tree = ast.parse((Path(psgd.__file__).parent / f"{name}.py").read_text())
        calls = [n.func.id for n in ast.walk(tree) if isinstance(n, ast.Call) and isinstance(n.func, ast.Name)]
        assert "print" not in calls


def test_no_module_of_the_optimizer_has_mutable_globals():
    import importlib

    for name in ("optimizer", "scope", "curvature", "evaluation", "probes", "schedule", "plan", "update", "options"):
        module = importlib.import_module(f"psgd.{name}")
        for key, value in vars(module).items():
            if not key.startswith("__"):
                assert not isinstance(value, (dict, list, set)), f"{name}.{key}"
