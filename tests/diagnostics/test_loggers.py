"""Files that are complete after every call, whatever happens to the run."""

import csv
import json
import math

import pytest

from psgd.diagnostics.loggers import CSV, JSONLines

KINDS = [JSONLines, CSV]
of_both = pytest.mark.parametrize("kind", KINDS)


def rows(log):
    text = log.path.read_text(encoding="utf-8")
    if isinstance(log, JSONLines):
        return [json.loads(line) for line in text.splitlines()]
    return [{k: float(v) if v else None for k, v in row.items()} for row in csv.DictReader(text.splitlines())]


@of_both
def test_every_call_is_on_disk_when_it_returns(kind, tmp_path):
    log = kind(tmp_path / "new" / "run")
    for step in range(3):
        log(step, {"loss": 1 / (step + 1), "cosine": 0.5})
        assert rows(log)[-1] == {"step": step, "loss": 1 / (step + 1), "cosine": 0.5}
    assert [row["step"] for row in rows(log)] == [0, 1, 2]


@of_both
def test_appends_to_an_earlier_run(kind, tmp_path):
    kind(tmp_path / "run")(1, {"loss": 1.0})
    log = kind(tmp_path / "run")
    log(2, {"loss": 2.0})
    assert rows(log) == [{"step": 1, "loss": 1.0}, {"step": 2, "loss": 2.0}]


@of_both
def test_resuming_from_an_older_checkpoint_replaces_what_came_after(kind, tmp_path):
    first = kind(tmp_path / "run")
    for step in (10, 20, 30, 40):
        first(step, {"loss": 1.0})
    log = kind(tmp_path / "run")
    log(25, {"loss": 2.0})
    log(30, {"loss": 2.0})
    assert rows(log) == [{"step": s, "loss": v} for s, v in ((10, 1.0), (20, 1.0), (25, 2.0), (30, 2.0))]


@of_both
def test_starting_over_replaces_everything(kind, tmp_path):
    first = kind(tmp_path / "run")
    first(1, {"loss": 1.0})
    first(2, {"loss": 1.0})
    log = kind(tmp_path / "run")
    log(1, {"loss": 3.0})
    assert rows(log) == [{"step": 1, "loss": 3.0}]


@of_both
@pytest.mark.parametrize("cut", [1, 2, 5])
def test_half_a_line_is_dropped(kind, cut, tmp_path):
    log = kind(tmp_path / "run")
    log(1, {"loss": 1.0})
    log(2, {"loss": 1.25})
    log.path.write_bytes(log.path.read_bytes()[:-cut])
    again = kind(tmp_path / "run")
    assert rows(again) == [{"step": 1, "loss": 1.0}]
    again(2, {"loss": 1.5})
    assert rows(again) == [{"step": 1, "loss": 1.0}, {"step": 2, "loss": 1.5}]


def test_a_file_that_ends_inside_its_heading_starts_anew(tmp_path):
    (tmp_path / "run").write_text("ste")
    log = CSV(tmp_path / "run")
    log(1, {"loss": 1.0})
    assert rows(log) == [{"step": 1, "loss": 1.0}]


def test_what_is_not_finite(tmp_path):
    log = JSONLines(tmp_path / "run")
    log(1, {"a": math.nan, "b": math.inf})
    assert rows(log) == [{"step": 1, "a": None, "b": None}]
    table = CSV(tmp_path / "table")
    table(1, {"a": math.nan})
    assert math.isnan(rows(table)[0]["a"])


def test_columns_are_those_of_the_first_call(tmp_path):
    log = CSV(tmp_path / "run")
    log(1, {"a": 1.0, "b": 2.0})
    log(2, {"b": 3.0})
    assert rows(log)[-1] == {"step": 2, "a": None, "b": 3.0}
    with pytest.raises(ValueError, match=r"has the columns .*, got also \['c'\]"):
        log(3, {"c": 1.0})
    assert len(rows(log)) == 2


def test_names_with_commas(tmp_path):
    log = CSV(tmp_path / "run")
    log(1, {"a,b": 1.0})
    log(2, {"a,b": 2.0})
    assert rows(log)[-1] == {"step": 2, "a,b": 2.0}
