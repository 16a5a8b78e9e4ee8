"""Every method of the registry trains, counts what it took, and goes on from a checkpoint as if never interrupted."""

import io
import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import psgd
from psgd.experiments.methods import METHODS, Loss, method, preconditioned, unrounded
from psgd.experiments.steppers import KFAC, WITHOUT_DEPENDENCIES, HessianFree, likelihood, noise
from psgd.experiments.training import restore, snapshot

TWICE = {"sam", "asam", "kfac"}
"""What takes two gradients a step."""
FREE = {"lbfgs", "lbfgs-wolfe", "hessian-free"}
"""What takes as many as it likes."""
SECOND_ORDER = {"adahessian", *(name for name in METHODS if name.startswith("psgd-"))}
"""What takes one Hessian product a step."""

X = torch.randn(400, 8, generator=torch.Generator().manual_seed(0))
Y = (X[:, :3].sum(1) > 0).long() + (X[:, 3] > 1).long()


def network():
    with noise(1):
        return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 3))


def train(name, lr, steps, interrupted=None, seed=0):
    """Return losses, the stepper and the model; interrupted before a step, all is built anew from a checkpoint."""
    model = network()
    stepper, losses = method(name).build(model, lr, seed), []
    for i in range(steps):
        if i == interrupted:
            file = io.BytesIO()
            torch.save(snapshot(model, stepper), file)
            file.seek(0)
            model = network()
            stepper = method(name).build(model, lr, seed)
            restore(torch.load(file, weights_only=True), model, stepper)
        rows = torch.randint(0, 400, (64,), generator=torch.Generator().manual_seed(i))
        losses.append(float(stepper.step(Loss(model, X[rows], Y[rows], F.cross_entropy))))
    return losses, stepper, model


def rate(name, fraction):
    """Return a learning rate from the range of a method."""
    low, high = METHODS[name].lr
    return low ** (1 - fraction) * high**fraction


def built(name, model, lr):
    """Return a stepper, or skip the test where its package is missing."""
    try:
        return method(name).build(model, lr)
    except ImportError as e:
        pytest.skip(str(e))


@pytest.fixture(params=METHODS)
def name(request):
    built(request.param, network(), 0.1)
    return request.param


def test_a_method_lowers_the_loss(name):
    for fraction in (0.75, 0.0):  # without a line search, L-BFGS wants a small rate on batches that change
        losses, _, _ = train(name, rate(name, fraction), 10 if name in FREE else 30)
        if sum(losses[-5:]) / 5 < 0.87 * losses[0]:
            return
    pytest.fail(f"{losses[0]:.3f} became {losses[-1]:.3f}")


def test_a_method_counts_what_it_takes(name):
    _, stepper, _ = train(name, rate(name, 0.25), 5)
    if name in FREE:
        assert stepper.gradients > 5
    else:
        assert stepper.gradients == (10 if name in TWICE else 5)
    if name == "hessian-free":
        assert stepper.products >= 5
    else:
        assert stepper.products == (5 if name in SECOND_ORDER else 0)


def test_resuming_is_going_on(name):
    straight, one, model = train(name, rate(name, 0.5), 8)
    resumed, other, again = train(name, rate(name, 0.5), 8, interrupted=4)
    assert resumed == (pytest.approx(straight, rel=1e-5) if name == "heavyball-kron" else straight)
    bound = 1e-5 if name == "heavyball-kron" else 0  # whose own resumed run differs by rounding on some CPUs
    for p, q in zip(model.parameters(), again.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=0, atol=bound)
    assert (one.gradients, one.products) == (other.gradients, other.products)


def test_a_method_leaves_the_random_numbers_alone(name):
    before = torch.get_rng_state()
    train(name, rate(name, 0.5), 2)
    assert torch.get_rng_state().equal(before)


def test_the_step_returns_the_loss_before_it(name):
    model = network()
    loss = Loss(model, X, Y, F.cross_entropy)
    before = float(loss().detach())
    found = method(name).build(model, rate(name, 0.5)).step(loss)
    assert math.isclose(float(found), before, rel_tol=1e-6)
    assert not found.requires_grad


def test_schedulers_set_the_rate(name):
    model = network()
    stepper = method(name).build(model, rate(name, 0.5))
    scheduler = torch.optim.lr_scheduler.ExponentialLR(stepper.optimizer, 0.5)
    stepper.step(Loss(model, X, Y, F.cross_entropy))
    scheduler.step()
    lr = stepper.optimizer.param_groups[0]["lr"]
    assert math.isclose(float(lr), rate(name, 0.5) / 2, rel_tol=1e-6)


@pytest.mark.parametrize("name", ["adahessian", "heavyball-kron", "kfac", "psgd-lra"])
def test_what_is_random_depends_on_the_seed(name):
    built(name, network(), 0.1)
    first, second, other = (train(name, rate(name, 0.5), 5, seed=seed)[0] for seed in (0, 0, 1))
    assert first == second != other


def test_whitening_takes_no_products():
    model = network()
    stepper = preconditioned(psgd.lra(2), curvature=psgd.whiten)(model, 0.01)
    for _ in range(3):
        stepper.step(Loss(model, X, Y, F.cross_entropy))
    assert (stepper.gradients, stepper.products) == (3, 0) and stepper.optimizer.source is psgd.whiten


def test_muon_leaves_embeddings_and_vectors_to_adamw():
    model = nn.Sequential(nn.Embedding(5, 4), nn.LayerNorm(4), nn.Linear(4, 3))
    matrices, rest = built("muon", model, 0.1).optimizer.param_groups
    assert matrices["use_muon"] and [p.shape for p in matrices["params"]] == [(3, 4)]
    assert not rest["use_muon"] and [p.shape for p in rest["params"]] == [(5, 4), (4,), (4,), (3,)]


@pytest.mark.parametrize("shape", [(5, 7), (12, 4), (6, 3, 2)], ids=str)
def test_muon_in_float32_is_the_packages_but_for_rounding(shape):
    package = pytest.importorskip("pytorch_optimizer", reason="Muon comes with pytorch_optimizer")
    moved = []
    for kind in (package.Muon, unrounded(package.Muon)):
        params = [nn.Parameter(torch.zeros(shape)) for _ in range(2)]
        optimizer = kind([{"params": params, "lr": 1.0, "use_muon": True}])
        for step in range(2):
            for i, p in enumerate(params):
                p.grad = torch.randn(shape, generator=torch.Generator().manual_seed(2 * step + i))
            optimizer.step()
        moved.append(torch.stack(params).detach())
    theirs, ours = moved
    assert 0 < (theirs - ours).norm() < 0.03 * ours.norm()


def test_an_unknown_method_is_refused_with_the_known_ones():
    with pytest.raises(ValueError, match=r"a method is one of .*adam.*, got 'adamm'"):
        method("adamm")


def test_the_registry_needs_no_package_and_a_method_names_the_one_it_misses():
    script = """
import sys
missing = ["pytorch_optimizer", "torch_optimizer", "curvlinops", "heavyball", "scipy", "scipy.optimize"]
for name in missing:
    sys.modules[name] = None
from torch import nn
from psgd.experiments.methods import METHODS, Loss
for name, method in METHODS.items():
    try:
        model = nn.Linear(2, 2)
        method.build(model, 0.1)
    except ImportError as e:
        print(name, "|", e)
"""
    found = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout
    said = dict(line.split(" | ") for line in found.splitlines())
    others = {"torch", "psgd"}
    assert said.keys() == {name for name, m in METHODS.items() if m.source not in others}
    assert said["adan"] == (
        "this method needs the package pytorch-optimizer, but the module pytorch_optimizer cannot be imported: "
        "pip install 'psgd[experiments]'"
    )
    assert said["kfac"].endswith(f" && pip install --no-deps {WITHOUT_DEPENDENCIES['curvlinops-for-pytorch']}")


def test_the_module_that_is_missing_is_named_if_it_is_another_packages():
    pytest.importorskip("curvlinops")
    script = """
import sys
sys.modules["einops"] = None
from torch import nn
from psgd.experiments.methods import method
try:
    method("kfac").build(nn.Linear(2, 2), 0.1)
except ImportError as e:
    print(e)
"""
    said = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout
    assert (
        "but the module einops cannot be imported: pip install" in said and " einops " in said.partition("--no-deps")[2]
    )


def test_what_methods_say_is_to_be_installed_is_what_run_installs_and_the_page_says():
    root = Path(__file__).parents[2]
    run, page = ((root / name).read_text(encoding="utf-8") for name in ("run", "docs/laboratory.md"))
    for packages in WITHOUT_DEPENDENCIES.values():
        assert set(packages.split()) <= set(run.partition("--no-deps")[2].split())
        assert set(packages.split()) <= set(page.partition("--no-deps")[2].split())


# --- K-FAC


def test_kfac_is_exact_for_one_linear_layer():
    model = nn.Linear(3, 1)
    built("kfac", model, 1.0)
    inputs = torch.randn(8000, 3, generator=torch.Generator().manual_seed(0)) * torch.tensor([1.0, 5.0, 0.2]) + 1
    targets = inputs @ torch.tensor([[1.0], [2.0], [3.0]]) + 4
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    stepper = KFAC(model, optimizer, damping=1e-9, average=0.9, every=1)
    loss = Loss(model, inputs, targets, F.mse_loss)
    start = float(stepper.step(loss))
    # Fisher's matrix is the Hessian but for the labels drawn, so that one step finds the solution but for their noise
    assert loss().detach() < 2e-3 * start


def test_kfac_sees_a_layer_applied_many_times_as_one_applied_to_a_sequence():
    class Sequence(nn.Module):
        def __init__(self):
            super().__init__()
            with noise(3):
                self.inner, self.outer = nn.Linear(4, 5), nn.Linear(5, 2)

        def forward(self, x):
            return self.outer(self.hidden(x).tanh().sum(1))

        def hidden(self, x):
            return self.inner(x)

    class Loop(Sequence):
        def hidden(self, x):
            return torch.stack([self.inner(x[:, t]) for t in range(x.shape[1])], 1)

    inputs, targets = torch.randn(16, 7, 4, generator=torch.Generator().manual_seed(0)), torch.arange(16) % 2
    factors = []
    for model in (Sequence(), Loop()):
        stepper = built("kfac", model, 0.1)
        stepper.step(Loss(model, inputs, targets, F.cross_entropy))
        factors.append(stepper.factors)
    for kind in factors[0]:
        for layer in factors[0][kind]:
            torch.testing.assert_close(factors[0][kind][layer], factors[1][kind][layer])


def test_kfac_wants_a_batch_and_a_likelihood():
    model = network()
    stepper = KFAC(model, torch.optim.SGD(model.parameters(), lr=0.1), damping=1e-3, average=0.9, every=1)
    with pytest.raises(ValueError, match="K-FAC needs a Loss"):
        stepper.step(lambda: torch.zeros(()))
    with pytest.raises(ValueError, match="the criterion must be one of cross_entropy, binary"):
        likelihood(F.l1_loss)


def test_kfac_that_diverges_says_so_by_a_loss_that_is_not_finite():
    model = network()
    stepper = built("kfac", model, 1e38)
    losses = [float(stepper.step(Loss(model, X, Y, F.cross_entropy))) for _ in range(3)]
    assert math.isfinite(losses[0])
    assert not math.isfinite(losses[-1])


# --- Hessian-free


def test_hessian_free_never_goes_up_and_stays_in_its_region():
    model = network()
    stepper = HessianFree(torch.optim.SGD(model.parameters(), lr=0.3))
    loss, last = Loss(model, X, Y, F.cross_entropy), math.inf
    for _ in range(10):
        before = torch.cat([p.detach().flatten() for p in model.parameters()])
        value = float(stepper.step(loss))
        after = torch.cat([p.detach().flatten() for p in model.parameters()])
        assert value < last
        assert 0 < float((after - before).norm()) < 0.3 * 1.001
        last = value


def test_hessian_free_solves_a_quadratic():
    model = nn.Linear(3, 1).double()
    inputs = torch.randn(100, 3, generator=torch.Generator().manual_seed(0)).double()
    targets = inputs.sum(1, keepdim=True) - 1
    stepper = HessianFree(torch.optim.SGD(model.parameters(), lr=100.0))
    for _ in range(8):
        loss = stepper.step(Loss(model, inputs, targets, F.mse_loss))
    assert loss < 1e-12
