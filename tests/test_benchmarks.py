"""The benchmarks: the stopwatch takes turns and minima, updates come when they are due, and no failure is hidden."""

import doctest
import importlib
import json
import math
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

import psgd

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"
sys.path.append(str(BENCHMARKS))

import bars  # noqa: E402
import iterations  # noqa: E402
import memory  # noqa: E402
import peers  # noqa: E402
import report  # noqa: E402
import resnet  # noqa: E402
import step_cost  # noqa: E402
import whiteness  # noqa: E402
from measurement import Measurement  # noqa: E402
from timing import Task, Timing, contest, silence  # noqa: E402

SECTIONS = ("step-cost", "roofline", "iterations", "memory", "growth", "solvers")


# --- the stopwatch


class Clock:
    """Time that passes only when a task says so."""

    def __init__(self) -> None:
        self.now, self.order = 0.0, ""

    def __call__(self) -> float:
        return self.now

    def task(self, name: str, *seconds: float, steps: int = 1) -> Task:
        """A task that takes so many seconds, each time the next, then the last for ever."""
        left = list(seconds)

        def run() -> None:
            self.order += name
            self.now += left.pop(0) if len(left) > 1 else left[0]

        return Task(run, steps)


def test_tasks_take_turns_and_each_round_starts_with_another():
    clock = Clock()
    contest({"a": clock.task("a", 0.5), "b": clock.task("b", 0.5), "c": clock.task("c", 9.0)}, rounds=4, clock=clock)
    assert clock.order == "aabbc" + "abc" + "bca" + "cab" + "abc"


def test_the_least_time_counts_and_warming_up_does_not():
    clock = Clock()
    tasks = {"a": clock.task("a", 0.9, 0.9, 7, 5, 6), "b": clock.task("b", 0.5, 0.5, 9, 8, 9, steps=2)}
    found = contest(tasks, rounds=3, clock=clock)
    assert (found["a"].seconds, found["b"].seconds) == (5, 4) and found["a"].rounds == 3
    assert found["a"].over(found["b"]) == 5 / 4


def test_quick_tasks_are_called_more_than_once_in_a_turn():
    clock = Clock()
    found = contest({"a": clock.task("a", 0.125), "b": clock.task("b", 2.0)}, rounds=2, least=1.0, clock=clock)
    assert clock.order == "aab" + "a" * 8 + "b" + "b" + "a" * 8
    assert found["a"].seconds == 0.125


def test_a_task_that_fails_is_out_and_the_others_go_on():
    clock, left = Clock(), [None] * 3

    def fails_in_the_second_round() -> None:
        left.pop()

    tasks = {"a": clock.task("a", 1.0), "bad": Task(lambda: 1 / 0), "late": Task(fails_in_the_second_round)}
    found = contest(tasks, rounds=3, clock=clock, least=0.0)
    assert found["a"].seconds == 1 and found["a"].rounds == 3
    assert found["bad"].seconds is None and found["bad"].error == "ZeroDivisionError: division by zero"
    assert found["late"].seconds is None and found["late"].error == "IndexError: pop from empty list"


def test_a_budget_ends_it_after_two_rounds_or_more():
    clock = Clock()
    assert contest({"a": clock.task("a", 1.0)}, rounds=9, budget=0.5, clock=clock)["a"].rounds == 2
    assert contest({"a": clock.task("a", 1.0)}, rounds=9, budget=3.5, clock=clock)["a"].rounds == 4


def test_a_real_clock_tells_more_work_from_less():
    x = torch.randn(300, 300)
    tasks = {"one": Task(lambda: x @ x), "ten": Task(lambda: [x @ x for _ in range(10)])}
    found = contest(tasks, rounds=10)
    assert 5 < found["ten"].over(found["one"]) < 20


# --- the contestants

ALL = {c.name: c for c in peers.contestants()}
SHAPES = ((6, 4), (6, 4), (5,))


def built(contestant: peers.Contestant, model: nn.Module) -> peers.Runner:
    try:
        with silence():
            return contestant.build(model)
    except ImportError as e:
        pytest.skip(f"{contestant.name}: {e}")


PARTS = re.compile(r"(^|_)(q|Q|U|V|d|inv_pre_cond|exp_hessian_diag_sq)(_\d+)?$")
"""What the packages call what an update changes, and other steps do not; in psgd-torch, these are attributes."""


def preconditioner(runner: peers.Runner) -> list[Tensor]:
    """Copy it."""
    if hasattr(runner.optimizer, "state"):
        found = [part for state in runner.optimizer.state.values() for part in parts(state)]
    else:
        found = [getattr(runner.optimizer, name, None) for name in ("_a", "_b", "_U", "_V", "_d", "_Qs", "_Qs_exprs")]
    return [t.clone() for t in tree_leaves(found) if isinstance(t, Tensor)]


def parts(state: dict) -> Iterator[object]:
    for key, value in state.items():
        if PARTS.search(str(key)):
            yield value
        elif isinstance(value, dict):
            yield from parts(value)


@pytest.mark.parametrize("name", [c.name for c in ALL.values() if c.updates and not c.compiles])
def test_a_preconditioner_is_updated_when_it_is_said_to_be_and_only_then(name: str):
    rng = torch.Generator().manual_seed(0)
    network = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 5))
    inputs, targets = torch.randn(8, 4, generator=rng), torch.randn(8, 5, generator=rng)
    runner = built(ALL[name], network)

    def loss() -> Tensor:
        return (network(inputs) - targets).square().mean()

    def changes(updating: bool) -> bool:
        runner.due(updating)
        before = preconditioner(runner)
        with silence():
            runner.iterate(loss)
        after = preconditioner(runner)
        assert before and len(before) == len(after)
        return any(not torch.equal(a, b) for a, b in zip(before, after, strict=True))

    runner.due(True)
    with silence():
        for _ in range(3):
            runner.iterate(loss)
    assert [changes(updating) for updating in (True, False, False, True, False)] == [True, False, False, True, False]


@pytest.mark.parametrize("name", [c.name for c in ALL.values() if c.given and not c.compiles])
def test_steps_on_given_gradients_move_the_parameters_and_spoil_nobody_elses(name: str):
    rng = torch.Generator().manual_seed(0)
    gradients = [torch.randn(shape, generator=rng) for shape in SHAPES]
    copies = [g.clone() for g in gradients]
    model = nn.ParameterList(torch.zeros(shape) for shape in SHAPES)
    built(ALL[name], model)
    with silence():
        tasks = step_cost.steps(ALL[name], model, gradients)
        for task in [*tasks.values()] * 3:
            task.run()
    assert len(tasks) == 1 + ALL[name].updates
    assert all(torch.equal(a, b) for a, b in zip(gradients, copies, strict=True))
    assert all(p.isfinite().all() and p.abs().max() > 0 for p in model)


def test_peers_that_keep_no_average_are_held_against_ours_that_keep_none():
    theirs = {f for name, c in ALL.items() if name.startswith("psgd-torch") for f in c.families}
    bare = {name: c for name, c in ALL.items() if c.ours and theirs & {*c.families}}
    assert theirs == {f for c in bare.values() for f in c.families}
    for c in bare.values():
        optimizer = built(c, nn.Linear(4, 6)).optimizer
        assert not optimizer.param_groups[0]["momentum"] and optimizer.param_groups[0]["max_rms"] is None
        assert c.name.removesuffix(", bare") in ALL


def test_a_turn_updates_always_or_never():
    calls: list[bool] = []

    class Counting(peers.Runner):
        def iterate(self, loss: peers.Loss) -> None:
            calls.append(self.updating)

    runner = Counting(None, nn.Linear(1, 1))
    for updating in (True, False):
        iterations.turn(runner, lambda: torch.zeros(()), updating, 2)()
    assert calls == [True, True, False, False]


def test_one_iteration_in_ten_updates():
    times = {("a", "p = 1"): Timing(3.0, 5), ("a", "p = 0.1"): Timing(1.0, 4), ("b", "p = 0.1"): Timing(2.0, 4)}
    found = iterations.mixed(times, 0.1, "p = 1")
    assert found["a", "p = 0.1"].seconds == pytest.approx(1.2) and found["a", "p = 1"].seconds == 3
    assert found["b", "p = 0.1"].seconds == 2


def test_what_cannot_update_has_no_mixture():
    times = {("a", "p = 1"): Timing(None, error="x"), ("a", "p = 0.1"): Timing(1.0, 4)}
    assert {t.error for t in iterations.mixed(times, 0.1, "p = 1").values()} == {"x"}


def test_low_rank_fits_of_psgd_torch_move_both_factors_in_turn():
    pytest.importorskip("psgd_torch")
    first, second = step_cost.tosses()
    assert first != second
    given, moved = step_cost.Pairs(24, (4, 6)), []
    functions = step_cost.functions()
    for seed in (first, second):
        u, v, d = torch.ones(24, 2) * 0.1, torch.ones(24, 2) * 0.1, torch.ones(24, 1)
        torch.default_generator.manual_seed(seed)
        functions.update_precond_UVd_math_(u, v, d, *(t[:, None] for t in given.pairs[0]), 0.1, "2nd", 1e-30)
        moved.append((bool((u != 0.1).any()), bool((v != 0.1).any())))
    assert moved == [(True, False), (False, True)]


def test_a_missing_package_is_named(monkeypatch, tmp_path):
    def absent(name: str) -> None:
        raise ModuleNotFoundError(f"No module named {name!r}")

    monkeypatch.setattr(peers.importlib, "import_module", absent)
    found = step_cost.at(960, step_cost.QUICK)
    lost = {m.row: m.error for m in found if m.error and m.error.startswith("Module")}
    assert lost["heavyball PSGDKron, eager"] == "ModuleNotFoundError: No module named 'heavyball'"
    assert {"psgd-torch XMat", "kron-torch Kron, eager", "pytorch_optimizer SOAP"} < lost.keys()
    assert all(m.value for m in found if m.row == "psgd XMat")
    page = report.markdown({}, found)
    assert "- heavyball PSGDKron, eager: ModuleNotFoundError: No module named 'heavyball'" in page


def test_whiteness_is_told_for_every_method(tmp_path):
    whiteness.main([str(tmp_path), "--quick"])
    about = json.loads((tmp_path / "whiteness.json").read_text())
    assert list(about["methods"]) == list(whiteness.METHODS) and about["iterations"] == 4
    for found in about["methods"].values():
        assert found["quantiles"] == sorted(found["quantiles"]) and found["quantiles"][2] == pytest.approx(1, rel=0.01)


def test_whiteness_is_that_of_the_preconditioned_gradient():
    p = torch.nn.Parameter(torch.zeros(3))
    adam, ours = torch.optim.AdamW([p]), psgd.PSGD([p], psgd.Diagonal(), init_scale=1.0, precond_prob=1.0)
    p.grad = torch.tensor([1.0, 2.0, 4.0])
    for opt in (adam, ours):
        opt.step()
    g = torch.tensor([2.0, 4.0, 8.0])
    (y,) = whiteness.preconditioner(adam)([p], [g])
    torch.testing.assert_close(y / y[0], torch.ones(3))
    (scope,) = ours._scopes()
    (y,) = whiteness.preconditioner(ours)([p], [g])
    torch.testing.assert_close(y, scope.point["d"].square() * g)
    assert not torch.equal(y, g)


# --- memory


def test_bytes_are_those_of_the_tensors():
    x, kept = torch.zeros(1000), []
    first, second, third = memory.usages(lambda: kept.append(x + (x + 1)), lambda: torch.exp(x), kept.clear)
    assert 8000 <= first.peak < 8100 and first.kept == 4000
    assert 4000 <= second.peak < 4100 and second.kept == 0 and third.kept == -4000


def test_the_state_of_adam_takes_two_numbers_for_each_parameter():
    state, without, _ = memory.alone(ALL["torch AdamW, fused"], memory.Settings(count=2, matrix=(50, 50)))
    assert 8.0 <= state / 5000 < 8.1 and without / 5000 < 0.1


# --- the report


def cell(value: float | None, row: str, ours: bool = False, families: tuple[str, ...] = (), **more) -> Measurement:
    column = more.pop("column", "fit")
    return Measurement(bars.SIZE, row, column, value, "copies", families=families, ours=ours, **more)


def test_bars_are_held_against_what_was_measured():
    found = [
        cell(44.0, "psgd XMat", True),
        cell(26.0, "psgd XMat, compiled", True),
        cell(None, "psgd lra(10)", error="x"),
    ]
    met = {(v.bar.row, v.bar.column): v.met for v in bars.verdicts(found)}
    assert met["psgd XMat", "fit"] is True and met["psgd XMat, compiled", "fit"] is False
    assert met["psgd lra(10)", "fit"] is None and met["psgd XMat", "precondition"] is None
    assert len(bars.verdicts(found)) == len(bars.BARS)


def test_what_is_compiled_is_held_against_the_bar_of_the_eager_one():
    row = "psgd XMat, hessian, compiled"
    found = [Measurement(bars.title(bars.LENET5), row, "p = 0.1", 1.05, "", ours=True)]
    assert [v.met for v in bars.verdicts(found) if v.bar.row == row] == [True]


def test_peers_are_compared_with_the_best_of_ours_in_the_same_cell():
    found = [
        cell(10.0, "psgd XMat", True, ("xmat",)),
        cell(8.0, "psgd XMat, compiled", True, ("xmat",)),
        cell(20.0, "psgd lra(10)", True, ("lra",)),
        cell(4.0, "psgd-torch XMat", False, ("xmat",)),
        cell(4.0, "psgd-torch XMat", False, ("xmat",), column="precondition"),
    ]
    (pair,) = bars.rivalries(found)
    assert pair.ours.row == "psgd XMat, compiled" and pair.ratio == 0.5
    assert "| psgd-torch XMat | psgd XMat, compiled | 0.5 | **no** |" in report.markdown({}, found)


def test_the_picture_shows_every_table(tmp_path):
    found = [cell(1.0, "psgd XMat"), cell(None, "gone", error="lost")]
    found += [Measurement("Growth", "psgd XMat", f"n = 1e{k}", k, "copies") for k in (4, 5)]
    report.picture(tmp_path / "picture.png", found)
    assert (tmp_path / "picture.png").stat().st_size > 5000


@pytest.mark.parametrize("name", ["iterations", "measurement", "memory", "report", "roofline"])
def test_examples(name: str):
    results = doctest.testmod(importlib.import_module(name))
    assert results.attempted and not results.failed


def test_resnet18_is_what_it_says():
    assert sum(p.numel() for p in resnet.ResNet18().parameters()) == 11_173_962
    tiny = resnet.seeded(0, width=2)
    state = torch.get_rng_state()
    assert all(
        torch.equal(a, b) for a, b in zip(tiny.parameters(), resnet.seeded(0, width=2).parameters(), strict=True)
    )
    assert torch.equal(state, torch.get_rng_state())
    assert tiny(torch.zeros(3, 3, 32, 32)).shape == (3, 10)


# --- the command


def command(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(BENCHMARKS / "bench.py"), *arguments], capture_output=True, text=True, timeout=250
    )


@pytest.mark.parametrize("section", SECTIONS)
def test_a_quick_run_writes_all_that_it_should(section: str, tmp_path):
    done = command(section, "--quick", "--out", str(tmp_path))
    assert done.returncode == 0, done.stderr
    record = json.loads((tmp_path / "bench.json").read_text())
    about, found = record["about"], record["measurements"]
    assert {"commit", "machine", "processor", "cpus", "started", "finished", "command"} <= about.keys()
    assert about["threads"] == 1 and about["quick"] and about["sections"] == [section]
    assert {"torch", "psgd", "python", "heavyball", "kron-torch", "psgd-torch"} <= about["versions"].keys()
    assert len(record["bars"]) >= len(bars.BARS) and found
    absent = [k for k, version in about["versions"].items() if version == "not installed"]
    for m in found:
        assert (m["value"] is None) == (m["error"] is not None), m
        assert m["value"] is None or (math.isfinite(m["value"]) and m["value"] >= 0), m
        missing = any(m["row"].startswith(name.replace("-", "_")) or m["row"].startswith(name) for name in absent)
        assert m["error"] is None or m["error"].startswith("not measured") or missing, m
    rows = {m["row"] for m in found}
    if section not in ("roofline", "growth", "solvers"):
        assert {c.name for c in ALL.values() if c.given} <= rows
    page = (tmp_path / "bench.md").read_text()
    assert all(f"## {m['table']}\n" in page for m in found) and all(row in page for row in rows)
    assert (tmp_path / "bench.png").stat().st_size > 10_000
    assert str(tmp_path / "bench.md") in done.stdout


def test_an_unknown_section_is_refused():
    done = command("speed")
    assert done.returncode == 2 and "a section is one of step-cost, roofline, iterations" in done.stderr
