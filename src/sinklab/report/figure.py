"""What a figure of the report is."""

from dataclasses import dataclass

from sinklab.report.charts import Drawing
from sinklab.report.heatmaps import Scale


@dataclass(frozen=True)
class DataTable:
    """Numbers of a figure as text: names of the columns, then one line per row."""

    columns: list[str]
    rows: list[list[str]]


@dataclass(frozen=True)
class Figure:
    """One or more charts under one title.

    Attributes:
        key: names its files and its place in the page.
        caption: what is shown and how it was computed.
        scale: the colour scale that its charts share, None where they have none; such charts are small and stand next
            to each other.
        small: whether its charts stand next to each other without a shared scale.
        table: the numbers for those who read rather than look.
    """

    key: str
    title: str
    caption: str
    charts: list[Drawing]
    scale: Scale | None = None
    small: bool = False
    table: DataTable | None = None
