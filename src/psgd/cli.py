"""The command `psgd`: reruns the paper's experiments, and shows what came out."""

from __future__ import annotations

import contextlib
import enum
import importlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

try:
    import rich.box
    import rich.table
    import typer
    from rich.console import Console
    from rich.text import Text
except ImportError as e:
    raise SystemExit(f"the command psgd needs the extra `experiments` (pip install 'psgd[experiments]'): {e}") from e

from psgd.experiments import experiment, runner, store, tune
from psgd.experiments.pool import Pool, Processes, Ray
from psgd.experiments.progress import Lines, Screen, duration
from psgd.experiments.provenance import command, cpus

app = typer.Typer(
    help="Rerun the experiments of the paper on PSGD: preconditioned SGD on Lie groups.",
    epilog="Try `psgd run rosenbrock`, then open the page whose path it prints.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
console = Console(width=None if sys.stdout.isatty() else 160)  # a log has no width to fold tables to
JOBS = cpus()


class Preset(str, enum.Enum):
    """The size of an experiment."""

    quick = "quick"
    cpu = "cpu"
    paper = "paper"


Name = Annotated[str, typer.Argument(help="An experiment (see `psgd list`), or a module of your own, with a dot.")]
Jobs = Annotated[int, typer.Option(min=1, help="Processes at once, of one thread each.", show_default="all processors")]
DataFolder = Annotated[Path | None, typer.Option(help="Where data sets are; otherwise PSGD_DATA, or a cache.")]


@app.command("list")
def list_() -> None:
    """List the experiments, and how many runs each preset makes."""
    table = rich.table.Table("name", "title", *Preset.__members__, box=rich.box.SIMPLE_HEAD)
    for name in experiment.names():
        module = experiment.load(name)
        counts = (len(runner.grid(name, preset.value)) for preset in Preset)
        table.add_row(name, module.TITLE, *map(str, counts))
    console.print(table)
    console.print("quick: seconds; cpu: up to an hour or so on two cores; paper: the full setting, for a GPU.")


@app.command()
def run(
    name: Name,
    preset: Annotated[Preset, typer.Option(help="How much to run.")] = Preset.cpu,
    seeds: Annotated[str, typer.Option(help="0:10 is 0 to 9; or 3; or 0,2,5.", show_default="the preset's")] = "",
    only: Annotated[str, typer.Option(help="Methods, as in psgd-lra,sgd.", show_default="all")] = "",
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="FIELD=VALUE", help="Set a field of all configs; may be repeated."),
    ] = None,
    jobs: Jobs = JOBS,
    out: Annotated[Path | None, typer.Option(help="The run's directory.", show_default="out/NAME-PRESET")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with what DIR holds, or add to it.")] = False,
    checkpoint: Annotated[float, typer.Option(min=0, help="Seconds between checkpoints within a run.")] = 60.0,
    ray: Annotated[
        str, typer.Option(metavar="ADDRESS", help="Run on this Ray cluster (all nodes share --out), or a `local` one.")
    ] = "",
    data: DataFolder = None,
    page: Annotated[bool, typer.Option("--report/--no-report", help="Write the page in the end.")] = True,
) -> None:
    """Run an experiment: all methods with all seeds. It may be killed at any time, and resumed."""
    with usage():
        settings = dict(assignment(text) for text in set_ or [])
        cells = runner.grid(name, preset.value, seeds=numbers(seeds), only=words(only), settings=settings)
        experiment.check(name, cells[0].config, settings)
        environment(data)
        pool: Pool = Ray(ray, jobs, variables()) if ray else Processes(jobs)
        directory = out or Path("out") / f"{name}-{preset.value}"
        progress = Screen(console) if console.is_terminal else Lines(say)
        asked: dict[str, Any] = {"preset": preset.value, "seeds": seeds, "only": words(only), "settings": settings}
        options: dict[str, Any] = {"resume": resume, "interval": checkpoint, "progress": progress}
        with interruptible("" if resume else " --resume"):
            failed = runner.run(name, cells, directory, pool, **options, **asked, jobs=jobs, ray=ray)
    show(directory)
    if page:
        write_page([directory], None)
    if failed:
        say(f"{len(failed)} of {len(cells)} runs failed; why is in {directory / store.FAILED}", error=True)
        say("the same command with --resume tries them again", error=True)
        raise typer.Exit(1)


@app.command()
def report(
    directories: Annotated[list[Path], typer.Argument(metavar="DIR...", help="Of runs.")],
    out: Annotated[Path | None, typer.Option(help="The page.", show_default="report.html in the first DIR")] = None,
) -> None:
    """Write a page with the tables, curves and remarks of runs, to be opened in a browser."""
    with usage():
        for directory in directories:
            store.load(directory)
        write_page(directories, out)


@app.command("tune")
def tune_(
    name: Name,
    methods: Annotated[list[str], typer.Argument(metavar="METHOD...", help="Methods, or `all`.")],
    trials: Annotated[int, typer.Option(min=1, help="Learning rates to try for each method.")] = 50,
    seed: Annotated[int, typer.Option(help="Of the trials, and of the search.")] = tune.SEED,
    out: Annotated[Path, typer.Option(help="Where to keep them.", show_default="the package's tuned.json")] = tune.FILE,
    jobs: Jobs = JOBS,
    data: DataFolder = None,
) -> None:
    """Find learning rates on validation data, with the same number of trials for each method."""
    failed = 0
    with usage():
        environment(data)
        wanted = tune.tunable(name) if methods == ["all"] else methods
        outcomes = tune.tune(name, wanted, Processes(jobs), trials=trials, seed=seed, out=out)
    with interruptible():
        for method, found, error in outcomes:
            if error is not None:
                failed += 1
                say(f"{method} failed: {error}", error=True)
                continue
            fields = found.get("fields", {"lr": found["lr"]})
            told = ", ".join(f"{field} {value:.4g}" for field, value in fields.items())
            say(f"{method}: {told}, score {found['score']:.4g}, {found['diverged']} of {trials} diverged")
            for field, (low, high) in tune.near_ends(found).items():
                say(f"  {field} is near an end of the range, {low:g} to {high:g}: a wider one may hold a better one")
    say(f"kept in {out}")
    if failed:
        raise typer.Exit(1)


def show(directory: Path) -> None:
    """Print an experiment's tables."""
    run = store.load(directory)
    module = experiment.load(run.name)
    for table in module.tables(run.results):
        drawn = rich.table.Table(*table.columns, title=table.title, box=rich.box.SIMPLE_HEAD, title_justify="left")
        for row in table.rows:
            drawn.add_row(*map(shown, row))
        console.print(drawn)
        if table.note:
            console.print(Text(table.note, style="dim"))
    for text in experiment.mixed(module, run.results):
        console.print(Text(text, style="yellow"))
    seconds = sum(r.seconds for r in run.results)
    say(f"{len(run.results)} runs, {duration(seconds)} of computing; records in {directory}")


def shown(value: Any) -> str:
    """Return an entry of a table as text.

    >>> shown(None), shown(0.123456), shown("sgd")
    ('–', '0.1235', 'sgd')
    """
    if value is None:
        return "–"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def write_page(directories: list[Path], out: Path | None) -> None:
    """Write the report, and say where it is."""
    try:
        report = importlib.import_module("psgd.experiments.report")
    except ImportError as e:
        say(f"no report page: {e}", error=True)
        return
    say(f"report: {report.write(directories, out or directories[0] / 'report.html')}")


def say(text: str, *, error: bool = False) -> None:
    """Print a line as it is: no markup, no wrapping, at once."""
    print(text, file=sys.stderr if error else sys.stdout, flush=True)


@contextlib.contextmanager
def usage() -> Iterator[None]:
    """Turn an error of what was asked for into a message and exit code 2."""
    try:
        yield
    except ValueError as e:
        say(f"psgd: {e}", error=True)
        raise typer.Exit(2) from e


@contextlib.contextmanager
def interruptible(resume: str = "") -> Iterator[None]:
    """Turn Ctrl-C into a message and its exit code."""
    try:
        yield
    except KeyboardInterrupt as e:
        say(f"interrupted; to go on: {command()}{resume}")
        raise typer.Exit(130) from e


def environment(data: Path | None) -> None:
    """Tell workers where data is."""
    if data is not None:
        if not data.is_dir():
            raise ValueError(f"--data must be a folder, got {str(data)!r}")
        os.environ["PSGD_DATA"] = str(data.resolve())


def variables() -> dict[str, str]:
    """Return what workers on other machines need to be told."""
    return {"PSGD_DATA": os.environ["PSGD_DATA"]} if "PSGD_DATA" in os.environ else {}


def words(text: str) -> list[str]:
    """Return the words between commas.

    >>> words("psgd-lra, sgd")
    ['psgd-lra', 'sgd']
    """
    return [word.strip() for word in text.split(",") if word.strip()]


def numbers(text: str) -> list[int] | None:
    """Return seeds: a range, one, or several; None for those of the preset.

    >>> numbers("0:3"), numbers("4"), numbers("1,5"), numbers("")
    ([0, 1, 2], [4], [1, 5], None)
    """
    if not text:
        return None
    try:
        if ":" in text:
            start, stop = map(int, text.split(":"))
            found = list(range(start, stop))
        else:
            found = [int(word) for word in text.split(",")]
    except ValueError:
        found = []
    if not found or min(found) < 0:
        raise ValueError(f"seeds are written as 0:10, 3, or 0,2,5, got {text!r}")
    return found


def assignment(text: str) -> tuple[str, str]:
    """Return name and value.

    >>> assignment("lr=0.1")
    ('lr', '0.1')
    """
    name, equals, value = text.partition("=")
    if not equals:
        raise ValueError(f"a setting is written as field=value, got {text!r}")
    return name.strip(), value.strip()


def main() -> None:
    """Run the command."""
    app()


if __name__ == "__main__":
    main()
