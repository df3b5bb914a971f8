"""Command line of `sinklab experiments`, `reproduce` and `lab`.

`lab` trains six small models that show where a sink is, where it moves, and when there is none.
"""

import shlex
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from sinklab.commands.options import (
    DEFAULT_SCALE,
    MOST_SEEDS,
    Json,
    ReproduceSettings,
    option,
    print_result,
    with_options,
)
from sinklab.commands.terminal import JobProgress, print_text, stderr
from sinklab.errors import InputError
from sinklab.files import RUNS
from sinklab.settings import INPUT, OUTPUT, option_name
from sinklab.signals import keeping_what_is_finished

if TYPE_CHECKING:
    from rich.console import Console

    from sinklab.experiments.definition import Experiment
    from sinklab.experiments.documents import Summary

ALL = "all"
ONLY_TRAINING = ("cells", "steps", "jobs", "engine_options", "packed", "scale", "engine", "shard")
"""Settings that are invalid with experiments on existing models."""


@with_options
def experiments(
    names: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="EXPERIMENT...", help="Ids or .yaml files to show in full; default: list all experiments."
        ),
    ] = None,
    coverage: Annotated[
        bool, option(OUTPUT, "List the parts of the paper with their claims, or the reason for having none.")
    ] = False,
    as_json: Json = False,
) -> None:
    """List the experiments of `sinklab reproduce`: question, cells, and estimated time on this machine.

    Example: sinklab experiments table_4
    """
    from sinklab.commands.results import print_coverage, print_experiment, print_experiments
    from sinklab.experiments.paper import paper_coverage
    from sinklab.experiments.shipped import list_experiments, listing

    if coverage:
        if names:
            raise InputError(f"--coverage applies to the whole paper: remove {names[0]}")
        parts = paper_coverage()
        document = {name: part.model_dump() for name, part in parts.items()}
        print_result(as_json, lambda: document, lambda out: print_coverage(parts, out))
        return
    found = list_experiments(names or ())

    def show(out: Console) -> None:
        if not names:
            print_experiments(found, out)
            return
        for name, (experiment, costs) in zip(names, found, strict=True):
            given = ["--dry-run"]
            if experiment.requests:
                given = ["--text", "FOLDER" if experiment.each == "domain" else "FILE", *given]
            if experiment.requests and not experiment.names_models:
                given = ["--model", "MODEL", *given]
            print_experiment((experiment, costs), shlex.join(["sinklab", "reproduce", name, *given]), out)

    print_result(as_json, lambda: [listing(*one) for one in found], show)


@with_options
def reproduce(
    names: Annotated[
        list[str],
        typer.Argument(
            metavar="EXPERIMENT...",
            help="Ids (see sinklab experiments), your own .yaml files, or all: every experiment that trains models at "
            "--scale; experiments with fine-tuning are included only if --data is passed.",
        ),
    ],
    settings: ReproduceSettings,
    full: Annotated[bool, option(OUTPUT, "Also print every number, claim and note.")] = False,
    as_json: Json = False,
) -> None:
    """Run experiments: train their models or measure existing ones, and judge their claims.

    Example: sinklab reproduce laptop_biases laptop_decay --seeds 5 --jobs 2

    Some experiments measure existing models: tables 1, 7 and 8, figures 2, 3, 9, 10 and 19 and propositions require
    --model; polypythias, smollm2_checkpoints, outlier_safe and gated_attention have fixed models.

    Example: sinklab reproduce table_1 figure_2 --model MODEL --text FILE

    figure_30 trains its models and fine-tunes them on conversations: --data CHATS.jsonl.

    The command prints what holds and what does not, and writes summary.json and report.html, with our numbers next to
    the paper's. Finished runs in the directory are not retrained. Concurrent commands with the same directory, also on
    several machines with a shared file system, divide the runs among themselves. After Ctrl-C, the same command
    resumes.
    """
    from sinklab.commands.results import hours_line, print_preview, print_summary, print_verdicts

    found = named_experiments(names, settings)
    if found[0].requests:
        from sinklab.commands.reproducing import measure_experiments, preview_measured

        if settings.dry_run:
            preview_measured(found, settings, as_json)
            return
        with keeping_what_is_finished():
            measure_experiments(found, settings, as_json, print_summary if full else print_verdicts)
        return
    from sinklab.commands.reproducing import check_chats, look_ahead, train_experiments

    if settings.scale in (None, DEFAULT_SCALE):
        for line in at_main_scale(found):
            print_text(line, stderr())
    if settings.scale is None:
        settings = settings.model_copy(update={"scale": common_scale(found)})
    if settings.data is not None or not settings.dry_run:
        check_chats(found, settings.data)
    if settings.dry_run or ALL in names:
        with JobProgress(stderr(), phase="timing a few updates"):
            ahead = look_ahead(found, settings)
        if settings.dry_run:
            print_result(as_json, ahead.document, lambda out: print_preview(ahead, out))
            return
        print_text(hours_line(ahead), stderr())
    with keeping_what_is_finished():
        show = partial(print_summary if full else print_verdicts, wanted=[one.id for one in found])
        train_experiments(found, settings, as_json, lambda summary, console: show(summary, console=console))


def named_experiments(names: Sequence[str], settings: ReproduceSettings) -> "list[Experiment]":
    """Return the named experiments without duplicates; InputError if they do not fit each other or the options.

    The name `all` selects the shipped experiments that train models at the scale; those that fine-tune their models
    are included only if conversations are passed (--data).
    """
    from sinklab.experiments.definition import SCALES
    from sinklab.experiments.shipped import experiment_ids, load_experiment

    scale = settings.scale_name
    found: dict[str, Experiment] = {}
    for name in dict.fromkeys(names):
        loaded = [load_experiment(one) for one in (experiment_ids() if name == ALL else [name])]
        if name == ALL:
            loaded = [one for one in loaded if scale in one.base and (settings.data or not one.tune)]
        for one in loaded:
            if found.setdefault(one.id, one) != one:
                raise InputError(f"two different experiments have the id {one.id}: run them in separate commands")
    if not found:
        raise InputError(f"no experiment has scale {scale!r}; choose from: {', '.join(SCALES)}")
    measures = {bool(one.requests): one.id for one in reversed(found.values())}
    if len(measures) == 2:
        raise InputError(
            f"{measures[True]} measures existing models, and {measures[False]} trains its own: run them in separate "
            "commands"
        )
    if False in measures and settings.models:
        raise InputError(f"--model {settings.models[0]}: {measures[False]} trains its own models; remove --model")
    for name in ONLY_TRAINING if True in measures else ():
        if (value := getattr(settings, name)) != ReproduceSettings.model_fields[name].default:
            option = f"{option_name(ReproduceSettings, name)}{f' {value}' if isinstance(value, str) else ''}"
            raise InputError(f"{option} applies to training, and {measures[True]} trains no model: remove it")
    return list(found.values())


def common_scale(experiments: "Sequence[Experiment]") -> str:
    """Return the first scale that all experiments have; InputError if they have none in common."""
    first, *others = experiments
    for scale in first.base:
        if all(scale in one.base for one in others):
            return scale
    own = [f"{one.id} has {', '.join(one.base)}" for one in experiments]
    raise InputError(f"these experiments have no scale in common: {'; '.join(own)}. Run them in separate commands")


def at_main_scale(experiments: "Sequence[Experiment]") -> list[str]:
    """Return a line for each experiment whose statements others test at the main scale, which it lacks."""
    from sinklab.experiments.shipped import counterparts

    others = {one.id: counterparts(one.id, DEFAULT_SCALE) for one in experiments}
    return [
        f"The statements of {name} at the main scale, {DEFAULT_SCALE}: sinklab reproduce {' '.join(found)}"
        for name, found in others.items()
        if found
    ]


MODELS = {
    "task_softmax": "copy task, softmax",
    "task_k_biases": "copy task, K biases",
    "task_relu": "copy task, ReLU",
    "softmax": "language model, softmax",
    "k_biases": "language model, K biases",
    "sigmoid": "language model, sigmoid",
}
"""Cells of the experiment and their names in the table."""


@with_options
def lab(
    out: Annotated[Path, option(OUTPUT, "Directory for the runs, summary.json and report.html.")] = RUNS / "lab",
    steps: Annotated[int | None, option(INPUT, "Updates per model; default: as in the recipe.", min=1)] = None,
    text: Annotated[Path | None, option(INPUT, "Train on this text file or folder; default: as in the recipe.")] = None,
    seeds: Annotated[int, option(INPUT, "Models of each kind; a verdict requires five.", min=1, max=MOST_SEEDS)] = 1,
    as_json: Json = False,
) -> None:
    """Train six small models that show what an attention sink is, where it moves, and when there is none.

    Three have one head and learn a copy task in a minute: softmax attention, K biases and ReLU attention. Three are
    language models: softmax, K biases and sigmoid attention. Together they take five to ten minutes on two cores.

    Example: sinklab lab --steps 500 --out runs/short

    The command prints a table and three sentences, and writes report.html. After Ctrl-C, the same command resumes.
    """
    from sinklab.commands.reproducing import train_experiments
    from sinklab.experiments.shipped import load_experiment
    from sinklab.experiments.sweep.local import cards_here, cores_here

    experiment = load_experiment("lab")
    jobs = None if cards_here() else min(len(experiment.cells), max(3, cores_here()))
    with keeping_what_is_finished():
        settings = ReproduceSettings(out=out, steps=steps, text=text, jobs=jobs, scale="lab", seeds=seeds)
        train_experiments([experiment], settings, as_json, print_lab)


def print_lab(summary: "Summary", console: "Console") -> None:
    """Print a line per model and three sentences; medians if there are several models of a kind."""
    from sinklab.commands.terminal import print_table
    from sinklab.report.sections import lab_sentences
    from sinklab.tables import Table, TableColumn, names, numbers

    def value(cell: str, quantity: str) -> float | None:
        found = summary.cell("lab", cell).estimate(quantity)
        return found.median if found else None

    columns = [*names("Six small models"), *numbers(".0f", "sink on first token, %", "on bias, %")]
    columns.append(TableColumn("loss, nats", form=".2f"))
    quantities = ("sink_1", "sink_bias", "valid_loss")
    rows = [[label, *(value(cell, one) for one in quantities)] for cell, label in MODELS.items()]
    print_table(Table("", columns, rows), console)
    for line in lab_sentences(summary):  # none if a run failed, which is said below
        console.print(line, markup=False, highlight=False)
    console.print("Your own model: sinklab measure MODEL --out DIR", markup=False, highlight=False)
