"""`sinklab lab`, `experiments` and `reproduce`: options to a sweep, and its summary to the terminal."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from sinklab.commands.ending import stderr
from sinklab.commands.options import Json
from sinklab.errors import InputError
from sinklab.experiments.sweep.engines import EngineName
from sinklab.signals import keeping_what_is_finished

if TYPE_CHECKING:
    from sinklab.commands.sweeping import SweepRequest
    from sinklab.experiments.definition import Experiment, Scale
    from sinklab.experiments.sweep.plan import Question

RUNS = Path("runs")
ALL, TINY = "all", "tiny"
DRAWS = 5
"""Sets of sequences that an existing model is measured on unless told."""

Updates = Annotated[int | None, typer.Option(min=1, help="Updates per model; the recipe's unless given.")]
LabText = Annotated[Path | None, typer.Option(help="Train on this .txt or .jsonl file or folder instead.")]
TrainingText = Annotated[
    Path | None, typer.Option(help="Train on this .txt or .jsonl file or folder instead; or measure a --model on it.")
]


def lab(
    out: Annotated[Path, typer.Option(help="Directory of the runs, summary.json and report.html.")] = RUNS / "lab",
    steps: Updates = None,
    text: LabText = None,
    seeds: Annotated[int, typer.Option(min=1, help="Models per cell; it takes five for verdicts.")] = 1,
    as_json: Json = False,
) -> None:
    """Train three tiny models side by side and watch the sink appear, move and stay away.

    Softmax grows a sink on the first token; with K biases it moves to the bias; sigmoid without normalisation grows
    none. One model of each kind gives numbers and no verdict; what five of each gave stands beside them.
    Ends with a table and report.html. Interrupt it with Ctrl-C and call it again to continue.
    """
    from sinklab.commands.sweeping import SweepRequest
    from sinklab.experiments.sweep.plan import Question

    with keeping_what_is_finished():
        (experiment,) = _named("lab", "tiny")
        questions = [Question(experiment, "tiny", seeds)]
        _run(SweepRequest(questions, out, _changes(steps, text)), as_json)


def experiments(
    names: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[EXPERIMENT...]", help="Ids or .yaml files to be shown in full; all are listed without."
        ),
    ] = None,
    coverage: Annotated[
        bool, typer.Option("--coverage", help="List the parts of the paper instead, with the claims that encode them.")
    ] = False,
    as_json: Json = False,
) -> None:
    """List the experiments that `sinklab reproduce` runs: question, cells, and the time they take on this machine."""
    from sinklab.commands.terminal.plans import print_coverage, print_experiment, print_experiments
    from sinklab.experiments.paper import paper_coverage
    from sinklab.experiments.shipped import list_experiments

    if coverage:
        if names:
            raise InputError(f"--coverage lists the whole paper: leave out {names[0]}")
        if as_json:
            print(json.dumps({name: part.model_dump() for name, part in paper_coverage().items()}, indent=2))
        else:
            print_coverage(paper_coverage(), Console())
        return
    found = list_experiments(names or ())
    if as_json:
        print(json.dumps([one.document() for one in found], indent=2))
    elif names:
        for one in found:
            print_experiment(one, Console())
    else:
        print_experiments(found, Console())


def reproduce(
    names: Annotated[
        list[str],
        typer.Argument(
            metavar="EXPERIMENT...",
            help="Ids (see sinklab experiments), .yaml files of your own, or: all of the scale.",
        ),
    ],
    scale: Annotated[str, typer.Option(help="tiny, mini, small, 60m or 1b, of those that the experiment has.")] = TINY,
    seeds: Annotated[
        int | None,
        typer.Option(min=1, help="Models per cell, the first so many of the experiment's seeds; all, mostly 5."),
    ] = None,
    models: Annotated[
        list[str] | None,
        typer.Option(
            "--model",
            help="What experiments on existing models measure, on --seeds draws of sequences: Hugging Face id, "
            "directory, .gguf file or run directory; the chat model second.",
        ),
    ] = None,
    steps: Updates = None,
    text: TrainingText = None,
    data: Annotated[
        Path | None, typer.Option(help="HellaSwag's file, for experiments on existing models that ask it.")
    ] = None,
    jobs: Annotated[int | None, typer.Option(min=1, help="Models at a time; as many as the cores suggest.")] = None,
    engine: Annotated[EngineName, typer.Option(help="Where models are trained.")] = EngineName.local,
    engine_options: Annotated[
        list[str] | None,
        typer.Option(
            "--engine-option", metavar="KEY=VALUE", help="Of slurm or ray, such as partition=gpu; may be repeated."
        ),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Train nothing: print the cells, what each changes, and the hours.")
    ] = False,
    out: Annotated[
        Path | None, typer.Option(help="Directory of the runs, summary.json and report.html; runs/SCALE unless given.")
    ] = None,
    packed: Annotated[
        Path | None, typer.Option(help="Folder written by report --pack, whose runs count as trained: continue it.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Train every cell of experiments, compare them, and judge their claims.

    Example: sinklab reproduce table_4 table_2 --scale tiny --seeds 5 --jobs 2

    Experiments on existing models (tables 1, 7 and 8, figures 2, 3, 9, 10 and 19, propositions) train nothing and
    measure a --model.

    Example: sinklab reproduce table_1 figure_2 --model MODEL --text FILE

    Ends with our numbers beside the paper's, the verdict of each claim, summary.json and report.html. What has been
    trained below the directory is not trained again, and several of these commands, on any machines that see it, share
    the work. Interrupt it with Ctrl-C and call it again to continue.
    """
    from sinklab.commands.reproduce_measured import measured_among, measured_command
    from sinklab.commands.sweeping import SweepRequest, look_ahead

    if about_models := measured_among(names, models or ()):
        training = {"--steps": steps, "--jobs": jobs, "--engine-option": engine_options, "--packed": packed}
        given = [option for option, value in training.items() if value is not None]
        given += [f"--scale {scale}"] * (scale != TINY) + [f"--engine {engine.value}"] * (engine != EngineName.local)
        if given:
            raise InputError(f"{given[0]} is about training, and {about_models[0].id} trains nothing: leave it out")
        measured_command(about_models, models or (), text, out, seeds or DRAWS, dry_run, as_json, data)
        return
    if data is not None:
        raise InputError(
            f"--data {data} is of experiments on existing models, and {names[0]} trains its own: leave it out"
        )
    questions = _questions(names, scale, seeds)
    changes = _changes(steps, text)
    request = SweepRequest(questions, out or RUNS / scale, changes, jobs, engine, engine_options or (), packed)
    if dry_run:
        from sinklab.commands.terminal.plans import print_preview

        ahead = look_ahead(request)
        if as_json:
            print(json.dumps(ahead.document(), indent=2))
        else:
            print_preview(ahead, Console())
        return
    with keeping_what_is_finished():
        if ALL in names:
            from sinklab.commands.terminal.plans import hours_line

            stderr().print(hours_line(look_ahead(request)), highlight=False, soft_wrap=True)
        _run(request, as_json)


def _questions(names: Sequence[str], scale: str, seeds: int | None) -> "list[Question]":
    """The experiments that were asked for, each once."""
    from sinklab.experiments.definition import SCALES
    from sinklab.experiments.sweep.plan import Question

    found: dict[str, Experiment] = {}
    for name in dict.fromkeys(names):
        for one in _named(name, scale):
            if found.setdefault(one.id, one) != one:
                raise InputError(f"two different experiments are called {one.id}: ask for them one after the other")
    if not found:
        raise InputError(f"no experiment has scale {scale!r}; there are: {', '.join(SCALES)}")
    return [Question(one, _scale_of(one, scale), seeds or one.seeds) for one in found.values()]


def _named(name: str, scale: str) -> "list[Experiment]":
    """The experiments of a name; of all of a scale, most informative first."""
    from sinklab.experiments.shipped import experiment_ids, load_experiment

    loaded = [load_experiment(one) for one in (experiment_ids() if name == ALL else [name])]
    return [one for one in loaded if not one.requests and (name != ALL or scale in one.base)]


def _scale_of(experiment: "Experiment", scale: str) -> "Scale":
    for known in experiment.base:
        if known == scale:
            return known
    raise InputError(f"{experiment.id} has no scale {scale!r}; it has: {', '.join(experiment.base)}")


def _run(request: "SweepRequest", as_json: bool) -> None:
    """Run the sweep; standard output gets its result.

    Raises:
        Exit: with status 1, some runs failed that should not have.
    """
    from sinklab.commands.sweeping import sweep
    from sinklab.commands.terminal.results import print_summary
    from sinklab.outputs import REPORT

    console = stderr()
    ended = sweep(request, console)
    if as_json:
        print(json.dumps(ended.summary.model_dump(by_alias=True), indent=2))
    else:
        print_summary(ended.summary, [one.experiment.id for one in request.questions], Console())
    for directory, files in ended.edited.items():
        console.print(
            f"warning: {request.out / directory} was changed by hand since its run ended ({', '.join(files)})",
            highlight=False,
            markup=False,
            soft_wrap=True,
        )
    for run, why in ended.unassessed.items():
        console.print(f"warning: {run} was not assessed: {why}", highlight=False, markup=False, soft_wrap=True)
    console.print(f"report: {request.out / REPORT}", highlight=False, soft_wrap=True)
    for run, message in ended.failures.items():
        console.print(f"failed: {run}: {message}", highlight=False, markup=False, soft_wrap=True)
    if ended.failures:
        raise typer.Exit(1)


def _changes(steps: int | None, text: Path | None) -> dict[str, Any]:
    """What the options change in every recipe."""
    changes: dict[str, Any] = {}
    if steps is not None:
        changes["train"] = {"steps": steps}
    if text is not None:
        if not text.exists():
            raise InputError(f"--text {text}: there is no such file or folder")
        changes["data"] = {"source": str(text)}
    return changes
