"""Where a number comes from: the command, the code, the machine and the time."""

from __future__ import annotations

import datetime
import functools
import importlib.metadata
import os
import platform
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import psgd
from psgd.experiments.steppers import WITHOUT_DEPENDENCIES


def describe(**asked: Any) -> dict[str, Any]:
    """Return what can be known when a run starts, beside what was asked for.

    >>> describe(preset="quick")["preset"]
    'quick'
    """
    about = {"command": command(), "started": now(), "finished": None, "python": sys.executable, "cpus": cpus()}
    return {**asked, **about, **here(), "versions": versions()}


@functools.cache
def here() -> dict[str, Any]:
    """Return what goes with every cell: the machine and the code."""
    return {"machine": platform.node(), "system": platform.platform(), "processor": processor(), **commit()}


def command() -> str:
    """Return the command line, as a person would type it."""
    program, *arguments = sys.argv
    quoted = [a if re.fullmatch(r"[\w@%+=:,./-]+", a) else "'" + a.replace("'", "'\\''") + "'" for a in arguments]
    return " ".join(["psgd" if Path(program).name == "cli.py" else Path(program).name, *quoted])


def now() -> str:
    """Return the time, in UTC.

    >>> now()
    '...T...+00:00'
    """
    return datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")


def cpus() -> int:
    """Return the number of processors that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def processor() -> str:
    """Return the processor's name, where the system tells."""
    try:
        names = re.findall(r"^model name\s*: (.*)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    except OSError:
        names = []
    return names[0] if names else platform.processor() or platform.machine()


@functools.cache
def versions() -> dict[str, str]:
    """Return the versions of Python, of this package, and of all that its experiments may use and is installed.

    >>> sorted(set(versions()) & {"psgd", "python", "torch"})
    ['psgd', 'python', 'torch']
    """
    found = {"python": platform.python_version(), "psgd": psgd.__version__}
    others = re.compile(r"extra == ['\"](dev|docs|frameworks)['\"]")
    required = [r for r in importlib.metadata.requires("psgd") or [] if not others.search(r)]
    for name in (*(re.split(r"[^\w.-]", r)[0] for r in required), *WITHOUT_DEPENDENCIES):
        if name == "psgd":
            continue
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def commit(package: Path = Path(psgd.__file__).parent) -> dict[str, Any]:
    """Return the commit of a package's source, and whether it was changed since; None where git does not know."""

    def git(*arguments: str) -> str:
        return subprocess.run(
            ["git", "-C", str(package), *arguments], capture_output=True, text=True, check=True, timeout=60
        ).stdout.strip()

    try:
        git("ls-files", "--error-unmatch", "__init__.py")  # or it is an installed copy, in somebody else's repository
        return {"commit": git("rev-parse", "HEAD"), "dirty": bool(git("status", "--porcelain", "--", str(package)))}
    except (OSError, subprocess.SubprocessError):
        return {"commit": None, "dirty": None}
