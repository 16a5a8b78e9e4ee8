"""What an experiment is: one readable file that says what to run, runs one cell of it, and says what came out.

An experiment is a module. It reads and writes nothing: the runner makes cells × seeds, keeps records and checkpoints,
and the report shows tables, plots and remarks.
"""

from __future__ import annotations

import dataclasses
import importlib
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol, get_args

from psgd.experiments.show import Plot, Table

Preset = Literal["quick", "cpu", "paper"]
"""Seconds, for tests; at most about an hour on two cores; the paper's full setting, for a GPU."""

Values = Mapping[str, Any]
"""What one line of a log says: numbers, or lists of them. Not NaN or infinite ones: JSON has none (use None)."""

State = dict[str, Any]
"""What `run` needs to go on from a record: anything that `torch.load(weights_only=True)` reads."""


@dataclass(frozen=True)
class Record:
    """One line of a cell's log; or none, if there are no values: then it is only a place for a checkpoint."""

    step: int
    values: Values
    state: Callable[[], State] | None = field(default=None, compare=False)
    """Where the runner may save a checkpoint; called only when it does."""


@dataclass(frozen=True)
class Result:
    """A finished cell: a config, a seed, and the log."""

    config: Any
    seed: int
    records: Sequence[Values]
    """In order, each with its "step"."""
    seconds: float = 0.0
    """Of wall time, over all resumptions."""
    cpu_seconds: float = 0.0

    def series(self, key: str) -> list[Any]:
        """Return a value's history, leaving out records without it."""
        return [r[key] for r in self.records if r.get(key) is not None]

    def last(self, key: str) -> Any:
        """Return the last of them."""
        return self.series(key)[-1]


class Experiment(Protocol):
    """A module of this package with these names; its docstring has the figure or table, and the paper's numbers.

    `Config` is a frozen dataclass of numbers and strings; its field `method` names the optimizer (or what is compared),
    and every field has a default; `check` says which values `--set` takes. `run` yields records in ascending steps;
    given the state of an earlier record it goes on after that record, as if never interrupted. Everything random is a
    function of (config, seed).
    """

    TITLE: str
    Config: type[Any]

    @staticmethod
    def cells(preset: Preset) -> list[Any]:
        """Return the configs to run, each with every seed."""

    @staticmethod
    def seeds(preset: Preset) -> range:
        """Return the seeds of a preset."""

    @staticmethod
    def run(config: Any, seed: int, state: State | None = None) -> Iterator[Record]:
        """Run one cell."""

    @staticmethod
    def tables(results: Sequence[Result]) -> list[Table]:
        """Return tables of ours beside the paper's. Some cells may be missing, or all."""

    @staticmethod
    def plots(results: Sequence[Result]) -> list[Plot]:
        """Return pictures. Some cells may be missing, or all."""

    @staticmethod
    def remarks(results: Sequence[Result]) -> str:
        """Say what agrees with the paper, what does not, and why, in Markdown; numbers come from the results."""


class Tunable(Experiment, Protocol):
    """An experiment whose learning rates are tuned, on validation data."""

    @staticmethod
    def tuning(method: str) -> Any:
        """Return the config that trials replace the `lr` of: for every method the same budget."""

    @staticmethod
    def score(result: Result) -> float:
        """Return what tuning minimizes: never of test data. Infinite where training diverged."""


def names() -> list[str]:
    """Return the names of all experiments: the modules of this package that have a TITLE, found without importing them.

    >>> "rosenbrock" in names()
    True
    """
    modules = Path(__file__).parent.glob("*.py")
    return sorted(m.stem.replace("_", "-") for m in modules if "\nTITLE" in m.read_text(encoding="utf-8"))


def seeds_of(experiment: Any, config: Any, preset: Preset) -> range:
    """Return the seeds of a config: those of the preset, unless the experiment has a function `seeds_for` that says."""
    chosen = getattr(experiment, "seeds_for", None)
    return experiment.seeds(preset) if chosen is None else chosen(config, preset)


def mixed(experiment: Any, results: Sequence[Result]) -> list[str]:
    """Say which methods have runs of settings that tables and plots take for one, and what these settings are.

    Told apart are two configs of a method that differ at least in all that two of a preset differ in.
    """
    told = {different(*pair) for preset in get_args(Preset) for pair in pairs(experiment.cells(preset))}
    found: dict[str, dict[str, dict[Any, None]]] = {}
    for one, other in pairs(r.config for r in results):
        fields = different(one, other)
        if any(some <= fields for some in told):
            continue
        for name in fields:
            values = found.setdefault(one.method, {}).setdefault(name, {})
            values.update(dict.fromkeys(getattr(config, name) for config in (one, other)))
    return [
        f"Runs of {method} with different settings share rows and curves: "
        + "; ".join(f"{name} {', '.join(map(str, values))}" for name, values in sorted(fields.items()))
        for method, fields in found.items()
    ]


def pairs(configs: Iterable[Any]) -> Iterator[tuple[Any, Any]]:
    """Return all pairs of different configs of one method."""
    return ((a, b) for a, b in itertools.combinations(dict.fromkeys(configs), 2) if a.method == b.method)


def different(one: Any, other: Any) -> frozenset[str]:
    """Return the fields in which two configs differ."""
    return frozenset(f.name for f in dataclasses.fields(one) if getattr(one, f.name) != getattr(other, f.name))


def load(name: str) -> Any:
    """Return an experiment by name; a name with a dot is that of a module anywhere, for experiments of your own.

    >>> load("rosenbrock").TITLE
    'Rosenbrock'
    """
    if "." in name:
        return elsewhere(name)
    if name not in names():
        raise ValueError(f"an experiment is one of {', '.join(names())}, got {name!r}")
    return importlib.import_module(f"psgd.experiments.{name.replace('-', '_')}")


def elsewhere(name: str) -> Any:
    """Import an experiment that is not of this package."""
    try:
        module = importlib.import_module(name)
    except ModuleNotFoundError as e:
        raise ValueError(f"an experiment of your own is a module that can be imported, got {name!r}: {e}") from e
    needed = ("TITLE", "Config", "cells", "seeds", "run", "tables", "plots", "remarks")
    if missing := [n for n in needed if not hasattr(module, n)]:
        raise ValueError(f"an experiment has {', '.join(needed)}, but {name} lacks {', '.join(missing)}")
    return module


def replaced(config: Any, settings: Mapping[str, str]) -> Any:
    """Return a config with fields set from text, as in `--set lr=0.1`; a type that does not fit is an error.

    >>> @dataclass(frozen=True)
    ... class Config:
    ...     method: str = "sgd"
    ...     lr: float = 0.1
    >>> replaced(Config(), {"lr": "0.5"})
    Config(method='sgd', lr=0.5)
    """
    known = {f.name: f for f in dataclasses.fields(config)}
    values: dict[str, Any] = {}
    for name, text in settings.items():
        if name not in known:
            raise ValueError(f"a field of {type(config).__name__} is one of {', '.join(known)}, got {name!r}")
        kind = type(getattr(config, name))
        try:
            values[name] = {"true": True, "false": False}[text.lower()] if kind is bool else kind(text)
        except (ValueError, KeyError, TypeError) as e:
            raise ValueError(f"the field {name} needs a value of type {kind.__name__}, got {text!r}") from e
    return dataclasses.replace(config, **values)


def check(name: str, config: Any, fields: Iterable[str]) -> None:
    """Refuse a config with values, in these fields, that an experiment cannot have, as far as its presets tell.

    Text is what it is in one of them. Whole numbers start at 1, or at 0 where one of them has 0 or the field's metadata
    say {"least": 0}, and others at 0; where one of them has a negative number, any will do.

    >>> check("rosenbrock", load("rosenbrock").Config(steps=0), ["method", "steps"])
    Traceback (most recent call last):
    ValueError: the field steps must be at least 1, got 0
    """
    usual = [c for preset in get_args(Preset) for c in load(name).cells(preset)]
    declared = {f.name: f.metadata for f in dataclasses.fields(config)}
    for key in fields:
        value, there = getattr(config, key), list(dict.fromkeys(getattr(c, key) for c in usual))
        if isinstance(value, str) and value not in there:
            raise ValueError(f"the field {key} is one of {', '.join(there)}, got {value!r}")
        if type(value) in (int, float):
            least = declared[key].get("least", min(1 if type(value) is int else 0, *there))
            if least >= 0 and not value >= least:  # which NaN is not, either
                raise ValueError(f"the field {key} must be at least {least:g}, got {value!r}")
