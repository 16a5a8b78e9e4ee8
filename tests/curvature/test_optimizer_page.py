"""Every snippet of docs/optimizer.md that needs torch alone runs, without a warning."""

import pytest
from optimizer_page import run, snippets


@pytest.mark.parametrize("code", snippets(frameworks=False), ids=lambda code: f"line {code.count(chr(10))}")
def test_the_snippets_of_the_page_run(code, tmp_path, monkeypatch):
    run(code, tmp_path, monkeypatch)


def test_the_page_has_snippets_of_both_kinds():
    assert len(snippets(frameworks=False)) >= 9
    assert len(snippets(frameworks=True)) == 4
