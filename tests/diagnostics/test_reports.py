"""Numbers of P, alone and beside the Hessian, against dense linear algebra."""

import math

import pytest
import torch
from cases import CASES, ids, walked
from problems import operator, symmetric

from psgd import (
    Blocks,
    Dense,
    Diagonal,
    LowRank,
    Normalization,
    Padded,
    Scalar,
    Triangular,
    XMat,
    fit_residual,
    hessian_report,
    kaleidoscope,
    lra,
    lra_duv,
    preconditioner_report,
)
from psgd import group as protocol
from psgd.diagnostics import reports
from psgd.diagnostics.landscape import sharpest_and_flattest
from psgd.diagnostics.reports import alignment, curvature_subspace, effective_rank, eigenvalues, tails
from psgd.diagnostics.secular import diagonal_plus_low_rank
from psgd.probes import generator

of_every_group = pytest.mark.parametrize(("name", "group", "n"), CASES, ids=ids(CASES))


def dense_p(group, q, n):
    matrix = group.matrix(q, n).double()
    return matrix.mT @ matrix


@of_every_group
def test_preconditioner_report(name, group, n):
    q = walked(group, n)
    p, report = dense_p(group, q, n), preconditioner_report(group, q, n)
    values = torch.linalg.svdvals(group.matrix(q, n).double()).square()
    expected = {
        "log_det_p": float(values.log().sum()),
        "log_det_q": float(values.log().sum() / 2),
        "smallest_p": float(values[-1]),
        "largest_p": float(values[0]),
        "condition_p": float(values[0] / values[-1]),
        "effective_rank_p": float(p.trace() ** 2 / p.square().sum()),
    }
    assert report.keys() == expected.keys()
    for key, value in expected.items():
        assert report[key] == pytest.approx(value, rel=1e-5, abs=1e-5), key


LARGE = [lra(3), lra_duv(3), LowRank(2) @ Scalar(), LowRank(4) @ Diagonal(), lra(0)]


def wide(group, n=400, seed=0):
    """A point with eigenvalues over several decades, of either sign of d."""
    g = torch.Generator().manual_seed(seed)
    q = group.init(n, generator=g, dtype=torch.float64)
    for part in q.values():
        if "d" in part:
            part["d"] = torch.randn(n, generator=g, dtype=torch.float64).exp()
            part["d"][::3] *= -1
        if "U" in part:
            part["U"], part["V"] = 6 * part["U"], 6 * part["V"]
    return q


@pytest.mark.parametrize("group", LARGE, ids=repr)
def test_every_eigenvalue_of_lra_by_counting(group):
    q = wide(group)
    a = diagonal_plus_low_rank(group, q, 400)
    expected = torch.linalg.svdvals(group.matrix(q, 400)).square().sort().values
    for k in (0, 1, 2, 17, 200, 397, 398, 399):
        assert a.eigenvalue(k) == pytest.approx(float(expected[k]), rel=2e-6)
    for level in (0.01, 0.3, 1.1, 5.0, 100.0):
        assert a.count(level) == int((expected < level).sum())


def test_counting_at_a_pole():
    """λ = d² exactly, where (D² − λ)⁻¹ does not exist."""
    group = lra(1)
    q = {"0": {"U": torch.tensor([[1.0], [0.5]]), "V": torch.tensor([[0.5], [0.25]])}, "1": {"d": torch.ones(2)}}
    expected = torch.linalg.svdvals(group.matrix(q, 2).double()).square()
    found = diagonal_plus_low_rank(group, q, 2)
    assert [found.eigenvalue(k) for k in (1, 0)] == pytest.approx(expected.tolist(), rel=1e-5)


@pytest.mark.parametrize("group", [*LARGE, Diagonal(), XMat(), Blocks(8, Dense())], ids=repr)
def test_tails_in_closed_form(group):
    q = wide(group) if group in LARGE else walked(group, 400, steps=10)
    values = torch.linalg.svdvals(group.matrix(q, 400)).square()
    found = tails(group, q, 400, 4, tol=1e-6)
    torch.testing.assert_close(found.largest, values[:4], rtol=2e-6, atol=0)
    torch.testing.assert_close(found.smallest, values.flip(0)[:4], rtol=2e-6, atol=0)


@pytest.mark.parametrize("group", [Dense(), Triangular(), Normalization(), kaleidoscope(64)], ids=repr)
def test_tails_by_lanczos(group, monkeypatch):
    q = walked(group, 64, steps=40)
    values = torch.linalg.svdvals(group.matrix(q, 64)).square()
    monkeypatch.setattr(protocol, "DENSE_LIMIT", 0)
    if group.singular_values(q, 64) is not None:
        pytest.fail("meant for groups without a closed form")
    found = tails(group, q, 64, 3)
    torch.testing.assert_close(found.largest, values[:3], rtol=2e-3, atol=0)
    torch.testing.assert_close(found.smallest, values.flip(0)[:3], rtol=2e-3, atol=0)


def test_whole_spectrum_or_none(monkeypatch):
    q = walked(Dense(), 6)
    torch.testing.assert_close(eigenvalues(Dense(), q, 6), torch.linalg.eigvalsh(dense_p(Dense(), q, 6)))
    monkeypatch.setattr(protocol, "DENSE_LIMIT", 5)
    assert eigenvalues(Dense(), q, 6) is None
    assert eigenvalues(Diagonal(), walked(Diagonal(), 6), 6) is not None


def test_effective_rank_by_probes():
    q = wide(lra(3))
    p = dense_p(lra(3), q, 400)
    assert effective_rank(lra(3), q, 400) == pytest.approx(float(p.trace() ** 2 / p.square().sum()), rel=0.05)


def test_padded_groups_are_described_on_the_padded_problem():
    group = Padded(Blocks(4, Dense()), 4)
    q = group.init(10, scale=2.0)
    report = preconditioner_report(group, q, 10)
    assert report["log_det_q"] == pytest.approx(12 * math.log(2))
    assert report["largest_p"] == pytest.approx(4)
    h = symmetric(torch.linspace(1, 3, 10)).float()
    report = hessian_report(operator(h), group, q)
    big = torch.block_diag(h, torch.eye(2))
    assert report["largest_h"] == pytest.approx(3, rel=1e-4)
    assert report["trace_h"] == pytest.approx(float(big.trace()), abs=4 * report["trace_error"])
    assert report["largest_php"] == pytest.approx(12, rel=1e-4)


def test_half_precision_points():
    for group in (lra(2), XMat(), Dense()):
        q = group.init(10, dtype=torch.bfloat16)
        assert preconditioner_report(group, q, 10)["largest_p"] == pytest.approx(1, rel=0.3)
        assert hessian_report(operator(torch.eye(10)), group, q)["largest_h"] == pytest.approx(1, rel=1e-3)


# --- beside the Hessian


@pytest.mark.parametrize("group", [Diagonal(), XMat(), Dense(), lra(3), lra_duv(3)], ids=repr)
def test_hessian_report(group):
    n, q = 40, walked(group, 40)
    h = symmetric(torch.cat((-torch.linspace(0.5, 2, 10), torch.linspace(0.5, 20, 30))))
    p, eye = dense_p(group, q, n), torch.eye(n, dtype=torch.float64)
    report = hessian_report(operator(h), group, q, probes=400)
    before, after = torch.linalg.eigvalsh(h), torch.linalg.eigvals(p @ h).real.sort().values
    for name, values in (("h", before), ("php", after)):
        assert report[f"smallest_{name}"] == pytest.approx(float(values[0]), rel=0.01)
        assert report[f"largest_{name}"] == pytest.approx(float(values[-1]), rel=0.01)
        spread = float(values.abs().amax() / values.abs().amin())
        assert report[f"spread_{name}"] == pytest.approx(spread, rel=0.01)
        assert report[f"residual_{name}"] < 1e-6
    assert abs(report["trace_h"] - float(h.trace())) < 3 * report["trace_error"]
    criterion = float((h @ p @ h).trace() + torch.linalg.inv(p).trace())
    assert abs(report["criterion"] - criterion) < 3 * report["criterion_error"]
    exact = float((p @ h - eye).norm() / math.sqrt(n))
    assert report["inverse_error"] == pytest.approx(exact, rel=0.15)
    scalar = math.sqrt(1 - float(h.trace() ** 2 / (n * h.square().sum())))
    assert report["inverse_error_scalar"] == pytest.approx(scalar, rel=0.05)
    assert ("alignment" in report) == (group in (lra(3), lra_duv(3)))


def test_a_perfect_preconditioner():
    h = symmetric(torch.linspace(0.5, 20, 30))
    values, vectors = torch.linalg.eigh(h)
    q = {"Q": vectors @ torch.diag(values.rsqrt()) @ vectors.mT}
    report = hessian_report(operator(h), Dense(), q)
    assert report["spread_h"] == pytest.approx(40, rel=0.01)
    for key in ("spread_php", "smallest_php", "largest_php"):
        assert report[key] == pytest.approx(1, rel=1e-6)
    assert report["inverse_error"] < 1e-10
    assert report["fit_residual"] < 1e-6
    assert report["criterion"] == pytest.approx(2 * report["trace_h"], rel=1e-9)


def test_an_unresolved_spread_is_not_a_number():
    h = symmetric(torch.linspace(-1, 1, 300) ** 3)
    assert math.isnan(hessian_report(operator(h), Diagonal(), Diagonal().init(300).copy(), steps=15)["spread_h"])


def test_fit_residual_is_that_of_the_matrices():
    group, g = lra(2), generator(0)
    q = walked(group, 8)
    v, h = (torch.randn(5, 8, generator=g, dtype=torch.float64) for _ in range(2))
    found = fit_residual(group, q, v, h)
    for i in range(5):
        a, b = group.apply(q, h[i]), group.solve_t(q, v[i])
        aa, bb = torch.outer(a, a), torch.outer(b, b)
        assert float(found[i]) == pytest.approx(float((aa - bb).norm() / (aa + bb).norm()), rel=1e-9)


@pytest.mark.parametrize("group", [lra(3), lra_duv(3), LowRank(3)], ids=repr)
def test_curvature_subspace_holds_what_is_not_diagonal(group):
    q = wide(group, 30) if group != LowRank(3) else walked(group, 30, steps=10)
    p = dense_p(group, q, 30)
    basis = curvature_subspace(group, q)
    parts = getattr(group, "parts", ())
    d = next((q[str(i)]["d"] for i, part in enumerate(parts) if part == Diagonal()), torch.ones(30).double())
    rest = torch.linalg.inv(p) - torch.diag(d**-2)
    z, _ = torch.linalg.qr(basis)
    assert basis.shape == (30, 6)
    assert (rest - z @ (z.mT @ rest)).norm() < 1e-9 * rest.norm()
    assert curvature_subspace(XMat(), XMat().init(4)) is None


def test_alignment_of_a_fitted_lra():
    """P fitted to a diagonal plus rank 3 finds the subspace; at the start it has not."""
    g = torch.Generator().manual_seed(0)
    w = torch.randn(60, 3, generator=g, dtype=torch.float64)
    h, group = torch.eye(60).double() + 10 * w @ w.mT / 60, lra(3)
    q = group.init(60, generator=g, dtype=torch.float64)
    start = hessian_report(operator(h), group, q)["alignment"]
    for t in range(1500):
        v = torch.randn(4, 60, generator=g, dtype=torch.float64)
        q = group.fit(q, v, v @ h, lr=0.3, coin=bool(t % 2))
    assert start < 0.4
    assert hessian_report(operator(h), group, q)["alignment"] > 0.95


def test_alignment_bounds():
    g = torch.Generator().manual_seed(0)
    basis, vectors = torch.randn(500, 20, generator=g), torch.randn(50, 500, generator=g)
    assert alignment(basis, basis.mT) == pytest.approx(1)
    assert alignment(basis, vectors) == pytest.approx(20 / 500, rel=0.2)


def test_sharpest_and_flattest_directions():
    group, q = lra(2), walked(lra(2), 12, steps=10)
    _, vectors = torch.linalg.eigh(dense_p(group, q, 12))
    sharp, flat = sharpest_and_flattest(group, q, 12)
    assert abs(float(sharp @ vectors[:, 0])) > 0.999
    assert abs(float(flat @ vectors[:, -1])) > 0.999


def test_small_and_large_take_different_ways_to_one_answer(monkeypatch):
    q = wide(lra(3), 100)
    small = preconditioner_report(lra(3), q, 100, tol=1e-6)
    monkeypatch.setattr(reports, "_SMALL", 10)
    large = preconditioner_report(lra(3), q, 100, tol=1e-6)
    for key in ("smallest_p", "largest_p", "condition_p", "log_det_q"):
        assert small[key] == pytest.approx(large[key], rel=3e-6)
    assert small["effective_rank_p"] == pytest.approx(large["effective_rank_p"], rel=0.1)
