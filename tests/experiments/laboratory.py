"""What tests of experiments share: running a cell as the runner does, and the law that resuming changes nothing."""

import dataclasses
import io
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from psgd.experiments.experiment import Record, Result

Records = list[dict[str, Any]]


def kept(records: Iterable[Record]) -> Records:
    return [{"step": r.step, **r.values} for r in records if r.values]


def finished(experiment: Any, config: Any, seed: int = 0) -> Result:
    return Result(config, seed, kept(experiment.run(config, seed)), seconds=1.0, cpu_seconds=1.0)


def checkpoints(experiment: Any, config: Any, seed: int = 0) -> Iterator[tuple[Records, bytes]]:
    """Yield the records so far, and the state as a file, wherever a checkpoint may be saved."""
    records: Records = []
    for record in experiment.run(config, seed):
        records += kept([record])
        if record.state is not None:
            file = io.BytesIO()
            torch.save(record.state(), file)
            yield [*records], file.getvalue()


def gone_on(experiment: Any, config: Any, records: Records, saved: bytes, seed: int = 0) -> Result:
    """Go on from a checkpoint to the end."""
    state = torch.load(io.BytesIO(saved), weights_only=True)
    return Result(config, seed, records + kept(experiment.run(config, seed, state)), seconds=1.0, cpu_seconds=1.0)


def resumed(experiment: Any, config: Any, after: int, seed: int = 0) -> Result:
    """Stop after some records, and go on."""
    last = next(found for found in checkpoints(experiment, config, seed) if len(found[0]) == after)
    return gone_on(experiment, config, *last, seed)


def smaller(config: Any, **changes: Any) -> Any:
    return dataclasses.replace(config, **changes)


def shown(experiment: Any, results: list[Result]) -> str:
    """Everything that a report would show, as text."""
    return repr([experiment.tables(results), experiment.plots(results), experiment.remarks(results)])
