"""Pieces of HTML. What comes from data goes through `escape`, or through a reader of Markdown that lets none pass."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from markdown_it import MarkdownIt

from psgd.experiments.report.interactive import Entry
from psgd.experiments.report.looks import REFERENCE, number, spread
from psgd.experiments.show import Line, Spread, Table


def markdown(text: str, *, level: int = 3) -> str:
    """Return Markdown as HTML: no HTML in it, no pictures, and headings below `level`.

    >>> print(markdown("# A *b* <i>"))
    <h4>A <em>b</em> &lt;i&gt;</h4>
    """
    reader = MarkdownIt("commonmark", {"html": False}).enable("table").disable(["image", "html_block", "html_inline"])
    tokens = reader.parse(text)
    for token in tokens:
        if token.type.startswith("heading"):
            token.tag = f"h{min(6, level + int(token.tag[1]))}"
    return str(reader.renderer.render(tokens, reader.options, {}))


def table(shown: Table, *, heading: str = "h4", id_: str = "") -> str:
    """Return a table that scrolls inside itself where the screen is narrow; numbers stand at the right.

    >>> '<td class="number">0.5</td>' in table(Table("T", ["a", "b"], [["x", 0.5]]))
    True
    """
    right = [numeric([row[i] for row in shown.rows if i < len(row)]) for i in range(len(shown.columns))]
    paper = ["paper" in column.lower() for column in shown.columns]
    classes = [" ".join(["number"] * r + ["paper"] * p) for r, p in zip(right, paper, strict=True)]
    attributes = [f' class="{c}"' if c else "" for c in classes]
    head = "".join(f'<th scope="col"{a}>{escape(c)}</th>' for c, a in zip(shown.columns, attributes, strict=True))
    body = "\n".join(
        "<tr>" + "".join(f"<td{a}>{cell(v)}</td>" for v, a in zip(row, attributes, strict=False)) + "</tr>"
        for row in shown.rows
    )
    note = f'<p class="note">{escape(shown.note)}</p>' if shown.note else ""
    title = f"<{heading}{attribute('id', id_)}>{escape(shown.title)}</{heading}>"
    if not shown.rows:
        return f'{title}\n<p class="missing">No rows yet.</p>\n{note}'
    grid = f"<table><thead><tr>{head}</tr></thead>\n<tbody>\n{body}\n</tbody></table>"
    return f'{title}\n<div class="wide" tabindex="0">{grid}</div>\n{note}'


def cell(value: Any) -> str:
    """Return an entry of a table.

    >>> cell(Spread(0.81, 0.02, 5))
    '0.810 <span class="spread">± 0.020 (5)</span>'
    """
    if isinstance(value, Spread):
        if value.count == 1:
            return number(value.mean)
        mean, deviation = spread(value.mean, value.deviation)
        return f'{mean} <span class="spread">± {deviation} ({value.count})</span>'
    if isinstance(value, bool):
        return "yes" if value else "no"
    return number(value) if value is None or isinstance(value, (int, float)) else escape(str(value))


def numeric(values: Sequence[Any]) -> bool:
    """Return whether a column is of numbers; text may be one, too: "2.37 ± 0.08", "≈ 1.2×", "–"."""
    there = [v for v in values if v is not None]
    return bool(there) and all(
        isinstance(v, (int, float, Spread)) or re.match(r"\s*[≈<>≤≥~±+−-]?\s*\.?\d|\s*[–-]?\s*$", str(v)) for v in there
    )


def legend(entries: Sequence[Entry]) -> str:
    """Return the names in a plot, as buttons that show and hide."""
    if not entries:
        return ""
    buttons = "\n".join(
        f'<button type="button" aria-pressed="true"{attribute("data-parts", " ".join(entry.parts))}>'
        f"{swatch(entry)}{escape(entry.name)}</button>"
        for entry in entries
    )
    return f'<div class="legend" role="group" aria-label="Show or hide">\n{buttons}\n</div>'


def swatch(entry: Entry) -> str:
    """Return a small picture of a look."""
    colour = attribute("stroke", entry.look.colour) + attribute("fill", entry.look.colour)
    if isinstance(entry.mark, Line):
        dash = REFERENCE if entry.mark.dashed else entry.look.dash
        inside = (
            f'<path d="M1 6H27" stroke-width="3"{colour}{attribute("stroke-dasharray", " ".join(map(str, dash)))}/>'
        )
    else:
        shapes = {
            "circle": '<circle cx="14" cy="6" r="4.5"',
            "square": '<rect x="10" y="2" width="8" height="8"',
            "triangle": '<path d="M14 1L19 10H9Z"',
            "diamond": '<path d="M14 0.5L19 6L14 11.5L9 6Z"',
        }
        inside = f'{shapes[entry.look.marker]}{colour} fill-opacity="0.6"/>'
    return f'<svg width="28" height="12" aria-hidden="true">{inside}</svg>'


def listing(values: Mapping[str, Any]) -> str:
    """Return names and values; values may be nested."""
    return "<dl>" + "".join(f"<dt>{escape(str(k))}</dt><dd>{detail(v)}</dd>" for k, v in values.items()) + "</dl>"


def detail(value: Any) -> str:
    """Return a value of provenance.

    >>> detail({"torch": "2.13"}), detail([1, 2]), detail(None)
    ('<dl><dt>torch</dt><dd>2.13</dd></dl>', '1, 2', '–')
    """
    if isinstance(value, Mapping):
        return listing(value) if value else "–"
    if isinstance(value, (list, tuple)):
        inside = [detail(v) for v in value]
        return "".join(inside) if any(isinstance(v, Mapping) for v in value) else ", ".join(inside) or "–"
    if value is None or value == "":
        return "–"
    return str(value) if isinstance(value, float) and math.isfinite(value) else cell(value)


def attribute(name: str, value: str) -> str:
    """Return an attribute with a space before it; nothing, if it is empty."""
    return f' {name}="{escape(value)}"' if value else ""


def data(value: Any) -> str:
    """Return JSON that can stand in a page: nothing in it ends the element."""
    return json.dumps(value, separators=(",", ":")).replace("<", "\\u003c")
