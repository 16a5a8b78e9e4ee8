import json
import math
from dataclasses import dataclass
from pathlib import Path

import numpy
import pytest
import torch
from frame import NAME

from psgd.experiments import store


@dataclass(frozen=True)
class Config:
    method: str = "sgd"
    lr: float = 0.1
    clip: float = math.inf
    steps: int = 3


LINE = {"cell": 0, "config": {"method": "sgd"}, "seed": 0, "seconds": 1.0, "cpu_seconds": 2.0, "records": [{"step": 0}]}


def saved(directory: Path, lines: list[dict], name: str = NAME) -> Path:
    store.write_json(directory / store.PROVENANCE, {"experiment": name})
    for line in lines:
        store.append_line(directory / store.CELLS, line)
    return directory


def test_a_torn_line_is_not_read_and_is_gone_after_the_next_one(tmp_path):
    path = tmp_path / "lines"
    store.append_line(path, {"a": 1})
    whole = path.read_bytes()
    for torn in (b"{", b'{"a": 2}', b"x" * 200_000):
        path.write_bytes(whole + torn)
        assert store.read_lines(path) == [{"a": 1}]
        store.append_line(path, {"a": 3})
        assert store.read_lines(path) == [{"a": 1}, {"a": 3}]
    path.write_bytes(b'{"a"')
    store.append_line(path, {"a": 4})
    assert path.read_bytes() == b'{"a":4}\n'


def test_a_spoiled_line_is_an_error_that_names_the_file(tmp_path):
    path = tmp_path / "lines"
    path.write_bytes(b'{"a": 1}\n{"a"\n{"a": 2}\n')
    with pytest.raises(ValueError, match="lines"):
        store.read_lines(path)


def test_lines_are_strict_json():
    values = {"loss": torch.tensor(math.nan), "path": numpy.array([1.5, -math.inf]), "n": numpy.int64(3), "t": "α"}
    line = store.dumps(values)
    assert json.loads(line, parse_constant=pytest.fail) == {"loss": None, "path": [1.5, None], "n": 3, "t": "α"}
    assert line.count(b"\n") == 1


def test_an_id_is_of_name_fields_and_seed():
    keys = [("a", Config(), 0), ("b", Config(), 0), ("a", Config(lr=0.2), 0), ("a", Config(), 1)]
    ids = {store.cell_id(*key) for key in keys}
    assert len(ids) == 4
    assert store.cell_id("a", Config(), 0) == store.cell_id("a", Config("sgd", 0.1), 0)


def test_a_config_comes_back_from_json():
    config = Config("adam", 1e-300, steps=7)
    assert store.rebuilt(json.loads(store.dumps(store.fields(config))), Config) == config


def test_a_field_that_is_new_has_its_default_and_one_that_is_gone_is_an_error():
    assert store.rebuilt({"method": "adam"}, Config) == Config("adam")
    with pytest.raises(ValueError, match=r"method, lr, clip, steps, but .* rate"):
        store.rebuilt({"rate": 1}, Config)


def test_a_run_is_read_in_the_order_of_its_cells(tmp_path):
    order = [(1, 0), (0, 1), (0, 0)]
    run = store.load(saved(tmp_path, [{**LINE, "cell": cell, "seed": seed} for cell, seed in order]))
    assert run.name == NAME and run.provenance == {"experiment": NAME} and run.failures == []
    assert [r.seed for r in run.results] == [0, 1, 0]
    assert run.results[0].config.method == "sgd"
    assert (run.results[0].seconds, run.results[0].cpu_seconds) == (1.0, 2.0)


def test_a_run_that_goes_on_can_be_read(tmp_path):
    directory = saved(tmp_path, [LINE])
    with (directory / store.CELLS).open("ab") as file:
        file.write(b'{"cell": 1, "conf')
    assert len(store.load(directory).results) == 1
    (directory / store.CELLS).unlink()
    assert store.load(directory).results == []


def test_a_directory_without_a_run_is_an_error(tmp_path):
    with pytest.raises(ValueError, match=r"run\.json"):
        store.load(tmp_path)


def test_replacing_keeps_the_old_file_if_the_writer_fails(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(b"old")
    with pytest.raises(RuntimeError), store.replacing(path) as file:
        file.write(b"new")
        raise RuntimeError
    assert path.read_bytes() == b"old"
