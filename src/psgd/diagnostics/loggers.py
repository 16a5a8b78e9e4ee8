"""Where numbers go during training: a logger is any function of a step and a flat dict of floats.

`opt.diagnostics()` is such a dict: `log = JSONLines("run.jsonl")`, then `log(step, opt.diagnostics())`.
"""

from __future__ import annotations

import csv
import io
import json
import math
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

Logger = Callable[[int, Mapping[str, float]], None]


class StepFile(ABC):
    """A text file with one line to a step, in ascending order, complete after every call.

    It survives what happens to runs. Logging a step again, as after resuming from an older checkpoint, drops that line
    and all after it; half a line, as after a crash, is dropped as well.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._last: int | None = None
        self._cut(None)

    def __call__(self, step: int, values: Mapping[str, float]) -> None:
        """Append one line."""
        line = self._line(int(step), {k: float(v) for k, v in values.items()})
        if self._last is not None and step <= self._last:
            self._cut(step)
        with self.path.open("a", encoding="utf-8", newline="") as file:
            file.write(line)
        self._last = int(step)

    def _cut(self, step: int | None) -> None:
        """Truncate before the first line that is incomplete, or of this step or a later one."""
        self._last, end = None, 0
        for line in self._lines():
            found = self._step(line) if line.endswith("\n") else None
            if not line.endswith("\n") or (found is not None and step is not None and found >= step):
                break
            end += len(line.encode())
            self._last = self._last if found is None else found
        if self.path.exists() and end < self.path.stat().st_size:
            os.truncate(self.path, end)

    def _lines(self) -> Iterator[str]:
        if self.path.exists():
            with self.path.open(encoding="utf-8", newline="") as file:
                yield from file

    @abstractmethod
    def _line(self, step: int, values: dict[str, float]) -> str:
        """Return the line of a step, with its end."""

    @abstractmethod
    def _step(self, line: str) -> int | None:
        """Return the step of a line; None for a heading."""


class JSONLines(StepFile):
    """Writes `{"step": 1, "loss": 0.5}`, one object to a line. What is not finite becomes null.

    >>> import tempfile
    >>> log = JSONLines(Path(tempfile.mkdtemp()) / "run.jsonl")
    >>> for step in (1, 2, 3, 2):  # resumed after step 1
    ...     log(step, {"loss": 1 / step})
    >>> log.path.read_text().splitlines()
    ['{"step": 1, "loss": 1.0}', '{"step": 2, "loss": 0.5}']
    """

    def _line(self, step: int, values: dict[str, float]) -> str:
        finite = {k: v if math.isfinite(v) else None for k, v in values.items()}
        return json.dumps({"step": step} | finite) + "\n"

    def _step(self, line: str) -> int | None:
        return int(json.loads(line)["step"])


class CSV(StepFile):
    """Writes a table with the columns of the first call; later calls may leave some of them out.

    >>> import tempfile
    >>> log = CSV(Path(tempfile.mkdtemp()) / "run.csv")
    >>> log(1, {"loss": 0.5, "cosine": 0.25})
    >>> log.path.read_text().splitlines()
    ['step,loss,cosine', '1,0.5,0.25']
    """

    def _line(self, step: int, values: dict[str, float]) -> str:
        first = next(self._lines(), None)
        columns = ["step", *values] if first is None else next(csv.reader([first]))
        extra = values.keys() - set(columns)
        if extra:
            raise ValueError(f"{self.path} has the columns {columns}, got also {sorted(extra)}; start another file")
        text = io.StringIO()
        writer = csv.DictWriter(text, columns, lineterminator="\n")
        if first is None:
            writer.writeheader()
        writer.writerow({"step": step} | values)
        return text.getvalue()

    def _step(self, line: str) -> int | None:
        cell = next(csv.reader([line]))[0]
        return None if cell == "step" else int(cell)


class TensorBoard:
    """Writes scalars to a TensorBoard directory; steps from the first one logged on replace those of an earlier run."""

    def __init__(self, directory: str | os.PathLike[str], prefix: str = "psgd/") -> None:
        self.directory, self.prefix = Path(directory), prefix
        self._writer: Any = None

    def __call__(self, step: int, values: Mapping[str, float]) -> None:
        """Write one step."""
        from torch.utils.tensorboard import SummaryWriter

        if self._writer is None:
            self._writer = SummaryWriter(str(self.directory), purge_step=step)
        for name, value in values.items():
            self._writer.add_scalar(self.prefix + name, value, step)
        self._writer.flush()
