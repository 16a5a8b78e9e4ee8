import dataclasses
import importlib.util
import json
import math
from pathlib import Path

import pytest
import torch
from laboratory import finished, resumed, shown, smaller

import psgd
from psgd.experiments import runner, shakespeare, shakespeare_tuned, store, tune
from psgd.experiments.experiment import Result
from psgd.experiments.gpt import GPT
from psgd.experiments.pool import Outcome, attempt
from psgd.experiments.report.page import slug
from psgd.experiments.shakespeare import TINY
from psgd.experiments.shakespeare_tuned import BUILDS, DEFAULTS, VARIANTS, Config, start
from psgd.probes import generator

NAME = "shakespeare-tuned"
FIELDS = ("lr", "memory", "decay", "second")
NUMBERS = {"lr": 0.004, "memory": 8.0, "decay": 0.03, "second": 5.0}
"""Nobody's defaults."""


def network():
    return GPT(20, generator(0), block=TINY.block, width=TINY.width, layers=TINY.layers, heads=TINY.heads)


def tiny(name, **changes):
    """Return a tiny config of a method, or skip the test where its package is missing."""
    config = next(c for c in shakespeare_tuned.cells("quick") if c.method == name)
    try:
        config.stepper(network(), 0)
    except ImportError as e:
        pytest.skip(str(e))
    return smaller(config, **changes)


def groups(name, **changes):
    """Return the options of the optimizer that is built."""
    return tiny(name, **NUMBERS | changes).stepper(network(), 7).optimizer.param_groups


def timeless(result):
    """Return the records without what no run repeats."""
    return [{key: value for key, value in r.items() if key != "seconds"} for r in result.records]


TUNED = [name for name in BUILDS if name not in VARIANTS]
each_method = pytest.mark.parametrize("name", BUILDS)
each_tuned = pytest.mark.parametrize("name", TUNED)


# --- what is run


@pytest.mark.parametrize("preset", ["quick", "cpu", "paper"])
def test_every_preset_has_every_method_as_shakespeare_has_it(preset):
    others = {c.method: c for c in shakespeare.cells(preset)}
    found = shakespeare_tuned.cells(preset)
    assert [c.method for c in found] == list(BUILDS) and list(DEFAULTS) == TUNED
    assert set(TUNED) <= set(others)
    for c in (c for c in found if c.method not in VARIANTS):
        assert type(c) is Config
        assert {k: v for k, v in vars(c).items() if k not in FIELDS} == {
            k: v for k, v in vars(others[c.method]).items() if k != "lr"
        }
    seeds = {"quick": len(BUILDS), "cpu": 3 * len(BUILDS), "paper": 3 * len(BUILDS)}
    assert len(runner.grid(NAME, preset)) == seeds[preset]


def test_the_numbers_are_those_that_were_found_or_else_where_the_search_starts(monkeypatch, tmp_path):
    file = tmp_path / "tuned.json"
    file.write_text(json.dumps({NAME: {"soap": {"lr": NUMBERS["lr"], "fields": NUMBERS}}}))
    monkeypatch.setattr(tune, "FILE", file)
    for c in shakespeare_tuned.cells("cpu"):
        of, rate = (VARIANTS[c.method].of, VARIANTS[c.method].rate) if c.method in VARIANTS else (c.method, 1)
        expected = NUMBERS if c.method == "soap" else start(of)
        assert {field: getattr(c, field) for field in FIELDS} == expected | {"lr": rate * expected["lr"]}


@each_tuned
def test_a_search_starts_within_its_ranges(name):
    ranges, first = shakespeare_tuned.ranges(name), start(name)
    assert tuple(ranges) == tuple(first) == FIELDS
    assert all(low <= first[field] <= high for field, (low, high) in ranges.items())
    assert {"memory": ranges["memory"], "decay": ranges["decay"]} == {"memory": (5.0, 40.0), "decay": (1e-3, 0.3)}
    assert ranges["lr"] == pytest.approx((first["lr"] / 3, first["lr"] * 3))


@each_tuned
def test_a_search_starts_where_that_of_the_rate_alone_ended(name):
    entry = tune.read(tune.FILE)["shakespeare"][name]
    assert start(name)["lr"] == entry["lr"] and entry["trials"] == 6


@each_tuned
def test_a_search_starts_with_the_packages_defaults(name):
    """As `shakespeare` builds them, but for a decay of 0, which has no logarithm."""
    first = start(name)
    built = tiny(name, **first).stepper(network(), 0).optimizer.param_groups
    defaults = shakespeare.BUILDS[name](network(), first["lr"]).optimizer.param_groups
    for ours, theirs in zip(built, defaults, strict=True):
        for key in (ours.keys() | theirs.keys()) - {"params", "beta", "weight_decay"}:
            assert ours[key] == (
                pytest.approx(theirs[key]) if key in ("betas", "precond_lr", "momentum") else theirs[key]
            )
        assert ours["weight_decay"] == max(theirs["weight_decay"], 1e-3)


@pytest.mark.parametrize("name", VARIANTS)
def test_a_variant_has_the_numbers_of_what_it_varies(name):
    of, rate = VARIANTS[name].of, {"psgd-kron-newton-half": 0.5}.get(name, 1.0)
    variant, usual = (next(c for c in shakespeare_tuned.cells("cpu") if c.method == m) for m in (name, of))
    assert all(getattr(variant, field) == getattr(usual, field) for field in FIELDS if field != "lr")
    assert variant.lr == rate * usual.lr and name.startswith(of)
    with pytest.raises(ValueError, match=f"one of adamw, .*, got '{name}'"):
        shakespeare_tuned.ranges(name)
    assert not tune.can(shakespeare_tuned, name)


@each_tuned
def test_trials_are_short_and_never_see_the_validation_text(name):
    assert shakespeare_tuned.tuning(name) == Config(name, iterations=200, warmup=50, every=200, held=0.1)
    assert tune.can(shakespeare_tuned, name) and tune.spans(shakespeare_tuned, name) == shakespeare_tuned.ranges(name)


@each_tuned
def test_the_last_trials_are_as_long_as_runs_and_never_see_the_validation_text(name):
    fields = {"lr": 0.004, "memory": 8.0, "decay": 0.03, "second": 5.0}
    (cell,) = (config for config in shakespeare_tuned.cells("cpu") if config.method == name)

    def rates(*scores):
        tried = []
        while (config := shakespeare_tuned.further(name, fields, scores[: len(tried)])) is not None:
            tried.append(config.lr)
            assert config == dataclasses.replace(cell, **fields | {"lr": config.lr}, held=0.1)
        return tried

    assert rates(2.0, 1.9) == [0.004, 0.002] == rates(math.inf, 1.9)
    assert rates(2.0, 2.1, 1.8) == [0.004, 0.002, 0.008] == rates(2.0, math.inf, math.inf) == rates(2.0, 2.0, 3.0)


# --- what is built


@pytest.mark.parametrize("name", ["adamw", "soap"])
def test_two_averages(name):
    (options,) = groups(name)
    assert (
        options["lr"] == 0.004 and options["betas"] == pytest.approx((0.875, 0.8)) and options["weight_decay"] == 0.03
    )
    assert options.get("shampoo_beta") is None  # that is, β₂


@pytest.mark.parametrize("name", ["muon", "muon-bfloat16"])
def test_muon_and_its_adamw(name):
    matrices, rest = groups(name)
    assert matrices["use_muon"] and not rest["use_muon"]
    assert matrices["lr"] == 0.004 and rest["lr"] == pytest.approx(0.004 / 5)
    assert matrices["momentum"] == pytest.approx(0.875) and rest["betas"] == (0.9, 0.95)
    assert matrices["weight_decay"] == rest["weight_decay"] == 0.03
    assert matrices["weight_decouple"] and rest["weight_decouple"]
    assert all(p.ndim == 2 for p in matrices["params"]) and len(rest["params"]) == 7


def test_muon_in_bfloat16_is_the_packages():
    package = pytest.importorskip("pytorch_optimizer", reason="Muon comes with pytorch_optimizer")
    kinds = {name: type(tiny(name).stepper(network(), 0).optimizer) for name in ("muon", "muon-bfloat16")}
    assert kinds["muon-bfloat16"] is package.Muon and kinds["muon"] is not package.Muon
    one, other = (finished(shakespeare_tuned, tiny(name, iterations=10)).last("train_loss") for name in kinds)
    assert one != other and one == pytest.approx(other, rel=0.02)


def test_the_factors_of_heavyball():
    (options,) = groups("heavyball-kron")
    assert options["lr"] == 0.004 and options["beta"] == pytest.approx(0.875) and options["weight_decay"] == 0.03
    assert options["precond_lr"] == pytest.approx(0.2)


@pytest.mark.parametrize("name", [name for name in BUILDS if name.startswith("psgd")])
def test_the_numbers_of_ours(name):
    (options,) = groups(name)
    assert options["lr"] == 0.004 and options["momentum"] == pytest.approx(0.875) and options["weight_decay"] == 0.03
    assert options["precond_lr"] == pytest.approx(0.2) and options["seed"] == 7
    usual = psgd.like_adamw()
    schedules = {
        "psgd-kron": usual["precond_prob"],
        "psgd-kron-every": 1.0,
        "psgd-kron-adaptive": psgd.Adaptive(),
        "psgd-kron-fewer": psgd.Decaying(40, 0.05),
        "psgd-kron-fewer-bfloat16": psgd.Decaying(40, 0.05),
        "psgd-kron-short": usual["precond_prob"],
        "psgd-kron-bfloat16": usual["precond_prob"],
        "psgd-kron-quadratic": usual["precond_prob"],
        "psgd-kron-newton": psgd.Decaying(50, 0.05),
        "psgd-kron-newton-half": psgd.Decaying(50, 0.05),
    }
    curvatures = dict.fromkeys(("psgd-kron-newton", "psgd-kron-newton-half"), psgd.hessian)
    curvatures |= {"psgd-lra": psgd.whiten, "psgd-xmat": psgd.whiten}
    assert options["precond_prob"] == schedules.get(name, psgd.Regular(0.1, warmup=100))
    assert options["curvature"] == curvatures.get(name, psgd.whiten_momentum)
    rules = {"psgd-lra": psgd.lra(10), "psgd-xmat": psgd.XMat(), "psgd-kron-short": psgd.kron(max_skew=1.0)}
    coarse = psgd.kron(psgd.Quadratic(), products=torch.bfloat16)
    rules |= dict.fromkeys(("psgd-kron-bfloat16", "psgd-kron-fewer-bfloat16"), coarse)
    rules["psgd-kron-quadratic"] = psgd.kron(psgd.Quadratic())
    assert options["group"] == rules.get(name, psgd.kron())
    assert options["max_value"] == (10.0 if name.startswith("psgd-kron") else None)
    assert options["fresh"] == (usual["fresh"] if name.startswith("psgd-kron") else 0.0)


@each_method
def test_every_number_counts(name):
    """An option may be set and read by nobody. (Halved, since ours averages no more than the gradients so far.)"""

    def ending(**changes):
        return finished(shakespeare_tuned, tiny(name, **NUMBERS | {"iterations": 6} | changes)).last("validation_loss")

    usual = ending()
    assert all(ending(**{field: NUMBERS[field] / 2}) != usual for field in FIELDS)


# --- runs


@each_method
def test_a_run_is_finite_and_repeats_itself(name):
    config = tiny(name, **start(VARIANTS[name].of if name in VARIANTS else name))
    result = finished(shakespeare_tuned, config)
    assert [r["step"] for r in result.records] == [10, 20, 30] and result.last("gradients") == 30
    assert all(math.isfinite(r[key]) for r in result.records for key in ("train_loss", "validation_loss"))
    assert result.last("validation_loss") < math.log(20)
    torch.rand(1)  # whatever else is drawn
    assert timeless(finished(shakespeare_tuned, config)) == timeless(result)
    assert timeless(finished(shakespeare_tuned, config, seed=1)) != timeless(result)


@each_method
def test_resuming_changes_nothing(name):
    config = tiny(name, **NUMBERS)
    again = timeless(resumed(shakespeare_tuned, config, after=1))
    if name == "heavyball-kron":  # whose own resumed run differs by rounding
        again = [pytest.approx(record, rel=1e-5) for record in again]
    assert again == timeless(finished(shakespeare_tuned, config))


def test_missing_cells_are_shown_as_missing():
    shown(shakespeare_tuned, [])


# --- the page


class Here:
    """A pool of this process."""

    def run(self, function, tasks):
        for key, task in tasks.items():
            yield Outcome(key, *attempt(function, task))


def script():
    path = Path(__file__).parents[2] / "docs" / "make_shakespeare_page.py"
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def entry(name, trials):
    ranges = shakespeare_tuned.ranges(name)
    fields = {field: math.sqrt(low * high) for field, (low, high) in ranges.items()}
    several = {"fields": fields, "ranges": {field: list(ends) for field, ends in ranges.items()}}
    long = {1: 2.5, 0.5: None, 2: 3.5}
    again = [{**fields, "lr": fields["lr"] * times, "score": score} for times, score in long.items()]
    found = {"lr": fields["lr"], "score": 2.25, "trials": trials, "diverged": 0, "range": list(ranges["lr"])}
    return {**found, **several, "again": again}


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    """Return where numbers, and runs of them, are that were made up."""
    directory = tmp_path_factory.mktemp("alike")
    known = {m: entry(m, 12) for m in TUNED}
    known["soap"]["fields"]["memory"] = 39.0
    (directory / "tuned.json").write_text(json.dumps({**tune.read(tune.FILE), NAME: known}))
    for name in BUILDS:
        tiny(name)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tune, "FILE", directory / "tuned.json")
        assert not runner.run(NAME, runner.grid(NAME, "quick"), directory / "run", Here())
    return directory


def made(directory, change=lambda entries: None):
    """Return the page, with some of the numbers changed."""
    known = json.loads((directory / "tuned.json").read_text())
    change(known[NAME])
    module = script()
    module.read = lambda path: known
    return module.page(directory / "run")


def test_the_page_says_what_ran_and_how_it_was_tuned(directory):
    page = made(directory)
    headings = [line for line in page.splitlines() if line.startswith("#")]
    assert headings == [
        "# A character GPT: who reaches AdamW's loss first?",
        "## What it says",
        "## Why the others of ours are behind",
        "## The four numbers",
    ]
    for said in (
        "Everyone has 18 trials",
        "6 of the rate alone",
        "and 12 of four numbers",
        "in 26 runs on held-out",
    ):
        assert said in page.replace("\n", " ")
    assert "Near an end of their ranges: `memory` of `soap`." in page and "- `adamw` ends at" in page
    score = tune.read(tune.FILE)["shakespeare"]["soap"]["score"]
    short = f"| soap | 0.02386 | 39 | 0.01732 | 31.62 | 5 … 200 | 2.25 | {score:.4g} |"
    assert f"{short} 2.5 | diverged | 3.5 | 0 |" in page
    assert "(../results/shakespeare-tuned)" in page
    assert all(f"| {name} |" in page for name in BUILDS)


def made_up(method, seconds, updates=(0, 0)):
    """Return a run of 200 iterations that reaches a loss of 2 after 100 of them; AdamW's after all."""
    losses = (3.0, 2.0) if method == "adamw" else (2.0, 1.5)
    rows = zip((100, 200), losses, seconds, updates, strict=True)
    records = [{"step": a, "validation_loss": b, "seconds": c, "updates": d} for a, b, c, d in rows]
    return Result(tiny(method, iterations=200), 0, records, 1.0, 1.0)


def test_the_page_says_where_our_seconds_go():
    others = [made_up("adamw", (10.0, 20.0)), made_up("muon", (12.0, 24.0))]
    ours = [made_up("psgd-kron", (17.0, 29.0), (50, 60)), made_up("psgd-kron-every", (20.0, 36.0), (100, 200))]
    said = " ".join(script().costs([*others, *ours]).split())
    assert "`psgd-kron` reaches AdamW's loss in 100 iterations and 17 s, `muon` in 100 and 12 s" in said
    assert "one of `muon` takes 20 ms more" in said
    assert "takes 50 ms, by the difference to `psgd-kron-every`, and there are 50 of them until then: 2 s" in said
    assert "takes 45 ms of an iteration more than `adamw` does" in said  # (17 − 2.5)/100 − 0.1
    assert script().costs([others[0], made_up("muon", (18.0, 30.0)), *ours]) == ""
    slower = made_up("psgd-kron", (17.0, 37.0), (50, 60))  # than with more updates, as the machine was
    said_less = " ".join(script().costs([*others, slower, ours[1]]).split())
    assert "of `psgd-kron` takes 85 ms more, on average, and one of `muon` 20 ms" in said_less  # 37/200 − 20/200
    assert "the difference to `psgd-kron-every` does not tell" in said_less and "Without updates" not in said_less
    assert " ".join(script().costs([*others, *ours, made_up("muon-bfloat16", (5.0, 10.0))]).split()) == said


def test_the_page_says_why_others_of_ours_are_behind(tmp_path):
    file = tmp_path / "whiteness.json"
    spans = {"psgd-xmat": [0.01, 0.1, 1.0, 5.0, 9.0], "adamw": [0.4, 0.5, 1.0, 1.5, 3.0]}
    methods = {m: {"quantiles": quantiles} for m, quantiles in spans.items()}
    about = {"iterations": 70, "batches": 30, "quantiles": [0.01, 0.05, 0.5, 0.95, 0.99], "methods": methods}
    file.write_text(json.dumps(about))
    said = " ".join(script().whys([], file).split())
    assert "After 70 iterations, [on 30 more batches]" in said and "Newton" not in said
    assert "from the 5% to the 95% quantile, a factor of 3 with `adamw` and 50 with `psgd-xmat`." in said
    newton = [made_up(f"psgd-kron-newton{part}", (1.0, 2.0)) for part in ("", "-half")]
    assert "seeds end at 1.5, at half of the rate at 1.5." in " ".join(script().whys(newton, file).split())


def test_the_page_says_what_bfloat16_saves_muon():
    usual = made_up("muon", (12.0, 24.0))
    for seconds, said in ((20.0, "20 ms less"), (26.0, "10 ms more")):
        found = script().rounding([usual, made_up("muon-bfloat16", (seconds / 2, seconds))])
        assert f"an iteration of `muon-bfloat16` takes {said} than one of `muon`" in found and "bench" not in found


def test_the_page_says_what_bfloat16_would_save_muon(tmp_path):
    file, table = tmp_path / "bench.json", "Iteration, GPT of some parameters"
    rows = {"pytorch_optimizer Muon": 0.02, "pytorch_optimizer Muon, float32": 0.05}
    file.write_text(json.dumps({"measurements": [{"table": table, "row": r, "seconds": s} for r, s in rows.items()]}))
    said = " ".join(script().rounding([made_up("muon", (12.0, 24.0))], file).split())
    assert "There are no runs of `muon-bfloat16` yet" in said and "the package's own way 30 ms quicker" in said


def test_the_page_shows_the_plots_that_there_are(tmp_path):
    module, picture = script(), "shakespeare-tuned-tiny-shakespeare-by-time.png"
    module.PLOTS = tmp_path
    assert module.pictures() == ""
    (tmp_path / picture).touch()
    assert module.pictures() == f"![Validation loss by time](../results/plots/{picture})\n\n"


def test_the_page_has_room_for_long_trials_that_were_not_needed():
    assert script().long([{"score": 2.0}, {"score": 1.5}]) == (2.0, 1.5, "")


def test_plots_have_the_names_that_the_page_looks_for(directory):
    titles = [f"{NAME} {plot.title}" for plot in shakespeare_tuned.plots(store.load(directory / "run").results)]
    assert [slug(title) for title in titles] == [f"{NAME}-tiny-shakespeare-by-{by}" for by in ("iteration", "time")]


def test_runs_at_other_numbers_make_no_page(directory):
    with pytest.raises(ValueError, match=r"the numbers of tuned\.json, muon has not"):
        made(directory, lambda entries: entries["muon"]["fields"].update(decay=0.2))
    with pytest.raises(ValueError, match=r"the numbers of tuned\.json, adamw has not"):
        made(directory, lambda entries: entries.clear())


def test_a_budget_that_is_not_the_same_for_all_makes_no_page(directory):
    with pytest.raises(ValueError, match="the same number of trials for all, got 6, 12"):
        made(directory, lambda entries: entries["psgd-kron"].update(trials=6))
