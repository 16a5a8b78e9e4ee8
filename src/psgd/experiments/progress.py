"""Shows how far a run is: live in a terminal, in plain lines elsewhere."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from psgd.experiments import store


class Progress:
    """Follows a run, and shows nothing.

    What runs is known from the logs of cells alone, so that it does not matter where they run.
    """

    @contextlib.contextmanager
    def showing(self, directory: Path, cells: Sequence[Any], left: Collection[str]) -> Iterator[None]:
        """Show, as long as the context lasts, how it goes with the cells whose ids are left."""
        self.names = labels(cells)
        self.logs = {i: store.work(directory, i)[0] for i in left}
        self.before = {i: touched(log) for i, log in self.logs.items()}
        self.total, self.done, self.skipped, self.errors = len(cells), 0, len(cells) - len(left), 0
        self.start = time.monotonic()
        with self.display():
            yield

    def display(self) -> contextlib.AbstractContextManager[Any]:
        """Show it."""
        return contextlib.nullcontext()

    def finished(self, cell: Any, line: Mapping[str, Any]) -> None:
        """Take note of a finished cell, and of what is kept of it."""
        self.done += 1
        del self.logs[cell.id]

    def failed(self, cell: Any, error: str) -> None:
        """Take note of a failed one, and why."""
        self.errors += 1
        del self.logs[cell.id]

    def running(self) -> Iterator[tuple[str, dict[str, Any] | None]]:
        """Return the cells under way: what they are, and their newest record."""
        for i, log in list(self.logs.items()):
            if touched(log) != self.before[i]:
                yield self.names[i], last_record(log)

    def headline(self) -> str:
        """Return it all in one line."""
        elapsed = time.monotonic() - self.start
        parts = [f"{self.skipped + self.done + self.errors} of {self.total} cells"]
        parts += [f"{self.skipped} of them earlier"] * bool(self.skipped) + [f"{self.errors} failed"] * bool(
            self.errors
        )
        parts += [duration(elapsed)]
        if (ended := self.done + self.errors) and self.logs:
            parts += [f"about {duration(elapsed / ended * len(self.logs))} left"]
        return ", ".join(parts)


class Lines(Progress):
    """Prints a line for each cell that ends, and for those under way now and then."""

    def __init__(self, write: Callable[[str], None] = print, period: float = 60.0) -> None:
        self.write, self.period = write, period

    @contextlib.contextmanager
    def display(self) -> Iterator[None]:
        """Print now and then."""
        over = threading.Event()

        def tell() -> None:
            while not over.wait(self.period):
                self.write(self.headline())
                for name, record in self.running():
                    self.write(f"  {name}: {brief(record)}")

        thread = threading.Thread(target=tell, daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()

    def finished(self, cell: Any, line: Mapping[str, Any]) -> None:
        """Print."""
        super().finished(cell, line)
        last = line["records"][-1] if line["records"] else None
        self.write(f"{self.headline()}: {self.names[cell.id]}: {brief(last)}, {duration(line['seconds'])}")

    def failed(self, cell: Any, error: str) -> None:
        """Print."""
        super().failed(cell, error)
        self.write(f"{self.headline()}: {self.names[cell.id]} failed: {error}")


class Screen(Progress):
    """Draws a bar, and below it the cells under way."""

    def __init__(self, console: Console) -> None:
        self.console = console

    def display(self) -> contextlib.AbstractContextManager[Any]:
        """Draw, twice a second."""
        return Live(console=self.console, refresh_per_second=2, get_renderable=self.picture)

    def failed(self, cell: Any, error: str) -> None:
        """Print it above the bar."""
        super().failed(cell, error)
        self.console.print(Text(f"{self.names[cell.id]} failed: {error}", style="red"))

    def picture(self) -> RenderableType:
        """Return what is drawn."""
        ended = self.total - len(self.logs)
        bar, rows = Table.grid(), Table.grid(padding=(0, 2))
        bar.add_row(ProgressBar(total=max(1, self.total), completed=ended, width=60))
        for name, record in self.running():
            rows.add_row("", name, brief(record))
        return Group(Text(self.headline()), bar, rows)


def labels(cells: Sequence[Any]) -> dict[str, str]:
    """Return a short name for each cell: its method, the fields that differ among the method's cells, and the seed."""
    found: dict[tuple[str, str], set[str]] = {}
    configs = {cell.id: {key: str(value) for key, value in store.fields(cell.config).items()} for cell in cells}
    for config in configs.values():
        for key, value in config.items():
            found.setdefault((config["method"], key), set()).add(value)

    def name(config: Mapping[str, str], seed: int) -> str:
        varied = (f"{key}={value}" for key, value in config.items() if len(found[config["method"], key]) > 1)
        return " ".join([config["method"], *varied, f"seed={seed}"])

    return {cell.id: name(configs[cell.id], cell.seed) for cell in cells}


def brief(record: Mapping[str, Any] | None) -> str:
    """Return the step of a record, and the first number that it holds, rather not a count.

    >>> brief({"step": 10, "epoch": 2, "path": [0.0, 1.0], "loss": 0.12345678, "error": 0.5})
    'step 10, loss 0.1235'
    """
    if record is None:
        return "starting"
    numbers = [(k, v) for k, v in record.items() if k != "step" and isinstance(v, (int, float))]
    numbers.sort(key=lambda item: isinstance(item[1], int))
    return ", ".join([f"step {record['step']}", *(f"{k} {v:.4g}" for k, v in numbers[:1])])


def duration(seconds: float) -> str:
    """Return a time for people.

    >>> duration(3.21), duration(75), duration(7270)
    ('3.2 s', '1:15', '2:01:10')
    """
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, s = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{s:02}" if hours else f"{minutes}:{s:02}"


def touched(log: Path) -> tuple[int, int] | None:
    """Return what changes when a worker begins with a cell."""
    try:
        about = log.stat()
    except FileNotFoundError:
        return None
    return about.st_mtime_ns, about.st_size


def last_record(log: Path) -> dict[str, Any] | None:
    """Return the newest record of a cell under way; None if there is none, or it is very long."""
    with contextlib.suppress(OSError, ValueError, IndexError), log.open("rb") as file:
        end = store.whole_lines(file)
        start = file.seek(max(0, end - 65536))
        return json.loads(file.read(end - start).splitlines()[-1])
    return None
