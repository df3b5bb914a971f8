"""Specification of chart axes; `report/charts.py` draws the charts."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class PlotAxis:
    """An axis of a chart.

    Attributes:
        title: title of the axis, with the unit in brackets; `log scale` is added for a log or symlog scale.
        field: name of the field of the data rows that is shown on the axis.
        short: title in a tooltip; empty means the title without its unit.
        order: values of a categorical axis in display order; None for a continuous one.
        scale: kind of scale; "auto" is logarithmic if all values are above 0 and span more than a factor of 30.
        zero: whether a linear scale includes 0.
        at_least: smallest allowed maximum of the scale, so that noise does not look like an effect; None for no limit.
        domain: minimum and maximum of the scale; None to compute them from the data.
        constant: absolute value below which a symlog scale is approximately linear.
        format: number format of axis labels, in d3's notation; None for the default of the scale type.
        precision: number format of tooltips, in d3's notation.
        ticks: tick positions; None for Vega's default.
        whole: whether all values are integers, so that ticks are integers too.
    """

    title: str
    field: str
    short: str = ""
    order: Sequence[str] | Sequence[float] | None = None
    scale: Literal["linear", "log", "symlog", "auto"] = "linear"
    zero: bool = True
    at_least: float | None = None
    domain: tuple[float, float] | None = None
    constant: float = 1.0
    format: str | None = None
    precision: str = ".4~f"
    ticks: Sequence[float] | None = None
    whole: bool = False

    @property
    def name(self) -> str:
        """Title in a tooltip: `short`, or the title without its unit and with a lower-case first letter."""
        title = self.title.split(" (")[0]
        return self.short or title[:1].lower() + title[1:]
