"""The report page: what it says, that it breaks on nothing, and, in a real browser, that it is drawn."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path

import demo
import pytest
from chromium import PROGRAM, Browser, chromium

from psgd.experiments import report, store
from psgd.experiments.report import interactive
from psgd.experiments.report.fragments import data, markdown
from psgd.experiments.report.fragments import table as html_table
from psgd.experiments.show import Line, Plot, Spread, Table

MEGABYTE = 1_000_000


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page of one run with everything in it."""
    return report.write([demo.leave(tmp_path_factory.mktemp("report") / "run")])


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page of three runs: one that is not finished, in which something failed, one that is empty, one whole."""
    folder = tmp_path_factory.mktemp("reports")
    going = demo.leave(folder / "going", ["sgd", "adam"], finished=False, failed=True)
    empty = demo.leave(folder / "empty", [], finished=False)
    return report.write([going, empty, demo.leave(folder / "whole", ["psgd-lra"])], folder / "new" / "all.html")


def without_scripts(page: Path) -> str:
    return re.sub(r"<script.*?</script>", "", page.read_text(), flags=re.DOTALL)


def test_it_is_in_the_first_directory_and_small_and_has_its_plots_beside_it(page: Path) -> None:
    assert page.name == "report.html" and page.parent.name == "run"
    assert page.stat().st_size < 2.5 * MEGABYTE
    assert not list(page.parent.glob("*.tmp"))
    plots = sorted(p.name for p in (page.parent / "plots").iterdir())
    assert "experiments-demo-training-loss.png" in plots and len(plots) == 8


def test_a_page_of_several_runs(pages: Path) -> None:
    text = without_scripts(pages)
    assert "The paper, rerun" in text
    for name in ("going", "empty", "whole"):  # the same experiment three times
        assert text.count(f"({name})</h2>") == 1
    assert len({p.name for p in (pages.parent / "plots").iterdir()}) == 5  # no plot of one run over another's


def test_what_is_missing_is_said(pages: Path) -> None:
    text = without_scripts(pages)
    assert text.count("No run is finished yet") == 1
    assert text.count("the run is going on, or was interrupted") == 1
    assert "Failed: seed 2, method adam" in text
    assert "No data yet." in text and "No rows yet." in text  # the error of methods that are not there


def test_seconds_are_said_to_be_of_the_processors_that_the_cells_name(page: Path, tmp_path: Path) -> None:
    assert "Wall time of runs; gradients" in without_scripts(page)  # which say none
    for names, said in (
        (["A"], "Wall time of runs, on A; gradients"),
        (["A", "B"], "Wall time of runs, on A and B: seconds do not compare across these; gradients"),
    ):
        directory = demo.leave(tmp_path / "-".join(names))
        lines = store.read_lines(directory / store.CELLS)
        (directory / store.CELLS).unlink()
        for i, line in enumerate(lines):
            store.append_line(directory / store.CELLS, {**line, "processor": names[i % len(names)]})
        assert said in without_scripts(report.write([directory]))


def test_an_experiment_that_fails_on_half_of_its_results_still_has_a_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.modules["experiments.demo"], "tables", lambda results: [][1])
    text = without_scripts(report.write([demo.leave(tmp_path / "run", ["sgd"])]))
    assert "cannot be made of these results: IndexError" in text
    assert "Training loss" in text


def test_a_plot_that_cannot_be_drawn_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bad = Plot("Bad", "x", "y", [Line("sgd", [0, 1], [1.0])])
    good = Plot("Good", "x", "y", [Line("sgd", [0, 1], [1.0, 2.0])])
    monkeypatch.setattr(sys.modules["experiments.demo"], "plots", lambda results: [bad, good])
    page = report.write([demo.leave(tmp_path / "run", ["sgd"])])
    assert "This plot cannot be drawn: IndexError" in without_scripts(page)
    assert [p.name for p in (tmp_path / "run/plots").iterdir()] == ["experiments-demo-good.png"]


def test_nothing_of_the_data_is_html(page: Path, pages: Path) -> None:
    for path in (page, pages):
        text = path.read_text()
        assert demo.EVIL not in text
        assert "&lt;script&gt;document.title" in text
        assert text.count("<script") == text.count("</script>")
        assert "javascript:" not in re.sub(r"<script.*?</script>", "", text, flags=re.DOTALL).replace(
            "(javascript:", ""
        )
        assert "<img" not in without_scripts(path)


def test_tags_are_closed_in_order(page: Path, pages: Path) -> None:
    class Checker(HTMLParser):
        open: list[str] = []  # noqa: RUF012

        def handle_starttag(self, tag: str, attrs: object) -> None:
            if tag not in ("meta", "link", "br", "hr"):
                self.open.append(tag)

        def handle_endtag(self, tag: str) -> None:
            assert self.open.pop() == tag

        def handle_startendtag(self, tag: str, attrs: object) -> None:
            pass

    for path in (page, pages):
        checker = Checker()
        checker.feed(path.read_text())
        assert checker.open == []


def test_ids_are_unique_and_links_lead_somewhere(pages: Path) -> None:
    text = without_scripts(pages)
    ids = re.findall(r' id="([^"]+)"', text)
    assert len(ids) == len(set(ids))
    links = set(re.findall(r'href="#([^"]+)"', text))
    assert {"run-1", "run-2", "run-3", "run-1-table-0", "run-1-plot-0", "run-1-cost"} <= links <= set(ids)


def test_tables_align_numbers_and_show_spreads() -> None:
    rows = [["sgd", Spread(1.234, 0.056, 5), "2.37 ± 0.08", None, 1], ["<adam>", None, "≈ 2", 1e-7, 2]]
    text = html_table(Table("T & U", ["method", "ours", "the paper", "x", "n"], rows, "n < 3"))
    assert '<td class="number">1.234 <span class="spread">± 0.056 (5)</span></td>' in text
    assert '<td class="number paper">2.37 ± 0.08</td>' in text
    assert '<td class="number">1e−7</td>' in text and '<td class="number">–</td>' in text
    assert "<td>&lt;adam&gt;</td>" in text and "T &amp; U" in text and "n &lt; 3" in text


def test_markdown_is_a_safe_subset() -> None:
    text = markdown("a **b** `c<d>` [e](javascript:alert(1)) <img src=x onerror=alert(1)>\n\n<script>f</script>")
    assert "<strong>b</strong>" in text and "<code>c&lt;d&gt;</code>" in text
    assert "<img" not in text and "<script" not in text and "href" not in text


def test_data_cannot_end_its_element() -> None:
    assert "<" not in data({"name": "</script><!--"})


def test_long_lines_are_thinned_and_keep_their_ends() -> None:
    assert interactive.thinned(range(100_000), log=False)[[0, -1]].tolist() == [0, 99_999]
    kept = interactive.thinned(range(100_000), log=True)
    assert kept[[0, -1]].tolist() == [0, 99_999] and len(kept) <= interactive.POINTS


def test_a_report_of_nothing_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="at least one run"):
        report.write([])
    with pytest.raises(ValueError, match=store.PROVENANCE):
        report.write([tmp_path])


# --- in a browser

needs_chromium = pytest.mark.skipif(PROGRAM is None, reason="no chromium on the PATH")
SIZES = {"desktop": (1400, 1000, False), "phone": (390, 844, True), "small phone": (320, 568, True)}
INK = """[...document.querySelectorAll(".drawing")].map((drawing) => {
  const canvases = (node) => [...node.querySelectorAll("*")].flatMap((e) =>
    [...(e.tagName === "CANVAS" ? [e] : []), ...(e.shadowRoot ? canvases(e.shadowRoot) : [])]);
  const colours = new Set();
  for (const canvas of canvases(drawing)) {
    const pixels = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data;
    for (let i = 0; i < pixels.length; i += 4)
      if (pixels[i + 3] > 200) colours.add(pixels.slice(i, i + 3).join());
  }
  return [...colours];
})"""


def rgb(colour: str) -> str:
    return ",".join(str(int(colour[i : i + 2], 16)) for i in (1, 3, 5))


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as b:
        yield b


@needs_chromium
@pytest.mark.parametrize("size", SIZES)
def test_the_page_is_drawn(size: str, page: Path, browser: Browser, tmp_path: Path) -> None:
    width, height, mobile = SIZES[size]
    browser.open(page, width, height, mobile=mobile)
    assert browser.errors() == [] and browser.requests() == []
    drawn = browser.evaluate(INK)
    assert len(drawn) == 8 and all(len(colours) > 8 for colours in drawn)
    names = browser.evaluate(
        """[...document.querySelectorAll("figure")].map((f) => [...f.querySelectorAll(".legend button")].map((b) =>
        [b.textContent, b.querySelector("svg > *").getAttribute("stroke")]))"""
    )
    loss, many = dict(names[0]), dict(names[2])
    assert len(loss) == 8 and len(many) == 31 and loss["psgd-lra"] == many["psgd-lra"]
    assert all(rgb(colour) in drawn[0] for colour in loss.values())
    cells = browser.evaluate('[...document.querySelectorAll("td")].map((td) => td.textContent.trim())')
    assert len(cells) > 100 and all(cells)
    scroll, inner = browser.evaluate("[document.documentElement.scrollWidth, document.documentElement.clientWidth]")
    assert scroll <= inner  # wide things scroll inside themselves
    assert browser.evaluate(
        'document.querySelectorAll(".wide")[1].scrollWidth > document.querySelectorAll(".wide")[1].clientWidth'
    )
    assert browser.evaluate("document.title") == "Demonstration <i>with made-up numbers</i> · psgd"
    shot = browser.screenshot(tmp_path / f"{size}.png")
    assert shot.stat().st_size > 50_000


@needs_chromium
def test_several_runs_are_drawn(pages: Path, browser: Browser) -> None:
    browser.open(pages, 1400, 1000)
    assert browser.errors() == [] and browser.requests() == []
    assert all(browser.evaluate(INK))


@needs_chromium
def test_a_click_on_a_name_hides_it_and_a_double_click_leaves_it_alone(page: Path, browser: Browser) -> None:
    browser.open(page, 1400, 1000)
    legend = 'document.querySelectorAll("figure .legend")[1]'
    colours = browser.evaluate(f'[...{legend}.querySelectorAll("path")].map((p) => p.getAttribute("stroke"))')

    def after(event: str) -> list[bool]:
        """Return which of the two lines are there, after something happened to the first one's name."""
        browser.evaluate(f'{legend}.children[0].dispatchEvent(new MouseEvent("{event}"))')
        browser.evaluate("new Promise((done) => setTimeout(done, 300))")
        drawn = browser.evaluate(INK.replace(".map(", ".slice(1, 2).map(", 1))[0]
        return [rgb(colour) in drawn for colour in colours]

    assert [after(event) for event in ("nothing", "click", "click", "dblclick", "dblclick")] == [
        [True, True], [False, True], [True, True], [True, False], [True, True],
    ]  # fmt: skip


@needs_chromium
def test_scripts_of_the_data_would_not_run_even_if_they_got_in(page: Path, browser: Browser, tmp_path: Path) -> None:
    hurt = tmp_path / "hurt.html"
    hurt.write_text(page.read_text().replace("</main>", f"{demo.EVIL}</main>"))
    browser.open(hurt, 800, 600)
    assert "broken" not in browser.evaluate("document.title")
    assert any("Content Security Policy" in error for error in browser.errors())


@needs_chromium
def test_it_prints(page: Path, browser: Browser, tmp_path: Path) -> None:
    browser.open(page, 1400, 1000)
    assert browser.print(tmp_path / "page.pdf").read_bytes().startswith(b"%PDF")
