"""Conversations (`messages` of a .jsonl file) as a model reads them: through its own chat template, if it has one."""

from typing import TYPE_CHECKING

from sinklab.data.sources.textfiles import Message, plain_conversation
from sinklab.models.huggingface.rendering import render_chat

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class Conversations:
    """Renders conversations and remembers how, for the notes of a measurement.

    Args:
        tokenizer: whose chat template is applied; None, or one without a template, gives lines `role: content`.
        keep_bos: leave the BOS that a template writes first; otherwise it goes, so that it is not there twice.
    """

    def __init__(self, tokenizer: "PreTrainedTokenizerBase | None" = None, keep_bos: bool = False) -> None:
        self._tokenizer, self._keep_bos = tokenizer, keep_bos
        self._seen = False
        self.bos = False
        """Whether a template's own BOS was left in place."""

    def render(self, messages: list[Message], where: str) -> str:
        """One conversation as text.

        Raises:
            InputError: the chat template refuses it, or does not end; `where` names the row.
        """
        self._seen = True
        if not self._templated:
            return plain_conversation(messages, where)
        assert self._tokenizer is not None
        rendered = render_chat(self._tokenizer, messages, where).text
        first = self._tokenizer.bos_token
        if isinstance(first, str) and rendered.startswith(first):
            if not self._keep_bos:
                return rendered.removeprefix(first)
            self.bos = True
        return rendered

    def notes(self) -> list[str]:
        """What was done to conversations; empty where there were none."""
        if not self._seen:
            return []
        if self._templated:
            return ["conversations were written with the model's chat template"]
        return ["conversations were written as plain lines `role: content`: the model has no chat template"]

    @property
    def _templated(self) -> bool:
        return bool(getattr(self._tokenizer, "chat_template", None))
