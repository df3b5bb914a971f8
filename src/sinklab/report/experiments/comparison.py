"""Ours beside the paper's: the table of an experiment, on the page and in the terminal."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from sinklab.experiments.documents import CellEstimate, CellSummary, ExperimentSummary
from sinklab.experiments.quantities import Quantity
from sinklab.report.experiments.numbers import estimate_of, quantity_of, sink_elsewhere_text
from sinklab.report.experiments.sweeps import Sweep


@dataclass(frozen=True)
class ComparedCell:
    """A line of the table.

    Attributes:
        seeds: finished runs, of how many.
        failed: how many of its runs failed.
        ours: by quantity.
        paper: by quantity.
        trained_there: False where the paper says that it did not train.
        elsewhere: where the highest sink is at another position than the first, by quantity, beside which it is shown.
    """

    name: str
    seeds: str
    failed: int
    ours: Mapping[str, CellEstimate | None]
    paper: Mapping[str, float]
    trained_there: bool
    elsewhere: Mapping[str, str]


@dataclass(frozen=True)
class ComparedCells:
    """The table of an experiment.

    Attributes:
        columns: quantities that it shows, those that any of its cells, or the paper, has.
        in_paper: names of those that the paper has.
    """

    columns: Sequence[Quantity]
    in_paper: frozenset[str]
    cells: Sequence[ComparedCell]


def compared(sweep: Sweep, name: str) -> ComparedCells:
    """The table of an experiment of a sweep."""
    experiment = sweep.experiments[name]
    cells = [_compared(cell, found, experiment) for cell, found in sweep.cells_of(experiment).items()]
    in_paper = frozenset(column for column in experiment.columns for cell in cells if column in cell.paper)
    shown = [one for one in experiment.columns if one in in_paper or any(cell.ours[one] for cell in cells)]
    return ComparedCells([quantity_of(one) for one in shown], in_paper, cells)


def _compared(name: str, cell: CellSummary, experiment: ExperimentSummary) -> ComparedCell:
    done = sum(run.status == "done" for run in cell.runs) if cell.runs else cell.seeds
    planned = len(cell.runs) or cell.seeds
    published = experiment.published.get(name, {})
    return ComparedCell(
        name=name,
        seeds=str(done) if done == planned else f"{done} of {planned}",
        failed=sum(run.status == "failed" for run in cell.runs),
        ours={column: estimate_of(cell, column) for column in experiment.columns},
        paper=published,
        trained_there=published.get("trains") != 0.0,
        elsewhere={column: sink_elsewhere_text(cell, column) for column in experiment.columns},
    )
