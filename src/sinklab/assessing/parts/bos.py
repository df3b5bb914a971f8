"""BOS: the loss of the same targets with and without BOS in front of the text.

    with BOS      BOS, x_1, x_2, .. x_T        loss of x_2 .. x_T
    without       x_1, x_2, .. x_T             loss of the same targets

The reference (`unchanged`) is the model without BOS, so that the added loss is negative if BOS helps.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from sinklab.assessing.part import AssessPart, AssessText, PartFigure, PartNumber, PartRow, TextSize
from sinklab.assessing.reading import TOKENS_AT_ONCE, Effect, PartInput, changed_attention
from sinklab.assessing.settings import AssessSettings
from sinklab.errors import InputError
from sinklab.models.hooks import evaluating
from sinklab.tables import PlotAxis


class BosSize(TextSize):
    """The sequences without BOS, and as the other sequences those with BOS, one token longer."""

    def read(self, text: AssessText) -> tuple[Tensor, Tensor | None]:
        """Return token ids without BOS (N, T - 1) and with BOS (N, T); None for these if the model has no BOS.

        Raises:
            InputError: as for `AssessText.sequences`.
        """
        tokens_NT, ids = text.sequences(self.sequences, self.length), text.model.bos_ids
        if not ids:
            return tokens_NT, None
        if int(tokens_NT[0, 0]) not in ids:
            bos_N1 = tokens_NT.new_full((len(tokens_NT), 1), text.model.encoder().forced_prefix[0])
            tokens_NT = torch.cat((bos_N1, tokens_NT[:, :-1]), 1)
        return tokens_NT[:, 1:], tokens_NT


class Bos(AssessPart):
    """Loss with BOS in front of the text; `unchanged` is the loss of the same targets without it."""

    name = "bos"
    question = "Must a text begin with BOS?"
    on_request = True
    numbers = (PartNumber("bos_added", "BOS in front, added loss"),)
    layout = PartFigure(
        "BOS in front of the text",
        "Loss of the same targets with and without BOS.",
        PlotAxis("", "x", "text", order=()),
    )

    with_bos: Effect

    @classmethod
    def text_size(cls, settings: AssessSettings) -> TextSize:
        return BosSize(settings.sequences, settings.length)

    @classmethod
    def run(cls, given: PartInput) -> "Bos":
        """Measure the loss with and without BOS."""
        if given.others_MT is None:
            raise InputError("the model has no BOS, neither in its tokenizer nor in its config")
        reader, adapter = given.reader(), given.adapter
        batches = given.others_MT.split(max(1, TOKENS_AT_ONCE // given.others_MT.shape[1]))
        with changed_attention(adapter), evaluating(adapter.module):
            hidden_NTE = torch.cat([adapter.hidden(tokens_BT.to(adapter.device)) for tokens_BT in batches])
            given.passes.read(len(hidden_NTE))
            with_bos = reader.against(hidden_NTE[:, 1:]).effect()
        return cls(**reader.result_fields(), with_bos=with_bos)

    def rows(self) -> Iterator[PartRow]:
        yield self.unchanged_row()
        points = [("with BOS", "with BOS")]
        yield self.row("with BOS", self.with_bos, answer="BOS in front", numbers=["bos_added"], points=points)
