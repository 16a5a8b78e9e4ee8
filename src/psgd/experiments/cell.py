"""One cell of a grid, as a worker runs it: records and checkpoints go to files, from which it can go on."""

from __future__ import annotations

import os
import time
import warnings
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock

from psgd.experiments import store
from psgd.experiments.experiment import load
from psgd.experiments.provenance import here, versions

FRESH: dict[str, Any] = {"state": None, "size": 0, "seconds": 0.0, "cpu_seconds": 0.0, "finished": False}


def run_cell(directory: str, name: str, values: dict[str, Any], seed: int, interval: float) -> dict[str, Any]:
    """Run a cell from its last checkpoint, if there is one, to the end, and return what is to be kept beside records.

    Args:
        directory: Of the run.
        name: The experiment's.
        values: The config's.
        seed: The cell's.
        interval: Seconds between checkpoints.
    """
    if not Path(directory).exists():
        raise ValueError(f"the run's directory must be there under the same path on every machine, got {directory!r}")
    experiment = load(name)
    config = store.rebuilt(values, experiment.Config)
    log, checkpoint, lock = store.work(Path(directory), store.cell_id(name, config, seed))
    # A worker of a run that was killed may live for another moment.
    with FileLock(lock), log.open("ab") as file, warnings.catch_warnings(record=True) as caught:
        saved = torch.load(checkpoint, weights_only=True) if checkpoint.exists() else FRESH
        if file.tell() < saved["size"]:
            raise ValueError(f"{log} is shorter than when {checkpoint} was saved: delete both to begin anew")
        file.truncate(saved["size"])
        file.seek(0, os.SEEK_END)
        os.utime(log)  # which tells that the cell is under way
        clock = Clock(saved["seconds"], saved["cpu_seconds"])
        said = list(saved.get("warnings", []))

        def save(state: Any, *, finished: bool = False) -> dict[str, Any]:
            file.flush()
            os.fsync(file.fileno())
            said.extend(text for w in caught if (text := f"{w.category.__name__}: {w.message}") not in said)
            now = {"size": file.tell(), "finished": finished, "warnings": said, **clock.read()}
            with store.replacing(checkpoint) as target:
                torch.save({"state": state, "random": random_state(), **now}, target)
            return now

        if saved["finished"]:
            return summary(saved)
        torch.manual_seed(seed)
        if "random" in saved:
            set_random_state(saved["random"])
        last = time.monotonic()
        for record in experiment.run(config, seed, saved["state"]):
            if record.values:
                file.write(store.dumps({"step": record.step, **record.values}))
                file.flush()  # for those who watch
            if record.state is not None and time.monotonic() - last >= interval:
                save(record.state())
                last = time.monotonic()
        return summary(save(None, finished=True))


class Clock:
    """Wall and CPU time over all resumptions."""

    def __init__(self, seconds: float, cpu_seconds: float) -> None:
        self.wall, self.cpu = time.perf_counter() - seconds, time.process_time() - cpu_seconds

    def read(self) -> dict[str, float]:
        """Return them."""
        return {"seconds": time.perf_counter() - self.wall, "cpu_seconds": time.process_time() - self.cpu}


def summary(checkpoint: dict[str, Any]) -> dict[str, Any]:
    """Return what is kept of a finished cell beside config, seed and records."""
    kept = {key: checkpoint[key] for key in ("seconds", "cpu_seconds", "warnings")}
    return {**kept, **here(), "torch": versions()["torch"], "psgd": versions()["psgd"]}


def random_state() -> list[torch.Tensor]:
    """Return the state of torch's global generators: some baselines use them."""
    return [torch.get_rng_state(), *(torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [])]


def set_random_state(states: list[torch.Tensor]) -> None:
    """Go back to it."""
    cpu, *gpus = states
    torch.set_rng_state(cpu)
    if len(gpus) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all(gpus)
