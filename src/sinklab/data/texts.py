"""The text that settings select (one source after the other, or a mix, up to a limit), and its tokenizer.

A mix takes the domains by their weights, or all files at the same pace. The domain that has received least of its
share is next, so that at any time each has its share of the tokens, but for about one document and a head start of up
to a thousand tokens, which the seed draws so that not all begin at once. Tokens are estimated from a sample of each
domain (tokens per byte), because the text is mixed before it is encoded; data.json has the resulting shares.
"""

import heapq
import math
import random
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from sinklab.data.config import Mix, WeightedMix
from sinklab.data.shards import Settings
from sinklab.data.sources.corpora import cut, documents, total_bytes
from sinklab.data.sources.hub import PREFIX, hub_documents, hub_files
from sinklab.data.sources.synthetic import WORDS, parse, word_tokenizer
from sinklab.data.sources.textfiles import read_documents, text_files
from sinklab.data.tokenizers import Tokenizer, load_tokenizer, train_bpe, trained_size
from sinklab.errors import InputError

_HEAD_START = 1024  # tokens


@dataclass(frozen=True)
class Stream:
    """One voice of a mix.

    Attributes:
        name: of the domain, or of the file where each file is a voice.
        weight: its share; only the relation to the others counts.
        source: as `DataConfig.source`.
        files: in it, read one after the other.
        size: bytes of these files; None where they are not here.
    """

    name: str
    weight: float
    source: str
    files: tuple[str, ...]
    size: int | None

    def documents(self) -> Iterator[str]:
        """The documents in their fixed order.

        Raises:
            InputError: a file cannot be read; the message names it.
        """
        if self.source.startswith(PREFIX):
            yield from hub_documents(self.source, files=list(self.files))
        else:
            for file in self.files:
                yield from read_documents(Path(self.source).expanduser() / file)


def streams(source: str, mix: Mix) -> list[Stream]:
    """The voices of a mix.

    A file belongs to the domain that it, or a folder above it, is named after: `arxiv.jsonl`, `arxiv-00.jsonl`,
    `arxiv/00.jsonl`.

    Raises:
        InputError: domains with a weight have no file, and the mix does not say to leave them out.
    """
    sizes = _sizes(source)
    if not isinstance(mix, WeightedMix):
        return [Stream(name, 1.0, source, (name,), size) for name, size in sizes.items()]
    found = {domain: [name for name in sizes if _belongs(name, domain)] for domain in mix.weights}
    absent = sorted(domain for domain, files in found.items() if not files)
    if absent and (mix.absent == "refuse" or len(absent) == len(found)):
        raise InputError(
            f"source {source} has no file for {len(absent)} of {len(found)} domains: {', '.join(absent)}. Add files or "
            "folders of these names, give other mix.weights, or set mix.absent: renormalise (--absent renormalise) "
            "to leave them out"
        )
    return [
        Stream(domain, mix.weights[domain], source, tuple(files), _total([sizes[name] for name in files]))
        for domain, files in found.items()
        if files
    ]


def mixed(voices: list[Stream], mix: Mix, tokens_per_byte: Mapping[str, float]) -> Iterator[tuple[str, str]]:
    """The documents of all voices taking turns, each with the name of its voice.

    Ends where the first voice with a weight has no more; of files, where all have ended.

    Args:
        tokens_per_byte: of each voice, by name.
    """
    draw = random.Random(mix.seed)
    taken = [(draw.random() * _HEAD_START / voice.weight, i, voice) for i, voice in enumerate(voices)]
    reading = [voice.documents() for voice in voices]
    heapq.heapify(taken)
    while taken:
        owed, index, voice = taken[0]
        text = next(reading[index], None)
        if text is not None:
            tokens = len(text.encode()) * tokens_per_byte[voice.name] + 1
            heapq.heapreplace(taken, (owed + tokens / voice.weight, index, voice))
            yield voice.name, text
        elif isinstance(mix, WeightedMix):
            return
        else:
            heapq.heappop(taken)


def _belongs(file: str, domain: str) -> bool:
    path = PurePosixPath(file)
    stem = path.name.split(".")[0]
    return domain in path.parts[:-1] or re.fullmatch(rf"{re.escape(domain)}([-_]?\d.*)?", stem) is not None


def _sizes(source: str) -> dict[str, int | None]:
    """The files of a source, in sorted order, and their bytes."""
    if source.startswith(PREFIX):
        return dict.fromkeys(hub_files(source))
    folder = Path(source).expanduser()
    if not folder.is_dir():
        raise InputError(f"source {source} cannot be mixed: give a folder with a file or folder per domain, or hf:NAME")
    return {path.relative_to(folder).as_posix(): path.stat().st_size for path in text_files(folder)}


def _total(sizes: list[int | None]) -> int | None:
    known = [size for size in sizes if size is not None]
    return sum(known) if len(known) == len(sizes) else None


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


StageProgress = Callable[[str, int, int | None], None]
"""Called with the stage ("tokenizer", "tokens"), the bytes of text done and the bytes in all, where known."""

BPE_SAMPLE_BYTES = 8 * 2**20
"""A tokenizer is trained on every n-th document, n such that the sample is about this large at most."""


def tokenizer_of(settings: Settings, text: RequestedText, folder: Path, progress: StageProgress) -> Tokenizer:
    """The tokenizer that the text is read with, whose files stand in `folder` afterwards.

    Raises:
        InputError: it cannot be loaded or trained, or the source comes with another.
    """
    if (folder / "tokenizer_config.json").is_file():  # written last, by whoever was interrupted
        return load_tokenizer(str(folder))
    if request := parse(settings.source):
        if settings.tokenizer != WORDS:
            raise InputError(f"source {settings.source} comes with its own tokenizer: use tokenizer {WORDS}")
        return word_tokenizer(request, folder)
    size = trained_size(settings.tokenizer)
    if size is not None:
        return train_bpe(_sample(text, progress), size, folder)
    tokenizer = load_tokenizer(settings.tokenizer)
    tokenizer.save(folder)
    return tokenizer


def _sample(text: RequestedText, progress: StageProgress) -> Iterator[str]:
    """Every n-th document; of a stream of unknown length the first ones."""
    total = text.total_bytes
    every = 1 if total is None else max(1, math.ceil(total / BPE_SAMPLE_BYTES))
    done = taken = 0
    for index, (_, document) in enumerate(text.named_documents()):
        done += len(document)
        if index % every:
            continue
        taken += len(document)
        progress("tokenizer", done, total)
        yield document
        if total is None and taken >= BPE_SAMPLE_BYTES:
            return
