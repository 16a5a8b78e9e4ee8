"""Plots as files: the same marks, in the same looks as on the page."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import demo
import pytest
from matplotlib.colors import to_hex
from matplotlib.image import imread

from psgd.experiments.report import figures, interactive
from psgd.experiments.report.looks import COLOURS, DASHES, drawable, looks
from psgd.experiments.show import Contours, HeatMap, Line, Plot, Points

RESULTS = [demo.Result(c, s, demo.made_up(c, s), 1.0) for c in demo.cells("cpu") for s in demo.seeds("cpu")]
PLOTS = [plot for plot in demo.plots(RESULTS) if drawable(plot)]


@pytest.mark.parametrize("plot", PLOTS, ids=[str(i) for i in range(len(PLOTS))])
@pytest.mark.parametrize("suffix", [".png", ".svg"])
def test_every_plot_becomes_a_file(plot: Plot, suffix: str, tmp_path: Path) -> None:
    path = figures.save(plot, tmp_path / "new" / f"plot{suffix}")
    if suffix == ".png":
        picture = imread(path)
        assert picture.shape[0] > 300 and picture.shape[1] > 600
        assert picture[..., :3].min() < 0.5 and len({tuple(p) for p in picture[::7, ::7, :3].reshape(-1, 3)}) > 5
    else:
        assert path.read_text().rstrip().endswith("</svg>")


def test_a_name_looks_the_same_in_all_plots() -> None:
    known = looks(PLOTS)
    drawn = [figures.draw(plot, known) for plot in PLOTS]
    colours = {to_hex(l.get_color()) for f in drawn for l in f.axes[0].lines if l.get_label() == "psgd-lra"}
    assert colours == {known["psgd-lra"].colour.lower()} and len(drawn) > 3


def test_looks_are_distinct_as_long_as_there_are_any() -> None:
    n = len(COLOURS) * len(DASHES)
    known = looks([Plot("", "", "", [Line(f"{i}", [0], [0]) for i in range(n)])])
    assert len({(l.colour, l.dash) for l in known.values()}) == n >= 40


def test_bands_dashes_and_log_axes() -> None:
    marks = [Line("a", [1, 2, 3], [1.0, 0.0, 2.0], [0.5, 0.5, 0.5], [2, 2, 2]), Line("b", [1, 3], [1, 1], dashed=True)]
    ax = figures.draw(Plot("T", "x", "y", marks, x_log=True, y_log=True)).axes[0]
    assert (ax.get_xscale(), ax.get_yscale(), ax.get_title(loc="left")) == ("log", "log", "T")
    assert len(ax.collections) == 1
    assert ax.lines[0].get_linestyle() == "-" and ax.lines[1].get_linestyle() == "--"
    assert math.isnan(ax.lines[0].get_ydata()[1])  # zero has no place on a log axis


@pytest.mark.parametrize("y_log", [False, True])
def test_a_picture_ends_where_it_is_said_to(y_log: bool) -> None:
    plot = Plot("T", "x", "y", [Line("a", [0, 1], [1.0, 2.0], [1.0, 2.0], [900.0, 2.0])], y_log=y_log, y_max=3.0)
    assert figures.draw(plot).axes[0].get_ylim()[1] == 3.0
    assert interactive.axes(plot).y_range.end == 3.0
    assert figures.draw(replace(plot, y_max=None)).axes[0].get_ylim()[1] > 900


def test_the_numbers_of_a_heat_map_are_in_its_cells() -> None:
    heat = HeatMap(["a", "b"], ["c"], [[1234.5, math.nan]], log=True)
    ax = figures.draw(Plot("T", "x", "y", [heat])).axes[0]
    assert [t.get_text() for t in ax.texts] == ["1200", "–"]
    assert [t.get_text() for t in ax.get_xticklabels()] == ["a", "b"]


def test_a_path_that_leaves_the_contours_does_not_move_the_axes() -> None:
    contours = Contours([0, 1, 2], [0, 1], [[0, 1, 2], [1, 2, 3]], [0.5, 1.5, 2.5])
    ax = figures.draw(Plot("T", "x", "y", [contours, Line("sgd", [0, 1000], [0, 1e9])])).axes[0]
    assert ax.get_xlim() == (0, 2) and ax.get_ylim() == (0, 1)


def test_many_names_stand_outside() -> None:
    few, many = (Plot("T", "x", "y", [Points(f"n{i}", [i], [i]) for i in range(n)]) for n in (3, 30))
    assert figures.draw(few).axes[0].get_legend() and not figures.draw(few).legends
    assert not figures.draw(many).axes[0].get_legend() and len(figures.draw(many).legends[0].texts) == 30
