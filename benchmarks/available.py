"""How much memory there is."""

from __future__ import annotations

import os
from pathlib import Path

RESERVE = 2 * 2**30
"""Bytes that are left alone."""


def available() -> int:
    """Return the bytes that a process can take without swapping."""
    try:
        lines = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
        return int(lines["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError):
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def require(size: float) -> None:
    """Raise a MemoryError unless so many bytes can be taken, and some are left."""
    free = available()
    if size + RESERVE > free:
        raise MemoryError(
            f"needs {size / 2**30:.1f} GiB and {RESERVE / 2**30:.0f} to spare, of {free / 2**30:.1f} free"
        )
