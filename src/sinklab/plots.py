"""Axes of charts as data: declared beside a result, drawn by `report/charts.py`."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class PlotAxis:
    """An axis, and how its values are said in a tooltip.

    Attributes:
        title: with its unit; ` (log scale)` is added where it is one.
        field: of the rows.
        short: title in a tooltip; by default the title without its unit.
        order: the values of a categorical axis; None for a number line.
        scale: auto is logarithmic where all values are above zero and span more than a factor of 30.
        zero: whether a linear scale includes 0.
        at_least: a value that the scale reaches in any case, so that noise does not look like an effect.
        domain: its ends, where they are fixed.
        constant: up to which a symlog scale is about linear.
        format: of its labels, and `precision` that of tooltips, in d3's notation.
        ticks: where labels are; chosen by the library unless given.
        whole: whether values are whole numbers.
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
        """In a tooltip."""
        said = self.title.split(" (")[0]
        return self.short or said[:1].lower() + said[1:]
