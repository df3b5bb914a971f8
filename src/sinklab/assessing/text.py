"""The text that an assessment reads: one stream, cut into sequences as the model reads them."""

from pathlib import Path

import torch
from torch import Tensor

from sinklab.data.sources.corpora import documents
from sinklab.errors import InputError
from sinklab.models.huggingface.loading import Loading
from sinklab.opening import Model, open_model


class AssessText:
    """A model and its text.

    Args:
        text: a .txt or .jsonl file or a folder of them; None for what a run was validated on.
    """

    def __init__(self, model: Model, text: Path | None) -> None:
        self.model, self._text = model, text
        self.conversations = model.conversations(keep_bos=not model.special)

    def sequences(self, most: int, length: int, fewest: int = 1) -> Tensor:
        """The stream cut into `fewest` to `most` sequences of `length` tokens: (N, T).

        Raises:
            InputError: too little text, one that cannot be read, or none of a model that has none of its own.
        """
        special = len(self.model.special)
        body = length - special
        if body < 2:
            raise InputError(f"sequences of {length} tokens, {special} of them special: give longer ones")
        stream = self._stream(most * body)
        count = min(most, len(stream) // body)
        if count < fewest:
            raise InputError(
                f"{self._text or 'what the run was validated on'} has {len(stream):,} tokens and {fewest * body:,} are "
                f"needed ({fewest} of {body:,} tokens): give more text, or shorter sequences and caches (--length, "
                "--stream-length, --cache)"
            )
        return self.model.arrange(torch.tensor(stream[: count * body]).view(count, body), special > 0, None)

    def _stream(self, tokens: int) -> list[int]:
        """At least so many tokens, or all that there are."""
        if self._text is None:
            if self.model.held_out is None:
                raise InputError(f"--text is needed: {self.model.name} is no run, whose validation text could be read")
            return self.model.held_out(tokens)
        stream: list[int] = []
        for document in documents(str(self._text), render=self.conversations.render):
            stream += self.model.encode(f"{document}\n\n")
            if len(stream) >= tokens:
                break
        return stream


def open_separable(name: str, loading: Loading) -> Model:
    """A model whose attention can be edited.

    Raises:
        InputError: it cannot be loaded, or not be edited.
    """
    model = open_model(name, loading)
    if why := model.adapter.inseparable():
        raise InputError(f"{name} cannot be assessed: {why}")
    return model
