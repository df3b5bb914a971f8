"""The table of an assessment, for the page and the terminal: a row for everything that was done."""

from collections.abc import Sequence
from dataclasses import replace

from sinklab.assessing.documents import Assessment
from sinklab.assessing.lines import assess_lines, head_counts, perplexity_text
from sinklab.report.assessing.assessed import Assessed
from sinklab.tables import Table, TableColumn, names


def assessment_tables(assessed: Sequence[Assessed]) -> list[Table]:
    """One per assessment."""
    return [
        replace(
            assessment_table(one.document), title=f"Costs and benefits of the sink: {one.name}", key=f"assessment-{at}"
        )
        for at, one in enumerate(assessed)
    ]


def assessment_table(document: Assessment) -> Table:
    """Loss, perplexity and KL divergence of the model under every change, part by part."""
    rows = [
        (
            f"{line.part}: {line.what}",
            line.effect.loss,
            perplexity_text(line.effect.loss),
            line.effect.kl,
            line.more,
        )
        for line in assess_lines(document)
    ]
    columns = [
        *names("Change"),
        TableColumn("Loss", "nats / token", ".4f"),
        TableColumn("Perplexity"),
        TableColumn("KL", "from the unchanged model", ".4f"),
        *names(""),
    ]
    heads = document.heads and f"Heads ({document.heads.sink}): {head_counts(document)}."
    skipped = [f"Skipped: {part}: {why}" for part, why in document.skipped.items()]
    notes = [*([heads] if heads else []), *skipped, *document.notes]
    return Table("Costs and benefits of the sink (nats per token)", columns, rows, notes)
