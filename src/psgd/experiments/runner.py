"""Runs a grid of cells into a directory, and goes on where an earlier run of it ended, however it ended."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from psgd.experiments import store
from psgd.experiments.cell import run_cell
from psgd.experiments.experiment import Preset, load, replaced, seeds_of
from psgd.experiments.pool import Pool
from psgd.experiments.progress import Progress
from psgd.experiments.provenance import describe, now


@dataclass(frozen=True)
class Cell:
    """A config and a seed, to be run."""

    id: str
    order: int
    """Of the config among the experiment's."""
    config: Any
    seed: int


def grid(
    name: str,
    preset: Preset = "quick",
    *,
    seeds: Sequence[int] | None = None,
    only: Sequence[str] = (),
    settings: Mapping[str, str] | None = None,
) -> list[Cell]:
    """Return the cells of an experiment.

    Args:
        name: The experiment's.
        preset: Its size.
        seeds: Instead of the preset's.
        only: Methods; all, if there are none.
        settings: Fields of the config, as text.
    """
    experiment = load(name)
    configs = experiment.cells(preset)
    known = list(dict.fromkeys(config.method for config in configs))
    if unknown := [method for method in only if method not in known]:
        raise ValueError(f"a method of {name} is one of {', '.join(known)}, got {', '.join(map(repr, unknown))}")
    cells: dict[str, Cell] = {}
    for order, config in enumerate(configs):
        if only and config.method not in only:
            continue
        usual = seeds_of(experiment, config, preset) if seeds is None else seeds
        config = replaced(config, settings or {})
        for seed in usual:
            cell = store.cell_id(name, config, seed)
            cells.setdefault(cell, Cell(cell, order, config, seed))  # settings may make two equal
    return list(cells.values())


def run(
    name: str,
    cells: Sequence[Cell],
    directory: str | Path,
    pool: Pool,
    *,
    resume: bool = False,
    interval: float = 60.0,
    progress: Progress | None = None,
    **asked: Any,
) -> list[str]:
    """Run cells that are not finished yet, and return the ids of those that failed.

    Args:
        name: The experiment's.
        cells: What to run.
        directory: Where to keep what comes out; what it holds is fixed in `psgd.experiments.store`.
        pool: Where to run.
        resume: Whether the directory may hold an earlier run, to go on with or to add to.
        interval: Seconds between checkpoints inside a cell.
        progress: Shows it.
        asked: What else provenance shall tell.
    """
    directory = Path(directory).resolve()
    progress = progress or Progress()
    with held(directory, name, resume=resume):
        about = provenance(directory, {"experiment": name, **asked})
        store.write_json(directory / store.PROVENANCE, about)
        done = tidy(directory, name)
        left = {cell.id: cell for cell in cells if cell.id not in done}
        failed = []
        with progress.showing(directory, cells, left):
            tasks = {i: (str(directory), name, store.fields(c.config), c.seed, interval) for i, c in left.items()}
            for outcome in pool.run(run_cell, tasks):
                cell = left[outcome.key]
                if outcome.error is None:
                    progress.finished(cell, finish(directory, cell, outcome.value))
                else:
                    progress.failed(cell, fail(directory, cell, outcome.error))
                    failed.append(cell.id)
        store.write_json(directory / store.PROVENANCE, {**about, "finished": now()})
    return failed


@contextlib.contextmanager
def held(directory: Path, name: str, *, resume: bool) -> Iterator[None]:
    """Keep other runs out of a directory; make it, if need be."""
    there = {path.name for path in directory.iterdir()} if directory.exists() else set()
    about = store.read_provenance(directory)
    if there and not resume:
        raise ValueError(f"{str(directory)!r} must be empty or new, or a run to go on with (--resume)")
    if about is None and not there <= {store.WORK, store.PROVENANCE + ".tmp"}:
        raise ValueError(
            f"to go on with a run, its directory must hold {store.PROVENANCE}; {str(directory)!r} does not"
        )
    if about is not None and about["experiment"] != name:
        raise ValueError(f"{str(directory)!r} holds a run of {about['experiment']}, and cannot take {name}")
    (directory / store.WORK).mkdir(parents=True, exist_ok=True)
    try:
        with FileLock(directory / store.WORK / "lock", timeout=0):
            yield
    except Timeout as e:
        raise ValueError(f"{str(directory)!r} must not be in use, but another run is going on in it") from e


def provenance(directory: Path, asked: dict[str, Any]) -> dict[str, Any]:
    """Return that of this run, with those of earlier runs in the same directory."""
    before = store.read_provenance(directory)
    earlier = [] if before is None else [*before.pop("earlier"), before]
    return {**describe(**asked), "earlier": earlier}


def tidy(directory: Path, name: str) -> set[str]:
    """Remove what a crash left behind, and return the finished cells."""
    config = load(name).Config
    results = [store.result(line, config) for line in store.read_lines(directory / store.CELLS)]
    done = {store.cell_id(name, r.config, r.seed) for r in results}
    for cell in done:
        forget(directory, cell)
    return done


def finish(directory: Path, cell: Cell, about: Mapping[str, Any]) -> dict[str, Any]:
    """Keep a cell for good, and return what is kept. A crash in between leaves files that `tidy` removes."""
    records = store.read_lines(store.work(directory, cell.id)[0])
    line = {"cell": cell.order, "config": store.fields(cell.config), "seed": cell.seed, **about, "records": records}
    store.append_line(directory / store.CELLS, line)
    forget(directory, cell.id)
    return line


def forget(directory: Path, cell: str) -> None:
    """Remove what was kept of a cell under way."""
    for path in (*store.work(directory, cell), directory / store.FAILED / f"{cell}.json"):
        path.unlink(missing_ok=True)


def fail(directory: Path, cell: Cell, error: str) -> str:
    """Keep an error, for people, and return its last line; the cell is run again by the next run."""
    about = {"config": store.fields(cell.config), "seed": cell.seed, "time": now()}
    (directory / store.FAILED).mkdir(exist_ok=True)
    last = error.strip().splitlines()[-1]
    store.write_json(directory / store.FAILED / f"{cell.id}.json", {**about, "error": last, "traceback": error})
    return last
