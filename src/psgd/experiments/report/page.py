"""The page: for each run its remarks, tables, plots, costs, settings and provenance."""

from __future__ import annotations

import base64
import hashlib
import logging
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from html import escape
from importlib import resources
from pathlib import Path
from typing import TypeVar

from psgd.experiments import experiment, store
from psgd.experiments.report import figures, fragments, interactive
from psgd.experiments.report.costs import costs, settings
from psgd.experiments.report.looks import Look, drawable, looks
from psgd.experiments.show import HeatMap, Plot, Table

T = TypeVar("T")
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Chapter:
    """A run, and what its experiment makes of it."""

    id: str
    title: str
    about: str
    run: store.Run
    tables: Sequence[Table]
    plots: Sequence[Plot]
    remarks: str
    troubles: list[str] = field(default_factory=list)
    """What could not be shown, and why; and what is shown as one, but is not."""
    processors: Sequence[str] = ()
    """Those that the cells ran on."""


def write(directories: Sequence[str | Path], out: str | Path | None = None) -> Path:
    """Write one page for runs, with the pictures as files in `plots` beside it, and return its path.

    Args:
        directories: Of the runs.
        out: The page; `report.html` in the first directory, if not given.
    """
    if not directories:
        raise ValueError("a report needs at least one run, got none")
    path = Path(out) if out is not None else Path(directories[0]) / "report.html"
    made = [replace(chapter(store.load(d), f"run-{i}"), processors=processors(d)) for i, d in enumerate(directories, 1)]
    chapters = distinct(made, directories)
    path.parent.mkdir(parents=True, exist_ok=True)
    with store.replacing(path) as file:
        file.write(page(chapters).encode())
    save_plots(chapters, path.parent / "plots")
    return path


def chapter(run: store.Run, id_: str) -> Chapter:
    """Let the experiment tell what came out; that it fails to, say of a run half done, is no reason to show nothing."""
    module = experiment.load(run.name)
    troubles = experiment.mixed(module, run.results)

    def told(what: Callable[[Sequence[experiment.Result]], T], nothing: T) -> T:
        try:
            return what(run.results)
        except Exception as e:
            log.exception("%s of %s", what.__name__, run.name)
            troubles.append(f"The {what.__name__} cannot be made of these results: {type(e).__name__}: {e}")
            return nothing

    about = (module.__doc__ or "").strip().split("\n\n")[0]
    tables: list[Table] = told(module.tables, [])
    plots: list[Plot] = told(module.plots, [])
    return Chapter(id_, module.TITLE, about, run, tables, plots, told(module.remarks, ""), troubles)


def processors(directory: str | Path) -> list[str]:
    """Return the processors that the cells of a run say they ran on, each once."""
    lines = store.read_lines(Path(directory) / store.CELLS)
    return list(dict.fromkeys(line["processor"] for line in lines if line.get("processor")))


def distinct(chapters: Sequence[Chapter], directories: Sequence[str | Path]) -> list[Chapter]:
    """Tell runs of the same experiment apart by the names of their directories."""
    titles = [c.title for c in chapters]
    named = zip(chapters, directories, strict=True)
    return [replace(c, title=f"{c.title} ({Path(d).name})") if titles.count(c.title) > 1 else c for c, d in named]


def save_plots(chapters: Sequence[Chapter], folder: Path) -> list[Path]:
    """Draw the plots into files, named after the experiments and the plots."""
    saved: list[Path] = []
    times: Counter[str] = Counter()
    for c in chapters:
        known = looks(c.plots)
        for plot in filter(drawable, c.plots):
            name = slug(f"{c.run.name} {plot.title}")
            times[name] += 1
            suffix = f"-{times[name]}" if times[name] > 1 else ""
            try:
                saved.append(figures.save(plot, folder / f"{name}{suffix}.png", known))
            except Exception:  # the page says why
                log.exception("the plot %s", plot.title)
    return saved


def page(chapters: Sequence[Chapter]) -> str:
    """Return the whole page."""
    title = chapters[0].title if len(chapters) == 1 else "The paper, rerun"
    scripts = [interactive.library(), text("page.js")]
    # Scripts run only if their sum is here, and nothing may be loaded: what data smuggles in stays text.
    sums = " ".join(f"'sha256-{base64.b64encode(hashlib.sha256(s.encode()).digest()).decode()}'" for s in scripts)
    policy = f"default-src 'none'; script-src {sums}; style-src 'unsafe-inline'; img-src data: blob:; font-src data:"
    lead = "" if len(chapters) == 1 else "\n<p>Experiments of the paper, and what came out of them here.</p>"
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<title>{escape(title)} · psgd</title>
<link rel="icon" href="data:,">
<style>
{text("page.css")}</style>
</head>
<body>
<header>
<p class="series">psgd · the laboratory</p>
<h1>{escape(title)}</h1>{lead}
</header>
{contents(chapters)}
<main>
{"".join(section(c, alone=len(chapters) == 1) for c in chapters)}</main>
<script>{scripts[0]}</script>
<script>{scripts[1]}</script>
</body>
</html>
"""


def contents(chapters: Sequence[Chapter]) -> str:
    """Return the table of contents."""
    items = []
    for c in chapters:
        shown = [(f"{c.id}-table-{i}", table.title) for i, table in enumerate(c.tables)]
        shown += [(f"{c.id}-plot-{i}", plot.title) for i, plot in enumerate(c.plots)]
        shown += [(f"{c.id}-cost", "Cost")] if c.run.results else []
        shown += [(f"{c.id}-settings", "Settings and provenance")]
        inside = "".join(f'<li><a href="#{id_}">{escape(title)}</a></li>' for id_, title in shown)
        title = "" if len(chapters) == 1 else f'<a href="#{c.id}">{escape(c.title)}</a>\n'
        items.append(f"<li>{title}<ul>{inside}</ul></li>")
    return f'<nav aria-label="Contents">\n<ul>\n{"".join(items)}\n</ul>\n</nav>'


def section(c: Chapter, *, alone: bool) -> str:
    """Return one run."""
    title = "" if alone else f"<h2>{escape(c.title)}</h2>\n"
    parts = [fragments.markdown(c.about), f'<p class="facts">{facts(c.run)}</p>', *map(warning, troubles(c))]
    if c.remarks.strip():
        parts.append(f'<div class="remarks">\n{fragments.markdown(c.remarks)}</div>')
    parts += [fragments.table(t, heading="h3", id_=f"{c.id}-table-{i}") for i, t in enumerate(c.tables)]
    known = looks(c.plots)
    parts += [picture(plot, known, f"{c.id}-plot-{i}") for i, plot in enumerate(c.plots)]
    if c.run.results:
        parts.append(fragments.table(costs(c.run.results, c.processors), heading="h3", id_=f"{c.id}-cost"))
    parts.append(provenance(c))
    return f'<section id="{c.id}">\n{title}' + "\n".join(parts) + "\n</section>\n"


def facts(run: store.Run) -> str:
    """Return a line on how much there is, and from when."""
    about, seeds = run.provenance, len({r.seed for r in run.results})
    said = [f"{len(run.results)} finished {'run' if len(run.results) == 1 else 'runs'}"]
    said += [f"{seeds} {'seed' if seeds == 1 else 'seeds'}"] if seeds else []
    said += [f"preset {about['preset']}"] if about.get("preset") else []
    said += [str(about["started"])[:10]] if about.get("started") else []
    said += (
        [f"commit {str(about['commit'])[:8]}{', changed' if about.get('dirty') else ''}"] if about.get("commit") else []
    )
    return escape(" · ".join(said))


def troubles(c: Chapter) -> list[str]:
    """Return what a reader must know about a run: that it is not finished, what failed, what could not be shown."""
    said = [] if c.run.results else ["No run is finished yet: there is nothing to show."]
    if c.run.results and c.run.provenance.get("finished", "") is None:
        said.append("This is not all yet: the run is going on, or was interrupted.")
    for failure in c.run.failures:
        config = ", ".join(f"{k} {v}" for k, v in dict(failure.get("config", {})).items())
        said.append(f"Failed: seed {failure.get('seed')}, {config}: {failure.get('error')}")
    return said + c.troubles


def warning(text: str) -> str:
    """Return a remark that must not be overlooked."""
    return f'<p class="missing" role="note">{escape(text)}</p>'


def picture(plot: Plot, known: Mapping[str, Look], id_: str) -> str:
    """Return a plot with its legend above and its note below."""
    note = f'<p class="note">{escape(plot.note)}</p>' if plot.note else ""
    heading = f'<figcaption><h3 id="{id_}">{escape(plot.title)}</h3></figcaption>'
    if not drawable(plot):
        return f'<figure>{heading}\n<p class="missing">No data yet.</p>\n{note}</figure>'
    try:
        drawing = interactive.draw(plot, known, f"{id_}-drawing")
    except Exception as e:
        log.exception("the plot %s", plot.title)
        return f"<figure>{heading}\n{warning(f'This plot cannot be drawn: {type(e).__name__}: {e}')}\n{note}</figure>"
    heat = next((mark for mark in plot.marks if isinstance(mark, HeatMap)), None)
    size = f' style="height:{90 + 34 * len(heat.y)}px;min-width:{110 + 52 * len(heat.x)}px"' if heat else ""
    label = fragments.attribute("aria-label", plot.title)
    return f"""<figure>{heading}
{fragments.legend(drawing.legend)}
<div class="wide"><div class="drawing" id="{id_}-drawing" role="img"{label}{size}></div></div>
<script type="application/json" data-plot>{fragments.data(drawing.item)}</script>
{note}</figure>"""


def provenance(c: Chapter) -> str:
    """Return settings and provenance, folded."""
    shared, differing = settings(c.run.results)
    parts = [f"<h4>What all runs share</h4>\n{fragments.listing(shared)}"] if shared else []
    if differing.rows:
        parts.append(fragments.table(differing))
    parts.append(f"<h4>Provenance</h4>\n{fragments.listing(c.run.provenance)}")
    summary = f'<summary id="{c.id}-settings">Settings and provenance</summary>'
    return "\n".join([f"<details>{summary}", *parts, "</details>"])


def text(name: str) -> str:
    """Return a file of this package."""
    return (resources.files("psgd.experiments.report") / name).read_text(encoding="utf-8")


def slug(title: str) -> str:
    """Return a title as the name of a file.

    >>> slug("LeNet5: test error, %")
    'lenet5-test-error'
    """
    return re.sub(r"[^a-z0-9]+", "-", title.lower()).strip("-") or "plot"
