"""The rule for whole models, and what the optimizer makes of it."""

import copy
import functools
import io
import itertools
import math

import pytest
import torch
from torch import nn

import psgd
from psgd import PSGD, Dense, Diagonal, Direct, Identity, Positive, Procrustes, Quadratic, Triangular, kron, plan
from psgd.groups.inverse_free import Motion
from psgd.kron import affine_layers
from psgd.points import leaves

# --- which factor for which axis


@pytest.mark.parametrize(
    ("shape", "dense"),
    [
        ((), ""),
        ((1,), ""),
        ((1, 1, 1), ""),
        ((768,), ""),
        ((3,), ""),
        ((1, 4), ""),
        ((128, 128), "01"),
        ((512, 128), "01"),
        ((128, 512), "01"),
        ((520, 128), "1"),
        ((50257, 768), "1"),
        ((64, 3, 7, 7), "012"),
        ((512, 512, 3, 3), "012"),
        ((12, 64, 768), "012"),
        ((3, 12, 64, 768), "0123"),
        ((2, 12, 12, 64, 768), "01234"),
        ((768, 3, 16, 16), "012"),
        ((8, 4, 3, 3, 3), "012"),
        ((9000, 9000), ""),
        ((1, 300, 1), ""),
    ],
    ids=str,
)
def test_the_default_choice(shape, dense):
    group = kron()(shape)
    names = "".join(str(i) for i, part in enumerate(group.parts) if isinstance(part, Positive))
    assert names == dense
    rest = [part for i, part in enumerate(group.parts) if str(i) not in dense]
    assert math.prod(group.shape) == math.prod(shape)
    sizes = [n for i, n in enumerate(group.shape) if str(i) not in dense]
    if any(n > 1 for n in shape):
        assert all(part == (Diagonal() if n > 1 else Identity()) for part, n in zip(rest, sizes, strict=True))
    else:
        assert group.parts[0] == Diagonal()


def test_caps_and_memory():
    assert kron(max_size=100).dense((128, 64)) == {1}
    assert kron(max_skew=8.0, memory=10.0).dense((512, 128)) == {0, 1}
    assert kron(max_skew=8.0, memory=2.0).dense((512, 128)) == {1}
    assert kron(memory=4.2).dense((512, 128)) == {1}  # the shortest first, and both would be 4.25 times the entries
    assert kron(memory=0.0).dense((128, 128)) == set()
    assert kron(Triangular())((4, 4)).parts == (Triangular(), Triangular())
    for motion, part in ((Direct(), Positive()), (Quadratic(), Dense()), (Procrustes(), Dense())):
        assert kron(motion)((4, 4)).motion == motion and kron(motion)((4, 4)).parts == (part, part)
    assert kron() == kron(Direct())
    for bad in ({"max_size": -1}, {"max_skew": -0.5}, {"memory": float("nan")}, {"damping": -1.0}):
        with pytest.raises(ValueError, match=next(iter(bad))):
            kron(**bad)
    with pytest.raises(ValueError, match=r"Direct\(\), Quadratic\(\), Procrustes\(\) or Triangular\(\), got Dense"):
        kron(Dense())
    for factor in (Triangular(), Direct()):
        with pytest.raises(
            ValueError, match=r"Quadratic\(\) and Procrustes\(\), which move Q, got torch.bfloat16 for "
        ):
            kron(factor, products=torch.bfloat16)
    with pytest.raises(ValueError, match=r"of the range of float32, as torch.bfloat16, got torch.float16"):
        kron(Quadratic(), products=torch.float16)


@pytest.mark.parametrize("curvature", [psgd.whiten_momentum, psgd.hessian], ids=str)
def test_training_with_coarse_products(curvature):
    losses = []
    for products in (None, torch.bfloat16):
        torch.manual_seed(0)
        x, model = torch.randn(64, 12), nn.Sequential(nn.Linear(12, 16), nn.Tanh(), nn.Linear(16, 3))
        options = {"lr": 0.03} if curvature == psgd.whiten_momentum else {"lr": 0.3}
        opt = PSGD(model.named_parameters(), kron(Quadratic(), products=products), curvature=curvature, **options)
        steps = (opt.step(lambda model=model, x=x: (model(x) - x[:, :3].sin()).square().mean()) for _ in range(150))
        start, *_, end = (loss.item() for loss in steps)
        losses.append(end / start)
        assert all(t.dtype == torch.float32 for s in opt.state.values() for f in s["q"].values() for t in f.values())
    assert losses[0] != losses[1] and max(losses) < 0.03


def gpt2_small():
    """Return the shapes of GPT-2 small: 124 million parameters."""
    matrices = [(2304, 768), (768, 768), (3072, 768), (768, 3072)]
    layer = [(768,)] * 4 + [shape for m in matrices for shape in (m, m[:1])]
    return [(50257, 768), (1024, 768), *layer * 12, (768,), (768,)]


def resnet18():
    """Return the shapes of ResNet18 with ten classes: 11 million parameters."""
    shapes, width = [(64, 3, 3, 3), (64,), (64,)], 64
    for out in (64, 64, 128, 128, 256, 256, 512, 512):
        shapes += [(out, width, 3, 3), (out,), (out,), (out, out, 3, 3), (out,), (out,)]
        if out != width:
            shapes += [(out, width, 1, 1), (out,), (out,)]
        width = out
    return [*shapes, (10, 512), (10,)]


@pytest.mark.parametrize("shapes", [gpt2_small(), resnet18()], ids=["GPT-2 small", "ResNet18"])
@pytest.mark.parametrize("factor", [Direct(), Procrustes(), Triangular()], ids=str)
def test_the_state_is_within_twice_that_of_adam(shapes, factor):
    params = [nn.Parameter(torch.empty(shape, device="meta")) for shape in shapes]
    costs = plan(params, kron(factor))
    assert costs.adam == 2 * 4 * sum(p.numel() for p in params)
    assert costs.state <= 2 * costs.adam


# --- in the optimizer


def net(seed=0):
    torch.manual_seed(seed)
    hidden = [nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6), nn.Tanh()]
    return nn.Sequential(*hidden, nn.Linear(6, 2))


def loss(model, x):
    return (model(x) - x[:, :2].prod(1, keepdim=True)).square().mean()


def train(model, opt, steps=30, start=0, closure=False):
    for i in range(start, start + steps):
        x = torch.randn(16, 6, generator=torch.Generator().manual_seed(i))
        if closure:
            opt.step(functools.partial(loss, model, x))
        else:
            opt.zero_grad()
            loss(model, x).backward()
            opt.step()
    return [p.detach().clone() for p in model.parameters()]


CURVATURES = [psgd.whiten, psgd.whiten_momentum, psgd.hessian]


@pytest.mark.parametrize("curvature", CURVATURES, ids=str)
@pytest.mark.parametrize("factor", [Direct(), Quadratic(), Procrustes(), Triangular()], ids=str)
def test_tensors_of_one_shape_are_moved_side_by_side_as_they_would_be_alone(factor, curvature):
    """One scope each, by names that differ, against three tensors in one stack."""
    together, alone = net(), net()
    options = dict(lr=0.01, curvature=curvature, precond_prob=1.0)
    first = PSGD(together.parameters(), kron(factor), **options)
    second = PSGD([{"params": [p], "scope": f"{i}"} for i, p in enumerate(alone.parameters())], kron(factor), **options)
    closure = curvature == psgd.hessian
    a, b = train(together, first, closure=closure), train(alone, second, closure=closure)
    assert [len(s.units) for s in first._scopes()] == [3, 3, 1, 1]
    assert [len(s.units) for s in second._scopes()] == [1] * 8
    torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
    for p, q in zip(together.parameters(), alone.parameters(), strict=True):  # and the state reads alike, by parameter
        torch.testing.assert_close(first.state[p]["q"], second.state[q]["q"], rtol=1e-3, atol=1e-5)
        torch.testing.assert_close(first.state[p]["level"], second.state[q]["level"], rtol=1e-3, atol=1e-6)


def test_a_checkpoint_goes_on_bitwise_and_reads_by_parameter():
    model = net()
    opt = PSGD(model.named_parameters(), kron(), lr=0.01, curvature=psgd.whiten_momentum, precond_prob=0.5)
    train(model, opt)
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "opt": opt.state_dict()}, file)
    expected = train(model, opt, start=30)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    second = saved["opt"]["state"][2]["q"]  # of the second weight
    assert {k: sorted(v) for k, v in second.items()} == {"0": ["P", "ell"], "1": ["P", "ell"]}
    assert second["0"]["P"].shape == (6, 6)
    again = net(1)
    again.load_state_dict(saved["model"])
    other = PSGD(again.named_parameters(), kron(), lr=0.01, curvature=psgd.whiten_momentum, precond_prob=0.5)
    other.load_state_dict(saved["opt"])
    assert all(torch.equal(a, b) for a, b in zip(train(again, other, start=30), expected, strict=True))


def test_a_stack_can_be_taken_apart_by_other_options():
    """State is by parameter, so that tensors that were moved together may go on alone."""
    model = net()
    opt = PSGD(model.parameters(), kron(), lr=0.01, curvature=psgd.whiten)
    train(model, opt)
    saved, weights = copy.deepcopy((opt.state_dict(), model.state_dict()))
    expected = train(model, opt, start=30)
    again = net(1)
    again.load_state_dict(weights)
    params = list(again.parameters())
    other = PSGD(params, kron(), lr=0.01, curvature=psgd.whiten)
    other.load_state_dict(saved)
    other.param_groups[0]["params"] = params[:2]
    other.add_param_group({"params": params[2:], "scope": "rest"})
    for key in ("iteration", "updates"):
        other.param_groups[1][key] = other.param_groups[0][key]
    other._runtime.pop("scopes")
    torch.testing.assert_close(train(again, other, start=30), expected, rtol=1e-3, atol=1e-4)
    assert sorted(len(s.units) for s in other._scopes()) == [1, 1, 1, 1, 2, 2]


def test_a_tensor_without_gradient_stands_still_beside_its_equals():
    params = [nn.Parameter(torch.ones(3, 3)) for _ in range(2)]
    opt = PSGD(params, kron(), lr=0.1, curvature=psgd.whiten, precond_prob=1.0)
    params[0].grad, params[1].grad = torch.eye(3), torch.eye(3)
    opt.step()
    before = copy.deepcopy(opt.state[params[1]]["q"])
    still = params[1].detach().clone()
    params[0].grad, params[1].grad = torch.eye(3), None
    moved = opt.state[params[0]]["q"]["0"]["P"].clone()
    opt.step()
    assert torch.equal(params[1], still)
    torch.testing.assert_close(opt.state[params[1]]["q"], before, rtol=0, atol=0)
    assert not torch.equal(opt.state[params[0]]["q"]["0"]["P"], moved)


def test_the_bound_of_the_root_mean_square_is_each_tensors_own():
    params = [nn.Parameter(torch.zeros(4, 4)) for _ in range(2)]
    opt = PSGD(
        params, kron(), lr=1.0, momentum=0.0, curvature=psgd.whiten, init_scale=1.0, precond_prob=1.0, max_rms=0.5
    )
    params[0].grad, params[1].grad = torch.full((4, 4), 100.0), torch.full((4, 4), 1e-3)
    opt.step()
    torch.testing.assert_close(params[0].square().mean().sqrt().item(), 0.5)
    assert 0 < params[1].square().mean().sqrt() < 0.01


def test_whitening_the_momentum_makes_steps_of_size_lr():
    """Of white noise, the averaged gradient has entries of about 0.23; P brings them to 1."""
    rms = {}
    for curvature in (psgd.whiten, psgd.whiten_momentum):
        p, rng = nn.Parameter(torch.zeros(32, 32)), torch.Generator().manual_seed(0)
        opt = PSGD([p], kron(), lr=1.0, max_rms=None, curvature=curvature, precond_prob=1.0, precond_lr=0.2)
        for _ in range(200):
            p.grad, old = 1e-3 * torch.randn(32, 32, generator=rng), p.detach().clone()
            opt.step()
        rms[curvature] = float((p.detach() - old).square().mean().sqrt())
        assert opt.source == curvature
    assert rms[psgd.whiten_momentum] == pytest.approx(1.0, rel=0.25)
    assert rms[psgd.whiten] / rms[psgd.whiten_momentum] == pytest.approx((0.1 / 1.9) ** 0.5, rel=0.25)


@pytest.mark.parametrize("curvature", [psgd.whiten, psgd.whiten_momentum], ids=str)
def test_options_like_adamws_make_steps_of_its_size(curvature):
    sizes = []
    for make in (
        lambda p: torch.optim.AdamW([p], lr=0.01, betas=(0.9, 0.95), weight_decay=0.0),
        lambda p: PSGD([p], kron(), **psgd.like_adamw(0.01, (0.9, 0.95), 0.0, curvature)),
    ):
        p, rng, total = nn.Parameter(torch.zeros(32, 32)), torch.Generator().manual_seed(0), 0.0
        opt = make(p)
        for t in range(300):
            p.grad, old = torch.randn(32, 32, generator=rng), p.detach().clone()
            opt.step()
            total += float((p.detach() - old).norm()) * (t >= 150)
        sizes.append(total)
    assert sizes[0] == pytest.approx(sizes[1], rel=0.15)  # P that follows quickly sees less noise in m than there is
    options = psgd.like_adamw(0.01, (0.9, 0.95), 0.1, curvature)
    assert options["lr"] * options["weight_decay"] == pytest.approx(0.01 * 0.1)


def test_what_like_adamw_returns_is_pinned():
    wanted = {
        "lr": 0.00229416, "momentum": 0.9, "fresh": 0.2, "weight_decay": 0.0435890, "curvature": psgd.whiten_momentum,
        "precond_lr": 0.9, "precond_prob": psgd.Decaying(start=100, floor=0.05), "max_value": 10.0,
    }  # fmt: skip
    options = psgd.like_adamw(0.01)
    assert options.keys() == wanted.keys()
    numbers = {key for key, value in wanted.items() if isinstance(value, float)}
    assert {k: options[k] for k in numbers} == pytest.approx({k: wanted[k] for k in numbers}, rel=1e-4)
    assert all(options[k] == wanted[k] for k in wanted.keys() - numbers)
    # the average of white noise and a fifth of its newest part, whitened for a single gradient
    newest, rest = 0.2 + 0.8 * 0.1, 0.8 * 0.9 * (0.1 / 1.9) ** 0.5
    share = (0.1 / 1.9) ** 0.5 / math.hypot(newest, rest)
    assert psgd.like_adamw(0.01, curvature=psgd.whiten)["lr"] == pytest.approx(0.01 * share)


def test_a_row_never_seen_before_takes_no_larger_step_than_ten_times_the_rate():
    p, rng = nn.Parameter(torch.zeros(2000, 8)), torch.Generator().manual_seed(0)
    opt = PSGD([p], kron(), **psgd.like_adamw(0.01))
    for t in range(121):
        seen = torch.randint(100, (32,), generator=rng)
        rows = torch.cat((seen, torch.tensor([1000 + t]))) if t >= 100 else seen
        p.grad = torch.zeros(2000, 8).index_add_(0, rows, torch.randn(len(rows), 8, generator=rng))
        before = p.detach().clone()
        opt.step()
    step = (p.detach() - before).abs()
    rate = opt.param_groups[0]["lr"]
    assert step[1120].max() == pytest.approx(10 * rate, rel=1e-4)  # it was 60 times
    assert step.max() <= 10.001 * rate


@pytest.mark.parametrize(("curvature", "lr"), list(zip(CURVATURES, (0.03, 0.01, 0.1), strict=True)), ids=str)
def test_it_learns(curvature, lr):
    model = net()
    opt = PSGD(model.parameters(), kron(), lr=lr, curvature=curvature)
    x = torch.randn(256, 6, generator=torch.Generator().manual_seed(7))
    start = loss(model, x).item()
    train(model, opt, steps=300, closure=curvature == psgd.hessian)
    assert loss(model, x).item() < 0.6 * start


# --- by name, and weights with biases


def test_overrides_by_name_and_the_plan_shows_them():
    model = net()
    rule = kron(overrides={"*.bias": lambda shape: psgd.XMat(), "6.*": lambda shape: psgd.affine(shape)})
    opt = PSGD(model.named_parameters(), rule, lr=0.01, curvature=psgd.whiten)
    groups = {row.name: row.group for row in opt.plan().rows}
    assert groups["6.weight"] == "Kronecker(shape=(2, 6), parts=(Triangular(), Triangular()))"
    assert "XMat" in groups["6.bias"] and "XMat" in groups["0.bias and 2 alike"]
    assert "InverseFree" in groups["0.weight and 2 alike"]
    train(model, opt)


@pytest.mark.parametrize(
    ("rule", "wrapped", "message"),
    [
        (kron(overrides={"*.bias": psgd.affine}), None, "overrides=… needs names, as in PSGD.model.named_parameters"),
        (kron(overrides={"*.bais": psgd.affine}), "", "patterns that fit a name, as 0.weight, got '.[.]bais'"),
        (kron(affine=nn.Sequential(nn.Linear(2, 2))), "module.", "names of its layers, as 0.weight, got module.0"),
    ],
)
def test_names_that_do_not_fit_are_refused_before_anything_moves(rule, wrapped, message):
    model = net()
    named = [(f"{wrapped}{name}", p) for name, p in model.named_parameters()]
    opt = PSGD(model.parameters() if wrapped is None else named, rule, lr=0.01, curvature=psgd.whiten)
    model(torch.ones(1, 6)).sum().backward()
    before = [p.detach().clone() for p in model.parameters()]
    with pytest.raises(ValueError, match=message.replace("(", "[(]").replace("=…", "=….")):
        opt.step()
    assert all(torch.equal(p, old) for p, old in zip(model.parameters(), before, strict=True))


def test_a_checkpoint_knows_a_rule_by_what_it_says_and_not_by_where_its_functions_are():
    def saved(rule, other):
        model = net()
        one, two = (PSGD(model.named_parameters(), r, lr=0.01, curvature=psgd.whiten) for r in (rule, other))
        train(model, one, steps=1)
        two.load_state_dict(one.state_dict())

    class Still(Motion):
        def matrix(self, q, r, g):
            return q

        def diagonal(self, d, g):
            return d

    def rules():
        return [
            kron(overrides={"*.bias": lambda shape: psgd.XMat()}),
            kron(overrides={"*.bias": psgd.affine}),
            kron(Still()),
            functools.partial(psgd.affine),
            kron(damping=1e-4),
        ]

    for one, other in zip(rules(), rules(), strict=True):
        saved(one, other)
    saved(kron(Quadratic()), kron(Quadratic(), damping=1e-4, products=torch.bfloat16))
    for other in (kron(Quadratic()), kron(Procrustes()), kron(overrides={"*.weight": psgd.affine})):
        with pytest.raises(ValueError, match="saved for another group"):
            saved(kron(), other)


def test_p_itself_in_bfloat16_is_refused_before_anything_moves():
    model = net()
    opt = PSGD(model.named_parameters(), kron(), lr=0.01, curvature=psgd.whiten, precond_dtype=torch.bfloat16)
    model(torch.ones(1, 6)).sum().backward()
    before = [p.detach().clone() for p in model.parameters()]
    with pytest.raises(ValueError, match=r"at least float32, got torch.bfloat16.*kron\(Quadratic\(\)\)"):
        opt.step()
    assert all(torch.equal(p, old) for p, old in zip(model.parameters(), before, strict=True)) and not opt.state
    half = net().bfloat16()
    opt = PSGD(half.named_parameters(), kron(), lr=0.01, curvature=psgd.whiten)  # P is float32 unless asked otherwise
    half(torch.ones(1, 6, dtype=torch.bfloat16)).sum().backward()
    opt.step()
    assert {t.dtype for s in opt.state.values() for f in s["q"].values() for t in f.values()} == {torch.float32}


def test_layers_are_found_in_a_module():
    model = nn.ModuleDict({
        "a": nn.Linear(3, 2), "b": nn.Linear(3, 2, bias=False), "c": nn.Conv2d(1, 4, 3), "d": nn.LayerNorm(3),
        "e": nn.ConvTranspose1d(2, 2, 3),
    })  # fmt: skip
    assert affine_layers(model) == (("a.weight", "a.bias"), ("c.weight", "c.bias"))
    assert affine_layers(nn.Linear(2, 2)) == (("weight", "bias"),)


class Augmented(nn.Module):
    """A layer whose weight and bias are one matrix [W b]."""

    def __init__(self, layer):
        super().__init__()
        self.matrix = nn.Parameter(torch.cat((layer.weight.detach().flatten(1), layer.bias.detach()[:, None]), 1))

    def forward(self, x):
        return nn.functional.linear(x, self.matrix[:, :-1], self.matrix[:, -1])


@pytest.mark.parametrize("curvature", CURVATURES, ids=str)
@pytest.mark.parametrize("factor", [Direct(), Procrustes(), Triangular()], ids=str)
def test_a_weight_and_its_bias_move_as_one_matrix(factor, curvature):
    model, one = net(), net()
    one = nn.Sequential(*(Augmented(m) if isinstance(m, nn.Linear) else m for m in one))
    options = dict(lr=0.01, precond_prob=1.0, curvature=curvature)
    opt = PSGD(model.named_parameters(), kron(factor, max_skew=2.0, memory=4.0, damping=0.0, affine=model), **options)
    same = PSGD(one.parameters(), kron(factor, max_skew=2.0, memory=4.0, damping=0.0), **options)

    def probes(params):  # those of the other optimizer, in its order
        opt.param_groups[0]["iteration"] = same.param_groups[0]["iteration"]
        found = opt._probes(list(model.parameters()))
        return [torch.cat((w, b[:, None]), 1) for w, b in zip(found[::2], found[1::2], strict=True)]

    if curvature == psgd.hessian:
        same._probes = probes
    elif factor == Triangular():
        pytest.skip("its whitening draws probes, by tensors: another draw for another shape")
    b = train(one, same, closure=curvature == psgd.hessian)
    opt.param_groups[0]["iteration"] = 0
    a = train(model, opt, closure=curvature == psgd.hessian)
    joined = [torch.cat((w, bias[:, None]), 1) for w, bias in zip(a[::2], a[1::2], strict=True)]
    torch.testing.assert_close(joined, b, rtol=1e-3, atol=1e-4)
    assert [len(s.units) for s in opt._scopes()] == [3, 1]
    assert opt.state[model[0].weight]["q"]["1"]["P" if factor == Direct() else "Q"].shape == (7, 7)
    assert not any(opt.state[model[0].bias]["q"].values())


def test_a_convolution_with_its_bias_and_a_checkpoint_of_it():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(2, 3, 3), nn.Flatten(), nn.Linear(12, 2))
    decay = {"params": [(n, p) for n, p in model.named_parameters() if p.ndim > 1], "weight_decay": 0.1}
    rest = {"params": [(n, p) for n, p in model.named_parameters() if p.ndim == 1]}
    opts = [PSGD([decay, rest], kron(affine=model), lr=0.01, curvature=psgd.whiten) for _ in range(2)]
    x = torch.randn(8, 2, 4, 4)
    for _ in range(5):
        opts[0].zero_grad()
        model(x).square().mean().backward()
        opts[0].step()
    assert [s.n for s in opts[0]._scopes()] == [3 * 19, 2 * 13]
    opts[1].load_state_dict(opts[0].state_dict())
    for a, b in zip(opts[0]._scopes(), opts[1]._scopes(), strict=True):
        torch.testing.assert_close(a.point, b.point, rtol=0, atol=0)


def test_a_layer_of_one_output_has_its_bias_beside_it():
    model = nn.Linear(3, 1)
    opt = PSGD(model.named_parameters(), kron(affine=model), lr=0.1, curvature=psgd.whiten, precond_prob=1.0)
    model(torch.ones(2, 3)).sum().backward()
    before = [p.detach().clone() for p in model.parameters()]
    opt.step()
    assert [s.n for s in opt._scopes()] == [4]
    assert not any(torch.equal(p, old) for p, old in zip(model.parameters(), before, strict=True))


def test_layers_without_names_are_refused():
    model = net()
    opt = PSGD(model.parameters(), kron(affine=model), lr=0.01, curvature=psgd.whiten)
    model(torch.ones(1, 6)).sum().backward()
    with pytest.raises(ValueError, match="named_parameters"):
        opt.step()


@pytest.mark.parametrize("factor", [Direct(), Quadratic()], ids=str)
def test_a_run_resumed_at_any_step_is_bitwise_the_same(factor):
    """Steps that fit take another way to P m than those that do not; what was done before must not matter."""

    def start():
        model = nn.Sequential(nn.Linear(3, 12), nn.Tanh(), nn.Linear(12, 2))
        with torch.no_grad():
            for p in model.parameters():
                p.copy_(torch.linspace(-1, 1, p.numel()).view_as(p))
        return model, PSGD(model.parameters(), kron(factor), lr=0.1, precond_prob=0.5, curvature=psgd.whiten_momentum)

    def advance(model, opt, steps):
        for t in steps:
            x = torch.randn(8, 3, generator=torch.Generator().manual_seed(t))
            opt.zero_grad()
            (model(x).sin() - 1).square().mean().backward()
            opt.step()
        return [p.detach().clone() for p in model.parameters()]

    end = 45  # past two times of balancing, which comes with every tenth update
    whole = advance(*start(), range(end))
    for stop in range(1, end - 1):
        first, opt = start()
        advance(first, opt, range(stop))
        model, resumed = start()
        model.load_state_dict(first.state_dict())
        resumed.load_state_dict(copy.deepcopy(opt.state_dict()))
        assert all(map(torch.equal, advance(model, resumed, range(stop, end)), whole)), stop


@pytest.mark.parametrize("curvature", [psgd.whiten, psgd.whiten_momentum], ids=str)
def test_a_weight_without_gradient_beside_a_bias_with_one_does_not_let_p_grow_for_ever(curvature):
    model = nn.Sequential(nn.Linear(6, 6))
    options = dict(lr=1e-3, precond_prob=1.0, precond_lr=0.9, curvature=curvature)
    opt = PSGD(model.named_parameters(), kron(affine=model), **options)
    for t in range(600):
        model[0].weight.grad = None
        model[0].bias.grad = torch.randn(6, generator=torch.Generator().manual_seed(t))
        opt.step()
    factors = [q["P"] for q in opt.state[model[0].weight]["q"].values()]
    assert len(factors) == 2 and all(p.norm() < 1e5 for p in factors)  # 1e12 without noise in the weight's part


def test_the_initial_scale_is_found_some_columns_at_a_time(monkeypatch):
    def level(chunk, rule, curvature):
        monkeypatch.setattr(psgd.update, "CHUNK", chunk)
        params = [nn.Parameter(torch.zeros(3, 7)) for _ in range(2)]
        opt = PSGD(params, rule, lr=1.0, curvature=curvature, precond_prob=1.0)
        scales, rng = torch.logspace(-2, 2, 21).view(3, 7), torch.Generator().manual_seed(0)
        weights = [scales * torch.randn(3, 7, generator=rng) for _ in params]
        opt.step(lambda: sum((w * p.sin() + (w * p).square()).sum() for w, p in zip(weights, params, strict=True)))
        return torch.stack([opt.state[p]["level"] for p in params])

    for rule, curvature in ((kron(), psgd.whiten), (kron(), psgd.hessian), (kron(Triangular()), psgd.whiten)):
        whole = level(1000, rule, curvature)
        assert len(set(whole.tolist())) == 2
        for chunk in (1, 8, 41):  # a column, four, and all but one
            torch.testing.assert_close(level(chunk, rule, curvature), whole, rtol=1e-6, atol=0)


@pytest.mark.parametrize("n", [1, 2, 8])
def test_the_initial_scale_is_the_gradients_and_not_that_of_the_noise(n):
    p = nn.Parameter(torch.zeros(n))
    opt = PSGD([p], kron(), lr=1.0, momentum=0.0, precond_prob=1.0, precond_lr=1e-6, curvature=psgd.whiten)
    for _ in range(12):
        p.grad = torch.full((n,), 3.0)
        opt.step()
    assert float(opt.state[p]["level"]) == pytest.approx(3.0, rel=0.01)


def test_the_plan_counts_the_step_that_is_made():
    """Of 512×128: P m by two matrices; and a fit in whitening that never forms G of the longer axis."""
    w, n, m = nn.Parameter(torch.zeros(512, 128)), 512, 128
    whiten, newton = (plan(PSGD([w], kron(), curvature=c).param_groups).rows[0] for c in (psgd.whiten, psgd.hessian))
    products = 2 * n * n * m + 2 * n * m * m
    assert products <= whiten.precondition <= 1.1 * products
    assert whiten.fit < 0.6 * newton.fit


def test_the_plan_counts_what_p_is_applied_by():
    w = nn.Parameter(torch.zeros(64, 32))
    for products, size in ((None, 4), (torch.bfloat16, 2)):
        opt = PSGD([w], kron(Quadratic(), products=products), curvature=psgd.whiten)
        costs = opt.plan()
        assert costs.rows[0].kept == size * (64 * 64 + 32 * 32) and "between updates" in str(costs)
        w.grad = torch.ones_like(w)
        for _ in range(2):
            opt.step()
            opt.param_groups[0]["precond_prob"] = 0.001
        (scope,) = opt._scopes()
        held = [t for t in leaves(scope._ready) if all(t is not q for q in leaves(scope.point))]
        assert sum(t.numel() * t.element_size() for t in held) == costs.rows[0].kept
    assert plan([w], psgd.lra(2)).kept == plan([w], kron()).kept == 0


def test_p_is_made_for_pauses_in_which_it_pays_also_after_a_resume(tmp_path):
    def optimizer():
        torch.manual_seed(0)
        w = nn.Parameter(torch.randn(16, 4))
        schedule = psgd.Decaying(start=1, floor=0.01)
        return w, PSGD([w], kron(Quadratic()), curvature=psgd.whiten, precond_prob=schedule)

    def step(w, opt):
        w.grad = torch.randn(16, 4, generator=torch.Generator().manual_seed(opt.param_groups[0]["iteration"]))
        opt.step()
        (scope,) = opt._scopes()
        return "".join(key for key in "01" if "P" in scope._ready[key])

    w, opt = optimizer()
    made, updates = [], []
    for t in range(24):
        if t == 20:  # in a pause
            torch.save((opt.state_dict(), w.data), tmp_path / "checkpoint")
        made.append(step(w, opt))
        updates.append(opt.param_groups[0]["updates"])
    # 16×16 twice is as quick as once until the fourth use; 4×4 is at once
    due = [i for i in range(24) if updates[i] > (updates[i - 1] if i else 0)]
    assert all(made[i] == "1" for i in due)
    for start, stop in itertools.pairwise(due):
        assert set(made[start + 1 : stop]) <= {"01" if stop - start - 1 >= 4 else "1"}
    assert len(due) > 3 and "01" in made
    other, again = optimizer()
    state, weights = torch.load(tmp_path / "checkpoint")
    again.load_state_dict(state)
    other.data.copy_(weights)
    assert [step(other, again) for _ in range(4)] == made[20:] and torch.equal(w, other)
