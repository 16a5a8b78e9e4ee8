"""Where the answer is known: the update direction tends to |H|⁻¹g, and Newton's solutions are found."""

import copy
import functools

import numpy as np
import pytest
import torch
from scipy.optimize import minimize
from torch import nn
from toys import (
    EVERY_STEP,
    batches,
    cosine,
    magnitude,
    mlp,
    preconditioner,
    quadratic,
    regression,
    spectrum,
    train,
)

from psgd import (
    PSGD,
    Dense,
    Diagonal,
    Normalized,
    Regular,
    Smoothed,
    Triangular,
    XMat,
    affine,
    automatic,
    finite_difference,
    hessian,
    kaleidoscope,
    lra,
    lra_duv,
    whiten,
)

DEFINITE = spectrum(1.0, 2.0, 3.0, 5.0, 8.0, 10.0)
FULL = {"dense": Dense(), "triangular": Triangular(), "lra": lra(6), "dUV": lra_duv(6)}


def fitted(h, group, curvature, steps=400, settle=None, **options):
    """Fit on ½θᵀHθ without moving, and return (P g, g) for the gradient where it stands.

    `settle` anneals μ like 1/t: an indefinite H leaves a residual of mean zero at the optimum, which must average out.
    """
    x = torch.linspace(-1, 0.7, len(h), dtype=torch.float64)
    p = [x[:-1].clone().requires_grad_(), x[-1:].clone().requires_grad_()]
    opt = PSGD(p, group, lr=0.0, curvature=curvature, **{**EVERY_STEP, "precond_lr": 0.5, **options})
    for t in range(steps):
        if settle:
            opt.param_groups[0]["precond_lr"] = 0.5 / (1 + t / settle)
        opt.step(quadratic(h, *p))
    g = torch.cat([t.grad.flatten() for t in p])
    return preconditioner(opt, *p) @ g, g


@pytest.mark.parametrize("curvature", [hessian, finite_difference], ids=str)
@pytest.mark.parametrize("group", FULL)
def test_the_direction_tends_to_newton(group, curvature):
    direction, g = fitted(DEFINITE, FULL[group], curvature)
    assert cosine(direction, torch.linalg.solve(DEFINITE, g)) > 0.999


@pytest.mark.parametrize(
    ("group", "curvature"),
    [(Triangular(), hessian), (lra(3), hessian), (Dense(), finite_difference)],
    ids=str,
)
def test_the_direction_tends_to_the_absolute_newton_where_h_is_indefinite(group, curvature):
    h = spectrum(-2.0, 1.0, 3.0)
    direction, g = fitted(h, group, curvature, steps=1500, settle=20)
    assert cosine(direction, torch.linalg.solve(magnitude(h), g)) > 0.999
    assert cosine(direction, torch.linalg.solve(h, g)) < 0.99


def test_the_direction_tends_to_newton_at_condition_ten_thousand():
    h = spectrum(1.0, 100.0, 1e4)
    direction, g = fitted(h, Dense(), hessian, steps=1000, init_scale=1.0)
    assert cosine(direction, torch.linalg.solve(h, g)) > 0.999


@pytest.mark.parametrize("curvature", [hessian, finite_difference, automatic], ids=str)
def test_the_length_of_the_direction_is_newtons_too(curvature):
    direction, g = fitted(DEFINITE, Dense(), curvature)
    torch.testing.assert_close(direction, torch.linalg.solve(DEFINITE, g), rtol=0.05, atol=0.01)


def test_the_papers_rule_finds_newton_when_annealed():
    direction, g = fitted(DEFINITE, Dense(), hessian, steps=500, settle=50, rule=Normalized())
    torch.testing.assert_close(direction, torch.linalg.solve(DEFINITE, g), rtol=0.1, atol=0.05)


@pytest.mark.parametrize(
    ("group", "h"),
    [
        (Diagonal(), torch.tensor([1.0, -2.0, 4.0, -0.5, 8.0, 3.0]).double().diag()),
        (XMat(), torch.diag(torch.arange(1.0, 7)).double() + 0.5 * torch.eye(6).flip(0).double()),
        (kaleidoscope(6), torch.diag(torch.arange(1.0, 7)).double() + 0.5 * torch.eye(6).flip(0).double()),
        (affine((2, 3)), torch.kron(spectrum(1.0, 3.0), spectrum(1.0, 2.0, 5.0))),
    ],
    ids=["diagonal", "xmat", "kaleidoscope", "affine"],
)
def test_a_structured_group_finds_newton_where_h_has_its_structure(group, h):
    direction, g = fitted(h, group, hessian)
    assert cosine(direction, torch.linalg.solve(magnitude(h), g)) > 0.999


def test_a_rule_of_groups_finds_newton_for_each_tensor_alone():
    a, b = (torch.ones(3, dtype=torch.float64, requires_grad=True) for _ in range(2))
    ha, hb = spectrum(1.0, 2.0, 9.0), spectrum(0.1, 0.2, 0.3, seed=1)
    opt = PSGD([a, b], affine, lr=0.0, curvature=hessian, precond_lr=0.5, **EVERY_STEP)
    for _ in range(250):
        opt.step(lambda: quadratic(ha, a)() + quadratic(hb, b)())
    for p, h in ((a, ha), (b, hb)):
        assert torch.dist(preconditioner(opt, p) @ h, torch.eye(3).double()) < 0.05


def test_default_options_find_the_scale_of_newton_within_the_warmup():
    p = torch.ones(6, dtype=torch.float64, requires_grad=True)
    h = 1000 * DEFINITE
    opt = PSGD([p], lr=0.0)
    for _ in range(100):
        opt.step(quadratic(h, p))
    ratio = (preconditioner(opt, p) @ h).trace() / 6
    assert 0.3 < ratio < 3


@pytest.mark.parametrize("curvature", [hessian, finite_difference, automatic], ids=str)
def test_newton_iterates_differ_from_whitening(curvature):
    newton, white = mlp(), mlp()
    train(PSGD(newton.parameters(), curvature=curvature), newton, 20)
    train(PSGD(white.parameters(), curvature=whiten), white, 20)
    for a, b in zip(newton.parameters(), white.parameters(), strict=True):
        assert not torch.allclose(a, b, rtol=1e-3)


def test_whitening_by_closure_equals_whitening_by_plain_steps():
    a, b = mlp(), mlp()
    train(PSGD(a.parameters(), curvature=whiten), a, 20)
    train(PSGD(b.parameters(), curvature=whiten), b, 20, closure=False)
    assert all(map(torch.equal, a.parameters(), b.parameters()))


# --- the number of products is the schedule's


class Counted(torch.autograd.Function):
    """The identity, which counts how often its derivative is differentiated: once for each Hessian product."""

    products = 0

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, g):
        return CountedBackward.apply(g)


class CountedBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, g):
        return g.clone()

    @staticmethod
    def backward(ctx, v):
        Counted.products += 1
        return v


@pytest.mark.parametrize(
    ("schedule", "due"),
    [(0.0, 0), (0.25, 11), (1.0, 42), (Regular(0.1, warmup=10), 14), (Regular(0.0, warmup=10), 0)],
    ids=str,
)
def test_the_number_of_hessian_products_is_the_schedules(schedule, due):
    x = torch.ones(3, requires_grad=True)
    opt = PSGD([x], Diagonal(), curvature=hessian, precond_prob=schedule)
    Counted.products = 0
    expected = 0
    for _ in range(42):
        expected += opt.due
        opt.step(lambda: Counted.apply(x).pow(4).sum())
    assert Counted.products == expected == due


def test_automatic_takes_one_product_on_each_due_step():
    x = torch.ones(3, requires_grad=True)
    opt = PSGD([x], Diagonal(), precond_prob=0.5)
    Counted.products = 0
    for _ in range(20):
        opt.step(lambda: Counted.apply(x).pow(4).sum())
    assert Counted.products == 10


@pytest.mark.parametrize(("curvature", "extra"), [(hessian, 0), (finite_difference, 5), (whiten, 0), (automatic, 1)])
def test_the_number_of_evaluations_is_one_a_step_and_what_the_curvature_adds(curvature, extra):
    x = torch.ones(3, requires_grad=True)
    calls = []

    def closure():
        calls.append(1)
        return x.pow(4).sum()

    opt = PSGD([x], Diagonal(), curvature=curvature, precond_prob=0.25)
    for _ in range(20):
        opt.step(closure)
    assert len(calls) == 20 + extra


# --- every parameter gets its own part of the pair


@pytest.mark.parametrize("curvature", [hessian, finite_difference, automatic], ids=str)
def test_the_pair_reaches_every_parameter(curvature):
    shapes = [(2, 3), (2, 3), (3, 2), (1, 6), (6,), (1,), (), (2, 1, 1, 3, 1), ()]
    params = [torch.ones(s, dtype=torch.float64, requires_grad=True) for s in shapes]
    opt = PSGD(params, Diagonal(), lr=0.0, curvature=curvature, precond_lr=0.5, **EVERY_STEP)
    for _ in range(250):
        opt.step(lambda: sum((i + 1.0) / 2 * p.square().sum() for i, p in enumerate(params)))
    for i, p in enumerate(params):
        torch.testing.assert_close(opt.state[p]["q"]["d"] ** -2, torch.full_like(p, i + 1.0), rtol=0.05, atol=0)


def test_the_pair_of_a_rule_reaches_same_shaped_parameters_apart():
    params = [torch.ones((), dtype=torch.float64, requires_grad=True) for _ in range(3)]
    opt = PSGD(params, affine, lr=0.0, curvature=hessian, precond_lr=0.5, **EVERY_STEP)
    for _ in range(100):
        opt.step(lambda: sum((i + 1.0) / 2 * p.square() for i, p in enumerate(params)))
    found = [float(preconditioner(opt, p)) for p in params]
    assert found == pytest.approx([1.0, 1 / 2, 1 / 3], rel=0.01)


# --- one step, transcribed


@pytest.mark.parametrize("rule", [Smoothed(), Normalized()], ids=str)
@pytest.mark.parametrize("curvature", [hessian, whiten], ids=str)
def test_steps_equal_the_dense_formula_and_use_the_q_that_they_store(curvature, rule):
    lr, beta, decay, l2, mu, most = 0.1, 0.9, 0.01, 0.05, 0.3, 0.4
    x = torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64, requires_grad=True)
    h_true = spectrum(1.0, -2.0, 5.0)
    opt = PSGD(
        [x],
        Dense(),
        lr=lr,
        momentum=beta,
        weight_decay=decay,
        l2=l2,
        precond_lr=mu,
        precond_prob=1.0,
        max_rms=None,
        max_norm=most,
        curvature=curvature,
        rule=rule,
        init_scale=0.7,
    )
    theta, m, q, ell = (
        x.detach().clone(),
        torch.zeros(3).double(),
        0.7 * torch.eye(3).double(),
        torch.tensor(0.0),
    )
    for t in range(25):
        v = opt._probes([x])[0]
        opt.step(quadratic(h_true, x))
        g = h_true @ theta + l2 * theta
        h = h_true @ v + l2 * v if curvature is hessian else g
        a, b = q @ h, torch.linalg.solve(q.mT, v)
        residual = torch.outer(a, a) - torch.outer(b, b)
        if rule == Normalized():
            size = mu / residual.norm()
        else:
            bound = a @ a + b @ b
            ell = torch.maximum(0.9 * ell + 0.1 * bound, bound)
            size = mu / ell
        q = q - size * residual @ q
        m = m + max(1 / (t + 1), 1 - beta) * (g - m)
        d = q.mT @ q @ m
        d = d * min(1.0, most / d.norm())
        theta = (1 - lr * decay) * theta - lr * d
        torch.testing.assert_close(opt.state[x]["q"]["Q"], q, rtol=1e-9, atol=1e-12)
        torch.testing.assert_close(x.detach(), theta, rtol=1e-9, atol=1e-12)


def test_the_stored_q_is_the_one_that_made_the_step():
    model = mlp()
    opt = PSGD(model.parameters(), lra(3), lr=1.0, **EVERY_STEP)
    for _, (x, y) in zip(range(30), batches(), strict=False):
        before = torch.cat([p.detach().flatten().clone() for p in model.parameters()])
        opt.step(regression(model, x, y))
        g = torch.cat([p.grad.flatten() for p in model.parameters()])
        step = before - torch.cat([p.detach().flatten() for p in model.parameters()])
        scope = opt._scopes()[0]
        torch.testing.assert_close(step, scope.group.precondition(scope.point, g), rtol=1e-3, atol=1e-5)


# --- solutions


@pytest.mark.parametrize("group", [Dense(), Triangular(), lra(7)], ids=str)
def test_least_squares_matches_the_normal_equations(group):
    rng = torch.Generator().manual_seed(0)
    a = torch.randn(40, 6, generator=rng, dtype=torch.float64) * torch.linspace(0.5, 2, 6).double()
    y = torch.randn(40, generator=rng, dtype=torch.float64)
    w = torch.zeros(6, dtype=torch.float64, requires_grad=True)
    c = torch.zeros((), dtype=torch.float64, requires_grad=True)
    opt = PSGD([w, c], group, lr=1.0, precond_lr=0.5, momentum=0.0, precond_prob=1.0)
    for _ in range(300):
        opt.step(lambda: (a @ w + c - y).square().mean())
    design = torch.cat((a, torch.ones(40, 1).double()), 1)
    expected = torch.linalg.lstsq(design, y[:, None]).solution[:, 0]
    torch.testing.assert_close(torch.cat((w, c[None])).detach(), expected, rtol=1e-6, atol=1e-6)


def test_logistic_regression_matches_newtons_solution():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(200, 5)) * np.logspace(-1, 1, 5)
    y = (rng.random(200) < 1 / (1 + np.exp(-x[:, 0] - 0.2 * x[:, 4]))).astype(float)

    def value(w):
        z = x @ w
        return np.mean(np.logaddexp(0, z) - y * z) + 0.005 * w @ w

    expected = minimize(value, np.zeros(5), method="BFGS", options={"gtol": 1e-9}).x
    data, target = torch.tensor(x), torch.tensor(y)
    w = torch.zeros(5, dtype=torch.float64, requires_grad=True)
    opt = PSGD([w], Dense(), lr=1.0, precond_lr=0.5, momentum=0.0, precond_prob=1.0, l2=0.01)
    for _ in range(400):
        opt.step(lambda: nn.functional.binary_cross_entropy_with_logits(data @ w, target))
    np.testing.assert_allclose(w.detach().numpy(), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("group", [Dense(), lra(2), XMat(), Diagonal()], ids=str)
def test_psgd_leaves_a_strict_saddle_within_fifty_steps(group):
    def saddle(x):
        return x[0].square() - x[1].square() + 0.25 * x[1].pow(4)

    for seed in range(5):
        noise = torch.randn(2, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        x = (1e-6 * noise).requires_grad_()
        opt = PSGD([x], group, lr=0.5, precond_lr=0.5, momentum=0.0, precond_prob=1.0, seed=seed)
        for _ in range(50):
            opt.step(functools.partial(saddle, x))
        assert x[1].abs() > 0.5


def test_gradients_of_the_closure_are_left_in_grad():
    model = mlp()
    x, y = next(batches())
    twin = copy.deepcopy(model)
    regression(twin, x, y)().backward()
    PSGD(model.parameters(), precond_prob=1.0).step(regression(model, x, y))
    for p, expected in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(p.grad, expected.grad)
