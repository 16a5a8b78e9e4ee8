"""Where the fit goes: P → |H|⁻¹ from exact pairs, (H² + E[ε²])^(−½) from noisy ones, and how near at which rate.

The error is ‖|H|^½ P |H|^½ − I‖, the relative one in every direction alike. Which probes v a test draws is part of
what it says. The pair (v, Hv) is exact for every v, but how fast the fit is, and for indefinite H what it converges
to, depends on their covariance Σ:

- single v ~ N(0, I). The rate of an eigen-direction is proportional to λᵢ/λmax: a condition number of 10⁶ would take
  some 10⁷ steps. For definite H the residual vanishes at the optimum with every pair, else only on average.
- own probes, v = Qᵀu ~ N(0, P), u ~ N(0, I): the rate does not depend on the condition number. For definite H only:
  the optimum is where P H Σ H P = Σ, and Σ = P leaves it to every P with (P H)² = I.
- n orthonormal v, a batch: Σ vvᵀ = I exactly, so that the residual vanishes at the optimum of indefinite H, too.
- n orthonormal v, mapped by |H|^(−½): that of the oracle, for indefinite H of a large condition number. Any Σ that
  commutes with H gives P = |H|⁻¹; this one has equal rates.
"""

from collections.abc import Callable

import pytest
import torch
from cases import walked
from torch import Tensor

from psgd import (
    Blocks,
    Butterfly,
    Circulant,
    Dense,
    Diagonal,
    Group,
    IncompleteTriangular,
    LowerTriangular,
    Normalization,
    Normalized,
    Point,
    Scalar,
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

N = 10
CONSTANT, SMOOTHED = (lambda t: 0.9), Smoothed()
WHOLE = [Dense(), Triangular(), LowerTriangular()]  # every P > 0 is QᵀQ of each


def annealed(steps: int) -> Callable[[int], float]:
    """μ from 0.5 down to 0.0002 in so many steps."""
    return lambda t: 0.5 * 0.0004 ** (t / steps)


class Problem:
    """A symmetric H, with |H|^½ to measure and a generator to draw probes with."""

    def __init__(self, size: Tensor, basis: Tensor, negative: int = 0) -> None:
        sign = torch.ones_like(size)
        sign[1 : 2 * negative : 2] = -1
        self.h, self.root = ((basis * d) @ basis.mT for d in (size * sign, size.sqrt()))
        self.n, self.generator = len(size), torch.Generator().manual_seed(1)

    @classmethod
    def of(cls, condition: float, negative: int = 0, n: int = N) -> "Problem":
        """Eigenvalues spaced evenly in their logarithm, in a random basis."""
        basis = torch.linalg.qr(torch.randn(n, n, generator=torch.Generator().manual_seed(0), dtype=torch.float64))[0]
        return cls(torch.logspace(-0.5, 0.5, n, base=condition, dtype=torch.float64), basis, negative)

    @classmethod
    def solved_by(cls, q: Tensor, negative: int = 0) -> "Problem":
        """The one with |H|⁻¹ = QᵀQ."""
        eig = torch.linalg.eigh(q.mT @ q)
        return cls(1 / eig.eigenvalues, eig.eigenvectors, negative)

    def error(self, group: Group, q: Point) -> float:
        a = group.matrix(q, self.n) @ self.root
        return float(torch.linalg.matrix_norm(a.mT @ a - torch.eye(self.n, dtype=torch.float64), 2))

    def normal(self, *batch: int) -> Tensor:
        return torch.randn(*batch, self.n, generator=self.generator, dtype=torch.float64)

    def single(self, group: Group, q: Point) -> Tensor:
        return self.normal()

    def own(self, group: Group, q: Point) -> Tensor:
        return group.apply_t(q, self.normal())

    def orthonormal(self, group: Group, q: Point) -> Tensor:
        return torch.linalg.qr(self.normal(self.n))[0]

    def oracle(self, group: Group, q: Point) -> Tensor:
        return self.orthonormal(group, q) @ torch.linalg.inv(self.root)

    def fit(
        self,
        group: Group,
        probes: Callable[[Group, Point], Tensor],
        steps: int,
        lr: Callable[[int], float] = CONSTANT,
        rule: StepSize = SMOOTHED,
    ) -> Point:
        """Fit from the identity with pairs (v, Hv) until the error is 1e-3, or for so many steps."""
        q = group.init(self.n, generator=self.generator, dtype=torch.float64)
        for t in range(steps):
            v = probes(group, q)
            q = group.fit(q, v, v @ self.h, lr=lr(t), coin=t % 2 == 0, rule=rule)
            if t % 50 == 49 and self.error(group, q) < 1e-3:
                break
        return q


of_whole_groups = pytest.mark.parametrize("group", WHOLE, ids=repr)


@of_whole_groups
@pytest.mark.parametrize(("condition", "steps"), [(1e1, 1000), pytest.param(1e3, 60_000, marks=pytest.mark.slow)])
def test_definite_h_single_probes_constant_rate(group: Group, condition: float, steps: int):
    problem = Problem.of(condition)
    assert problem.error(group, problem.fit(group, problem.single, steps)) < 1e-3


@of_whole_groups
@pytest.mark.parametrize("condition", [1e1, 1e3, 1e6])
def test_definite_h_of_any_condition_own_probes_constant_rate(group: Group, condition: float):
    problem = Problem.of(condition)
    assert problem.error(group, problem.fit(group, problem.own, 1000)) < 1e-3


@of_whole_groups
@pytest.mark.parametrize("condition", [1e1, 1e6])
def test_definite_h_of_any_condition_own_probes_annealed_rate(group: Group, condition: float):
    problem, steps = Problem.of(condition), 1600
    q = problem.fit(group, problem.own, steps, annealed(steps), Normalized())
    assert problem.error(group, q) < 1e-3


@of_whole_groups
@pytest.mark.parametrize("negative", [1, 3, 5])
def test_indefinite_h_orthonormal_probes(group: Group, negative: int):
    problem = Problem.of(1e1, negative)
    assert problem.error(group, problem.fit(group, problem.orthonormal, 400)) < 1e-3


@of_whole_groups
@pytest.mark.parametrize("condition", [1e3, 1e6])
def test_indefinite_h_of_any_condition_oracle_probes(group: Group, condition: float):
    problem = Problem.of(condition, negative=3)
    assert problem.error(group, problem.fit(group, problem.oracle, 600)) < 1e-3


def test_own_probes_leave_indefinite_h_undecided():
    """With AᵀHA = H and A not orthogonal, P = A|H|⁻¹Aᵀ is far from |H|⁻¹, yet where Σ = P expects no step."""
    problem, turn = Problem.of(1e1, negative=3), 0.7
    eig = torch.linalg.eigh(problem.h)
    size = eig.eigenvalues.abs()
    boost = torch.eye(N, dtype=torch.float64)  # a hyperbolic turn of the first (negative) and the last (positive) axis
    boost[[0, -1], [0, -1]] = torch.tensor(turn, dtype=torch.float64).cosh()
    boost[[0, -1], [-1, 0]] = torch.tensor(turn, dtype=torch.float64).sinh()
    a = (eig.eigenvectors / size.sqrt()) @ boost @ (eig.eigenvectors * size.sqrt()).mT
    torch.testing.assert_close(a.mT @ problem.h @ a, problem.h)

    q = Dense().init(N, dtype=torch.float64) | {"Q": torch.linalg.inv(problem.root) @ a.mT}
    assert problem.error(Dense(), q) > 1
    v = Dense().apply_t(q, problem.orthonormal(Dense(), q))
    torch.testing.assert_close(Dense().fit(q, v, v @ problem.h, lr=0.5)["Q"], q["Q"])


# --- groups that hold the solution


STRUCTURED: dict[str, tuple[Group, int]] = {
    "diagonal": (Diagonal(), 6),
    "scalar": (Scalar(), 4),
    "xmat even": (XMat(), 6),
    "xmat odd": (XMat(), 7),
    "butterfly": (Butterfly(), 6),
    "circulant even": (Circulant(), 6),
    "circulant odd": (Circulant(), 5),
    "blocks": (Blocks(3, Dense()), 6),
    "permutation": (permutation(orbits=[(0, 3, 5), (1,), (4, 2)]), 6),
    "fishnet": (fishnet(5), 5),
    "kronecker": (affine((2, 3)), 6),
    "kronecker, diagonal": (affine((3, 3), (Dense(), Diagonal())), 9),
    "kronecker, order 3": (affine((2, 3, 2)), 12),
    "normalization": (Normalization(), 5),
    "incomplete triangular": (IncompleteTriangular(2), 6),
}

FACTORED: dict[str, tuple[Group, int]] = {
    "dct": (dct(XMat()), 7),
    "two grid": (two_grid(3, 2), 6),
    "band": (band(4), 8),
    "kaleidoscope": (kaleidoscope(7), 7),
}


@pytest.mark.parametrize(("group", "n"), STRUCTURED.values(), ids=STRUCTURED)
@pytest.mark.parametrize("seed", [1, 2])
def test_a_group_that_holds_the_solution_finds_it(group: Group, n: int, seed: int):
    target = group.matrix(walked(group, n, seed), n)
    definite, indefinite = Problem.solved_by(target), Problem.solved_by(target, negative=n // 3)
    assert definite.error(group, definite.fit(group, definite.single, 500)) < 1e-3
    assert indefinite.error(group, indefinite.fit(group, indefinite.orthonormal, 200)) < 1e-3


@pytest.mark.parametrize(("group", "n"), FACTORED.values(), ids=FACTORED)
def test_a_product_that_holds_the_solution_finds_it(group: Group, n: int):
    problem = Problem.solved_by(group.matrix(walked(group, n), n), negative=n // 3)
    assert problem.error(group, problem.fit(group, problem.orthonormal, 600)) < 1e-3


@pytest.mark.parametrize(("form", "rank", "n"), [(lra, 1, 8), (lra_duv, 1, 8), (lra, 2, 20), (lra_duv, 2, 20)])
@pytest.mark.parametrize("negative", [0, 3])
def test_low_rank_plus_diagonal_finds_a_solution_of_its_rank(
    form: Callable[[int], Group], rank: int, n: int, negative: int
):
    g = torch.Generator().manual_seed(0)
    u, v = (torch.randn(2, n, rank, generator=g, dtype=torch.float64) / n**0.5).unbind()
    d = 0.5 + torch.rand(n, generator=g, dtype=torch.float64)
    problem = Problem.solved_by((torch.eye(n) + u @ v.mT) * d, negative)
    assert problem.error(form(rank), problem.fit(form(rank), problem.orthonormal, 1500)) < 1e-3


# --- H that moves, and noise


@pytest.mark.parametrize("growth", [1e-3, 1e-2])
def test_the_fit_tracks_a_drifting_h(growth: float):
    """H ← H + growth·uuᵀ at every step. A tenth is far above the lag that remains, far below an untracked growth."""
    problem, group = Problem.of(1e1), Dense()
    q, start, errors = group.init(N, dtype=torch.float64), problem.h, []
    for t in range(2000):
        u, v = problem.normal(2)
        problem.h = problem.h + growth * torch.outer(u, u)
        q = group.fit(q, v, v @ problem.h, lr=0.9)
        if t >= 500 and t % 50 == 0:
            eig = torch.linalg.eigh(problem.h)
            problem.root = (eig.eigenvectors * eig.eigenvalues.sqrt()) @ eig.eigenvectors.mT
            errors.append(problem.error(group, q))
    assert torch.linalg.eigvalsh(problem.h)[0] > 5 * torch.linalg.eigvalsh(start)[0]
    assert max(errors) < 0.1


def noisy(n: int) -> tuple[Problem, Tensor]:
    """(The problem that (H² + K²)^(−½) solves, a batch of H ± K): ε = ±K has E[ε²] = K²."""
    h, k = Problem.of(1e1, negative=2, n=n).h, Problem.of(3, negative=2, n=n).h.flip(0, 1) / 2
    eig = torch.linalg.eigh(h @ h + k @ k)
    return Problem(eig.eigenvalues.sqrt(), eig.eigenvectors), torch.stack((h + k, h - k))


@of_whole_groups
def test_the_limit_under_noise_is_the_damped_one(group: Group):
    """Every pair of a batch with both signs of ε and n orthonormal v: the expectation itself."""
    problem, sampled = noisy(N)
    q = group.init(N, dtype=torch.float64)
    for _ in range(400):
        v = problem.orthonormal(group, q).expand(2, N, N)
        q = group.fit(q, v, v @ sampled, lr=0.9)
    assert problem.error(group, q) < 1e-3


def test_the_limit_under_sampled_noise_is_the_damped_one():
    """Single pairs, μ = 0.5 → 0.005, P averaged over the later half of T steps.

    T pairs know an n×n second moment to about √(n/T), and P is as uncertain as the moments of v and h together.
    """
    n, steps, group = 5, 4000, Dense()
    problem, sampled = noisy(n)
    q, mean = group.init(n, dtype=torch.float64), torch.zeros(n, n, dtype=torch.float64)
    for t in range(steps):
        v = problem.normal()
        sign = int(torch.randint(2, (), generator=problem.generator))
        q = group.fit(q, v, v @ sampled[sign], lr=0.5 * 0.01 ** min(1, 2 * t / steps))
        if t >= steps // 2:
            mean += q["Q"].mT @ q["Q"] / (steps - steps // 2)
    error = torch.linalg.matrix_norm(problem.root @ mean @ problem.root - torch.eye(n), 2)
    assert error < 3 * (n / steps) ** 0.5


# --- what a constant rate leaves


def stationary(problem: Problem, rule: StepSize, lr: float, steps: int = 1500) -> float:
    """The median error over the later two thirds of a run of single probes."""
    group, errors = Dense(), []
    q = group.init(N, dtype=torch.float64)
    for t in range(steps):
        v = problem.normal()
        q = group.fit(q, v, v @ problem.h, lr=lr, rule=rule)
        if t >= steps // 3 and t % 10 == 0:
            errors.append(problem.error(group, q))
    return float(torch.tensor(errors).median())


def test_normalized_leaves_an_error_proportional_to_the_rate():
    problem = Problem.of(1e1)
    assert stationary(problem, Normalized(), 0.4) == pytest.approx(4 * stationary(problem, Normalized(), 0.1), rel=0.3)


def test_smoothed_leaves_none_for_definite_h():
    problem = Problem.of(1e1)
    group = Dense()
    q = group.init(N, dtype=torch.float64)
    for _ in range(2500):
        v = problem.normal()
        q = group.fit(q, v, v @ problem.h, lr=0.9)
    assert problem.error(group, q) < 1e-12


def test_smoothed_leaves_the_root_of_the_rate_for_indefinite_h():
    """At the optimum a = M b with an involution M ≠ I: each pair has a residual, and only the average vanishes."""
    problem = Problem.of(1e1, negative=3)
    assert stationary(problem, SMOOTHED, 0.4) == pytest.approx(2 * stationary(problem, SMOOTHED, 0.1), rel=0.3)


@pytest.mark.parametrize("group", [lra(3), lra_duv(3), affine((4, 5)), dct(XMat()), two_grid(5, 4)], ids=repr)
@pytest.mark.parametrize("rule", [Normalized(), SMOOTHED], ids=repr)
def test_factors_that_move_together_stay_near_the_optimum_at_any_rate(group: Group, rule: StepSize):
    """E[c] = tr(PH² + P⁻¹) ≥ 2 tr|H|. With μ for each factor in place of a share, Normalized fails on all of these."""
    problem = Problem.of(1e1, negative=6, n=20)
    q, costs = group.init(20, generator=problem.generator, dtype=torch.float64), []
    for t in range(600):
        v = problem.normal()
        coin = bool(torch.randint(2, (), generator=problem.generator))
        q = group.fit(q, v, v @ problem.h, lr=0.99, coin=coin, rule=rule)
        if t >= 200 and t % 20 == 0:
            a = group.matrix(q, 20)
            costs.append((a @ problem.h).square().sum() + torch.linalg.inv(a).square().sum())
    assert torch.stack(costs).median() < 4 * problem.root.square().sum()  # twice the bound
