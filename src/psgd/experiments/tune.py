"""Learning rates: found by Optuna, with the same number of trials for every method, and kept in tuned.json.

The search is log-uniform over the method's range, or the experiment's own if it has a function `lrs(method)`. One with
functions `ranges(method)` and `start(method)` has several fields of its config tuned together, from a first trial on.
One with a function `further(method, fields, scores)` has what was found by short trials tried again: it returns the
next config to try, given the scores of those before, or None. What a search minimizes is the experiment's `score`, of
validation data. It is a function of (experiment, method, trials, seed) on one processor, by one set of versions:
elsewhere other roundings may lead the search to other rates.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import importlib
import json
import math
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock

from psgd.experiments import store
from psgd.experiments.experiment import Result, load
from psgd.experiments.methods import method as find
from psgd.experiments.pool import Outcome, Pool
from psgd.experiments.provenance import processor, versions

FILE = Path(__file__).with_name("tuned.json")
SEED = 1000
"""Of trials: none that experiments report."""
RANDOM = 10
"""The first trials of a search, which are random: with one seed, they are the same for all methods of one range."""


def tuned(experiment: str, method: str) -> float | None:
    """Return the learning rate that was found for a method, None if none was.

    >>> tuned("rosenbrock", "an optimizer of the future") is None
    True
    """
    entry = read(FILE).get(experiment, {}).get(method)
    return entry["lr"] if entry else None


def found(experiment: str, method: str, otherwise: dict[str, float]) -> dict[str, float]:
    """Return the fields that were found together for a method, or others if none were."""
    entry = read(FILE).get(experiment, {}).get(method)
    return entry["fields"] if entry else otherwise


@functools.cache
def read(path: Path) -> dict[str, Any]:
    """Return all that was found."""
    return json.loads(path.read_bytes()) if path.exists() else {}


def tunable(name: str) -> list[str]:
    """Return the methods of an experiment that can be tuned."""
    experiment = load(name)
    if not hasattr(experiment, "tuning"):
        raise ValueError(f"an experiment whose learning rates are tuned has `tuning` and `score`, {name} has not")
    known = dict.fromkeys(config.method for preset in ("cpu", "paper") for config in experiment.cells(preset))
    return [method for method in known if can(experiment, method)]


def can(experiment: Any, method: str) -> bool:
    """Return whether a method of an experiment has a learning rate to tune, and a range."""
    try:
        return hasattr(experiment.tuning(method), "lr") and len(bounds(experiment, method)) == 2
    except ValueError:
        return False


def bounds(experiment: Any, method: str) -> tuple[float, float]:
    """Return the range of rates to search."""
    return spans(experiment, method)["lr"]


def spans(experiment: Any, method: str) -> dict[str, tuple[float, float]]:
    """Return the range of each field to search."""
    if hasattr(experiment, "ranges"):
        return experiment.ranges(method)
    return {"lr": experiment.lrs(method) if hasattr(experiment, "lrs") else find(method).lr}


def tune(
    name: str, methods: Sequence[str], pool: Pool, *, trials: int, seed: int = SEED, out: Path = FILE
) -> Iterator[Outcome]:
    """Search for each method, and yield what was found, or why nothing; it is in the file by then."""
    known = tunable(name)
    if unknown := [method for method in methods if method not in known]:
        raise ValueError(f"a method to tune is one of {', '.join(known)}, got {', '.join(map(repr, unknown))}")
    if trials < 1:
        raise ValueError(f"the number of trials must be at least 1, got {trials}")
    tasks = {method: (name, method, trials, seed) for method in methods}
    return kept(pool.run(study, tasks), name, out)


def kept(outcomes: Iterator[Outcome], name: str, out: Path) -> Iterator[Outcome]:
    """Write what was found to the file, and pass it on."""
    for outcome in outcomes:
        if outcome.error is None:
            update(out, name, outcome.key, outcome.value)
        yield outcome


def study(name: str, method: str, trials: int, seed: int) -> dict[str, Any]:
    """Search for one method, and return what is kept."""
    optuna = importlib.import_module("optuna")
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    experiment = load(name)
    ranges = spans(experiment, method)
    diverged: list[str] = []

    def objective(trial: Any) -> float:
        fields = {field: trial.suggest_float(field, *ends, log=True) for field, ends in ranges.items()}
        return score(dataclasses.replace(experiment.tuning(method), **fields))

    def score(config: Any) -> float:
        try:
            found = float(experiment.score(result(experiment, config, seed)))
        except Exception:  # some optimizers raise when their numbers are no longer finite
            diverged.append(traceback.format_exc())
            return math.inf
        if not math.isfinite(found):
            diverged.append(f"{config}: score {found}")
            return math.inf
        return found

    search = optuna.create_study(sampler=optuna.samplers.TPESampler(n_startup_trials=RANDOM, seed=seed))
    if hasattr(experiment, "start"):
        search.enqueue_trial(experiment.start(method))
    search.optimize(objective, n_trials=trials)
    if not math.isfinite(search.best_value):
        raise ValueError(f"no trial of {method} ended with a finite score; the last one: {diverged[-1]}")
    best: dict[str, float] = search.best_params
    again: dict[str, Any] = {}
    if hasattr(experiment, "further"):
        best, again = tried_again(functools.partial(experiment.further, method, best), list(ranges), score)
    searched = {field: list(ends) for field, ends in ranges.items()}
    several = {"fields": best, "ranges": searched} if len(ranges) > 1 else {}
    return {
        "lr": best["lr"],
        "score": search.best_value,
        "trials": trials,
        "diverged": len(diverged),
        "range": searched["lr"],
        **several,
        **again,
        "seed": seed,
        "command": f"psgd tune {name} {method} --trials {trials} --seed {seed}",
        "versions": {k: v for k, v in versions().items() if k in ("psgd", "python", "torch", "optuna", source(method))},
        "processor": processor(),
    }


def tried_again(
    further: Callable[[Sequence[float]], Any], fields: Sequence[str], score: Callable[[Any], float]
) -> tuple[dict[str, float], dict[str, Any]]:
    """Try configs until there is none, and return the fields of the best, the first of equals, and what is kept."""
    configs: list[Any] = []
    scores: list[float] = []
    while (config := further(scores)) is not None:
        configs.append(config)
        scores.append(score(config))
    tried = [{field: getattr(config, field) for field in fields} for config in configs]
    kept = [{**each, "score": s if math.isfinite(s) else None} for each, s in zip(tried, scores, strict=True)]
    return tried[scores.index(min(scores))], {"again": kept}


def source(method: str) -> str:
    """Return the package that a method comes from, as package indexes write it."""
    try:
        return find(method).source.replace("_", "-")
    except ValueError:
        return "psgd"


def result(experiment: Any, config: Any, seed: int) -> Result:
    """Run one trial, here and now."""
    torch.manual_seed(seed)
    start, cpu = time.perf_counter(), time.process_time()
    records = [store.strict({"step": r.step, **r.values}) for r in experiment.run(config, seed) if r.values]
    return Result(config, seed, records, time.perf_counter() - start, time.process_time() - cpu)


def near_ends(entry: dict[str, Any]) -> dict[str, Sequence[float]]:
    """Return the ranges whose outside may hold better: of fields that are in the lowest or highest twentieth.

    >>> near_ends({"lr": 0.9, "range": [1e-4, 1.0]}), near_ends({"lr": 0.1, "range": [1e-4, 1.0]})
    ({'lr': [0.0001, 1.0]}, {})
    """
    fields, ranges = entry.get("fields", {"lr": entry["lr"]}), entry.get("ranges", {"lr": entry["range"]})

    def place(field: str) -> float:
        low, high = map(math.log, ranges[field])
        return (math.log(fields[field]) - low) / (high - low)

    return {field: ranges[field] for field in fields if not 0.05 < place(field) < 0.95}


def update(path: Path, experiment: str, method: str, entry: dict[str, Any]) -> None:
    """Put an entry into the file; others may be doing so at the same time."""
    name = hashlib.sha256(str(path.resolve()).encode()).hexdigest()[:16]
    with FileLock(Path(tempfile.gettempdir()) / f"psgd-tuned-{name}.lock"):
        read.cache_clear()
        known = read(path)
        known.setdefault(experiment, {})[method] = entry
        ordered = {e: dict(sorted(entries.items())) for e, entries in sorted(known.items())}
        path.parent.mkdir(parents=True, exist_ok=True)
        store.write_json(path, ordered)
        read.cache_clear()
