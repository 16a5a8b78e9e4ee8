"""Parameters of every kind: without gradient, frozen, late, of any shape, layout, dtype, and shared."""

import copy

import pytest
import torch
from torch import nn
from toys import EVERY_STEP, batches, mlp, preconditioner, quadratic, regression, same, snapshot, spectrum, train

from psgd import (
    DCT,
    PSGD,
    Butterfly,
    Dense,
    Diagonal,
    Identity,
    Normalized,
    Shift,
    XMat,
    affine,
    finite_difference,
    hessian,
    lra,
    whiten,
)

GROUPS = {"lra": lra(3), "xmat": XMat(), "diagonal": Diagonal(), "affine": affine}
each_group = pytest.mark.parametrize("group", GROUPS.values(), ids=GROUPS)


def leaf(*shape, **options):
    return torch.ones(shape, **options).requires_grad_()


def squares(*params):
    return sum(p.abs().square().sum() for p in params)


# --- without a gradient


def test_frozen_parameters_do_not_have_everything_arranged_anew(monkeypatch):
    used, frozen = leaf(3), leaf(2).detach()
    opt = PSGD([used, frozen], lr=0.1)
    for _ in range(2):
        opt.step(lambda: squares(used))
    monkeypatch.setattr("psgd.arrangement.members", lambda _: pytest.fail("arranged anew"))
    opt.step(lambda: squares(used))


@each_group
def test_a_parameter_without_gradient_stays_and_the_others_move(group):
    used, unused = leaf(3), leaf(2)
    opt = PSGD([unused, used], group, weight_decay=0.1, precond_prob=1.0)
    for _ in range(3):
        opt.step(lambda: squares(used))
    assert (unused == 1).all() and (used < 1).all()


@pytest.mark.parametrize("group", [Diagonal(), affine], ids=["diagonal", "affine"])
def test_a_parameter_without_gradient_takes_no_part_in_the_pair(group):
    alone, used, unused = leaf(3), leaf(3), leaf(2)
    for params in ([alone], [used, unused]):
        opt = PSGD(params, group, precond_prob=1.0, init_scale=1.0, max_rms=None)
        for _ in range(5):
            opt.step(lambda p=params[0]: squares(p))
    torch.testing.assert_close(used, alone)


@pytest.mark.parametrize("group", [Diagonal(), XMat(), Butterfly()], ids=str)
def test_whitening_lets_what_has_no_gradient_not_grow(group):
    a, b = leaf(2), leaf(2)
    opt = PSGD([a, b], group, precond_prob=1.0, curvature=whiten)

    def step(loss):
        opt.zero_grad()
        loss.backward()
        opt.step()
        return torch.cat([x for key, x in opt.state[b]["q"].items() if key != "ell"])

    before = [step(squares(a, b)) for _ in range(10)][-1]  # until the scale is found
    after = [step(squares(a)) for _ in range(50)][-1]
    assert torch.equal(after, before) if group == Diagonal() else after.norm() <= before.norm()  # others mix a and b


@each_group
def test_gradients_that_come_and_go(group):
    a, b = leaf(3), leaf(2, 2)
    opt = PSGD([a, b], group, precond_prob=0.5)
    for t in range(12):
        opt.zero_grad()
        squares(*((a,), (b,), (a, b))[t % 3]).backward()
        opt.step()
    assert (a < 1).all() and (b < 1).all()
    assert opt.state[a]["step"] == opt.state[b]["step"] == 8


@pytest.mark.parametrize("group", [Identity(), DCT(), Shift(1)], ids=str)
def test_a_group_of_one_orthogonal_matrix_is_sgd(group):
    p = leaf(3)
    opt = PSGD([p], group, lr=0.1, **EVERY_STEP)
    opt.step(lambda: squares(p))
    torch.testing.assert_close(p.detach(), torch.full((3,), 0.8))


def test_nothing_has_a_gradient():
    p = leaf(3)
    opt = PSGD([p])
    opt.step()
    opt.step(lambda: None)
    assert (p == 1).all()


@pytest.mark.parametrize("curvature", [hessian, finite_difference, whiten], ids=str)
def test_frozen_then_unfrozen(curvature):
    model = mlp()
    model[0].requires_grad_(False)
    kept = copy.deepcopy(model[0].state_dict())
    opt = PSGD(model.parameters(), lra(2), curvature=curvature, precond_prob=1.0)
    train(opt, model, 3)
    assert same(list(model[0].state_dict().values()), list(kept.values()))
    model[0].requires_grad_(True)
    train(opt, model, 3)
    assert not torch.equal(model[0].weight, kept["weight"])


def test_frozen_after_some_steps():
    model = mlp()
    opt = PSGD(model.parameters(), lra(2), weight_decay=0.1, precond_prob=1.0)
    train(opt, model, 3)
    model[0].requires_grad_(False)
    opt.zero_grad()
    kept = model[0].weight.detach().clone()
    train(opt, model, 3)
    assert torch.equal(model[0].weight, kept)


def test_a_stale_gradient_on_a_frozen_parameter_does_no_harm():
    model = mlp()
    opt = PSGD(model.parameters(), lra(2), precond_prob=1.0, curvature=whiten)
    train(opt, model, 2)
    model[0].requires_grad_(False)
    for _, (x, y) in zip(range(3), batches(), strict=False):
        regression(model, x, y)().backward()
        opt.step()
    assert all(p.isfinite().all() for p in model.parameters())


def test_a_gradient_put_on_a_tensor_that_requires_none():
    """As with master weights in full precision."""
    p = torch.ones(3)
    opt = PSGD([p], Diagonal(), precond_prob=1.0)
    for _ in range(3):
        p.grad = 2 * p
        opt.step()
    assert (p < 1).all()


@pytest.mark.parametrize("curvature", [hessian, finite_difference, whiten], ids=str)
def test_no_parameter_is_trainable(curvature):
    p = torch.ones(3)
    opt = PSGD([p], curvature=curvature)
    assert opt.step(lambda: torch.ones(()).sum()) == 1
    assert (p == 1).all()


@pytest.mark.parametrize("group", [lra(2), affine], ids=["lra", "affine"])
def test_a_param_group_added_after_some_steps(group):
    a, b = leaf(3), leaf(2)
    opt = PSGD([a], group, precond_prob=1.0)
    for _ in range(12):
        opt.step(lambda: squares(a))
    opt.add_param_group({"params": [b], "lr": 0.1})
    kept = a.detach().clone()
    for _ in range(5):
        opt.step(lambda: squares(a, b))
    assert (a < kept).all() and (b < 0.9).all()
    fresh = PSGD([{"params": [a]}, {"params": [b]}], group, precond_prob=1.0)
    fresh.load_state_dict(copy.deepcopy(opt.state_dict()))
    before = snapshot(opt)
    assert same(snapshot(fresh), before)


def test_a_late_parameter_gets_an_initial_scale_of_its_own():
    a, b = leaf(3), leaf(3)
    b.requires_grad_(False)
    opt = PSGD([a, b], Diagonal(), lr=0.0, precond_prob=1.0)
    for _ in range(30):
        opt.step(lambda: squares(a))
    b.requires_grad_(True)
    for _ in range(10):
        opt.step(lambda: squares(a) + 1e6 * squares(b))
    assert (1e5 < opt.state[b]["q"]["d"] ** -2).all()


# --- shapes and layouts


@each_group
@pytest.mark.parametrize("shape", [(), (1,), (0,), (2, 0, 3), (4, 1), (2, 1, 2, 1, 2)], ids=str)
@pytest.mark.parametrize("curvature", [hessian, finite_difference, whiten], ids=str)
def test_any_shape(shape, curvature, group):
    p, other = leaf(*shape), leaf(2)
    opt = PSGD([p, other], group, curvature=curvature, precond_prob=1.0)
    for _ in range(3):
        opt.step(lambda: squares(p, other))
    assert (p < 1).all() and (other < 1).all()


def test_only_empty_parameters():
    p = leaf(0)
    PSGD([p]).step(lambda: p.sum())


def test_channels_last_equals_contiguous():
    def run(layout):
        with torch.random.fork_rng():
            torch.manual_seed(0)
            model = nn.Conv2d(3, 4, 3).to(memory_format=layout)
        x = torch.linspace(-1, 1, 2 * 3 * 25).view(2, 3, 5, 5)
        opt = PSGD(model.parameters(), lra(2), precond_prob=1.0)
        for _ in range(5):
            opt.step(lambda: model(x).square().mean())
        return model.weight.detach()

    strided = run(torch.channels_last)
    assert strided.is_contiguous(memory_format=torch.channels_last)
    torch.testing.assert_close(strided, run(torch.contiguous_format), rtol=1e-4, atol=1e-5)


def test_a_transposed_parameter():
    p = torch.arange(6.0).view(2, 3).T.requires_grad_()
    opt = PSGD([p], Diagonal(), lr=0.1, momentum=0.0, precond_prob=0.0)
    p.backward(torch.arange(6.0).view(3, 2))
    opt.step()
    torch.testing.assert_close(p.detach(), torch.arange(6.0).view(2, 3).T - 0.1 * torch.arange(6.0).view(3, 2))


@each_group
@pytest.mark.parametrize("curvature", [hessian, finite_difference, whiten], ids=str)
def test_a_complex_parameter_equals_its_real_view(curvature, group):
    start = torch.tensor([1 + 2j, -0.5j, 3.0], dtype=torch.complex128)
    z, x = start.clone().requires_grad_(), torch.view_as_real(start).clone().requires_grad_()
    h = spectrum(1.0, 2.0, 3.0, 4.0, 5.0, 6.0)
    one = PSGD([z], group, lr=0.1, precond_prob=1.0, curvature=curvature, weight_decay=0.1, l2=0.1)
    two = PSGD([x], group, lr=0.1, precond_prob=1.0, curvature=curvature, weight_decay=0.1, l2=0.1)
    for _ in range(6):
        v = two._probes([x])[0]
        assert torch.equal(torch.view_as_real(one._probes([z])[0]), v)
        one.step(quadratic(h, torch.view_as_real(z)))
        two.step(quadratic(h, x))
    torch.testing.assert_close(torch.view_as_real(z.detach()), x.detach(), rtol=1e-6, atol=1e-6)


def test_a_lazily_conjugated_gradient():
    z = torch.ones(3, dtype=torch.complex64, requires_grad=True)
    opt = PSGD([z], Diagonal(), curvature=whiten)
    z.grad = torch.full((3,), 1 + 1j).conj()
    opt.step()
    assert (z.real < 1).all() and (z.imag > 0).all()


def test_parameters_of_several_dtypes():
    params = [leaf(3, dtype=d) for d in (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.complex64)]
    opt = PSGD(params, lra(2), precond_prob=1.0, curvature=whiten)
    for _ in range(4):
        opt.zero_grad()
        for p in params:
            squares(p).backward()
        opt.step()
    assert all((p.abs() < 1).all() for p in params)
    assert [p.dtype for p in params[:2]] == [torch.float32, torch.bfloat16]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("curvature", [hessian, finite_difference, whiten], ids=str)
def test_half_precision_trains(dtype, curvature):
    model = mlp(dtype)
    losses = train(PSGD(model.parameters(), lr=0.05, curvature=curvature), model, 60)
    assert sum(losses[-10:]) < 0.8 * sum(losses[:10])


def test_tied_weights():
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Tanh(), nn.Linear(4, 4, bias=False))
    model[2].weight = model[0].weight
    opt = PSGD(model.parameters(), Dense(), lr=0.0, curvature=hessian, **EVERY_STEP)
    assert len(opt.param_groups[0]["params"]) == 1
    x = torch.eye(4)
    opt.step(lambda: model(x).square().sum())
    v = opt._probes([model[0].weight])  # of the next step
    opt.step(lambda: model(x).square().sum())
    w = model[0].weight.detach()
    exact = torch.autograd.functional.hvp(lambda w: torch.tanh(x @ w.T).matmul(w.T).square().sum(), w, v[0])[1]
    torch.testing.assert_close(_products(model, x, v), exact)


def _products(model, x, v):
    from psgd import hvp

    return hvp(model(x).square().sum(), [model[0].weight], v)[1][0]


# --- param_groups


def split(model):
    """Return the parameters in two groups, in the order of one."""
    first, second = list(model[0].parameters()), list(model[2].parameters())
    return [{"params": first}, {"params": second}]


@pytest.mark.parametrize("group", [lra(3), XMat(), Dense()], ids=str)
def test_two_param_groups_share_one_preconditioner(group):
    one, two = mlp(), mlp()
    train(PSGD(one.parameters(), group, precond_prob=1.0), one, 10)
    opt = PSGD(split(two), group, precond_prob=1.0)
    train(opt, two, 10)
    assert len(opt._scopes()) == 1
    assert all(map(torch.equal, one.parameters(), two.parameters()))


def test_param_groups_have_their_own_lr_decay_and_l2():
    a, b = leaf(2), leaf(2)
    groups = [{"params": [a], "lr": 0.1, "weight_decay": 0.5}, {"params": [b], "lr": 0.2, "l2": 0.5}]
    opt = PSGD(groups, precond_prob=0.0, momentum=0.0)
    (a.sum() + b.sum()).backward()
    opt.step()
    torch.testing.assert_close(a.detach(), torch.full((2,), 1 - 0.1 * 0.5 - 0.1))
    torch.testing.assert_close(b.detach(), torch.full((2,), 1 - 0.2 * 1.5))


@pytest.mark.parametrize("lam", [(1.0, 0.0), (0.0, 1.0)], ids=str)
def test_l2_enters_the_pair_of_its_own_param_group_alone(lam):
    a, b = leaf(2, dtype=torch.float64), leaf(2, dtype=torch.float64)
    groups = [{"params": [a], "l2": lam[0]}, {"params": [b], "l2": lam[1]}]
    opt = PSGD(groups, Diagonal(), lr=0.0, curvature=hessian, precond_lr=0.5, **EVERY_STEP)
    for _ in range(150):
        opt.step(lambda: squares(a, b))
    for p, extra in ((a, lam[0]), (b, lam[1])):
        torch.testing.assert_close(opt.state[p]["q"]["d"] ** -2, torch.full_like(p, 2 + extra), rtol=0.02, atol=0)


def test_a_scope_separates_and_equals_two_optimizers():
    def problem():
        return leaf(3, dtype=torch.float64), leaf(2, dtype=torch.float64)

    a, b = problem()
    opt = PSGD([{"params": [a], "scope": "one"}, {"params": [b], "scope": "two"}], Dense(), precond_prob=1.0)
    for _ in range(5):
        opt.step(lambda: squares(a, b) + a.sum() * b.sum())
    assert len(opt._scopes()) == 2
    assert preconditioner(opt, a).shape == (3, 3) and preconditioner(opt, b).shape == (2, 2)


def test_another_group_separates():
    model = mlp()
    opt = PSGD([{"params": model[0].parameters(), "group": XMat()}, {"params": model[2].parameters()}], lra(2))
    train(opt, model, 3)
    assert [s.group for s in opt._scopes()] == [XMat(), lra(2)]


def test_a_scope_may_reach_over_param_groups():
    model = mlp()
    opt = PSGD([pg | {"scope": "all"} for pg in split(model)], lra(2))
    train(opt, model, 2)
    assert len(opt._scopes()) == 1


@pytest.mark.parametrize(
    "option", [{"curvature": whiten}, {"seed": 1}, {"precond_prob": 0.5}, {"max_norm": 1.0}, {"max_rms": 2.0}], ids=str
)
def test_an_option_of_the_whole_optimizer_may_not_differ_between_param_groups(option):
    with pytest.raises(ValueError, match="all param_groups need one"):
        PSGD([{"params": leaf(2)}, {"params": leaf(2), **option}])


@pytest.mark.parametrize(
    "option",
    [{"precond_lr": 0.5}, {"rule": Normalized()}, {"init_scale": 1.0}, {"precond_dtype": torch.float64}],
    ids=str,
)
def test_an_option_of_the_preconditioner_may_not_differ_where_it_is_shared(option):
    with pytest.raises(ValueError, match='a "scope" of its own'):
        PSGD([{"params": leaf(2)}, {"params": leaf(2), **option}])
    for own in ({"scope": "two"}, {"group": XMat()}):
        PSGD([{"params": leaf(2)}, {"params": leaf(2), **option, **own}])


def test_a_bad_option_of_a_param_group_is_refused_and_nothing_is_added():
    opt = PSGD([leaf(2)])
    for bad in ({"lr": -1.0}, {"momentum": 1.0}, {"seed": 7}, {"group": "lra"}):
        with pytest.raises(ValueError):
            opt.add_param_group({"params": [leaf(2)], **bad})
    assert len(opt.param_groups) == 1


def test_named_parameters():
    model, other = mlp(), mlp()
    train(PSGD(model.named_parameters(), lra(2)), model, 3)
    train(PSGD(other.parameters(), lra(2)), other, 3)
    assert all(map(torch.equal, model.parameters(), other.parameters()))


# --- gradients


@pytest.mark.parametrize("curvature", [hessian, finite_difference, whiten], ids=str)
def test_a_sparse_gradient_is_refused_by_name(curvature):
    model = nn.Embedding(4, 3, sparse=True)
    opt = PSGD(model.parameters(), curvature=curvature)
    with pytest.raises(RuntimeError, match="sparse"):
        opt.step(lambda: model(torch.tensor([1, 2])).square().sum())


def test_clip_grad_norm_has_its_effect():
    """On the averaged gradient, and so on the step, in full."""

    def run(most):
        model = mlp()
        opt = PSGD(model.parameters(), lra(2), curvature=whiten, precond_prob=0.0, momentum=0.0, lr=1.0)
        before = [p.detach().clone() for p in model.parameters()]
        x, y = next(batches())
        regression(model, x, y)().backward()
        nn.utils.clip_grad_norm_(model.parameters(), most)
        opt.step()
        return torch.cat([(b - p).flatten() for b, p in zip(before, model.parameters(), strict=True)]).norm().item()

    assert run(0.01) == pytest.approx(0.01, rel=1e-4)
    assert run(0.02) == pytest.approx(0.02, rel=1e-4)


@pytest.mark.parametrize("curvature", [hessian, finite_difference, whiten], ids=str)
def test_maximize_is_minimizing_the_negative(curvature):
    one, two = mlp(torch.float64), mlp(torch.float64)
    up = PSGD(one.parameters(), lra(2), maximize=True, curvature=curvature, l2=3.0, precond_prob=1.0)
    down = PSGD(two.parameters(), lra(2), curvature=curvature, l2=3.0, precond_prob=1.0)
    for _, (x, y) in zip(range(8), batches(torch.float64), strict=False):
        up.step(regression(one, x, y))
        down.step(lambda x=x, y=y: -regression(two, x, y)())
    for a, b in zip(one.parameters(), two.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-9)


def test_starting_points_are_drawn_by_blocks_of_rows(monkeypatch):
    from psgd import probes

    whole = lra(2).init(10, generator=torch.Generator().manual_seed(1))["0"]["U"]
    assert whole.equal(lra(2).init(10, generator=torch.Generator().manual_seed(1))["0"]["U"])
    monkeypatch.setattr(probes, "BLOCK", 4)
    rng = lambda: torch.Generator().manual_seed(1)  # noqa: E731
    drawn = probes.normal(10, rng(), 2, dtype=torch.float32)
    assert len({float(t) for t in drawn.flatten()}) == 20  # no block repeats another
    parts = probes.normal(10, rng(), 2, dtype=torch.float32, runs=[(1, 3), (3, 9)])
    assert parts.equal(drawn[1:9])
    assert probes.normal(10, rng(), 2, dtype=torch.float32, runs=[]).shape == (0, 2)
