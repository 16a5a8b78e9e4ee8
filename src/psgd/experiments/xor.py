"""Delayed XOR with a recurrent network: the paper's table of success rates, its half for the RNN.

A sequence holds random signs; two of them in its first half are marked. Is their product −1? Knowing one of the two is
of no help, and the answer is due at the end, so that the loss stays at log 2 until all is understood. Success is a loss
below 0.1 on one of the fresh batches of 128 within 100,000 iterations. The paper's rates for lengths 32, 55, 64, 112:

PSGD LRA 1 1 1 1; AdaHessian, K-FAC, Hessian-free, SGD, AdaBelief, Adan 1 0 0 0; Shampoo 0 0 0 0; Apollo never. (Adam is
ours.) The LSTM is in `xor-lstm`, the study of the rank in `xor-rank`.

`psgd-lra` has the authors' settings: rank 10, both rates 0.01 (our precond_lr is 2μ₂, which two factors share), steps
clipped at norm 1, no momentum, Q₀ = I, an exact Hessian product in every step. `psgd-lra-ours` has μ₂ = 0.05, a rate of
0.03 and momentum 0.9: of about ten settings that were tried on seed 0 at lengths 32 and 55 it took the fewest
iterations, so that its seed 0 is not an independent test. It is for length 32 alone: on longer ones it often loses what
it has learned (within 10,000 iterations it solved 55 and 64 on one seed of five each).
The settings of the other methods are not known: rates are tuned at length 32, and all else is as in their packages.

All have one budget: so many iterations, and no more gradients and products than PSGD evaluates in them, two for each.
That only ends the runs of Hessian-free, which takes four and more in an iteration. (Given all 10,000 iterations at
length 32, 65,586 evaluations, one run of it was at a loss of 0.59.)
"""

from __future__ import annotations

import functools
import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import psgd
from psgd.experiments.experiment import Preset, Record, Result, State
from psgd.experiments.methods import Loss, Preconditioned, Stepper, method
from psgd.experiments.recurrent import LSTM, RNN, PlainLSTM, PlainRNN
from psgd.experiments.show import Plot, Points, Table, band, spread
from psgd.experiments.training import evaluations, restore, snapshot
from psgd.experiments.tune import FILE, RANDOM, read, tuned
from psgd.probes import generator

TITLE = "Delayed XOR, RNN"

LENGTHS = (32, 55, 64, 112)
SOLVED = 0.1
"""A batch with a loss below this is success."""
STUCK = 0.99 * math.log(2)
"""A mean loss above this is that of a coin."""
EVERY = 100
"""Iterations between records."""

PAPER: dict[str, dict[str, Sequence[float]]] = {
    "rnn": {
        "psgd-lra": (1, 1, 1, 1),
        "adahessian": (1, 0, 0, 0),
        "kfac": (1, 0, 0, 0),
        "hessian-free": (1, 0, 0, 0),
        "shampoo": (0, 0, 0, 0),
        "sgd": (1, 0, 0, 0),
        "adabelief": (1, 0, 0, 0),
        "adan": (1, 0, 0, 0),
        "apollo": (0, 0, 0, 0),
    },
    "lstm": {
        "psgd-lra": (1, 1, 1, 1),
        "adahessian": (1, 1, 0.8, 0),
        "kfac": (1, 0, 0, 0),
        "hessian-free": (1, 0.6, 0, 0),
        "shampoo": (1, 0.8, 0.6, 0),
        "sgd": (1, 0, 0, 0),
        "adabelief": (1, 0, 0, 0),
        "adan": (1, 0, 0, 0),
        "apollo": (0, 0, 0, 0),
    },
}
"""Success rates by length, of the paper's table; for Apollo, of its text."""

METHODS = ("psgd-lra", "psgd-lra-ours", *(m for m in PAPER["rnn"] if m != "psgd-lra"), "adam")
BUDGETS = {32: 10_000, 55: 15_000, 64: 15_000, 112: 3_000}
"""Iterations by length on a CPU, so that all take about an hour on two cores. Runs that were longer (20,000 at 55 and
64, 10,000 at 112; one of 40,000 with the authors' settings at 112, still at log 2) had no success later than that."""
EVALUATIONS = 2
"""Gradients and products for each iteration of the budget: what PSGD takes. Who takes more has fewer iterations."""


@dataclass(frozen=True)
class Config:
    """One way to train a network on sequences of one length."""

    method: str = "psgd-lra"
    lr: float = 0.01
    net: str = "rnn"
    length: int = 32
    rank: int = field(default=10, metadata={"least": 0})
    """Of LRA."""
    iterations: int = 100_000
    hidden: int = 30
    batch: int = 128


def cells(preset: Preset) -> list[Config]:
    """Return one for each method and length, all of one budget."""
    if preset == "quick":
        return [Config(m, learning_rate(m), length=4, iterations=20, hidden=8, batch=32) for m in METHODS]
    if preset == "paper":
        return [Config(m, learning_rate(m), length=n) for m in METHODS for n in LENGTHS]
    return [
        Config(m, learning_rate(m), length=n, iterations=BUDGETS[n])
        for m in METHODS
        for n in (LENGTHS[:1] if m == "psgd-lra-ours" else LENGTHS)
    ]


def seeds(preset: Preset) -> range:
    """Return the paper's ten, or fewer."""
    return range({"quick": 1, "cpu": 5, "paper": 10}[preset])


def seeds_for(config: Config, preset: Preset) -> range:
    """Return one on a CPU for all but PSGD: most of their runs take the whole budget."""
    return range(5 if config.method in PRECONDITIONERS else 1) if preset == "cpu" else seeds(preset)


def learning_rate(method: str, experiment: str = "xor") -> float:
    """Return a fixed one for PSGD, and a tuned one for the others."""
    fixed = {"psgd-lra": 0.01, "psgd-lra-ours": 0.03}
    return fixed.get(method) or tuned(experiment, method) or math.sqrt(math.prod(lrs(method)))


def lrs(name: str) -> tuple[float, float]:
    """Return where to look for the rate of a method."""
    if name in PRECONDITIONERS:
        known = ", ".join(m for m in METHODS if m not in PRECONDITIONERS)
        raise ValueError(f"a rate is tuned for one of {known}, since PSGD has fixed ones, got {name!r}")
    return method(name).lr


def tuning(method: str) -> Config:
    """Return a shorter run of length 32."""
    return Config(method, iterations=4000)


def score(result: Result) -> float:
    """Return the fraction of the budget that success took; without it, 1 plus the loss in the last quarter."""
    if solved(result):
        return iterations(result) / result.config.iterations
    late = [r["loss"] for r in result.records if r["step"] > 0.75 * iterations(result)]
    return math.inf if not late or None in late else 1 + statistics.fmean(late)


# --- one cell


def run(config: Config, seed: int, state: State | None = None) -> Iterator[Record]:
    """Train to success, a loss that is not finite, or the end; a record has the mean loss since the one before."""
    model, stepper = start(config, seed)
    done = 0
    losses: list[float] = []
    if state is not None:
        restore(state, model, stepper)
        done, losses = config.iterations if state["ended"] else state["done"], state["losses"]
    for i in range(done + 1, config.iterations + 1):
        loss = Loss(model, *sequences(config.length, config.batch, seed, i), F.binary_cross_entropy_with_logits)
        losses.append(float(stepper.step(loss)))
        success, failure = losses[-1] < SOLVED, not math.isfinite(losses[-1])
        spent = stepper.gradients + stepper.products >= EVALUATIONS * config.iterations
        ended = success or failure or spent
        values: dict[str, Any] = {}
        if ended or i % EVERY == 0 or i == config.iterations:
            values = {"loss": None if failure else statistics.fmean(losses), "solved": int(success)}
            values |= evaluations(stepper)
            losses = []
        yield Record(i, values, functools.partial(snapshot, model, stepper, done=i, ended=ended, losses=losses))
        if ended:
            return


def sequences(length: int, batch: int, *numbers: int) -> tuple[Tensor, Tensor]:
    """Return random signs with marks, (batch, time, 2), and whether the two marked signs differ, (batch, 1).

    One mark is in the first tenth, the other between that and the half; a function of the numbers alone.

    >>> x, y = sequences(32, 128, 0)
    >>> x.shape, y.shape
    (torch.Size([128, 32, 2]), torch.Size([128, 1]))
    """
    rng = generator(*numbers)
    signs = 2.0 * torch.randint(0, 2, (batch, length), generator=rng) - 1
    u = torch.rand(batch, 2, generator=rng)
    places = (length * (torch.tensor([0.0, 0.1]) + u * torch.tensor([0.1, 0.4]))).long()
    marks = torch.zeros(batch, length).scatter_(1, places, 1.0)
    return torch.stack((signs, marks), 2), (1 - signs.gather(1, places).prod(1, keepdim=True)) / 2


def start(config: Config, seed: int) -> tuple[nn.Module, Stepper]:
    """Return the network at its start, which all methods share, and its optimizer."""
    nets = {"rnn": (RNN, PlainRNN), "lstm": (LSTM, PlainLSTM)}
    if config.net not in nets:
        raise ValueError(f"the field net is one of {', '.join(nets)}, got {config.net!r}")
    kind = nets[config.net][config.method == "kfac"]  # which looks at layers
    model = kind(2, config.hidden, generator(seed))
    if config.method not in PRECONDITIONERS:
        return model, method(config.method).build(model, config.lr, seed)
    optimizer = psgd.PSGD(
        model.parameters(), psgd.lra(config.rank), lr=config.lr, seed=seed, **PRECONDITIONERS[config.method](config)
    )
    return model, Preconditioned(optimizer)


def authors(config: Config) -> dict[str, Any]:
    """Return the settings of the paper."""
    return {
        "momentum": 0.0,
        "precond_lr": 2 * 0.01 if config.rank else 0.01,  # with rank 0 one factor moves: none shares μ₂ with it
        "precond_prob": 1.0,
        "max_rms": None,
        "max_norm": 1.0,
        "curvature": psgd.hessian,
        "rule": psgd.Normalized(),
        "init_scale": 1.0,
    }


def ours(config: Config) -> dict[str, Any]:
    """Return settings that needed fewer iterations in trials on seed 0."""
    return {**authors(config), "momentum": 0.9, "precond_lr": 0.1 if config.rank else 0.05}


PRECONDITIONERS: dict[str, Callable[[Config], dict[str, Any]]] = {"psgd-lra": authors, "psgd-lra-ours": ours}
"""The settings of PSGD."""


# --- what came out


def solved(result: Result) -> bool:
    """Return whether a run ended with success."""
    return bool(result.records) and bool(result.records[-1]["solved"])


def iterations(result: Result) -> int:
    """Return how many a run took."""
    return result.records[-1]["step"]


def finished(results: Sequence[Result]) -> list[Result]:
    """Return the runs with records, by method, length and rank: some were added later."""

    def place(r: Result) -> tuple[int, ...]:
        return METHODS.index(r.config.method), r.config.length, r.config.rank

    return sorted((r for r in results if r.records), key=place)


def grouped(results: Sequence[Result], *fields: str) -> dict[tuple[Any, ...], list[Result]]:
    """Return runs by fields of their configs, in the order of the results."""
    found: dict[tuple[Any, ...], list[Result]] = {}
    for r in finished(results):
        found.setdefault(tuple(getattr(r.config, f) for f in fields), []).append(r)
    return found


def rate(results: Sequence[Result]) -> str:
    """Return how many of some runs had success."""
    return f"{sum(map(solved, results))} of {len(results)}"


def tables(results: Sequence[Result]) -> list[Table]:
    """Return success rates beside the paper's, and what success took."""
    by_cell = grouped(results, "method", "length")
    if not by_cell:
        return []
    lengths = sorted({length for _, length in by_cell})
    rows = []
    for (name,), found in grouped(results, "method").items():
        row: list[Any] = [name]
        for length in lengths:
            here = by_cell.get((name, length))
            paper = PAPER[found[0].config.net].get(name)
            row += [rate(here) if here else None, paper[LENGTHS.index(length)] if paper and length in LENGTHS else None]
        rows.append(row)
    columns = ["method", *(text for length in lengths for text in (f"{length}", f"{length}, paper"))]
    by_length = sorted(grouped(results, "length").items())
    budgets = {length: max(r.config.iterations for r in here) for (length,), here in by_length}
    several = len(set(budgets.values())) > 1
    within = ", ".join(f"{n:,}" for n in (budgets.values() if several else set(budgets.values())))
    note = (
        f"Runs with success within {within} iterations{', by length,' if several else ''} and within {EVALUATIONS} "
        "gradients or products for each of them; the paper's rates are of 100,000 iterations."
    )
    return [Table("Success", columns, rows, note), costs(by_cell)]


def costs(by_cell: dict[tuple[Any, ...], list[Result]]) -> Table:
    """Return what each cell took."""
    rows = [
        (
            *key,
            rate(found),
            spread([iterations(r) for r in found if solved(r)]),
            spread([r.last("loss") for r in found if not solved(r) and r.series("loss")]),
            spread([r.last("gradients") for r in found]),
            spread([r.last("products") for r in found]),
            spread([1000 * r.seconds / iterations(r) for r in found]),
            found[0].config.lr,
        )
        for key, found in by_cell.items()
    ]
    first = ("method", "length") if len(next(iter(by_cell))) == 2 else ("rank",)
    columns = (*first, "success", "iterations to success", "loss where none", "gradients", "products", "ms", "lr")
    return Table("Cost", columns, rows, "ms is the time of an iteration; ± is over seeds.")


def plots(results: Sequence[Result]) -> list[Plot]:
    """Return the loss by iteration for each length, and the iterations to success by length."""
    found = [
        Plot(f"Length {length}", "iteration", "loss, mean of 100 iterations", lines(here, "method"), y_log=True)
        for (length,), here in grouped(results, "length").items()
    ]
    marks = []
    for (name,), here in grouped(results, "method").items():
        won = [r for r in here if solved(r)]
        if won:
            marks.append(Points(name, [r.config.length for r in won], [iterations(r) for r in won]))
    return [*found, Plot("Iterations to success", "length", "iterations", marks, y_log=True)] if marks else found


def lines(results: Sequence[Result], field: str) -> list[Any]:
    """Return a curve of the loss for each value of a field; a run that has ended stays where it is for the others."""
    found = []
    for (value,), here in grouped(results, field).items():
        end = max(map(iterations, here))
        found.append(band(str(value), [prolonged(r, end) for r in here]))
    return found


def prolonged(result: Result, end: int) -> tuple[list[int], list[float]]:
    """Return the loss by iteration, with the last one up to an end.

    >>> run = Result(Config(), 0, [{"step": 100, "loss": 0.7, "solved": 0}, {"step": 130, "loss": 0.2, "solved": 1}])
    >>> prolonged(run, 330)
    ([100, 200, 300], [0.7, 0.2, 0.2])
    """
    known = [(math.ceil(r["step"] / EVERY) * EVERY, r["loss"]) for r in result.records if r["loss"] is not None]
    last, loss = known[-1] if known else (end, math.nan)
    known += [(step, loss) for step in range(last + EVERY, end + 1, EVERY)]
    return [step for step, _ in known], [loss for _, loss in known]


def remarks(results: Sequence[Result]) -> str:
    """Compare with the aims and with the paper."""
    by_cell = grouped(results, "method", "length")
    said = []
    for (name, length), found in by_cell.items():
        if name in PRECONDITIONERS and length in AIMS:
            shorter = [r for (m, n), runs in by_cell.items() if m == name and n < length for r in runs]
            said.append(f"- `{name}` at length {length}: {rate(found)}{verdict(found, AIMS[length], shorter)}.")
    others = {key: found for key, found in by_cell.items() if key[0] not in PRECONDITIONERS}
    won = [
        f"`{name}` at {length} ({rate(found)})" for (name, length), found in others.items() if any(map(solved, found))
    ]
    if others:
        said.append(f"- With success among the others: {', '.join(won) or 'none'}.")
    differ = [
        f"`{name}` at {length}"
        for (name, length), found in by_cell.items()
        if name in (paper := PAPER[found[0].config.net])
        and length in LENGTHS
        and round(sum(map(solved, found)) / len(found)) != round(paper[name][LENGTHS.index(length)])
    ]
    if by_cell:
        said.append(f"- On the other side of one half than the paper: {', '.join(differ) or 'none'}.")
    if any(name == "psgd-lra-ours" for name, _ in by_cell):
        said.append(
            "- `psgd-lra-ours` was chosen by trials on seed 0 at lengths 32 and 55; the authors' settings were not "
            "chosen here, and the others' rates by `psgd tune`, on a seed that is not reported."
        )
    said += trials(results)
    short = [r for r in finished(results) if r.config.iterations < 100_000]
    if short:
        budgets = ", ".join(f"{n:,}" for n in sorted({r.config.iterations for r in short}))
        said.append(
            f"- The budget here is {budgets} iterations where the paper has 100,000: more may have success later."
        )
    return "\n".join(said)


AIMS = {32: 4, 55: 4, 64: 4, 112: 3}
"""How many of five seeds PSGD should solve with the RNN."""


LONGER = "in runs of 20,000 iterations there was no success after the 15,000th (xor.py)"
EARLIER = {
    55: f"runs of these seeds on another machine solved 3 (results/README.md); {LONGER}",
    64: f"runs of these seeds on another machine solved 4 (results/README.md); {LONGER}",
    112: "runs of 10,000 iterations, and one of 40,000 with the authors' settings, had no success either (xor.py)",
}
"""What is recorded of runs of PSGD with the RNN that are not kept, and where."""


def verdict(found: Sequence[Result], aim: int, shorter: Sequence[Result] = ()) -> str:
    """Say whether runs with the RNN meet an aim, and if not, how far they have come, and what was against them."""
    config = found[0].config
    if config.net != "rnn":
        return ""
    if 5 * sum(map(solved, found)) / len(found) >= aim:
        return f", meets the aim of {aim} of 5"
    failed = [r for r in found if not solved(r)]
    stuck = sum(not r.series("loss") or r.last("loss") > STUCK for r in failed)
    begun = "at log 2 still, where nothing is understood" if stuck else "on their way down from log 2"
    took = [iterations(r) for r in shorter if solved(r)]
    reasons = [f"with {len(found)} seeds, one is {100 / len(found):.0f} % of the rate"]
    if config.iterations < 100_000:
        reasons.append(f"the budget is {config.iterations:,} iterations where the paper has 100,000")
    if took and min(took) > config.iterations:
        reasons.append(f"success on shorter sequences took {min(took):,} and more")
    before = EARLIER.get(config.length) if config.method == "psgd-lra" else None
    return (
        f", misses the aim of {aim} of 5: without success, {stuck or len(failed)} of {len(failed)} are {begun}. Likely "
        f"reasons: {'; '.join(reasons)}" + (f". Earlier {before}" if before else "")
    )


def trials(results: Sequence[Result]) -> list[str]:
    """Say what the trials of rates were worth, as far as they are those that tuned.json tells of."""
    entries = {}
    for (name,), found in grouped(results, "method").items():
        config = found[0].config
        entry = read(FILE).get({"rnn": "xor", "lstm": "xor-lstm"}[config.net], {}).get(name)
        if entry is not None and entry["lr"] == config.lr:
            entries[name] = entry
    said = []
    few = max((entry["trials"] for entry in entries.values()), default=RANDOM)
    if few < RANDOM:
        said.append(
            f"- The others' rates are of {few} trials, fewer than the {RANDOM} with which the search starts at random: "
            "methods of equal range tried the same rates, and may have found the same one."
        )
    stuck = [f"`{name}`" for name, entry in entries.items() if entry["score"] > 1 + STUCK]
    if stuck:
        said.append(
            f"- No trial of these came below {STUCK:.3f}, 99 % of log 2, so that they tell little: {', '.join(stuck)}."
        )
    return said
