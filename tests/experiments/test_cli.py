"""The command: what it says, what it refuses, and what it leaves."""

import dataclasses
import json
import subprocess
import sys

import pytest
from experiments import tiny
from frame import NAME, check, ended, environment, psgd
from rich.console import Console
from typer.testing import CliRunner

from psgd import cli
from psgd.experiments import experiment, progress, store

LONG = ("run", "list", "report", "tune")


def said(*arguments: object) -> tuple[int, str]:
    """Run the command here, for what does not start processes."""
    answer = CliRunner().invoke(cli.app, [str(a) for a in arguments], env={"COLUMNS": "200", "TERM": "dumb"})
    assert answer.exception is None or isinstance(answer.exception, SystemExit), answer.exception
    return answer.exit_code, answer.output


def test_help_names_commands_and_options():
    code, text = said("--help")
    assert code == 0 and all(command in text for command in LONG)
    code, text = said("run", "--help")
    options = ["preset", "seeds", "only", "set", "jobs", "out", "resume", "ray", "data", "checkpoint", "report"]
    assert code == 0 and all(f"--{option}" in text for option in options)


def test_list_has_all_experiments():
    code, text = said("list")
    assert code == 0 and all(f" {name} " in text for name in experiment.names())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["run", "rosenbork"], "an experiment is one of {names}, got 'rosenbork'"),
        (["run", "no.such.module"], "a module that can be imported, got 'no.such.module'"),
        (["run", "json.decoder"], "an experiment has TITLE, Config"),
        (["run", NAME, "--only", "sgd,adam"], "one of sgd, momentum, got 'adam'"),
        (["run", NAME, "--set", "rate=1"], "one of method, lr, steps, pause, clip, got 'rate'"),
        (["run", NAME, "--set", "lr=high"], "the field lr needs a value of type float, got 'high'"),
        (["run", NAME, "--set", "lr=nan"], "the field lr must be at least 0, got nan"),
        (["run", NAME, "--set", "steps=0"], "the field steps must be at least 1, got 0"),
        (["run", NAME, "--set", "method=adam"], "the field method is one of sgd, momentum, got 'adam'"),
        (["run", "fitting-diagonal", "--set", "precision=float31"], "one of float32, bfloat16, got 'float31'"),
        (["run", "fitting-tracking", "--set", "problem=none"], "one of static, noisy, drifting, got 'none'"),
        (["run", "logistic", "--set", "pixels=gray"], "one of plain, bernoulli, got 'gray'"),
        (["run", "logistic", "--set", "batch=0"], "the field batch must be at least 1, got 0"),
        (["run", "mnist", "--set", "source=cifar"], "one of digits, mnist, got 'cifar'"),
        (["run", NAME, "--set", "lr"], "a setting is written as field=value, got 'lr'"),
        (["run", NAME, "--seeds", "0-3"], "seeds are written as 0:10, 3, or 0,2,5, got '0-3'"),
        (["run", NAME, "--seeds", "3:3"], "got '3:3'"),
        (["run", NAME, "--preset", "huge"], "'quick', 'cpu', 'paper'"),
        (["run", NAME, "--jobs", "0"], "--jobs"),
        (["run", NAME, "--data", "/no/such/folder"], "--data must be a folder"),
        (["tune", NAME, "adam"], "one of sgd, momentum, got 'adam'"),
        (["tune", "rosenbork", "adam"], "an experiment is one of"),
        (["report", "/no/such/folder"], "run.json"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_what_is_unknown_is_refused_with_what_is_known(arguments, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code, text = said(*arguments)
    assert code == 2
    assert message.format(names=", ".join(experiment.names())) in " ".join(text.split())
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("rosenbrock", {"start_u": -5.0, "noise_low": 0.0}),
        ("logistic", {"init_scale": 0.0, "examples": 0, "source": "digits"}),
        ("xor", {"rank": 0}),
        ("mnist", {"rank": 0, "lr": 0.0}),
    ],
)
def test_what_means_something_is_not_refused(name, fields):
    experiment.check(name, experiment.load(name).Config(**fields), fields)


def test_a_run_prints_tables_and_leaves_a_directory_that_is_not_overwritten(tmp_path, monkeypatch):
    out = tmp_path / "out"
    command = ("run", NAME, "--preset", "quick", "--no-report", "--jobs", "1", "--out", out, "--data", tmp_path)
    code, text, error = ended(psgd(*command))
    assert code == 0, error
    assert "4 of 4 cells" in text and "Last loss" in text and str(out) in text and "Traceback" not in error
    check(out, 4)
    about = json.loads((out / store.PROVENANCE).read_text())
    assert about["command"].startswith(f"psgd run {NAME} --preset quick") and about["settings"] == {}
    code, text = said(*command)
    assert code == 2 and "--resume" in text


def test_settings_that_share_a_row_are_named(tmp_path):
    out = tmp_path / "out"
    command = ("run", NAME, "--preset", "quick", "--jobs", "1", "--seeds", "0", "--only", "sgd", "--out", out)
    code, text = said(*command)
    assert code == 0 and "share rows" not in text + (out / "report.html").read_text()
    code, text = said(*command, "--set", "lr=0.5", "--resume")
    warning = "Runs of sgd with different settings share rows and curves: lr 0.1, 0.5"
    assert code == 0 and warning in text and warning in (out / "report.html").read_text()


@pytest.mark.parametrize("name", experiment.names())
def test_the_cells_of_an_experiment_do_not_share_rows_but_with_other_settings_they_do(name):
    module = experiment.load(name)
    for preset in cli.Preset:
        results = [experiment.Result(config, 0, []) for config in module.cells(preset.value)]
        assert experiment.mixed(module, results) == []
        field = "turns" if name == "wall-clock" else "lr" if hasattr(results[0].config, "lr") else "steps"
        value = getattr(results[0].config, field)
        other = dataclasses.replace(results[0].config, **{field: 2 * value})
        [text] = experiment.mixed(module, [*results, experiment.Result(other, 1, [])])
        assert text.startswith(f"Runs of {other.method} ") and text.endswith(f" {field} {value}, {2 * value}")


def test_a_field_that_an_experiment_varies_tells_runs_apart_and_one_that_goes_with_it_does_not():
    logistic = experiment.load("logistic")
    plain, drawn = (experiment.Result(logistic.Config(pixels=p), 0, []) for p in ("plain", "bernoulli"))
    longer = experiment.Result(logistic.Config(epochs=30, pixels="bernoulli"), 0, [])
    assert experiment.mixed(logistic, [plain, drawn]) == experiment.mixed(logistic, [plain, longer]) == []
    [text] = experiment.mixed(logistic, [plain, drawn, longer])  # some presets differ in epochs, too
    assert text.endswith("curves: epochs 20, 30")


def test_a_run_that_fails_in_part_says_so_and_exits_with_1(tmp_path, monkeypatch):
    monkeypatch.setenv("TINY_TRACE", str(tmp_path / "trace"))
    monkeypatch.setattr(tiny, "cells", lambda preset: [tiny.Config("raises")])
    command = ("run", NAME, "--preset", "quick", "--no-report", "--jobs", "1", "--seeds", "0")
    code, text = said(*command, "--out", tmp_path / "out")
    assert code == 1
    assert "raises seed=0 failed: RuntimeError: on purpose" in text
    assert "1 of 1 runs failed" in text and "--resume" in text


def test_tune_updates_its_file(tmp_path):
    out = tmp_path / "tuned.json"
    code, text = said("tune", NAME, "all", "--trials", "3", "--jobs", "1", "--out", out)
    assert code == 0, text
    assert set(json.loads(out.read_text())[NAME]) == {"sgd", "momentum"}
    assert "sgd: lr" in text and str(out) in text


def test_the_package_does_not_import_the_command():
    code = "import sys, psgd; sys.exit(any(m in sys.modules for m in ('typer', 'rich', 'psgd.experiments')))"
    assert subprocess.run([sys.executable, "-c", code], env=environment()).returncode == 0


def test_without_its_extra_the_command_says_what_is_missing():
    code = "import sys; sys.modules['typer'] = None; import psgd.cli"
    answer = subprocess.run([sys.executable, "-c", code], env=environment(), capture_output=True, text=True)
    assert answer.returncode == 1 and answer.stderr.startswith("the command psgd needs the extra `experiments`")


def test_a_terminal_shows_cells_under_way(tmp_path):
    from experiments.tiny import Config

    from psgd.experiments.runner import Cell

    (tmp_path / store.WORK).mkdir()
    cells = [Cell(store.cell_id(NAME, Config(m), s), 0, Config(m), s) for m in ("sgd", "momentum") for s in (0, 1)]
    log = store.work(tmp_path, cells[1].id)[0]
    store.append_line(log, {"step": 1, "loss": 9.0})
    console = Console(force_terminal=True, width=100, record=True, file=open("/dev/null", "w"))
    screen = progress.Screen(console)
    with screen.showing(tmp_path, cells, [c.id for c in cells[1:]]):
        assert list(screen.running()) == []  # what was there before is not under way
        store.append_line(log, {"step": 2, "loss": 0.5})
        with log.open("ab") as file:
            file.write(b'{"step": 3, "lo')
        assert list(screen.running()) == [("sgd seed=1", {"step": 2, "loss": 0.5})]
        console.print(screen.picture())
        screen.failed(cells[2], "ValueError: no")
        screen.finished(cells[3], {"records": [], "seconds": 1.0})
    console.file.close()
    text = console.export_text()
    assert "1 of 4 cells, 1 of them earlier" in text and "step 2, loss 0.5" in text
    assert "momentum seed=0 failed: ValueError: no" in text
    assert "3 of 4 cells" in screen.headline() and "1 failed" in screen.headline() and " left" in screen.headline()
