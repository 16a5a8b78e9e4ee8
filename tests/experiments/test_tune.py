import dataclasses
import json
import math
import multiprocessing
import types
from pathlib import Path
from typing import Any

import pytest
from experiments import tiny
from frame import NAME

from psgd.experiments import provenance, tune, xor
from psgd.experiments.pool import Outcome, attempt


class Here:
    """A pool of this process."""

    def run(self, function, tasks):
        for key, task in tasks.items():
            yield Outcome(key, *attempt(function, task))


def trial(fields, seed=3):
    return tune.result(tiny, dataclasses.replace(tiny.tuning("sgd"), **fields), seed)


def test_a_search_finds_a_good_rate_and_is_a_function_of_its_seed():
    found = tune.study(NAME, "sgd", 12, seed=3)
    assert found == tune.study(NAME, "sgd", 12, seed=3)
    assert found["lr"] != tune.study(NAME, "sgd", 12, seed=4)["lr"]
    assert 1e-4 <= found["lr"] <= 1.0 and found["range"] == [1e-4, 1.0] and found["trials"] == 12
    assert found["score"] == tiny.score(trial({"lr": found["lr"]}))
    assert found["command"] == f"psgd tune {NAME} sgd --trials 12 --seed 3"
    assert {"psgd", "torch", "optuna"} <= set(found["versions"])
    assert found["processor"] == provenance.processor()  # whose roundings lead the search


def test_an_experiment_may_have_ranges_of_its_own(monkeypatch):
    monkeypatch.setattr(tiny, "lrs", lambda method: (0.2, 0.3), raising=False)
    found = tune.study(NAME, "sgd", 3, seed=0)
    assert 0.2 <= found["lr"] <= 0.3 and found["range"] == [0.2, 0.3]


def test_a_trial_has_the_records_that_a_run_keeps():
    found = tune.result(xor, xor.Config(length=4, iterations=3, hidden=5, batch=8), 0)
    assert [r["step"] for r in found.records] == [3]  # and not the places for checkpoints


RANGES = {"lr": (0.01, 0.5), "clip": (1.0, 100.0)}
START = {"lr": 0.02, "clip": 7.0}


@pytest.fixture
def together(monkeypatch):
    """Let the experiment have two fields tuned, and return a list of what is tried."""
    tried = []
    honest = tune.result

    def result(experiment, config, seed):
        tried.append({field: getattr(config, field) for field in RANGES})
        return honest(experiment, config, seed)

    monkeypatch.setattr(tiny, "ranges", lambda method: RANGES, raising=False)
    monkeypatch.setattr(tiny, "start", lambda method: START, raising=False)
    monkeypatch.setattr(tune, "result", result)
    return tried


def test_several_fields_are_found_together_from_a_start_on(together):
    found = tune.study(NAME, "sgd", 8, seed=3)
    assert len(together) == 8 and together[0] == START and START not in together[1:]
    for fields in (*together, found["fields"]):
        assert list(fields) == list(RANGES)
        assert all(low <= fields[field] <= high for field, (low, high) in RANGES.items())
    scores = [tiny.score(trial(fields)) for fields in together[:8]]
    assert found["score"] == min(scores) and found["fields"] == together[scores.index(min(scores))]
    assert found["lr"] == found["fields"]["lr"] and found["range"] == [0.01, 0.5]
    assert found["ranges"] == {"lr": [0.01, 0.5], "clip": [1.0, 100.0]}


def test_a_search_of_several_fields_is_a_function_of_its_seed(together):
    one, again, other = (tune.study(NAME, "sgd", 5, seed=seed) for seed in (3, 3, 4))
    assert one == again and together[:5] == together[5:10]
    assert together[10] == START and together[11:] != together[1:5] and other["seed"] == 4


def test_one_trial_of_several_fields_is_the_start(together):
    assert tune.study(NAME, "sgd", 1, seed=0)["fields"] == START == together[0]


def test_what_was_found_is_tried_again_at_the_end_and_the_best_of_that_is_kept(together, monkeypatch):
    searched = tune.study(NAME, "sgd", 4, seed=3)["fields"]
    together.clear()
    rates = (searched["lr"], searched["lr"] / 50, searched["lr"] / 20)

    def further(method, fields, scores):
        assert method == "sgd" and fields == searched and len(scores) <= 3
        at = searched | {"lr": rates[len(scores)]} if len(scores) < 3 else None
        return at and dataclasses.replace(tiny.tuning(method), steps=9, **at)

    monkeypatch.setattr(tiny, "further", further, raising=False)
    found = tune.study(NAME, "sgd", 4, seed=3)
    again = [searched | {"lr": lr} for lr in rates]
    assert together[4:] == again
    scores = [tiny.score(trial({"steps": 9, **fields})) for fields in again]
    assert found["again"] == [{**fields, "score": score} for fields, score in zip(again, scores, strict=True)]
    assert found["fields"] == again[scores.index(min(scores))] and found["lr"] == found["fields"]["lr"]


def test_of_what_is_tried_again_the_best_counts_and_what_diverges_does_not():
    rates = (1.0, 2.0, 3.0, 4.0)
    scores = dict(zip(rates, (math.inf, 0.5, 0.25, 0.25), strict=True))

    def further(before):
        assert before == [scores[lr] for lr in rates[: len(before)]]
        return types.SimpleNamespace(lr=rates[len(before)]) if len(before) < len(rates) else None

    best, kept = tune.tried_again(further, ["lr"], lambda config: scores[config.lr])
    assert best == {"lr": 3.0}
    assert kept == {"again": [{"lr": lr, "score": None if lr == 1.0 else scores[lr]} for lr in rates]}


def test_fields_are_kept_and_can_be_looked_up(together, monkeypatch, tmp_path):
    out = tmp_path / "tuned.json"
    monkeypatch.setattr(tune, "FILE", out)
    assert tune.found(NAME, "sgd", START) is START
    [outcome] = tune.tune(NAME, ["sgd"], Here(), trials=3, out=out)
    assert json.loads(out.read_text()) == {NAME: {"sgd": outcome.value}}
    assert tune.found(NAME, "sgd", {}) == outcome.value["fields"] and tune.tuned(NAME, "sgd") == outcome.value["lr"]
    assert tune.found(NAME, "momentum", START) is START and tune.found("another", "sgd", START) is START


def test_every_field_is_looked_at_for_being_near_an_end():
    entry = {"lr": 0.1, "range": [0.01, 1.0], "ranges": {"lr": [0.01, 1.0], "clip": [1.0, 100.0]}}
    assert tune.near_ends({**entry, "fields": {"lr": 0.1, "clip": 10.0}}) == {}
    assert tune.near_ends({**entry, "fields": {"lr": 0.1, "clip": 99.0}}) == {"clip": [1.0, 100.0]}
    assert list(tune.near_ends({**entry, "fields": {"lr": 0.0101, "clip": 1.0}})) == ["lr", "clip"]


def failing(monkeypatch, above: float) -> None:
    """Let large rates diverge in every way there is."""
    honest = tiny.run

    def run(config, seed, state=None):
        if config.lr > above:
            if int(config.lr * 1e6) % 2:
                raise RuntimeError("linalg: not positive definite")
            config = tiny.Config(lr=math.inf)
        yield from honest(config, seed, state)

    monkeypatch.setattr(tiny, "run", run)


def test_trials_that_diverge_are_infinitely_bad_and_no_more(monkeypatch):
    failing(monkeypatch, above=0.05)
    found = tune.study(NAME, "sgd", 20, seed=0)
    assert found["lr"] <= 0.05 and 0 < found["diverged"] < 20 and math.isfinite(found["score"])


def test_a_method_of_which_all_trials_diverge_is_an_error_and_not_kept(monkeypatch, tmp_path):
    failing(monkeypatch, above=0.0)
    out = tmp_path / "tuned.json"
    [outcome] = tune.tune(NAME, ["sgd"], Here(), trials=3, out=out)
    assert "no trial of sgd ended with a finite score" in outcome.error
    assert not out.exists()


def test_what_was_found_is_kept_in_order_and_can_be_looked_up(monkeypatch, tmp_path):
    out = tmp_path / "deep" / "tuned.json"
    monkeypatch.setattr(tune, "FILE", out)
    assert tune.tuned(NAME, "sgd") is None
    found = {o.key: o.value for o in tune.tune(NAME, ["sgd", "momentum"], Here(), trials=2, seed=1, out=out)}
    kept = json.loads(out.read_text())
    assert kept == {NAME: found} and list(kept[NAME]) == ["momentum", "sgd"]
    assert tune.tuned(NAME, "sgd") == found["sgd"]["lr"]
    assert tune.tuned("another", "sgd") is None


def test_methods_that_cannot_be_tuned_are_refused():
    with pytest.raises(ValueError, match="one of sgd, momentum, got 'adam'"):
        tune.tune(NAME, ["sgd", "adam"], Here(), trials=1)
    with pytest.raises(ValueError, match="trials must be at least 1, got 0"):
        tune.tune(NAME, ["sgd"], Here(), trials=0)


def several(path: Path, worker: int, start: Any) -> None:
    start.wait()
    for i in range(30):
        tune.update(path, "experiment", f"{worker} {i}", {"lr": 0.1})


def test_several_processes_may_write_the_file_at_once(tmp_path):
    context = multiprocessing.get_context("spawn")
    path = tmp_path / "tuned.json"
    start = context.Barrier(2)
    processes = [context.Process(target=several, args=(path, i, start)) for i in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert len(json.loads(path.read_text())["experiment"]) == 60
