"""Parameters of every kind: missing gradients, odd shapes, complex, mixed, late, shared."""

import gc
import math

import pytest
import torch
from torch import nn
from toys import mlp, quadratic, same, snapshot, spectrum, train

from psgd import PSGD, Dense, XMat, affine, hessian, lra, whiten

GROUPS = {"lra": lra(2), "xmat": XMat(), "affine": affine}
each_group = pytest.mark.parametrize("group", GROUPS.values(), ids=GROUPS)


@each_group
def test_a_parameter_without_gradient_is_left_alone_and_may_come_back(group):
    a, b = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(2))
    opt = PSGD([a, b], group, lr=0.1, precond_prob=1.0, curvature=hessian)
    for step in range(6):
        use_b = step % 2 == 1
        before = b.detach().clone()
        opt.zero_grad()
        opt.step(lambda use_b=use_b: a.pow(4).sum() + (b.pow(4).sum() if use_b else 0))
        assert same(before, b.detach()) != use_b
    assert opt.skipped == 0


@each_group
def test_frozen_then_unfrozen(group):
    model = mlp()
    model[0].requires_grad_(False)
    opt = PSGD(model.parameters(), group, lr=0.05, precond_prob=1.0)
    before = [p.detach().clone() for p in model[0].parameters()]
    train(opt, model, 4)
    assert same(before, [p.detach() for p in model[0].parameters()])
    model[0].requires_grad_(True)
    losses = train(opt, model, 30)
    assert not same(before, [p.detach() for p in model[0].parameters()])
    assert losses[-1] < losses[0]


@each_group
def test_a_param_group_that_comes_later_trains_and_resumes(group):
    model, twin = mlp(), mlp()
    opts = []
    for m in (model, twin):
        opt = PSGD(m[0].parameters(), group, lr=0.05, precond_prob=1.0)
        train(opt, m, 3)
        opt.add_param_group({"params": m[2].parameters()})
        train(opt, m, 3)
        opts.append(opt)
    new = PSGD(twin[0].parameters(), group, lr=0.05, precond_prob=1.0)
    new.add_param_group({"params": twin[2].parameters()})
    new.load_state_dict(opts[1].state_dict())
    assert train(opts[0], model, 3) == train(new, twin, 3)


@each_group
@pytest.mark.parametrize("shape", [(), (1,), (0,), (2, 0), (1, 1), (2, 1, 3), (2, 1, 2, 1, 2)], ids=str)
def test_any_shape(group, shape):
    p, other = nn.Parameter(torch.full(shape, 2.0)), nn.Parameter(torch.ones(2))
    opt = PSGD([p, other], group, lr=0.1, precond_prob=1.0)
    for _ in range(5):
        loss = opt.step(lambda: (p**2).sum() + (other**2).sum())
    assert loss < 4 * p.numel() + 2
    opt.load_state_dict(opt.state_dict())
    opt.step(lambda: (p**2).sum() + (other**2).sum())


def test_channels_last_makes_no_difference():
    plain = nn.Parameter(torch.randn(4, 3, 2, 2, generator=torch.Generator().manual_seed(0)))
    last = nn.Parameter(plain.detach().clone().to(memory_format=torch.channels_last))
    for p in (plain, last):
        opt = PSGD([p], lra(2), lr=0.1, precond_prob=1.0)
        for _ in range(4):
            opt.step(lambda p=p: p.pow(4).sum())
    torch.testing.assert_close(plain, last.contiguous())


def test_a_complex_parameter_is_its_two_real_parts():
    z = nn.Parameter(torch.tensor([1 + 2j, -0.5 + 1j], dtype=torch.complex128))
    x = nn.Parameter(torch.view_as_real(z.detach()).clone())
    for p in (z, x):
        opt = PSGD([p], Dense(), lr=0.3, precond_prob=1.0, init_scale=0.3)
        for _ in range(5):
            pair = torch.view_as_real(p) if p.is_complex() else p
            opt.zero_grad()
            pair[:, 0].pow(4).sum().add(pair.square().sum()).backward()
            opt.step()
    torch.testing.assert_close(torch.view_as_real(z), x)


def test_mixed_dtypes_share_a_preconditioner():
    a, b = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
    opt = PSGD([a, b], lra(2), lr=0.1, precond_prob=1.0)
    first = [opt.step(lambda: a.pow(4).sum() + b.float().pow(4).sum()).item() for _ in range(10)]
    assert first[-1] < first[0]
    assert {t.dtype for t in (opt.state[a]["q"]["1"]["d"], opt.state[b]["q"]["1"]["d"])} == {torch.float32}


def test_two_param_groups_share_one_joint_preconditioner_unless_they_name_a_scope():
    h = spectrum(1.0, 3.0, 10.0, 30.0)

    def final(**second):
        a, b = (nn.Parameter(torch.ones(2, dtype=torch.float64)) for _ in range(2))
        groups = [a, b] if not second else [{"params": [a]}, {"params": [b]} | second]
        opt = PSGD(groups, Dense(), lr=0.1, precond_prob=1.0, curvature=hessian, momentum=0.0)
        for _ in range(20):
            opt.step(quadratic(h, a, b))
        return len(opt._scopes()), torch.cat((a, b)).detach()

    one, joint = final()
    two, same_groups = final(weight_decay=0.0)
    assert one == two == 1
    assert same(joint, same_groups)
    apart, other = final(scope="head")
    assert apart == 2
    assert not same(joint, other)


def test_tied_weights_are_one_parameter():
    embed, head = nn.Embedding(5, 4), nn.Linear(4, 5, bias=False)
    head.weight = embed.weight
    model = nn.Sequential(embed, head)
    opt = PSGD(model.parameters(), lr=0.05, precond_prob=1.0)
    x = torch.arange(5)
    losses = [opt.step(lambda: nn.functional.cross_entropy(model(x), x.flip(0))).item() for _ in range(40)]
    assert losses[-1] < losses[0]
    assert head.weight is embed.weight


def test_sparse_gradients_are_refused_by_name_and_change_nothing():
    embed = nn.Embedding(5, 2, sparse=True)
    opt = PSGD(embed.parameters(), curvature=whiten)
    before = embed.weight.detach().clone()
    embed(torch.tensor([1])).sum().backward()
    with pytest.raises(RuntimeError, match="does not support sparse gradients"):
        opt.step()
    assert same(before, embed.weight.detach())


def test_the_users_clipping_takes_effect():
    ends = []
    for limit in (1e9, 1e-3):
        model = mlp()
        opt = PSGD(model.parameters(), lr=0.1, precond_prob=0, curvature=whiten)
        model(torch.ones(8, 4)).square().mean().backward()
        nn.utils.clip_grad_norm_(model.parameters(), limit)
        opt.step()
        ends.append([p.detach() for p in model.parameters()])
    assert not same(*ends)


def test_maximize_climbs_as_minimizing_the_negative():
    ends = []
    for sign, maximize in ((1, False), (-1, True)):
        x = nn.Parameter(torch.tensor([1.0, 2.0]))
        opt = PSGD([x], lra(2), lr=0.1, maximize=maximize, l2=0.1, precond_prob=1.0)
        for _ in range(5):
            opt.step(lambda x=x, sign=sign: sign * x.pow(4).sum())
        ends.append(x.detach())
    assert same(*ends)


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
