"""The benchmarks: `python benchmarks/bench.py [sections…] [--problem TEXT] [--quick] [--out DIR]`.

Sections: step-cost, roofline, iterations, memory, growth, solvers; all, unless some are named. Writes bench.json,
bench.md and bench.png. With --quick all is tiny: it takes a minute, shows that everything runs, and its numbers mean
nothing.
"""

from __future__ import annotations

import os

# Before anything that starts threads, or logs, is imported.
THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
os.environ |= dict.fromkeys(THREADS, "1") | {"KINETO_LOG_LEVEL": "6"}

import argparse  # noqa: E402
import dataclasses  # noqa: E402
import importlib  # noqa: E402
import importlib.metadata  # noqa: E402
import sys  # noqa: E402
import time  # noqa: E402
from collections.abc import Sequence  # noqa: E402
from pathlib import Path  # noqa: E402

import report  # noqa: E402
import torch  # noqa: E402
from measurement import Measurement  # noqa: E402
from peers import PACKAGES  # noqa: E402

from psgd.experiments import provenance  # noqa: E402

SECTIONS = ("step-cost", "roofline", "iterations", "memory", "growth", "solvers")
"""The modules, imported when they run."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Run sections, write the report, and say what failed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[2])
    parser.add_argument("sections", nargs="*", metavar="section", help=", ".join(SECTIONS))
    parser.add_argument("--quick", action="store_true", help="tiny sizes")
    parser.add_argument("--out", type=Path, default=Path("out/bench"), help="where to write (out/bench)")
    parser.add_argument("--problem", action="append", metavar="TEXT", help="of iterations: whose name contains it")
    asked = parser.parse_args(arguments)
    for name in asked.sections:
        if name not in SECTIONS:
            parser.error(f"a section is one of {', '.join(SECTIONS)}, got {name}")
    torch.set_num_threads(1)
    about = provenance.describe(quick=asked.quick, threads=torch.get_num_threads(), clock="CPU time of the process")
    about |= {"versions": {**about["versions"], **peer_versions()}, "sections": asked.sections or list(SECTIONS)}
    found: list[Measurement] = []
    for name in about["sections"]:
        start, section = time.monotonic(), importlib.import_module(name.replace("-", "_"))
        settings = section.QUICK if asked.quick else section.FULL
        if asked.problem and hasattr(settings, "problems"):
            wanted = tuple(p for p in settings.problems if any(text in p.name for text in asked.problem))
            settings = dataclasses.replace(settings, problems=wanted)
        found += section.run(settings)
        print(f"{name}: {time.monotonic() - start:.0f} s", file=sys.stderr, flush=True)
        about["finished"] = provenance.now()
        paths = report.write(asked.out, about, found)  # after each: a long run may be cut short
    failed = {f"{m.row}: {m.error}" for m in found if m.error}
    print(*sorted(failed), *paths, sep="\n")


def peer_versions() -> dict[str, str]:
    """Return the versions of the peers, numpy and scipy, or that they are absent."""
    found = {}
    for name in (*PACKAGES, "numpy", "scipy"):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "not installed"
    return found


if __name__ == "__main__":
    main()
