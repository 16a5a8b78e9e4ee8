"""Write docs/shakespeare.md from results/ and the tuned numbers: `./run python docs/make_shakespeare_page.py`.

It is written from `psgd run shakespeare-tuned`, after `psgd tune shakespeare` with 6 trials for each method, and
`psgd tune shakespeare-tuned` with 12.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from psgd.experiments import shakespeare, shakespeare_tuned, store
from psgd.experiments.experiment import Result
from psgd.experiments.report.looks import number
from psgd.experiments.tune import FILE, near_ends, read

ROOT = Path(__file__).parents[1]
RUN = ROOT / "results" / "shakespeare-tuned"
PLOTS = ROOT / "results" / "plots"
BENCH = ROOT / "results" / "bench" / "epyc" / "bench.json"
WHITENESS = ROOT / "results" / "bench" / "whiteness" / "whiteness.json"

HEAD = """# A character GPT: who reaches AdamW's loss first?

<!-- Written by docs/make_shakespeare_page.py: edit that, then `./run python docs/make_shakespeare_page.py`. -->

Tiny Shakespeare, {parameters:,} parameters ({layers} layers of width {width}, {heads} heads), batches of {batch} pieces
of {block} characters, {iterations:,} iterations with {warmup} of warm-up and a cosine down to a tenth; {seeds} seeds.
Everyone has {total} trials by Optuna, of {short} iterations each, judged by held-out training text: {alone} of the rate
alone, all else as the package has it, and {four} of four numbers together, the first of them where those ended. What is
best in a short run may not be in a long one: trials as long as the runs follow, at the rate that was found, at half of
it, and at twice unless half was better. Seconds are the CPU's, of one thread that trains.

`psgd-kron` is `psgd.kron()` with the options of `psgd.like_adamw`, and whitens the momentum; `psgd-kron-newton` takes
exact Hessian products, for which attention is computed without torch's fused kernels; `psgd-lra` and `psgd-xmat` whiten
the gradient with one preconditioner for all parameters. At the numbers of `psgd-kron`, its matrices are along the
shorter axis alone (`-short`: 128 of 512×128), or are updated in every iteration (`-every`), with pauses while the fit
is good (`-adaptive`), or with pauses after 40 iterations, not 100 (`-fewer`: what 40 does was not tried before), or
they are Q instead of P (`-quadratic`), also multiplied in bfloat16 (`-bfloat16`, `-fewer-bfloat16`).
`psgd-kron-newton-half` is Newton at half of the rate. `muon-bfloat16` is Muon at its numbers, multiplied in bfloat16 as
its package does; everyone else is in float32.

Defaults have a history that is not counted. Those of `like_adamw` were chosen for short runs of this network: how
quickly factors follow, and along which axes, in 26 runs on held-out training text of this task, the weight of the
newest gradient in eight on characters of WikiText-2; that no entry moves by more than ten times the rate came after the
trials of this page, for the sake of embeddings with rare rows. So did P as what moves, by `Direct()`: all trials of
`psgd-kron` were of `Quadratic()`, whose numbers it has; three pairs of runs on held-out training text came before it
was taken. Muon's AdamW starts at a tenth of Muon's rate, which was better in trials here than its package's ratio.

"""

SECONDS = """
`{ours}` reaches AdamW's loss in {iterations:,} iterations and {seconds:.0f} s, `{quickest}` in {their_iterations:,} and
{their_seconds:.0f} s. Beside an iteration of `adamw`, one of `{quickest}` takes {their_more:.0f} ms more, on average.
Of `{ours}`, an update of all factors takes {update:.0f} ms, by the difference to `{other}`, and there are {updates} of
them until then: {spent:.0f} s; all else, P m above all, takes {rest:.0f} ms of an iteration more than `adamw` does.
Neither depends on the batch; an iteration of `adamw`, with the gradient of {tokens:,} characters, takes {adamw:.0f} ms.
Without updates it would be {without:.0f} s.
"""

SECONDS_ROUNDED = """
`{ours}` reaches it in {iterations:,} iterations and {seconds:.0f} s, `{quickest}` in {their_iterations:,} and
{their_seconds:.0f} s. One of `{quickest}` takes {their_more:.0f} ms more than one of `adamw`. An update takes
{update:.0f} ms, by the difference to `{other}`, {spent:.0f} s in all; the rest {rest:.0f} ms of an iteration more than
`adamw`. Without updates it would be {without:.0f} s.
"""

SECONDS_WHOLE = """
`{ours}` reaches AdamW's loss in {iterations:,} iterations and {seconds:.0f} s, `{quickest}` in {their_iterations:,} and
{their_seconds:.0f} s. Beside an iteration of `adamw`, one of `{ours}` takes {more:.0f} ms more, on average, and one of
`{quickest}` {their_more:.0f} ms. What of that are updates, the difference to `{other}` does not tell: the machine's
speed changed by more in between.
"""

ROUNDED = """
`muon` is in float32: its package rounds to bfloat16, which takes far longer on processors without instructions for it.
{found}
"""

RAN = "Here an iteration of `muon-bfloat16` takes {by:.0f} ms {less} than one of `muon`."

NOT_RUN = """There are no runs of `muon-bfloat16` yet; on a processor with such instructions,
[the bench](../results/bench/epyc/bench.md) finds the package's own way {saved:.0f} ms quicker in an iteration of this
network."""

WHY = """
## Why the others of ours are behind

`psgd-lra` and `psgd-xmat` have one P for all parameters, and one step size, which no entry may overshoot: the largest
gradients set it, and where gradients are small P hardly moves. A P that has arrived makes all entries of Pg equally
large. After {iterations} iterations, [on {batches} more batches](../results/bench/whiteness/whiteness.json), the root
mean squares of all entries of Pg span, from the {low:.0%} to the {high:.0%} quantile, a factor of {spreads}.

"""

NEWTON = """`psgd-kron-newton` has a rate that its long trials preferred, and that is near the largest it can have: its
seeds end at {full}, at half of the rate at {half}. The curvature of one batch is not that of the next, and what bounds
its steps, the root mean square of each tensor's, does not know the loss.
"""

NUMBERS = """
## The four numbers

Gradients are averaged over `memory` iterations: β₁ = 1 − 1/`memory`. `decay` is the decoupled weight decay. In `second`
iterations follows what is known of second order: β₂ = 1 − 1/`second` of AdamW and SOAP, `precond_lr` = 1/`second` of
all PSGDs; Muon has none, and there 1/`second` is the rate of its AdamW over its own. Rates were looked for up to
three times less and more than the best of six, `memory` in {memory}, `decay` in {decay}, `second` where the
table says.

{ends} Losses are of held-out training text: the best of the short trials of all four numbers, the best of those of the
rate alone, and those of the long trials, which chose the rate.

"""

LONG = ("long", "at half the rate", "at twice")

TAIL = """
Run on commit {commit}, with {versions}, on {processor}; `{command}`. The records are in
[results/{name}](../results/{name}).
"""


def page(directory: Path = RUN) -> str:
    """Return the page."""
    run = store.load(directory)
    entries, config = numbers(run), run.results[0].config
    before = read(FILE)["shakespeare"]
    ((alone, four),) = {(before[m]["trials"], entry["trials"]) for m, entry in entries.items()}
    (table,) = shakespeare_tuned.tables(run.results)
    head = HEAD.format(
        **vars(config),
        parameters=parameters(config),
        seeds=len({r.seed for r in run.results}),
        total=alone + four,
        alone=alone,
        four=four,
        short=shakespeare_tuned.tuning("adamw").iterations,
    )
    rows = [
        (
            m,
            *(entry["fields"][field] for field in ("lr", "memory", "decay", "second")),
            span(entry["ranges"]["second"]),
            entry["score"],
            before[m]["score"],
            *long(entry["again"]),
            entry["diverged"],
        )
        for m, entry in entries.items()
    ]
    columns = ("method", "lr", "memory", "decay", "second", "searched in", "short", "by the rate alone", *LONG)
    (memory,), (decay,) = ({span(e["ranges"][field]) for e in entries.values()} for field in ("memory", "decay"))
    return (
        head
        + pictures()
        + markdown(table.columns, table.rows)
        + f"\n{table.note}\n"
        + "\n## What it says\n\n"
        + shakespeare_tuned.remarks(run.results)
        + "\n"
        + costs(run.results)
        + rounding(run.results)
        + whys(run.results)
        + NUMBERS.format(memory=memory, decay=decay, ends=ends(entries))
        + markdown((*columns, "diverged"), rows)
        + tail(run)
    )


def numbers(run: store.Run) -> dict[str, dict[str, Any]]:
    """Return what was found for each method, which has to be what ran."""
    known, found = read(FILE).get(run.name, {}), {}
    for r in run.results:
        variant = shakespeare_tuned.VARIANTS.get(r.config.method)
        entry = known.get(variant.of if variant else r.config.method, {})
        fields = dict(entry.get("fields", {}))
        if variant and fields:
            fields["lr"] *= variant.rate
        if not entry or any(getattr(r.config, field) != value for field, value in fields.items()):
            raise ValueError(f"a run has the numbers of {FILE.name}, {r.config.method} has not: run it again")
        if not variant:
            found[r.config.method] = entry
    if len(trials := sorted({entry["trials"] for entry in found.values()})) > 1:
        raise ValueError(f"there is the same number of trials for all, got {', '.join(map(str, trials))}")
    return found


def costs(results: Sequence[Result]) -> str:
    """Say what our seconds are spent on, where another method needs fewer."""
    in_float32 = spent(results, "psgd-kron", "psgd-kron-every")  # beside others in float32, too
    in_bfloat16 = spent(results, "psgd-kron-bfloat16", "psgd-kron-fewer-bfloat16")
    pairs = [(text, found) for text, found in ((SECONDS, in_float32), (SECONDS_ROUNDED, in_bfloat16)) if found]
    said = [(text if found["update"] > 0 else SECONDS_WHOLE).format(**found) for text, found in pairs]
    return "\n## Where the seconds go\n" + "".join(said) if said else ""


def spent(results: Sequence[Result], ours: str, other: str) -> dict[str, Any]:
    """Return what the seconds of ours are spent on, by the difference to one with another number of updates."""
    found = shakespeare.by_method(results)
    reached, config = shakespeare.arrivals(found), found["adamw"][0].config
    quickest = next(iter(shakespeare.rivals(found, ours)), "")
    if ours not in reached or quickest not in reached or reached[ours][1] <= reached[quickest][1]:
        return {}
    pairs = shakespeare.same_seeds(found, ours, other)
    more, updates = (sum(b.last(key) - a.last(key) for a, b in pairs) for key in ("seconds", "updates"))
    if not updates:  # so short is the run
        return {}
    (iterations, seconds), update = reached[ours], more / updates
    made = max(r["updates"] for r in found[ours][0].records if r["step"] <= iterations)
    plain, theirs = pace(found["adamw"]), pace(found[quickest])
    return {
        "ours": ours,
        "other": other,
        "quickest": quickest,
        "iterations": iterations,
        "seconds": seconds,
        "their_iterations": reached[quickest][0],
        "their_seconds": reached[quickest][1],
        "more": 1000 * (pace(found[ours]) - plain),
        "their_more": 1000 * (theirs - plain),
        "update": 1000 * update,
        "updates": made,
        "spent": update * made,
        "without": seconds - update * made,
        "rest": 1000 * ((seconds - update * made) / iterations - plain),
        "tokens": config.batch * config.block,
        "adamw": 1000 * plain,
    }


def pace(results: Sequence[Result]) -> float:
    """Return the seconds of an iteration, on average."""
    return statistics.fmean(r.last("seconds") / r.records[-1]["step"] for r in results)


def rounding(results: Sequence[Result], file: Path = BENCH) -> str:
    """Say what bfloat16 saves Muon: by its runs, or by the bench while there are none."""
    found = shakespeare.by_method(results)
    if "muon-bfloat16" not in found:
        return ROUNDED.format(found=NOT_RUN.format(saved=1000 * saved(file)))
    less = 1000 * (pace(found["muon"]) - pace(found["muon-bfloat16"]))
    return ROUNDED.format(found=RAN.format(by=abs(less), less="less" if less > 0 else "more"))


def saved(file: Path) -> float:
    """Return the seconds that bfloat16 saves Muon in an iteration of the GPT."""
    found = json.loads(file.read_text(encoding="utf-8"))["measurements"]
    seconds = {m["row"]: m["seconds"] for m in found if m["table"].startswith("Iteration, GPT")}
    return float(seconds["pytorch_optimizer Muon, float32"] - seconds["pytorch_optimizer Muon"])


def whys(results: Sequence[Result], file: Path = WHITENESS) -> str:
    """Say what is known of why other preconditioners of ours are behind `psgd-kron`."""
    about = json.loads(file.read_text(encoding="utf-8"))
    low, high = about["quantiles"][1], about["quantiles"][-2]
    spreads = {m: found["quantiles"][-2] / found["quantiles"][1] for m, found in about["methods"].items()}
    said = [f"{spread:.2g} with `{m}`" for m, spread in sorted(spreads.items(), key=lambda each: each[1])]
    listed = f"{', '.join(said[:-1])} and {said[-1]}"
    text = WHY.format(**{**about, "low": low, "high": high, "spreads": listed})
    found = shakespeare.by_method(results)
    full, half = (found.get(f"psgd-kron-newton{part}", []) for part in ("", "-half"))
    if full and half:
        text += NEWTON.format(full=endings(full), half=endings(half))
    return text


def endings(results: Sequence[Result]) -> str:
    """List the last losses."""
    return ", ".join(number(r.last("validation_loss")) for r in results if r.series("validation_loss"))


def pictures() -> str:
    """Show the plots that there are."""
    found = {by: PLOTS / f"shakespeare-tuned-tiny-shakespeare-by-{by}.png" for by in ("iteration", "time")}
    shown = [f"![Validation loss by {by}](../results/plots/{p.name})\n" for by, p in found.items() if p.exists()]
    return "".join([*shown, "\n"] if shown else [])


def long(tried: Sequence[Mapping[str, Any]]) -> tuple[Any, ...]:
    """Return the losses of the long trials, "diverged" where there is none, and "" for those that were not needed."""
    losses = tuple("diverged" if each["score"] is None else each["score"] for each in tried)
    return losses + ("",) * (len(LONG) - len(losses))


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
