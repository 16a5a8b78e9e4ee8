"""The four ways in: the same pairs, the same steps; what each does where it cannot work."""

import warnings

import pytest
import torch
from situations import EXACT, F32, FINITE_DIFFERENCE, Recorder, error, net, reference, regression
from torch.nn import functional as F

import psgd
from psgd import PSGD


def returns(opt, loss):
    opt.step(loss)


def calls_backward(opt, loss):
    def closure():
        opt.zero_grad()
        value = loss()
        value.backward()
        return value

    opt.step(closure)


def calls_autograd(opt, loss):
    def closure():
        opt.zero_grad()
        value = loss()
        torch.autograd.backward(value)
        return value.item()

    opt.step(closure)


def context(opt, loss):
    opt.zero_grad()
    with opt.curvature():
        loss().backward()
    opt.step()


def context_around_the_step(opt, loss):
    with opt.curvature():
        opt.zero_grad()
        loss().backward()
        opt.step()


def context_and_a_closure_that_does_nothing(opt, loss):
    opt.zero_grad()
    with opt.curvature():
        loss().backward()
    opt.step(lambda: None)


def plain(opt, loss):
    opt.zero_grad()
    loss().backward()
    opt.step()


WAYS = [
    calls_backward,
    calls_autograd,
    context,
    context_around_the_step,
    context_and_a_closure_that_does_nothing,
]


def run(way, situation=EXACT["mlp"], steps=20, **options):
    model, loss = situation(F32)
    opt = Recorder(model.parameters(), lr=0.05, precond_prob=0.5, **options)
    for _ in range(steps):
        way(opt, loss)
    return [p.detach() for p in model.parameters()], opt


@pytest.mark.parametrize("curvature", [psgd.automatic, psgd.hessian])
@pytest.mark.parametrize("way", WAYS)
def test_every_way_in_makes_the_same_steps(way, curvature):
    expected, _ = run(returns, curvature=curvature)
    params, opt = run(way, curvature=curvature)
    assert opt.source is psgd.hessian
    assert all(p.equal(e) for p, e in zip(params, expected, strict=True))


def test_finite_differences_take_the_same_steps_from_either_closure():
    expected, _ = run(returns, curvature=psgd.finite_difference)
    params, opt = run(calls_backward, curvature=psgd.finite_difference)
    assert opt.source is psgd.finite_difference
    assert all(p.equal(e) for p, e in zip(params, expected, strict=True))


def test_newton_differs_from_whitening():
    newton, _ = run(context)
    whitened, opt = run(plain)
    assert opt.source is psgd.whiten
    assert not any(torch.allclose(a, b) for a, b in zip(newton, whitened, strict=True))


@pytest.mark.parametrize("way", [plain, lambda opt, loss: opt.step(lambda: None)])
@pytest.mark.parametrize("curvature", [psgd.hessian, psgd.finite_difference])
def test_a_plain_step_whitens_and_names_the_other_ways_once(way, curvature):
    model, loss = EXACT["mlp"](F32)
    opt = PSGD(model.parameters(), curvature=curvature)
    with pytest.warns(UserWarning, match="whitening") as seen:
        for _ in range(3):
            loss().backward()
            way(opt, loss)
    assert len(seen) == 1
    for other in ("closure that returns the loss", r"calls backward()", "with opt.curvature()"):
        assert other in str(seen[0].message)
    assert seen[0].filename == __file__
    assert opt.source is psgd.whiten
    assert opt.param_groups[0]["updates"] == 3


def test_automatic_whitens_in_a_plain_loop_without_a_word():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        _, opt = run(plain)
    assert opt.source is psgd.whiten


def test_the_exact_product_is_verified_by_one_more_evaluation_in_all():
    model, loss = EXACT["mlp"](F32)
    opt, calls = PSGD(model.parameters()), []
    for _ in range(10):
        opt.step(lambda: calls.append(1) or loss())
    assert opt.source is psgd.hessian
    assert len(calls) == 11


def test_steps_that_are_not_due_cost_one_plain_gradient():
    model, loss = EXACT["mlp"](F32)
    opt, calls = PSGD(model.parameters(), precond_prob=0.25, curvature=psgd.finite_difference), []
    for _ in range(20):
        opt.step(lambda: calls.append(1) or loss())
    assert len(calls) == 20 + opt.param_groups[0]["updates"] == 25


def test_a_model_that_loses_its_second_derivatives_falls_back():
    model, loss = EXACT["sdpa math"](F32)
    opt = PSGD(model.parameters())
    opt.step(loss)
    assert opt.source is psgd.hessian
    x, y = torch.randn(16, 6), torch.randn(16, 3)
    with pytest.warns(UserWarning, match="finite differences"):
        opt.step(lambda: F.mse_loss(model(x), y))
    assert opt.source is psgd.finite_difference


def test_a_closure_that_draws_its_own_batch_keeps_the_exact_product():
    model = net()
    opt = PSGD(model.parameters())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        batches = iter(torch.randn(200, 16, 6) * 3)
        for _ in range(10):
            opt.step(lambda: model(next(batches)).square().mean())
    assert opt.source is psgd.hessian


def test_a_closure_that_draws_its_own_batch_gets_whitening_where_exact_products_fail():
    model, _ = FINITE_DIFFERENCE["sdpa flash"][0](F32)
    opt, batches = PSGD(model.parameters()), iter(torch.randn(200, 16, 6) * 3)
    with pytest.warns(UserWarning, match="whitening.*another gradient when it is called again") as seen:
        for _ in range(10):
            opt.step(lambda: model(next(batches)).square().mean())
    assert len(seen) == 1
    assert opt.source is psgd.whiten


# --- accumulation


def micro_batches(opt, parts):
    opt.zero_grad()
    with opt.curvature():
        for part in parts:
            part().backward()
    opt.step()


def micro_batches_one_by_one(opt, parts):
    opt.zero_grad()
    for part in parts:
        with opt.curvature():
            part().backward()
    opt.step()


def micro_batches_the_last_in_a_closure(opt, parts):
    opt.zero_grad(set_to_none=False)
    for part in parts[:-1]:
        with opt.curvature():
            part().backward()

    def closure():
        value = parts[-1]()
        with opt.curvature():  # as a callback would: already watched
            value.backward()
        return value

    opt.step(closure)


@pytest.mark.parametrize("way", [micro_batches, micro_batches_one_by_one, micro_batches_the_last_in_a_closure])
@pytest.mark.parametrize("curvature", [psgd.automatic, psgd.hessian])
def test_products_of_micro_batches_add_up_with_one_probe(way, curvature):
    torch.manual_seed(0)
    model, twin, x, y = net(), net(), torch.randn(32, 6), torch.randn(32, 3)
    twin.load_state_dict(model.state_dict())
    opt, one = (Recorder(m.parameters(), curvature=curvature) for m in (model, twin))
    pieces = list(zip(x.chunk(4), y.chunk(4), strict=True))
    parts = [lambda a=a, b=b: F.mse_loss(model(a), b) / 4 for a, b in pieces]
    for _ in range(5):
        way(opt, parts)
        one.step(lambda: F.mse_loss(twin(x), y))
    for (_, v, h), (_, w, k) in zip(opt.pairs, one.pairs, strict=True):
        assert all(a.equal(b) for a, b in zip(v.values(), w.values(), strict=True))
        assert error(h.values(), [t.double() for t in k.values()]) < 1e-4
    assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(model.parameters(), twin.parameters(), strict=True))


@pytest.mark.parametrize("curvature", [psgd.automatic, psgd.hessian, psgd.finite_difference])
def test_a_closure_that_holds_only_the_last_micro_batch_says_so_once(curvature):
    """Its product would be too small, and the step too long."""
    model, loss = EXACT["mlp"](F32)
    opt = PSGD(model.parameters(), curvature=curvature)

    def closure():
        value = loss() / 2
        value.backward()
        return value

    with pytest.warns(UserWarning, match="accumulated before") as seen:
        for _ in range(4):
            opt.zero_grad()
            (loss() / 2).backward()
            opt.step(closure)
    assert len(seen) == 1
    assert opt.source is (psgd.whiten if curvature is psgd.automatic else curvature)


def test_finite_differences_leave_out_what_was_accumulated_before():
    model, loss = EXACT["mlp"](F32)
    opt = Recorder(model.parameters(), curvature=psgd.finite_difference)
    with pytest.warns(UserWarning, match="accumulated before"):
        loss().backward()
        before = [p.grad.clone() for p in model.parameters()]
        opt.step(lambda: loss().backward())
    theta, v, h = opt.pairs[0]
    assert error(h.values(), reference(EXACT["mlp"], theta, v)) < 1e-2
    assert all(torch.allclose(p.grad, 2 * g) for p, g in zip(model.parameters(), before, strict=True))


# --- the GradScaler


@pytest.mark.parametrize("curvature", [psgd.automatic, psgd.hessian])
def test_the_scale_of_a_grad_scaler_is_divided_out(curvature):
    model, loss = EXACT["mlp"](F32)
    twin, twin_loss = EXACT["mlp"](F32)
    opt, plain = (Recorder(m.parameters(), curvature=curvature) for m in (model, twin))
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)
    for _ in range(6):
        opt.zero_grad()
        with opt.curvature(scaler=scaler):
            scaler.scale(loss()).backward()
        scaler.step(opt)
        scaler.update()
        plain.step(twin_loss)
    assert scaler.get_scale() == 2.0**13
    assert all(torch.allclose(a, b, rtol=1e-4) for a, b in zip(model.parameters(), twin.parameters(), strict=True))


def test_products_of_a_step_that_the_grad_scaler_skipped_are_forgotten():
    model, loss = EXACT["mlp"](F32)
    opt = Recorder(model.parameters(), curvature=psgd.hessian)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    for factor in (float("inf"), 1.0):
        opt.zero_grad()
        with opt.curvature(scaler=scaler):
            scaler.scale(loss() * factor).backward()
        scaler.step(opt)
        scaler.update()
    assert len(opt.pairs) == 1
    assert opt.skipped == 0
    assert all(t.isfinite().all() for t in opt.pairs[0][2].values())


# --- what must not get in the way


def test_an_error_in_the_closure_or_the_block_leaves_the_optimizer_usable():
    expected, _ = run(calls_backward, steps=4)
    model, loss = EXACT["mlp"](F32)
    opt = PSGD(model.parameters(), lr=0.05, precond_prob=0.5)

    def fails():
        raise KeyError

    for _ in range(4):
        with pytest.raises(KeyError):
            opt.step(fails)
        opt.zero_grad()
        with pytest.raises(KeyError), opt.curvature():
            loss().backward()
            raise KeyError
        calls_backward(opt, loss)
    assert all(p.equal(e) for p, e in zip(model.parameters(), expected, strict=True))


def test_a_failing_second_evaluation_restores_parameters_gradients_and_random_numbers():
    model, loss = EXACT["mlp"](F32)
    before = [p.detach().clone() for p in model.parameters()]
    calls = []

    def once():
        torch.rand(3 - len(calls))  # the first draws more than the second
        calls.append(torch.get_rng_state())
        if len(calls) == 2:
            raise KeyError
        return loss()

    opt = PSGD(model.parameters(), curvature=psgd.finite_difference)
    with pytest.raises(KeyError):
        opt.step(once)
    assert all(p.equal(b) for p, b in zip(model.parameters(), before, strict=True))
    assert all(p.grad is not None for p in model.parameters())
    assert calls[0].equal(torch.get_rng_state())
    assert not calls[0].equal(calls[1])


def test_clipping_inside_the_closure_does_not_clip_the_difference():
    situation = EXACT["mlp"]
    model, loss = situation(F32)
    opt = Recorder(model.parameters(), curvature=psgd.finite_difference)

    def closure():
        opt.zero_grad()
        value = loss()
        value.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
        return value

    opt.step(closure)
    _, free = run(returns, steps=1, curvature=psgd.finite_difference)
    assert error(opt.pairs[0][2].values(), [t.double() for t in free.pairs[0][2].values()]) < 1e-6
    assert torch.nn.utils.get_total_norm([p.grad for p in model.parameters()]) < 1.1e-3


def test_a_loss_that_reaches_no_parameter_decides_nothing():
    model, loss = EXACT["mlp"](F32)
    other = torch.ones(3, requires_grad=True)
    opt = PSGD(model.parameters())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        opt.step(lambda: other.sum())
        assert opt.source is None
        with opt.curvature():
            other.sum().backward()
            loss().backward()
        opt.step()
    assert opt.source is psgd.hessian


@pytest.mark.parametrize("curvature", [psgd.automatic, psgd.hessian, psgd.finite_difference])
def test_a_loss_without_curvature_leaves_the_preconditioner_alone(curvature):
    """A zero product would make it grow for ever."""
    w = torch.zeros(4, requires_grad=True)
    opt = PSGD([w], psgd.Diagonal(), curvature=curvature, momentum=0.0)
    for _ in range(30):
        opt.step(lambda: w.sum())
    assert torch.equal(opt.state[w]["q"]["d"], torch.ones(4))
    assert torch.allclose(w, torch.full((4,), -0.3))


def test_two_optimizers_watch_the_same_backward_pass():
    model, loss = regression(net)(F32)
    first, second = PSGD(model[0].parameters(), lr=0.1), PSGD(model[2].parameters(), lr=0.1)
    before = loss().item()
    for _ in range(10):
        model.zero_grad()
        with first.curvature(), second.curvature():
            loss().backward()
        first.step()
        second.step()
    assert first.source is second.source is psgd.hessian
    assert loss() < before


def test_a_network_that_starts_on_its_kinks_gets_the_exact_product_as_soon_as_it_is_off_them():
    """Blank inputs and zero biases: half of the ReLUs start at zero, where every difference crosses them."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.ReLU(), torch.nn.Linear(32, 1))
    torch.nn.init.zeros_(model[0].bias)
    x, y = torch.randn(64, 8) * (torch.arange(64) < 8)[:, None], torch.randn(64, 1)
    opt = PSGD(model.parameters(), lr=0.1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        opt.step(lambda: F.mse_loss(model(x), y))
        assert opt.source is psgd.finite_difference  # for this step
        for _ in range(3):
            opt.step(lambda: F.mse_loss(model(x), y))
    assert opt.source is psgd.hessian


class HalfSquare(torch.autograd.Function):
    """x²/2, whose second derivative fails from the second step on."""

    fails = False

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.square() / 2

    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        return Product.apply(g, x)


class Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx, g, x):
        ctx.save_for_backward(g, x)
        return g * x

    @staticmethod
    def backward(ctx, c):
        if HalfSquare.fails:
            raise RuntimeError("no second derivative any more")
        g, x = ctx.saved_tensors
        return c * x, c * g


@pytest.mark.filterwarnings("ignore:PSGD uses finite differences")
def test_a_product_that_fails_halfway_leaves_a_right_gradient(monkeypatch):
    """Taking it frees the graph as it goes; the loss is then evaluated again, with the same dropout."""
    x = torch.tensor([1.0, 2.0, 3.0], requires_grad=True)
    opt = PSGD([x], lr=0.0, precond_prob=1.0)

    def loss():
        return HalfSquare.apply(F.dropout(x.exp(), 0.5)).sum()

    for fails in (False, True):
        monkeypatch.setattr(HalfSquare, "fails", fails)
        state = torch.get_rng_state()
        opt.step(loss)
        after = torch.get_rng_state()
        torch.set_rng_state(state)
        expected = torch.autograd.grad(loss(), x)[0]
        assert torch.equal(after, torch.get_rng_state())
        torch.testing.assert_close(x.grad, expected)


def test_a_loss_that_is_kept_keeps_no_graph():
    x = torch.ones(10, requires_grad=True)
    opt = PSGD([x], lr=0.0, curvature=psgd.hessian, precond_prob=1.0)
    loss = opt.step(lambda: x.exp().sum())
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()


def test_gradients_of_others_and_hooks_are_not_forgotten():
    """A backward pass does more than a gradient where the loss reaches other parameters, or somebody listens."""
    x, other = (torch.ones(3, requires_grad=True) for _ in range(2))
    opt = PSGD([x], lr=0.0, curvature=psgd.hessian, precond_prob=1.0)
    opt.step(lambda: (x.square() * other).sum())
    assert torch.equal(other.grad, torch.ones(3))
    heard = []
    x.register_post_accumulate_grad_hook(heard.append)
    opt.step(lambda: x.pow(3).sum())
    assert len(heard) == 1


def test_gradients_are_tensors_of_their_own():
    """Autograd may give one tensor for two parameters, or one number for all entries; .grad never does."""
    x, y = (torch.ones(3, requires_grad=True) for _ in range(2))
    opt = PSGD([x, y], lr=0.0, curvature=psgd.hessian, precond_prob=1.0)
    opt.step(lambda: (x + y).sum() + x.square().sum() * 0)
    x.grad.zero_()
    y.grad[0] = 5
    assert y.grad.tolist() == [5, 1, 1]
