"""The demo, for real but small: matched groups precondition perfectly, the table and the picture are made."""

import sys

import pytest
import torch

from psgd import demo

N, STEPS = 16, 200

MATCHES = {
    "Normalization()": "features",
    "XMat()": "X-shaped",
    "Blocks(4, Dense())": "blocks",
    "affine((4, 4))": "Kronecker",
    "Circulant()": "circulant",
    "band(4)": "blocks",
    "Triangular()": "dense",
}


def stack(*names):
    found = demo.hessians(N)
    return torch.stack([found[name] for name in names])


def fitted(name, *columns, steps=STEPS):
    group, h = demo.groups(N)[name], stack(*columns)
    return demo.condition(group, demo.fit(group, h, steps), h)


@pytest.mark.parametrize("name", MATCHES)
def test_a_matched_group_is_perfect(name):
    before, after = demo.spread(stack(MATCHES[name])).item(), fitted(name, MATCHES[name]).item()
    assert before > 10
    assert after < 1.1


def test_low_rank_comes_close():
    assert fitted("lra(5)", "low rank", steps=600) < 1.4


def test_dense_solves_all():
    assert fitted("Dense()", *demo.hessians(N)).max() < 1.1


def test_a_group_without_the_structure_does_not():
    assert fitted("Diagonal()", "circulant", "blocks").min() > 10


def test_side_by_side_is_one_by_one():
    """A block of the common fit is the fit alone, where no randomness is shared."""
    together = fitted("XMat()", "X-shaped", "dense", steps=3)
    torch.testing.assert_close(together[:1], fitted("XMat()", "X-shaped", steps=3))


@pytest.mark.parametrize("n", [8, 16, 32])
def test_the_hessians(n):
    for name, h in demo.hessians(n).items():
        assert h.shape == (n, n)
        torch.testing.assert_close(h, h.mT)
        eigenvalues = torch.linalg.eigvalsh(h)
        assert eigenvalues.abs().log().sum().abs() < 1e-9
        assert (eigenvalues.min() < 0) == (name == "indefinite")
    again = demo.hessians(n)
    assert all(torch.equal(again[name], h) for name, h in demo.hessians(n).items())


def test_the_condition_number_is_that_of_the_preconditioned_hessian():
    """P^½HP^½ by an eigendecomposition of P, against QHQᵀ."""
    group, h = demo.groups(8)["lra(5)"], torch.stack([demo.hessians(8)["indefinite"]])
    q = demo.fit(group, h, 20)
    matrix = demo.Blocks(8, group).matrix(q, 8)
    eigenvalues, vectors = torch.linalg.eigh(matrix.mT @ matrix)
    root = vectors * eigenvalues.sqrt() @ vectors.mT
    moduli = torch.linalg.eigvalsh(root @ h[0] @ root).abs()
    torch.testing.assert_close(demo.condition(group, q, h)[0], moduli.max() / moduli.min())


TABLE = [
    demo.Row("none", 0, [100.0, 100.0]),
    demo.Row("large", 9, [1.0, 2.0]),
    demo.Row("small", 3, [1.2, 50.0]),
    demo.Row("as large", 9, [1.0, 1.9]),
]


def test_the_winner_has_the_fewest_floats():
    assert demo.winners(TABLE) == [2, 1]


def test_the_text_is_aligned_and_marked():
    head, _, *lines = demo.text(TABLE, ["one", "two"]).splitlines()
    assert lines[2].split() == ["small", "3", "1.20*", "50"]
    assert [line.count("*") for line in lines] == [0, 1, 1, 0]
    assert {line.index("  ", 30) for line in lines if len(line) > 40} <= {30}
    assert head.split() == ["group", "floats", "one", "two"]


def test_floats_do_not_count_the_steering():
    assert demo.floats(demo.lra(5).init(7)) == 7 + 2 * 5 * 7
    assert demo.floats(demo.Blocks(2, demo.Dense()).init(6)) == 12


@pytest.fixture
def small(monkeypatch):
    monkeypatch.setattr(demo, "N", 8)
    monkeypatch.setattr(demo, "STEPS", 2)


def test_main_prints_the_table_and_draws_it(small, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    path = tmp_path / "new" / "demo.png"
    demo.main([str(path)])
    out = capsys.readouterr().out
    for name in (*demo.groups(8), *demo.hessians(8)):
        assert name in out
    assert out.count("*") == len(demo.hessians(8)) + 1
    assert str(path) in out
    assert path.read_bytes().startswith(b"\x89PNG")


def test_main_without_matplotlib(small, tmp_path, capsys, monkeypatch):
    for name in ("matplotlib", *(m for m in sys.modules if m.startswith("matplotlib"))):
        monkeypatch.setitem(sys.modules, name, None)
    demo.main([str(tmp_path / "demo.png")])
    out = capsys.readouterr().out
    assert "Dense()" in out
    assert "pip install 'psgd[plot]'" in out
    assert not (tmp_path / "demo.png").exists()
