"""Fresh processes with the same seed agree in every bit; so does one that is resumed from a checkpoint in another."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from resume_worker import CASES
from toys import same


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    """Return where two processes, one after the other, left what they found."""
    path = tmp_path_factory.mktemp("resume")
    for part in ("first", "second"):
        worker = str(Path(__file__).with_name("resume_worker.py"))
        done = subprocess.run([sys.executable, worker, part, str(path)], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
    return path


def found(directory, case, name):
    return torch.load(directory / f"{CASES.index(case)}.{name}", weights_only=True)


@pytest.mark.parametrize("case", CASES, ids=": ".join)
def test_two_processes_agree_bitwise(directory, case):
    assert same(found(directory, case, "first"), found(directory, case, "second"))


@pytest.mark.parametrize("case", CASES, ids=": ".join)
def test_a_resumed_process_agrees_bitwise(directory, case):
    assert same(found(directory, case, "first"), found(directory, case, "resumed"))


@pytest.mark.parametrize("case", CASES, ids=": ".join)
def test_the_run_went_somewhere(directory, case):
    """Equal results of runs that do not move would say nothing."""
    before, after = found(directory, case, "checkpoint"), found(directory, case, "first")
    assert not any(same(t, before["model"]["0.weight"]) for t in after if isinstance(t, torch.Tensor))
