"""The tables of a report below that of its cells: comparisons side by side, ablations and propositions."""

from dataclasses import dataclass

from sinklab.report.data import ReportData
from sinklab.report.suites import NOTHING
from sinklab.survey.documents import ComparedQuantity, ComparisonDocument

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
        "others. Each model reads the text through its own tokenizer: losses are per token of each, and comparable "
        "where the tokenizers are the same."
    )
    return Table(f"comparison-{number}", "Side by side", columns, rows, [note])


def _line(row: ComparedQuantity, first: str, others: list[str]) -> list[str]:
    cells = [f"{row.quantity} ({row.unit})", _number(row.values.get(first))]
    for model in others:
        cells += [_number(row.values.get(model)), _number(row.differences.get(model), signed=True)]
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
        ]
        for label, one in found
    ]
    said = [f"{label}, {one.name}: {one.what}; targets from {one.first_target} on." for label, one in found]
    columns = [
        ("Model", "as measured"),
        ("Without", "ablation"),
        ("Loss", "nats / token"),
        ("Ablated", "nats / token"),
        ("Change", "nats / token"),
        ("Sink₁", "% of heads"),
        ("Ablated", "% of heads"),
    ]
    notes = ["Both losses of an ablation are over the same targets.", *said]
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
