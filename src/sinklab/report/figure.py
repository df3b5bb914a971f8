"""What a figure of the report is: charts, the colour scale they share, and its numbers as text."""

from dataclasses import dataclass

from sinklab.report.charts import Drawing
from sinklab.tables import Table


@dataclass(frozen=True)
class ColourScale:
    """The colour scale that a figure's heatmaps share.

    Attributes:
        what: the quantity, as the reader sees it beside the scale.
        low, high: its ends.
        outlined: cells above this value, the threshold ε, get an outline; None for no outlines.
        diverging: whether the middle of the scale has a meaning (a cosine of zero).
        references: values that are marked on the scale: what attention without any preference would give.
    """

    what: str
    low: float
    high: float
    outlined: float | None = None
    diverging: bool = False
    references: tuple[float, ...] = ()

    def place(self, value: float) -> float:
        """Where a value stands on the scale, in percent of its length."""
        return 100 * (value - self.low) / (self.high - self.low)


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
    scale: ColourScale | None = None
    small: bool = False
    table: Table | None = None
