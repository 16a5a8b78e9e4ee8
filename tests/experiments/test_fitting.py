"""The experiments on fitting: known solutions are found, resuming is going on, and every part of the page is there."""

import io
import math

import pytest
import torch

from psgd.experiments import fitting_diagonal, fitting_structure, fitting_tracking
from psgd.experiments.experiment import Result
from psgd.experiments.show import HeatMap

EXPERIMENTS = [fitting_diagonal, fitting_structure, fitting_tracking]


def name(module):
    return module.__name__.rpartition(".")[2]


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def result(experiment, config, seed=0):
    return Result(config, seed, [{"step": r.step, **r.values} for r in experiment.run(config, seed)])


@pytest.fixture(scope="module")
def quick():
    pytest.importorskip("scipy")
    return {e: [result(e, c, s) for c in e.cells("quick") for s in e.seeds("quick")] for e in EXPERIMENTS}


@pytest.mark.parametrize("experiment", EXPERIMENTS, ids=name)
def test_the_page_has_tables_plots_and_remarks(experiment, quick):
    results = quick[experiment]
    tables = experiment.tables(results)
    assert tables
    assert all(len(row) == len(table.columns) for table in tables for row in table.rows)
    assert all(plot.marks for plot in experiment.plots(results))
    assert experiment.remarks(results)


@pytest.mark.parametrize("experiment", EXPERIMENTS, ids=name)
def test_what_is_missing_leaves_gaps(experiment, quick):
    assert experiment.tables([]) == experiment.plots([]) == []
    assert experiment.remarks([]) == ""
    for some in (quick[experiment][:1], quick[experiment][1::3], [Result(quick[experiment][0].config, 0, [])]):
        experiment.tables(some)
        experiment.plots(some)
        experiment.remarks(some)


@pytest.mark.parametrize("experiment", [fitting_diagonal, fitting_tracking], ids=name)
def test_resuming_is_going_on(experiment):
    pytest.importorskip("scipy")
    for config in experiment.cells("quick"):
        records = list(experiment.run(config, 3))
        middle = len(records) // 2
        file = io.BytesIO()
        for i, record in enumerate(experiment.run(config, 3)):
            if i == middle:
                torch.save(record.state(), file)
        file.seek(0)
        rest = list(experiment.run(config, 3, torch.load(file, weights_only=True)))
        assert rest == records[middle + 1 :]


@pytest.mark.parametrize("experiment", EXPERIMENTS, ids=name)
def test_an_unknown_method_is_refused(experiment):
    with pytest.raises(ValueError, match=r"is one of .*, got 'magic'"):
        list(experiment.run(experiment.Config(method="magic"), 0))


# --- the diagonal


@pytest.mark.parametrize("method", fitting_diagonal.METHODS)
@pytest.mark.parametrize("problem", fitting_diagonal.PROBLEMS)
def test_the_error_is_zero_at_the_solution_and_every_fit_gets_close(method, problem):
    config = fitting_diagonal.Config(method, problem, n=50, steps=1500)
    m = fitting_diagonal.moment(fitting_diagonal.hessian(config, 0))
    assert fitting_diagonal.error(m.rsqrt(), m) < 1e-14
    assert fitting_diagonal.error(2 * m.rsqrt(), m) > 0.1 * m.sqrt().mean()
    assert result(fitting_diagonal, config).last("error") < 0.01


def test_psgd_keeps_its_accuracy_in_few_digits_and_the_closed_form_does_not():
    ends = {
        m: result(fitting_diagonal, fitting_diagonal.Config(m, "uniform", "bfloat16", 200, 3000)).last("error")
        for m in ("psgd", "closed form")
    }
    assert ends["psgd"] < 1e-3 < 1e-2 < ends["closed form"]


# --- tracking


@pytest.mark.parametrize("method", ["GL", "triangular", "BFGS"])
def test_what_can_hold_the_inverse_finds_it(method):
    pytest.importorskip("scipy")
    config = fitting_tracking.Config(method, "static", n=4, steps=1500)
    assert result(fitting_tracking, config).last("error") < 1e-3


def test_noise_moves_the_best_preconditioner_and_the_fits_find_it():
    config = fitting_tracking.Config("triangular", "noisy", n=4, steps=3000)
    h = fitting_tracking.tridiagonal(4)
    values, vectors = torch.linalg.eigh(h @ h + fitting_tracking.NOISE**2 * torch.eye(4))
    best = vectors * values.rsqrt() @ vectors.mT
    assert math.isclose(fitting_tracking.floor(config), float((best @ h - torch.eye(4)).norm()), rel_tol=1e-6)
    assert result(fitting_tracking, config).last("error") < fitting_tracking.floor(config) + 0.05


def test_the_drift_is_as_large_as_the_hessian():
    config = fitting_tracking.Config("closed form", "drifting", n=6, steps=400)
    last = list(fitting_tracking.run(config, 0))[-1].state()["hessian"]
    change = last - fitting_tracking.tridiagonal(6)
    torch.testing.assert_close(change.diagonal().mean(), torch.tensor(1.0).double(), atol=0.2, rtol=0)


# --- structure


def test_each_hessian_has_the_group_made_for_it():
    results = [
        result(fitting_structure, fitting_structure.Config(group, n=8, steps=300))
        for group in ("none", "Diagonal()", "Blocks(2, Dense())", "Circulant()", "dct(XMat())", "Dense()")
    ]
    columns, table = fitting_structure.rows(results)
    conditions = {row.name: dict(zip(columns, row.conditions, strict=True)) for row in table}
    for column, group in {
        "blocks": "Blocks(2, Dense())",
        "circulant": "Circulant()",
        "DCT-sparse": "dct(XMat())",
    }.items():
        assert conditions[group][column] < 1.2
        assert conditions["none"][column] > 50
    text = fitting_structure.remarks(results)
    assert "no numbers to compare with" in text and "blocks: Blocks(2, Dense())" in text
    (heat,) = fitting_structure.plots(results)[0].marks
    assert isinstance(heat, HeatMap)
    assert len(heat.values) == len(results)
