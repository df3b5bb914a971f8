"""Conversations of a file as what is trained on, what is held out, and what the sink is measured on.

A conversation is cut at the length of a sequence; one in which the assistant says nothing before the cut teaches
nothing, and is left out. Which ones are held out is a matter of the seed and the file alone.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from sinklab.data.sources.textfiles import read_conversations
from sinklab.errors import InputError
from sinklab.tuning.template import ASSISTANT, ChatTemplate, Spoken


@dataclass(frozen=True)
class Chats:
    """The usable conversations of a file, shuffled, each cut to the length of a sequence.

    Attributes:
        usable: those in which the assistant says something before the cut.
        read: how many the file has.
        cut: how many of the usable ones were longer.
        inexact: in how many the tokenizer has no token for some of what the assistant says.
    """

    usable: list[Spoken]
    read: int
    cut: int
    inexact: int = 0

    def note(self, length: int) -> str:
        """What was done to them, in a sentence."""
        silent = self.read - len(self.usable)
        left_out = f", {silent:,} left out, as the assistant says nothing in them before that" if silent else ""
        otherwise = (
            f"; in {self.inexact:,} the tokenizer leaves out or changes characters of what the assistant says"
            if self.inexact
            else ""
        )
        return f"{self.read:,} conversations, {self.cut:,} of them cut after {length:,} tokens{left_out}{otherwise}"


def read_chats(path: Path, template: ChatTemplate, length: int, seed: int) -> Chats:
    """Read and tokenise all conversations.

    Args:
        length: tokens at which they are cut.
        seed: of the shuffling.

    Raises:
        InputError: a file that is none of conversations, or a conversation without a word of the assistant, or one that
            the template or the tokenizer cannot write; the message names the line.
    """
    spoken = list(_spoken(path, template))
    if not spoken:
        raise InputError(f"{path} holds no conversation")
    usable = [Spoken(one.ids[:length], one.is_trained[:length]) for one in spoken if any(one.is_trained[1:length])]
    cut = sum(len(one.ids) > length and any(one.is_trained[1:length]) for one in spoken)
    order = torch.randperm(len(usable), generator=torch.Generator().manual_seed(seed)).tolist()
    return Chats([usable[i] for i in order], len(spoken), cut, sum(not one.is_exact for one in spoken))


def _spoken(path: Path, template: ChatTemplate) -> Iterator[Spoken]:
    for messages, where in read_conversations(path):
        if not any(message["role"] == ASSISTANT and message["content"].strip() for message in messages):
            raise InputError(
                f'{where}: nothing is said by the role "{ASSISTANT}", so there is nothing to learn from it: take it out'
            )
        yield template.speak(messages, where)


def beginnings(chats: Sequence[Spoken], sequences: int, length: int) -> Tensor:
    """The first tokens of the conversations that have so many, `sequences` of them at most: (N, T).

    Raises:
        InputError: none is long enough.
    """
    long_enough = [chat.ids[:length] for chat in chats if len(chat.ids) >= length][:sequences]
    if not long_enough:
        raise InputError(
            f"none of the {len(chats)} conversations held out has {length} tokens, which the sink is measured on: give "
            "a smaller --sink-length, more --held-out, or another text as --text FILE"
        )
    return torch.tensor(long_enough)
