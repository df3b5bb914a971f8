"""The page's sections on sweeps: the paper at a glance, and a section per experiment."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from sinklab.experiments.documents import (
    ANALYSES,
    Analysis,
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
from sinklab.tables import Table, TableCell, TableColumn, counted, names

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
class CellSection:
    """A cell of an experiment with a table of its runs (seeds, draws or models).

    Attributes:
        change: changes to the base recipe, or settings of the measurement (KEY=VALUE).
        badges: (text, CSS class) pairs with the numbers of failed, edited and unfinished runs, such as `2 failed`.
    """

    name: str
    change: Sequence[str]
    badges: Sequence[tuple[str, str]]
    runs: Table


@dataclass(frozen=True)
class ExperimentSection:
    """The section of an experiment.

    Attributes:
        key: anchor of the section, without `experiment-`.
        about: entry of the experiment in summary.json.
        verdicts: number of claims by kind of analysis and verdict (`verdict_counts`).
        group: key of its `ExperimentGroup`: `confirmatory` if it has confirmatory claims, else `exploratory`; `not-run`
            if all claims have the verdict `not run` or, without claims, if no run has finished or failed. Claims with
            `same_as` count only if there are no others.
        table: results by cell.
        matrices: a table per quantity if the experiment is a grid; else empty.
        elsewhere: table of the paper's values by model (`paper_models`); None if there are none.
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
    cells: Sequence[CellSection]


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


def experiment_sections(sweeps: Sequence[Sweep], page: Path) -> list[ExperimentSection]:
    """Make a section per experiment, in the order of the summaries.

    Args:
        page: folder of the page; links to runs are relative to it.

    Raises:
        InputError: if metrics.jsonl of a run cannot be read or has an invalid line.
    """
    return [_section(sweep, name, key, page) for sweep, name, key in experiment_keys(sweeps)]


def _section(sweep: Sweep, name: str, key: str, page: Path) -> ExperimentSection:
    experiment, claims = sweep.summary.experiments[name], sweep.summary.claims_of(name)
    cells = sweep.summary.cells_of(name)
    own = [claim for claim in claims if not claim.same_as] or claims
    run = any(claim.verdict != "not run" for claim in own)
    if not claims:
        run = any(cell.seeds or cell.count("failed") for cell in cells.values())
    confirmatory = any(claim.analysis == "confirmatory" for claim in own)
    analysis: Analysis = "confirmatory" if confirmatory else "exploratory"
    return ExperimentSection(
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


def _cell_section(sweep: Sweep, experiment: ExperimentSummary, name: str, cell: CellSummary, page: Path) -> CellSection:
    shown = [quantity_of(one) for one in experiment.columns]
    columns = [
        *names(experiment.replicate.capitalize(), "State"),
        *(TableColumn(one.label, form=f",.{one.decimals + 1}f") for one in shown),
        TableColumn("Seconds", form=",.0f"),
        TableColumn("Run"),
    ]
    rows = [
        [
            str(run.seed),
            TableCell(run.status, "; ".join(run.warnings), "warn" if run.warnings else ""),
            *(run.values.get(one.name) for one in shown),
            run.seconds,
            TableCell(run.hash, link=link_to(sweep, run, page) or ""),
        ]
        for run in cell.runs
    ]
    counts = (
        (cell.count("failed"), "failed", "warn"),
        (sum(bool(run.edited) for run in cell.runs), "edited", "warn"),
        (cell.count("unfinished"), "unfinished", "inconclusive"),
    )
    badges = [(f"{count} {what}", style) for count, what, style in counts if count]
    change = [f"{key}={value_text(value)}" for key, value in cell.change.items()]
    return CellSection(name, change, badges, Table(f"runs of {name}", columns, rows).without_empty_columns())


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
