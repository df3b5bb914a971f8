"""The command line: one thin function per command. Results go to standard output, everything else to stderr."""

import json
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from sinklab import __version__
from sinklab.commands import data, reproduce
from sinklab.commands.ending import end, stderr
from sinklab.commands.options import (
    BatchSize,
    Device,
    Dtype,
    Eps,
    InputKind,
    Inputs,
    Json,
    Length,
    NoBos,
    Precision,
    Revision,
    Seed,
    Sequences,
    TableFormat,
    Text,
    Track,
    TrustRemoteCode,
)
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
    recipe: Annotated[str, typer.Argument(help="A recipe file, or one of tiny, tiny-128, 60m, 1b, backcopy.")],
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
    track: Track = None,
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
        print((ended.directory / "measurement.json").read_text(encoding="utf-8"))
    elif ended.speaks:
        from sinklab.commands.terminal.training import print_end

        print_end(ended.directory, ended.recipe, Console())


@app.command()
def measure(
    model: Annotated[
        str | None,
        typer.Argument(help="Hugging Face id, model directory, .gguf file or run directory; none with --family."),
    ] = None,
    text: Text = None,
    inputs: InputKind = Inputs.natural,
    sequences: Sequences = 100,
    length: Length = 64,
    eps: Eps = None,
    lengths: Annotated[
        list[int] | None, typer.Option(min=1, help="Also of the same sequences cut shorter; may be repeated.")
    ] = None,
    details: Annotated[
        bool, typer.Option("--details", help="Also angles, entropy, distances, secondary sinks and kurtosis; slower.")
    ] = False,
    maps: Annotated[
        list[str] | None,
        typer.Option("--map", metavar="LAYER.HEAD", help="Details, and the matrix of this head; may be repeated."),
    ] = None,
    no_bos: NoBos = False,
    no_loss: Annotated[
        bool, typer.Option("--no-loss", help="Leave out the loss and the logits: a third faster on a small model.")
    ] = False,
    ablate: Annotated[
        list[str] | None,
        typer.Option(help="Also without something: mask_first:N, no_bos or zero_massive; may be repeated."),
    ] = None,
    swap_position: Annotated[
        tuple[int, int] | None, typer.Option(metavar="I J", help="Measure with two learned positions swapped.")
    ] = None,
    replace_position: Annotated[
        tuple[int, int] | None, typer.Option(metavar="I J", help="Measure with learned position I replaced by J.")
    ] = None,
    batch_size: BatchSize = None,
    dtype: Dtype = Precision.auto,
    device: Device = "auto",
    seed: Seed = 0,
    revision: Revision = None,
    trust_remote_code: TrustRemoteCode = False,
    by_domain: Annotated[
        bool, typer.Option("--by-domain", help="Each file of the folder --text by itself: one table and chart.")
    ] = False,
    family: Annotated[
        list[str] | None,
        typer.Option(help="The paper's: gpt2, llama2, llama3, mistral, pythia, opt, jamba or all; may be repeated."),
    ] = None,
    models_dir: Annotated[
        Path | None, typer.Option(help="With --family: where the models lie, in directories named as on the hub.")
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="With --family: only list parameters, disk and memory.")
    ] = False,
    out: Annotated[
        Path | None,
        typer.Option(help="Directory for measurements and report.html; with --family runs/families unless given."),
    ] = None,
    formats: Annotated[
        list[TableFormat] | None,
        typer.Option("--format", help="Also write the tables of one MODEL to --out; may be repeated."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Measure the attention sinks of a causal language model: where, how strong, and what goes with them.

    With --by-domain or --family there are many measurements, each kept in a directory of its own below --out: the
    same call continues after an interruption.
    """
    from sinklab.commands.measure import Call, announce, domains_command, families_command, model_command, one_model
    from sinklab.commands.measure_one import parse_eps, parse_maps
    from sinklab.measuring.frames import check_formats
    from sinklab.measuring.huggingface.loading import Loading
    from sinklab.measuring.surgery.study import Study

    tables = [kind.value for kind in formats or ()]
    check_formats(tables, out, one=not (by_domain or family))
    asked: dict[str, Any] = {
        "inputs": inputs.value,
        "sequences": sequences,
        "length": length,
        "eps": parse_eps(eps or ["0.3"]),
        "lengths": lengths or (),
        "details": details,
        "maps": parse_maps(maps or ()),
        "no_bos": no_bos,
        "loss": not no_loss,
        "batch_size": batch_size,
        "study": Study(ablate or (), swap_position, replace_position),
        "seed": seed,
    }
    console = stderr()
    loading = Loading(dtype.value, device, trust_remote_code, revision, say=partial(announce, console))
    call = Call(text, asked, loading, out, as_json, console)
    name = one_model(model, family, by_domain, models_dir, dry_run, revision)
    goes_on = (name is None and not dry_run) or (by_domain and out is not None)
    with keeping_what_is_finished() if goes_on else nullcontext():
        if name is None:
            families_command(family or [], models_dir, dry_run, call)
        elif by_domain:
            domains_command(name, call)
        else:
            model_command(name, call, tables)


@app.command()
def compare(
    models: Annotated[
        list[str], typer.Argument(metavar="A B...", help="Hugging Face ids, directories or .gguf files.")
    ],
    text: Text = None,
    inputs: InputKind = Inputs.natural,
    sequences: Sequences = 100,
    length: Length = 64,
    eps: Eps = None,
    no_bos: NoBos = False,
    batch_size: BatchSize = None,
    dtype: Dtype = Precision.auto,
    device: Device = "auto",
    seed: Seed = 0,
    revision: Revision = None,
    trust_remote_code: TrustRemoteCode = False,
    out: Annotated[
        Path | None, typer.Option(help="Directory for a measurement per model, comparison.json and report.html.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Measure models on the same text, side by side: base against chat, small against large.

    Each reads the text through its own tokenizer, and conversations (messages) through its own chat template.
    Differences are from the first model.
    """
    from sinklab.commands.measure import Call, announce, compare_command
    from sinklab.commands.measure_one import parse_eps
    from sinklab.measuring.huggingface.loading import Loading

    asked: dict[str, Any] = {
        "inputs": inputs.value,
        "sequences": sequences,
        "length": length,
        "eps": parse_eps(eps or ["0.3"]),
        "no_bos": no_bos,
        "batch_size": batch_size,
        "seed": seed,
    }
    console = stderr()
    loading = Loading(dtype.value, device, trust_remote_code, revision, say=partial(announce, console))
    with keeping_what_is_finished() if out is not None else nullcontext():
        compare_command(models, Call(text, asked, loading, out, as_json, console))


app.command()(reproduce.experiments)
app.command()(reproduce.reproduce)


@app.command()
def interventions(as_json: Json = False) -> None:
    """List everything a recipe can change: keys, legal values, defaults, and the values that change nothing."""
    from dataclasses import asdict

    from sinklab.commands.terminal.interventions import print_catalogue
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
) -> None:
    """(Re)draw report.html from what is on disk, also while runs go on."""
    from sinklab.commands.terminal.report import print_report
    from sinklab.report import write_report
    from sinklab.report.collect import collect

    path = write_report(directories, out, tuple(formats or ()))
    print_report(collect(directories), Console())
    stderr().print(f"report: {path}", highlight=False, soft_wrap=True)


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

    from sinklab.commands.tables import print_table
    from sinklab.report.runs import list_runs, runs_table

    found = list_runs(directories)
    if as_json:
        print(json.dumps([asdict(run) for run in found], indent=2))
    else:
        print_table(runs_table(found), Console())


data_app.command("prepare")(data.prepare)
