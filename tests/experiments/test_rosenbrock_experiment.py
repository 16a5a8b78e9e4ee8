"""The experiment on Rosenbrock's valley: PSGD arrives, baselines are treated as documented, the page is complete."""

import io
import math

import pytest
import torch

from psgd.experiments import rosenbrock
from psgd.experiments.experiment import Result
from psgd.experiments.methods import METHODS
from psgd.experiments.rosenbrock import Config


def result(config, seed=0):
    try:
        return Result(config, seed, [{"step": r.step, **r.values} for r in rosenbrock.run(config, seed)])
    except ImportError as e:
        pytest.skip(str(e))


@pytest.fixture(scope="module")
def quick():
    return [result(c, s) for c in rosenbrock.cells("quick") for s in rosenbrock.seeds("quick")]


def test_psgd_finds_the_minimum_to_the_last_digit(quick):
    found = [r for r in quick if r.config.method == "psgd"]
    assert {r.config.noisy for r in found} == {False, True}
    assert all(rosenbrock.best(r) < rosenbrock.SMALL for r in found)
    assert all(rosenbrock.final(r) < rosenbrock.SMALL for r in found)


def test_a_record_has_every_step_and_with_noise_every_tenth(quick):
    for r in quick:
        assert len(rosenbrock.losses(r)) * (10 if r.config.noisy else 1) == r.config.steps == r.last("step")
        last = r.records[-1]
        height = rosenbrock.rosenbrock(last["u"][-1], last["v"][-1])  # of rounded numbers
        assert last["losses"][-1] == pytest.approx(height, rel=1e-2, abs=1e-6)


@pytest.mark.parametrize("name", ["psgd", "adahessian", "lbfgs", "adam"])
def test_resuming_is_going_on(name):
    config = Config(name, 0.1, noise_low=0.0, noise_high=3.0, steps=150)
    result(config)
    records = list(rosenbrock.run(config, 5))
    file = io.BytesIO()
    for record in rosenbrock.run(config, 5):
        if record.step == 50:
            torch.save(record.state(), file)
    file.seek(0)
    assert list(rosenbrock.run(config, 5, torch.load(file, weights_only=True))) == records[1:]


@pytest.mark.parametrize("name", ["sgd", "adahessian"])
def test_baselines_see_a_gradient_of_norm_one(name):
    config = Config(name, 0.5, steps=1)
    result(config)
    point, stepper = rosenbrock.build(config, 0)
    stepper.evaluate(rosenbrock.loss(config, 0, 0, point))
    torch.testing.assert_close(point.x.grad.detach().norm(), torch.tensor(1.0).double())


def test_psgd_and_lbfgs_see_the_gradient_as_it_is():
    for name in rosenbrock.UNCLIPPED:
        assert not rosenbrock.build(Config(name), 0)[0].x._backward_hooks


def test_a_step_of_lbfgs_may_search_along_its_line():
    r = result(Config("lbfgs-wolfe", 1.0, steps=60))
    assert rosenbrock.best(r) < rosenbrock.SMALL
    assert r.last("gradients") > 60


def test_what_is_lost_ends_early_and_its_best_still_counts():
    r = result(Config("lbfgs", 50.0))
    assert len(rosenbrock.losses(r)) < r.config.steps
    assert rosenbrock.final(r) == math.inf
    assert all(math.isfinite(x) for x in rosenbrock.losses(r))
    assert rosenbrock.tables([r])[0].rows[0][6] is None


def test_the_noise_of_a_step_stays_within_the_step_and_changes_with_it():
    config = Config(noise_low=0.0, noise_high=1.0)
    point, _ = rosenbrock.build(config, 0)
    same, other = rosenbrock.loss(config, 0, 0, point), rosenbrock.loss(config, 0, 1, point)
    assert float(same().detach()) == float(same().detach()) != float(other().detach())
    draws = [float((rosenbrock.loss(config, 7, t, point)().detach() - 9) / 400) for t in range(300)]
    assert 0 <= min(draws) < 0.05
    assert 0.95 < max(draws) <= 1


def test_the_table_has_the_papers_rows_and_all_but_psgd_are_tuned_alike():
    assert len(rosenbrock.PAPER) == 32
    table = [c for c in rosenbrock.cells("cpu") if not c.noisy and c.start_u == -2.0]
    assert [c.method for c in table][:32] == list(rosenbrock.PAPER)
    assert {c.steps for c in table} == {500}
    assert len({rosenbrock.lrs(c.method) for c in table}) == 1
    assert all(c.method in METHODS for c in table if c.method != "psgd")
    with pytest.raises(ValueError, match="not tuned"):
        rosenbrock.tuning("psgd")


def test_the_page_has_tables_plots_and_remarks(quick):
    tables = rosenbrock.tables(quick)
    assert [t.title for t in tables] == [
        "Best loss in 500 steps from (−2, 2)",
        "PSGD from two starts",
        "With noise, from (−2, 2)",
    ]
    assert all(len(row) == len(table.columns) for table in tables for row in table.rows)
    assert [row[0] for row in tables[0].rows] == ["adam", "psgd", "lbfgs-wolfe"]
    contours = rosenbrock.plots(quick)[0].marks[0]
    assert len(contours.values) == len(contours.y)
    assert len(contours.values[0]) == len(contours.x)
    assert "PSGD gets below 1e-30 on 2 of 2 seeds" in rosenbrock.remarks(quick)


def test_what_is_missing_leaves_gaps(quick):
    assert rosenbrock.tables([]) == rosenbrock.plots([]) == []
    assert rosenbrock.remarks([]) == ""
    for some in (quick[:1], quick[2:3], quick[-1:], [Result(quick[0].config, 0, [])]):
        rosenbrock.tables(some)
        rosenbrock.plots(some)
        rosenbrock.remarks(some)


def test_only_what_is_random_has_many_seeds():
    counts = {c.method: len(rosenbrock.seeds_for(c, "cpu")) for c in rosenbrock.cells("cpu") if not c.noisy}
    assert {name for name, n in counts.items() if n > 1} == {"psgd", "adahessian"}
    for name in ("adam", "hessian-free", "shampoo", "a2grad-exp"):
        config = Config(name, 0.01, steps=20)
        first, second = (list(rosenbrock.run(config, seed)) for seed in (0, 1))
        assert first == second
