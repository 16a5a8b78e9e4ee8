"""Singular values of Q, in closed form where the group has one, against a dense decomposition."""

import pytest
import torch
from cases import CASES, ids, walked

from psgd import (
    DCT,
    Blocks,
    Butterfly,
    Circulant,
    Conjugate,
    Dense,
    Diagonal,
    DirectSum,
    Group,
    Kronecker,
    LowRank,
    Normalization,
    Scalar,
    Shift,
    Triangular,
    XMat,
    fishnet,
    lra,
)
from psgd import group as protocol

of_every_group = pytest.mark.parametrize(("name", "group", "n"), CASES, ids=ids(CASES))


@of_every_group
def test_singular_values_are_those_of_the_matrix(name: str, group: Group, n: int):
    q = walked(group, n)
    values = group.singular_values(q, n)
    expected = torch.linalg.svdvals(group.matrix(q, n).double())
    tol = 1e-6 if not group.moves else 1e-10  # constants have no dtype but the default
    torch.testing.assert_close(values.sort(descending=True).values.double(), expected, rtol=tol, atol=1e-12)


@of_every_group
def test_orthogonal_says_whether_the_group_is(name: str, group: Group, n: int):
    values = torch.linalg.svdvals(group.matrix(walked(group, n), n).double())
    is_orthogonal = bool((values - 1).abs().amax() < 1e-6)
    assert is_orthogonal == group.orthogonal


CLOSED = [
    Diagonal(),
    Scalar(),
    XMat(),
    Butterfly(),
    Circulant(),
    LowRank(2),
    fishnet(12),
    DCT() @ XMat() @ Shift(1),
    Blocks(3, Circulant()),
    Blocks(3, Shift(1)),
    DirectSum((6, 6), (DCT(), Diagonal())),
    Kronecker((3, 4), (Diagonal(), XMat())),
    Conjugate(DCT(), Diagonal()),
]


@pytest.mark.parametrize("group", CLOSED, ids=repr)
def test_large_matrices_need_not_be_written_out(group: Group, monkeypatch):
    q = walked(group, 12)
    expected = torch.linalg.svdvals(group.matrix(q, 12).double())
    monkeypatch.setattr(protocol, "DENSE_LIMIT", 4)
    values = group.singular_values(q, 12)
    torch.testing.assert_close(values.sort(descending=True).values.double(), expected, rtol=1e-7, atol=1e-12)


@pytest.mark.parametrize(
    "group",
    [
        Dense(),
        Triangular(),
        Normalization(),
        lra(2),
        Blocks(6, Dense()),
        DirectSum((6, 6), (Diagonal(), Dense())),
        Kronecker((2, 6), (Diagonal(), Dense())),
        Conjugate(Dense(), Diagonal()),
    ],
    ids=repr,
)
def test_none_where_there_is_no_closed_form(group: Group, monkeypatch):
    monkeypatch.setattr(protocol, "DENSE_LIMIT", 4)
    assert group.singular_values(group.init(12), 12) is None


def test_half_precision_is_lifted():
    for group in (Diagonal(), XMat(), Circulant(), LowRank(2), Dense(), Kronecker((2, 3), (Diagonal(), Dense()))):
        q = group.init(6, dtype=torch.bfloat16)
        assert group.singular_values(q, 6).dtype == torch.float32
