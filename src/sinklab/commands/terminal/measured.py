"""An experiment on existing models in the terminal: cells over draws, the paper's models, claims."""

from collections.abc import Mapping, Sequence

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from sinklab.commands.terminal.report import claims_table
from sinklab.commands.terminal.text import printable
from sinklab.experiments.documents import CellSummary, ExperimentSummary, Summary
from sinklab.experiments.measured import Pass
from sinklab.experiments.quantities import Quantity, quantity
from sinklab.measuring.statistics.highest import in_brackets
from sinklab.report.experiments.models import paper_models
from sinklab.report.experiments.numbers import estimate_text, sink_elsewhere_text
from sinklab.report.figure import DataTable


def print_measured(summary: Summary, console: Console) -> None:
    """Print what was measured beside what the paper prints, and the claims with their evidence."""
    for one in summary.experiments.values():
        console.print(_table(one, summary.cells))
        if found := paper_models(one):
            console.print(_elsewhere(found))
    if summary.claims:
        console.print(claims_table(summary.claims))


def print_passes(planned: Mapping[str, Sequence[Pass]], draws: int, console: Console) -> None:
    """Print a line for each pass over sequences: what it reads, and which cells it is for."""
    table = Table(box=SIMPLE_HEAD)
    for name in ("experiment", "model", "sequences", "tokens", "cells"):
        table.add_column(name, overflow="fold")
    for experiment, passes in planned.items():
        for one in passes:
            request = one.request(0)
            sequences = f"{draws} x {request.sequences} x {request.length}"
            named = (experiment, one.model, sequences, request.options.inputs, ", ".join(one.cells))
            table.add_row(*(Text(printable(text)) for text in named))
    console.print(table)


def _table(experiment: ExperimentSummary, cells: Mapping[str, CellSummary]) -> Table:
    table = Table(
        title=Text(printable(f"{experiment.title}: {experiment.scale}")), title_justify="left", box=SIMPLE_HEAD
    )
    table.add_column("", overflow="fold")
    columns = [quantity(name) for name in experiment.columns]
    shown = [one for one in columns if any(one.name in cells[cell].values for cell in experiment.cells)]
    for one in shown:
        table.add_column(f"{one.label}\n[dim]{one.unit}", justify="right")
    table.add_column("draws", justify="right")
    for cell in experiment.cells:
        printed = experiment.published.get(cell, {})
        numbers = (_number(one, cells[cell], printed.get(one.name)) for one in shown)
        table.add_row(Text(printable(cell)), *numbers, str(cells[cell].seeds))
    return table


def _number(one: Quantity, cell: CellSummary, printed: float | None) -> str:
    found = cell.values.get(one.name)
    if found is None:
        return ""
    text = estimate_text(found, one.decimals) + in_brackets(sink_elsewhere_text(cell, one.name))
    return text if printed is None else f"{text}, paper {printed:,.{one.decimals}f}"


def _elsewhere(found: DataTable) -> Table:
    table = Table(title="The paper's models", title_justify="left", box=SIMPLE_HEAD)
    for number, column in enumerate(found.columns):
        table.add_column(column, justify="right" if number else "left")
    for row in found.rows:
        table.add_row(*row)
    return table
