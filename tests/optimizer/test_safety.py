"""Long runs and huge values: memory does not grow, Q is not poisoned."""

import gc

import pytest
import torch
from toys import mlp, snapshot, train

from psgd import PSGD, XMat, affine, hessian, lra, whiten

GROUPS = {"lra": lra(2), "xmat": XMat(), "affine": affine}


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


@pytest.mark.parametrize("group", GROUPS.values(), ids=GROUPS)
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
