"""The text that settings ask for: one source after the other, or a mix; cut where it is limited."""

from collections.abc import Iterator
from dataclasses import dataclass

from sinklab.data.mixing import Stream, mixed, streams
from sinklab.data.shards import Settings
from sinklab.data.sources.corpora import cut, documents, total_bytes
from sinklab.data.tokenizers import Tokenizer
from sinklab.errors import InputError

SAMPLE_CHARACTERS = 2**19
"""This much of each voice of a mix, from its start, tells how many tokens there are to a byte."""


@dataclass(frozen=True)
class Voice:
    """What is known of a part of the text before it is prepared.

    Attributes:
        name: of the domain or file; of the source where it is not a mix.
        weight: its share in the mix; None where it is not one.
        bytes: its size, from the sizes of files; None where they are not here.
        tokens_per_byte: of a sample.
    """

    name: str
    weight: float | None
    bytes: int | None
    tokens_per_byte: float


class RequestedText:
    """The documents of a source as settings select them.

    Attributes:
        total_bytes: about how much there is to read; None where only reading would tell.
    """

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self._streams = streams(settings.source, settings.mix) if settings.mix else []
        sizes = [stream.size for stream in self._streams] if settings.mix else [total_bytes(settings.source)]
        known = [size for size in sizes if size is not None]
        total = sum(known) if len(known) == len(sizes) else None
        limit = settings.text_limit_bytes
        self.total_bytes = total if total is None or limit is None else min(total, limit)

    def named_documents(self, tokenizer: Tokenizer | None = None) -> Iterator[tuple[str, str]]:
        """All documents with the name of their voice, which is empty where there is only one.

        Args:
            tokenizer: a mix is by its tokens; by bytes where there is no tokenizer yet.

        Raises:
            InputError: the source is missing, empty or malformed.
        """
        settings = self.settings
        if settings.mix is None:
            for text in documents(settings.source, limit_bytes=settings.text_limit_bytes):
                yield "", text
            return
        rates = {
            stream.name: _tokens_per_byte(stream.name, stream.documents(), tokenizer) if tokenizer else 1.0
            for stream in self._streams
        }
        taking_turns = mixed(self._streams, settings.mix, rates)
        yield from taking_turns if settings.text_limit_bytes is None else cut(taking_turns, settings.text_limit_bytes)

    def voices(self, tokenizer: Tokenizer) -> list[Voice]:
        """What there is, estimated from sizes and samples; nothing else is read."""
        if self.settings.mix is None:
            rate = _tokens_per_byte(self.settings.source, documents(self.settings.source), tokenizer)
            return [Voice(self.settings.source, None, self.total_bytes, rate)]
        return [self._voice(stream, tokenizer) for stream in self._streams]

    def _voice(self, stream: Stream, tokenizer: Tokenizer) -> Voice:
        weight = stream.weight if self.settings.mix and self.settings.mix.kind == "weights" else None
        rate = _tokens_per_byte(stream.name, stream.documents(), tokenizer)
        return Voice(stream.name, weight, stream.size, rate)


def _tokens_per_byte(name: str, texts: Iterator[str], tokenizer: Tokenizer) -> float:
    sample = []
    size = 0
    for text in texts:
        sample.append(text[:SAMPLE_CHARACTERS])
        size += len(sample[-1])
        if size >= SAMPLE_CHARACTERS:
            break
    if not sample:
        raise InputError(f"{name} holds no text: every document in it is empty")
    _, lengths = tokenizer.encode_flat(sample)
    return int(lengths.sum()) / sum(len(text.encode()) for text in sample)
