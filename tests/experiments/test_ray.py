"""The same grid on a real Ray, on this machine, with two workers."""

import os
import signal

import pytest
from frame import NAME, check, ended, psgd, until

from psgd.experiments import store

pytest.importorskip("ray", reason="needs the extra `ray`")
pytestmark = pytest.mark.frameworks

GRID = ("run", NAME, "--preset", "quick", "--no-report", "--jobs", "2", "--ray", "local", "--checkpoint", "0.1")


def test_a_run_on_ray_leaves_the_same_files(tmp_path):
    code, text, error = ended(psgd(*GRID, "--out", tmp_path / "out"))
    assert code == 0, error
    assert "4 of 4 cells" in text and "Last loss" in text
    check(tmp_path / "out", 4)


def test_a_run_on_ray_survives_the_death_of_a_worker_and_its_own(tmp_path):
    out = tmp_path / "out"
    more = ("--set", "steps=60", "--set", "pause=0.05", "--out", out, "--resume")
    process = psgd(*GRID, *more, TINY_PIDS=str(tmp_path / "pids"))
    until(lambda: len(list((out / store.WORK).glob("*.pt"))) == 2)  # two at once, both with checkpoints
    pids = {int(line) for line in (tmp_path / "pids").read_text().split()}
    assert len(pids) == 2
    os.kill(min(pids), signal.SIGKILL)
    until(lambda: list((out / store.FAILED).glob("*.json")))
    process.kill()
    ended(process)
    assert not (out / store.CELLS).exists() or len(store.load(out).results) < 4
    code, _, error = ended(psgd(*GRID, *more))
    assert code == 0, error
    check(out, 4)
