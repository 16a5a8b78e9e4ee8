"""What the pictures show is what they were given. (How they look is looked at: docs/diagnostics.)"""

import math

import pytest
import torch
from problems import batches, loss, network, operator, symmetric
from test_operators import equal, snapshot

from psgd import XMat, lra
from psgd.diagnostics.landscape import loss_along
from psgd.diagnostics.spectral import Density, spectral_density

pytest.importorskip("matplotlib", reason="needs the extra `plot`")

from psgd.diagnostics import pictures


def drawn(figure, tmp_path):
    figure.savefig(tmp_path / "picture.png")
    assert (tmp_path / "picture.png").stat().st_size > 5000


def curve(ax, i):
    x, y = ax.lines[i].get_data()
    return torch.as_tensor(x, dtype=torch.float64), torch.as_tensor(y, dtype=torch.float64)


def test_spectra_count_eigenvalues_by_size_and_sign(tmp_path):
    values = torch.cat((-torch.logspace(-2, 0, 10), torch.logspace(-2, 2, 40))).double()
    figure = pictures.spectra(*(spectral_density(operator(symmetric(values)), steps=50, probes=100),) * 2)
    for ax in figure.axes:
        for i, expected in enumerate((40, 10)):
            x, count = curve(ax, i)
            assert float(torch.trapezoid(count, x.log10())) == pytest.approx(expected, rel=0.1)
    drawn(figure, tmp_path)


def test_spectra_of_one_sign_and_with_zeros(tmp_path):
    values = torch.tensor([0.0, 1.0, 2.0])
    exact = Density(3, (values,), (torch.full((3,), 1 / 3),))
    drawn(pictures.spectra(exact, exact), tmp_path)


def test_eigenvalue_dynamics(tmp_path):
    rows = [{"step": 10 * t, "smallest_p": 0.1, "largest_p": 2.0 + t, "log_det_p": 5 * math.log(3)} for t in range(4)]
    figure = pictures.eigenvalue_dynamics(rows, n=5)
    (ax,) = figure.axes
    assert curve(ax, 0)[1].tolist() == [2, 3, 4, 5]
    assert curve(ax, 1)[1].tolist() == pytest.approx([3] * 4)
    assert curve(ax, 2)[1].tolist() == [0.1] * 4
    assert curve(ax, 0)[0].tolist() == [0, 10, 20, 30]
    drawn(figure, tmp_path)
    drawn(pictures.eigenvalue_dynamics(rows[:1]), tmp_path)
    with pytest.raises(ValueError, match="at least one row"):
        pictures.eigenvalue_dynamics([])


def test_flatness_pairs(tmp_path):
    first, second = [(0.3, -10.0, 0.02), (0.4, -11.0, 0.03)], [(0.2, -12.0, 0.01), (0.35, -15.0, 0.02)]
    figure = pictures.flatness_pairs(first, second, ("SGD", "PSGD"))
    for ax, i in zip(figure.axes, (0, 2), strict=True):
        points = [tuple(p) for c in ax.collections for p in c.get_offsets().tolist()]
        assert points == [(p[i], p[1]) for p in first + second]
        assert len(ax.texts) == 2
    assert [t.get_text() for t in figure.axes[1].get_legend().get_texts()] == ["SGD", "PSGD"]
    drawn(figure, tmp_path)
    with pytest.raises(ValueError, match="as many of the first as of the second, got 1, 2"):
        pictures.flatness_pairs(first[:1], second)


def test_directions(tmp_path):
    t = torch.linspace(-1, 1, 21)
    figure = pictures.directions(t, {"sharp": 3 * t**2 + t, "flat": 0 * t + 1}, {"sharp": 6.0})
    (ax,) = figure.axes
    torch.testing.assert_close(curve(ax, 0)[1], curve(ax, 1)[1], rtol=0, atol=1e-5)
    assert curve(ax, 2)[1].tolist() == [1.0] * 21
    drawn(figure, tmp_path)
    drawn(pictures.directions(t, {"only": t**2}), tmp_path)


@pytest.mark.parametrize("group", [XMat(), lra(2)], ids=repr)
def test_matrices(group, tmp_path):
    q = group.init(6, generator=torch.Generator().manual_seed(0))
    figure = pictures.matrices(group, q, 6)
    images = [ax.images[0].get_array() for ax in figure.axes[:4]]
    matrix = group.matrix(q, 6).double()
    assert torch.as_tensor(images[1].data).allclose(matrix)
    assert torch.as_tensor(images[3].data).allclose(matrix.mT @ matrix)
    assert int(images[0].sum()) == int((matrix != 0).sum())
    drawn(figure, tmp_path)


def test_no_figure_is_kept_and_no_style_changed():
    import matplotlib as mpl

    before = dict(mpl.rcParams)
    pictures.matrices(XMat(), XMat().init(4), 4)
    assert dict(mpl.rcParams) == before


def test_loss_along_a_line_and_back():
    model, batch = network(), batches(1)[0]
    before, e = snapshot(model), torch.randn(123, generator=torch.Generator().manual_seed(0))
    t = torch.tensor([-0.5, 0.0, 0.25])
    found = loss_along(model, lambda: loss(model, batch), 7 * e, t)
    assert equal(snapshot(model), before)
    assert found[1] == pytest.approx(float(loss(model, batch).detach()))
    moved = network()
    pieces = (e.double() / e.norm()).split([p.numel() for p in moved.parameters()])
    with torch.no_grad():
        for p, step in zip(moved.parameters(), pieces, strict=True):
            p.add_(0.25 * step.view_as(p))
    assert found[2] == pytest.approx(float(loss(moved, batch).detach()), rel=1e-6)


def test_loss_along_comes_back_from_an_exception():
    model = network()
    before = snapshot(model)

    def fails():
        raise KeyError

    with pytest.raises(KeyError):
        loss_along(model, fails, torch.ones(123), torch.tensor([1.0]))
    assert equal(snapshot(model), before)
