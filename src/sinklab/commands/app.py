"""The command line: one thin function per command. Results go to standard output, everything else to stderr."""

import json
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from sinklab import __version__
from sinklab.commands import data, reproduce
from sinklab.commands.assess import assess
from sinklab.commands.ending import end, stderr
from sinklab.commands.evaluate import evaluate
from sinklab.commands.export import export
from sinklab.commands.measure import compare, measure, parity
from sinklab.commands.options import Json
from sinklab.commands.sft import sft
from sinklab.signals import keeping_what_is_finished

app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)
data_app = typer.Typer(help="Text and tokens.", no_args_is_help=True)
app.add_typer(data_app, name="data")


def main() -> None:
    """Run the command line; our errors end in a sentence on stderr and their exit status."""
    end(app)


class TrackerChoice(StrEnum):  # typer takes no lists of literals
    """Where a run can be followed."""

    wandb = "wandb"
    tensorboard = "tensorboard"


def _say_version(wanted: bool) -> None:
    if wanted:
        print(f"sinklab {__version__}")
        raise typer.Exit


@app.callback()
def everywhere(
    version: Annotated[
        bool, typer.Option("--version", callback=_say_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """A laboratory for attention sinks in language models: train, measure, report."""


app.command()(reproduce.lab)


@app.command()
def train(
    recipe: Annotated[
        str,
        typer.Argument(
            help="A recipe file, or one of tiny, mini, tiny-128, small, 60m, 1b, backcopy, trigger_average, continued."
        ),
    ],
    overrides: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Override a recipe key; may be repeated.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Run directory; default runs/NAME-HASH.")] = None,
    replay: Annotated[
        int | None,
        typer.Option(metavar="STEP", help="Train nothing: redo this step's batch and say where NaN begins."),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Train nothing: say what it would take (parameters, FLOPs, memory).")
    ] = False,
    anyway: Annotated[
        bool, typer.Option("--anyway", help="Also where the memory estimate is beyond what this machine has.")
    ] = False,
    track: Annotated[
        list[TrackerChoice] | None,
        typer.Option(help="Also log to W&B (also offline) or TensorBoard; may be repeated."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Train one model; continues what it finds in the run directory.

    Example: sinklab train tiny --set model.attention.bias=k --set train.steps=500

    On several processes: torchrun --nproc-per-node 8 -m sinklab train 60m

    SIGTERM and SIGUSR1 save and end with status 75: call again to continue. Ctrl-C does the same with status 130.
    """
    from sinklab.commands.train import plan_command, replay_command, train_command

    if dry_run:
        from sinklab.commands.terminal.training import print_plan

        plan, speaks = plan_command(recipe, overrides or [])
        if speaks and as_json:
            print(json.dumps(plan.document(), indent=2))
        elif speaks:
            print_plan(plan, Console())
        return
    if replay is not None:
        from sinklab.commands.terminal.training import print_replay

        found = replay_command(recipe, overrides or [], out, replay, stderr())
        if as_json:
            print(json.dumps(found.document(), indent=2))
        else:
            print_replay(found, Console())
        return
    with keeping_what_is_finished():
        ended = train_command(recipe, overrides or [], out, stderr(), [name.value for name in track or []], anyway)
        if ended.exit_status:
            raise typer.Exit(ended.exit_status)
    if as_json and ended.speaks:
        print((ended.directory / "measurement.json").read_text(encoding="utf-8"), end="")
    elif ended.speaks:
        from sinklab.commands.terminal.training import print_end

        print_end(ended.directory, ended.recipe, Console())


app.command("measure")(measure)
app.command("compare")(compare)
app.command("parity")(parity)
app.command("assess")(assess)
app.command("eval")(evaluate)
app.command("export")(export)
app.command("sft")(sft)


app.command()(reproduce.experiments)
app.command()(reproduce.reproduce)


@app.command()
def interventions(as_json: Json = False) -> None:
    """List everything a recipe can change: keys, legal values, defaults, and the values that change nothing."""
    from dataclasses import asdict

    from sinklab.commands.terminal.experiments import print_catalogue
    from sinklab.interventions.catalogue import catalogue

    rows = catalogue()
    if as_json:
        print(json.dumps([asdict(row) for row in rows], indent=2))
    else:
        print_catalogue(rows, Console())


@app.command()
def report(
    directories: Annotated[list[Path], typer.Argument(metavar="DIR...", help="Run, measurement or lab directories.")],
    out: Annotated[Path | None, typer.Option(help="The HTML file; default report.html in the first directory.")] = None,
    formats: Annotated[
        list[str] | None, typer.Option("--format", help="Also write every chart as svg, pdf or png; may be repeated.")
    ] = None,
    pack: Annotated[
        Path | None,
        typer.Option(help="Also copy one sweep without its weights into this folder, small enough to be committed."),
    ] = None,
) -> None:
    """(Re)draw report.html from what is on disk, also while runs go on."""
    from sinklab.commands.terminal.results import print_report
    from sinklab.report import write_report
    from sinklab.report.collect import collect

    if pack is not None:
        from sinklab.report.experiments.packing import pack_sweep

        stderr().print(f"packed: {pack_sweep(directories, pack)}", highlight=False, soft_wrap=True)
    path = write_report(directories, out, tuple(formats or ()))
    print_report(collect(directories), Console())
    stderr().print(f"report: {path}", highlight=False, soft_wrap=True)


@app.command()
def verify(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="A folder written by report --pack.")],
    retrain: Annotated[int, typer.Option(min=0, help="Train so many runs again, drawn at random, and compare.")] = 0,
    seed: Annotated[int, typer.Option(min=0, help="Of the draw of runs.")] = 0,
    as_json: Json = False,
) -> None:
    """Check packed results: checksums, the hash of every recipe, every verdict judged anew, runs trained again.

    Example: sinklab verify results/tiny --retrain 2

    A run trained again must have the same bits where processor, versions and threads are those of its record, and else
    the same validation loss within the tolerance that is printed. Exit status 1 where something is not as it should be.
    """
    from sinklab.commands.verify import verify_command

    verify_command(directory, retrain, seed, as_json)


@app.command()
def runs(
    directories: Annotated[
        list[Path], typer.Argument(metavar="DIR...", help="Directories with runs in or below them.")
    ],
    as_json: Json = False,
) -> None:
    """List training runs: state, step, sink, loss, and in what they differ.

    States: running, done, stopped (the same command continues it), failed, not begun, damaged.
    """
    from dataclasses import asdict

    from sinklab.commands.terminal.training import print_runs
    from sinklab.report.runs import list_runs

    found = list_runs(directories)
    if as_json:
        print(json.dumps([asdict(run) for run in found], indent=2))
    else:
        print_runs(found, Console())


data_app.command("prepare")(data.prepare)
