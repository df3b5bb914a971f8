"""Estimate of what a preparation would read and write, from file sizes and a sample of each file."""

from dataclasses import asdict, dataclass
from typing import Any

from sinklab.data.shards import DTYPES, Settings, dtype_for
from sinklab.data.texts import RequestedText, Voice
from sinklab.data.tokenizers import load_tokenizer, trained_size
from sinklab.errors import InputError


@dataclass(frozen=True)
class Amount:
    """One domain, or the whole text.

    Attributes:
        name: of the domain, file or source.
        bytes: on the disk, as rows and all; None where the files are not here.
        tokens: in all of it, estimated; high by what is not text in its files.
        taken: tokens that would be prepared; None where that is not known.
    """

    name: str
    bytes: int | None
    tokens: int | None
    taken: int | None


@dataclass(frozen=True)
class Estimate:
    """What there is and what would be prepared.

    Attributes:
        amounts: per domain.
        tokens: that would be prepared; None where the size of the text is not known and there is no limit.
        shard_bytes: of the two shards.
    """

    amounts: list[Amount]
    tokens: int | None
    shard_bytes: int | None

    def document(self) -> dict[str, Any]:
        """As JSON has it."""
        return asdict(self)


def estimate(settings: Settings) -> Estimate:
    """Sizes of files and a sample of each domain, scaled up.

    Raises:
        InputError: the text cannot be read, or the tokenizer is not there before the text is prepared.
    """
    if trained_size(settings.tokenizer) is not None:
        raise InputError(
            f"tokenizer {settings.tokenizer} is trained on the text, so its tokens cannot be estimated: "
            "give the tokenizer of a model, or a folder with tokenizer.json"
        )
    tokenizer = load_tokenizer(settings.tokenizer)
    text = RequestedText(settings)
    voices = text.voices(tokenizer)
    there = [None if voice.bytes is None else int(voice.bytes * voice.tokens_per_byte) for voice in voices]
    taken = _taken(voices, there, settings.token_limit)
    amounts = [
        Amount(voice.name, voice.bytes, tokens, part) for voice, tokens, part in zip(voices, there, taken, strict=True)
    ]
    tokens = total(taken)
    if settings.text_limit_bytes is not None and tokens is not None:
        rates = [voice.tokens_per_byte for voice in voices]
        tokens = min(tokens, int(settings.text_limit_bytes * sum(rates) / len(rates)))
    width = DTYPES[dtype_for(tokenizer.vocab_size)].itemsize
    return Estimate(amounts, tokens, None if tokens is None else tokens * width)


def _taken(voices: list[Voice], there: list[int | None], limit: int | None) -> list[int | None]:
    """Each by its weight, up to where the first one ends; without weights, all that there is."""
    weights = [voice.weight for voice in voices]
    given = [weight for weight in weights if weight is not None]
    known = [tokens for tokens in there if tokens is not None]
    if len(given) < len(weights):
        whole = total(there)
        if limit is None or (whole is not None and whole <= limit):
            return list(there)
        return [limit] if len(there) == 1 else [None if t is None or not whole else t * limit // whole for t in there]
    if len(known) == len(there):
        least = min(tokens * sum(given) / weight for tokens, weight in zip(known, given, strict=True))
        limit = int(least) if limit is None else min(limit, int(least))
    return [None if limit is None else int(limit * weight / sum(given)) for weight in given]


def total(values: list[int | None]) -> int | None:
    """The sum, None where a part is not known."""
    known = [value for value in values if value is not None]
    return sum(known) if len(known) == len(values) else None
