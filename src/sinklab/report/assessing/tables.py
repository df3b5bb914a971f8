"""Everything that an assessment holds, a line each."""

from collections.abc import Sequence

from sinklab.assessing.lines import assess_lines, head_counts, perplexity_text
from sinklab.report.assessing.assessed import Assessed
from sinklab.report.tables import Table

COLUMNS = [
    ("What was done", ""),
    ("Loss", "nats / token"),
    ("Perplexity", ""),
    ("KL", "from the unchanged model"),
    ("", ""),
]


def assessment_tables(assessed: Sequence[Assessed]) -> list[Table]:
    """One per assessment."""
    return [_table(number, one) for number, one in enumerate(assessed)]


def _table(number: int, one: Assessed) -> Table:
    rows = [
        [
            f"{line.part}: {line.what}",
            f"{line.effect.loss:.4f}",
            perplexity_text(line.effect.loss),
            f"{line.effect.kl:.4f}",
            line.more,
        ]
        for line in assess_lines(one.document)
    ]
    counts = head_counts(one.document)
    notes = [
        *([f"Heads: {counts}."] if counts else []),
        *(f"Skipped: {part}: {why}" for part, why in one.document.skipped.items()),
        *one.document.notes,
    ]
    return Table(f"assessment-{number}", f"What the sink costs and buys: {one.name}", COLUMNS, rows, notes)
