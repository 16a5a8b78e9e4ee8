"""docs/diagnostics.md: its examples run in order, its links lead somewhere, its tables are complete."""

import re
from pathlib import Path

import pytest
import torch
from problems import batches, loss, network, operator, symmetric

import psgd

PAGE = Path(__file__).parents[2] / "docs" / "diagnostics.md"
TEXT = PAGE.read_text(encoding="utf-8")


def test_examples_run_in_order():
    pytest.importorskip("matplotlib")
    pytest.importorskip("scipy")
    namespace = {}
    with torch.random.fork_rng():
        torch.manual_seed(0)
        for block in re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL):
            exec(compile(block, str(PAGE), "exec"), namespace)
    drawn = {path.stem for path in namespace["folder"].glob("*.png")}
    assert drawn == {path.stem for path in (PAGE.parent / "diagnostics").iterdir()}
    assert namespace["found"].loss < 0.2


def test_links_and_pictures_exist():
    anchors = {
        re.sub(r"[^\w -]", "", h).strip().lower().replace(" ", "-") for h in re.findall(r"^#+ (.*)$", TEXT, re.M)
    }
    for link in re.findall(r"\]\(([^)]+)\)", TEXT):
        assert link[1:] in anchors if link.startswith("#") else (PAGE.parent / link).exists(), link


def keys(section):
    rows = TEXT.split(f"\n## {section}\n")[1].split("\n## ")[0]
    cells = re.findall(r"^\| (`[^|]*?) \|", rows, re.M)
    return {key for cell in cells for key in re.findall(r"`(\w+)`", cell)}


def test_tables_name_every_key():
    model = network()
    opt = psgd.PSGD(model.parameters(), curvature=psgd.hessian)
    opt.step(lambda: loss(model, batches(1)[0]))
    assert keys("During training") == opt.diagnostics().keys()
    report = psgd.hessian_report(operator(symmetric(torch.ones(6)).float()), psgd.lra(1), psgd.lra(1).init(6))
    assert keys("Beside the true Hessian") == report.keys()
