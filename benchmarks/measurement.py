"""What a benchmark yields: numbers in named tables, or the reason why there is none."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Measurement:
    """One cell of a table."""

    table: str
    row: str
    column: str
    value: float | None
    """None if there is an error."""
    unit: str
    seconds: float | None = None
    """The least that was measured, where the value is a ratio of times."""
    rounds: int | None = None
    error: str | None = None
    families: tuple[str, ...] = ()
    """What may be compared with each other in this table, e.g. all that fit an X-matrix."""
    ours: bool = False


def failure(error: BaseException) -> str:
    """Say in one line what went wrong.

    >>> failure(ImportError("No module named 'heavyball'"))
    "ImportError: No module named 'heavyball'"
    """
    lines = [line for line in str(error).strip().splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0].strip()}"[:300] if lines else type(error).__name__
