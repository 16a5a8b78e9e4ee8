"""Steps of all parameters at once are those of one parameter after the other, and give way where these differ."""

import copy
import math

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from toys import batches, mlp, regression, snapshot, train

import psgd
from psgd import PSGD, Adaptive, Bernoulli, Diagonal, Regular, XMat, finite_difference, hessian, lra, whiten
from psgd import whiten_momentum as momenta
from psgd.lockstep import Lockstep

GROUPS = {"diagonal": Diagonal(), "xmat": XMat(), "lra": lra(2), "kron": psgd.kron(), "affine": psgd.affine}
GROUPS["kron of Q"] = psgd.kron(psgd.Quadratic())


def never(monkeypatch):
    """Let every step go parameter by parameter."""
    monkeypatch.setattr(Lockstep, "of", classmethod(lambda *_: None))


def in_step(opt):
    """Whether the last step left parameters that move together."""
    return opt._runtime.get("lockstep") is not None


def close(a, b):
    for x, y in zip(a, b, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-12, atol=1e-12)


def both(monkeypatch, run):
    """Return what a run leaves, with and without steps of all at once."""
    opt = run()
    assert in_step(opt)
    together = snapshot(opt)
    never(monkeypatch)
    opt = run()
    assert not in_step(opt)
    return together, snapshot(opt)


@pytest.mark.parametrize("group", GROUPS.values(), ids=GROUPS)
@pytest.mark.parametrize("curvature", [whiten, momenta, hessian, finite_difference], ids=lambda c: type(c).__name__)
@pytest.mark.parametrize("momentum", [0.9, 0.0])
def test_it_makes_the_same_steps(monkeypatch, group, curvature, momentum):
    def run():
        model = mlp(torch.float64)
        opt = PSGD(model.parameters(), group, lr=0.01, momentum=momentum, curvature=curvature, precond_prob=0.5)
        train(opt, model, 30)
        return opt

    close(*both(monkeypatch, run))


@pytest.mark.parametrize(
    "options",
    [
        {"weight_decay": 0.1},
        {"max_norm": 0.01},
        {"max_value": 0.001},
        {"max_rms": 0.01},
        {"max_rms": None},
        {"precond_prob": 0.0},
        {"precond_prob": Adaptive(warmup=3)},
        {"precond_prob": Bernoulli(0.5)},
        {"init_scale": 0.5},
        {"lr": torch.tensor(0.01)},
        {"rule": psgd.Normalized()},
        {"fresh": 0.1},
        {"fresh": 0.1, "curvature": whiten},
        {"fresh": 0.1, "momentum": 0.0},
    ],
    ids=str,
)
def test_whatever_the_options(monkeypatch, options):
    def run():
        model = mlp(torch.float64)
        opt = PSGD(model.parameters(), psgd.kron(), **{"lr": 0.01, "precond_prob": 1.0, "curvature": momenta} | options)
        train(opt, model, 20, closure=False)
        return opt

    close(*both(monkeypatch, run))


def test_param_groups_with_options_of_their_own(monkeypatch):
    def run():
        model = mlp(torch.float64)
        weights, biases = ([p for p in model.parameters() if p.ndim == n] for n in (2, 1))
        groups = [{"params": biases, "lr": 0.1}, {"params": weights, "weight_decay": 0.1}]
        opt = PSGD(groups, lra(2), lr=0.01, precond_prob=0.5, curvature=whiten)
        train(opt, model, 20, closure=False)
        return opt

    close(*both(monkeypatch, run))


def test_what_is_out_of_the_ordinary_goes_one_by_one_and_comes_back(monkeypatch):
    """A gradient that is missing, a momentum that changes, a penalty that comes and goes."""
    held = []

    def run():
        model = mlp(torch.float64)
        opt = PSGD(model.parameters(), lra(2), lr=0.01, precond_prob=0.5, curvature=whiten)
        first = opt.param_groups[0]["params"][0]
        for i, (x, y) in zip(range(24), batches(torch.float64), strict=False):
            opt.zero_grad()
            regression(model, x, y)().backward()
            first.grad = None if i in (5, 6, 7) else first.grad
            opt.param_groups[0]["l2"] = 0.1 * (15 <= i < 17)  # when the warm-up is over for all
            opt.param_groups[0]["momentum"] = 0.5 if i >= 18 else 0.9
            opt.param_groups[0]["fresh"] = 0.5 if i >= 20 else 0.0
            opt.step()
            held.append((in_step(opt), int(opt.state[first]["step"])))
        return opt

    together, apart = both(monkeypatch, run)
    close(together, apart)
    assert held[7] == (True, 5) and held[17][0] and held[23] == (True, 21)


def test_counters_that_differ_keep_their_own_warm_up(monkeypatch):
    def run():
        model = mlp(torch.float64)
        opt = PSGD(model.parameters(), Diagonal(), lr=0.01, momentum=0.9, curvature=whiten, precond_prob=0.5)
        last = opt.param_groups[0]["params"][-1]
        for i, (x, y) in zip(range(12), batches(torch.float64), strict=False):
            opt.zero_grad()
            regression(model, x, y)().backward()
            last.grad = last.grad if i % 2 else None
            opt.step()
        return opt

    close(*both(monkeypatch, run))


@pytest.mark.parametrize("poison", [math.nan, math.inf])
def test_a_gradient_that_is_not_finite_changes_nothing(poison):
    model = mlp()
    opt = PSGD(model.parameters(), lra(2), curvature=whiten)
    train(opt, model, 5, closure=False)
    assert in_step(opt)
    before = snapshot(opt)
    opt.param_groups[0]["params"][1].grad.view(-1)[0] = poison
    opt.step()
    assert opt.skipped == 1
    after = snapshot(opt)
    changed = [
        i for i, (x, y) in enumerate(zip(before, after, strict=True)) if not torch.equal(*map(torch.as_tensor, (x, y)))
    ]
    assert len(changed) == 1  # the count of what was skipped


def test_a_loss_that_is_not_finite_changes_nothing():
    model = mlp()
    opt = PSGD(model.parameters(), lra(2), curvature=whiten)
    train(opt, model, 5)
    before = [p.detach().clone() for p in model.parameters()]
    x, y = next(batches())
    opt.step(lambda: regression(model, x, y)() + math.inf)
    assert opt.skipped == 1 and all(map(torch.equal, before, model.parameters()))


def test_numbers_whose_sum_overflows_are_finite():
    p = nn.Parameter(torch.zeros(4))
    opt = PSGD([p], Diagonal(), lr=0.1, curvature=whiten)
    for size in (1.0, 1.0, 3e38):
        p.grad = torch.full((4,), size)
        opt.step()
    assert opt.skipped == 0 and bool(p.isfinite().all())


def test_the_gradient_and_the_average_of_the_state_stay_as_they_are():
    model = mlp()
    opt = PSGD(model.parameters(), XMat(), curvature=whiten, precond_prob=1.0)
    train(opt, model, 4, closure=False)
    grads = [p.grad.clone() for p in model.parameters()]
    opt.step()
    assert all(torch.equal(p.grad, g) for p, g in zip(model.parameters(), grads, strict=True))
    for p in model.parameters():
        mean = opt.state[p]["momentum"].clone()
        opt.state[p]["momentum"].zero_()  # what the state holds is what the next step takes
        assert mean.any()
    for pg in opt.param_groups:
        pg["lr"] = 1.0
    before = [p.detach().clone() for p in model.parameters()]
    for p in model.parameters():
        p.grad.zero_()
    opt.step()
    assert all(map(torch.equal, before, model.parameters()))


def test_state_that_was_put_in_is_taken():
    model, other = mlp(), mlp()
    opt = PSGD(model.parameters(), lra(2), curvature=whiten)
    train(opt, model, 5, closure=False)
    saved = copy.deepcopy(opt.state_dict())
    twin = PSGD(other.parameters(), lra(2), curvature=whiten)
    train(twin, other, 9, closure=False)
    twin.load_state_dict(saved)
    other.load_state_dict(model.state_dict())
    train(opt, model, 5, closure=False)
    train(twin, other, 5, closure=False)
    assert in_step(twin)
    assert all(map(torch.equal, model.parameters(), other.parameters()))
    p = next(iter(model.parameters()))
    opt.state[p]["momentum"] = torch.full_like(p, 100.0)  # not a view of what moves together
    before = p.detach().clone()
    train(opt, model, 1, closure=False)
    assert 80 < opt.state[p]["momentum"].mean() < 95 and not p.equal(before)


def test_parameters_added_later_move_too():
    model, more = mlp(), mlp(width=3)
    opt = PSGD(model.parameters(), Diagonal(), curvature=whiten)
    train(opt, model, 5, closure=False)
    opt.add_param_group({"params": list(more.parameters())})
    before = [p.detach().clone() for p in more.parameters()]
    x, y = next(batches())
    for _ in range(4):
        opt.zero_grad()
        (regression(model, x, y)() + regression(more, x, y)()).backward()
        opt.step()
    assert in_step(opt) and not any(map(torch.equal, before, more.parameters()))


def test_autocast_has_no_part_in_it():
    runs = []
    for enabled in (False, True):
        model = mlp(width=40)
        opt = PSGD(model.parameters(), psgd.kron(), lr=0.01, curvature=momenta, precond_prob=1.0)
        rng = torch.Generator().manual_seed(0)
        for _ in range(6):
            for p in model.parameters():
                p.grad = torch.randn(p.shape, generator=rng)
            with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
                opt.step()
        assert in_step(opt)
        runs.append(snapshot(opt))
    assert all(torch.equal(*map(torch.as_tensor, pair)) for pair in zip(*runs, strict=True))


class Calls(TorchDispatchMode):
    """Counts operations, but for views."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += not func.is_view
        return func(*args, **(kwargs or {}))


def test_a_step_takes_as_many_operations_for_many_tensors_as_for_few():
    counts = []
    for tensors in (3, 60):
        params = [nn.Parameter(torch.randn(7)) for _ in range(tensors)]
        opt = PSGD(params, Diagonal(), curvature=whiten, precond_prob=Regular(1e-9))
        for _ in range(5):
            for p in params:
                p.grad = torch.ones_like(p)
            opt.step()
        with Calls() as calls:
            opt.step()
        counts.append(calls.count)
    assert counts[0] == counts[1] < 25


@pytest.mark.parametrize(("group", "held"), [(XMat(), 4), (lra(2), 4 * 7)], ids=["known mean", "drawn"])
def test_where_no_probe_is_looked_at_none_takes_memory(group, held):
    p = nn.Parameter(torch.randn(7))
    opt = PSGD([p], group, curvature=whiten)
    for _ in range(2):
        p.grad = torch.ones_like(p)
        opt.step()
    assert opt._runtime["lockstep"].probes(0, 0).untyped_storage().nbytes() == held


# --- found by a reviewer, each of them in an earlier form of it


def test_a_group_that_returns_what_it_is_given_leaves_the_average_alone():
    for count in (1, 2):
        params = [nn.Parameter(torch.zeros(4)) for _ in range(count)]
        opt = PSGD(params, psgd.Identity(), lr=1.0, curvature=whiten, precond_prob=1.0, max_rms=0.1)
        for _ in range(4):
            for p in params:
                p.grad = torch.full((4,), 10.0)
            opt.step()
        assert all(opt.state[p]["momentum"].eq(10).all() for p in params)


def test_a_run_resumed_where_a_gradient_is_zero_is_bitwise_the_same():
    def run(steps, model, opt, begin=0):
        for i, (x, y) in zip(range(steps), batches(), strict=False):
            if i >= begin:
                opt.zero_grad()
                regression(model, x, y)().backward()
                if i in (8, 12):
                    opt.param_groups[0]["params"][0].grad.zero_()
                opt.step()

    def fresh(model):
        return PSGD(model.parameters(), psgd.kron(), lr=0.01, momentum=0.0, curvature=momenta, precond_prob=0.25)

    whole, other = mlp(), mlp()
    opt = fresh(whole)
    run(20, whole, opt)
    first = fresh(other)
    run(12, other, first)
    second, saved = mlp(), copy.deepcopy(first.state_dict())
    second.load_state_dict(other.state_dict())
    resumed = fresh(second)
    resumed.load_state_dict(saved)
    run(20, second, resumed, begin=12)
    assert all(map(torch.equal, whole.parameters(), second.parameters()))


@pytest.mark.filterwarnings("ignore:optimizer contains a parameter group with duplicate parameters")
def test_a_parameter_that_is_listed_twice_moves_once():
    p, q = (nn.Parameter(torch.ones(3, 3)) for _ in range(2))
    opt, moves = PSGD([p, q, p], psgd.kron(), lr=0.1, curvature=momenta, momentum=0.0, precond_prob=0.0), []
    for _ in range(3):
        p.grad, q.grad, before = torch.ones(3, 3), torch.ones(3, 3), p.detach().clone()
        opt.step()
        moves.append(float((before - p.detach()).mean()))
    assert moves == pytest.approx([moves[0]] * 3)


def test_state_that_was_cleared_starts_anew():
    model = mlp()
    opt = PSGD(model.parameters(), psgd.kron(), curvature=momenta)
    train(opt, model, 3, closure=False)
    opt.state[next(iter(model.parameters()))].clear()
    train(opt, model, 2, closure=False)
    assert all(p.isfinite().all() for p in model.parameters())


def test_steps_in_inference_mode_leave_a_state_for_others():
    model = mlp()
    opt = PSGD(model.parameters(), Diagonal(), curvature=whiten)
    train(opt, model, 3, closure=False)
    opt.load_state_dict(opt.state_dict())
    with torch.inference_mode():
        opt.step()
    opt.step()


@pytest.mark.parametrize("none", [False, True])
@pytest.mark.parametrize("times", [1, 2])
def test_closures_may_turn_from_one_kind_into_another(none, times):
    """The loss alone, zero_grad without backward, backward, and a backward whose gradient is exactly zero."""
    p, kinds = nn.Parameter(torch.ones(3)), []
    opt = PSGD([p], Diagonal(), lr=0.1, momentum=0.0, curvature=whiten, precond_prob=0.0)

    def closure(kind):
        if kind != "loss":
            for _ in range(times if kind == "cleared" else 1):
                opt.zero_grad(set_to_none=none)
        loss = (p * (0 if kind == "zero" else 1)).sum()
        if kind in ("backward", "zero"):
            loss.backward()
        return loss

    for kind in ("loss", "loss", "backward", "zero", "zero", "loss", "cleared", "cleared", "backward", "cleared"):
        before = p.detach().clone()
        opt.step(lambda kind=kind: closure(kind))
        kinds.append((kind, round(float((before - p.detach()).mean()), 4)))
    assert kinds == [(kind, 0.0 if kind == "zero" else 0.1) for kind, _ in kinds]
