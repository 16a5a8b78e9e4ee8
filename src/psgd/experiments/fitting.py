"""What the experiments on fitting share: errors at the end, and over steps."""

from __future__ import annotations

from collections.abc import Sequence

from psgd.experiments.experiment import Result
from psgd.experiments.show import Spread, spread


def ends(results: Sequence[Result]) -> Spread | None:
    """Return the last error over seeds; None if it is a number for none of them.

    >>> str(ends([Result(None, seed, [{"step": 1, "error": 2.0}]) for seed in range(3)]))
    '2 ± 0 (3)'
    """
    return spread([r.records[-1]["error"] for r in results if r.records])


def points(result: Result) -> tuple[list[float], list[float]]:
    """Return the errors over steps, where they are numbers.

    >>> points(Result(None, 0, [{"step": 1, "error": 2.0}, {"step": 2, "error": None}]))
    ([1], [2.0])
    """
    known = [(r["step"], r["error"]) for r in result.records if r["error"] is not None]
    return [step for step, _ in known], [e for _, e in known]
