"""The low level on its own: hvp, fit and precondition, in a loop of one's own on plain tensors."""

import pytest
import torch
from toys import batches, cosine, mlp, preconditioner, quadratic, regression, rosenbrock, spectrum

from psgd import PSGD, Dense, Diagonal, Normalized, XMat, hessian, hvp, lra


def test_hvp_returns_gradient_and_product():
    x = torch.tensor([1.0, 2.0], requires_grad=True)
    (g,), (h,) = hvp((x**3).sum(), [x], [torch.tensor([1.0, -1.0])])
    assert g.tolist() == [3.0, 12.0] and h.tolist() == [6.0, -12.0]
    assert not g.requires_grad and not h.requires_grad and x.grad is None


def test_hvp_equals_the_dense_hessian():
    model = mlp(torch.float64)
    x, y = next(batches(torch.float64))
    params = list(model.parameters())
    v = [torch.randn(p.shape, generator=torch.Generator().manual_seed(0), dtype=p.dtype) for p in params]

    def loss(*values):
        names = [name for name, _ in model.named_parameters()]
        out = torch.func.functional_call(model, dict(zip(names, values, strict=True)), (x,))
        return torch.nn.functional.mse_loss(out, y)

    expected = torch.autograd.functional.vhp(loss, tuple(p.detach() for p in params), tuple(v))[1]
    for a, b in zip(hvp(regression(model, x, y)(), params, v)[1], expected, strict=True):
        torch.testing.assert_close(a, b)


def test_hvp_marks_what_the_loss_does_not_reach_and_what_is_linear():
    used, linear, unused = (torch.ones(2, requires_grad=True) for _ in range(3))
    v = [torch.ones(2)] * 3
    g, h = hvp(used.square().sum() + linear.sum(), [used, linear, unused], v)
    assert g[1].tolist() == [1.0, 1.0] and g[2] is None
    assert h[0].tolist() == [2.0, 2.0] and h[1].tolist() == [0.0, 0.0] and h[2] is None


def test_hvp_keeps_the_graph():
    x = torch.ones(2, requires_grad=True)
    loss = x.pow(3).sum()
    hvp(loss, [x], [torch.ones(2)])
    loss.backward()
    assert x.grad.tolist() == [3.0, 3.0]


def test_hvp_of_a_complex_parameter_is_that_of_its_real_view():
    h = spectrum(1.0, 2.0, 3.0, 4.0)
    z = torch.tensor([1 + 2j, 3 - 1j], dtype=torch.complex128, requires_grad=True)
    v = torch.tensor([0.5 - 1j, 2j], dtype=torch.complex128)
    product = hvp(quadratic(h, torch.view_as_real(z))(), [z], [v])[1][0]
    torch.testing.assert_close(torch.view_as_real(product).flatten(), h @ torch.view_as_real(v).flatten())


@pytest.mark.parametrize("group", [Dense(), lra(4), Diagonal(), XMat()], ids=str)
def test_a_loop_of_ones_own_on_plain_tensors(group):
    h = spectrum(1.0, 2.0, 3.0, 4.0) if group in (Dense(), lra(4)) else torch.arange(1.0, 5).double().diag()
    rng = torch.Generator().manual_seed(0)
    q = group.init(4, dtype=torch.float64, generator=rng)
    for t in range(400):
        v = torch.randn(4, generator=rng, dtype=torch.float64)
        q = group.fit(q, v, h @ v, lr=0.5, coin=t % 2 == 0)
    g = torch.tensor([1.0, -2.0, 3.0, 0.5], dtype=torch.float64)
    assert cosine(group.precondition(q, g), torch.linalg.solve(h, g)) > 0.999


def test_rosenbrock_by_hand():
    group = Dense()
    x, rng = torch.tensor([-1.0, 1.0], dtype=torch.float64, requires_grad=True), torch.Generator().manual_seed(0)
    q = group.init(2, dtype=torch.float64, scale=0.05)
    for _ in range(300):
        v = torch.randn(2, generator=rng, dtype=torch.float64)
        (g,), (h,) = hvp(rosenbrock(x), [x], [v])
        q = group.fit(q, v, h, lr=0.5, rule=Normalized())
        step = group.precondition(q, g)
        x = (x - step * (2**0.5 / step.norm()).clamp_max(1)).detach().requires_grad_()
    assert rosenbrock(x) < 1e-10


def test_the_optimizer_is_that_loop():
    x = torch.tensor([-1.0, 1.0], dtype=torch.float64, requires_grad=True)
    options = {"lr": 0.3, "momentum": 0.0, "precond_prob": 1.0, "max_rms": None, "init_scale": 0.1}
    opt = PSGD([x], Dense(), curvature=hessian, **options)
    y, q = x.detach().clone().requires_grad_(), Dense().init(2, scale=0.1, dtype=torch.float64)
    for _ in range(20):
        v = opt._probes([x])
        opt.step(lambda: rosenbrock(x))
        (g,), (h,) = hvp(rosenbrock(y), [y], v)
        q = Dense().fit(q, v[0], h)
        y = (y - 0.3 * Dense().precondition(q, g)).detach().requires_grad_()
    torch.testing.assert_close(x, y)
    torch.testing.assert_close(preconditioner(opt, x), q["Q"].mT @ q["Q"])
