"""Write docs/shakespeare.md from results/ and the tuned rates: `./run python docs/make_shakespeare_page.py`.

It is written from three runs, after `psgd tune shakespeare all --trials 6`:
`psgd run shakespeare`, the same with `--set iterations=400 --only psgd-kron,muon` (-half), and with
`--set iterations=1500 --seeds 0:1 --only adamw,psgd-kron,muon` (-long). What leads it is from `psgd run
shakespeare-tuned`, after `psgd tune shakespeare-tuned` with 12 trials for each method, and 6 for `psgd-kron`.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from psgd.experiments import shakespeare, shakespeare_tuned, store
from psgd.experiments.experiment import Result
from psgd.experiments.report.looks import number
from psgd.experiments.show import spread
from psgd.experiments.tune import FILE, near_ends, read

ROOT = Path(__file__).parents[1]
RUN, HALF, LONG, ALIKE = (ROOT / "results" / f"shakespeare{more}" for more in ("", "-half", "-long", "-tuned"))
PLOTS = ROOT / "results" / "plots"

TITLE = """# A character GPT: who reaches AdamW's loss first?

<!-- Written by docs/make_shakespeare_page.py: edit that, then `./run python docs/make_shakespeare_page.py`. -->

"""

EQUAL = """## All tuned alike

Tiny Shakespeare, {parameters:,} parameters ({layers} layers of width {width}, {heads} heads), batches of {batch} pieces
of {block} characters, {iterations:,} iterations with {warmup} of warm-up and a cosine down to a tenth; {seeds} seeds.
Everyone has {total} trials by Optuna, of {short} iterations each, judged by held-out training text: six of the rate
alone, all else as the package has it, and {four} of four numbers together, the first of them where the six ended.
`psgd-kron` had two searches of six of the rate alone, with updates in every tenth iteration and by `Decaying()`, which
it keeps, and {ours} of all four. Seconds are the CPU's, of one thread that trains.

Not counted are earlier runs on this task (below): after them `kron()` has a matrix along both axes of 512×128 by
default, and Muon's AdamW starts at a tenth of Muon's rate; and where the two PSGDs look for their `precond_lr` reaches
the 0.9 that was good for ours there.

"""

REASON = """
Why ours is where it is: factors have to follow quickly in so short a run, and few trials did not find how quickly.
With `precond_lr` at its default of 0.1 the best held-out loss is {alone:.3f}; the trials of four numbers found
{follow:.2f} and {found:.3f}; the settings of the next section, 0.9 and updates in each of the first 100 iterations,
which took 26 runs, have {held:.3f} by six trials of the rate alone. There `psgd-kron` ends at {there:.3f}, here at
{here:.3f}, its seeds at {seeds}: a seed that ends far above the others lost its way early, at the height of the rate.
"""

NUMBERS = """
### The four numbers

Gradients are averaged over `memory` iterations: β₁ = 1 − 1/`memory`. `decay` is the decoupled weight decay. In `second`
iterations follows what is known of second order: β₂ = 1 − 1/`second` of AdamW and SOAP, `precond_lr` = 1/`second` of
the two PSGDs; Muon has none, and there 1/`second` is the rate of its AdamW over its own. Rates were looked for up to
three times less and more than the best of six, `memory` in {memory}, `decay` in {decay}, `second` where the
table says.

{ends} Losses are the best of the trials of all four numbers, which chose them, and of the rate alone.

"""

MORE = """
## More methods, rates alone tuned

Not on equal terms: rates alone are tuned here, and `psgd-kron` has other settings than above, which had more runs.

"""

HEAD = """\
Tiny Shakespeare, {parameters:,} parameters (four layers of width {width}, four heads), batches of {batch} pieces of
{block} characters, {iterations:,} iterations with {warmup} of warm-up and a cosine down to a tenth; {seeds} seeds, one
for the variants of `psgd-kron`. Everyone's rate is the best of {trials} trials by Optuna in two decades, on held-out
training text; all else are the packages' own defaults, but for Muon's AdamW (below) and for ours: `precond_lr`, the
schedule and the axes with a matrix of `psgd-kron…` were chosen in 26 single runs on the same held-out text, which no
other method had. Seconds are the CPU's, of one thread that trains.

![Validation loss by iteration](../results/plots/shakespeare-tiny-shakespeare-by-iteration.png)
![Validation loss by seconds](../results/plots/shakespeare-tiny-shakespeare-by-time.png)

"""

METHODS = """
`psgd-kron` whitens the momentum, `psgd-kron-gradient`, `psgd-lra` and `psgd-xmat` the gradient; `psgd-kron-newton`
takes exact Hessian products, for which attention is computed without torch's fused kernels. Muon's AdamW, which moves
embeddings and gains, has a tenth of Muon's rate: better in trials than the package's own ratio.

## What it says

"""

WHY = """
## What decides it

A matrix along both axes. `psgd-kron-short` has one along the shorter axis alone, 128 of 512×128, as was our default and
as others do by `max_skew=1`; its P m is far from white along the other axis, on which SOAP and Muon act, too. In trials
it also helped to let the factors follow quickly, by `precond_lr=0.9` and an update in each of the first iterations.

The aim of half of AdamW's iterations is hard while all have one schedule: AdamW's last loss comes after its rate has
fallen, and in the middle of the run everyone's is still at {middle:.0%} of its peak. The first of all to get there is
at {first:.0%}. Runs of half the length, whose rate has fallen by then, are another way to look at it, taken up after
the first had missed the aim, and for two methods only:

{half}

And one seed of {iterations:,} iterations, at the same rates:

{long}

In seconds Muon is ahead: by the difference between `psgd-kron` and `psgd-kron-every`, an update of all factors takes
about {update:.0f} ms, and most updates come early: `psgd-kron` makes {early} in the iterations to AdamW's loss.
Seconds were measured with another run on the other core, and vary by some percent from run to run.
"""

RATES = """
## The rates

Each trial is a run of {iterations} iterations, judged by the last tenth of the training text, which it does not see.
The rate of `psgd-kron-gradient` is of the time when it had a matrix along the shorter axis alone; that of
`psgd-kron-newton` is near the end of its range.

"""

TAIL = """
Run on commit {commit}, with {versions}, on {processor}; `{command}`. The records are in
[results/{name}](../results/{name}).
"""


def page(alike: Path = ALIKE) -> str:
    """Return the page; the runs of methods that are tuned alike lead it, if they are there."""
    if not alike.exists():
        return TITLE + rates_alone()
    return TITLE + equal(store.load(alike)) + MORE + rates_alone().replace("\n## ", "\n### ")


def equal(run: store.Run) -> str:
    """Return what is said of methods that are tuned alike."""
    entries, config = numbers(run), run.results[0].config
    searched = {m: 6 * len(shakespeare_tuned.ALONE[m]) for m in entries}
    totals = sorted({entry["trials"] + searched[m] for m, entry in entries.items()})
    if len(totals) > 1:
        raise ValueError(f"there is the same number of trials for all, got {', '.join(map(str, totals))}")
    (four,) = {entry["trials"] for m, entry in entries.items() if m != "psgd-kron"}
    head = EQUAL.format(
        **vars(config),
        parameters=parameters(config),
        seeds=len({r.seed for r in run.results}),
        total=totals[0],
        short=shakespeare_tuned.tuning("adamw").iterations,
        four=four,
        ours=entries["psgd-kron"]["trials"],
    )
    (table,) = shakespeare_tuned.tables(run.results)
    rows = [
        (
            m,
            *(entry["fields"][field] for field in ("lr", "memory", "decay", "second")),
            span(entry["ranges"]["second"]),
            entry["score"],
            min(shakespeare_tuned.ALONE[m]),
            f"{searched[m]} + {entry['trials']}",
            entry["diverged"],
        )
        for m, entry in entries.items()
    ]
    columns = ("method", "lr", "memory", "decay", "second", "searched in", "held-out loss", "by the rate alone")
    (memory,), (decay,) = ({span(e["ranges"][field]) for e in entries.values()} for field in ("memory", "decay"))
    return (
        head
        + pictures()
        + markdown(table.columns, table.rows)
        + f"\n{table.note}\n"
        + "\n### What it says\n\n"
        + shakespeare_tuned.remarks(run.results)
        + "\n"
        + REASON.format(
            here=ending(run.results, "psgd-kron"),
            seeds=", ".join(f"{r.last('validation_loss'):.3f}" for r in run.results if r.config.method == "psgd-kron"),
            follow=1 / entries["psgd-kron"]["fields"]["second"],
            found=entries["psgd-kron"]["score"],
            alone=min(shakespeare_tuned.ALONE["psgd-kron"]),
            there=ending(store.load(RUN).results, "psgd-kron"),
            held=read(FILE)["shakespeare"]["psgd-kron"]["score"],
        )
        + NUMBERS.format(memory=memory, decay=decay, ends=ends(entries))
        + markdown((*columns, "trials", "diverged"), rows)
        + tail(run)
    )


def ending(results: Sequence[Result], method: str) -> float:
    """Return the mean last loss of a method."""
    return statistics.fmean(r.last("validation_loss") for r in results if r.config.method == method)


def numbers(run: store.Run) -> dict[str, dict[str, Any]]:
    """Return what was found for each method, which has to be what ran."""
    known = read(FILE).get(run.name, {})
    for r in run.results:
        fields = known.get(r.config.method, {}).get("fields")
        if fields is None or any(getattr(r.config, field) != value for field, value in fields.items()):
            raise ValueError(f"a run has the numbers of {FILE.name}, {r.config.method} has not: run it again")
    return {r.config.method: known[r.config.method] for r in run.results}


def pictures() -> str:
    """Show the plots that there are."""
    found = {by: PLOTS / f"shakespeare-tuned-tiny-shakespeare-by-{by}.png" for by in ("iteration", "time")}
    shown = [f"![Validation loss by {by}](../results/plots/{p.name})\n" for by, p in found.items() if p.exists()]
    return "".join([*shown, "\n"] if shown else [])


def ends(entries: Mapping[str, dict[str, Any]]) -> str:
    """Say which numbers are near an end of where they were looked for."""
    found = [f"`{field}` of `{m}`" for m, entry in entries.items() for field in near_ends(entry)]
    return f"Near an end of their ranges: {', '.join(found)}." if found else "None is near an end of its range."


def span(ends: Sequence[float]) -> str:
    """Return a range.

    >>> span([0.001, 0.3])
    '0.001 … 0.3'
    """
    return f"{ends[0]:g} … {ends[1]:g}"


def rates_alone() -> str:
    """Return what is said of all methods, of which rates alone are tuned."""
    run = store.load(RUN)
    long = store.load(LONG).results
    config = run.results[0].config
    seeds = len({r.seed for r in run.results})
    table = shakespeare.tables(run.results)[0]
    tuned = {m: entry for m, entry in read(FILE)["shakespeare"].items() if m in shakespeare.CENTRES}
    (trials,) = {entry["trials"] for entry in tuned.values()}
    head = HEAD.format(**vars(config), parameters=parameters(config), seeds=seeds, trials=trials)
    rates = [
        (m, entry["lr"], span(entry["range"]), entry["score"], entry["diverged"])
        for m, entry in sorted(tuned.items(), key=lambda item: list(shakespeare.BUILDS).index(item[0]))
    ]
    return (
        head
        + markdown(table.columns, table.rows)
        + f"\n{table.note}\n"
        + METHODS
        + shakespeare.remarks(run.results)
        + "\n"
        + WHY.format(
            middle=shakespeare.annealed(config.iterations // 2, config),
            first=first(run.results),
            half=half(store.load(HALF).results, run.results),
            iterations=long[0].config.iterations,
            long=endings(long),
            **updates(run.results),
        )
        + RATES.format(iterations=shakespeare.tuning("adamw").iterations)
        + markdown(("method", "rate", "searched", "held-out loss", "diverged"), rates)
        + tail(run)
    )


def tail(run: store.Run) -> str:
    """Say what ran, and where."""
    about, versions = run.provenance, run.provenance["versions"]
    packages = ("torch", "heavyball", "pytorch-optimizer")
    return TAIL.format(
        name=run.name,
        commit=about["commit"][:7],
        versions=", ".join(f"{name} {versions[name]}" for name in packages if name in versions),
        processor=f"{about['cpus']} cores of {about['processor']}",
        command=Path(about["command"].split()[0]).name + " " + " ".join(about["command"].split()[1:3]),
    )


def first(results: Sequence[Result]) -> float:
    """Return the least fraction of AdamW's iterations in which anybody reaches its last loss."""
    return min(step for step, _ in shakespeare.arrivals(shakespeare.by_method(results)).values()) / (
        results[0].config.iterations
    )


def half(results: Sequence[Result], whole: Sequence[Result]) -> str:
    """Compare runs of half the length with AdamW's of all of it."""
    loss, said = shakespeare.target(shakespeare.by_method(whole)), []
    for name, runs in shakespeare.by_method(results).items():
        last = spread([r.last("validation_loss") for r in runs])
        told = "below" if last.mean <= loss else "above"
        said.append(
            f"- `{name}`, given {runs[0].config.iterations:,} iterations, ends at {last} after them, {told} what "
            f"`{shakespeare.BASELINE}` reaches in {whole[0].config.iterations:,} ({loss:.3f})."
        )
    return "\n".join(said)


def updates(results: Sequence[Result]) -> dict[str, float]:
    """Return the milliseconds of an update, and how many there are until AdamW's last loss is reached."""
    found = shakespeare.by_method(results)
    kron, every = found["psgd-kron"][0], found["psgd-kron-every"][0]
    step, _ = shakespeare.arrivals(found)["psgd-kron"]
    saved = every.last("updates") - kron.last("updates")
    early = next(r["updates"] for r in kron.records if r["step"] == step)
    return {"update": 1000 * (every.last("seconds") - kron.last("seconds")) / saved, "early": early}


def endings(results: Sequence[Result]) -> str:
    """Say where runs end, and where they pass AdamW's last loss."""
    found = shakespeare.by_method(results)
    reached, budget = shakespeare.arrivals(found), results[0].config.iterations
    said = []
    for name, runs in found.items():
        said.append(f"- `{name}` ends at {shakespeare.curve(runs).losses[-1]:.3f}.")
        if name in reached and name != shakespeare.BASELINE:
            step = reached[name][0]
            said[-1] += f" It is at AdamW's last loss after {step:,} iterations, {step / budget:.0%} of AdamW's."
    return "\n".join(said)


def parameters(config: shakespeare.Config) -> int:
    """Return how many there are."""
    from psgd.experiments.gpt import GPT
    from psgd.probes import generator

    shape = {key: getattr(config, key) for key in ("block", "width", "layers", "heads")}
    return sum(p.numel() for p in GPT(65, generator(0), **shape).parameters())


def markdown(columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """Return a table."""
    lines = [columns, ["---"] * len(columns), *([cell(value) for value in row] for row in rows)]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def cell(value: Any) -> str:
    """Return an entry.

    >>> cell(None), cell(0.12345), cell("psgd")
    ('–', '0.1235', 'psgd')
    """
    return number(value) if value is None or isinstance(value, (int, float)) else str(value)


if __name__ == "__main__":
    Path(__file__).with_name("shakespeare.md").write_text(page(), encoding="utf-8")
