"""Delayed demonstration: every number of this experiment is made up, to see what a *report* looks like.

It has all marks, many names, values that a log axis cannot show, and text that tries to be `<b>HTML</b>`.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from psgd.experiments import store
from psgd.experiments.experiment import Preset, Record, Result, State
from psgd.experiments.show import Contours, HeatMap, Line, Plot, Points, Table, band, spread

TITLE = "Demonstration <i>with made-up numbers</i>"
EVIL = "<script>document.title='broken'</script>"
METHODS = ("sgd", "momentum", "adam", "psgd-diagonal", "psgd-xmat", "psgd-lra", "psgd-kron")


@dataclass(frozen=True)
class Config:
    method: str = "sgd"
    lr: float = 0.1
    rank: int = 10
    epochs: int = 30
    clip: float = math.inf


def cells(preset: Preset) -> list[Config]:
    return [Config(method, lr=0.1 / (i + 1)) for i, method in enumerate(METHODS)]


def seeds(preset: Preset) -> range:
    return range(3)


def run(config: Config, seed: int, state: State | None = None) -> Iterator[Record]:
    yield from ()


def made_up(config: Config, seed: int) -> list[dict[str, Any]]:
    chance = random.Random(f"{config.method} {seed}")
    speed = 0.05 + 0.04 * METHODS.index(config.method)
    noise = lambda: math.exp(0.12 * chance.gauss(0, 1))  # noqa: E731
    return [
        {
            "step": epoch,
            "loss": 2.3 * math.exp(-speed * epoch) * noise() + 1e-4 * noise(),
            "error": (0.7 + 9 * math.exp(-speed * epoch)) * noise(),
            "gradients": 938 * (epoch + 1),
            "products": 94 * (epoch + 1) if config.method.startswith("psgd") else 0,
        }
        for epoch in range(config.epochs)
    ]


def of(results: Sequence[Result], method: str) -> list[Result]:
    return [r for r in results if r.config.method == method]


def tables(results: Sequence[Result]) -> list[Table]:
    rows = [
        [m, spread([r.last("error") for r in of(results, m)]), paper, of(results, m)[0].config.lr, reached]
        for m, paper, reached in zip(
            METHODS,
            ("0.96", "0.96 ± 0.05", None, "0.78", 0.78, "≈ 0.78", "0.74"),
            (1.5e-7, 0.0, None, True, False, math.nan, 12),
            strict=True,
        )
        if of(results, m)
    ]
    columns = ["method", "test error, %", "paper, %", "learning rate", "reached"]
    wide = [[f"row {i}", *(round(i * j * 0.37, 3) for j in range(12))] for i in range(4)]
    return [
        Table("Test error, ours and the paper's", columns, rows, f"Mean ± deviation over seeds. {EVIL}"),
        Table("A wide table", ["name", *(f"column {j}" for j in range(12))], wide),
        Table("A table without rows", ["a", "b"], []),
    ]


def plots(results: Sequence[Result]) -> list[Plot]:
    lines = [
        band(m, [(r.series("step"), r.series("loss")) for r in of(results, m)], log=True)
        for m in METHODS
        if of(results, m)
    ]
    floor = Line("the paper's SGD", [0, 29], [0.05, 0.05], dashed=True)
    error = [
        band(m, [(r.series("step"), r.series("error")) for r in of(results, m)])
        for m in ("psgd-lra", "sgd")
        if of(results, m)
    ]
    curves = [
        Plot(
            "Training loss", "epoch", "cross entropy", [*lines, floor], y_log=True, note="Bands: the range over seeds."
        ),
        Plot("Test error", "epoch", "test error, %", error),
    ]
    return curves + all_sorts() if of(results, "adam") and of(results, "psgd-lra") else curves


def all_sorts() -> list[Plot]:
    evil = [Line(f"one {EVIL}", [1.0], [2.0]), Points("$two$", [1.5], [2.5])]
    return [
        many(),
        rosenbrock(),
        condition(),
        Plot("Flat minima", "training loss × 60,000", "−log det P", pairs(), note="Points of seven runs."),
        Plot("By rank", "rank", "test error, %", [Line("psgd-lra", [0, 1, 2, 5, 10], [0.82, 0.81, 0.795, 0.78, 0.78])]),
        Plot("A plot of nothing", "x", "y", [Line("sgd", [], []), Line("adam", [1.0], [None])]),
        Plot(f"A single point {EVIL}", "x $y$ $$z$$", "y", evil),
    ]  # fmt: skip


def many() -> Plot:
    steps = range(2000)
    lines = [
        Line(f"optimizer {i}", steps, [math.exp(-(i + 1) * t / 3000) * (1.2 + math.sin(t / 40 + i)) for t in steps])
        for i in range(30)
    ]
    quadratic = Line("psgd-lra", steps, [math.exp(-((t / 250) ** 2)) if t < 1900 else 0.0 for t in steps])
    return Plot("Many optimizers", "iteration", "loss", [*lines, quadratic], x_log=True, y_log=True)


def rosenbrock() -> Plot:
    x, y = ([low + (high - low) * i / 80 for i in range(81)] for low, high in ((-2.2, 1.6), (-0.6, 2.6)))
    values = [[(1 - u) ** 2 + 100 * (v - u * u) ** 2 for u in x] for v in y]
    levels = [10 ** (k / 2) for k in range(-2, 8)]
    newton = [(-2 + 3 * t, (-2 + 3 * t) ** 2 * (0.5 + 0.5 * t)) for t in (i / 14 for i in range(15))]
    slow = [(-2 + 2.1 * t, (-2 + 2.1 * t) ** 2 * (0.55 + 0.1 * math.sin(9 * t))) for t in (i / 60 for i in range(61))]
    return Plot(
        "Rosenbrock", "u", "v",
        [
            Contours(x, y, values, levels),
            Line("sgd", *zip(*slow, strict=True)), Line("psgd-lra", *zip(*newton, strict=True)),
            Points("minimum", [1], [1]),
        ],
    )  # fmt: skip


def condition() -> Plot:
    groups = (
        "diagonal",
        "xmat",
        "butterfly",
        "block",
        "band",
        "lra(10)",
        "circulant",
        "dct",
        "kron",
        "triangular",
        "dense",
    )
    hessians = ("band", "circulant", "DCT-sparse", "block", "low rank + diagonal", "random")
    chance = random.Random(0)
    values = [[10 ** chance.uniform(0, 6) for _ in groups] for _ in hessians]
    values[2][3], values[4][5] = math.nan, 1.0
    return Plot(
        "Condition of PH", "group", "Hessian", [HeatMap(groups, hessians, values, log=True)], note="Lower is better."
    )


def pairs() -> list[Points]:
    chance = random.Random(1)
    draw = lambda a, b: [chance.gauss(a, b) for _ in range(7)]  # noqa: E731
    return [Points("adam", draw(60, 8), draw(-30, 3)), Points("psgd-lra", draw(25, 5), draw(-48, 3))]


def remarks(results: Sequence[Result]) -> str:
    return f"""All numbers here are **made up**; {len(results)} runs were invented.

- `psgd-lra` *agrees* with the paper within its deviation.
- `adam` does not; see [a link](https://example.com), and not [this](javascript:alert(1)) {EVIL}

| a | b |
|---|---|
| 1 | 2 |

![picture](https://example.com/picture.png)
"""


def leave(directory: Path, methods: Sequence[str] = METHODS, *, finished: bool = True, failed: bool = False) -> Path:
    """Leave on disk what a run would."""
    directory.mkdir(parents=True)
    about = {
        "experiment": "experiments.demo", "preset": "cpu", "seeds": "", "only": [], "settings": {"lr": EVIL},
        "command": "psgd run demo --preset cpu", "started": "2024-02-03T04:05:06+00:00",
        "finished": "2024-02-03T05:05:06+00:00" if finished else None, "cpus": 2, "machine": "nowhere",
        "commit": "0123456789abcdef0123456789abcdef01234567", "dirty": False,
        "versions": {"python": "3.11.2", "psgd": "0.1.0", "torch": "2.13.0"}, "earlier": [],
    }  # fmt: skip
    store.write_json(directory / store.PROVENANCE, about)
    for order, config in enumerate(cells("cpu")):
        for seed in seeds("cpu") if config.method in methods else ():
            line = {
                "cell": order, "seed": seed, "config": store.fields(config), "records": made_up(config, seed),
                "seconds": 100.0 + 7 * seed + 20 * order, "cpu_seconds": 90.0,
            }  # fmt: skip
            store.append_line(directory / store.CELLS, line)
    if failed:
        (directory / store.FAILED).mkdir()
        failure = {"config": store.fields(Config("adam")), "seed": 2, "error": f"RuntimeError: {EVIL}", "traceback": ""}
        store.write_json(directory / store.FAILED / "0.json", failure)
    return directory
