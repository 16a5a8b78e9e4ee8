import importlib.metadata
import shutil
import subprocess
import sys

import pytest
import torch

import psgd
from psgd.experiments import provenance


def test_a_description_says_where_a_run_comes_from():
    about = provenance.describe(experiment="tiny", preset="cpu")
    assert about["experiment"] == "tiny" and about["preset"] == "cpu"
    assert {"command", "started", "finished", "machine", "cpus", "commit", "dirty"} <= set(about)
    assert about["versions"]["psgd"] == psgd.__version__ and about["versions"]["torch"] == torch.__version__
    assert importlib.metadata.version("heavyball") == about["versions"]["heavyball"]  # of which nothing requires it


def test_the_command_can_be_pasted(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["/x/src/psgd/cli.py", "run", "a b", "it's", "lr=0.1"])
    assert provenance.command() == "psgd run 'a b' 'it'\\''s' lr=0.1"


@pytest.mark.skipif(shutil.which("git") is None, reason="needs git")
def test_the_commit_is_that_of_the_source_and_dirt_counts_only_there(tmp_path):
    def git(*arguments):
        who = ["-c", "user.name=a", "-c", "user.email=a@b"]
        return subprocess.run(
            ["git", *who, *arguments], cwd=tmp_path, check=True, capture_output=True, text=True
        ).stdout

    package = tmp_path / "src"
    package.mkdir()
    assert provenance.commit(package) == {"commit": None, "dirty": None}
    (package / "__init__.py").write_text("")
    git("init")
    assert provenance.commit(package) == {"commit": None, "dirty": None}  # not of this repository
    git("add", ".")
    git("commit", "-m", "a")
    (tmp_path / "out").write_text("")
    clean = {"commit": git("rev-parse", "HEAD").strip(), "dirty": False}
    assert provenance.commit(package) == clean
    (package / "new.py").write_text("")
    assert provenance.commit(package) == {**clean, "dirty": True}
