"""The tables of a report: that of its cells, comparisons side by side, ablations and propositions."""

from collections.abc import Callable
from dataclasses import dataclass

from sinklab.report.data import ReportData
from sinklab.report.summary import INFINITE, CellRow, Spread, cell_rows
from sinklab.survey.documents import (
    CheckpointsDocument,
    ComparedQuantity,
    ComparisonDocument,
    DomainsDocument,
    FamiliesDocument,
    FamilyMember,
)

NOTHING = "–"
VERDICTS = {True: "holds", False: "does not hold", None: "the precision cannot decide"}


@dataclass(frozen=True)
class Table:
    """A section of the page that is a table.

    Attributes:
        key: of its anchor.
        columns: name and unit.
        rows: texts; the first cell of a row is its heading.
        notes: what the reader must know to read it.
    """

    key: str
    title: str
    columns: list[tuple[str, str]]
    rows: list[list[str]]
    notes: list[str]


TableColumn = tuple[tuple[str, str], Callable[[CellRow], str]]


def table_of_cells(data: ReportData) -> tuple[list[tuple[str, str]], list[list[str]]]:
    """The table of cells as texts: columns (name, unit) and one line per cell, in the order of `data.cells`.

    A column in which no cell has anything to say is left out; an en dash stands for a value that is not there.
    """
    rows = cell_rows(data)
    trained = not data.runs or any(run.trained for run in data.runs)
    members = _members(data)
    columns: list[TableColumn] = [
        (_first_column(data, trained), lambda row: row.cell),
        (("Runs", "seeds"), lambda row: str(row.seeds) + row.progress),
        (("Sink₁", "% of heads"), lambda row: _text(row.sink_first, 1)),
        (("Sink₁ visible", "% of heads"), lambda row: _text(row.sink_visible, 1)),
        (("Sink elsewhere", "% at position"), _elsewhere),
        (("First token", "times uniform"), lambda row: _text(row.uniform_ratio, 1)),
        (("Sequences", "measured"), lambda row: _sequences(data, row.cell)),
        (("Published", "Sink₁, % of heads"), lambda row: _published(members.get(row.cell))),
        (("Parameters", "millions"), lambda row: _millions(members.get(row.cell))),
        (("On the bias", "% of heads"), lambda row: _text(row.sink_bias, 1)),
        (("Valid. loss" if trained else "Loss", "nats / token"), lambda row: _text(row.loss, 3)),
        (("Bits per byte", "of the text"), lambda row: _text(row.bits_per_byte, 3)),
        (("Norm ratio", "largest block"), lambda row: _text(row.norm_ratio, 1)),
        (("Row sum", "of raw scores"), lambda row: _text(row.row_sum, 2)),
        (("Time", "seconds"), lambda row: _text(row.seconds, 0)),
    ]
    said = [(head, text) for head, text in columns if any(text(row) != NOTHING for row in rows)]
    return [head for head, _ in said], [[text(row) for _, text in said] for row in rows]


def _elsewhere(row: CellRow) -> str:
    peak = row.sink_elsewhere
    return f"{peak[1]:.1f} at {peak[0]}" if peak else NOTHING


def _text(spread: Spread | None, decimals: int) -> str:
    return NOTHING if spread is None else spread.text(decimals)


def _first_column(data: ReportData, trained: bool) -> tuple[str, str]:
    """Name and unit of the column that names the cells."""
    match data.only_suite:
        case DomainsDocument():
            return "Domain", "a file each"
        case ComparisonDocument():
            return "Model", "on the same text"
        case CheckpointsDocument():
            return "Checkpoint", "after the step"
    return ("Cell", "what was changed") if trained else ("Model", "as measured")


def _members(data: ReportData) -> dict[str, FamilyMember]:
    """The open models among the cells."""
    return {
        run.cell: suite.document.measured[name]
        for suite in data.suites
        if isinstance(suite.document, FamiliesDocument)
        for name, run in suite.runs(data)
    }


def _sequences(data: ReportData, cell: str) -> str:
    """How many were measured; nothing where there are no domains, which alone differ in that."""
    if not any(isinstance(suite.document, DomainsDocument) for suite in data.suites):
        return NOTHING
    values = {str(run.measurement.sequences) for run in data.runs_of(cell) if run.measurement}
    return ", ".join(sorted(values)) or NOTHING


def _published(model: FamilyMember | None) -> str:
    return NOTHING if model is None or model.published is None else f"{model.published:,.2f}"


def _millions(model: FamilyMember | None) -> str:
    return NOTHING if model is None else f"{model.parameters * 1e-6:,.1f}"


def tables(data: ReportData) -> list[Table]:
    """Those that some measurement, or some comparison, has something for."""
    comparisons = [
        _comparison(suite.document, number)
        for number, suite in enumerate(data.suites)
        if isinstance(suite.document, ComparisonDocument)
    ]
    return [*comparisons, *(table for table in (_ablations(data), _propositions(data)) if table.rows)]


def _comparison(document: ComparisonDocument, number: int) -> Table:
    first, *others = document.measured
    columns = [("Quantity", "unit"), (first, "first model")]
    for model in others:
        columns += [(model, ""), ("Difference", f"from {first}")]
    rows = [_line(row, first, others) for row in document.rows]
    note = (
        "Sink rates are percent of (sequence, layer, head) triples. Ratios compare position 1 with the mean of the "
        "others. Each model reads the text through its own tokenizer. Losses are per token: where the vocabularies "
        "differ they have no difference; bits per byte of the text are comparable."
    )
    return Table(f"comparison-{number}", "Side by side", columns, rows, [note])


def _line(row: ComparedQuantity, first: str, others: list[str]) -> list[str]:
    shown = {model: INFINITE if model in row.infinite else _number(row.values.get(model)) for model in (first, *others)}
    cells = [f"{row.quantity} ({row.unit})", shown[first]]
    for model in others:
        cells += [shown[model], _number(row.differences.get(model), signed=True)]
    return cells


def _number(value: float | None, signed: bool = False) -> str:
    return NOTHING if value is None else f"{value:{'+' if signed and value else ''}.3f}"


def _ablations(data: ReportData) -> Table:
    found = [(data.label(run), one) for run, measured in data.measured for one in measured.ablations or ()]
    rows = [
        [
            label,
            one.name,
            f"{one.loss_before:.3f}",
            f"{one.loss_after:.3f}",
            f"{one.loss_change:+.3f}",
            f"{one.sink_rate_before:.1f}",
            f"{one.sink_rate_after:.1f}",
            one.highest_after,
        ]
        for label, one in found
    ]
    said = [
        f"{label}, {one.name}: {'; '.join(one.sentences)}; targets from {one.first_target} on." for label, one in found
    ]
    columns = [
        ("Model", "as measured"),
        ("Without", "ablation"),
        ("Loss", "nats / token"),
        ("Ablated", "nats / token"),
        ("Change", "nats / token"),
        ("Sink₁", "% of heads"),
        ("Ablated", "% of heads"),
        ("Highest sink, ablated", "% at position"),
    ]
    highest = "The highest sink is of positions 1 to T / 2: it may have moved from the first token to another."
    notes = ["Both losses of an ablation are over the same targets.", highest, *said]
    return Table("ablations", "Ablations: what the loss becomes", columns, rows, notes)


def _propositions(data: ReportData) -> Table:
    found = [(data.label(run), one) for run, measured in data.measured if (one := measured.propositions)]
    rows = [
        [
            label,
            one.position,
            _power(one.hidden_deviation),
            _power(one.attention_deviation),
            _power(one.bound_slack),
            VERDICTS[one.holds],
        ]
        for label, one in found
    ]
    columns = [
        ("Model", "as measured"),
        ("Positions", "embedding"),
        ("Hidden states", "relative difference"),
        ("Attention", "off the closed form"),
        ("Bound", "least distance below"),
        ("Proposition", "within rounding"),
    ]
    said = [f"{label}: {one.statement}." for label, one in found]
    return Table("propositions", "Repeated tokens: the paper's propositions", columns, rows, said)


def _power(value: float | None) -> str:
    return NOTHING if value is None else f"{value:.1e}"
