"""What a run leaves on disk, such that `kill -9` at any moment spoils nothing.

run.json         provenance: what was asked for, by which code, where and when
cells.jsonl      one line for each finished cell, with all its records; only the runner's own process appends
work/ID.jsonl    the records so far of a cell under way, and
work/ID.pt       its last checkpoint, which says how much of the records belongs to it
failed/ID.json   the error of a cell that failed and was not repeated with success
work/lock        held while a run is on
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from psgd.experiments.experiment import Result
from psgd.experiments.experiment import load as load_experiment

PROVENANCE, CELLS, WORK, FAILED = "run.json", "cells.jsonl", "work", "failed"


@dataclass(frozen=True)
class Run:
    """What a directory holds."""

    name: str
    """The experiment's."""
    provenance: dict[str, Any]
    results: list[Result]
    """In the order of the experiment's cells, then of seeds."""
    failures: list[dict[str, Any]] = field(default_factory=list)
    """Of cells that failed: config (as a dict), seed, error (its last line) and traceback."""


def load(directory: str | Path) -> Run:
    """Read a run, also one that is not finished, or going on."""
    directory = Path(directory)
    provenance = read_provenance(directory)
    if provenance is None:
        raise ValueError(f"the directory of a run holds {PROVENANCE}, which {str(directory)!r} does not")
    name = provenance["experiment"]
    config = load_experiment(name).Config
    lines = sorted(read_lines(directory / CELLS), key=lambda line: (line["cell"], line["seed"]))
    failures = [json.loads(path.read_bytes()) for path in sorted((directory / FAILED).glob("*.json"))]
    return Run(name, provenance, [result(line, config) for line in lines], failures)


def result(line: Mapping[str, Any], config: type[Any]) -> Result:
    """Return the cell that a line tells of."""
    records, seconds = line["records"], (line["seconds"], line["cpu_seconds"])
    return Result(rebuilt(line["config"], config), line["seed"], records, *seconds)


def cell_id(name: str, config: Any, seed: int) -> str:
    """Return what identifies a cell for all time: a hash of the experiment's name, the config's fields and the seed.

    >>> @dataclass(frozen=True)
    ... class Config:
    ...     lr: float = 0.1
    >>> cell_id("rosenbrock", Config(), 0)
    'c31cf1d1e97769b0'
    """
    text = json.dumps([name, fields(config), seed], sort_keys=True, allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def fields(config: Any) -> dict[str, Any]:
    """Return a config as JSON can say it; infinite numbers, which it cannot, become text.

    >>> @dataclass(frozen=True)
    ... class Config:
    ...     clip: float = math.inf
    >>> fields(Config()), rebuilt(fields(Config()), Config)
    ({'clip': 'inf'}, Config(clip=inf))
    """
    values = dataclasses.asdict(config)
    return {k: str(v) if isinstance(v, float) and not math.isfinite(v) else v for k, v in values.items()}


def rebuilt(values: Mapping[str, Any], config: type[Any]) -> Any:
    """Return the config with these fields; those that it got since have their defaults."""
    known = {f.name: f.default for f in dataclasses.fields(config)}
    if unknown := [name for name in values if name not in known]:
        raise ValueError(f"the fields of a config are {', '.join(known)}, but a record has {', '.join(unknown)}")
    infinite = {k: float(v) for k, v in values.items() if isinstance(v, str) and isinstance(known[k], float)}
    return config(**{**values, **infinite})


def strict(value: Any) -> Any:
    """Return a value as strict JSON has it: numbers of torch and numpy become Python's, those not finite None.

    >>> strict({"loss": math.nan, "path": (0.5, math.inf)})
    {'loss': None, 'path': [0.5, None]}
    """
    if isinstance(value, Mapping):
        return {str(k): strict(v) for k, v in value.items()}
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, (list, tuple)):
        return [strict(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def dumps(value: Any) -> bytes:
    """Return a line of strict JSON."""
    return json.dumps(strict(value), allow_nan=False, ensure_ascii=False, separators=(",", ":")).encode() + b"\n"


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Return all whole lines of a file of JSON; the last one may be torn, or just being written."""
    if not path.exists():
        return []
    *whole, _ = path.read_bytes().split(b"\n")
    try:
        return [json.loads(line) for line in whole]
    except ValueError as e:
        raise ValueError(f"every line of {str(path)!r} must be JSON: {e}") from e


def append_line(path: Path, value: Any) -> None:
    """Add a line for good: it is on the disk when this returns, and a torn line before it is gone."""
    with path.open("a+b") as file:
        file.truncate(whole_lines(file))
        file.write(dumps(value))
        file.flush()
        os.fsync(file.fileno())


def whole_lines(file: BinaryIO) -> int:
    """Return the length of a file up to the end of its last whole line."""
    end = file.seek(0, os.SEEK_END)
    while end > 0:
        start = max(0, end - 65536)
        file.seek(start)
        if (found := file.read(end - start).rfind(b"\n")) >= 0:
            return start + found + 1
        end = start
    return 0


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """Write a file such that readers, and those who come after a crash, see the old content or the new, whole."""
    temporary = path.with_name(path.name + ".tmp")
    with temporary.open("wb") as file:
        yield file
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


def work(directory: Path, cell: str) -> tuple[Path, Path, Path]:
    """Return the files of a cell under way: its records, its checkpoint, and a lock."""
    return directory / WORK / f"{cell}.jsonl", directory / WORK / f"{cell}.pt", directory / WORK / f"{cell}.lock"


def read_provenance(directory: Path) -> dict[str, Any] | None:
    """Return what run.json says, None if there is none."""
    path = directory / PROVENANCE
    return json.loads(path.read_bytes()) if path.exists() else None


def write_json(path: Path, value: Any) -> None:
    """Write a file for people, too, atomically."""
    text = json.dumps(strict(value), allow_nan=False, ensure_ascii=False, indent=2)
    with replacing(path) as file:
        file.write(text.encode() + b"\n")
