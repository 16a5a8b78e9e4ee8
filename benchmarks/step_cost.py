"""What a step costs beyond the gradient, in units of one copy of n float32: the least that moves n numbers at all.

Groups that act on a vector see one of length n. Where tensors matter (Kronecker factors, whole optimizers), the n
numbers are equal matrices: a larger n is a deeper network, not a wider one.

Where fitting and preconditioning are functions of their own (ours, psgd-torch), these are timed; of whole optimizers a
step with and one without an update, on given gradients, by whitening where it could be either.
"""

from __future__ import annotations

import functools
import importlib
import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from available import require
from measurement import Measurement, failure
from peers import RANK, Contestant, contestants
from timing import Task, Timing, contest, progress, silence
from torch import Tensor, nn

import psgd
from psgd.kron import Kron
from psgd.probes import generator


@dataclass(frozen=True)
class Settings:
    sizes: tuple[int, ...] = (10**5, 10**6, 10**7)
    matrix: tuple[int, int] = (250, 400)
    rounds: int = 20
    least: float = 2e-3  # seconds of a turn
    budget: float = 180.0  # seconds for each size
    compiled: tuple[int, ...] = (10**7,)
    """Sizes at which what compiles is waited for: it takes a minute for each function."""


FULL = Settings()
QUICK = Settings(sizes=(960,), matrix=(12, 20), rounds=2, least=0.0)

COLUMNS = ("fit", "precondition", "step without update", "step with update")
COPY = "copy"


@dataclass(frozen=True)
class Parts:
    """A preconditioner whose fit and precondition can be called alone; a call of `fit` is `fits` of them."""

    fit: Callable[[], object]
    precondition: Callable[[], object]
    fits: int = 2


@dataclass(frozen=True)
class Separable:
    """How to make one, from two pairs (v, h) of length n and the shape of the matrices."""

    name: str
    build: Callable[[Pairs], Parts]
    families: tuple[str, ...] = ()
    copies: int = 30  # of n float32, which it may take
    compiles: bool = False

    @property
    def ours(self) -> bool:
        return self.name.startswith("psgd ")


@dataclass(frozen=True)
class Pairs:
    """Two pairs (v, h) with h = Hv + noise, H diagonal and positive, and the shape of the n numbers' matrices."""

    n: int
    matrix: tuple[int, int]
    pairs: list[tuple[Tensor, Tensor]] = field(init=False)

    def __post_init__(self) -> None:
        rng = generator(0)
        h = torch.randn(self.n, generator=rng).exp_()
        normal = lambda: torch.randn(self.n, generator=rng)  # noqa: E731
        probes = [normal() for _ in range(2)]
        object.__setattr__(self, "pairs", [(v, h * v + 0.1 * normal()) for v in probes])

    @property
    def count(self) -> int:
        return self.n // math.prod(self.matrix)

    def matrices(self, x: Tensor) -> list[Tensor]:
        """View a vector as matrices."""
        return list(x.view(self.count, *self.matrix).unbind())


# --- ours


def our_parts(
    group: Callable[[Pairs], psgd.Group], method: str = "fit", *, compiled: bool = False
) -> Callable[[Pairs], Parts]:
    def build(given: Pairs) -> Parts:
        made = group(given)
        q = made.init(given.n, generator=generator(1))
        move, apply, lr = getattr(made, method), made.precondition, 0.1
        if compiled:  # as one graph, or with an error
            move, apply = (torch.compile(f, fullgraph=True, dynamic=False) for f in (move, apply))
            lr = torch.tensor(0.1)

        def fit() -> None:
            nonlocal q
            for (v, h), coin in zip(given.pairs, (True, False), strict=True):
                q = move(q, v, h, lr=lr, coin=coin, out=None if compiled else q)  # as the optimizer does

        ready: list[Any] = []

        def precondition() -> Tensor:
            if not ready:
                ready.append(made.ready(q))
            return apply(ready[0], given.pairs[0][1])

        return Parts(fit, precondition)

    return build


def kron(given: Pairs, rule: Kron = psgd.kron()) -> psgd.Group:  # noqa: B008 - frozen
    """Return the group of equal matrices side by side, as the optimizer makes it."""
    one = rule(given.matrix)
    return psgd.Blocks(math.prod(given.matrix), one) if given.count > 1 else one


TRIANGULAR, COARSE = psgd.kron(psgd.Triangular()), psgd.kron(psgd.Quadratic(), products=torch.bfloat16)


# --- psgd-torch, by its functions with its classes' default options


def functions() -> Any:
    return importlib.import_module("psgd_torch.psgd")


def psgd_torch_xmat(given: Pairs) -> Parts:
    f, tiny = functions(), torch.finfo(torch.float32).tiny
    a, b, g = torch.ones(given.n), torch.zeros(given.n), given.pairs[0][1]

    def fit() -> None:
        for v, h in given.pairs:
            f.update_precond_Xmat_math_(a, b, v, h, 0.1, "2nd", tiny)

    return Parts(fit, lambda: f.precond_grad_Xmat_math(a, b, g))


def psgd_torch_lra(given: Pairs) -> Parts:
    f, tiny, n = functions(), torch.finfo(torch.float32).tiny, given.n
    u, v = (torch.randn(n, RANK, generator=generator(i)) / (n * (RANK + 10)) ** 0.5 for i in range(2))
    d, g = torch.ones(n, 1), given.pairs[0][1][:, None]
    pairs = [(x[:, None], h[:, None]) for x, h in given.pairs]
    coins = tosses()

    def fit() -> None:
        for (x, h), seed in zip(pairs, coins, strict=True):
            torch.default_generator.manual_seed(seed)
            f.update_precond_UVd_math_(u, v, d, x, h, 0.1, "2nd", tiny)

    return Parts(fit, lambda: f.precond_grad_UVd_math(u, v, d, g))


def tosses() -> tuple[int, int]:
    """Return two seeds for which psgd-torch's LRA does not balance, and moves U with the one, V with the other."""
    found: dict[bool, int] = {}
    for seed in itertools.count():
        balance, coin = torch.rand(2, generator=torch.Generator().manual_seed(seed)).tolist()
        if balance >= 0.01:
            found.setdefault(coin < 0.5, seed)
        if len(found) == 2:
            return found[True], found[False]
    raise AssertionError


def psgd_torch_affine(given: Pairs) -> Parts:
    f, tiny = functions(), torch.finfo(torch.float32).tiny
    pairs = [(given.matrices(v), given.matrices(h)) for v, h in given.pairs]
    with silence():
        qs = [f.initQ(g, f.matrixizer(g), 1.0, torch.inf, torch.inf) for g in pairs[0][1]]

    def fit() -> None:
        for vs, hs in pairs:
            for (left, right), v, h in zip(qs, vs, hs, strict=True):
                f.update_precond_affine_math_(left, right, v, h, 0.1, "2nd", tiny)

    return Parts(fit, lambda: [f.precond_grad_affine_math(*q, g) for q, g in zip(qs, pairs[0][1], strict=True)])


def psgd_torch_kron(given: Pairs) -> Parts:
    f, tiny = functions(), torch.finfo(torch.float32).tiny
    pairs = [(given.matrices(v), given.matrices(h)) for v, h in given.pairs]
    qs = [f.init_Q_exprs(g, 1.0, float("inf"), 10.0) for g in pairs[0][1]]

    def fit() -> None:
        for vs, hs in pairs:
            for q, v, h in zip(qs, vs, hs, strict=True):
                f.update_precond_kron_math_(*q, v, h, 0.1, "2nd", tiny)

    return Parts(fit, lambda: [f.precond_grad_kron_math(*q, g) for q, g in zip(qs, pairs[0][1], strict=True)])


def separables() -> Iterator[Separable]:
    groups: dict[str, tuple[Callable[[Pairs], psgd.Group], str, tuple[str, ...], int]] = {
        "psgd Diagonal": (lambda given: psgd.Diagonal(), "fit", (), 10),
        "psgd XMat": (lambda given: psgd.XMat(), "fit", ("xmat",), 30),
        "psgd Butterfly": (lambda given: psgd.Butterfly(), "fit", (), 30),
        f"psgd lra({RANK})": (lambda given: psgd.lra(RANK), "fit", ("lra",), 8 * RANK),
        "psgd kron": (kron, "fit", ("kron Newton",), 30),
        "psgd kron, whitening": (kron, "whiten", ("kron whitening",), 30),
        "psgd kron, triangular": (functools.partial(kron, rule=TRIANGULAR), "fit", ("kron Newton",), 30),
        # which no peer does by default: it is shown, and held against none
        "psgd kron in bfloat16, whitening": (functools.partial(kron, rule=COARSE), "whiten", (), 30),
    }
    for name, (group, method, families, copies) in groups.items():
        yield Separable(name, our_parts(group, method), families, copies)
        if "lra" in name or "triangular" in name:  # the one is left alone at such sizes, the other solves
            continue
        yield Separable(f"{name}, compiled", our_parts(group, method, compiled=True), families, copies, compiles=True)
    both = ("kron Newton", "kron whitening")
    yield Separable("psgd-torch XMat", psgd_torch_xmat, ("xmat",))
    yield Separable(f"psgd-torch LRA({RANK})", psgd_torch_lra, ("lra",), 8 * RANK)
    yield Separable("psgd-torch Affine", psgd_torch_affine, both)
    yield Separable("psgd-torch Kron", psgd_torch_kron, both)


# --- the contest


def run(settings: Settings) -> list[Measurement]:
    """Time all of them at each size."""
    found: list[Measurement] = []
    for n in settings.sizes:
        found += at(n, settings)
    return found


def at(n: int, settings: Settings) -> list[Measurement]:
    """Time all of them at one size."""
    torch.compiler.reset()
    torch._dynamo.config.recompile_limit = 1000  # of a function that all groups have, for each of them
    given = Pairs(n, settings.matrix)
    gradients = given.matrices(given.pairs[0][1])
    tasks: dict[tuple[str, str], Task] = {}
    errors: dict[tuple[str, str], str] = {}
    entries: list[Separable | Contestant] = [*separables(), *(c for c in contestants() if c.given)]
    source, target = torch.randn(n), torch.zeros(n)
    for entry in entries:
        # among all others, since it is what they are told in
        tasks[COPY, entry.name] = Task(lambda: target.copy_(source))
        columns = COLUMNS[:2] if isinstance(entry, Separable) else COLUMNS[2:]
        if entry.compiles and n not in settings.compiled:
            errors |= {(entry.name, c): "not measured: compiling takes too long here" for c in columns}
            continue
        progress(f"n = {n}: building {entry.name}")
        try:
            with silence():
                if isinstance(entry, Separable):
                    require(4 * n * entry.copies)
                    parts = entry.build(given)
                    tasks[entry.name, "fit"] = Task(parts.fit, parts.fits)
                    tasks[entry.name, "precondition"] = Task(parts.precondition)
                else:
                    require(4 * n * 8 * RANK)
                    model = nn.ParameterList(torch.zeros_like(g) for g in gradients)
                    tasks |= steps(entry, model, gradients)
        except Exception as e:
            errors |= {(entry.name, c): failure(e) for c in columns}
    times = contest(tasks, rounds=settings.rounds, least=settings.least, budget=settings.budget)
    times |= {key: Timing(None, error=error) for key, error in errors.items()}
    copies = [times.pop(key) for key in list(times) if key[0] == COPY]
    copy = min(copies, key=lambda t: t.seconds or math.inf)
    by_name = {entry.name: entry for entry in entries}
    table, unit = f"Step cost, n = {n:.0e}".replace("e+0", "e"), "copies"
    found = [Measurement(table, "copy of n float32", c, 1.0, unit, copy.seconds, copy.rounds) for c in COLUMNS[:1]]
    for (name, column), time in times.items():
        entry, cost = by_name[name], time.over(copy)
        found.append(
            Measurement(
                table, name, column, cost, unit, time.seconds, time.rounds, time.error, entry.families, entry.ours
            )
        )
    return found


def steps(entry: Contestant, model: nn.Module, gradients: list[Tensor]) -> dict[tuple[str, str], Task]:
    """Return the steps of an optimizer on given gradients: with an update first, so that there is something to use."""
    runner = entry.build(model)
    gradients = [g.clone() for g in gradients]  # of its own: Muon overwrites them

    def step(updating: bool) -> Callable[[], None]:
        def make() -> None:
            runner.due(updating)
            runner.step(gradients)

        return make

    without, with_update = COLUMNS[2:]
    tasks = {(entry.name, with_update): Task(step(True))} if entry.updates else {}
    return tasks | {(entry.name, without): Task(step(False))}
