"""The report in a terminal: the table of cells, and every experiment's numbers beside the paper's with its claims."""

from collections.abc import Iterable

from rich.console import Console

from sinklab.commands.terminal.tables import print_notes, print_table, print_title
from sinklab.experiments.definition import SCALES
from sinklab.experiments.documents import Summary
from sinklab.report.data import ReportData
from sinklab.report.experiments.sweeps import cells_of, run_warnings
from sinklab.report.experiments.tables import claims_table, experiment_table, paper_models
from sinklab.report.tables import cells_table, tables


def print_report(data: ReportData, console: Console) -> None:
    """Print the tables of the page with the notes of the measurements, then the experiments, then other claims."""
    for table in [*([cells_table(data)] if data.cells else []), *tables(data)]:
        print_table(table, console)
    notes = [*((data.label(run), note) for run in data.runs for note in run.notes), *data.failures]
    print_notes([f"{name}: {note}" for name, note in notes], console)
    for sweep in data.sweeps:
        print_summary(sweep.summary, sweep.experiments, console)
    if data.claims:
        print_table(claims_table(data.claims), console)


def print_summary(summary: Summary, wanted: Iterable[str], console: Console) -> None:
    """Our numbers beside the paper's and the verdict of each claim, of some experiments of a summary."""
    for name in wanted:
        experiment = summary.experiments[name]
        cells = cells_of(summary, experiment)
        place = f" {'at' if experiment.scale in SCALES else 'in'} {experiment.scale}" if experiment.scale else ""
        print_title(f"{name}{place}: {experiment.title}", console)
        print_table(experiment_table(experiment, cells), console)
        if elsewhere := paper_models(experiment):
            print_table(elsewhere, console)
        print_notes([f"adapted: {why}" for why in experiment.adapted], console)
        warnings = [
            f"{cell}, seed {run.seed}: {warning}"
            for cell, found in cells.items()
            for run in found.runs
            for warning in run_warnings(run)
        ]
        print_notes(warnings, console)
        if claims := [claim for claim in summary.claims if claim.experiment == name]:
            print_table(claims_table(claims), console)
