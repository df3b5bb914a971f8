"""The tables and figures of assessments, as their parts declare them (`assessing/part.py`)."""

from collections.abc import Sequence

from sinklab.assessing.assessment import Assessment
from sinklab.assessing.part import PartFigure
from sinklab.report.assessments import Assessed
from sinklab.report.charts import Drawing, Figure, Width, lines, scatter
from sinklab.tables import Table, TableColumn, names


def assessment_table(document: Assessment, title: str = "Costs and benefits of the sink", key: str = "") -> Table:
    """Loss, perplexity and KL divergence of the model under every change, part by part."""
    columns = [
        *names("Change"),
        TableColumn("Loss", "nats / token", ".4f"),
        TableColumn("Perplexity"),
        TableColumn("KL", "from the unchanged model", ".4f"),
        *names(""),
    ]
    rows = [
        (f"{part}: {row.what}", row.effect.loss, row.perplexity, row.effect.kl, row.more)
        for part, row in document.rows()
    ]
    notes = [
        *(f"{remark}." for remark in document.remarks()),
        *(f"Skipped: {part}: {why}" for part, why in document.skipped.items()),
        *document.notes,
    ]
    return Table(title, columns, rows, notes, key)


def assessment_figures(assessed: Sequence[Assessed], width: Width) -> list[Figure]:
    """The figures of every assessment; where there are several, their titles name the model."""
    found = []
    for number, one in enumerate(assessed):
        of = f": {one.name}" if len(assessed) > 1 else ""
        for name, part in one.document.results.items():
            if figure := part.figure():
                found.append(Figure(f"{name}-{number}", figure.title + of, figure.caption, [_drawn(figure, width)]))
    return found


def _drawn(figure: PartFigure, width: Width) -> Drawing:
    order = figure.series or list(dict.fromkeys(str(row[figure.colour]) for row in figure.rows))
    if figure.kind == "lines":
        return lines(
            figure.rows,
            figure.x,
            figure.y,
            figure.colour,
            order,
            reference=figure.reference,
            tips=figure.tooltip,
            width=width,
        )
    return scatter(
        figure.rows,
        figure.x,
        figure.y,
        figure.colour,
        order,
        join=figure.y.field if figure.kind == "dots" else None,
        reference=figure.reference,
        tips=figure.tooltip,
        width=width,
    )
