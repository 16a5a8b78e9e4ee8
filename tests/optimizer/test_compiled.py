"""opt.compile(): the same steps, a fixed number of compilations, and none where there is no compiler."""

import copy
import shutil
import warnings

import pytest
import torch
from graphs import Graphs
from torch import nn

import psgd
from psgd import PSGD, XMat, kron, lra, whiten


@pytest.fixture(autouse=True)
def _forget_graphs():
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def problem():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1))
    x = torch.randn(20, 3)
    return model, lambda: model(x).square().mean()


def trained(group, steps=12, compiled=None, **options):
    model, loss = problem()
    opt = PSGD(model.parameters(), group, lr=0.1, precond_prob=0.5, **options)
    if compiled is not None:
        opt.compile(**compiled)
    losses = []
    for step in range(steps):
        opt.param_groups[0]["lr"] = 0.1 / (1 + step)
        losses.append(opt.step(loss).item())
    return losses, opt


@pytest.mark.parametrize("group", [XMat(), lra(2), kron(), kron(psgd.Quadratic())], ids=str)
def test_the_same_steps_in_a_fixed_number_of_graphs(group):
    graphs, more = Graphs(), Graphs()
    eager, _ = trained(group)
    losses, opt = trained(group, compiled={"backend": graphs})
    assert losses == pytest.approx(eager, rel=1e-5)
    torch.compiler.reset()
    trained(group, steps=40, compiled={"backend": more})
    scopes = len(opt._scopes())
    moves = 2 if group == lra(2) else 1  # of U, or of V
    assert graphs.count == more.count == scopes * (moves + 1)


@pytest.mark.parametrize(("group", "n", "expected"), [(lra(2), 140_000, 0), (lra(2), 1000, 2), (XMat(), 140_000, 2)])
def test_what_is_quicker_in_pieces_is_not_compiled(group, n, expected):
    def trained(compiled):
        torch.manual_seed(0)
        p, graphs = nn.Parameter(torch.zeros(n)), Graphs()
        opt = PSGD([p], group, curvature=whiten, precond_prob=psgd.Regular(1e-9))
        if compiled:
            opt.compile(backend=graphs)
        for _ in range(2):
            p.grad = torch.randn(n)
            opt.step()
        return p.detach(), graphs.count

    torch.compiler.reset()
    (same, count), (eager, _) = trained(compiled=True), trained(compiled=False)
    assert count == expected
    torch.testing.assert_close(same, eager, rtol=1e-4, atol=1e-5)


def test_many_shapes_are_all_compiled():
    # torch.compile gives up on a function that it met in more than eight shapes
    torch.manual_seed(0)
    params = [nn.Parameter(torch.randn(k, k + 1)) for k in range(2, 14)]
    opt, graphs = PSGD(params, kron(), precond_prob=1.0, curvature=whiten), Graphs()
    opt.compile(backend=graphs)
    for _ in range(3):
        for p in params:
            p.grad = torch.randn_like(p)
        opt.step()
    assert graphs.count == 2 * len(params)


@pytest.mark.skipif(not any(map(shutil.which, ("g++", "clang++"))), reason="no C++ compiler here")
def test_with_a_real_compiler():
    eager, _ = trained(XMat())
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        warnings.filterwarnings("ignore", category=FutureWarning)
        losses, _ = trained(XMat(), compiled={})
    assert losses == pytest.approx(eager, rel=1e-5)


def test_without_a_compiler_all_goes_on_and_is_said_once():
    from torch._inductor import config

    eager, _ = trained(XMat())
    with config.patch({"cpp.cxx": ("no-such-compiler",)}), warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        losses, _ = trained(XMat(), compiled={"options": {"force_disable_caches": True}})
    mine = [str(w.message) for w in said if "PSGD goes on without torch.compile" in str(w.message)]
    assert len(mine) == 1 and losses == pytest.approx(eager, rel=1e-5)


def test_a_copy_is_not_compiled_and_goes_on_alike():
    graphs = Graphs()
    _, opt = trained(XMat(), compiled={"backend": graphs})
    copied, before = copy.deepcopy(opt), graphs.count
    for p in copied.param_groups[0]["params"]:
        p.grad = torch.ones_like(p)
    copied.step()
    assert graphs.count == before


def test_a_step_that_is_not_finite_changes_nothing():
    model, loss = problem()
    opt = PSGD(model.parameters(), XMat(), precond_prob=1.0)
    opt.compile(backend="eager")
    opt.step(loss)
    before = [p.detach().clone() for p in model.parameters()]
    opt.step(lambda: loss() * float("nan"))
    assert all(torch.equal(p, old) for p, old in zip(model.parameters(), before, strict=True)) and opt.skipped == 1
