"""Every row of the matrix: what `automatic` settles on, what it says, and whether h is right."""

import copy
import functools
import warnings

import pytest
import torch
from situations import (
    EXACT,
    F32,
    FINITE_DIFFERENCE,
    Recorder,
    bf16,
    compiled,
    cosine,
    error,
    net,
    reference,
    regression,
    spectral,
    trained,
)
from torch import nn

import psgd
from psgd import PSGD, hvp

SILENTLY_WRONG = {
    "tensor on ctx",
    "old weight_norm",
    "weight_norm",
}  # only a comparison finds out, as automatic's
EVERY = EXACT | {name: situation for name, (situation, _) in FINITE_DIFFERENCE.items()}


def silently(run, *args, **kwargs):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return run(*args, **kwargs)


@pytest.mark.parametrize("name", EXACT)
def test_exact_products_are_found_silently_and_right(name):
    opt = silently(trained, EXACT[name])
    assert opt.source is psgd.hessian
    for theta, v, h in opt.pairs:
        assert error(h.values(), reference(EXACT[name], theta, v)) < 1e-4


@pytest.mark.parametrize("name", FINITE_DIFFERENCE)
def test_without_exact_products_finite_differences_are_right_and_say_why_once(name):
    situation, cause = FINITE_DIFFERENCE[name]
    with pytest.warns(UserWarning, match=f"finite differences.*({cause})") as seen:
        opt = trained(situation)
    assert len(seen) == 1
    assert seen[0].filename.endswith("situations.py")  # the line that called step, not one of ours
    assert opt.source is psgd.finite_difference
    for theta, v, h in opt.pairs:
        assert error(h.values(), reference(situation, theta, v)) < 1e-2


@pytest.mark.parametrize("name", EVERY)
def test_finite_differences_and_whitening_work_in_every_row(name):
    for curvature in (psgd.finite_difference, psgd.whiten):
        opt = silently(trained, EVERY[name], curvature=curvature)
        assert opt.source is curvature
        theta, v, h = opt.pairs[-1]
        if curvature is psgd.whiten:
            assert h is None
        else:
            assert cosine(h.values(), reference(EVERY[name], theta, v)) > 0.99 or "relu" in name


@pytest.mark.parametrize("name", sorted(FINITE_DIFFERENCE.keys() - SILENTLY_WRONG))
def test_hessian_by_name_raises_and_changes_nothing(name):
    model, loss = FINITE_DIFFERENCE[name][0](F32)
    before = [p.detach().clone() for p in model.parameters()]
    opt = PSGD(model.parameters(), curvature=psgd.hessian)
    with pytest.raises(RuntimeError, match="curvature=hessian needs a model that can be differentiated twice"):
        opt.step(loss)
    assert all(p.equal(b) for p, b in zip(model.parameters(), before, strict=True))
    assert opt.param_groups[0]["iteration"] == 0


@pytest.mark.parametrize("name", FINITE_DIFFERENCE)
def test_without_a_closure_what_fails_or_cannot_be_verified_is_whitened(name):
    situation, cause = FINITE_DIFFERENCE[name]
    model, loss = situation(F32)
    opt = Recorder(model.parameters())
    with pytest.warns(UserWarning, match=f"gradient whitening.*({cause}|cannot be verified)") as seen:
        for _ in range(3):
            opt.zero_grad()
            with opt.curvature():
                loss().backward()
            opt.step()
    assert len(seen) == 1
    assert opt.source is psgd.whiten
    assert opt.param_groups[0]["updates"] == 3


@pytest.mark.slow
def test_inductor_gets_finite_differences():
    with pytest.warns(UserWarning, match="finite differences"):
        opt = trained(compiled("inductor"))
    theta, v, h = opt.pairs[-1]
    assert error(h.values(), reference(compiled("inductor"), theta, v)) < 1e-2


def test_a_compiled_model_is_compiled_at_most_twice():
    """Once for watched evaluations, once for plain ones; never again, whatever the schedule and lr do."""
    torch._dynamo.reset()
    model, loss = compiled("aot_eager")(F32)
    opt = PSGD(model.parameters(), precond_prob=0.5, curvature=psgd.finite_difference)
    torch._dynamo.utils.counters.clear()
    for step in range(8):
        opt.param_groups[0]["lr"] = 0.01 / (1 + step)
        opt.step(loss)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] <= 2
    assert not torch._dynamo.utils.counters["graph_break"]


def test_exact_products_under_autocast_are_as_right_as_bfloat16_allows():
    situation = regression(lambda: net(hidden=32), inputs=(64, 6), context=bf16)
    opt = silently(trained, situation)
    assert opt.source is psgd.hessian
    for theta, v, h in opt.pairs:
        assert error(h.values(), reference(situation, theta, v)) < 2e-2


@pytest.mark.parametrize("outside", [False, True])
def test_finite_differences_under_autocast_take_epsilon_from_bfloat16(outside):
    situation = regression(lambda: net(hidden=32), inputs=(64, 6), context=bf16)
    if outside:  # the whole step under autocast, whose cache of weights must not outlive them
        with bf16():
            opt = trained(regression(lambda: net(hidden=32), inputs=(64, 6)), curvature=psgd.finite_difference)
    else:
        opt = trained(situation, curvature=psgd.finite_difference)
    for theta, v, h in opt.pairs:
        assert cosine(h.values(), reference(situation, theta, v)) > 0.99


@pytest.mark.parametrize("curvature", [psgd.automatic, psgd.hessian, psgd.finite_difference])
def test_dropout_is_the_same_in_both_evaluations_and_advances_once(curvature):
    model = nn.Sequential(nn.Linear(6, 32), nn.Tanh(), nn.Dropout(0.5), nn.Linear(32, 3))
    x = torch.randn(16, 6)
    opt = Recorder(model.parameters(), curvature=curvature)
    torch.manual_seed(1)
    opt.step(lambda: model(x).square().mean())
    after = torch.get_rng_state()
    theta, v, h = opt.pairs[0]
    torch.manual_seed(1)
    with torch.no_grad():
        for p, t in theta.items():
            p.copy_(t)
    _, expected = hvp(model(x).square().mean(), list(theta), list(v.values()))
    assert error(h.values(), [t.double() for t in expected]) < 5e-3
    assert torch.equal(torch.get_rng_state(), after)


@pytest.mark.parametrize("curvature", [psgd.automatic, psgd.hessian, psgd.finite_difference, psgd.whiten])
def test_batch_norm_sees_each_batch_once_with_model(curvature):
    model, loss = EXACT["batch norm"](F32)
    opt = PSGD(model.parameters(), model=model, curvature=curvature)
    for _ in range(10):
        opt.step(loss)
    assert model[1].num_batches_tracked == 10


@pytest.mark.parametrize("curvature, tolerance", [(psgd.automatic, 0.3), (psgd.finite_difference, 5e-3)])
def test_spectral_norm_is_evaluated_with_the_same_vectors_with_model(curvature, tolerance):
    """The exact product takes the vectors of the power iteration for constants, as torch's gradient does."""
    model, loss = spectral(F32)
    if curvature is psgd.finite_difference:  # far from converged
        model[0].parametrizations.weight[0]._v.copy_(nn.functional.normalize(torch.arange(1.0, 7.0), dim=0))
    opt = Recorder(model.parameters(), model=model, curvature=curvature)
    for _ in range(5):
        twin = copy.deepcopy(model)
        vectors = twin[0].parametrizations.weight[0]._v.clone()
        silently(opt.step, loss)
        twin(torch.zeros(1, 6))  # one evaluation advances the vectors as far as the step did
        assert all(a.equal(b) for a, b in zip(model.buffers(), twin.buffers(), strict=True))
        theta, v, h = opt.pairs[-1]
        assert error(h.values(), reference(functools.partial(spectral, vectors=vectors), theta, v)) < tolerance
    assert opt.source is (psgd.hessian if curvature is psgd.automatic else curvature)


def test_spectral_norm_without_model_keeps_the_exact_product():
    model, loss = spectral(F32)
    opt = PSGD(model.parameters())
    silently(opt.step, loss)
    assert opt.source is psgd.hessian
