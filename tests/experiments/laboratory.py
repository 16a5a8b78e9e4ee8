"""What tests of experiments share: running a cell as the runner does, and the law that resuming changes nothing."""

import dataclasses
import io
from typing import Any

import torch

from psgd.experiments.experiment import Result


def finished(experiment: Any, config: Any, seed: int = 0) -> Result:
    records = [{"step": r.step, **r.values} for r in experiment.run(config, seed)]
    return Result(config, seed, records, seconds=1.0, cpu_seconds=1.0)


def resumed(experiment: Any, config: Any, after: int, seed: int = 0) -> Result:
    """Stop after some records, and go on from a checkpoint that went through a file."""
    records, state = [], None
    for record in experiment.run(config, seed):
        records.append({"step": record.step, **record.values})
        if len(records) == after:
            file = io.BytesIO()
            torch.save(record.state(), file)
            file.seek(0)
            state = torch.load(file, weights_only=True)
            break
    records += [{"step": r.step, **r.values} for r in experiment.run(config, seed, state)]
    return Result(config, seed, records, seconds=1.0, cpu_seconds=1.0)


def smaller(config: Any, **changes: Any) -> Any:
    return dataclasses.replace(config, **changes)


def shown(experiment: Any, results: list[Result]) -> str:
    """Everything that a report would show, as text."""
    return repr([experiment.tables(results), experiment.plots(results), experiment.remarks(results)])
