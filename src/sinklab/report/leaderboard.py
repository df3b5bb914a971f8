"""The leaderboard of mitigations: cells of experiments whose ids begin with `mitigations`, with medians and ranges.

The experiment `mitigations_retuned` (other learning rates) has no rows; it gives a column with each cell's lowest loss.
To add a column, add an entry to `_scores`, or set `column` of a number of an assessment (`assessing/parts/`).
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median

from sinklab.assessing.assessment import comparable
from sinklab.assessing.parts import NUMBERS
from sinklab.experiments.documents import CellSummary
from sinklab.plots import PlotAxis
from sinklab.report.charts import Figure, scatter
from sinklab.report.sweep_figures import error_bar
from sinklab.report.sweeps import Sweep, later_sink_of
from sinklab.tables import SINK_1, Table, TableCell, TableColumn, counted

MITIGATIONS, RETUNED = "mitigations", "mitigations_retuned"
LOSS, SINK = "Valid. loss", SINK_1
SYMLOG_ABOVE = 1.0
"""Maximum absolute difference from the baseline's loss, nats per token, for a linear axis; else it is symlog."""


@dataclass(frozen=True)
class SeedScore:
    """Median of a quantity over the seeds of a cell, and its value at each seed that has one.

    Attributes:
        note: annotation of the median: the learning rate of a retuned loss, or rate and position of the highest sink
            if it is not at the first token; empty for other quantities.
    """

    median: float
    seeds: tuple[float, ...]
    note: str = ""

    def cell(self, form: str) -> TableCell:
        """Return the median as a table cell, annotated with `note` and, if there are several seeds, the range."""
        low, high = (f"{end(self.seeds, default=self.median):{form}}" for end in (min, max))
        ends = [f"{low} … {high}" if low != high else f"all {low}"] if len(self.seeds) > 1 else []
        return TableCell(self.median, " ".join([*ends, self.note]).strip())


@dataclass(frozen=True)
class Leaderboard:
    """The leaderboard of mitigations, with cells ordered by ascending validation loss; cells without a loss are last.

    Attributes:
        scale, baseline: scale and baseline cell of the first experiment on mitigations.
        assessed: whether any run has an assessment.
        columns: columns of the table after the column of cell names.
        scores: scores of each cell, one per column; None if unknown.
        failed: number of failed runs by cell.
    """

    scale: str
    baseline: str
    assessed: bool
    columns: Sequence[TableColumn]
    scores: dict[str, list[SeedScore | None]]
    failed: dict[str, int]

    def column(self, title: str) -> dict[str, SeedScore]:
        """Return the scores in the column with this title, by cell; cells without a score are omitted."""
        at = [one.title for one in self.columns].index(title)
        return {cell: score for cell, scores in self.scores.items() if (score := scores[at]) is not None}

    def table(self, key: str) -> Table:
        """Make the leaderboard's table: a row per cell, with the range over seeds after each median.

        Columns without values are omitted.
        """
        rows = [
            [
                cell + (f" ({counted(self.failed[cell], 'run')} failed)" if self.failed[cell] else ""),
                *(one and one.cell(column.form) for one, column in zip(scores, self.columns, strict=True)),
            ]
            for cell, scores in self.scores.items()
        ]
        columns = [TableColumn("Cell", "", text=True), *self.columns]
        table = Table("Leaderboard of mitigations", columns, rows, key=key).without_empty_columns()
        notes = [
            f"Results at scale {self.scale}: medians over seeds, with the minimum and the maximum. Click a column "
            "heading to sort by the column, and again to reverse the order. Missing values are listed last.",
            *(f"{column.title}: {column.help}." for column in table.columns if column.help),
        ]
        if self.assessed:
            notes.append("Added losses are in nats per token, relative to the unchanged model (sinklab assess).")
        return replace(table, notes=notes)

    def figure(self, key: str) -> Figure | None:
        """Draw Sink_1 of each cell against its loss minus that of the baseline.

        Labels mark the baseline and the Pareto front of loss and Sink_1. Cells that lack one of the two quantities are
        left out. Returns None if the baseline or all other cells are left out.
        """
        losses, sinks = self.column(LOSS), self.column(SINK)
        scores = {cell: (loss, sinks[cell]) for cell, loss in losses.items() if cell in sinks}
        if self.baseline not in scores or len(scores) < 2:
            return None
        least = scores[self.baseline][0].median
        points = {cell: (loss.median - least, sink.median) for cell, (loss, sink) in scores.items()}
        dominated = {
            cell: any(a <= x and b <= y and (a, b) != (x, y) for a, b in points.values())
            for cell, (x, y) in points.items()
        }
        rows = [
            {
                "model": cell,
                "kind": self.baseline if cell == self.baseline else "mitigations",
                "named": cell if cell == self.baseline or not dominated[cell] else "",
                **error_bar("x", loss.median, loss.seeds, least),
                **error_bar("y", sink.median, sink.seeds),
            }
            for cell, (loss, sink) in scores.items()
        ]
        x = PlotAxis(
            f"Validation loss above {self.baseline} (nats / token)",
            "x",
            f"loss above {self.baseline}",
            scale="symlog" if max(abs(x) for x, _ in points.values()) > SYMLOG_ABOVE else "linear",
            constant=0.05,
            zero=False,
            precision="+.3f",
        )
        y = PlotAxis(f"{SINK_1} (% of heads)", "y", SINK_1, precision=".1f")
        order, tips = ["mitigations", self.baseline], [("model", "cell", "")]
        chart = scatter(rows, x, y, "kind", order, label="named", tips=tips)
        caption = (
            "Points are medians over seeds, and lines extend from the minimum to the maximum. Labels mark the baseline "
            "and the Pareto front: cells for which no other cell is better in loss or sink rate without being worse in "
            "the other. Sinks at other positions are listed in the leaderboard."
        )
        return Figure(key, f"{SINK_1} versus loss at scale {self.scale}", caption, [chart])


def leaderboard(sweep: Sweep) -> Leaderboard | None:
    """Make the leaderboard of a sweep; None if it has no cells of experiments on mitigations.

    Raises:
        InputError: if assessment.json of a run cannot be read or is damaged.
    """
    summary = sweep.summary
    experiments = [name for name in summary.experiments if name.startswith(MITIGATIONS) and name != RETUNED]
    cells = {cell: found for name in experiments for cell, found in summary.cells_of(name).items()}
    if not cells:
        return None
    runs = [run for name in experiments for cell in summary.cells_of(name).values() for run in cell.runs if run.hash]
    # Only the largest group of runs assessed with the same text, settings and dtype is scored.
    assessed = comparable({run.hash: one for run in runs if (one := sweep.assessment(run)) is not None})
    numbers = {run_hash: assessment.numbers() for run_hash, assessment in assessed.items()}
    found = {name: _scores(sweep, name, cell, numbers) for name, cell in cells.items()}
    scores = {name: [score for _, score in pairs] for name, pairs in found.items()}
    by_loss = sorted(cells, key=lambda name: score.median if (score := scores[name][0]) else math.inf)
    first = summary.experiments[experiments[0]]
    return Leaderboard(
        first.scale,
        first.baseline or first.cells[0],
        bool(assessed),
        [column for column, _ in next(iter(found.values()))],
        {name: scores[name] for name in by_loss},
        {name: cells[name].count("failed") for name in by_loss},
    )


def _scores(
    sweep: Sweep, name: str, cell: CellSummary, numbers: Mapping[str, Mapping[str, float]]
) -> list[tuple[TableColumn, SeedScore | None]]:
    """Return (column, score) pairs of a cell, in the order of the leaderboard's columns.

    Args:
        numbers: scalar results of the assessments by run hash and name; if empty, assessment columns are omitted.
    """
    retuned = "the lowest loss over several learning rates, because a single learning rate favours some cells"
    done = [run for run in cell.runs if run.status == "done"]
    assessed = [numbers.get(run.hash, {}) for run in done]
    return [
        (TableColumn(LOSS, "nats / token", ",.3f"), _of_quantity(cell, "valid_loss")),
        (TableColumn("Retuned", "loss at the best learning rate", ",.3f", help=retuned), _retuned(sweep, name)),
        (TableColumn(SINK, "% of heads", ",.1f"), _of_quantity(cell, "sink_1")),
        (TableColumn("Sink on the bias", "% of heads", ",.1f"), _of_quantity(cell, "sink_bias")),
        (TableColumn("Norm ratio", "maximum over blocks", ",.1f"), _of_quantity(cell, "norm_ratio")),
        (TableColumn("Kurtosis", "maximum over blocks", ",.1f"), _of_quantity(cell, "kurtosis")),
        (TableColumn("Speed", "tokens / s", ",.0f"), _of_runs(run.tokens_per_second for run in done)),
        (TableColumn("Memory", "peak, MB", ",.0f"), _of_runs(run.peak_memory_mb for run in done)),
        *(
            (TableColumn(*one.column, ",.3f", help=one.label), _of_runs(found.get(one.name) for found in assessed))
            for one in NUMBERS
            if one.column and numbers
        ),
    ]


def _of_quantity(cell: CellSummary, quantity: str) -> SeedScore | None:
    estimate = cell.estimate(quantity)
    if estimate is None or estimate.median is None:
        return None
    seeds = tuple(value for _, value in cell.by_seed(quantity))
    return SeedScore(estimate.median, seeds, later_sink_of(cell, quantity))


def _of_runs(values: Iterable[float | None]) -> SeedScore | None:
    found = tuple(value for value in values if value is not None)
    return SeedScore(median(found), found) if found else None


def _retuned(sweep: Sweep, name: str) -> SeedScore | None:
    """Return the lowest median loss of a cell over the learning rates of `RETUNED`, with that rate as note."""
    cells = sweep.summary.cells_of(RETUNED) if RETUNED in sweep.summary.experiments else {}
    found = [
        (estimate.median, cell)
        for other, cell in cells.items()
        if other.startswith(f"{name}_lr_") and (estimate := cell.estimate("valid_loss"))
        if estimate.median is not None
    ]
    if not found:
        return None
    lowest, cell = min(found, key=lambda one: one[0])
    rate = cell.change.get("optim.lr")
    if not isinstance(rate, float):
        rate = next((one for run in cell.runs if (one := sweep.learning_rate(run))), None)
    seeds = tuple(value for _, value in cell.by_seed("valid_loss"))
    return SeedScore(lowest, seeds, f"at {rate:.1e}".replace("e-0", "e-") if rate else "")
