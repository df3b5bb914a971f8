"""`sinklab lab`, `experiments` and `reproduce`: data, runs side by side, summary.json, the report, and a table."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from sinklab.commands.ending import stderr
from sinklab.commands.options import Json
from sinklab.signals import keeping_what_is_finished

if TYPE_CHECKING:
    from sinklab.experiments.definition import Experiment

RUNS = Path("runs")
Updates = Annotated[int | None, typer.Option(min=1, help="Updates per model; the recipe's unless given.")]
TrainingText = Annotated[Path | None, typer.Option(help="Train on this .txt or .jsonl file or folder instead.")]
Seeds = Annotated[int, typer.Option(min=1, help="Models per cell, with seeds 0, 1, ...")]


def lab(
    out: Annotated[Path, typer.Option(help="Directory of the runs, summary.json and report.html.")] = RUNS / "lab",
    steps: Updates = None,
    text: TrainingText = None,
    seeds: Seeds = 1,
    as_json: Json = False,
) -> None:
    """Train three tiny models side by side and watch the sink appear, move and stay away.

    Softmax grows a sink on the first token; with K biases it moves to the bias; sigmoid without normalisation grows
    none. Ends with a table and report.html. Interrupt it with Ctrl-C and call it again to continue.
    """
    from sinklab.experiments.definition import load_experiment

    with keeping_what_is_finished():
        run_experiment(load_experiment("lab"), out, seeds, _changes(steps, text), as_json, stderr())


def experiments(as_json: Json = False) -> None:
    """List the experiments that `sinklab reproduce` runs, with their cells."""
    from sinklab.commands.terminal.experiments import print_experiments
    from sinklab.experiments.definition import experiment_ids, load_experiment

    found = [load_experiment(name) for name in experiment_ids()]
    if as_json:
        print(json.dumps([one.model_dump(mode="json") for one in found], indent=2))
    else:
        print_experiments(found, Console())


def reproduce(
    experiment: Annotated[
        str, typer.Argument(help="The id of an experiment (see sinklab experiments), or a .yaml file.")
    ],
    out: Annotated[
        Path | None, typer.Option(help="Directory of the runs, summary.json and report.html; runs/ID unless given.")
    ] = None,
    steps: Updates = None,
    text: TrainingText = None,
    seeds: Seeds = 1,
    jobs: Annotated[int | None, typer.Option(min=1, help="Models at a time; as many as the cores suggest.")] = None,
    as_json: Json = False,
) -> None:
    """Train every cell of an experiment, compare them, and judge its claims.

    Example: sinklab reproduce table_4 --seeds 3

    Ends with a table, summary.json and report.html. Interrupt it with Ctrl-C and call it again to continue; what has
    been trained is not trained again.
    """
    from sinklab.experiments.definition import load_experiment

    asked = load_experiment(experiment)
    with keeping_what_is_finished():
        run_experiment(asked, out or RUNS / asked.id, seeds, _changes(steps, text), as_json, stderr(), jobs)


def run_experiment(
    experiment: "Experiment",
    out: Path,
    seeds: int,
    overlay: Mapping[str, Any],
    as_json: bool,
    console: Console,
    jobs: int | None = None,
) -> None:
    """Train what is missing of all cells below `out`; `console` is told how it goes, standard output the result.

    Args:
        overlay: laid over every cell.
        jobs: runs at a time; as many as the cores suggest unless given.

    Raises:
        InputError: text or a directory that cannot be used, or an overlay that makes an invalid recipe.
        SinklabError: some runs failed; the others are finished and summarised.
        KeyboardInterrupt: Ctrl-C; everything is saved and the same call continues.
        PreemptedError: SIGTERM or SIGUSR1, likewise.
    """
    from sinklab.commands.console import RunBoard, data_progress
    from sinklab.commands.terminal.report import print_report
    from sinklab.commands.timing import RunLength
    from sinklab.experiments.pool import processes_for
    from sinklab.experiments.running import prepare_data, runs_of, train_runs
    from sinklab.outputs import REPORT, check_results
    from sinklab.report import write_report
    from sinklab.report.collect import collect

    check_results(out, ("summary.json", REPORT))
    runs = runs_of(experiment, out, seeds, overlay)
    with data_progress(console) as progress:
        prepare_data(runs, progress)
    lengths = {run.name: RunLength(run.recipe.train.steps, run.recipe.train.eval_every) for run in runs}
    jobs = jobs or processes_for(len(runs), os.cpu_count() or 1)
    with RunBoard(console, lengths, jobs) as board:
        summary = train_runs(experiment, runs, out, jobs, board.watch)
    path = write_report([out])
    if as_json:
        print(json.dumps(summary.model_dump(), indent=2))
    else:
        print_report(collect([out]), Console())
    console.print(f"report: {path}", highlight=False, soft_wrap=True)


def _changes(steps: int | None, text: Path | None) -> dict[str, Any]:
    """What the options change in every recipe."""
    changes: dict[str, Any] = {}
    if steps is not None:
        changes["train"] = {"steps": steps}
    if text is not None:
        changes["data"] = {"source": str(text)}
    return changes
