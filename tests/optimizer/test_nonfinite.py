"""A loss, gradient or product that is not finite changes nothing, is counted, and training goes on."""

import copy

import pytest
import torch
from toys import batches, mlp, regression, same, snapshot, train

from psgd import PSGD, Dense, XMat, affine, automatic, finite_difference, hessian, lra, whiten

BAD = [float("nan"), float("inf"), float("-inf")]
GROUPS = {"lra": lra(2), "xmat": XMat(), "affine": affine, "dense": Dense()}
each_group = pytest.mark.parametrize("group", GROUPS.values(), ids=GROUPS)
each_bad = pytest.mark.parametrize("bad", BAD, ids=str)


def trained(group, **options):
    model = mlp()
    opt = PSGD(model.parameters(), group, lr=0.1, weight_decay=0.1, precond_prob=1.0, **options)
    train(opt, model, 12)
    return model, opt


def without_counter(opt):
    """Return a snapshot, but for the count of skipped steps."""
    kept = {p: s.pop("skipped") for p, s in opt.state.items() if "skipped" in s}
    found = snapshot(opt)
    for p, count in kept.items():
        opt.state[p]["skipped"] = count
    return found


class Spoiled(torch.autograd.Function):
    """The identity, whose second derivative alone is not finite."""

    @staticmethod
    def forward(ctx, x, bad):
        ctx.bad = bad
        return x.clone()

    @staticmethod
    def backward(ctx, g):
        return SpoiledBackward.apply(g, ctx.bad), None


class SpoiledBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, g, bad):
        ctx.bad = bad
        return g.clone()

    @staticmethod
    def backward(ctx, v):
        return v * ctx.bad, None


def spoil(where, model, bad):
    """Return a closure with something in it that is not finite."""
    x, y = next(batches())
    good = regression(model, x, y)
    if where == "loss":
        return lambda: good() + bad
    if where == "gradient":
        return lambda: good() + (model[0].weight * 0).sum().sqrt()  # 0/0 in the derivative, 0 in the value
    if where == "product":
        return lambda: good() + Spoiled.apply(model[2].bias, bad).square().sum()
    if where == "one entry":
        weights = torch.ones(3)
        weights[1] = bad
        return lambda: (good(), (weights * model[2].bias.detach()).sum())[0] + (weights * model[2].bias).sum() * 1e-3
    raise AssertionError


@each_group
@each_bad
@pytest.mark.parametrize("where", ["loss", "gradient", "product", "one entry"])
def test_nothing_changes_and_it_is_counted(where, bad, group):
    model, opt = trained(group, curvature=hessian)
    before = without_counter(opt)
    for t in range(3):
        opt.step(spoil(where, model, bad))
        assert same(without_counter(opt), before)
        assert opt.skipped == t + 1


@pytest.mark.parametrize("curvature", [automatic, finite_difference, whiten], ids=str)
@each_bad
def test_nothing_changes_for_every_curvature(bad, curvature):
    model, opt = trained(lra(2), curvature=curvature)
    before = without_counter(opt)
    opt.step(spoil("loss", model, bad))
    assert same(without_counter(opt), before) and opt.skipped == 1


@pytest.mark.parametrize("prob", [0.0, 1.0])
@each_bad
def test_nothing_changes_in_a_plain_loop(bad, prob):
    model = mlp()
    opt = PSGD(model.parameters(), lra(2), weight_decay=0.1, precond_prob=prob, curvature=whiten)
    train(opt, model, 3, closure=False)
    before = without_counter(opt)
    opt.zero_grad()
    spoil("loss", model, bad)().backward()
    model[0].weight.grad[0, 0] = bad
    opt.step()
    assert same(without_counter(opt), before) and opt.skipped == 1


@pytest.mark.parametrize("curvature", [automatic, hessian, finite_difference, whiten], ids=str)
def test_the_very_first_step_may_be_skipped(curvature):
    model, reference = mlp(), mlp()
    opt = PSGD(model.parameters(), lra(2), precond_prob=1.0, curvature=curvature)
    opt.step(spoil("loss", model, float("nan")))
    assert same(list(model.parameters()), list(reference.parameters()))
    losses = train(opt, model, 30)
    assert opt.skipped == 1 and all(map(torch.isfinite, torch.tensor(losses)))
    assert opt.source == (hessian if curvature == automatic else curvature)


def test_training_goes_on_as_if_the_step_had_not_been():
    """Up to the probes, which are a function of the step."""
    model, opt = trained(lra(2))
    twin, other = copy.deepcopy((model, opt))
    opt.step(spoil("loss", model, float("nan")))
    for pg in other.param_groups:
        pg["iteration"] += 1
        pg["updates"] += 1
    train(opt, model, 5)
    train(other, twin, 5)
    assert same(without_counter(opt), without_counter(other))


def test_training_goes_on_to_a_lower_loss_with_every_tenth_step_spoiled():
    model = mlp()
    opt = PSGD(model.parameters(), lr=0.05)
    losses = []
    for t, (x, y) in zip(range(200), batches(), strict=False):
        good = regression(model, x, y)
        losses.append(opt.step(lambda t=t, good=good: good() * (float("nan") if t % 10 == 9 else 1)).item())
    seen = [loss for loss in losses if loss == loss]
    assert opt.skipped == 20 and sum(seen[-20:]) < 0.6 * sum(seen[:20])


@pytest.mark.parametrize("curvature", [hessian, whiten], ids=str)
def test_a_number_that_is_not_finite_as_the_loss(curvature):
    model, opt = trained(lra(2), curvature=curvature)
    before = without_counter(opt)
    x, y = next(batches())

    def closure():
        opt.zero_grad()
        regression(model, x, y)().backward()
        return float("nan")

    opt.step(closure)
    assert same(without_counter(opt), before) and opt.skipped == 1


def test_a_skip_is_counted_where_the_first_parameter_has_no_gradient():
    a, b = torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True)
    opt = PSGD([a, b], affine)
    opt.step(lambda: a.sum() + b.sum())
    opt.zero_grad()
    b.grad = torch.full((2,), float("nan"))
    opt.step()
    assert opt.skipped == 1


def test_a_singular_q_does_not_spoil_the_state_for_ever():
    model, opt = trained(Dense())
    for p in model.parameters():
        opt.state[p]["q"]["Q"].zero_()
    train(opt, model, 3)
    assert all(opt.state[p]["q"]["Q"].isfinite().all() and p.isfinite().all() for p in model.parameters())


def test_large_doubles_are_finite():
    p = torch.ones(2, dtype=torch.float64, requires_grad=True)
    opt = PSGD([p], XMat(), precond_prob=1.0)
    opt.step(lambda: 1e200 * p.square().sum())
    assert opt.skipped == 0 and (p < 1).all()


@pytest.mark.parametrize("scale", [1e-30, 1e-18, 1e15, 1e30])
@each_group
def test_losses_of_extreme_size_train_in_float32(scale, group):
    model = mlp()
    opt = PSGD(model.parameters(), group, lr=0.05, precond_prob=1.0)
    losses = []
    for _, (x, y) in zip(range(60), batches(), strict=False):
        loss = regression(model, x, y)
        losses.append(opt.step(lambda loss=loss: loss() * scale).item() / scale)
    assert opt.skipped == 0 and sum(losses[-10:]) < 0.9 * sum(losses[:10])


# --- GradScaler


def test_a_grad_scaler_skips_and_counts_nothing_and_training_goes_on():
    model = mlp()
    opt = PSGD(model.parameters(), lr=0.05, curvature=whiten)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127, growth_interval=10_000)
    losses = []
    for _, (x, y) in zip(range(150), batches(), strict=False):
        opt.zero_grad()
        loss = 1000 * regression(model, x, y)()
        scaler.scale(loss).backward()
        scaler.step(opt)
        scaler.update()
        losses.append(loss.item())
    assert scaler.get_scale() < 2.0**127
    assert opt.skipped == 0 and sum(losses[-20:]) < 0.7 * sum(losses[:20])


def test_a_grad_scaler_changes_nothing_but_the_scale():
    one, two = mlp(), mlp()
    plain, scaled = (PSGD(m.parameters(), lra(2), precond_prob=1.0) for m in (one, two))
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for _, (x, y) in zip(range(10), batches(), strict=False):
        with plain.curvature():
            regression(one, x, y)().backward()
        plain.step()
        plain.zero_grad()
        with scaled.curvature(scaler):
            scaler.scale(regression(two, x, y)()).backward()
        scaler.step(scaled)
        scaler.update()
        scaled.zero_grad()
    assert plain.source == scaled.source == hessian
    for a, b in zip(one.parameters(), two.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-5)


def test_a_grad_scaler_and_clipping_by_the_user():
    model = mlp()
    opt = PSGD(model.parameters(), lr=1.0, momentum=0.0, precond_prob=0.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=4096.0)
    before = [p.detach().clone() for p in model.parameters()]
    x, y = next(batches())
    scaler.scale(regression(model, x, y)()).backward()
    scaler.unscale_(opt)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01)
    scaler.step(opt)
    moved = torch.cat([(a - b).flatten() for a, b in zip(before, model.parameters(), strict=True)])
    assert moved.norm().item() == pytest.approx(0.01, rel=1e-3)
