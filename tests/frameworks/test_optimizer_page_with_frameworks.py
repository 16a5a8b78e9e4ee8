"""The snippets of docs/optimizer.md that need a framework run, without a warning."""

import re
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.frameworks
sys.path.insert(0, str(Path(__file__).parents[1] / "curvature"))

from optimizer_page import FRAMEWORKS, run, snippets  # noqa: E402


@pytest.mark.parametrize("code", snippets(frameworks=True), ids=lambda code: f"line {code.count(chr(10))}")
def test_the_snippets_of_the_page_run(code, tmp_path, monkeypatch):
    for name in FRAMEWORKS:
        if re.search(rf"^(import|from) {name}", code, re.MULTILINE):
            pytest.importorskip(name, reason="needs the extra `frameworks`")
    run(code, tmp_path, monkeypatch)
