"""Base class of the parts of an assessment, their text, and what they show: answers, table rows, numbers, figure.

A part is a subclass of `AssessPart` in a file of its own in `parts/`, which finds it. Its fields are its entry in
assessment.json. Losses and KL divergences are in nats per token. Positions and layers are 1-based; learned leading
tokens (sink token, registers) are at positions 0, -1 and so on.
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
    """A model and the text on which it is assessed: one token stream, cut into sequences.

    Args:
        text: a .txt or .jsonl file or a folder of them; None for the validation text of a run.
    """

    def __init__(self, model: Model, text: Path | None) -> None:
        self.model, self._text = model, text
        self.conversations = model.conversations(keep_bos=not model.special)

    def sequences(self, most: int, length: int, fewest: int = 1) -> Tensor:
        """Cut the stream into `fewest` to `most` sequences of `length` tokens, special tokens included: (N, T).

        Raises:
            InputError: if the text is too short or cannot be read, is missing for a model that is not a run, or
                `length` leaves fewer than two tokens after the special ones.
        """
        special = len(self.model.special)
        body = length - special
        if body < 2:
            raise InputError(
                f"sequences of {length} tokens, {special} of them special, are too short: use longer ones (--length, "
                "--stream-length)"
            )
        stream = self._stream(most * body)
        count = min(most, len(stream) // body)
        if count < fewest:
            raise InputError(
                f"{self._text or 'the validation text of the run'} has {len(stream):,} tokens, and {fewest * body:,} "
                f"are needed ({fewest} x {body:,}): pass more text, or use shorter sequences and caches "
                "(--length, --stream-length, --cache)"
            )
        return self.model.arrange(torch.tensor(stream[: count * body]).view(count, body), special > 0, None)

    def split(self, most: int, others: int, length: int) -> tuple[Tensor, Tensor]:
        """Cut the stream into at most `most` sequences (N, T) and up to `others` further sequences (M, T).

        Raises:
            InputError: if the text is too short for two sequences, or as for `sequences`.
        """
        both_NT = self.sequences(most + others, length, fewest=2)
        N = max(1, len(both_NT) - others)
        return both_NT[:N], both_NT[N:]

    def _stream(self, tokens: int) -> list[int]:
        """Return at least `tokens` token ids from the start of the text; fewer if the whole text has fewer."""
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
    """Loss of the model under an intervention or unchanged, and its KL divergence from the unchanged model.

    Attributes:
        loss: mean loss over the target tokens (not the added loss).
        kl: mean over the targets of KL(unchanged model || model under the intervention).
        targets: number of target tokens.
        error: standard error of the added loss (`standard_error`); None for the unchanged model, for results of
            `mean_effect`, and for a single block of targets.
    """

    loss: float
    kl: float
    targets: int
    error: float | None = Field(default=None, exclude_if=lambda error: error is None)


@dataclass(frozen=True)
class PartJob:
    """A prepared part of an assessment, ready to run.

    Attributes:
        passes: maximum number of sequences read, summed over the forward passes that report progress.
        run: function that runs the model on the sequences, calls its argument after each one, and returns the result.
    """

    passes: int
    run: Callable[[Callable[[], None]], "AssessPart"]


@dataclass(frozen=True)
class PartRow:
    """A row of the result table: one intervention, or the unchanged model.

    Attributes:
        what: description of the intervention.
        effect: loss and KL divergence under the intervention.
        more: remark shown at the end of the row; empty for none.
        added: loss minus the unchanged loss on the same targets; None to subtract the loss of `AssessPart.unchanged`.
    """

    what: str
    effect: Effect
    more: str = ""
    added: float | None = None

    @property
    def perplexity(self) -> str:
        """exp(loss) with two decimals; an en dash for a loss of 20 or more."""
        return f"{math.exp(self.effect.loss):,.2f}" if self.effect.loss < 20 else "–"


@dataclass(frozen=True)
class PartAnswer:
    """An answer to the question of a part: an intervention, and the loss that it adds.

    Attributes:
        change: description of the intervention in a few words.
        added: added loss in nats per token, or another loss difference that `change` describes; None if the
            answer is not a loss.
        lost: clause for the first sentence of the assessment, if `added` is the loss without the sink, such as
            "with the sink hidden".
        gained: clause for the second sentence, if `added` is the cost of the sink, such as "in int8".
    """

    change: str
    added: float | None
    lost: str = ""
    gained: str = ""


@dataclass(frozen=True)
class PartNumber:
    """A scalar result of a part in nats per token, for claims and for tables of many models.

    Attributes:
        name: name of the scalar in claims; `N` is a placeholder for an integer, as in `streamed_loss_N`.
        label: heading of the column in the table of an experiment.
        column: heading and unit of the column on the leaderboard; None for no column.
        explained: explanation of the column on the leaderboard.
    """

    name: str
    label: str
    column: tuple[str, str] | None = None
    explained: str = ""


@dataclass(frozen=True)
class PartFigure:
    """The data and axes of a figure, which `report` draws.

    Attributes:
        rows: points, each a mapping of fields, which include the fields of `colour` and of the axes.
        y: vertical axis; default: the added loss.
        kind: "lines" (a line per series), "dots" (dots joined in each category of y) or "scatter".
        colour: field that contains the name of the series; `series` is the order of the names in the legend.
        reference: position of a dashed line on the y axis (for dots, on the x axis).
        tooltip: further fields in the tooltip, as triples of field, title and number format.
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
        name: name of the part in `--parts`, assessment.json and experiments.
        rank: position of the part in the order of execution and display.
        question: question that the part answers.
        long_text: whether a text that is too short counts as a refusal, so that the part is skipped unless `--parts`
            names it; otherwise it is an error.
        on_request: whether the part runs only if `--parts` names it, because it is slow.
        in_quick: whether --quick includes the part if `--parts` is not given.
        numbers: scalar results of the part.
        loss_axis: title of an axis that shows the added loss.
        sequences, length: number of sequences N and tokens per sequence T.
        unchanged: loss of the unchanged model on the same text, read within its context.
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
        """Return the reason why the part cannot be run on the model; None if it can."""
        return None

    @classmethod
    @abstractmethod
    def job(cls, text: AssessText, settings: AssessSettings) -> PartJob:
        """Tokenise the text and return the job that runs the forward passes of the part.

        Raises:
            InputError: if the text is too short, cannot be read or is missing (`AssessText.sequences`).
        """

    @abstractmethod
    def answers(self) -> Iterator[PartAnswer]:
        """List the answers to the part's question, which are shown before the table."""

    def rows(self) -> Iterator[PartRow]:
        """List the rows of the result table, one per intervention or bucket of positions; none by default."""
        yield from ()

    def remark(self) -> str | None:
        """Return the note below the result table; None for no note."""
        return None

    def values(self) -> Iterator[tuple[str, float]]:
        """List the scalar results declared in `numbers`, as pairs of name (with N filled in) and value."""
        yield from ()

    def figure(self) -> PartFigure | None:
        """Return the part's figure in the report; None for no figure."""
        return None

    def unchanged_row(self) -> PartRow:
        """Return the table row of the unchanged model."""
        return PartRow("unchanged", self.unchanged, f"{self.sequences} x {self.length:,} tokens")

    def added(self, effect: Effect) -> float:
        """Return the loss under an intervention minus the loss of the unchanged model."""
        return effect.loss - self.unchanged.loss

    def added_by(self, row: PartRow) -> float:
        """Return the loss that the intervention of a table row adds."""
        return self.added(row.effect) if row.added is None else row.added

    def point(self, effect: Effect, series: str, x: object, y: object = None) -> dict[str, object]:
        """Return a data row of a figure, with loss and KL divergence for the tooltip; default `y`: the added loss."""
        y = self.added(effect) if y is None else y
        return {"series": series, "x": x, "loss": effect.loss, "kl": effect.kl, "y": y}

    @staticmethod
    def counted(count: int, noun: str) -> str:
        """Return the noun for a count of 1, else the count and the plural: `key`, `3 keys`."""
        return noun if count == 1 else f"{count} {noun}s"
