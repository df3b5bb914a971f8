"""Command line of `sinklab experiments` and `reproduce`."""

import shlex
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from sinklab.commands.from_model import with_options
from sinklab.commands.options import Json, ReproduceSettings, option, print_result
from sinklab.commands.terminal.progress import JobProgress
from sinklab.commands.terminal.tables import print_text, stderr
from sinklab.errors import InputError
from sinklab.settings import OUTPUT, option_name
from sinklab.signals import keeping_what_is_finished

if TYPE_CHECKING:
    from sinklab.experiments.definition import Experiment

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
    from sinklab.commands.terminal.plans import print_coverage, print_experiment, print_experiments
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
        for name, one in zip(names, found, strict=True):
            print_experiment(one, _plan_command(name, one[0]), out)

    print_result(as_json, lambda: [listing(*one) for one in found], show)


def _plan_command(name: str, experiment: "Experiment") -> str:
    """Return the command that prints the plan of an experiment, with placeholders for the model and the text."""
    given = ["--dry-run"]
    if experiment.requests:
        given = ["--text", "FOLDER" if experiment.each == "domain" else "FILE", *given]
    if experiment.requests and not experiment.names_models:
        given = ["--model", "MODEL", *given]
    return shlex.join(["sinklab", "reproduce", name, *given])


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
    as_json: Json = False,
) -> None:
    """Run experiments: train their models or measure existing ones, and judge their claims.

    Example: sinklab reproduce table_4 table_2 --scale tiny --seeds 5 --jobs 2

    Some experiments measure existing models: tables 1, 7 and 8, figures 2, 3, 9, 10 and 19 and propositions require
    --model; polypythias, smollm2_checkpoints, outlier_safe and gated_attention have fixed models.

    Example: sinklab reproduce table_1 figure_2 --model MODEL --text FILE

    figure_30 trains its models and fine-tunes them on conversations: --data CHATS.jsonl.

    The command prints our numbers next to the paper's and the verdict of each claim, and writes summary.json and
    report.html. Finished runs in the directory are not retrained. Concurrent commands with the same directory, also on
    several machines with a shared file system, divide the runs among themselves. After Ctrl-C, the same command
    resumes.
    """
    found = named_experiments(names, settings)
    if found[0].requests:
        from sinklab.commands.reproducing import measure_experiments, preview_measured

        if settings.dry_run:
            preview_measured(found, settings, as_json)
            return
        with keeping_what_is_finished():
            measure_experiments(found, settings, as_json)
        return
    from sinklab.commands.reproducing import check_chats, look_ahead, train_experiments
    from sinklab.commands.terminal.plans import hours_line, print_preview

    if settings.scale is None and len(found[0].base) == 1:
        settings = settings.model_copy(update={"scale": next(iter(found[0].base))})
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
        train_experiments(found, settings, as_json)


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
