"""The paper at a glance: twenty statements with the verdicts and seeds of a sweep; our numbers drawn beside its own."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from sinklab.experiments.documents import CellSummary, JudgedClaim, Summary, estimated
from sinklab.experiments.paper import PaperStatement, statements
from sinklab.experiments.quantities import Quantity
from sinklab.experiments.verdicts.wording import number, unit
from sinklab.report.charts import Dots, Figure, Width, dots
from sinklab.report.experiments.figures import keyed, middle_of, point_of, values_axis
from sinklab.report.experiments.sweeps import Sweep
from sinklab.report.experiments.tables import by_seed, quantity_of
from sinklab.tables import NOTHING, Table, TableColumn, names

LABELS = 215
"""Pixels for the statements beside the drawing."""


@dataclass(frozen=True)
class GlancePart:
    """A claim that encodes a statement, as a sweep judges it.

    Attributes:
        claim: with its verdict.
        ours: the claim's cells, each with its number at every seed as text; where the verdict rests on other numbers,
            such as those at a step, none: the evidence has them.
        key: of the anchor of its experiment.
    """

    claim: JudgedClaim
    ours: Sequence[tuple[str, str]]
    key: str = ""


@dataclass(frozen=True)
class GlanceLine:
    """A statement with its claims of all sweeps that ask them; without any it is not run."""

    statement: PaperStatement
    parts: Sequence[GlancePart]


def glance(sweeps: Sequence[Sweep]) -> list[GlanceLine]:
    """The twenty lines; none where no sweep has any of their claims."""
    keys = {(sweep.top, name): key for sweep, name, key in keyed(sweeps)}
    summaries = [(sweep.summary, {name: keys[sweep.top, name] for name in sweep.experiments}) for sweep in sweeps]
    return lines_of(summaries)


def lines_of(summaries: Sequence[tuple[Summary, dict[str, str]]]) -> list[GlanceLine]:
    """The same of summaries, each with the anchors of its experiments."""
    lines = [
        GlanceLine(
            statement,
            [
                GlancePart(claim, _by_seed(summary, claim), keys.get(claim.experiment, ""))
                for summary, keys in summaries
                for claim in _claims(summary, statement)
            ],
        )
        for statement in statements()
    ]
    return lines if any(line.parts for line in lines) else []


def _claims(summary: Summary, statement: PaperStatement) -> list[JudgedClaim]:
    found = {f"{claim.experiment}.{claim.id}": claim for claim in summary.claims}
    return [found[name] for name in statement.claims if name in found]


def _by_seed(summary: Summary, claim: JudgedClaim) -> list[tuple[str, str]]:
    """Every cell with its seeds: `k_biases`, `0.0, 0.2, 0.0 %`; none where the evidence rests on other numbers."""
    if not claim.quantity:
        return []
    shown = quantity_of(claim.quantity)
    cells = {name: _cell(summary, claim.experiment, name) for name in claim.cells}
    texts = [(name, f"{_seeds_text(cell, shown)}{unit(shown)}") for name, cell in cells.items()]
    return texts if all(f"{name} {text}" in claim.evidence for name, text in texts) else []


def _seeds_text(cell: CellSummary, shown: Quantity) -> str:
    has = [run for run in cell.runs if shown.name in run.values or shown.name in run.never]
    return ", ".join(number(run.values.get(shown.name, math.inf), shown) for run in has)


def _cell(summary: Summary, experiment: str, name: str) -> CellSummary:
    """A cell with the seeds of an experiment; an empty one where the summary says nothing of it."""
    cell, asked = summary.cells.get(name, CellSummary(seeds=0)), summary.experiments.get(experiment)
    return cell.of_seeds(asked.seeds) if asked and asked.seeds else cell


def forests(sweeps: Sequence[Sweep], page: Path, width: Width) -> list[Figure]:
    """Of every sweep with claims of the twenty, ours by seed beside the paper's, where that prints a number in percent.

    Args:
        page: the folder of the page, from which links lead to runs.
    """
    found = [_forest(sweep, f"forest{number or ''}", page, width) for number, sweep in enumerate(sweeps)]
    return [figure for figure in found if figure is not None]


def _forest(sweep: Sweep, key: str, page: Path, width: Width) -> Figure | None:
    claims = {number: _claims(sweep.summary, one) for number, one in enumerate(statements(), 1)}
    drawn = [(number, one, one.number) for number, one in enumerate(statements(), 1) if one.number]
    if not any(claims.values()):
        return None
    seeds, middles, rows = [], [], []
    for place, statement, shown in drawn:
        label, of = f"{place} {statement.says}", quantity_of(shown.value)
        asked = claims[place][0].experiment if claims[place] else statement.experiment
        cell = _cell(sweep.summary, asked, shown.cell) if claims[place] else CellSummary(seeds=0)
        values = by_seed(cell, shown.value)
        seeds += [{"cell": label, "at": label, **point_of(sweep, run, value, page)} for run, value in values]
        estimate = estimated(cell.runs, shown.value)
        middles += [{"cell": label, "at": label, **middle_of(estimate)}] if estimate else []
        ours = ", ".join(number(value, of) for _, value in values) or NOTHING
        rows.append([label, shown.cell, of.label, ours, shown.paper])
    drawing = Dots(
        cells=[row[0] for row in rows],
        labels=[row[0] for row in rows],
        seeds=seeds,
        middles=middles,
        paper=[
            {"cell": row[0], "at": row[0], "value": shown.paper} for row, (_, _, shown) in zip(rows, drawn, strict=True)
        ],
        decimals=1,
    )
    exploratory = [str(place) for place, found in claims.items() if found and found[0].analysis == "exploratory"]
    caption = (
        "Every point is a run of one seed, and leads to its recipe; the bar is the median over seeds, the line from "
        "the smallest to the largest. The open diamond is the paper's number, a single run at its own scale, on "
        "which no verdict rests. Statements for which it prints no percentage are left out."
        + (f" Exploratory: {', '.join(exploratory)}." if exploratory else "")
    )
    columns = [*names("Statement", "Cell", "Number"), TableColumn("Ours", "every seed, %")]
    table = Table("", [*columns, TableColumn("The paper’s", "%", ".2f")], rows)
    scale = f" at {sweep.summary.scale}" if sweep.summary.scale else ""
    chart = dots(drawing, values_axis("Percent of heads", True), width=width, label_width=LABELS)
    return Figure(key, f"Ours{scale} beside the paper's", caption, [chart], small=True, table=table)
