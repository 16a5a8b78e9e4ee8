"""Every ValueError of the algebra: what must hold, then what was given; and none that no test has seen."""

import ast
import traceback
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import psgd
from psgd import (
    DCT,
    Blocks,
    Butterfly,
    Conjugate,
    Dense,
    Diagonal,
    Direct,
    DirectSum,
    Identity,
    IncompleteTriangular,
    InverseFree,
    Kronecker,
    LowRank,
    Normalization,
    Padded,
    Permute,
    Positive,
    Product,
    Shift,
    Smoothed,
    Triangular,
    affine,
    band,
    fishnet,
    kaleidoscope,
    lra,
    permutation,
    two_grid,
)

ERRORS: list[tuple[Callable[[], object], str]] = [
    (lambda: Diagonal().init(0), "Diagonal() needs n >= 1, got n=0"),
    (lambda: lra(2).init(-3), "LowRank(rank=2) @ Diagonal() needs n >= 1, got n=-3"),
    (lambda: Diagonal().init(3, scale=0.0), "init needs scale > 0, got scale=0.0"),
    (lambda: Dense().init(3, scale=-2), "init needs scale > 0, got scale=-2"),
    (lambda: Dense().init(3, scale=float("nan")), "init needs scale > 0, got scale=nan"),
    (
        lambda: Shift(2).init(3, scale=2.0),
        "Shift(k=2) is orthogonal and takes no scale, got 2.0; compose it with",
    ),
    (lambda: Blocks(3, DCT()).init(3, scale=2.0), "DCT() is orthogonal and takes no scale, got 2.0"),
    (
        lambda: InverseFree((2,), (Triangular(),)),
        "InverseFree with Quadratic() needs factors Dense(), Diagonal() or Identity(), got Triangular()",
    ),
    (lambda: InverseFree((2,), (Dense(),), damping=-1.0), "InverseFree needs damping >= 0, got damping=-1.0"),
    (
        lambda: InverseFree((2,), (Dense(),), products=torch.float16),
        "products needs a dtype of the range of float32, as torch.bfloat16, got torch.float16",
    ),
    (
        lambda: InverseFree((2,), (Positive(),), Direct(), products=torch.bfloat16),
        "products are of Quadratic() and Procrustes(), which move Q, got torch.bfloat16 for Direct()",
    ),
    (
        lambda: Positive().init(2, dtype=torch.bfloat16),
        "Positive() needs numbers of at least float32, got torch.bfloat16, in which P would not stay positive",
    ),
    (
        lambda: Positive().fit(Positive().init(2), torch.ones(2), torch.ones(2)),
        "Positive() moves as a factor of InverseFree, by Direct(), and of no other group",
    ),
    (
        lambda: (InverseFree((2,), (Dense(),)) @ Diagonal()).fit(
            (InverseFree((2,), (Dense(),)) @ Diagonal()).init(2), torch.ones(2), torch.ones(2)
        ),
        "moves as a whole, and cannot be a factor of a product or a sum",
    ),
    (lambda: Smoothed(beta=1.0), "Smoothed needs 0 <= beta < 1, got beta=1.0"),
    (lambda: Smoothed(-0.1), "Smoothed needs 0 <= beta < 1, got beta=-0.1"),
    (lambda: Smoothed(float("nan")), "Smoothed needs 0 <= beta < 1, got beta=nan"),
    (lambda: Blocks(0, Dense()), "Blocks needs a block size k >= 1, got k=0"),
    (lambda: band(0), "Blocks needs a block size k >= 1, got k=0"),
    (lambda: Blocks(4, Dense()).init(10), "Blocks(4) needs n divisible by 4, got n=10"),
    (lambda: Blocks(3, Butterfly()), "Butterfly() needs an even n, got n=3"),
    (lambda: Butterfly().init(5), "Butterfly() needs an even n, got n=5; XMat() takes any"),
    (lambda: Permute((0, 2)), "Permute needs each of 0, …, n−1 once, got (0, 2)"),
    (lambda: Permute((1, 0)).init(3), "this Permute needs n=2, got n=3"),
    (lambda: (Permute((1, 0)) @ Diagonal()).init(3), "this Permute needs n=2, got n=3"),
    (lambda: DirectSum((1, 2), (Dense(),)), "DirectSum needs a size for each part, got 2 and 1"),
    (lambda: DirectSum((), ()), "DirectSum needs a size for each part, got 0 and 0"),
    (lambda: DirectSum((0, 3), (Dense(), Dense())), "DirectSum needs sizes >= 1, got sizes=(0, 3)"),
    (lambda: DirectSum((2, 3), (Dense(), Butterfly())), "Butterfly() needs an even n, got n=3"),
    (lambda: DirectSum((2, 3), (Dense(), Dense())).init(6), "DirectSum of sizes (2, 3) needs n=5, got n=6"),
    (
        lambda: IncompleteTriangular(0),
        "IncompleteTriangular needs k >= 1 whole rows, got k=0; Diagonal() has none",
    ),
    (lambda: IncompleteTriangular(4).init(4), "IncompleteTriangular(k=4) needs n > 4, got n=4; Triangular()"),
    (lambda: Kronecker((2, 3), (Dense(),)), "Kronecker needs a factor for each axis, got 2 and 1"),
    (lambda: affine(()), "Kronecker needs a factor for each axis, got 0 and 0"),
    (lambda: affine((3, 0)), "Kronecker needs axes of size >= 1, got shape=(3, 0)"),
    (lambda: two_grid(0, 4), "Kronecker needs axes of size >= 1, got shape=(0, 4)"),
    (lambda: affine((3, 4)).init(11), "Kronecker of shape (3, 4) needs n=12, got n=11"),
    (lambda: affine((3, 4), (Butterfly(), Dense())), "Butterfly() needs an even n, got n=3"),
    (
        lambda: affine((2, 2), (Identity(), DCT())).init(4, scale=2.0),
        "has no factor that takes a scale, got 2.0",
    ),
    (lambda: LowRank(-1), "LowRank needs rank >= 0, got rank=-1"),
    (lambda: lra(-1), "LowRank needs rank >= 0, got rank=-1"),
    (
        lambda: LowRank(2).init(3, scale=2.0),
        "LowRank(rank=2) = I + UVᵀ takes no scale, got 2.0; compose it with",
    ),
    (lambda: fishnet(5, levels=0), "fishnet needs levels >= 1, got levels=0"),
    (lambda: kaleidoscope(1), "kaleidoscope needs n >= 2, got n=1"),
    (lambda: kaleidoscope(8).init(7), "Blocks(4) needs n divisible by 4, got n=7"),
    (lambda: Padded(Dense(), 0), "Padded needs multiple >= 1, got multiple=0"),
    (lambda: Padded(Butterfly(), 3), "Butterfly() needs an even n, got n=3"),
    (lambda: permutation(), "permutation needs one of elements, generators, orbits, got 0 of them"),
    (
        lambda: permutation(elements=[(0,)], orbits=[(0,)]),
        "needs one of elements, generators, orbits, got 2 of them",
    ),
    (
        lambda: permutation(orbits=[(0, 1), (1, 2)]),
        "orbits need to hold each of 0, …, n−1 once, got [(0, 1), (1, 2)]",
    ),
    (lambda: permutation(orbits=[]), "orbits need to hold each of 0, …, n−1 once, got []"),
    (
        lambda: permutation(elements=[(0, 1, 2), (1, 2, 0)]),
        "elements need to form a group: (1, 2, 0) after (1, 2, 0) is",
    ),
    (lambda: permutation(elements=[(1, 0)]), "elements need to form a group: (1, 0) after (1, 0) is missing"),
    (lambda: permutation(generators=[]), "a permutation group needs at least one permutation, got none"),
    (
        lambda: permutation(generators=[(0, 0)]),
        "a permutation of 2 entries holds each of 0, …, 1 once, got (0, 0)",
    ),
    (
        lambda: permutation(generators=[(0, 1), (0, 1, 2)]),
        "a permutation of 2 entries holds each of 0, …, 1 once",
    ),
    (lambda: Product(()), "Product needs at least one factor, got none"),
    (
        lambda: (DCT() @ Shift(1)).init(3, scale=2.0),
        "DCT() @ Shift(k=1) has no factor that takes a scale, got 2.0; add",
    ),
    (lambda: Conjugate(Butterfly(), Dense()).init(3), "Butterfly() needs an even n, got n=3"),
    (lambda: Conjugate(Normalization(), Butterfly()).init(3), "Butterfly() needs an even n, got n=3"),
    (
        lambda: Conjugate(Triangular(), DCT()).init(3, scale=2.0),
        "DCT() is orthogonal and takes no scale, got 2.0",
    ),
    (lambda: DCT().init(3, scale=torch.tensor(2.0)), "DCT() is orthogonal and takes no scale, got 2.0"),
]


@pytest.mark.parametrize(("wrong", "message"), ERRORS, ids=[message for _, message in ERRORS])
def test_error_says_what_must_hold_then_what_was_given(wrong: Callable[[], object], message: str):
    with pytest.raises(ValueError) as error:
        wrong()
    assert message in str(error.value)


def test_every_error_of_the_algebra_is_tried():
    home = Path(psgd.__file__).parent
    files = [home / f"{name}.py" for name in ("group", "algebra", "linalg", "step_size")]
    files += sorted((home / "groups").glob("*.py"))
    raised = {
        (file.name, node.lineno)
        for file in files
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Raise)
    }
    tried = set()
    for wrong, _ in ERRORS:
        try:
            wrong()
        except ValueError as error:
            frame = traceback.extract_tb(error.__traceback__)[-1]
            tried.add((Path(frame.filename).name, frame.lineno))
    assert raised == tried
