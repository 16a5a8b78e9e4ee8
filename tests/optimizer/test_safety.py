"""Steps that must not go wrong: SGD without a preconditioner, values that are not finite, generators, memory."""

import gc
import math

import pytest
import torch
from toys import mlp, same, snapshot, train

from psgd import PSGD, XMat, affine, hessian, lra, whiten

GROUPS = {"lra": lra(2), "xmat": XMat(), "affine": affine}
each_group = pytest.mark.parametrize("group", GROUPS.values(), ids=GROUPS)


def test_probability_zero_is_torchs_sgd_to_the_bit():
    model, twin = mlp(), mlp()
    train(PSGD(model.parameters(), lr=0.1, precond_prob=0, momentum=0.0), model, 10)
    train(torch.optim.SGD(twin.parameters(), lr=0.1), twin, 10, closure=False)
    assert same([p.detach() for p in model.parameters()], [p.detach() for p in twin.parameters()])


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("where", ["loss", "gradient", "one entry"])
@each_group
def test_a_step_that_is_not_finite_changes_nothing_and_is_counted(group, where, bad):
    model = mlp()
    opt = PSGD(model.parameters(), group, lr=0.05, weight_decay=0.1, l2=0.1, precond_prob=1.0)
    train(opt, model, 3, closure=where == "loss")
    before = snapshot(opt)
    if where == "loss":
        opt.step(lambda: model(torch.ones(2, 4)).sum() * bad)
    else:
        opt.zero_grad()
        model(torch.ones(2, 4)).sum().backward()
        grad = next(model.parameters()).grad
        grad.mul_(bad) if where == "gradient" else grad.view(-1)[0].fill_(bad)
        opt.step()
    assert opt.skipped == 1
    after = snapshot(opt)
    skipped = [i for i, (a, b) in enumerate(zip(before, after, strict=True)) if not same(a, b)]
    assert len(skipped) == 1  # the counter itself
    goes_on = train(opt, model, 3, closure=where == "loss")
    assert all(map(math.isfinite, goes_on))
    assert not same(after, snapshot(opt))
    assert opt.skipped == 1


def test_a_step_leaves_the_users_generators_alone():
    model = mlp()
    opt = PSGD(model.parameters(), precond_prob=1.0)
    before = torch.get_rng_state()
    train(opt, model, 3)
    train(opt, model, 3, closure=False)
    assert torch.equal(before, torch.get_rng_state())


def test_five_hundred_curvature_steps_do_not_grow_memory():
    model = mlp()
    opt = PSGD(model.parameters(), precond_prob=1.0, curvature=hessian)
    train(opt, model, 20)
    gc.collect()
    before = sum(issubclass(type(x), torch.Tensor) for x in gc.get_objects())
    gc.disable()
    try:
        train(opt, model, 500)
        assert sum(issubclass(type(x), torch.Tensor) for x in gc.get_objects()) <= before + 5
    finally:
        gc.enable()


@each_group
@pytest.mark.parametrize("size", [1e15, 1e20, 1e30])
def test_a_huge_pair_does_not_poison_q(group, size):
    model = mlp()
    opt = PSGD(model.parameters(), group, lr=0.05, precond_prob=1.0, curvature=whiten)
    train(opt, model, 3, closure=False)
    opt.zero_grad()
    (model(torch.ones(2, 4)).sum() * size).backward()
    opt.step()
    train(opt, model, 3, closure=False)
    assert all(x.isfinite().all() for x in snapshot(opt) if isinstance(x, torch.Tensor))
