"""A character GPT of 0.8 million parameters on Tiny Shakespeare: who reaches AdamW's loss first, and how soon?

Not of the paper. Four layers of width 128 with four heads, batches of 16 pieces of 128 characters, 5,000 iterations
(800 on a CPU). The rate of every method rises over 100 iterations and falls to a tenth along a cosine; its peak is
tuned, with as many trials for everyone, in 200 iterations on all but the last tenth of the training text, which judges
them. The reported losses are of the validation text: 320 pieces (160 on a CPU), always the same ones, every 50
iterations. Seconds are the CPU's, of one thread that trains (on a GPU, those of the clock), so that what else the
machine does counts little. All else are the packages' own defaults (of ours, those of `psgd.like_adamw`), but for the
rate of Muon's AdamW, which moves embeddings and gains: a tenth of Muon's was better in trials than the package's ratio,
and than one rate for both with the adjustment of Moonlight. `shakespeare-tuned` goes on from here, and tunes more.

`psgd-kron` whitens the momentum, `psgd-lra` and `psgd-xmat` whiten the gradient, and `psgd-kron-newton` takes exact
Hessian products, for which attention has to be computed without torch's fused kernels.

A first reference point (one seed, 1,500 iterations, one thread): AdamW at a rate of 0.003 ends at 1.712. The authors'
KronWhiten that whitens the momentum, at 0.001, passes that at about iteration 760, stands at 1.59 at 1,250, and takes
1.13 times the time per iteration; whitening the gradient, at the same rate, it ends at 1.737. The aim: ours reaches
tuned AdamW's last loss in at most half of its iterations, and in less time than any other method here.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import psgd
from psgd.experiments import data
from psgd.experiments.experiment import Preset, Record, Result, State
from psgd.experiments.gpt import GPT, twice_differentiable
from psgd.experiments.methods import Build, Loss, Preconditioned, Stepper, method, muon
from psgd.experiments.show import Line, Plot, Table, band, spread
from psgd.experiments.training import evaluations, restore, snapshot
from psgd.experiments.tune import tuned
from psgd.probes import generator

TITLE = "Tiny Shakespeare"

BASELINE = "adamw"
AIM = 0.5
"""The fraction of AdamW's iterations in which ours should reach its last loss."""

REFERENCE = 1.712
"""AdamW's last loss after 1,500 iterations, in the first reference point."""


def preconditioned(group: Callable[[], Any], **options: Any) -> Build:
    """Return a builder of PSGD that knows the parameters by their names."""

    def build(model: nn.Module, lr: float, seed: int = 0) -> Stepper:
        return Preconditioned(psgd.PSGD(model.named_parameters(), group(), lr=lr, seed=seed, **options))

    return build


KRON: dict[str, Any] = {key: value for key, value in psgd.like_adamw().items() if key not in ("lr", "weight_decay")}
"""The options of Kronecker factors that whiten the momentum."""

BUILDS: dict[str, Build] = {
    "adamw": method("adamw").build,
    "muon": functools.partial(muon, rest_lr=0.1),
    "soap": method("soap").build,
    "heavyball-kron": method("heavyball-kron").build,
    "psgd-kron": preconditioned(psgd.kron, **KRON),
    # half as often: a Hessian product takes about three gradients
    "psgd-kron-newton": preconditioned(
        psgd.kron, **KRON | {"curvature": psgd.hessian, "precond_prob": psgd.Decaying(start=50, floor=0.05)}
    ),
    "psgd-lra": preconditioned(lambda: psgd.lra(10), momentum=0.9, curvature=psgd.whiten),
    "psgd-xmat": preconditioned(psgd.XMat, momentum=0.9, curvature=psgd.whiten),
}

CENTRES = {
    "adamw": 3e-3,
    "muon": 2e-2,
    "soap": 3e-3,
    "heavyball-kron": 1e-3,
    "psgd-kron": 1e-3,
    "psgd-kron-newton": 1e-1,
    "psgd-lra": 3e-3,
    "psgd-xmat": 3e-3,
}
"""Where to look for rates: up to ten times less and more, for everyone. These are the packages' defaults; for AdamW and
psgd-kron the rates of the reference point; for what whitens the gradient AdamW's, as `psgd.like_adamw` has it; for
Newton that of our documentation. Of SOAP the best of six is near the upper end; six more trials around 0.01, up to
0.08, found nothing better."""


@dataclass(frozen=True)
class Config:
    """One way to train a GPT."""

    method: str = "psgd-kron"
    lr: float = 1e-3
    iterations: int = 5000
    warmup: int = field(default=100, metadata={"least": 0})
    """Iterations in which the rate rises."""
    batch: int = 16
    block: int = 128
    """Characters that the network sees at once."""
    width: int = 128
    layers: int = 4
    heads: int = 4
    every: int = 50
    """Iterations between evaluations."""
    pieces: int = 320
    """Of held-out text, each of a block, to evaluate."""
    held: float = 0.0
    """The last part of the training text to hold out, instead of the validation text."""
    source: str = "shakespeare"

    def stepper(self, model: nn.Module, seed: int) -> Stepper:
        """Return the method at work on a model."""
        return BUILDS[self.method](model, self.lr, seed)


TINY = Config(
    iterations=30, warmup=5, batch=8, block=16, width=16, layers=2, heads=2, every=10, pieces=32, source="babble"
)
"""Seconds, without data."""


def cells(preset: Preset) -> list[Config]:
    """Return one for each method."""
    base = {"quick": TINY, "cpu": Config(iterations=800, pieces=160), "paper": Config()}[preset]
    return [dataclasses.replace(base, method=m, lr=learning_rate(m)) for m in BUILDS]


def seeds(preset: Preset) -> range:
    """Return three."""
    return range(1 if preset == "quick" else 3)


def learning_rate(method: str) -> float:
    """Return a tuned one, or the middle of where to look for it."""
    return tuned("shakespeare", method) or math.sqrt(math.prod(lrs(method)))


def lrs(method: str) -> tuple[float, float]:
    """Return where to look."""
    return CENTRES[method] / 10, CENTRES[method] * 10


def tuning(method: str) -> Config:
    """Return a shorter run, on the training text alone."""
    return Config(method, iterations=200, warmup=50, every=200, held=0.1)


def score(result: Result) -> float:
    """Return the last loss on what was held out of the training text."""
    last = result.records[-1]["held_loss"]
    return math.inf if last is None else last


# --- one cell


def run(config: Config, seed: int, state: State | None = None) -> Iterator[Record]:
    """Train; a record has the mean loss since the one before, the held-out loss, and the seconds of training alone."""
    name, train, held_out, vocabulary = task(config)
    model = GPT(
        vocabulary,
        generator(seed),
        block=config.block,
        width=config.width,
        layers=config.layers,
        heads=config.heads,
    ).to(train.device)
    stepper = config.stepper(model, seed)
    peaks = [options["lr"] for options in stepper.optimizer.param_groups]
    judged = pieces(held_out, config)
    clock = time.perf_counter if train.is_cuda else time.process_time
    done, seconds = 0, 0.0
    if state is not None:
        restore(state, model, stepper)
        done, seconds = state["done"], state["seconds"]
    losses: list[float] = []
    for i in range(done + 1, config.iterations + 1):
        chosen = batch(train, config, seed, i)
        start = clock()
        for options, peak in zip(stepper.optimizer.param_groups, peaks, strict=True):
            options["lr"] = peak * annealed(i, config)
        with twice_differentiable() if "newton" in config.method else nullcontext():
            losses.append(float(stepper.step(Loss(model, chosen[:, :-1], chosen[:, 1:], surprise))))
        seconds += clock() - start
        diverged = not math.isfinite(losses[-1])
        if not (diverged or i % config.every == 0 or i == config.iterations):
            continue
        loss = math.nan if diverged else evaluate(model, judged)
        diverged = not math.isfinite(loss)
        values = {
            "train_loss": None if diverged else statistics.fmean(losses),
            f"{name}_loss": None if diverged else loss,
            "seconds": seconds,
            "updates": stepper.optimizer.param_groups[0].get("updates", 0),
            **evaluations(stepper),
        }
        if diverged:
            yield Record(i, values)
            return
        yield Record(i, values, functools.partial(snapshot, model, stepper, done=i, seconds=seconds))
        losses = []


def annealed(iteration: int, config: Config) -> float:
    """Return the rate of iteration 1, 2, … over its peak: up in a straight line, down to a tenth along a cosine.

    >>> config = Config(iterations=300, warmup=100)
    >>> [round(annealed(i, config), 3) for i in (1, 50, 100, 200, 300)]
    [0.01, 0.5, 1.0, 0.55, 0.1]
    """
    if iteration < config.warmup:
        return iteration / config.warmup
    part = (iteration - config.warmup) / max(1, config.iterations - config.warmup)
    return 0.1 + 0.9 * (1 + math.cos(math.pi * part)) / 2


def task(config: Config) -> tuple[str, Tensor, Tensor, int]:
    """Return "validation", the training text, the validation text, and how many characters there are.

    Where the end of the training text is held out instead, that is "held", and nobody sees the validation text.
    """
    sources: dict[str, Callable[[], data.Text]] = {"shakespeare": data.tiny_shakespeare, "babble": babble}
    if config.source not in sources:
        raise ValueError(f"the field source is one of {', '.join(sources)}, got {config.source!r}")
    text = sources[config.source]()
    where = "cuda" if torch.cuda.is_available() else "cpu"
    name, train, held_out = "validation", text.train, text.validation
    if config.held:
        name, (train, held_out) = "held", text.train.tensor_split([int(len(text.train) * (1 - config.held))])
    return name, train.to(where), held_out.to(where), len(text.vocabulary)


def babble(words: int = 5000) -> data.Text:
    """Return a text of a few words in random order, always the same.

    >>> text = babble()
    >>> "".join(text.vocabulary[i] for i in text.train[:24])
    'dies laughs king was the'
    """
    known = "a ape crown dies he hill king laughs on queen rose the under was with".split()
    drawn = torch.randint(len(known), (words,), generator=generator(0)).tolist()
    written = " ".join(known[i] for i in drawn)
    letters = sorted(set(written))
    tokens = torch.tensor([letters.index(c) for c in written])
    train, validation = tokens.tensor_split([len(tokens) * 9 // 10])
    return data.Text(tuple(letters), train, validation, train[:0])


def batch(text: Tensor, config: Config, *numbers: int) -> Tensor:
    """Return random pieces of a text, (batch, block + 1): a function of the numbers alone."""
    starts = torch.randint(len(text) - config.block, (config.batch, 1), generator=generator(*numbers))
    return text[(starts + torch.arange(config.block + 1)).to(text.device)]


def pieces(text: Tensor, config: Config) -> Tensor:
    """Return evenly spaced pieces of a text, (pieces, block + 1)."""
    starts = torch.linspace(0, len(text) - config.block - 1, config.pieces, dtype=torch.float64).long()
    return text[(starts[:, None] + torch.arange(config.block + 1)).to(text.device)]


def surprise(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the mean cross entropy of all characters."""
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


@torch.no_grad()
def evaluate(model: nn.Module, judged: Tensor, size: int = 32) -> float:
    """Return the mean loss of pieces of text."""
    losses = [float(surprise(model(some[:, :-1]), some[:, 1:])) * len(some) for some in judged.split(size)]
    return sum(losses) / len(judged)


# --- what came out


def by_method(results: Sequence[Result]) -> dict[str, list[Result]]:
    """Return the runs of each method that were judged by the validation text, in the order of the results."""
    found: dict[str, list[Result]] = {}
    for r in results:
        if r.records and not r.config.held:
            found.setdefault(r.config.method, []).append(r)
    return found


@dataclass(frozen=True)
class Curve:
    """What a method reached, on average over its seeds, after the iterations that all of them reached."""

    steps: Sequence[int]
    losses: Sequence[float]
    seconds: Sequence[float]

    def reaches(self, loss: float) -> tuple[int, float] | None:
        """Return the iterations and the seconds until a loss is reached; None if it never is.

        Between two evaluations all go in straight lines.

        >>> Curve([50, 100], [3.0, 2.0], [10.0, 20.0]).reaches(2.5)
        (75, 15.0)
        """
        points = list(zip(self.steps, self.losses, self.seconds, strict=True))
        for before, (step, found, seconds) in zip([None, *points], points, strict=False):
            if found > loss:
                continue
            if before is None:
                return step, seconds
            part = (before[1] - loss) / (before[1] - found)
            return math.ceil(before[0] + part * (step - before[0])), before[2] + part * (seconds - before[2])
        return None


def curve(results: Sequence[Result]) -> Curve:
    """Return the mean of some runs."""
    runs = [{r["step"]: r for r in result.records if r["validation_loss"] is not None} for result in results]
    steps = sorted(set.intersection(*map(set, runs)))
    losses, seconds = (
        [statistics.fmean(run[step][key] for run in runs) for step in steps] for key in ("validation_loss", "seconds")
    )
    return Curve(steps, losses, seconds)


def target(found: dict[str, list[Result]]) -> float | None:
    """Return AdamW's last loss."""
    losses = curve(found[BASELINE]).losses if BASELINE in found else []
    return losses[-1] if losses else None


def arrivals(found: dict[str, list[Result]]) -> dict[str, tuple[int, float]]:
    """Return the iterations and the seconds to AdamW's last loss, of those who reach it."""
    loss = target(found)
    reached = {} if loss is None else {name: curve(runs).reaches(loss) for name, runs in found.items()}
    return {name: arrival for name, arrival in reached.items() if arrival is not None}


def tables(results: Sequence[Result]) -> list[Table]:
    """Return last losses, what it takes to reach AdamW's, and costs."""
    found = by_method(results)
    reached = arrivals(found)
    rows = []
    for name, runs in found.items():
        step, seconds = reached.get(name, (None, None))
        rows.append(
            (
                name,
                spread([None if r.records[-1]["validation_loss"] is None else r.last("validation_loss") for r in runs]),
                step,
                None if step is None else f"{step / found[BASELINE][0].config.iterations:.0%}",
                seconds,
                spread([1000 * r.last("seconds") / r.records[-1]["step"] for r in runs]),
                runs[0].config.lr,
                runs[0].last("gradients"),
                runs[0].last("products"),
                runs[0].last("updates") or None,
            )
        )
    columns = (
        "method",
        "validation loss",
        "iterations to AdamW's",
        "of AdamW's",
        "seconds to AdamW's",
        "ms per iteration",
        "lr",
        "gradients",
        "products",
        "updates",
    )
    note = (
        "The last validation loss, ± over seeds; then where the mean over seeds first is at or below AdamW's last, in "
        "straight lines between evaluations. "
        "Seconds are of training alone; updates are those of our preconditioners."
    )
    return [Table("A character GPT", columns, rows, note)]


def plots(results: Sequence[Result]) -> list[Plot]:
    """Return the validation loss by iteration and by seconds."""
    by_step: list[Line] = []
    by_seconds: list[Line] = []
    for name, runs in by_method(results).items():
        mean = curve(runs)
        if mean.steps:
            shared = [{r["step"]: r["validation_loss"] for r in result.records} for result in runs]
            line = band(name, [(mean.steps, [run[step] for step in mean.steps]) for run in shared])
            by_step.append(line)
            by_seconds.append(dataclasses.replace(line, x=mean.seconds))
    if not by_step:
        return []
    top = 1.05 * max(max(line.y) for line in by_step)  # whatever becomes of single seeds
    return [
        Plot(f"{TITLE}: by iteration", "iteration", "validation loss", by_step, y_log=True, y_max=top),
        Plot(f"{TITLE}: by time", "seconds of training", "validation loss", by_seconds, y_log=True, y_max=top),
    ]


def remarks(results: Sequence[Result]) -> str:
    """Compare with the aim."""
    found = by_method(results)
    loss = target(found)
    if loss is None:
        return "" if not found else f"Without `{BASELINE}` there is nothing to compare with."
    reached, budget = arrivals(found), found[BASELINE][0].config.iterations
    said = [f"- `{BASELINE}` ends at {loss:.3f} after {budget:,} iterations."]
    if budget == 1500 and found[BASELINE][0].config.source == "shakespeare":
        said[0] += f" A first reference point, of one seed and not tuned, has {REFERENCE}."
    ours = [name for name in found if name.startswith("psgd")]
    for name in ours:
        if name not in reached:
            last = curve(found[name]).losses[-1:]
            ends = ", ".join(f"{r.last('validation_loss'):.3f}" for r in found[name] if r.series("validation_loss"))
            ending = f"it ends {last[0] - loss:.3f} above it, its seeds at {ends}" if last else "its seeds diverged"
            said.append(f"- `{name}` never reaches that: {ending}, and misses the aim.")
            continue
        step, seconds = reached[name]
        part = step / budget
        digits = int(abs(part - AIM) < 0.01)  # where whole percents would not tell
        few = "meets" if part <= AIM else f"misses by {part - AIM:.{digits}%} of AdamW's iterations"
        soon = [race(found, name, rival, whose) for rival, whose in rivals(found, name).items()]
        said.append(
            f"- `{name}` reaches that at iteration {step:,}, after {part:.{digits}%} of `{BASELINE}`'s iterations, and "
            f"{few} the aim of {AIM:.0%}; in {seconds:.1f} s, {'; '.join(soon)}."
        )
    if any(map(rounds, ours)) and not any(rounds(name) for name in found if name not in ours):
        said.append(
            "- No other has run in bfloat16: there are no records of `muon-bfloat16`. So seconds in bfloat16 are not "
            "compared like with like, and whether any of ours takes less time than all others is open."
        )
    return "\n".join([*said, *variants(found)])


def rounds(name: str) -> bool:
    """Return whether a method multiplies in bfloat16; all others do in float32."""
    return name.endswith("bfloat16")


def rivals(found: dict[str, list[Result]], name: str) -> dict[str, str]:
    """Return the quickest that are not ours, to compare a method's seconds with, and say of whom they are the quickest.

    What multiplies in float32 is compared like with like first, and then with all; what rounds with all at once.
    """
    reached = arrivals(found)
    others = [m for m in found if not m.startswith("psgd")]
    alike = [m for m in others if not rounds(m)]
    sets = {"the others in float32": alike, "all others": others}
    if alike == others:
        del sets["all others"]
    elif rounds(name):
        del sets["the others in float32"]
    # whoever is the quickest of both is kept as that of all, which says more
    return {min((m for m in some if m in reached), key=lambda m: reached[m][1]): whose for whose, some in sets.items()}


def race(found: dict[str, list[Result]], name: str, rival: str, whose: str) -> str:
    """Compare the seconds to AdamW's loss with those of the quickest of some others; a tie, if single seeds overlap."""
    reached, loss = arrivals(found), target(found)
    assert loss is not None
    seconds = reached[rival][1]
    faster = 1 - reached[name][1] / seconds
    soon = f"{abs(faster):.1%} {'less' if faster > 0 else 'more'} than `{rival}`, the quickest of {whose}"
    mine, theirs = (clocked(found[m], loss) for m in (name, rival))
    overlap = max(len(mine), len(theirs)) > 1 and max(min(mine), min(theirs)) <= min(max(mine), max(theirs))
    verdict = (
        f"but single seeds take {min(mine):.1f} to {max(mine):.1f} and {min(theirs):.1f} to {max(theirs):.1f} s: "
        "a tie, that neither meets nor misses the aim of less time than any of these"
        if overlap
        else f"and {'meets' if faster > 0 else 'misses'} the aim of less time than any of these"
    )
    return f"{soon} ({seconds:.1f} s), {verdict}"


def clocked(results: Sequence[Result], loss: float) -> list[float]:
    """Return the seconds in which single seeds reach a loss; infinite for those that never do."""
    reached = [curve([r]).reaches(loss) for r in results]
    return [math.inf if arrival is None else arrival[1] for arrival in reached]


def variants(found: dict[str, list[Result]]) -> list[str]:
    """Compare schedules with an update in every iteration, and matrices along one axis with those along both.

    These are methods of `shakespeare-tuned`.
    """
    said = []
    for name in ("psgd-kron", "psgd-kron-adaptive", "psgd-kron-fewer"):
        if pairs := same_seeds(found, name, "psgd-kron-every"):
            share = pairs[0][0].last("updates") / pairs[0][1].last("updates")
            said.append(f"- With {share:.0%} of the updates, `{name}` ends {difference(pairs)}.")
            loss = target(found)
            spent = [] if loss is None else [updates(found[m], loss) for m in (name, "psgd-kron-every")]
            if spent and None not in spent:
                said[-1] += f" To AdamW's loss it takes {spent[0]} updates, and `psgd-kron-every` {spent[1]}."
    if pairs := same_seeds(found, "psgd-kron-short", "psgd-kron"):
        said.append(f"- `psgd-kron-short`, with matrices along one axis, ends {difference(pairs)}.")
    return said


def updates(results: Sequence[Result], loss: float) -> int | None:
    """Return the updates that there were, by the last evaluation before a loss is reached on average, or None."""
    arrival = curve(results).reaches(loss)
    if arrival is None:
        return None
    return max(int(record["updates"]) for record in results[0].records if record["step"] <= arrival[0])


def same_seeds(found: dict[str, list[Result]], one: str, other: str) -> list[tuple[Result, Result]]:
    """Return runs of two methods that have the same seeds, and ended with numbers."""
    first, second = (
        {r.seed: r for r in found.get(m, []) if r.records[-1]["validation_loss"] is not None} for m in (one, other)
    )
    return [(first[seed], second[seed]) for seed in first if seed in second]


def difference(pairs: Sequence[tuple[Result, Result]]) -> str:
    """Say by how much the last losses of runs differ from others' on the same seeds."""
    mean = statistics.fmean(a.last("validation_loss") - b.last("validation_loss") for a, b in pairs)
    seeds = "on one seed" if len(pairs) == 1 else f"on average over {len(pairs)} seeds"
    return f"{abs(mean):.3f} {'above' if mean > 0 else 'below'} `{pairs[0][1].config.method}`, {seeds}"
