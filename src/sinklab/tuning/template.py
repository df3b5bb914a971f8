"""How a conversation becomes tokens, and which of them are the assistant's: what is trained on.

A chat template may mark what it generates, `{% generation %}..{% endgeneration %}`; transformers then says which tokens
that is. Of a template without marks the assistant's part of message i is what is written more when it is added:

    render(m_1 .. m_i-1, with the generation prompt)  is the beginning of  render(m_1 .. m_i),

which is the beginning of the whole conversation. A template for which that is not so is refused.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from jinja2 import TemplateError

from sinklab.data.sources.textfiles import Message
from sinklab.errors import InputError
from sinklab.measuring.inputs import default_prefix

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

ASSISTANT = "assistant"
MARK = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")
DEFAULT = (
    "{% for message in messages %}{{ message['role'] + ':\\n' }}{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] | trim + eos_token }}{% endgeneration %}"
    "{% else %}{{ message['content'] | trim }}{% endif %}{{ '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant:\\n' }}{% endif %}"
)
"""For a tokenizer without a template. It needs no tokens of its own: roles are words, and EOS ends what is said."""


@dataclass(frozen=True)
class Spoken:
    """A conversation as the model reads it.

    Attributes:
        ids: its tokens.
        is_trained: of each, whether the assistant says it.
    """

    ids: list[int]
    is_trained: list[bool]


class ChatTemplate:
    """The template of a tokenizer, or one that it is given, which it then keeps.

    Args:
        tokenizer: whose template it is.
        given: Jinja in place of its own; None for its own, or DEFAULT where it has none.

    Attributes:
        notes: what was given to the tokenizer.

    Raises:
        InputError: a tokenizer without EOS or without character offsets that would be needed.
    """

    def __init__(self, tokenizer: "PreTrainedTokenizerBase", given: str | None = None) -> None:
        self._tokenizer = tokenizer
        self.notes: list[str] = []
        if given is not None:
            tokenizer.chat_template = given
            self.notes.append("the chat template is the one that was given")
        elif not tokenizer.chat_template:
            if tokenizer.eos_token is None:
                raise InputError(
                    "the tokenizer has neither a chat template nor an EOS token: give --chat-template FILE"
                )
            tokenizer.chat_template = ("{{ bos_token }}" if default_prefix(tokenizer) else "") + DEFAULT
            self.notes.append(
                "the model has no chat template and was given sinklab's: a line `role:`, what is said, and EOS after "
                "what the assistant says"
            )
        if not tokenizer.is_fast:
            raise InputError("the tokenizer does not tell where its tokens stand in a text: convert it to a fast one")
        if isinstance(tokenizer.chat_template, dict):
            raise InputError(
                "the tokenizer has several chat templates: give the one to be used as --chat-template FILE"
            )
        self._is_marked = MARK.search(str(tokenizer.chat_template)) is not None

    def speak(self, messages: list[Message], where: str) -> Spoken:
        """A conversation as tokens, uncut.

        Raises:
            InputError: the template refuses it, or does not tell what the assistant says; `where` names the row.
        """
        return self._by_marks(messages, where) if self._is_marked else self._by_beginnings(messages, where)

    def _by_marks(self, messages: list[Message], where: str) -> Spoken:
        quietly = {"verbose": False}  # that a conversation is longer than the context is no news: it is cut later
        read = self._applied(
            messages, where, return_dict=True, return_assistant_tokens_mask=True, tokenizer_kwargs=quietly
        )
        return Spoken(list(read["input_ids"]), [bool(one) for one in read["assistant_masks"]])

    def _by_beginnings(self, messages: list[Message], where: str) -> Spoken:
        text = self._applied(messages, where, tokenize=False)
        spans = list(self._spans(messages, text, where))
        read: Any = self._tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
        inside = [any(start <= first < end for start, end in spans) for first, _ in read["offset_mapping"]]
        return Spoken(list(read["input_ids"]), inside)

    def _spans(self, messages: list[Message], text: str, where: str) -> Iterator[tuple[int, int]]:
        """Characters of `text` that each message of the assistant begins and ends with."""
        for i, message in enumerate(messages):
            if message["role"] != ASSISTANT:
                continue
            before = self._applied(messages[:i], where, tokenize=False, add_generation_prompt=True)
            after = self._applied(messages[: i + 1], where, tokenize=False)
            if not (after.startswith(before) and text.startswith(after)):
                raise InputError(
                    f"{where}: the model's chat template does not mark what the assistant says, and writes the "
                    f"beginning of a conversation otherwise once message {i + 1} follows, so it cannot be told: give a "
                    "template with {% generation %}..{% endgeneration %} around it as --chat-template FILE"
                )
            yield len(before), len(after)

    def _applied(self, messages: list[Message], where: str, **how: Any) -> Any:
        try:
            return self._tokenizer.apply_chat_template(messages, **how)  # type: ignore[arg-type]
        except (TemplateError, TypeError, ValueError, IndexError, KeyError) as error:
            raise InputError(
                f"{where}: the model's chat template refuses this conversation ({error}): take it out, or give another "
                "template as --chat-template FILE"
            ) from error
