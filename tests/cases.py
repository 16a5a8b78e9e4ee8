"""The groups that the laws are tried on: one line per case, every public group at least once."""

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

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
    Identity,
    IncompleteTriangular,
    Kronecker,
    LowerTriangular,
    LowRank,
    MatrixAlgebra,
    Normalization,
    Permute,
    Point,
    Product,
    Scalar,
    Shift,
    Smoothed,
    StepSize,
    Triangular,
    XMat,
    affine,
    band,
    dct,
    fishnet,
    kaleidoscope,
    lra,
    lra_duv,
    permutation,
    two_grid,
)

SMOOTHED = Smoothed()

Case = tuple[str, Group, int]

KLEIN = [(0, 1, 2, 3, 4), (1, 0, 2, 3, 4), (0, 1, 3, 2, 4), (1, 0, 3, 2, 4)]

CASES: list[Case] = [
    ("diagonal", Diagonal(), 5),
    ("scalar", Scalar(), 5),
    ("xmat even", XMat(), 6),
    ("xmat odd", XMat(), 7),
    ("xmat 1", XMat(), 1),
    ("butterfly", Butterfly(), 6),
    ("butterfly 2", Butterfly(), 2),
    ("permutation by elements", permutation(elements=KLEIN), 5),
    ("permutation by generators", permutation(generators=[(1, 2, 0, 3, 4, 5), (0, 1, 2, 4, 3, 5)]), 6),
    ("permutation by orbits", permutation(orbits=[(0, 3, 5), (1,), (4, 2)]), 6),
    ("fishnet 5", fishnet(5), 5),
    ("fishnet 8", fishnet(8), 8),
    ("fishnet 8, 3 levels", fishnet(8, levels=3), 8),
    ("triangular", Triangular(), 5),
    ("lower triangular", LowerTriangular(), 5),
    ("incomplete triangular", IncompleteTriangular(2), 6),
    ("dense", Dense(), 5),
    ("dense 1", Dense(), 1),
    ("normalization", Normalization(), 5),
    ("normalization 1", Normalization(), 1),
    ("circulant even", Circulant(), 6),
    ("circulant odd", Circulant(), 5),
    ("circulant 1", Circulant(), 1),
    ("low rank, scalar", LowRank(2) @ Scalar(), 6),
    ("low rank alone", LowRank(2), 6),
    ("low rank 0", LowRank(0) @ Diagonal(), 5),
    ("low rank over n", LowRank(4) @ Diagonal(), 3),
    ("lra", lra(3), 8),
    ("lra duv", lra_duv(3), 8),
    ("identity", Identity(), 4),
    ("shift", Shift(2), 5),
    ("permute", Permute((2, 0, 3, 1)), 4),
    ("dct even", DCT(), 6),
    ("dct odd", DCT(), 7),
    ("dct 1", DCT(), 1),
    ("dct 2", DCT(), 2),
    ("band", band(4), 12),
    ("two grid", two_grid(3, 4), 12),
    ("dct xmat", dct(XMat()), 7),
    ("kaleidoscope 7", kaleidoscope(7), 7),
    ("kaleidoscope 8", kaleidoscope(8), 8),
    ("kaleidoscope 16", kaleidoscope(16), 16),
    ("affine 1", affine((5,)), 5),
    ("affine 2", affine((3, 4)), 12),
    ("affine 2, normalization", affine((3, 4), (Triangular(), Normalization())), 12),
    ("affine 2, diagonal", affine((3, 4), (Diagonal(), Dense())), 12),
    ("affine 2, identity", affine((3, 4), (Identity(), LowerTriangular())), 12),
    ("affine 2, circulant", affine((4, 3), (Circulant(), XMat())), 12),
    ("affine 2, low rank", affine((4, 3), (LowRank(2), Triangular())), 12),
    ("affine 2, lra", affine((4, 3), (lra(2), Dense())), 12),
    ("affine 2, blocks of lra", affine((4, 3), (Blocks(2, lra(1)), Dense())), 12),
    ("affine 2, conjugate lra", affine((3, 4), (Dense(), Conjugate(Normalization(), lra(1)))), 12),
    ("affine 2, direct sum", affine((2, 5), (Dense(), DirectSum((2, 3), (lra(1), Diagonal())))), 10),
    ("affine 3", affine((2, 3, 2), (Dense(), Normalization(), Diagonal())), 12),
    ("affine 3, constants", affine((2, 3, 4), (Shift(1), Circulant(), DCT() @ Triangular())), 24),
    ("affine of affine", affine((2, 6), (Triangular(), affine((2, 3)))), 12),
    ("affine lra", affine((3, 4)) @ lra(2), 12),
    ("direct sum", DirectSum((2, 3, 1), (Dense(), XMat(), Diagonal())), 6),
    ("direct sum, constant", DirectSum((3, 3), (Shift(1), Normalization())), 6),
    ("direct sum, nested", DirectSum((4, 6), (lra(2), DirectSum((2, 4), (Dense(), Blocks(2, XMat()))))), 10),
    ("direct sum in product", DirectSum((3, 3), (Circulant(), Triangular())) @ DCT() @ XMat(), 6),
    ("blocks", Blocks(3, Triangular()), 9),
    ("blocks of lra", Blocks(4, lra(2)), 12),
    ("blocks of affine", Blocks(6, affine((2, 3), (Normalization(), Dense()))), 12),
    ("blocks of blocks", Blocks(4, Blocks(2, Dense()) @ Shift(1) @ Diagonal()), 8),
    ("blocks of circulants", Blocks(3, Circulant()), 9),
    ("blocks of constants", Blocks(3, Shift(1)) @ Diagonal(), 6),
    ("blocks of products of constants", Blocks(4, DCT() @ Shift(1)) @ Diagonal(), 8),
    ("blocks of incomplete", Blocks(3, IncompleteTriangular(1)) @ Blocks(2, Butterfly()), 6),
    ("conjugate by normalization", Conjugate(Normalization(), XMat()), 6),
    ("conjugate by circulant", Conjugate(Circulant(), Diagonal()), 5),
    ("conjugate by product", Conjugate(Triangular() @ DCT(), lra(2)), 6),
    ("conjugate in product", Diagonal() @ Conjugate(DCT(), Normalization()), 5),
    ("blocks of conjugates", Blocks(3, Conjugate(Dense(), Triangular())), 6),
    ("three factors", Triangular() @ LowerTriangular() @ Normalization(), 5),
    ("rightmost constant", Dense() @ Shift(1), 4),
]

ALGEBRAS: list[Case] = [case for case in CASES if isinstance(case[1], MatrixAlgebra)]


def ids(cases: list[Case]) -> list[str]:
    """The names of the cases, for pytest."""
    return [name for name, _, _ in cases]


def pair(n: int, seed: int, *batch: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    """A random pair (v, h), the entries of h on unequal scales."""
    g = torch.Generator().manual_seed(seed)
    v, h, scale = (torch.randn(*batch, n, generator=g, dtype=dtype) for _ in range(3))
    return v, h * scale.exp()


def walked(
    group: Group,
    n: int,
    seed: int = 0,
    steps: int = 3,
    dtype: torch.dtype = torch.float64,
    rule: StepSize = SMOOTHED,
) -> Point:
    """A point a few random steps from the origin, with either side of the coin."""
    origin = group.init(n, generator=torch.Generator().manual_seed(seed), dtype=dtype)
    q = _elsewhere(group, origin, n, seed, dtype)
    for i in range(steps):
        for coin in (True, False):
            v, h = pair(n, 1000 * seed + 2 * i + coin, dtype=dtype)
            q = group.fit(q, v, h, lr=0.5, coin=coin, rule=rule)
    return q


def _elsewhere(group: Group, q: Point, n: int, seed: int, dtype: torch.dtype) -> Point:
    """Move the constants C of the conjugates, which no step moves, off the identity; and blocks apart."""
    match group:
        case Conjugate():
            a = _elsewhere(group.part, q["A"], n, seed, dtype)
            return {"A": a, "C": walked(group.by, n, seed + 7, dtype=dtype)}
        case Product():
            sizes = [n] * len(group.parts)
        case DirectSum():
            sizes = group.sizes
        case Kronecker():
            sizes = group.shape
        case Blocks() if tree_leaves(q):
            blocks = [
                _elsewhere(group.part, tree_map(lambda t, i=i: t[i], q), group.k, seed + i, dtype)
                for i in range(n // group.k)
            ]
            return tree_map(lambda *ts: torch.stack(ts), *blocks)
        case _:
            return q
    parts = enumerate(zip(group.parts, sizes, strict=True))
    return {str(i): _elsewhere(part, q[str(i)], size, seed + i, dtype) for i, (part, size) in parts}
