"""Every hyperparameter against its formula; every torch scheduler; every refusal."""

import inspect
import itertools
import math

import pytest
import torch
from torch import nn
from torch.optim import SGD, lr_scheduler, swa_utils
from toys import EVERY_STEP, batches, mlp, preconditioner, quadratic, regression, same, spectrum, train

import psgd
from psgd import (
    PSGD,
    Bernoulli,
    Dense,
    Diagonal,
    LowRank,
    Normalized,
    Regular,
    Smoothed,
    XMat,
    affine,
    automatic,
    band,
    finite_difference,
    hessian,
    lra,
    whiten,
)

PLAIN = {"momentum": 0.0, "precond_prob": 0.0}


def pushed(g, *, start=(1.0, -2.0), steps=1, **options):
    """Return where `steps` steps with a constant gradient lead."""
    p = torch.tensor(start, dtype=torch.float64, requires_grad=True)
    opt = PSGD([p], Diagonal(), **{**PLAIN, "lr": 0.1, **options})
    for _ in range(steps):
        p.grad = torch.tensor(g, dtype=torch.float64)
        opt.step()
    return p.detach()


def near(a, b, **tolerance):
    torch.testing.assert_close(torch.as_tensor(a).double(), torch.as_tensor(b).double(), **tolerance)


# --- learning rate


@pytest.mark.parametrize(
    "lr", [torch.tensor(0.1), torch.tensor([0.1]), torch.tensor(0.1, dtype=torch.float64)], ids=str
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_a_tensor_lr_equals_a_number(lr, dtype):
    one, two = mlp(dtype), mlp(dtype)
    train(PSGD(one.parameters(), lra(2), lr=0.1, weight_decay=0.1), one, 6)
    train(PSGD(two.parameters(), lra(2), lr=lr, weight_decay=0.1), two, 6)
    for a, b in zip(one.parameters(), two.parameters(), strict=True):
        assert a.dtype == b.dtype
        torch.testing.assert_close(a, b, rtol=2e-2 if dtype == torch.bfloat16 else 1e-5, atol=1e-6)


def test_a_tensor_lr_may_be_changed_in_place():
    lr = torch.tensor(0.0)
    p = torch.ones(2, requires_grad=True)
    opt = PSGD([p], Diagonal(), lr=lr, **PLAIN)
    p.sum().backward()
    opt.step()
    assert (p == 1).all()
    lr.fill_(0.5)
    opt.step()
    assert (p == 0.5).all()


SCHEDULERS = {
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, lambda t: 0.9**t),
    "MultiplicativeLR": lambda o: lr_scheduler.MultiplicativeLR(o, lambda t: 0.9),
    "StepLR": lambda o: lr_scheduler.StepLR(o, 3),
    "MultiStepLR": lambda o: lr_scheduler.MultiStepLR(o, [2, 5]),
    "ConstantLR": lambda o: lr_scheduler.ConstantLR(o, 0.5, 4),
    "LinearLR": lambda o: lr_scheduler.LinearLR(o),
    "ExponentialLR": lambda o: lr_scheduler.ExponentialLR(o, 0.9),
    "PolynomialLR": lambda o: lr_scheduler.PolynomialLR(o, 10),
    "CosineAnnealingLR": lambda o: lr_scheduler.CosineAnnealingLR(o, 10),
    "CosineAnnealingWarmRestarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 3),
    "SequentialLR": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.ConstantLR(o, 0.1, 2), lr_scheduler.ExponentialLR(o, 0.9)], [3]
    ),
    "ChainedScheduler": lambda o: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(o, 0.1, 2), lr_scheduler.ExponentialLR(o, 0.9)]
    ),
    "CyclicLR": lambda o: lr_scheduler.CyclicLR(o, 0.01, 0.1, step_size_up=3),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, 0.1, total_steps=12),
    "ReduceLROnPlateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=0),
    "SWALR": lambda o: swa_utils.SWALR(o, 0.001, anneal_epochs=5),
}


def test_no_scheduler_of_torch_is_forgotten():
    assert {*lr_scheduler.__all__} - {"LRScheduler"} <= SCHEDULERS.keys()


@pytest.mark.parametrize("kind", [float, torch.tensor], ids=["number", "tensor"])
@pytest.mark.parametrize("name", SCHEDULERS)
def test_every_scheduler_drives_the_steps(name, kind):
    """A constant unit gradient without preconditioner: each step is the learning rate that the scheduler set."""
    p = torch.zeros(3, dtype=torch.float64, requires_grad=True)
    opt = PSGD([p], Diagonal(), lr=kind(0.05), precond_prob=0.0, momentum=0.9)
    scheduler = SCHEDULERS[name](opt)
    rates = set()
    for _ in range(10):
        rate, before = float(opt.param_groups[0]["lr"]), p.detach().clone()
        rates.add(rate)
        p.grad = torch.ones_like(p)
        opt.step()
        near(before - p.detach(), [rate] * 3, rtol=1e-5, atol=1e-8)
        scheduler.step(*([1.0] if name == "ReduceLROnPlateau" else []))
    assert len(rates) > 1


@pytest.mark.parametrize("name", ["CyclicLR", "OneCycleLR"])
def test_cycled_momentum_is_the_one_that_averages(name):
    p = torch.zeros((), dtype=torch.float64, requires_grad=True)
    opt = PSGD([p], Diagonal(), lr=0.05, precond_prob=0.0, momentum=0.9)
    scheduler = SCHEDULERS[name](opt)
    m, betas = 0.0, set()
    for t in range(10):
        beta, g = opt.param_groups[0]["momentum"], float(t % 3)
        betas.add(beta)
        m += max(1 / (t + 1), 1 - beta) * (g - m)
        p.grad = torch.full_like(p, g)
        opt.step()
        near(opt.state[p]["momentum"], m)
        scheduler.step()
    assert len(betas) > 3


def test_a_scheduler_resumes_with_the_optimizer():
    def run(stop):
        model = mlp()
        opt = PSGD(model.parameters(), lra(2))
        scheduler = lr_scheduler.OneCycleLR(opt, 0.1, total_steps=12)
        stream = itertools.islice(batches(), 12)
        for t, (x, y) in enumerate(stream):
            if t == stop:
                packed = opt.state_dict(), scheduler.state_dict()
                opt = PSGD(model.parameters(), lra(2))
                scheduler = lr_scheduler.OneCycleLR(opt, 0.1, total_steps=12)
                opt.load_state_dict(packed[0])
                scheduler.load_state_dict(packed[1])
            opt.step(regression(model, x, y))
            scheduler.step()
        return list(model.parameters())

    assert same(run(6), run(-1))


# --- SGD


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("options", [{}, {"weight_decay": 0.1}, {"maximize": True}], ids=str)
@pytest.mark.parametrize("schedule", [0, 0.0, Regular(0.0, warmup=5), Bernoulli(0.0)], ids=str)
def test_probability_zero_is_sgd_bitwise(schedule, options, dtype):
    one, two = mlp(dtype), mlp(dtype)
    mine = {"l2" if k == "weight_decay" else k: v for k, v in options.items()}
    psgd = PSGD(one.parameters(), lr=0.1, momentum=0.0, precond_prob=schedule, **mine)
    train(psgd, one, 5)
    train(SGD(two.parameters(), lr=0.1, **options), two, 5, closure=False)
    assert all(map(torch.equal, one.parameters(), two.parameters()))
    assert psgd.source is None


def test_probability_zero_is_sgd_bitwise_for_mixed_dtypes():
    def run(make):
        params = [torch.linspace(-1, 1, 7, dtype=d).requires_grad_() for d in (torch.float32, torch.float64)]
        opt = make(params)
        for _ in range(5):
            opt.zero_grad()
            sum(p.pow(4).sum().double() for p in params).backward()
            opt.step()
        return params

    psgd, sgd = run(lambda p: PSGD(p, lr=0.1, **PLAIN)), run(lambda p: SGD(p, lr=0.1))
    assert all(map(torch.equal, psgd, sgd))


def test_momentum_without_preconditioner_is_sgds_with_dampening_after_the_warmup():
    """m ← βm + (1−β)g: SGD's with dampening β, but for the first mean."""
    a = pushed([1.0, 2.0], steps=30, momentum=0.9)
    near(a, torch.tensor([1.0, -2.0]) - 30 * 0.1 * torch.tensor([1.0, 2.0]))


# --- momentum


def test_the_first_steps_are_full_steps():
    for steps in (1, 2, 5):
        near(pushed([1.0, 2.0], steps=steps, momentum=0.99), pushed([1.0, 2.0], steps=steps))


def test_momentum_is_a_mean_first_and_an_exponential_average_then():
    p = torch.zeros((), dtype=torch.float64, requires_grad=True)
    opt = PSGD([p], Diagonal(), momentum=0.8, precond_prob=0.0)
    gradients, m = [3.0, -1.0, 4.0, 1.0, -5.0, 9.0, 2.0, -6.0], 0.0
    for t, g in enumerate(gradients):
        p.grad = torch.full_like(p, g)
        opt.step()
        m = sum(gradients[: t + 1]) / (t + 1) if t < 5 else 0.8 * m + 0.2 * g
        near(opt.state[p]["momentum"], m)


def test_momentum_that_is_turned_on_late_starts_at_the_gradient():
    p = torch.zeros((), dtype=torch.float64, requires_grad=True)
    opt = PSGD([p], Diagonal(), lr=1.0, **PLAIN)
    for t in range(20):
        opt.param_groups[0]["momentum"] = 0.0 if t < 10 else 0.9
        p.grad = torch.ones_like(p)
        opt.step()
    near(p.detach(), -20.0)


@pytest.mark.parametrize("curvature", [psgd.whiten, psgd.whiten_momentum], ids=str)
def test_fresh_weighs_the_newest_gradient_beside_the_average(curvature):
    """P is applied to m + fresh·(g − m), and fitted to that or to g; m is as without it."""
    p, shadow = torch.zeros(3, requires_grad=True), torch.zeros(3)
    options = {"lr": 0.1, "max_rms": None, "precond_prob": 1.0, "init_scale": 1.0}
    opt = PSGD([p], Diagonal(), momentum=0.8, fresh=0.3, curvature=curvature, **options)
    alone = PSGD([shadow], Diagonal(), momentum=0.0, curvature=psgd.whiten, **options)
    rng, m = torch.Generator().manual_seed(0), torch.zeros(3)
    for t in range(12):
        g = torch.randn(3, generator=rng)
        m = torch.lerp(m, g, max(0.2, 1 / (1 + t)))
        ahead = torch.lerp(m, g, 0.3)
        p.grad = g.clone()
        opt.step()
        near(opt.state[p]["momentum"], m)
        near(p.grad, g)
        if curvature == psgd.whiten_momentum:  # then all is as if these were the gradients
            shadow.grad = ahead
            alone.step()
            near(p.detach(), shadow)
        else:
            shadow.grad = g
            alone.step()
            q = alone.state[shadow]["q"]["d"]
            near(opt.state[p]["q"]["d"], q)


def test_nesterovs_momentum():
    """Without preconditioner, SGD's with dampening, once the warm-up is over: θ ← θ − lr((1−β)g + βm)."""
    p = torch.zeros(1, requires_grad=True)
    opt = PSGD([p], Diagonal(), lr=1.0, momentum=0.5, fresh=0.5, precond_prob=0.0)
    p.grad, (old, m) = torch.ones(1), (p.detach().clone(), torch.zeros(1))
    for t in range(8):
        p.grad = torch.tensor([float(t % 3)])
        m = torch.lerp(m, p.grad, max(0.5, 1 / (1 + t)))
        old = old - (0.5 * p.grad + 0.5 * m)
        opt.step()
        near(p.detach(), old)


def test_without_momentum_no_state_is_spent_on_it():
    model = mlp()
    opt = PSGD(model.parameters(), Diagonal(), momentum=0.0)
    train(opt, model, 2)
    assert not any("momentum" in s for s in opt.state.values())


# --- weight decay


def test_decoupled_decay():
    near(pushed([1.0, 2.0], weight_decay=0.5), torch.tensor([1.0, -2.0]) * 0.95 - 0.1 * torch.tensor([1.0, 2.0]))


def test_coupled_decay():
    near(pushed([1.0, 2.0], l2=0.5), torch.tensor([1.0, -2.0]) - 0.1 * torch.tensor([1.5, 1.0]))


def test_decoupled_decay_is_outside_the_preconditioner_and_the_clipping():
    p = torch.full((3,), 4.0, requires_grad=True)
    opt = PSGD([p], Diagonal(), lr=0.1, weight_decay=0.5, max_norm=1e-9, precond_prob=1.0)
    opt.step(lambda: p.square().sum())
    near(p.detach(), torch.full((3,), 4.0 * 0.95))


def test_coupled_decay_adds_to_the_curvature():
    p = torch.ones(4, dtype=torch.float64, requires_grad=True)
    h = spectrum(1.0, 2.0, 3.0, 4.0)
    opt = PSGD([p], Dense(), lr=0.0, l2=5.0, curvature=hessian, precond_lr=0.5, **EVERY_STEP)
    for _ in range(300):
        opt.step(quadratic(h, p))
    near(preconditioner(opt, p) @ (h + 5 * torch.eye(4)), torch.eye(4), rtol=0, atol=0.02)


@pytest.mark.parametrize("decay", ["weight_decay", "l2"])
def test_decay_does_not_move_what_has_no_gradient(decay):
    a, b = torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True)
    opt = PSGD([a, b], lra(2), **{decay: 0.1})
    opt.step(lambda: a.sum())
    assert (b == 1).all()


# --- clipping


def test_max_norm_bounds_the_whole_step():
    a, b = torch.ones(3, requires_grad=True), torch.ones(2, requires_grad=True)
    opt = PSGD([a, b], affine, lr=1.0, max_norm=0.01, max_rms=None, momentum=0.0, precond_prob=1.0)
    opt.step(lambda: a.square().sum() + b.square().sum())
    moved = torch.cat((1 - a.detach(), 1 - b.detach()))
    near(moved.norm(), 0.01, rtol=1e-4, atol=0)
    assert (moved > 0).all()


def test_max_rms_bounds_each_preconditioners_step():
    a, b = torch.ones(3, requires_grad=True), torch.ones(2, requires_grad=True)
    opt = PSGD([a, b], affine, lr=1.0, max_rms=0.01, momentum=0.0, precond_prob=1.0, init_scale=10.0)
    opt.step(lambda: a.square().sum() + 100 * b.square().sum())
    for p in (a, b):
        near((1 - p.detach()).square().mean().sqrt(), 0.01, rtol=1e-4, atol=0)


def test_max_value_bounds_each_entry():
    near(pushed([5.0, -0.3], max_value=0.5), torch.tensor([1.0 - 0.05, -2.0 + 0.03]))


def test_bounds_that_are_not_met_change_nothing():
    options = {"steps": 5, "precond_prob": 1.0, "curvature": whiten, "init_scale": 0.1}
    free = pushed([0.1, 0.2], max_rms=None, **options)
    assert torch.equal(free, pushed([0.1, 0.2], max_rms=9.0, max_norm=9.0, max_value=9.0, **options))


def test_no_bound_makes_a_step_from_a_zero_gradient():
    stayed = pushed([0.0, 0.0], max_rms=1.0, max_norm=1.0, max_value=1.0, precond_prob=1.0)
    assert torch.equal(stayed, pushed([0.0, 0.0], steps=0))


# --- initial scale


def scale(opt, *params):
    return preconditioner(opt, *params).diagonal().mean().item()


def test_init_scale_is_the_scale_of_q():
    p = torch.ones(3, requires_grad=True)
    opt = PSGD([p], Diagonal(), init_scale=3.0, precond_prob=1.0, lr=0.0)
    p.grad = torch.zeros(3)
    opt.step()
    assert scale(opt, p) == pytest.approx(9.0)


@pytest.mark.parametrize("size", [1e-6, 1.0, 1e6])
@pytest.mark.parametrize(
    "group", [lra(2), XMat(), Dense(), Diagonal(), affine], ids=["lra", "xmat", "dense", "diagonal", "affine"]
)
def test_the_initial_scale_follows_the_curvature(group, size):
    p = torch.ones(6, dtype=torch.float64, requires_grad=True)
    opt = PSGD([p], group, lr=0.0, precond_prob=1.0)
    for _ in range(10):
        opt.step(quadratic(size * spectrum(1.0, 2.0, 3.0, 4.0, 5.0, 6.0), p))
    assert 0.05 < scale(opt, p) * size < 1.5


@pytest.mark.parametrize("curvature", [hessian, finite_difference, whiten], ids=str)
def test_a_zero_first_pair_does_not_set_the_scale(curvature):
    p = torch.zeros(3, dtype=torch.float64, requires_grad=True)
    opt = PSGD([p], Diagonal(), lr=0.0, precond_prob=1.0, curvature=curvature)
    for t in range(30):
        opt.step(lambda t=t: (p.square().sum() + p.sum()) if t > 14 else p.sum() * 0)
        assert 0.01 < scale(opt, p) < 2


@pytest.mark.parametrize("curvature", [hessian, whiten], ids=str)
@pytest.mark.parametrize("unlucky", [0, 1, 4, 9])
def test_a_single_tiny_pair_among_the_first_does_not_set_the_scale(unlucky, curvature):
    p = torch.ones(3, dtype=torch.float64, requires_grad=True)
    opt = PSGD([p], Diagonal(), lr=0.01, precond_prob=1.0, curvature=curvature)
    for t in range(12):
        opt.step(lambda t=t: p.square().sum() * (1e-12 if t == unlucky else 1.0))
        assert scale(opt, p) < 5 or t == unlucky == 0
    assert (p - 1).abs().max() < 0.2


@pytest.mark.parametrize("group", [lra(2), affine], ids=["lra", "affine"])
def test_zero_gradients_for_long_do_not_make_q_grow(group):
    p = torch.ones(3, requires_grad=True)
    opt = PSGD([p], group, precond_prob=1.0)
    for _ in range(200):
        p.grad = torch.zeros(3)
        opt.step()
    p.grad = torch.ones(3)
    opt.step()
    assert (p - 1).abs().max() < 0.1


def test_a_group_without_scale_starts_where_it_must():
    p = torch.ones(4, requires_grad=True)
    opt = PSGD([p], LowRank(2), precond_prob=1.0)
    for _ in range(3):
        opt.step(lambda: p.square().sum())
    assert (p < 1).all()


# --- schedules


def test_the_default_schedule_warms_up_and_then_takes_every_tenth_step():
    opt = PSGD([torch.ones(1, requires_grad=True)])
    schedule = opt.param_groups[0]["precond_prob"]
    due = [t for t in range(300) if schedule.due(t, 0)]
    assert due == [*range(100), *range(100, 300, 10)]


@pytest.mark.parametrize("prob", [0.01, 0.1, 0.3, 0.5, 0.99, 1.0])
def test_a_regular_schedule_is_evenly_spaced(prob):
    due = [t for t in range(3000) if Regular(prob).due(t, 0)]
    assert due[0] == 0
    assert len(due) == pytest.approx(3000 * prob, abs=1.5)
    gaps = {b - a for a, b in itertools.pairwise(due)}
    assert gaps <= {math.floor(1 / prob), math.ceil(1 / prob)}


def test_bernoulli_takes_its_share_and_depends_on_the_seed_alone():
    chosen = [[Bernoulli(0.3).due(t, seed) for t in range(2000)] for seed in (0, 0, 1)]
    assert chosen[0] == chosen[1] != chosen[2]
    assert sum(chosen[0]) == pytest.approx(600, abs=70)


def test_bernoulli_follows_a_function_of_the_step():
    due = [Bernoulli(lambda t: 1.0 if t < 5 else 0.0).due(t, 0) for t in range(10)]
    assert due == [True] * 5 + [False] * 5


@pytest.mark.parametrize("schedule", [0.5, Bernoulli(0.5), Regular(0.1, warmup=3)], ids=str)
def test_q_changes_on_due_steps_alone(schedule):
    model = mlp()
    opt = PSGD(model.parameters(), Diagonal(), precond_prob=schedule)
    for _, (x, y) in zip(range(20), batches(), strict=False):
        due = opt.due
        before = [s["q"]["d"].clone() for s in opt.state.values()]
        opt.step(regression(model, x, y))
        after = [s["q"]["d"] for s in opt.state.values()]
        if before:
            assert same(before, after) is not due


def test_precond_lr_bounds_the_relative_change_of_q():
    p = torch.ones(4, dtype=torch.float64, requires_grad=True)
    opt = PSGD([p], Dense(), precond_lr=0.03, rule=Normalized(), lr=0.0, init_scale=1.0, precond_prob=1.0)
    for _ in range(5):
        before = opt.state[p]["q"]["Q"].clone() if p in opt.state else torch.eye(4).double()
        opt.step(quadratic(spectrum(1.0, 2.0, 3.0, 4.0), p))
        change = (opt.state[p]["q"]["Q"] - before) @ before.inverse()
        assert torch.linalg.matrix_norm(change, "fro") == pytest.approx(0.03, rel=1e-6)


# --- defaults


@pytest.mark.parametrize("closure", [True, False], ids=["closures", "plain steps"])
def test_the_defaults_train(closure):
    model = mlp()
    losses = train(PSGD(model.parameters()), model, 400, closure)
    assert sum(losses[-20:]) < 0.6 * sum(losses[:20])


def test_the_defaults_do_not_diverge_on_rosenbrock():
    x = torch.tensor([-1.0, 1.0], requires_grad=True)
    opt = PSGD([x])
    losses = [opt.step(lambda: (1 - x[0]) ** 2 + 100 * (x[1] - x[0] ** 2) ** 2).item() for _ in range(200)]
    assert losses[-1] < losses[0] == max(losses)


# --- refusals


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lr": -0.1}, "lr >= 0"),
        ({"lr": math.nan}, "lr >= 0"),
        ({"lr": torch.tensor(-1.0)}, "lr >= 0"),
        ({"lr": torch.ones(2)}, "Tensor lr must be 1-element"),
        ({"momentum": -0.1}, "0 <= momentum < 1"),
        ({"momentum": 1.0}, "0 <= momentum < 1"),
        ({"fresh": -0.1}, "0 <= fresh <= 1"),
        ({"fresh": 1.1}, "0 <= fresh <= 1"),
        ({"weight_decay": -1.0}, "weight_decay >= 0"),
        ({"l2": -1.0}, "l2 >= 0"),
        ({"precond_lr": 0.0}, "0 < precond_lr < 1"),
        ({"precond_lr": 1.0}, "0 < precond_lr < 1"),
        ({"precond_prob": 1.5}, "0 <= prob <= 1"),
        ({"precond_prob": -0.5}, "0 <= prob <= 1"),
        ({"max_rms": 0.0}, "max_rms > 0"),
        ({"max_norm": -1.0}, "max_norm > 0"),
        ({"max_value": 0.0}, "max_value > 0"),
        ({"init_scale": 0.0}, "init_scale > 0"),
        ({"curvature": "hessian"}, "curvature needs to be one of"),
        ({"rule": "smoothed"}, "rule needs to be a StepSize"),
        ({"precond_dtype": torch.int32}, "floating-point"),
        ({"group": "lra"}, "group needs to be"),
        ({"group": lra(2), "memory_budget": 1e9}, "a group or a memory_budget"),
        ({"memory_budget": 3.0}, "memory_budget needs at least"),
    ],
    ids=str,
)
def test_what_cannot_work_is_refused_at_construction(options, message):
    with pytest.raises(ValueError, match=message):
        PSGD([torch.ones(3, requires_grad=True)], **options)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Regular(2.0), "0 <= prob <= 1"),
        (lambda: Bernoulli(-1.0), "0 <= prob <= 1"),
        (lambda: Smoothed(beta=1.0), "beta"),
    ],
)
def test_objects_refuse_what_cannot_work(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_a_group_that_does_not_fit_says_what_would():
    p = torch.ones(3, requires_grad=True)
    with pytest.raises(ValueError, match="Padded"):
        PSGD([p], band(2)).step(lambda: p.square().sum())


def test_every_option_is_in_the_defaults():
    opt = PSGD([torch.ones(1, requires_grad=True)])
    signature = set(inspect.signature(PSGD.__init__).parameters) - {"self", "params", "model", "memory_budget"}
    assert signature <= opt.defaults.keys()
    assert opt.defaults["curvature"] == automatic


def test_an_optimizer_prints():
    assert "LowRank(rank=10)" in repr(PSGD(nn.Linear(2, 2).parameters()))


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("group", [psgd.Diagonal(), psgd.XMat(), psgd.lra(2)], ids=str)
def test_a_parameter_alone_keeps_its_gradient_and_its_average(group, momentum):
    weight, g = torch.nn.Parameter(torch.arange(1.0, 7.0)), torch.tensor([1.0, -2.0, 3.0, -4.0, 5.0, -6.0])
    opt = psgd.PSGD([weight], group, lr=0.01, momentum=momentum, curvature=psgd.whiten, precond_prob=1.0)
    for _ in range(3):
        weight.grad = g.clone()
        opt.step()
    assert torch.equal(weight.grad, g)
    if momentum:
        torch.testing.assert_close(opt.state[weight]["momentum"], g)
