"""The declaration of a part of an assessment: question, text, passes, result, answers, table rows, numbers, figure.

A part is a subclass of `AssessPart` in a file of its own in `parts/`, which finds it. Its fields are its entry in
assessment.json. Losses and divergences are in nats per token; positions and layers count from 1, a learned sink token
is position 0.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from sinklab.assessing.plan import AssessSettings
from sinklab.data.sources.corpora import documents
from sinklab.errors import InputError
from sinklab.models.adapter import Adapter
from sinklab.opening import Model
from sinklab.plots import PlotAxis
from sinklab.schema import ReadDocument

LOSS_ADDED = "Loss above the unchanged model's (nats per token)"
ADDED_AXIS = PlotAxis(LOSS_ADDED, "y", "nats added")


class AssessText:
    """A model and the text that it is assessed on: one stream, cut into sequences.

    Args:
        text: a .txt or .jsonl file or a folder of them; None for the validation text of a run.
    """

    def __init__(self, model: Model, text: Path | None) -> None:
        self.model, self._text = model, text
        self.conversations = model.conversations(keep_bos=not model.special)

    def sequences(self, most: int, length: int, fewest: int = 1) -> Tensor:
        """The stream cut into `fewest` to `most` sequences of `length` tokens: (N, T).

        Raises:
            InputError: too little text, an unreadable one, or none for a model that is not a run.
        """
        special = len(self.model.special)
        body = length - special
        if body < 2:
            raise InputError(f"sequences of {length} tokens, {special} of them special: give longer ones")
        stream = self._stream(most * body)
        count = min(most, len(stream) // body)
        if count < fewest:
            raise InputError(
                f"{self._text or 'the validation text of the run'} has {len(stream):,} tokens, and {fewest * body:,} "
                f"are needed ({fewest} of {body:,} tokens): give more text, or shorter sequences and caches (--length, "
                "--stream-length, --cache)"
            )
        return self.model.arrange(torch.tensor(stream[: count * body]).view(count, body), special > 0, None)

    def split(self, most: int, others: int, length: int) -> tuple[Tensor, Tensor]:
        """At most `most` sequences (N, T), and `others` more of the same text (M, T), of a short text fewer.

        Raises:
            InputError: if the text is too short for two sequences.
        """
        both_NT = self.sequences(most + others, length, fewest=2)
        N = max(1, len(both_NT) - others)
        return both_NT[:N], both_NT[N:]

    def _stream(self, tokens: int) -> list[int]:
        """At least this many tokens of the text, or all of it."""
        if self._text is None:
            if self.model.held_out is None:
                raise InputError(f"--text is needed: {self.model.name} is not a run, so it has no validation text")
            return self.model.held_out(tokens)
        stream: list[int] = []
        for document in documents(str(self._text), render=self.conversations.render):
            stream += self.model.encode(f"{document}\n\n")
            if len(stream) >= tokens:
                break
        return stream


class Effect(ReadDocument):
    """The effect of a change.

    Attributes:
        loss: mean over the targets.
        kl: mean divergence of the changed model's predictions from those of the unchanged model.
        targets: number of them.
        error: standard error of the loss above the unchanged model's; None for the unchanged model, a mean of several
            draws, and too few targets.
    """

    loss: float
    kl: float
    targets: int
    error: float | None = Field(default=None, exclude_if=lambda error: error is None)


@dataclass(frozen=True)
class PartJob:
    """A part, ready to run.

    Attributes:
        passes: number of sequences over all passes.
        run: reads them, calls its argument after each, and returns the result.
    """

    passes: int
    run: Callable[[Callable[[], None]], "AssessPart"]


@dataclass(frozen=True)
class PartRow:
    """A row of the result table: one change, or the unchanged model.

    Attributes:
        what: the change.
        more: a remark.
        added: loss above that of the same targets without the change; None if these are all of the part's.
    """

    what: str
    effect: Effect
    more: str = ""
    added: float | None = None

    @property
    def perplexity(self) -> str:
        """exp(loss) with two decimals, an en dash beyond e^20."""
        return f"{math.exp(self.effect.loss):,.2f}" if self.effect.loss < 20 else "–"


@dataclass(frozen=True)
class PartAnswer:
    """What a part answers to its question: a change, and the loss that it adds.

    Attributes:
        change: in a few words.
        added: nats per token above the unchanged model, or above the row before where `change` says so; None if the
            answer is no loss.
        lost: words for the first sentence of the assessment, where `added` is what the model loses without its sink:
            "with the sink hidden".
        gained: words for its second sentence, where `added` is what the sink costs: "in int8".
    """

    change: str
    added: float | None
    lost: str = ""
    gained: str = ""


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
        rows: values by field, including the fields of `colour` and of the axes.
        y: vertical axis; by default that of the added loss.
        kind: a line per series, joined dots per category of y, or a scatter plot.
        colour: field of the series; `series` is their order in the legend.
        reference: position of a dashed line on the y axis (for dots, on the x axis).
        tooltip: further fields, each with its title and format.
    """

    title: str
    caption: str
    rows: Sequence[Mapping[str, object]]
    x: PlotAxis
    y: PlotAxis = ADDED_AXIS
    kind: Literal["lines", "dots", "scatter"] = "lines"
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
        question: that the part answers.
        long_text: skip the part if the text is too short for it; other parts then raise an error.
        on_request: run the part only if it is named, as it takes long.
        in_quick: run the part with --quick, too, unless some are named.
        numbers: single numbers of the part.
        loss_axis: title of an axis of the added loss.
        sequences, length: N and T.
        unchanged: the unchanged model on the same text, within its context.
    """

    name: ClassVar[str]
    rank: ClassVar[int]
    question: ClassVar[str]
    long_text: ClassVar[bool] = False
    on_request: ClassVar[bool] = False
    in_quick: ClassVar[bool] = True
    numbers: ClassVar[tuple[PartNumber, ...]] = ()
    loss_axis: ClassVar[str] = LOSS_ADDED

    sequences: int
    length: int
    unchanged: Effect

    @classmethod
    def refusal(cls, adapter: Adapter, settings: AssessSettings) -> str | None:
        """Why the part does not apply to the model; None if it applies."""
        return None

    @classmethod
    @abstractmethod
    def job(cls, text: AssessText, settings: AssessSettings) -> PartJob:
        """Read the text and prepare the passes.

        Raises:
            InputError: the text is too short.
        """

    @abstractmethod
    def answers(self) -> Iterator[PartAnswer]:
        """The answers to the question, shown before all rows."""

    def rows(self) -> Iterator[PartRow]:
        """The rows of the table of every change."""
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

    def unchanged_row(self) -> PartRow:
        """The row of the unchanged model."""
        return PartRow("unchanged", self.unchanged, f"{self.sequences} x {self.length:,} tokens")

    def added(self, effect: Effect) -> float:
        """The loss of a change above that of the unchanged model."""
        return effect.loss - self.unchanged.loss

    def added_by(self, row: PartRow) -> float:
        """The loss that the change of a row adds."""
        return self.added(row.effect) if row.added is None else row.added

    def point(self, effect: Effect, series: str, x: object, y: object = None) -> dict[str, object]:
        """A row of a figure, with loss and divergence for the tooltip; `y` is the added loss unless it is given."""
        y = self.added(effect) if y is None else y
        return {"series": series, "x": x, "loss": effect.loss, "kl": effect.kl, "y": y}

    @staticmethod
    def counted(count: int, noun: str) -> str:
        """A noun with its number, which is left out if it is 1: `key`, `3 keys`."""
        return noun if count == 1 else f"{count} {noun}s"
