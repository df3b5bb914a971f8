"""How a conversation becomes tokens, and which of them are the assistant's: what is trained on.

A chat template may mark what it generates, `{% generation %}..{% endgeneration %}`. Of a template without marks the
assistant's part of message i is what is written more when it is added:

    render(m_1 .. m_i-1, with the generation prompt)  is the beginning of  render(m_1 .. m_i),

which is the beginning of the whole conversation. A template for which that is not so is refused.

The text is tokenized up to each place where the assistant begins or ends: the tokens that are added are those of what
stands between. Where a token reaches over such a place, what follows it is tokenized apart, as when the model answers.
Character offsets are not used: those of a tokenizer that drops what it has no token for drift away from the text.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Any

from sinklab.data.sources.textfiles import Message
from sinklab.errors import InputError
from sinklab.measuring.inputs import default_prefix
from sinklab.models.huggingface.rendering import MARK, Rendered, render_chat

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

ASSISTANT = "assistant"
REMEDY = "take it out, or give another template as --chat-template FILE"
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
        is_exact: whether these tokens write what the assistant says to the letter.
    """

    ids: list[int]
    is_trained: list[bool]
    is_exact: bool = True


class ChatTemplate:
    """The template of a tokenizer, or one that it is given, which it then keeps.

    Args:
        tokenizer: whose template it is.
        given: Jinja in place of its own; None for its own, or DEFAULT where it has none.

    Attributes:
        notes: what was given to the tokenizer.

    Raises:
        InputError: a tokenizer without a template and without EOS, or with several templates.
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
        if isinstance(tokenizer.chat_template, dict):
            raise InputError(
                "the tokenizer has several chat templates: give the one to be used as --chat-template FILE"
            )
        self._is_marked = MARK.search(str(tokenizer.chat_template)) is not None

    def speak(self, messages: list[Message], where: str) -> Spoken:
        """A conversation as tokens, uncut.

        Raises:
            InputError: the template refuses it or does not tell what the assistant says, or the tokenizer has no token
                for any of that; `where` names the row.
        """
        whole = self._rendered(messages, where)
        spans = whole.marked if self._is_marked else list(self._spans(messages, whole.text, where))
        if not any(whole.text[start:end].strip() for start, end in spans):
            raise InputError(
                f"{where}: the chat template writes nothing of what the assistant says within its "
                "{% generation %} marks: give another as --chat-template FILE"
            )
        spoken = self._tokens(whole.text, spans, where)
        if not any(spoken.is_trained):
            raise InputError(
                f"{where}: the model's tokenizer has no token for anything that the assistant says: take it out"
            )
        return spoken

    def _tokens(self, text: str, spans: list[tuple[int, int]], where: str) -> Spoken:
        """The tokens of a text; none reaches over the beginning or the end of a span."""
        ids: list[int] = []
        is_trained: list[bool] = []
        start, before, is_exact = 0, list[int](), True
        for end, trained in [*((cut, i % 2 == 1) for i, cut in enumerate(chain(*spans))), (len(text), False)]:
            until = self._encode(text[:end])
            added = self._added(before, until, text[start:end], where)
            if trained:
                is_exact &= self._decode(added).strip() == text[start:end].strip()
            ids += added
            is_trained += [trained] * len(added)
            start, before = end, until
        return Spoken(ids, is_trained, is_exact)

    def _added(self, before: list[int], until: list[int], piece: str, where: str) -> list[int]:
        """The tokens that a piece adds to a text with the tokens `before`; those of both together are `until`."""
        if until[: len(before)] == before:
            return until[len(before) :]
        end = str(self._tokenizer.eos_token or "")  # behind which no space is put in front of a word
        for found in (self._encode(piece), self._encode(end + piece)[len(self._encode(end)) :]):
            if self._decode(before + found) == self._decode(until):
                return found
        raise InputError(
            f"{where}: the model's tokenizer joins what the assistant says with what stands beside it, here "
            f"{piece[:20]!r}, and writes something else where they are kept apart: give a template that puts a special "
            "token there as --chat-template FILE, or take it out"
        )

    def _encode(self, text: str) -> list[int]:
        read: Any = self._tokenizer(text, add_special_tokens=False, verbose=False)
        return list(read["input_ids"])

    def _decode(self, ids: list[int]) -> str:
        return str(self._tokenizer.decode(ids, clean_up_tokenization_spaces=False))

    def _spans(self, messages: list[Message], text: str, where: str) -> Iterator[tuple[int, int]]:
        """Characters of `text` that each message of the assistant begins and ends with."""
        for i, message in enumerate(messages):
            if message["role"] != ASSISTANT:
                continue
            before = self._rendered(messages[:i], where, generation_prompt=True).text
            after = self._rendered(messages[: i + 1], where).text
            if not (after.startswith(before) and text.startswith(after)):
                raise InputError(
                    f"{where}: the model's chat template does not mark what the assistant says, and writes the "
                    f"beginning of a conversation otherwise once message {i + 1} follows, so it cannot be told: give a "
                    "template with {% generation %}..{% endgeneration %} around it as --chat-template FILE"
                )
            yield len(before), len(after)

    def _rendered(self, messages: list[Message], where: str, generation_prompt: bool = False) -> Rendered:
        return render_chat(self._tokenizer, messages, where, generation_prompt=generation_prompt, remedy=REMEDY)
