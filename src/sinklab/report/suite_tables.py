"""Tables of the report that only suites have: the comparison side by side."""

from typing import Any

from sinklab.report.collect import ReportData
from sinklab.report.findings import Table
from sinklab.report.suites import Suite

NOTHING = "–"


def suite_tables(data: ReportData) -> list[Table]:
    """A table per comparison."""
    return [_comparison(suite, number) for number, suite in enumerate(data.suites) if suite.kind == "comparison"]


def _comparison(suite: Suite, number: int) -> Table:
    first, *others = suite.entries
    columns = [("Quantity", "unit"), (first, "first model")]
    for model in others:
        columns += [(model, ""), ("Difference", f"from {first}")]
    rows = [_line(row, first, others) for row in suite.document["rows"]]
    note = (
        "Sink rates are percent of (sequence, layer, head) triples. Ratios compare position 1 with the mean of the "
        "others. Each model reads the text through its own tokenizer: losses are per token of each, and comparable "
        "where the tokenizers are the same."
    )
    return Table(f"comparison-{number}", "Side by side", columns, rows, [note])


def _line(row: dict[str, Any], first: str, others: list[str]) -> list[str]:
    cells = [f"{row['quantity']} ({row['unit']})", _number(row["values"].get(first))]
    for model in others:
        cells += [_number(row["values"].get(model)), _number(row["differences"].get(model), signed=True)]
    return cells


def _number(value: float | None, signed: bool = False) -> str:
    return NOTHING if value is None else f"{value:{'+' if signed and value else ''}.3f}"
