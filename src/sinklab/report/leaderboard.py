"""The leaderboard of mitigations: cells of experiments whose ids begin with `mitigations`, with medians and ranges.

The experiment `mitigations_retuned` (other learning rates) has no rows; it gives a column with each cell's lowest loss.
Its columns are the metrics in `BOARD` (`measuring/registry.py`), speed and memory, and the numbers of an assessment
with a `column` (`assessing/parts/`).
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from sinklab.assessing.assess_model import comparable
from sinklab.assessing.parts import NUMBERS
from sinklab.experiments.documents import CellRun, CellSummary, median_of_known
from sinklab.measuring.registry import BOARD, METRICS
from sinklab.report.charts import Figure, scatter
from sinklab.report.html import caption
from sinklab.report.sweep_figures import error_bar
from sinklab.report.sweeps import Sweep, later_sink_of
from sinklab.tables import SINK_1, PlotAxis, Table, TableCell, TableColumn, Value, counted

MITIGATIONS, RETUNED = "mitigations", "mitigations_retuned"
LOSS = METRICS["valid_loss"].title
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

    @classmethod
    def of_runs(cls, values: Iterable[float | None]) -> "SeedScore | None":
        """Return the score of a value per run; None if no run has one."""
        known = tuple(value for value in values if value is not None)
        middle = median_of_known(known)
        return None if middle is None else cls(middle, known)

    @classmethod
    def of_metric(cls, cell: CellSummary, name: str, note: str = "") -> "SeedScore | None":
        """Return the score of a metric in the summary of a cell; None without a finite median."""
        estimate = cell.estimate(name)
        if estimate is None or estimate.median is None:
            return None
        return cls(estimate.median, tuple(value for _, value in cell.by_seed(name)), note)

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
        forms = [column.form for column in self.columns]
        rows: list[list[Value]] = [
            [
                cell + (f" ({counted(self.failed[cell], 'run')} failed)" if self.failed[cell] else ""),
                *(None if one is None else one.cell(form) for one, form in zip(scores, forms, strict=True)),
            ]
            for cell, scores in self.scores.items()
        ]
        columns = [TableColumn("Cell", "", text=True), *self.columns]
        table = Table("Leaderboard of mitigations", columns, rows, key=key).without_empty_columns()
        notes = [
            f"Results at scale {self.scale}: medians over seeds, with the minimum and the maximum. Click a column "
            "heading to sort by the column, and again to reverse the order. Missing values are listed last.",
            *(
                f"{column.title}: {column.help}."
                for column in table.columns
                if column.help and not column.help.startswith(column.title)
            ),
        ]
        if self.assessed:
            notes.append("Added losses are in nats per token, relative to the unchanged model (sinklab assess).")
        return replace(table, notes=notes)

    def figure(self, key: str) -> Figure | None:
        """Draw Sink_1 of each cell against its loss minus that of the baseline.

        Labels mark the baseline and the Pareto front of loss and Sink_1. Cells that lack one of the two quantities are
        left out. Returns None if the baseline or all other cells are left out.
        """
        losses, sinks = self.column(LOSS), self.column(SINK_1)
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
        return Figure(key, f"{SINK_1} versus loss at scale {self.scale}", caption("leaderboard"), [chart])


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

    def of_runs(read: Callable[[CellRun], float | None]) -> Callable[[str], SeedScore | None]:
        return lambda name: SeedScore.of_runs(read(run) for run in cells[name].runs if run.status == "done")

    columns: list[tuple[TableColumn, Callable[[str], SeedScore | None]]] = [
        (
            METRICS[metric].column,
            lambda name, metric=metric: SeedScore.of_metric(cells[name], metric, later_sink_of(cells[name], metric)),
        )
        for metric in BOARD
    ]
    retuned = "the lowest loss over several learning rates, because a single learning rate favours some cells"
    best = TableColumn("Retuned", "loss at the best learning rate", ",.3f", help=retuned)
    columns.insert(1, (best, lambda name: _retuned(sweep, name)))
    columns += [
        (TableColumn("Speed", "tokens / s", ",.0f"), of_runs(lambda run: run.tokens_per_second)),
        (TableColumn("Memory", "peak, MB", ",.0f"), of_runs(lambda run: run.peak_memory_mb)),
        *(
            (
                TableColumn(*one.column, ",.3f", help=one.label),
                of_runs(lambda run, one=one: numbers.get(run.hash, {}).get(one.name)),
            )
            for one in NUMBERS
            if one.column and numbers
        ),
    ]
    scores = {name: [score(name) for _, score in columns] for name in cells}
    by_loss = sorted(cells, key=lambda name: score.median if (score := scores[name][0]) else math.inf)
    first = summary.experiments[experiments[0]]
    return Leaderboard(
        first.scale,
        first.baseline or first.cells[0],
        bool(assessed),
        [column for column, _ in columns],
        {name: scores[name] for name in by_loss},
        {name: cells[name].count("failed") for name in by_loss},
    )


def _retuned(sweep: Sweep, name: str) -> SeedScore | None:
    """Return the lowest median loss of a cell over the learning rates of `RETUNED`, with that rate as note."""
    cells = sweep.summary.cells_of(RETUNED) if RETUNED in sweep.summary.experiments else {}
    scores = [
        (score, cell)
        for other, cell in cells.items()
        if other.startswith(f"{name}_lr_") and (score := SeedScore.of_metric(cell, "valid_loss"))
    ]
    if not scores:
        return None
    lowest, cell = min(scores, key=lambda one: one[0].median)
    rate = cell.change.get("optim.lr")
    if not isinstance(rate, float):
        rate = next((one for run in cell.runs if (one := sweep.learning_rate(run))), None)
    return replace(lowest, note=f"at {rate:.1e}".replace("e-0", "e-") if rate else "")
