"""Write docs/speed.md from results/bench: `./run python docs/make_speed_page.py`.

`./run bench --out results/bench/all` makes what it is written from, or one folder for some of the sections each. Of a
table that several runs have made, the newest counts.
"""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.append(str(ROOT / "benchmarks"))

import report  # noqa: E402
import roofline  # noqa: E402
from bars import SIZE, Verdict, rivalries, verdicts  # noqa: E402
from iterations import columns, title  # noqa: E402
from measurement import Measurement  # noqa: E402
from peers import GRADIENT, INSIDE, RANK  # noqa: E402
from workloads import GPT_  # noqa: E402

import psgd  # noqa: E402

BENCH = ROOT / "results" / "bench"

HEAD = """# Speed

<!-- Written by docs/make_speed_page.py: edit that, then `./run python docs/make_speed_page.py`. -->

`./run bench` measures what a step costs: ours and the peers take turns in one process, on one thread, and the least
time of each counts. A step alone is told in copies of n float32, the least that moves n numbers at all; an iteration,
gradient included, in iterations of plain SGD. All tables, with what failed, of which the newest of each counts here:

{runs}

## The bars

Where Hessian products are asked for, p = 0.1 means one in every tenth iteration. A bar stands for each source of
curvature: exact products, differences of gradients, and whitening, which needs no second derivative.

"""

LIMITS = """
## What limits the others

"""

PEERS = """
## Against the peers

In {ahead} of {total} cells that both have, the best of ours that fits the same is ahead of the peer (psgd-torch,
HeavyBall, kron-torch, and pytorch_optimizer's Kron and SOAP), and equal in {equal}. Those of psgd-torch keep no average
of gradients and bound no step; ours that do neither (bare) are held against them, though all of ours look whether
gradients are finite before anything moves. Behind a peer is ours here:

"""


AROUND = """
Ours are torch.optim.Optimizers, as SGD is; psgd-torch's are not, and do without what torch puts around each step for
its hooks and its profiler. By itself that takes, of an iteration: {said}.
"""


def page() -> str:
    """Return the page."""
    records = {path.parent.name: json.loads(path.read_bytes()) for path in sorted(BENCH.glob("*/bench.json"))}
    tables: dict[str, list[Measurement]] = {}
    for record in sorted(records.values(), key=lambda r: str(r["about"]["started"])):
        made_here = [Measurement(**m | {"families": tuple(m["families"])}) for m in record["measurements"]]
        tables |= {
            name: [m for m in made_here if m.table == name] for name in dict.fromkeys(m.table for m in made_here)
        }
    found = [m for table in tables.values() for m in table]
    judged = [v for v in verdicts(found) if v.met is not None]
    head = HEAD.format(runs="\n".join(made(folder, record["about"]) for folder, record in records.items()))
    missed = [v for v in judged if not v.met]
    return head + bars(judged) + LIMITS + "".join(f"- {why(v, found)}\n" for v in missed) + peers(found)


def made(folder: str, about: dict[str, Any]) -> str:
    """Say where and when a run was made."""
    where = f"../results/bench/{folder}/bench"
    return (
        f"- [{', '.join(about['sections'])}]({where}.md) ([picture]({where}.png), [numbers]({where}.json)): commit "
        f"{about['commit'][:7]}, torch {about['versions']['torch']}, {about['cpus']} cores of {about['processor']}, "
        f"{about['started'][:10]}" + (f"; {about['note']}" if "note" in about else "")
    )


def bars(judged: list[Verdict]) -> str:
    """Return them as a table."""
    lines = report.grid(["where", "what", "before", "memory floor", "at most", "measured", "met"])
    for v in judged:
        bar, met = v.bar, "yes" if v.met else "**no**"
        measured = report.cell(v.measured)
        lines.append(
            report.line(
                [bar.table, f"{bar.row}: {bar.column}", bar.reference, bar.floor, f"{bar.at_most:g}", measured, met]
            )
        )
    return "\n".join(lines) + "\n"


def why(v: Verdict, found: list[Measurement]) -> str:
    """Say what is below a number that is too high: what torch's own calls take, without any of ours."""
    assert v.measured is not None and v.measured.value is not None
    value, cells = v.measured.value, {(m.table, m.row, m.column): m.value for m in found}
    said = f"{v.bar.table}, {v.bar.row}, {v.bar.column}: {report.number(value)}, at most {v.bar.at_most:g}. "
    if v.bar.table == SIZE and "lra" not in v.bar.row:
        return said + f"Its traffic would take {v.bar.floor}."
    if v.bar.table == SIZE:
        table = next(m.table for m in found if m.row == roofline.PRODUCTS)
        narrow = [m.value or 0 for m in found if m.table == table and m.row.startswith(("Vᵀx", "x + Uy"))]
        if v.bar.column == "precondition":
            return said + (
                f"Its matrix products alone, two by rows and two by columns, take {report.number(2 * sum(narrow))}."
            )
        products, traffic = (cells[table, row, "cost"] for row in (roofline.PRODUCTS, roofline.TRAFFIC))
        gram = next(m.value for m in found if m.table == table and m.row.startswith("VᵀU"))
        return said + (
            f"Its matrix products alone take {report.number(products or 0)} copies, of which the two r×r Gram matrices "
            f"take {report.number(2 * (gram or 0))}: too narrow for the BLAS to be fast; its traffic would take "
            f"{report.number(traffic or 0)}."
        )
    if "kron," in v.bar.row and v.bar.table == title(GPT_):
        ours, theirs = operations()
        said += (
            f"P m, by two matrices for each tensor, takes {ours / 1e9:.2f} billion operations in every iteration, the "
            f"gradient about {theirs / 1e9:.1f} (six for each weight and character): {ours / theirs:.0%} more at equal "
            f"speed, with so small a batch. "
        )
    if "lra" in v.bar.row and v.bar.table == title(GPT_):
        said += reads(v.bar.table, cells)
    source = next((s for s in ("hessian", "finite difference") if s in v.bar.row), None)
    floor = cells.get((v.bar.table, f"floor: the pair alone, {source}", v.bar.column))
    other = cells.get((v.bar.table, f"floor: the pair alone, {source}, forward over reverse", v.bar.column))
    if floor is not None:
        reach = "above the bar by itself" if floor > v.bar.at_most else "below the bar"
        return said + (
            f"Plain SGD that takes such a pair and does nothing with it is at {report.number(floor)}, {reach}; "
            f"the optimizer's own part is {report.number(value - floor)}."
            + (f" Forward over reverse such a pair is at {report.number(other)}." if other is not None else "")
        )
    plain = cells.get((v.bar.table, "torch AdamW, fused", v.bar.column))
    beside = "" if plain is None else f" torch's fused AdamW is at {report.number(plain)}."
    return said + f"There is no pair to take: this is the optimizer's own part.{beside}"


def reads(table: str, cells: dict[tuple[str, str, str], Any]) -> str:
    """Say what P m by `lra` has to read."""
    n, always = sum(p.numel() for p in GPT_.network().parameters()), columns(10)[1]
    update = (cells[table, f"psgd lra({RANK}), whitening", always] or 0) - 1
    return (
        f"P m reads V, U, and V again, {3 * 4 * RANK * n / 1e6:.0f} MB: as much as {3 * RANK / 2:.0f} copies of the "
        f"parameters, however fast the products are. An update is {report.number(update)} iterations by itself. "
    )


def operations() -> tuple[int, int]:
    """Return those of P m for the GPT by `kron()`, and about those of its gradient."""
    network, (inputs, _) = GPT_.network(), GPT_.batch()
    shapes = [tuple(p.shape) for p in network.parameters()]
    rule = psgd.kron()
    ours = sum(2 * math.prod(shape) * sum(shape[i] for i in rule.dense(shape)) for shape in shapes)
    return ours, 6 * inputs.numel() * sum(math.prod(shape) for shape in shapes)


def peers(found: list[Measurement]) -> str:
    """Say where we are behind."""
    pairs = sorted(rivalries(found), key=lambda pair: pair.ratio)
    behind = [pair for pair in pairs if pair.ratio < 0.995]
    equal = sum(0.995 <= pair.ratio <= 1.005 for pair in pairs)
    text = PEERS.format(ahead=len(pairs) - len(behind) - equal, total=len(pairs), equal=equal)
    lines = report.grid(["where", "peer", "ours", "peer / ours"])
    for pair in behind:
        where = f"{pair.peer.table}: {pair.peer.column}"
        lines.append(report.line([where, pair.peer.row, pair.ours.row, report.number(pair.ratio)]))
    return text + ("\n".join(lines) if behind else "Nowhere.") + "\n" + around(found)


def around(found: list[Measurement]) -> str:
    """Say what torch puts around a step, where that was measured."""
    cells = {(m.table, m.row): m.value for m in found if m.row in (GRADIENT, INSIDE) and m.value is not None}
    said = [
        f"{cells[table, INSIDE] - cells[table, row]:.1%} of SGD's in {table.removeprefix('Iteration, ')}"
        for table, row in cells
        if row == GRADIENT and (table, INSIDE) in cells
    ]
    return AROUND.format(said="; ".join(said)) if said else ""


if __name__ == "__main__":
    Path(__file__).with_name("speed.md").write_text(page(), encoding="utf-8")
