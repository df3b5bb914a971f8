"""The page's sections on sweeps: the paper at a glance, and a section per experiment."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sinklab.experiments.documents import (
    ANALYSES,
    CellRun,
    CellSummary,
    ExperimentSummary,
    JudgedClaim,
    Summary,
    verdict_counts,
)
from sinklab.experiments.paper import PaperStatement, statements
from sinklab.experiments.verdicts.wording import number, unit
from sinklab.report.charts import Figure
from sinklab.report.sweep_figures import experiment_figures, experiment_keys, link_to
from sinklab.report.sweeps import Sweep, experiment_table, grid_tables, paper_models, quantity_of, value_text
from sinklab.tables import Table, TableCell, TableColumn, Value, counted, table_of

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


@dataclass(frozen=True)
class GlanceLine:
    """A statement of the paper, numbered from 1, with its claims in all sweeps."""

    number: int
    statement: PaperStatement
    parts: Sequence[GlancePart]


def glance(sweeps: Sequence[Sweep]) -> list[GlanceLine]:
    """Collect the paper's statements that have claims in the sweeps."""
    keys = {(sweep.top, name): key for sweep, name, key in experiment_keys(sweeps)}
    lines = []
    for place, statement in enumerate(statements(), 1):
        parts = [
            GlancePart(claim, _numbers_by_seed(one.summary, claim), keys.get((one.top, claim.experiment), ""))
            for one in sweeps
            for claim in one.summary.claims_named(statement.claims)
        ]
        if parts:
            lines.append(GlanceLine(place, statement, parts))
    return lines


def _numbers_by_seed(summary: Summary, claim: JudgedClaim) -> list[tuple[str, str]]:
    """Return (cell, values as text) pairs of a claim, such as (`k_biases`, `0.0, 0.2, 0.0 %`).

    The list is empty if the claim has no quantity, or if one of the pairs is not in its evidence.
    """
    if not claim.quantity:
        return []
    shown, texts = quantity_of(claim.quantity), []
    for name in claim.cells:
        runs = summary.cell(claim.experiment, name).runs
        values = [run.values.get(shown.name, math.inf) for run in runs if shown.name in {*run.values, *run.never}]
        texts.append((name, ", ".join(number(value, shown) for value in values) + unit(shown)))
    return texts if all(f"{name} {text}" in claim.evidence for name, text in texts) else []


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
    metrics = [quantity_of(one) for one in experiment.columns]
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
