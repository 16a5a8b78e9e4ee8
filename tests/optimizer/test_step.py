"""The contract of step(): closures, what it returns, contexts around it, hooks, and the automatic choice."""

import warnings

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR
from toys import batches, mlp, regression, same, snapshot, train

from psgd import PSGD, Diagonal, automatic, finite_difference, hessian, lra, whiten

SOURCES = [automatic, hessian, finite_difference, whiten]
each_source = pytest.mark.parametrize("curvature", SOURCES, ids=str)


# --- what a closure may return


@each_source
@pytest.mark.parametrize(
    "value", [torch.tensor([1]), torch.tensor([1.0]), torch.tensor(1), 1, 1.0, None, (), (2.0, "aux")]
)
def test_a_closure_without_a_graph_is_called_and_its_value_returned(value, curvature):
    p = torch.ones(2, requires_grad=True)
    opt = PSGD([p], Diagonal(), curvature=curvature)
    for _ in range(3):
        assert opt.step(lambda: value) is value
    assert (p == 1).all() and opt.skipped == 0


@each_source
@pytest.mark.parametrize("value", [torch.tensor([1]), 1, 1.0, None], ids=str)
def test_a_closure_that_fills_the_gradients_by_hand(value, curvature):
    p = torch.ones(2, requires_grad=True)
    opt = PSGD([p], Diagonal(), curvature=curvature)

    def by_hand():
        p.grad = torch.ones(2)
        return value

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a Newton curvature says once that it whitens
        for _ in range(3):
            opt.step(by_hand)
    assert (p < 1).all()


@each_source
def test_the_loss_that_is_returned_is_that_before_the_step(curvature):
    model = mlp()
    opt = PSGD(model.parameters(), lra(2), curvature=curvature, precond_prob=0.5)
    for _, (x, y) in zip(range(4), batches(), strict=False):
        expected = regression(model, x, y)().item()
        assert opt.step(regression(model, x, y)).item() == expected


@each_source
def test_a_loss_of_one_element_and_a_loss_with_company(curvature):
    found = []
    for shape in (lambda loss: loss, lambda loss: loss[None], lambda loss: (loss, "aux"), lambda loss: [loss, None]):
        model = mlp()
        opt = PSGD(model.parameters(), lra(2), curvature=curvature, precond_prob=0.5)
        for _, (x, y) in zip(range(4), batches(), strict=False):
            out = opt.step(lambda f=regression(model, x, y), shape=shape: shape(f()))  # noqa: B008
        found.append((list(model.parameters()), type(out)))
    assert all(same(params, found[0][0]) for params, _ in found)
    assert [kind for _, kind in found] == [torch.Tensor, torch.Tensor, tuple, list]


def test_kinds_of_closures_may_be_mixed():
    p = torch.ones(2, requires_grad=True)
    opt = PSGD([p], Diagonal(), precond_prob=0.3)

    def backward():
        opt.zero_grad()
        loss = p.square().sum()
        loss.backward()
        return loss

    def zeroes():
        opt.zero_grad()
        return p.square().sum()

    losses = []
    for closure in [backward, zeroes, lambda: p.square().sum(), lambda: None] * 4:
        opt.zero_grad()
        out = opt.step(closure)
        losses += [] if out is None else [out.item()]
    assert losses == sorted(losses, reverse=True) and len(set(losses)) == 12


def test_step_is_a_method_that_schedulers_can_wrap():
    opt = PSGD([torch.ones(2, requires_grad=True)])
    assert opt.step.__func__ is not None
    LambdaLR(opt, lambda t: 1.0)
    opt.param_groups[0]["params"][0].grad = torch.ones(2)
    opt.step()


def test_step_hooks_are_called():
    p = torch.ones(2, requires_grad=True)
    opt, seen = PSGD([p]), []
    opt.register_step_pre_hook(lambda *_: seen.append("before"))
    opt.register_step_post_hook(lambda *_: seen.append("after"))
    opt.step(lambda: p.sum())
    assert seen == ["before", "after"]


# --- contexts around it


def reference(curvature=automatic):
    model = mlp()
    opt = PSGD(model.parameters(), lra(2), curvature=curvature, precond_prob=0.5)
    train(opt, model, 6)
    return snapshot(opt)


@each_source
def test_no_grad_around_a_step_changes_nothing(curvature):
    model = mlp()
    opt = PSGD(model.parameters(), lra(2), curvature=curvature, precond_prob=0.5)
    with torch.no_grad():
        train(opt, model, 6)
    assert same(snapshot(opt), reference(curvature))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_autocast_around_a_plain_step_changes_nothing(dtype):
    found = []
    for enabled in (False, True):
        model = mlp()
        opt = PSGD(model.parameters(), lra(2), precond_prob=1.0)
        for _, (x, y) in zip(range(6), batches(), strict=False):
            opt.zero_grad()
            regression(model, x, y)().backward()
            with torch.autocast("cpu", dtype, enabled=enabled):
                opt.step()
        found.append(snapshot(opt))
    assert same(*found)


@pytest.mark.parametrize("curvature", [hessian, finite_difference, whiten], ids=str)
def test_autocast_around_the_loop_sees_the_weights_of_each_step(curvature):
    """Autocast caches its casts of weights: kept over a step, they would freeze the model."""
    found = []
    for around in (True, False):
        model = mlp()
        opt = PSGD(model.parameters(), lra(2), lr=0.1, curvature=curvature)

        def cast(loss):
            with torch.autocast("cpu", torch.bfloat16):
                return loss()

        with torch.autocast("cpu", torch.bfloat16, enabled=around):
            for _, (x, y) in zip(range(30), batches(), strict=False):
                opt.step(lambda loss=regression(model, x, y): cast(loss))  # noqa: B008
        found.append(list(model.parameters()))
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b)


def test_inference_mode_around_a_plain_step():
    model = mlp()
    opt = PSGD(model.parameters(), lra(2))
    train(opt, model, 2, closure=False)
    opt.zero_grad()
    regression(model, *next(batches()))().backward()
    before = model[0].weight.detach().clone()
    with torch.inference_mode():
        opt.step()
    assert not torch.equal(model[0].weight, before)
    train(opt, model, 2, closure=False)


def test_deterministic_algorithms():
    torch.use_deterministic_algorithms(True)
    try:
        assert same(reference(), reference())
    finally:
        torch.use_deterministic_algorithms(False)


# --- the automatic choice (the models that it falls back for are in tests/curvature)


def test_the_source_in_use_can_be_asked_for():
    model = mlp()
    opt = PSGD(model.parameters())
    assert opt.source is None
    train(opt, model, 1)
    assert opt.source == hessian


def test_a_relu_network_keeps_exact_products():
    for seed in range(5):
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(4, 50), nn.ReLU(), nn.Linear(50, 50), nn.ReLU(), nn.Linear(50, 3))
        opt = PSGD(model.parameters(), lra(2))
        train(opt, model, 3)
        assert opt.source == hessian


def test_a_linear_loss_settles_nothing_and_moves():
    p = torch.ones(3, requires_grad=True)
    opt = PSGD([p], Diagonal(), precond_prob=1.0)
    for _ in range(5):
        opt.step(lambda: p.sum())
    assert (p < 1).all()
    opt.step(lambda: p.square().sum())
    assert opt.source == hessian


def test_a_graph_made_before_the_step_is_enough():
    model = mlp()
    opt = PSGD(model.parameters(), lra(2), precond_prob=1.0)
    for _, (x, y) in zip(range(3), batches(), strict=False):
        loss = regression(model, x, y)()
        opt.step(lambda loss=loss: loss)
    assert opt.source == hessian


def test_the_curvature_may_be_changed_on_the_way():
    model = mlp()
    opt = PSGD(model.parameters(), lra(2), precond_prob=1.0, curvature=hessian)
    train(opt, model, 2)
    opt.param_groups[0]["curvature"] = whiten
    before = opt.state[model[0].weight]["q"]["1"]["d"].clone()
    train(opt, model, 1, closure=False)
    assert not torch.equal(opt.state[model[0].weight]["q"]["1"]["d"], before)
    opt.param_groups[0]["curvature"] = finite_difference
    train(opt, model, 2)
    assert opt.source == finite_difference
