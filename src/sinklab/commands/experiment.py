"""An experiment as a command: data, runs side by side, summary.json, the report, and a table."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console

from sinklab.commands.console import RunBoard, data_progress
from sinklab.commands.terminal.report import print_report
from sinklab.commands.timing import Length
from sinklab.experiments.definition import Experiment
from sinklab.experiments.pool import processes_for
from sinklab.experiments.running import cells_of, prepare_data, train_cells
from sinklab.outputs import REPORT, check_results
from sinklab.report import write_report
from sinklab.report.collect import collect


def experiment_command(
    experiment: Experiment, out: Path, seeds: int, overlay: Mapping[str, Any], as_json: bool, console: Console
) -> None:
    """Train what is missing of all cells below `out`; `console` is told how it goes, standard output the result.

    Raises:
        InputError: text or a directory that cannot be used, or an overlay that makes an invalid recipe.
        SinklabError: some runs failed; the others are finished and summarised.
        KeyboardInterrupt: Ctrl-C; everything is saved and the same call continues.
        PreemptedError: SIGTERM or SIGUSR1, likewise.
    """
    check_results(out, ("summary.json", REPORT))
    cells = cells_of(experiment, out, seeds, overlay)
    with data_progress(console) as progress:
        prepare_data(cells, progress)
    lengths = {cell.name: Length(cell.recipe.train.steps, cell.recipe.train.eval_every) for cell in cells}
    jobs = processes_for(len(cells), os.cpu_count() or 1)
    with RunBoard(console, lengths, jobs) as board:
        summary = train_cells(experiment, cells, out, jobs, board.watch)
    path = write_report([out])
    if as_json:
        print(json.dumps(summary, indent=2))
    else:
        print_report(collect([out]), Console())
    console.print(f"report: {path}", highlight=False, soft_wrap=True)
