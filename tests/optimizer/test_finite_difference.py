"""Finite differences, rule by rule: what is evaluated twice looks as if it had been evaluated once."""

import pytest
import torch
from torch import nn
from toys import batches, cosine, mlp, regression, same, snapshot, train

from psgd import PSGD, Diagonal, finite_difference, hessian, hvp, lra
from psgd.evaluation import Evaluation


def flat(tensors):
    return torch.cat([t.flatten() for t in tensors if t is not None])


def probes(params):
    return [torch.randn(p.shape, generator=torch.Generator().manual_seed(i)).to(p) for i, p in enumerate(params)]


def both(closure, params, exact=None, model=None):
    """Return (h by finite differences, h exactly)."""
    params = list(params)
    v = probes(params)
    rng = torch.get_rng_state()
    h = hvp((exact or closure)(), params, v)[1]
    torch.set_rng_state(rng)
    evaluation = Evaluation(closure, params, model)
    evaluation.first(None)
    return flat(evaluation.difference(v)), flat(h)


# --- the value


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_h_is_right(dtype):
    model = mlp(dtype)
    x, y = next(batches(dtype))
    h, exact = both(regression(model, x, y), model.parameters())
    torch.testing.assert_close(h, exact, rtol=0, atol=3e-3 if dtype == torch.float32 else 1e-6)


@pytest.mark.parametrize("size", [0.0, 1e-4, 1.0, 100.0])
def test_h_is_right_whatever_the_size_of_the_weights(size):
    p = torch.full((5,), size, requires_grad=True)
    a = torch.arange(1.0, 6.0)
    h, exact = both(lambda: (a * p).cos().sum() + (a * p * p).sum(), [p])
    assert cosine(h, exact) > 0.998


def test_h_is_right_where_the_gradients_are_doubles_of_floats():
    """The difference is taken in the gradient's own dtype: cast to float32 before, it would be noise."""
    p = torch.ones(4, dtype=torch.float64, requires_grad=True)
    opt = PSGD([p], Diagonal(), lr=0.0, curvature=finite_difference, precond_prob=1.0, precond_dtype=torch.float32)
    offset = 1e6 * torch.ones(4, dtype=torch.float64)
    for _ in range(150):
        opt.step(lambda: p.square().sum() + offset @ p)
    torch.testing.assert_close(opt.state[p]["q"]["d"] ** -2, torch.full((4,), 2.0), rtol=0.05, atol=0)


def test_bfloat16_has_its_own_epsilon():
    model = mlp(torch.bfloat16)
    x, y = next(batches(torch.bfloat16))
    h, exact = both(regression(model, x, y), model.parameters())
    assert cosine(h, exact) > 0.97


@pytest.mark.parametrize("around", [True, False], ids=["around the step", "in the closure"])
def test_autocast_has_the_epsilon_of_its_dtype(around):
    model = mlp()
    x, y = next(batches())
    closure, exact = regression(model, x, y), regression(model, x, y)

    def inside():
        with torch.autocast("cpu", torch.bfloat16):
            return closure()

    if around:
        with torch.autocast("cpu", torch.bfloat16):
            h, _ = both(closure, model.parameters())
    else:
        h, _ = both(inside, model.parameters())
    assert cosine(h, both(exact, model.parameters())[1]) > 0.97


# --- random numbers


def test_dropout_is_replayed():
    model = nn.Sequential(mlp(width=20), nn.Dropout(0.5))
    x, y = next(batches())
    h, exact = both(regression(model, x, y), model.parameters())
    assert cosine(h, exact) > 0.999


def test_generators_are_left_as_after_one_evaluation():
    model = nn.Sequential(mlp(), nn.Dropout(0.5))
    x, y = next(batches())
    evaluation = Evaluation(regression(model, x, y), list(model.parameters()), None)
    torch.manual_seed(1)
    evaluation.first(None)
    after = torch.get_rng_state()
    evaluation.difference(probes(model.parameters()))
    assert torch.equal(torch.get_rng_state(), after)


# --- what is restored


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_weights_are_restored_bitwise(dtype):
    """Adding and subtracting εv would change bfloat16 weights of 1e-3 by 96 %."""
    p = (1e-3 * torch.randn(1000, generator=torch.Generator().manual_seed(0))).to(dtype).requires_grad_()
    before = p.detach().clone()
    opt = PSGD([p], Diagonal(), lr=0.0, curvature=finite_difference, precond_prob=1.0)
    for _ in range(3):
        opt.step(lambda: p.square().sum())
    assert same(p.detach(), before)


def raising(model, x, y, at):
    calls = []

    def closure():
        calls.append(1)
        if len(calls) == at:
            model[0].weight.grad = None
            raise KeyError("the data is gone")
        return regression(model, x, y)()

    return closure


def test_everything_is_restored_where_the_second_evaluation_raises():
    model = nn.Sequential(*mlp(), nn.BatchNorm1d(3), nn.Dropout(0.5))
    opt = PSGD(model.parameters(), lra(2), curvature=finite_difference, precond_prob=1.0, model=model)
    train(opt, model, 3)
    x, y = next(batches())
    torch.manual_seed(3)
    regression(model, x, y)()  # advances BatchNorm and the generator as the first evaluation will
    after, buffers = torch.get_rng_state(), [b.clone() for b in model.buffers()]
    for b, old in zip(model.buffers(), buffers, strict=True):
        b.copy_(old)
    torch.manual_seed(3)
    before = snapshot(opt)
    with pytest.raises(KeyError, match="the data is gone"):
        opt.step(raising(model, x, y, at=2))
    assert same(snapshot(opt), before)
    assert torch.equal(torch.get_rng_state(), after)
    assert all(p.grad is not None for p in model.parameters())
    train(opt, model, 2)


def test_nothing_changes_where_the_first_evaluation_raises():
    model = mlp()
    opt = PSGD(model.parameters(), lra(2), curvature=finite_difference, precond_prob=1.0)
    train(opt, model, 3)
    before = snapshot(opt)
    with pytest.raises(KeyError):
        opt.step(raising(model, *next(batches()), at=1))
    assert same(snapshot(opt), before)


def test_batch_norm_advances_once_with_the_model():
    model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))
    opt = PSGD(model.parameters(), lra(2), curvature=finite_difference, precond_prob=1.0, model=model, lr=0.0)
    reference = nn.BatchNorm1d(3)
    for _, (x, y) in zip(range(5), batches(), strict=False):
        reference(model[0](x))
        opt.step(regression(model, x, y))
    assert model[1].num_batches_tracked == 5
    torch.testing.assert_close(model[1].running_mean, reference.running_mean)
    torch.testing.assert_close(model[1].running_var, reference.running_var)


# --- prior gradients


def closures(model, x, y, opt):
    """Return the closures that people write; each of them adds to or replaces the gradient."""

    def returns():
        return regression(model, x, y)()

    def zeroes_and_returns():
        opt.zero_grad()
        return regression(model, x, y)()

    def zeroes_in_place():
        opt.zero_grad(set_to_none=False)
        loss = regression(model, x, y)()
        loss.backward()
        return loss

    def backward():
        opt.zero_grad()
        loss = regression(model, x, y)()
        loss.backward()
        return loss

    def detached():
        opt.zero_grad()
        loss = regression(model, x, y)()
        loss.backward()
        return loss.detach().clone()

    def number():
        opt.zero_grad()
        loss = regression(model, x, y)()
        loss.backward()
        return loss.item()

    def silent():
        opt.zero_grad()
        regression(model, x, y)().backward()

    def pair():
        return regression(model, x, y)(), {"accuracy": 1.0}

    def by_function():
        opt.zero_grad()
        loss = regression(model, x, y)()
        torch.autograd.backward([loss], grad_tensors=[torch.ones(())])
        return loss

    return {f.__name__: f for f in locals().values() if callable(f) and f is not model}


NAMES = list(closures(None, None, None, None))


@pytest.mark.parametrize("prob", [1.0, 0.3], ids=["every step", "some steps"])
@pytest.mark.parametrize("curvature", [hessian, finite_difference], ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_every_kind_of_closure_makes_the_same_steps(name, curvature, prob):
    def run(name):
        model = mlp(torch.float64)
        opt = PSGD(model.parameters(), lra(2), curvature=curvature, precond_prob=prob)
        for _, (x, y) in zip(range(6), batches(torch.float64), strict=False):
            out = opt.step(closures(model, x, y, opt)[name])
        return list(model.parameters()), out, opt.source

    params, out, source = run(name)
    expected, loss, _ = run("returns")
    assert same(params, expected) and source == curvature
    assert {"silent": out is None, "pair": isinstance(out, tuple)}.get(name, out == loss)


def test_a_closure_that_adds_to_earlier_gradients():
    """As the last micro-batch of an accumulation: g is the sum, h is that of the closure."""
    model, alone, stream = mlp(torch.float64), mlp(torch.float64), batches(torch.float64)
    (x0, y0), (x1, y1) = next(stream), next(stream)
    regression(model, x0, y0)().backward()

    def adds():
        loss = regression(model, x1, y1)()
        loss.backward()
        return loss

    h, exact = both(adds, model.parameters(), exact=regression(model, x1, y1))
    assert cosine(h, exact) > 0.999
    (regression(alone, x0, y0)() + regression(alone, x1, y1)()).backward()
    torch.testing.assert_close(flat(p.grad for p in model.parameters()), flat(p.grad for p in alone.parameters()))


def test_the_gradient_object_of_the_user_stays():
    model = mlp()
    x, y = next(batches())
    seen = []

    def closure():
        opt.zero_grad()
        loss = regression(model, x, y)()
        loss.backward()
        seen.append(model[0].weight.grad)
        return loss

    opt = PSGD(model.parameters(), lra(2), curvature=finite_difference, precond_prob=1.0)
    opt.step(closure)
    assert len(seen) == 2 and model[0].weight.grad is seen[0]
    twin = mlp()
    regression(twin, x, y)().backward()
    assert torch.equal(seen[0], twin[0].weight.grad)


def test_clipping_inside_the_closure_does_not_spoil_h():
    model = mlp(torch.float64)
    x, y = next(batches(torch.float64))

    def clipped():
        for p in model.parameters():
            p.grad = None
        loss = regression(model, x, y)()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
        return loss

    h, exact = both(clipped, model.parameters(), exact=regression(model, x, y))
    torch.testing.assert_close(h, exact, rtol=1e-3, atol=1e-5)


# --- no information


@pytest.mark.parametrize("curvature", [hessian, finite_difference], ids=str)
def test_a_closure_that_returns_none_updates_nothing(curvature):
    model = mlp()
    opt = PSGD(model.parameters(), lra(2), curvature=curvature, precond_prob=1.0)
    train(opt, model, 3)
    opt.zero_grad()
    before = snapshot(opt)
    assert opt.step(lambda: None) is None
    assert same(snapshot(opt), before)


@pytest.mark.parametrize("curvature", [hessian, finite_difference], ids=str)
def test_a_loss_without_curvature_moves_the_parameters_and_not_q(curvature):
    p = torch.ones(3, requires_grad=True)
    opt = PSGD([p], Diagonal(), curvature=curvature, precond_prob=1.0)
    opt.step(lambda: p.square().sum())
    q = opt.state[p]["q"]["d"].clone()
    for _ in range(20):
        opt.step(lambda: p.sum())
    assert same(opt.state[p]["q"]["d"], q) and (p < 0.99).all()


def test_a_second_evaluation_without_backward_gives_no_information():
    model = mlp()
    opt = PSGD(model.parameters(), lra(2), curvature=finite_difference, precond_prob=1.0)
    train(opt, model, 2)
    before = [s["q"]["1"]["d"].clone() for s in opt.state.values()]
    calls = []
    x, y = next(batches())

    def once():
        calls.append(1)
        return regression(model, x, y)() if len(calls) == 1 else None

    opt.step(once)
    assert same([s["q"]["1"]["d"] for s in opt.state.values()], before)
