"""The page's sections on sweeps: the paper at a glance, the leaderboard, and a section per experiment.

The leaderboard of mitigations has the cells of experiments with `mitigations` in their id, with medians and ranges.

The experiment `mitigations_retuned` (other learning rates) has no rows; it gives a column with each cell's lowest loss.
Its columns are the metrics in `BOARD` (`measuring/registry.py`), speed and memory, and the numbers of an assessment
with a `column` (`assessing/parts/`).
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from sinklab.assessing.assess_model import comparable
from sinklab.assessing.parts import NUMBERS
from sinklab.experiments.documents import (
    ANALYSES,
    CellRun,
    CellSummary,
    ExperimentSummary,
    JudgedClaim,
    Summary,
    median_of_known,
    verdict_counts,
)
from sinklab.experiments.paper import PaperStatement, statements
from sinklab.experiments.quantities import quantity
from sinklab.experiments.verdicts.wording import number, unit
from sinklab.measuring.registry import BOARD, METRICS
from sinklab.report.charts import Figure, scatter
from sinklab.report.html import caption
from sinklab.report.sweep_figures import error_bar, experiment_figures, experiment_keys, link_to
from sinklab.report.sweeps import (
    Sweep,
    experiment_table,
    grid_tables,
    later_sink_of,
    paper_models,
    value_text,
)
from sinklab.tables import SINK_1, PlotAxis, Table, TableCell, TableColumn, Value, counted, table_of

LAB = "lab"
"""Experiment of `sinklab lab`."""
NAMED = 3
"""Maximum number of claims that a sentence on a verdict names."""
MIXED = "mixed"
SAYS: Mapping[str, str] = {
    "reproduced": "Holds",
    "direction only": "Holds in direction only",
    MIXED: "Holds in part, with claims of different verdicts",
    "contradicted": "Does not hold",
    "inconclusive": "Undecided",
    "no verdict": "Not decided yet, too few seeds",
}
"""Beginning of the sentence on the claims with a verdict."""
NOT_RUN = "not-run"
"""Key of the group of experiments that were not run."""


@dataclass(frozen=True)
class GlancePart:
    """A claim that encodes a statement of the paper, as judged in a sweep.

    Attributes:
        ours: (name, values of all seeds as text) pairs of the claim's cells. Empty if the claim was judged on other
            values, such as those at one step; the page then shows the evidence.
        key: anchor of the experiment's section, without `experiment-`; empty if there is none.
    """

    claim: JudgedClaim
    ours: Sequence[tuple[str, str]]
    key: str

    @property
    def quantity(self) -> str:
        """Name of the quantity that `ours` has; empty if `ours` is."""
        return quantity(self.claim.quantity).label if self.ours and self.claim.quantity else ""


@dataclass(frozen=True)
class GlanceLine:
    """A statement of the paper, numbered from 1, with its claims in all sweeps."""

    number: int
    statement: PaperStatement
    parts: Sequence[GlancePart]


def glance(sweeps: Sequence[Sweep]) -> list[GlanceLine]:
    """Collect the paper's statements that have claims in the sweeps, with the caveat of the first sweep's scale."""
    keys = {(sweep.top, name): key for sweep, name, key in experiment_keys(sweeps)}
    lines = []
    scale = sweeps[0].summary.scale if sweeps else ""
    for place, statement in enumerate(statements(), 1):
        parts = [
            GlancePart(claim, _numbers_by_seed(one.summary, claim), keys.get((one.top, claim.experiment), ""))
            for one in sweeps
            for claim in one.summary.claims_named(statement.at(one.summary.scale).claims)
        ]
        if parts:
            lines.append(GlanceLine(place, statement.at(scale), parts))
    return lines


def _numbers_by_seed(summary: Summary, claim: JudgedClaim) -> list[tuple[str, str]]:
    """Return (cell, values as text) pairs of a claim, such as (`k_biases`, `0.0, 0.2, 0.0 %`).

    The list is empty if the claim has no quantity, or if one of the pairs is not in its evidence.
    """
    if not claim.quantity:
        return []
    shown, texts = quantity(claim.quantity), []
    for name in claim.cells:
        runs = summary.cell(claim.experiment, name).runs
        values = [run.values.get(shown.name, math.inf) for run in runs if shown.name in {*run.values, *run.never}]
        texts.append((name, ", ".join(number(value, shown) for value in values) + unit(shown)))
    return texts if all(f"{name} {text}" in claim.evidence for name, text in texts) else []


def sweep_sentences(sweep: Sweep) -> list[str]:
    """Return at most five sentences on what holds in a sweep and what does not, one per verdict.

    They name the statements of the paper or, if none was tested, the confirmatory claims, else all claims. Those
    on `sinklab lab` are of `lab_sentences`.
    """
    if LAB in sweep.summary.experiments and (found := lab_sentences(sweep.summary)):
        return found
    judged = []
    for line in glance([sweep]):
        claims = [part.claim for part in line.parts]
        verdicts = {one.verdict for one in claims if one.analysis == ANALYSES[0]} or {one.verdict for one in claims}
        judged.append((line.statement.says, verdicts.pop() if len(verdicts) == 1 else MIXED))
    if not judged:
        claims = [claim for claim in sweep.summary.claims if not claim.same_as]
        claims = [claim for claim in claims if claim.analysis == ANALYSES[0]] or claims
        judged = [(claim.statement, claim.verdict) for claim in claims]
    sentences = []
    for verdict, begins in SAYS.items():
        named = [text.rstrip(".") for text, found in judged if found == verdict]
        if named:
            more = f"; and {len(named) - NAMED} more" if len(named) > NAMED else ""
            sentences.append(f"{begins} ({len(named)} of {len(judged)}): {'; '.join(named[:NAMED])}{more}.")
    return sentences


def lab_sentences(summary: Summary) -> list[str]:
    """Return three sentences on the models of `sinklab lab`, from medians over seeds; empty if a model is missing."""

    def median(cell: str, quantity: str) -> float | None:
        found = summary.cell(LAB, cell).estimate(quantity)
        return found.median if found else None

    sinks = {cell: median(cell, "sink_1") for cell in summary.cells_of(LAB)}
    biases = [median(cell, "sink_bias") for cell in ("task_k_biases", "k_biases")]
    losses = [median(cell, "valid_loss") for cell in ("softmax", "sigmoid")]
    values = [*sinks.values(), *biases, *losses]
    if not sinks or any(value is None for value in values):
        return []
    softmax, sigmoid = (loss or 0.0 for loss in losses)
    on = {cell: f"{rate:.0f} %" for cell, rate in sinks.items()}
    on_bias = ", ".join(f"{rate:.0f} %" for rate in biases)
    return [
        f"Softmax leaves unneeded attention on the first token: {on['task_softmax']} (copy task), {on['softmax']}.",
        f"K biases: {on_bias} on the bias, and {on['task_k_biases']}, {on['k_biases']} on the first token.",
        f"Weights that need not sum to one: ReLU {on['task_relu']}, sigmoid {on['sigmoid']}, at "
        f"{sigmoid - softmax:+.2f} nats of loss.",
    ]


@dataclass(frozen=True)
class ExperimentSection:
    """The section of an experiment.

    Attributes:
        key: anchor of the section, without `experiment-`.
        about: entry of the experiment in summary.json.
        verdicts: number of claims by kind of analysis and verdict (`verdict_counts`).
        group: key of its group: `confirmatory` if it has confirmatory claims, else `exploratory`; `not-run` if all
            claims have the verdict `not run` or, without claims, if no run has finished or failed. Claims with
            `same_as` count only if there are no others.
        table: results by cell.
        matrices: a table per quantity if the experiment is a grid; else empty.
        elsewhere: table of the paper's values by model (`paper_models`); None if there are none.
        cells: for each cell its name, changes (KEY=VALUE), badges (text and CSS class, such as `2 failed`) and the
            table of its runs (seeds, draws or models).
    """

    key: str
    name: str
    about: ExperimentSummary
    verdicts: Mapping[str, Mapping[str, int]]
    group: str
    figures: Sequence[Figure]
    table: Table
    matrices: Sequence[Table]
    elsewhere: Table | None
    claims: Sequence[JudgedClaim]
    cells: Sequence[Mapping[str, Any]]


def experiment_sections(sweeps: Sequence[Sweep], page: Path) -> list[ExperimentSection]:
    """Make a section per experiment, in the order of the summaries.

    Args:
        page: folder of the page; links to runs are relative to it.

    Raises:
        InputError: if metrics.jsonl of a run cannot be read or has an invalid line.
    """
    sections = []
    for sweep, name, key in experiment_keys(sweeps):
        experiment, claims = sweep.summary.experiments[name], sweep.summary.claims_of(name)
        cells = sweep.summary.cells_of(name)
        own = [claim for claim in claims if not claim.same_as] or claims
        run = any(claim.verdict != "not run" for claim in own)
        if not claims:
            run = any(cell.seeds or cell.count("failed") for cell in cells.values())
        analysis = ANALYSES[0] if any(claim.analysis == ANALYSES[0] for claim in own) else ANALYSES[1]
        sections.append(
            ExperimentSection(
                key=key,
                name=name,
                about=experiment,
                verdicts=verdict_counts(claims),
                group=analysis if run else NOT_RUN,
                figures=experiment_figures(sweep, name, key, page),
                table=experiment_table(experiment, cells),
                matrices=grid_tables(experiment, cells),
                elsewhere=paper_models(experiment),
                claims=claims,
                cells=[_cell_section(sweep, experiment, cell, found, page) for cell, found in cells.items()],
            )
        )
    return sections


def _cell_section(
    sweep: Sweep, experiment: ExperimentSummary, name: str, cell: CellSummary, page: Path
) -> dict[str, Any]:
    metrics = [quantity(one) for one in experiment.columns]
    columns: list[tuple[TableColumn, Callable[[CellRun], Value]]] = [
        (TableColumn(experiment.replicate.capitalize(), text=True), lambda run: str(run.seed)),
        (
            TableColumn("State", text=True),
            lambda run: TableCell(run.status, "; ".join(run.warnings), "warn" if run.warnings else ""),
        ),
        *(
            (TableColumn(one.label, form=f",.{one.decimals + 1}f"), lambda run, one=one: run.values.get(one.name))
            for one in metrics
        ),
        (TableColumn("Seconds", form=",.0f"), lambda run: run.seconds),
        (TableColumn("Run"), lambda run: TableCell(run.hash, link=link_to(sweep, run, page) or "")),
    ]
    counts = (
        (cell.count("failed"), "failed", "warn"),
        (sum(bool(run.edited) for run in cell.runs), "edited", "warn"),
        (cell.count("unfinished"), "unfinished", "inconclusive"),
    )
    return {
        "name": name,
        "change": [f"{key}={value_text(value)}" for key, value in cell.change.items()],
        "badges": [(f"{count} {what}", style) for count, what, style in counts if count],
        "runs": table_of(f"runs of {name}", cell.runs, columns).without_empty_columns(),
    }


@dataclass(frozen=True)
class ExperimentGroup:
    """A group of experiments under one heading, with the anchor `key`.

    Attributes:
        folded: whether the group is initially collapsed: True only for the experiments that were not run, if the page
            has several experiments.
    """

    key: str
    title: str
    folded: bool
    experiments: Sequence[ExperimentSection]


def experiment_groups(experiments: Sequence[ExperimentSection]) -> list[ExperimentGroup]:
    """Group the experiments into those run with confirmatory claims, those run without such claims, and those not run.

    Empty groups are omitted.
    """
    of = {key: [one for one in experiments if one.group == key] for key in (*ANALYSES, NOT_RUN)}
    waiting = f"Not run: {counted(len(of[NOT_RUN]), 'experiment')}"
    titles = ("The paper’s experiments: confirmatory claims", "Exploratory experiments", waiting)
    folded = (False, False, len(experiments) > 1)
    groups = zip(of.items(), titles, folded, strict=True)
    return [ExperimentGroup(key, title, fold, found) for (key, found), title, fold in groups if found]


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
        seeds = {cell: len(loss.seeds) if (loss := scores[0]) else 0 for cell, scores in self.scores.items()}
        most = max(seeds.values())
        rows: list[list[Value]] = [
            [
                cell
                + (f" ({count} of {most} seeds)" if 0 < (count := seeds[cell]) < most else "")
                + (f" ({counted(self.failed[cell], 'run')} failed)" if self.failed[cell] else ""),
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
    experiments = [name for name in summary.experiments if MITIGATIONS in name.split("_") and name != RETUNED]
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
    speed = "of the runs as they were trained, on different machines if there were several"
    retuned = "the lowest loss over several learning rates, because a single learning rate favours some cells"
    best = TableColumn("Retuned", "loss at the best learning rate", ",.3f", help=retuned)
    columns.insert(1, (best, lambda name: _retuned(sweep, name)))
    columns += [
        (TableColumn("Speed", "tokens / s", ",.0f", help=speed), of_runs(lambda run: run.tokens_per_second)),
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
