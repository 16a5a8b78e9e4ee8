"""The outcome: one JSON, a page of Markdown, a picture."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from bars import rivalries, verdicts
from measurement import Measurement

Cells = dict[str, dict[str, Measurement]]


def write(out: Path, about: dict[str, Any], found: Sequence[Measurement]) -> list[Path]:
    """Write all three, and return where they are."""
    out.mkdir(parents=True, exist_ok=True)
    bars = [
        {**asdict(v.bar), "measured": None if v.measured is None else v.measured.value, "met": v.met}
        for v in verdicts(found)
    ]
    record = {"about": about, "bars": bars, "measurements": [asdict(m) for m in found]}
    paths = [out / f"bench.{kind}" for kind in ("json", "md", "png")]
    paths[0].write_text(json.dumps(record, indent=1, ensure_ascii=False) + "\n")
    paths[1].write_text(markdown(about, found))
    picture(paths[2], found)
    return paths


def tables(found: Sequence[Measurement]) -> dict[str, Cells]:
    """Return the cells by table, row and column, in the order in which they came."""
    pages: dict[str, Cells] = {}
    for m in found:
        pages.setdefault(m.table, {}).setdefault(m.row, {})[m.column] = m
    return pages


def columns(cells: Cells) -> list[str]:
    """Return the columns of a table, in the order in which they came in the fullest row."""
    longest = sorted(cells.values(), key=len, reverse=True)
    return list(dict.fromkeys(column for row in longest for column in row))


# --- Markdown


def markdown(about: dict[str, Any], found: Sequence[Measurement]) -> str:
    """Return the page."""
    kept = ("command", "started", "finished", "commit", "dirty", "processor", "cpus", "threads", "system", "clock")
    lines = [
        "# Benchmarks",
        "",
        "All that is in a table took turns in one process on one thread; the least time of each counts; numbers are"
        " ratios where no unit says otherwise. Smaller is better.",
        "",
        *(f"- {key}: {about.get(key)}" for key in kept),
        "- versions: " + ", ".join(f"{name} {version}" for name, version in about.get("versions", {}).items()),
        "",
    ]
    if about.get("quick"):
        lines += ["**A quick run at tiny sizes: it shows that the harness works, and its numbers mean nothing.**", ""]
    lines += [*bar_lines(found), *rival_lines(found)]
    for name, cells in tables(found).items():
        heads = columns(cells)
        unit = next(m.unit for row in cells.values() for m in row.values())
        lines += [f"## {name}", "", f"In {unit}.", "", *grid(["", *heads])]
        lines += [line([row, *(cell(found.get(head)) for head in heads)]) for row, found in cells.items()]
        lines += [""]
    return "\n".join([*lines, *failure_lines(found)])


def bar_lines(found: Sequence[Measurement]) -> list[str]:
    lines = ["## The bars", "", *grid(["where", "what", "before", "memory floor", "at most", "measured", "met"])]
    for v in verdicts(found):
        measured = "not run" if v.measured is None else cell(v.measured)
        met = {True: "yes", False: "**no**", None: "–"}[v.met]
        bar = v.bar
        lines.append(
            line([bar.table, f"{bar.row}: {bar.column}", bar.reference, bar.floor, f"{bar.at_most:g}", measured, met])
        )
    return [*lines, ""]


def rival_lines(found: Sequence[Measurement]) -> list[str]:
    pairs = rivalries(found)
    if not pairs:
        return []
    lines = [
        "## Against the peers",
        "",
        "The best of ours that fits the same, eager or compiled, by any source of Hessian products. Above 1, ours is"
        " better. All have their own default options; those of psgd-torch keep no average of gradients and bound no"
        " step, and are held against ours that do neither (bare).",
        "",
        *grid(["where", "peer", "ours", "peer / ours", "ahead"]),
    ]
    for pair in sorted(pairs, key=lambda p: p.ratio):
        where = f"{pair.peer.table}: {pair.peer.column}"
        ahead = "equal" if abs(pair.ratio - 1) < 0.005 else "yes" if pair.ratio > 1 else "**no**"
        lines.append(line([where, pair.peer.row, pair.ours.row, number(pair.ratio), ahead]))
    return [*lines, ""]


def failure_lines(found: Sequence[Measurement]) -> list[str]:
    reasons: dict[tuple[str, str], list[str]] = {}
    for m in found:
        if m.error:
            reasons.setdefault((m.row, m.error), []).append(f"{m.table}: {m.column}")
    lines = ["## What has no number, and why", ""]
    lines += [f"- {row}: {error} ({'; '.join(where)})" for (row, error), where in reasons.items()] or ["Nothing."]
    return [*lines, ""]


def grid(heads: Sequence[str]) -> list[str]:
    return [line(heads), "|" + "---|" * len(heads)]


def line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(text.replace("|", "\\|") for text in cells) + " |"


def cell(m: Measurement | None) -> str:
    if m is None:
        return ""
    if m.value is None:
        return "–" if (m.error or "").startswith("not measured") else "failed"
    return number(m.value)


def number(x: float) -> str:
    """Write three digits.

    >>> number(1234.5), number(1.23456), number(0.0)
    ('1,234', '1.23', '0')
    """
    return f"{x:,.0f}" if abs(x) >= 1000 else f"{x:.3g}"


# --- the picture


def picture(path: Path, found: Sequence[Measurement]) -> None:
    """Draw each table: lines where its columns are numbers that grow, else a dot for each cell."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    pages = {
        name: cells for name, cells in tables(found).items() if any(m.value for r in cells.values() for m in r.values())
    }
    if not pages:
        return
    heights = [1.2 + 0.17 * max(12, len(cells)) for cells in pages.values()]
    figure, axes = plt.subplots(
        len(pages), 1, figsize=(11, sum(heights)), height_ratios=heights, squeeze=False, layout="constrained"
    )
    for axis, (name, cells) in zip(axes[:, 0], pages.items(), strict=True):
        draw: Callable[[Any, Cells], None] = lines_of if name.startswith(("Growth", "Linear")) else dots_of
        draw(axis, cells)
        axis.set_title(name, fontsize=9, loc="left")
        axis.tick_params(which="both", labelsize=6)
        axis.grid(alpha=0.3)
        axis.legend(fontsize=6, loc="center left", bbox_to_anchor=(1, 0.5))
    figure.savefig(path, dpi=110)
    plt.close(figure)


def dots_of(axis: Any, cells: Cells) -> None:
    rows = list(cells)[::-1]
    for column in columns(cells):
        points = [(m.value, i) for i, row in enumerate(rows) if (m := cells[row].get(column)) and m.value]
        if points:
            axis.plot(*zip(*points, strict=True), "o", markersize=4, label=column)
    axis.set_yticks(range(len(rows)), rows)
    for tick, row in zip(axis.get_yticklabels(), rows, strict=True):
        tick.set_fontweight("bold" if row.startswith("psgd ") else "normal")
    axis.set_xscale("log")
    axis.set_xlabel(next(m.unit for row in cells.values() for m in row.values()), fontsize=7)


def lines_of(axis: Any, cells: Cells) -> None:
    for i, (name, row) in enumerate(cells.items()):
        points = [(leading(column), m.value) for column, m in row.items() if m.value]
        style = ".-" if name.startswith("psgd ") else ".:"
        if points:
            axis.plot(*zip(*points, strict=True), style, color=f"C{i % 10}", linewidth=1.2, label=name)
    axis.set_xscale("symlog" if any(leading(c) == 0 for c in columns(cells)) else "log")
    axis.set_yscale("log")
    axis.set_ylabel(next(m.unit for row in cells.values() for m in row.values()), fontsize=7)


def leading(column: str) -> float:
    """Return the number in a column's name.

    >>> leading("n = 1e4"), leading("10 of 250×400")
    (10000.0, 10.0)
    """
    found = re.search(r"\d+(\.\d+)?(e\d+)?", column)
    return float(found.group()) if found else 0.0
