"""opt.diagnostics(): every number made again by hand, and nothing paid for steps that nobody looks at."""

import copy
import math

import pytest
import torch
from problems import batches, loss, network
from torch.utils._python_dispatch import TorchDispatchMode

from psgd import (
    PSGD,
    Butterfly,
    Dense,
    Diagonal,
    Padded,
    XMat,
    affine,
    fit_residual,
    hessian,
    hessian_operator,
    lra,
    whiten,
)

KEYS = {
    "fit_residual",
    "log_det_q",
    "log_det_p",
    "smallest_p",
    "largest_p",
    "condition_p",
    "clipped",
    "skipped",
    "cosine",
    "step_norm",
}
DATA = batches(1)[0]


def trained(group=None, steps=5, **options):
    model = network()
    opt = PSGD(model.parameters(), group, curvature=hessian, **{"lr": 0.1, "precond_prob": 1.0} | options)
    for _ in range(steps):
        step(model, opt)
    return model, opt


def step(model, opt, scale=1.0):
    opt.step(lambda: scale * loss(model, DATA))


def theta(model):
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])


@pytest.mark.parametrize(
    "group",
    [None, Diagonal(), XMat(), Dense(), affine, Padded(Butterfly(), 2)],
    ids=["lra", "diagonal", "xmat", "dense", "rule", "padded"],
)
def test_flat_dict_of_floats(group):
    model, opt = trained(group)
    opt.diagnostics()
    step(model, opt)
    report = opt.diagnostics()
    assert report.keys() == KEYS
    assert all(type(value) is float and math.isfinite(value) for value in report.values())


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("group", [lra(3), XMat(), affine], ids=["lra", "xmat", "rule"])
def test_numbers(group, momentum):
    model, opt = trained(group, momentum=momentum)
    opt.diagnostics()
    before = theta(model)
    step(model, opt)
    report, scopes = opt.diagnostics(), opt._scopes()
    p = torch.block_diag(*[s.group.matrix(s.point, s.n).mT @ s.group.matrix(s.point, s.n) for s in scopes])
    values = torch.linalg.eigvalsh(p)
    assert report["log_det_p"] == pytest.approx(float(values.log().sum()), rel=1e-6)
    assert report["log_det_q"] == pytest.approx(float(values.log().sum()) / 2, rel=1e-6)
    assert report["smallest_p"] == pytest.approx(float(values[0]), rel=0.01)
    assert report["largest_p"] == pytest.approx(float(values[-1]), rel=0.01)
    assert report["condition_p"] == pytest.approx(float(values[-1] / values[0]), rel=0.02)
    g = torch.cat([t.grad.reshape(-1) for t in model.parameters()])
    assert report["cosine"] == pytest.approx(float(g @ p @ g / (g.norm() * (p @ g).norm())), rel=1e-6)
    assert report["step_norm"] == pytest.approx(float((theta(model) - before).norm()), rel=1e-6)
    residuals = [float(fit_residual(s.group, s.point, *s.pair)) for s in scopes]
    assert report["fit_residual"] == pytest.approx(sum(residuals) / len(residuals), rel=1e-6)
    assert 0 < report["fit_residual"] < 1


def test_the_pair_is_the_one_that_was_fitted():
    model, opt = trained(Dense())
    opt.diagnostics()
    before = copy.deepcopy(model)
    step(model, opt)
    (scope,) = opt._scopes()
    v, h = scope.pair
    torch.testing.assert_close(h, hessian_operator(lambda: loss(before, DATA), before)(v))


def test_the_pair_stays_when_the_gradient_that_it_was_is_cleared():
    weight = torch.nn.Parameter(torch.arange(1.0, 5.0))
    opt = PSGD([weight], Diagonal(), lr=0.01, curvature=whiten, precond_prob=1.0)
    for _ in range(2):
        weight.grad = torch.tensor([1.0, -2.0, 3.0, -4.0])
        opt.step()
        before = opt.diagnostics()["fit_residual"]
    weight.grad.zero_()
    assert math.isfinite(before) and opt.diagnostics()["fit_residual"] == before


def test_clipped_is_the_share_of_steps_looked_at():
    model, opt = trained(XMat(), max_rms=None, max_norm=1e-9)
    assert opt.diagnostics()["clipped"] == 1
    opt.diagnostics()  # a second look at the same step
    for pg in opt.param_groups:
        pg["max_norm"] = None
    step(model, opt)
    assert opt.diagnostics()["clipped"] == 0.5


def test_step_norm_is_that_of_the_bounded_step():
    model, opt = trained(XMat(), max_rms=None, max_norm=1e-3)
    before = theta(model)
    step(model, opt)
    assert opt.diagnostics()["step_norm"] == pytest.approx(1e-4, rel=1e-6)
    assert float((theta(model) - before).norm()) == pytest.approx(1e-4, rel=1e-6)


def test_skipped_is_the_share_of_all_steps():
    model, opt = trained(XMat(), steps=3)
    step(model, opt, float("nan"))
    assert opt.diagnostics()["skipped"] == 0.25


def test_before_the_first_step():
    opt = PSGD(network().parameters())
    report = opt.diagnostics()
    assert report.keys() == KEYS
    assert report["skipped"] == 0
    assert all(math.isnan(value) for key, value in report.items() if key != "skipped")


def test_without_gradients_their_cosine_is_not_known():
    _, opt = trained(XMat())
    opt.zero_grad()
    report = opt.diagnostics()
    assert math.isnan(report["cosine"])
    assert math.isfinite(report["step_norm"])


def test_without_gradients_and_momentum_nothing_is_known_of_the_step():
    _, opt = trained(XMat(), momentum=0.0, max_rms=None, max_norm=1.0)
    expected = opt.diagnostics()
    opt.zero_grad()
    report = opt.diagnostics()
    assert math.isnan(report["cosine"]) and math.isnan(report["step_norm"])
    assert report["log_det_q"] == expected["log_det_q"]


def test_whitening():
    model = network()
    opt = PSGD(model.parameters(), lra(2), curvature=whiten)
    for _ in range(3):
        opt.zero_grad()
        loss(model, DATA).backward()
        opt.step()
        report = opt.diagnostics()
    assert 0.5 < report["fit_residual"] <= 1


def test_plain_sgd():
    _, opt = trained(XMat(), precond_prob=0.0)
    report = opt.diagnostics()
    assert report["cosine"] == pytest.approx(1)
    assert report["log_det_p"] == 0


@pytest.mark.parametrize("options", [{"maximize": True}, {"l2": 0.1}, {"lr": torch.tensor(0.1)}])
def test_options(options):
    model, opt = trained(XMat(), **options)
    opt.diagnostics()
    before = theta(model)
    step(model, opt)
    assert opt.diagnostics()["step_norm"] == pytest.approx(float((theta(model) - before).norm()), rel=1e-5)


def test_low_precision_preconditioner():
    _, opt = trained(lra(2), precond_dtype=torch.bfloat16)
    assert math.isfinite(opt.diagnostics()["condition_p"])


def test_looking_changes_nothing():
    runs = []
    for looks in (0, 3):
        model, opt = trained(lra(2), steps=3)
        for _ in range(4):
            for _ in range(looks):
                opt.diagnostics()
            step(model, opt)
        runs.append((theta(model), opt.state_dict()["state"]))
    assert runs[0][0].equal(runs[1][0])
    torch.testing.assert_close(runs[0][1], runs[1][1], rtol=0, atol=0)


class Operations(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen.append(func.name())
        return func(*args, **(kwargs or {}))


def operations(model, opt):
    with Operations() as operations:
        step(model, opt)
    return operations.seen


def test_steps_that_nobody_looks_at_cost_nothing():
    model, opt = trained(lra(2))
    without = operations(model, opt)
    assert all(scope.pair is None for scope in opt._scopes())
    opt.diagnostics()
    step(model, opt)
    assert operations(model, opt) == without


def test_after_loading():
    model, opt = trained(lra(2))
    expected = opt.diagnostics()
    other = network()
    other.load_state_dict(model.state_dict())
    resumed = PSGD(other.parameters(), lra(2), curvature=hessian, lr=0.1, precond_prob=1.0)
    resumed.load_state_dict(opt.state_dict())
    for p, q in zip(other.parameters(), model.parameters(), strict=True):
        p.grad = q.grad.clone()
    report = resumed.diagnostics()
    for key in KEYS - {"fit_residual"}:
        assert report[key] == pytest.approx(expected[key], rel=1e-9), key
