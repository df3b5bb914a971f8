"""The declaration of a part of an assessment: result, passes over the text, table rows, single numbers and figure.

A part is a subclass of `AssessPart` in a file of its own in `parts/`, which finds it. Its fields are its entry in
assessment.json. Losses and divergences are in nats per token; positions and layers count from 1, a sink token in front
as position 0.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

from sinklab.assessing.plan import AssessSettings
from sinklab.assessing.text import AssessText
from sinklab.models.adapter import Adapter
from sinklab.plots import PlotAxis
from sinklab.schema import ReadDocument

GROWTH = "Loss above the unchanged model's (nats per token)"


class Effect(ReadDocument):
    """The effect of a change.

    Attributes:
        loss: mean over the targets.
        kl: mean divergence of the changed model's predictions from the unchanged one's.
        targets: how many there were.
    """

    loss: float
    kl: float
    targets: int


@dataclass(frozen=True)
class PartJob:
    """A part, ready to run.

    Attributes:
        passes: sequences that it reads, each as often as it is read.
        run: reads them, calls its argument after each, and returns the result.
    """

    passes: int
    run: Callable[[Callable[[], None]], "AssessPart"]


@dataclass(frozen=True)
class ResultRow:
    """A row of the result table: one change, or the unchanged model.

    Attributes:
        what: the change.
        more: a remark.
    """

    what: str
    effect: Effect
    more: str = ""

    @property
    def perplexity(self) -> str:
        """exp(loss) with two decimals, an en dash beyond e^20."""
        return f"{math.exp(self.effect.loss):,.2f}" if self.effect.loss < 20 else "–"


@dataclass(frozen=True)
class PartNumber:
    """A single number of a part in nats per token, for claims and for tables of many models.

    Attributes:
        name: in claims; an N stands for a whole number.
        label: of its column in the table of an experiment.
        column: heading and unit of its column on the leaderboard; None for no column.
        explained: the explanation of that column.
    """

    name: str
    label: str
    column: tuple[str, str] | None = None
    explained: str = ""


@dataclass(frozen=True)
class PartFigure:
    """A figure as data; `report` draws it.

    Attributes:
        kind: a line per series, a row of joined dots per category of y, or a cloud of points.
        rows: values by field, those of `colour` and of the axes among them.
        colour: the field with the series, of which `series` has the order in the legend.
        reference: a dashed line at this value of y (of dots: of x).
        tooltip: further fields, each with its title and format.
    """

    kind: Literal["lines", "dots", "scatter"]
    title: str
    caption: str
    rows: Sequence[Mapping[str, object]]
    x: PlotAxis
    y: PlotAxis
    reference: float | None = None
    colour: str = "series"
    series: Sequence[str] = ()
    tooltip: Sequence[tuple[str, str, str]] = (
        ("loss", "loss, nats", ".4f"),
        ("kl", "KL from the unchanged model", ".4f"),
    )


class AssessPart(ReadDocument, ABC):
    """A part of an assessment; an instance is its result.

    Attributes:
        name: in `--parts`, in assessment.json and in experiments.
        rank: parts run and are shown by this number.
        long_text: whether it is skipped where the text is too short for it; other parts then refuse.
        on_request: whether it runs only where it is named, as it takes long.
        numbers: its single numbers.
        sequences, length: N and T of the text it read.
        unchanged: the unchanged model on that text, within its context.
    """

    name: ClassVar[str]
    rank: ClassVar[int]
    long_text: ClassVar[bool] = False
    on_request: ClassVar[bool] = False
    numbers: ClassVar[tuple[PartNumber, ...]] = ()

    sequences: int
    length: int
    unchanged: Effect

    @classmethod
    def refusal(cls, adapter: Adapter, settings: AssessSettings) -> str | None:
        """Why the model cannot be given this part, None where it can."""
        return None

    @classmethod
    @abstractmethod
    def job(cls, text: AssessText, settings: AssessSettings) -> PartJob:
        """Read the text that the part needs and prepare its passes.

        Raises:
            InputError: the text is too short.
        """

    def rows(self) -> Iterator[ResultRow]:
        """Everything that has a loss."""
        yield from ()

    def remark(self) -> str | None:
        """A line below the table."""
        return None

    def values(self) -> Iterator[tuple[str, float]]:
        """The values of `numbers` by name, an N replaced by its number."""
        yield from ()

    def figure(self) -> PartFigure | None:
        """The figure of the report."""
        return None

    def unchanged_row(self) -> ResultRow:
        """The row of the unchanged model."""
        return ResultRow("unchanged", self.unchanged, f"{self.sequences} x {self.length:,} tokens")

    def added(self, effect: Effect) -> float:
        """The loss of a change above that of the unchanged model."""
        return effect.loss - self.unchanged.loss


def plot_row(effect: Effect, y: float | None, series: str, x: object) -> dict[str, object]:
    """A row of a figure, with the tooltip's loss and divergence."""
    return {"series": series, "x": x, "loss": effect.loss, "kl": effect.kl, "y": y}


def counted(count: int, noun: str) -> str:
    """ "key", "3 keys"."""
    return noun if count == 1 else f"{count} {noun}s"
