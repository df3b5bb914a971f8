"""Base class of the parts of an assessment, with its text, effects, table rows, scalar results and figures.

A part is a list of conditions on a text: a change of the model, with labels. `PairedReader.effects` (reading.py) gives
the effect of each. Each part is a subclass of `AssessPart` in its own file in `parts/`, with its name in `PART_NAMES`
(settings.py). Its fields are its entry in assessment.json; its tables, figure and scalar results are made from `rows`.

Losses and KL divergences are in nats per token. Positions and layers are 1-based; learned leading tokens (sink token,
registers) are at positions 0, -1 and so on.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Literal

from torch import Tensor

from sinklab.assessing.reading import Effect, PartInput, SinkCost
from sinklab.assessing.settings import AssessSettings
from sinklab.data.corpora import documents
from sinklab.data.textfiles import ChatText, ReadCounts, expanded, notes_on_folder
from sinklab.errors import InputError
from sinklab.measuring.inputs import Encoded, token_rows
from sinklab.models.adapter import Adapter
from sinklab.opening import Model
from sinklab.schema import ReadDocument
from sinklab.tables import PlotAxis

LOSS_ADDED = "Loss above the unchanged model's (nats per token)"
ADDED_AXIS = PlotAxis(LOSS_ADDED, "y", "nats added")


class AssessText:
    """A model and the text on which it is assessed: one token stream, cut into sequences.

    Args:
        text: a text file, a folder of them, or another source of `documents`; None for the validation text of
            a run.
        column: column of a text of rows.
    """

    def __init__(self, model: Model, text: Path | None, column: str | None = None) -> None:
        self.model, self._text, self._column = model, text, column
        self._counts = ReadCounts()
        self.conversations = model.conversations()

    def notes(self) -> list[str]:
        """Return notes on the text that was read last: conversations, skipped rows, and files that were not read."""
        folder = notes_on_folder(expanded(str(self._text))) if self._text else []
        return [*self.conversations.notes(), *self._counts.notes(), *folder]

    def sequences(self, most: int, length: int, fewest: int = 1) -> Tensor:
        """Return the token ids (N, T) of `fewest` to `most` sequences of `length` tokens, special tokens included.

        All sequences begin with the special tokens of the first document. A blank line separates plain texts;
        conversations written by a chat template follow each other unchanged.

        Raises:
            InputError: if the text is too short or cannot be read, or sequences of `length` tokens contain fewer than
                two tokens of the text.
        """
        found = self._documents(most * length)
        first = next(found)
        special = len(first.prefix)
        body = length - special
        if body < 2:
            raise InputError(
                f"sequences of {length} tokens, including {special} special tokens, are too short: at least two tokens "
                "must be from the text; set a larger --length or --stream-length"
            )
        stream = list(first.ids)
        while len(stream) < most * body and (document := next(found, None)) is not None:
            stream += document.ids
        count = min(most, len(stream) // body)
        if count < fewest:
            raise InputError(
                f"{self._text or 'the validation text of the run'} has {len(stream):,} tokens, but {fewest * body:,} "
                f"are required ({fewest} x {body:,}): pass more text, or set shorter sequences "
                "(--length, --stream-length)"
            )
        rows = [Encoded(first.prefix, stream[start : start + body]) for start in range(0, count * body, body)]
        return self.model.arrange(token_rows(rows), special, None)

    def _documents(self, most: int) -> Iterator[Encoded]:
        """Yield the encoded documents; the validation text of a run is one document of at most `most` tokens."""
        if self._text is None:
            assert self.model.held_out is not None, "refused otherwise"
            yield Encoded(self.model.special, self.model.held_out(most))
            return
        encode, self._counts = self.model.encoder(), ReadCounts()
        how: Any = {"render": self.conversations.render, "counts": self._counts, "column": self._column}
        texts = documents(str(self._text), **how)
        for number, document in enumerate(texts):
            if isinstance(document, ChatText):
                found = encode(document)
                yield found if number == 0 else Encoded((), [*found.prefix, *found.ids])
            else:
                yield encode(f"{document}\n\n")


class GivenTokens(AssessText):
    """A model and token ids (N, T) on which it is assessed, in place of a text."""

    def __init__(self, model: Model, tokens_NT: Tensor) -> None:
        super().__init__(model, None)
        self._tokens_NT = model.arrange(tokens_NT, 0, None)

    def sequences(self, most: int, length: int, fewest: int = 1) -> Tensor:
        """Return the first `length` tokens of `fewest` to `most` sequences.

        Raises:
            InputError: if there are fewer sequences or tokens.
        """
        N, T = self._tokens_NT.shape
        if fewest > N or length > T:
            raise InputError(
                f"a part reads {fewest} sequences of {length:,} tokens, and `tokens` have the shape ({N}, {T}): pass "
                "more tokens, or shorter sequences (length, stream_length)"
            )
        return self._tokens_NT[:most, :length]


@dataclass(frozen=True)
class TextSize:
    """Amount of text that a part reads: at most `sequences` sequences of `length` tokens, and `others` further ones."""

    sequences: int
    length: int
    others: int = 0

    def read(self, text: AssessText) -> tuple[Tensor, Tensor | None]:
        """Return token ids of the sequences (N, T), and of the other sequences (M, T) if the part needs any.

        Raises:
            InputError: as for `AssessText.sequences`.
        """
        both_NT = text.sequences(self.sequences + self.others, self.length, fewest=2 if self.others else 1)
        N = max(1, len(both_NT) - self.others)
        return both_NT[:N], both_NT[N:] if self.others else None


@dataclass(frozen=True)
class PartRow:
    """A result of a part: one intervention, the unchanged model, or a difference of two interventions.

    Attributes:
        what: description of the row in the table of all interventions; empty if it is not in that table.
        effect: loss and KL divergence under the intervention; None for a difference, or an answer without a loss.
        added: loss minus that of the unchanged model on the same targets, or another difference of losses; None for an
            answer without a loss.
        more: remark shown at the end of the row; empty for none.
        error: standard error of `added` over the text in nats per token; None if it is not known.
        answer: description of the row in the table of answers to the parts' questions; empty if it is not an answer.
        lost: wording in the summary if `added` is the loss without the sink, such as "with the first key hidden".
        gained: wording in the summary if `added` is the cost of the sink, such as "in static int8".
        numbers: names of the scalar results whose value is `added` (see `AssessPart.numbers`), with an integer for N.
        points: points of the part's figure at the height `added`, as pairs of series and position on the x axis.
        size: bits per number of a setting; the smallest setting within the tolerance is recommended.
    """

    what: str
    effect: Effect | None
    added: float | None
    more: str = ""
    error: float | None = None
    answer: str = ""
    lost: str = ""
    gained: str = ""
    numbers: Sequence[str] = ()
    points: Sequence[tuple[str, object]] = ()
    size: float = 0.0


@dataclass(frozen=True)
class PartNumber:
    """A scalar result of a part in nats per token, for claims and for tables of many models.

    Attributes:
        name: name of the scalar in claims; `N` is a placeholder for an integer, as in `streamed_loss_N`.
        label: heading of the column in the table of an experiment, and explanation of the column on the leaderboard.
        column: heading and unit of the column on the leaderboard; None for no column.
    """

    name: str
    label: str
    column: tuple[str, str] | None = None


@dataclass(frozen=True)
class PartFigure:
    """The data and axes of a figure, which `report` draws.

    Attributes:
        title, caption: heading of the figure and text below it; in `AssessPart.layout` the caption is a format string
            for the part.
        x, y: horizontal and vertical axis; default of y: the added loss.
        rows: data points as mappings from field to value, including the fields of the axes and of `colour`.
        kind: "lines" (a line per series), "dots" (dots, those with the same y joined by a line) or "scatter".
        reference: position of a dashed line on the y axis (for "dots", on the x axis).
        colour: field that contains the series name, or a category, by which points are coloured.
        series: order of the series in the legend; empty for that of the rows.
        tooltip: additional fields of the tooltip, as triples of field, title and number format.
    """

    title: str
    caption: str
    x: PlotAxis
    y: PlotAxis = ADDED_AXIS
    rows: Sequence[Mapping[str, object]] = ()
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
        name: name of the part in `--parts`, assessment.json and experiments, and of its file.
        question: question that the part answers.
        layout: the part's figure without its points; an x axis with `order` () has one place per value.
        long_text: whether the part needs a long text. If the text is too short for it, it is skipped like a part that
            cannot be run on the model. For other parts, a text that is too short is an error.
        on_request: whether the part runs only if `--parts` names it, because it is slow.
        loss_without_sink: value of `--parts` and further options with which the part measures the loss without the sink
            (rows with `lost`); empty if it does not measure it.
        in_quick: whether the part runs by default with --quick.
        setting: what the answers are settings of, such as "KV cache"; they are compared with the tolerance. Empty if
            the answers are not settings with which a model could be served.
        numbers: scalar results of the part.
        sequences, length: number of sequences N and tokens per sequence T.
        unchanged: loss of the unchanged model on the same text, in windows of its context.
    """

    name: ClassVar[str]
    question: ClassVar[str]
    layout: ClassVar[PartFigure]
    long_text: ClassVar[bool] = False
    on_request: ClassVar[bool] = False
    loss_without_sink: ClassVar[str] = ""
    in_quick: ClassVar[bool] = False
    setting: ClassVar[str] = ""
    numbers: ClassVar[tuple[PartNumber, ...]] = ()

    sequences: int
    length: int
    unchanged: Effect

    @classmethod
    def refusal(cls, adapter: Adapter, settings: AssessSettings) -> str | None:
        """Return the reason why the part cannot be run on the model with these settings; None if it can."""
        return None

    @classmethod
    def text_size(cls, settings: AssessSettings) -> TextSize:
        """Return the amount of text that the part reads."""
        return TextSize(settings.sequences, settings.length)

    @classmethod
    @abstractmethod
    def run(cls, given: PartInput) -> "AssessPart":
        """Run the forward passes of the part.

        Raises:
            InputError: if the part turns out to be impossible on the model.
            SinklabError: if a loss or KL divergence is not finite.
        """

    @abstractmethod
    def rows(self) -> Iterator[PartRow]:
        """Iterate over the rows of the result table and the answers to the part's question."""

    def remark(self) -> str | None:
        """Return the remark below the result table; None for no remark."""
        return None

    def values(self) -> Iterator[tuple[str, float]]:
        """Iterate over the scalar results declared in `numbers`, as pairs of name (an integer for N) and value."""
        return ((name, row.added) for row in self.rows() if row.added is not None for name in row.numbers)

    def figure(self) -> PartFigure:
        """Return the part's figure in the report: `layout` with the points of the rows."""
        found = [(row.effect, *at) for row in self.rows() if row.effect is not None for at in row.points]
        return self.drawn([self.point(*one) for one in found])

    def drawn(self, points: Sequence[Mapping[str, Any]], **changes: Any) -> PartFigure:
        """Return `layout` with these points and changes, and with its caption formatted."""
        layout = replace(self.layout, rows=points, caption=self.layout.caption.format(self), **changes)
        if layout.x.order is not None and not layout.x.order:
            layout = replace(layout, x=replace(layout.x, order=sorted({one[layout.x.field] for one in points})))
        return layout

    def row(self, what: str, effect: Effect, more: str = "", **fields: Any) -> PartRow:
        """Return the row of an intervention; `fields` are further fields of `PartRow`."""
        return PartRow(what, effect, self.added(effect), more, effect.error, **fields)

    def cost_row(self, cost: SinkCost, answer: str, number: str, gained: str = "") -> PartRow:
        """Return the row of the loss that is due to the sink; the other arguments are fields of `PartRow`."""
        return PartRow("", None, cost.due_to_sink, "", cost.due_error, answer, gained=gained, numbers=[number])

    def added(self, effect: Effect) -> float:
        """Return the loss under an intervention minus the loss of the unchanged model, in nats per token."""
        return effect.loss - self.unchanged.loss

    def unchanged_row(self) -> PartRow:
        """Return the row of the unchanged model."""
        return self.row("unchanged", self.unchanged, f"{self.sequences} x {self.length:,} tokens")

    def point(self, effect: Effect, series: str, x: object, y: object = None) -> dict[str, object]:
        """Return a figure's data point, with loss and KL divergence for the tooltip; `y` defaults to the added loss."""
        y = self.added(effect) if y is None else y
        return {"series": series, "x": x, "loss": effect.loss, "kl": effect.kl, "y": y}


SAFE, UNDECIDED, NOT_SAFE = "safe", "undecided", "not safe"


def judged(added: float, error: float | None, tolerance: float) -> str:
    """Return "undecided" if an added loss is within two standard errors of the tolerance, else "safe" or "not safe".

    An added loss without a standard error, such as that of a single block of targets, is undecided.
    """
    if error is None or abs(added - tolerance) < 2 * error:
        return UNDECIDED
    return SAFE if added <= tolerance else NOT_SAFE


def several(count: int, noun: str) -> str:
    """Return the noun for a count of 1, otherwise the count and the plural: `key`, `3 keys`."""
    return noun if count == 1 else f"{count} {noun}s"
