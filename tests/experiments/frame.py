"""What tests of the frame share: the command in a process of its own, and what should come out of it."""

from __future__ import annotations

import dataclasses
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from experiments import tiny

from psgd.experiments import store

NAME = "experiments.tiny"
TESTS = Path(__file__).parents[1]


def environment(**more: str) -> dict[str, str]:
    path = os.pathsep.join([str(TESTS), *filter(None, [os.environ.get("PYTHONPATH")])])
    return {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", **more}


def psgd(*arguments: Any, **variables: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "psgd.cli", *map(str, arguments)]
    pipe = subprocess.PIPE
    return subprocess.Popen(
        command,
        env=environment(**variables),
        stdout=pipe,
        stderr=pipe,
        text=True,
        start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # tests in the background inherit its neglect
    )


def ended(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    out, error = process.communicate(timeout=120)
    return process.returncode, out, error


def expected(config: tiny.Config, seed: int) -> list[dict[str, Any]]:
    os.environ.pop("TINY_TRACE", None)
    torch.manual_seed(seed)
    return [store.strict({"step": r.step, **r.values}) for r in tiny.run(config, seed)]


def check(directory: Path, cells: int) -> None:
    """All cells are there once, with the records of a run that nothing interrupted, and nothing else is left."""
    results = store.load(directory).results
    assert len({store.cell_id(NAME, r.config, r.seed) for r in results}) == len(results) == cells
    for r in results:
        assert r.records == expected(replace(r.config, pause=0.0), r.seed)
    assert {path.name for path in (directory / store.WORK).iterdir()} <= {"lock"}
    assert not list((directory / store.FAILED).glob("*"))


def replace(config: tiny.Config, **fields: Any) -> tiny.Config:

    return dataclasses.replace(config, **fields)


def until(condition: Callable[[], Any], seconds: float = 60.0) -> Any:
    """Wait for a condition, and return what it says."""
    end = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.01)
    return found


def workers(parent: int) -> list[int]:
    """Return the processes that a run has started for its cells."""
    command = ["ps", "-A", "-ww", "-o", "pid=,ppid=,args="]
    listed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    rows = (line.split(None, 2) for line in listed.splitlines())
    return [int(pid) for pid, ppid, args in rows if int(ppid) == parent and "spawn_main" in args]


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def sleep(path: str) -> None:
    """Be busy for long, and say where."""
    Path(path).write_text(str(os.getpid()))
    time.sleep(600)
