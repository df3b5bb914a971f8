"""Tables of experiments, for the page and the terminal: cells beside the paper's numbers, models, claims."""

from collections.abc import Mapping, Sequence
from typing import Literal

from sinklab.experiments.definition import SCALES
from sinklab.experiments.documents import (
    CellEstimate,
    CellRun,
    CellSummary,
    ExperimentSummary,
    JudgedClaim,
    estimated,
    verdict_counts,
)
from sinklab.experiments.quantities import Quantity, quantity
from sinklab.measuring.statistics.highest import elsewhere_text
from sinklab.tables import Table, TableCell, TableColumn, Value, counted, names, number_text

DID_NOT_TRAIN = "did not train"
Replicate = Literal["seed", "draw"]
"""Replicates: seeds of training, or draws of the sequences that a model is measured on."""


def replicate_of(experiment: ExperimentSummary) -> Replicate:
    """Models are trained at a scale; the scale of an experiment on an existing model is that model's name."""
    return "seed" if experiment.scale in SCALES or not experiment.scale else "draw"


def quantity_of(name: str) -> Quantity:
    """The quantity of a column; an unknown one is labelled with its name."""
    try:
        return quantity(name)
    except ValueError:
        return Quantity(name, name, "", 3)


def estimate_of(cell: CellSummary, name: str) -> CellEstimate | None:
    """The number over the seeds, None without any seed that has it."""
    return estimated(cell.runs, name) or cell.values.get(name)


def by_seed(cell: CellSummary, name: str) -> list[tuple[CellRun, float]]:
    """The runs that have the number, each with it."""
    return [(run, run.values[name]) for run in cell.runs if name in run.values]


def sink_elsewhere_text(cell: CellSummary, name: str) -> str:
    """Beside Sink_1: `76.8 % at position 2` where the highest sink of the cell is at another position; else empty."""
    return elsewhere_text(cell.sink_rate) if name == "sink_1" else ""


def change_text(cell: CellSummary) -> list[str]:
    """The changes of a cell to the base recipe, as `--set` takes them."""
    return [f"{key}={_setting(value)}" for key, value in cell.change.items()]


def _setting(value: object) -> str:
    if isinstance(value, bool) or value is None:
        return {True: "true", False: "false", None: "null"}[value]
    return f"{value:g}" if isinstance(value, float) else str(value)


def experiment_table(experiment: ExperimentSummary, cells: Mapping[str, CellSummary]) -> Table:
    """A row per cell: finished runs, and of every quantity the median over them, its spread, and the paper's number."""
    paper = {cell: experiment.published.get(cell, {}) for cell in cells}
    estimates = {cell: {one: estimate_of(found, one) for one in experiment.columns} for cell, found in cells.items()}
    shown = [
        quantity_of(one)
        for one in experiment.columns
        if any(one in numbers for numbers in paper.values()) or any(found[one] for found in estimates.values())
    ]
    in_paper = {one.name for one in shown if any(one.name in numbers for numbers in paper.values())}
    columns = [
        TableColumn("Cell", "what was changed", text=True),
        TableColumn(f"{replicate_of(experiment)}s".capitalize(), "finished"),
    ]
    for one in shown:
        unit = ", ".join(filter(None, (one.unit, "once, at the end" if one.once else "")))
        columns.append(TableColumn(one.label, unit, f",.{one.decimals}f"))
        if one.name in in_paper:
            columns.append(TableColumn("the paper’s", one.unit, f",.{max(one.decimals, 2)}f"))
    rows: list[list[Value]] = []
    for name, cell in cells.items():
        row: list[Value] = [name, _finished(cell)]
        for one in shown:
            row.append(_estimate(estimates[name][one.name], one.decimals, sink_elsewhere_text(cell, one.name)))
            if one.name in in_paper:
                failed = one.name not in paper[name] and paper[name].get("trains") == 0.0
                row.append(DID_NOT_TRAIN if failed else paper[name].get(one.name))
        rows.append(row)
    notes = [f"Median [smallest, largest] over {replicate_of(experiment)}s."]
    return Table("", columns, rows, notes)


def _finished(cell: CellSummary) -> TableCell:
    """`3`, or `2 of 3` with how many failed."""
    done = sum(run.status == "done" for run in cell.runs) if cell.runs else cell.seeds
    failed = sum(run.status == "failed" for run in cell.runs)
    planned = len(cell.runs) or cell.seeds
    return TableCell(str(done) if done == planned else f"{done} of {planned}", f"({failed} failed)" if failed else "")


def _estimate(estimate: CellEstimate | None, decimals: int, elsewhere: str) -> TableCell | None:
    if estimate is None:
        return None
    notes = [ends_text(estimate, decimals)]
    if estimate.never_reached:
        notes = [f"{counted(estimate.never_reached, 'seed')} did not get there"]
    elif estimate.untrained is not None:
        form = f",.{decimals}f"
        notes.append(f"untrained {number_text(estimate.untrained, form)}, lowest {number_text(estimate.lowest, form)}")
    notes.append(f"({elsewhere})" if elsewhere else "")
    return TableCell("never" if estimate.median is None else estimate.median, " ".join(filter(None, notes)))


def ends_text(estimate: CellEstimate, decimals: int) -> str:
    """`[15.1, 21.7]`, the smallest and the largest seed; nothing with one seed."""
    if len(estimate.seeds) < 2:
        return ""
    ends = ("never" if one is None else f"{one:,.{decimals}f}" for one in (estimate.smallest, estimate.largest))
    return f"[{', '.join(ends)}]"


def paper_models(experiment: ExperimentSummary) -> Table | None:
    """The paper's numbers of other models than the measured one, a row for each; None without any."""
    found = {model: row for model, row in experiment.elsewhere.items() if row}
    printed = list(dict.fromkeys((cell, name) for row in found.values() for cell in row for name in row[cell]))
    if not printed:
        return None
    columns = [
        *names("Model"),
        *(TableColumn(f"{cell}, {quantity_of(name).label}", "", ",.2f") for cell, name in printed),
    ]
    rows = [[model, *(row.get(cell, {}).get(name) for cell, name in printed)] for model, row in found.items()]
    return Table("The paper’s models", columns, rows)


def claims_table(claims: Sequence[JudgedClaim]) -> Table:
    """A row per claim: verdict with its scale, text, evidence; how many of each verdict in the title."""
    rows = [
        (
            TableCell(f"{claim.verdict_said}{at_scale(claim)}", tone=claim.verdict),
            claim.said,
            "; ".join(filter(None, (claim.evidence, *claim.remarks))),
        )
        for claim in claims
    ]
    return Table(counts_line(claims), names("Verdict", "Claim", "Evidence"), rows)


def at_scale(claim: JudgedClaim) -> str:
    """` at tiny`; nothing of an existing model, whose name a verdict does not repeat."""
    return f" at {claim.scale}" if claim.scale and claim.replicate == "seed" else ""


def counts_line(claims: Sequence[JudgedClaim]) -> str:
    """`Claims: confirmatory 3 reproduced, 1 contradicted; exploratory 2 reproduced`."""
    kinds = [
        f"{kind} {', '.join(f'{number} {verdict}' for verdict, number in found.items())}".strip()
        for kind, found in verdict_counts(claims).items()
    ]
    return f"Claims: {'; '.join(kinds)}" if kinds else "Claims"
