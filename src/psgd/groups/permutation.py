"""General permutation subgroups: Claim 3.1."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence

from psgd.groups.blocks import Blocks
from psgd.groups.constant import Permute
from psgd.groups.dense import Dense
from psgd.groups.direct_sum import DirectSum
from psgd.groups.product import Product

Cells = list[tuple[int, ...]]


def permutation(
    *,
    elements: Iterable[Sequence[int]] | None = None,
    generators: Iterable[Sequence[int]] | None = None,
    orbits: Iterable[Sequence[int]] | None = None,
) -> Product:
    """T(x) = Σ aᵢ ∘ σᵢ(x) over a subgroup K of Sₙ (Claim 3.1), given by elements, generators or orbits.

    K is transitive on each orbit, so that the group is ⊕ GL(|orbit|) after a reordering.

    >>> permutation(generators=[(2, 1, 0)]).parts[1]
    DirectSum(sizes=(1, 2), parts=(Blocks(k=1, part=Dense()), Blocks(k=2, part=Dense())))
    """
    given = [x for x in (elements, generators, orbits) if x is not None]
    if len(given) != 1:
        raise ValueError(f"permutation needs one of elements, generators, orbits, got {len(given)} of them")
    if orbits is not None:
        cells = partition_of(orbits)
    else:
        cells = orbits_of(require_group(given[0]) if elements is not None else given[0])
    by_size: dict[int, list[tuple[int, ...]]] = defaultdict(list)
    for cell in cells:
        by_size[len(cell)].append(cell)
    order = [i for size in sorted(by_size) for cell in by_size[size] for i in cell]
    back = sorted(range(len(order)), key=order.__getitem__)
    sizes = tuple(size * len(by_size[size]) for size in sorted(by_size))
    dense = DirectSum(sizes, tuple(Blocks(size, Dense()) for size in sorted(by_size)))
    return Permute(tuple(back)) @ dense @ Permute(tuple(order))


def orbits_of(generators: Iterable[Sequence[int]]) -> Cells:
    """Return the orbits of the group that these permutations generate; σ is given as the list of σ(0), σ(1), ….

    >>> orbits_of([(1, 0, 2, 3), (0, 1, 3, 2)])
    [(0, 1), (2, 3)]
    """
    generators = _permutations(generators)
    n = len(generators[0])
    cell_of = [-1] * n
    cells: Cells = []
    for start in range(n):
        if cell_of[start] < 0:
            reached = [start]
            cell_of[start] = len(cells)
            for i in reached:  # grows while it is read: a breadth-first search
                for sigma in generators:
                    if cell_of[sigma[i]] < 0:
                        cell_of[sigma[i]] = len(cells)
                        reached.append(sigma[i])
            cells.append(tuple(sorted(reached)))
    return cells


def partition_of(orbits: Iterable[Sequence[int]]) -> Cells:
    """Return the cells, after checking that they hold each of 0, …, n−1 once."""
    cells = [tuple(cell) for cell in orbits]
    entries = sorted(i for cell in cells for i in cell)
    if not entries or entries != list(range(len(entries))):
        raise ValueError(f"orbits need to hold each of 0, …, n−1 once, got {cells}")
    return [cell for cell in cells if cell]


def require_group(elements: Iterable[Sequence[int]]) -> Cells:
    """Return the permutations, after checking that they are closed under composition: a finite group."""
    permutations = _permutations(elements)
    known = set(permutations)
    for a in permutations:
        for b in permutations:
            if tuple(a[i] for i in b) not in known:
                raise ValueError(f"elements need to form a group: {a} after {b} is missing; pass generators= instead")
    return permutations


def _permutations(given: Iterable[Sequence[int]]) -> Cells:
    permutations = [tuple(p) for p in given]
    if not permutations:
        raise ValueError("a permutation group needs at least one permutation, got none")
    n = len(permutations[0])
    for p in permutations:
        if sorted(p) != list(range(n)):
            raise ValueError(f"a permutation of {n} entries holds each of 0, …, {n - 1} once, got {p}")
    return permutations
