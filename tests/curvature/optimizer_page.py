"""The snippets of docs/optimizer.md: each runs after the first, in a namespace of its own."""

import re
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "optimizer.md"
FRAMEWORKS = ("lightning", "accelerate", "transformers")


def snippets(frameworks):
    """The snippets that need a framework, or those that do not, each after the start that they share."""
    start, *rest = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    return [start + code for code in rest if any(name in code for name in FRAMEWORKS) == frameworks]


def run(code, folder, monkeypatch):
    monkeypatch.chdir(folder)
    exec(compile(code, str(PAGE), "exec"), {"__name__": "__main__"})
