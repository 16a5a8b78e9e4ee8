"""What limits a fit: the traffic of memory, and the matrix products that it cannot do without, each alone.

lra(r) sweeps three times through U and V. A sweep that only read and wrote would cost half a copy for each of its
vectors; the products on the way are what torch's BLAS makes of them, chunk by chunk, as the fit calls them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from growth import copying
from measurement import Measurement
from peers import RANK
from timing import Task, contest
from torch import Tensor

from psgd.groups.uvd import Rows, pieces
from psgd.probes import generator


@dataclass(frozen=True)
class Settings:
    size: int = 10**7
    rounds: int = 20
    least: float = 2e-3
    budget: float = 60.0  # seconds


FULL = Settings()
QUICK = Settings(size=1000, rounds=2, least=0.0)

TABLE = "Roofline of psgd lra({}), n = {:.0e}"
TRAFFIC, PRODUCTS = "traffic of a fit", "products of a fit"


def run(settings: Settings) -> list[Measurement]:
    """Time the products, and add them up."""
    n, column = settings.size, "cost"
    table = TABLE.format(RANK, n).replace("e+0", "e")
    calls = products(n)
    tasks = {"copy": copying(n)} | {name: Task(call) for name, (_, call) in calls.items()}
    times = contest(tasks, rounds=settings.rounds, least=settings.least, budget=settings.budget)
    copy = times.pop("copy")
    found = [
        Measurement(
            table, f"{name}, {calls[name][0]} of it in a fit", column, t.over(copy), "copies", t.seconds, t.rounds
        )
        for name, t in times.items()
    ]
    total = sum(count * (times[name].over(copy) or 0.0) for name, (count, _) in calls.items())
    found.append(Measurement(table, PRODUCTS, column, total, "copies"))
    found.append(Measurement(table, TRAFFIC, column, vectors(RANK) / 2, "copies"))
    return found


def vectors(rank: int) -> int:
    """Return how many vectors of length n a fit reads or writes.

    Three sweeps read U, V, d, v and h; the last writes U or V and d's gradient, with which d is moved in a fourth.

    >>> vectors(10)
    83
    """
    return 3 * (2 * rank + 3) + (rank + 1) + 3


def products(n: int, rank: int = RANK) -> dict[str, tuple[int, Callable[[], None]]]:
    """Return what a fit multiplies, each with how often."""
    rng = generator(0)
    normal = lambda *shape: torch.randn(*shape, generator=rng)  # noqa: E731
    f, x, both = Rows(normal(rank, n), normal(rank, n), normal(n)), normal(n), normal(2, n)
    small, one, two, four = normal(rank, rank), normal(rank), normal(2, rank), normal(4, rank)
    vector, factor = torch.empty(n), torch.empty(rank, n)

    def sweep(body: Callable[[Rows, int, int], object]) -> Callable[[], None]:
        def call() -> None:
            for i, j in pieces(x):
                body(f.cut(i, j), i, j)

        return call

    def expand(c: Rows, i: int, j: int) -> Tensor:
        return torch.addmm(four @ c.u, four, c.v)

    return {
        "VᵀU": (2, sweep(lambda c, i, j: small.addmm_(c.v, c.u.mT, beta=0))),
        "Vᵀx": (3, sweep(lambda c, i, j: one.addmv_(c.v, x[i:j], beta=0))),
        "Vᵀ(x, y)": (1, sweep(lambda c, i, j: two.addmm_(both[:, i:j], c.v.mT, beta=0))),
        "x + Uy": (2, sweep(lambda c, i, j: torch.addmv(x[i:j], c.u.mT, one, out=vector[i:j]))),
        "U·4 columns + V·4 columns": (1, sweep(expand)),
        "U + xyᵀ + zwᵀ": (1, sweep(lambda c, i, j: torch.addmm(c.u, two.mT, both[:, i:j], out=factor[:, i:j]))),
    }
