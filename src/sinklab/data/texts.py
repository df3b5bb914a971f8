"""Text selection for data preparation (source, mix, limits), size estimates and the tokenizer of the text.

A mix interleaves domains by weight, or all files at equal rates. The next document is read from the domain with the
fewest tokens relative to its weight. The token count of each domain deviates from its share by at most about one
document plus a random offset of up to 1024 tokens. For the mix, token counts are estimated from the tokens per byte of
a sample of each domain, because the text is mixed before it is encoded; data.json contains the exact counts.
"""

import heapq
import math
import random
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import product
from pathlib import Path, PurePosixPath

from sinklab.data.corpora import (
    HUB,
    cut,
    documents,
    hub_documents,
    hub_files,
    known_sum,
    parse,
    size_of,
    total_bytes,
    word_tokenizer,
)
from sinklab.data.loader import DTYPES, Mix, Settings, WeightedMix, dtype_for
from sinklab.data.textfiles import ReadCounts, expanded, plain_conversation, read_documents, text_files
from sinklab.data.tokenizers import Tokenizer, load_tokenizer, train_bpe, trained_size
from sinklab.errors import InputError

HEAD_START = 1024  # maximum random offset with which a domain starts, in tokens

SAMPLE_CHARACTERS = 2**19
"""Approximate number of characters sampled from the start of each domain to estimate its tokens per byte."""

BPE_SAMPLE_BYTES = 8 * 2**20
"""Approximate size in bytes of the sample for tokenizer training; smaller texts are used in full."""

StageProgress = Callable[[str, int, int | None], None]
"""Callback (stage, bytes of text processed, total bytes); the total is None if unknown.

The stages are "tokenizer" (training) and "tokens" (encoding).
"""


@dataclass(frozen=True)
class Stream:
    """Text that is read sequentially: a domain or file of a mix, or a whole source.

    Attributes:
        name: name of the domain or file; empty for a whole source.
        weight: weight relative to the other domains; None in a uniform mix and for a whole source.
        source: source of the text, as in `DataConfig.source`.
        files: files to read sequentially, relative to the source; None for the whole source.
        size: size of the files in bytes; None if unknown.
        column: column of the text in rows, as in `DataConfig.column`.
    """

    name: str
    weight: float | None
    source: str
    files: tuple[str, ...] | None
    size: int | None
    column: str | None = None

    def documents(self, counts: ReadCounts | None = None) -> Iterator[str]:
        """Yield the documents of this stream in a fixed order.

        Args:
            counts: counts to which the rows are added.

        Raises:
            InputError: if the source is missing, a whole source is empty, or a file cannot be read or is malformed.
        """
        if self.files is None:
            yield from documents(self.source, counts=counts, column=self.column)
        elif self.source.startswith(HUB):
            yield from hub_documents(self.source, files=list(self.files), counts=counts, column=self.column)
        else:
            for file in self.files:
                yield from read_documents(expanded(self.source) / file, plain_conversation, counts, self.column)

    def tokens_per_byte(self, tokenizer: Tokenizer, eos: bool = False) -> float:
        """Estimate the tokens per byte of this stream from a sample at its start.

        Args:
            eos: also count the EOS of every document.

        Raises:
            InputError: if the stream contains no text or cannot be read.
        """
        sample: list[str] = []
        size = 0
        for text in self.documents():
            sample.append(text[:SAMPLE_CHARACTERS])
            size += len(sample[-1])
            if size >= SAMPLE_CHARACTERS:
                break
        if not sample:
            raise InputError(f"{self.name or self.source} contains no text: all its documents are empty")
        _, lengths = tokenizer.encode_flat(sample)
        return (int(lengths.sum()) + len(sample) * eos) / sum(len(text.encode()) for text in sample)


def streams(source: str, mix: Mix, column: str | None = None) -> list[Stream]:
    """List the streams of a mix: the domains that have files, or for a `UniformMix` all files.

    A file belongs to a domain if the file (without a trailing number) or a parent folder has the domain's name:
    `arxiv.jsonl`, `arxiv-00.jsonl`, `arxiv/00.jsonl`.

    Raises:
        InputError: if the source is not a folder or hub dataset with text files, or a domain has no file (with
            `absent: renormalise`, only if no domain has one).
    """
    folder = expanded(source)
    sizes: dict[str, int | None]
    if source.startswith(HUB):
        sizes = dict.fromkeys(hub_files(source))
    elif folder.is_dir():
        sizes = {path.relative_to(folder).as_posix(): size_of(path) for path in text_files(folder)}
    else:
        raise InputError(f"source {source} cannot be mixed: use a folder or hf:NAME with a file or folder per domain")
    if not isinstance(mix, WeightedMix):
        return [Stream(name, None, source, (name,), size, column) for name, size in sizes.items()]
    found: dict[str, list[str]] = {domain: [] for domain in mix.weights}
    for domain, name in product(mix.weights, sizes):
        path = PurePosixPath(name)
        numbered = re.fullmatch(rf"{re.escape(domain)}([-_]?\d.*)?", path.name.split(".")[0])
        if domain in path.parts[:-1] or numbered:
            found[domain].append(name)
    absent = sorted(domain for domain, files in found.items() if not files)
    if absent and (mix.absent == "refuse" or len(absent) == len(found)):
        raise InputError(
            f"source {source} has no file for {len(absent)} of {len(found)} domains: {', '.join(absent)}. Add files or "
            "folders with these names, change mix.weights or, if any domain has a file, set mix.absent: renormalise "
            "(--absent renormalise)"
        )
    return [
        Stream(domain, mix.weights[domain], source, tuple(files), known_sum([sizes[name] for name in files]), column)
        for domain, files in found.items()
        if files
    ]


def mixed(
    domains: list[Stream], mix: Mix, tokens_per_byte: Mapping[str, float], counts: ReadCounts | None = None
) -> Iterator[tuple[str, str]]:
    """Yield the interleaved documents of all domains as (domain, text).

    A weighted mix ends when the first domain is exhausted, a uniform mix when all files are.

    Args:
        domains: streams of the mix (`streams`).
        tokens_per_byte: tokens per byte by domain name.
        counts: counts to which the rows are added.
    """
    draw = random.Random(mix.seed)
    weights = [domain.weight or 1.0 for domain in domains]
    waiting = [(draw.random() * HEAD_START / weight, i) for i, weight in enumerate(weights)]
    reading = [domain.documents(counts) for domain in domains]
    heapq.heapify(waiting)
    while waiting:
        received, index = waiting[0]
        text = next(reading[index], None)
        if text is not None:
            tokens = len(text.encode()) * tokens_per_byte[domains[index].name] + 1
            heapq.heapreplace(waiting, (received + tokens / weights[index], index))
            yield domains[index].name, text
        elif isinstance(mix, WeightedMix):
            return
        else:
            heapq.heappop(waiting)


class RequestedText:
    """Documents of a source selected by the settings of data preparation.

    Attributes:
        streams: domains or files of a mix; without a mix, the source.
        total_bytes: approximate size of the documents in bytes, at most `text_limit_bytes`; None if unknown.
        counts: rows that the last call of `named_documents` has read.

    Raises:
        InputError: if the source is missing; for a mix, see `streams`.
    """

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.counts = ReadCounts()
        if settings.mix:
            self.streams = streams(settings.source, settings.mix, settings.column)
        else:
            self.streams = [Stream("", None, settings.source, None, total_bytes(settings.source), settings.column)]
        total, limit = known_sum([stream.size for stream in self.streams]), settings.text_limit_bytes
        self.total_bytes = total if total is None or limit is None else min(total, limit)

    def named_documents(self, tokenizer: Tokenizer | None = None) -> Iterator[tuple[str, str]]:
        """Yield all documents as (domain, text); the domain is empty without a mix.

        Args:
            tokenizer: tokenizer for balancing a mix by tokens; None balances by bytes.

        Raises:
            InputError: if the source is missing, empty or malformed.
        """
        settings, self.counts = self.settings, ReadCounts()
        if settings.mix is None:
            texts = (("", text) for text in self.streams[0].documents(self.counts))
        else:
            rates = {one.name: one.tokens_per_byte(tokenizer) if tokenizer else 1.0 for one in self.streams}
            texts = mixed(self.streams, settings.mix, rates, self.counts)
        yield from texts if settings.text_limit_bytes is None else cut(texts, settings.text_limit_bytes)


def tokenizer_of(settings: Settings, text: RequestedText, folder: Path, progress: StageProgress) -> Tokenizer:
    """Load, train or build the tokenizer of the text, save it in `folder` and return it; a saved one is reused.

    Raises:
        InputError: if the tokenizer cannot be loaded, or the text for its training cannot be read.
        SinklabError: if the tokenizer cannot be saved.
    """
    if (folder / "tokenizer_config.json").is_file():  # written last, so the tokenizer is complete
        return load_tokenizer(str(folder))
    size = trained_size(settings.tokenizer)
    if size is not None:
        return train_bpe(_sample(text, progress), size, folder)
    tokenizer = _existing_tokenizer(settings)
    tokenizer.save(folder)
    return tokenizer


def _existing_tokenizer(settings: Settings) -> Tokenizer:
    """Load the tokenizer named in the settings, or build the tokenizer of a synthetic source."""
    request = parse(settings.source)
    return load_tokenizer(settings.tokenizer) if request is None else word_tokenizer(request)


def _sample(text: RequestedText, progress: StageProgress) -> Iterator[str]:
    """Yield about `BPE_SAMPLE_BYTES` of text: every n-th document, or the first ones if the text size is unknown."""
    total = text.total_bytes
    every = 1 if total is None else max(1, math.ceil(total / BPE_SAMPLE_BYTES))
    done = taken = 0
    for index, (_, document) in enumerate(text.named_documents()):
        done += len(document.encode())
        if index % every:
            continue
        taken += len(document)
        progress("tokenizer", done, total)
        yield document
        if total is None and taken >= BPE_SAMPLE_BYTES:
            return


@dataclass(frozen=True)
class Amount:
    """Estimated size of a domain, or of the whole text without a mix.

    Attributes:
        name: name of the domain, file or source.
        bytes: size of the files, including JSON syntax (without a mix at most `text_limit_bytes`); None for
            sources that are not local files, and for compressed files.
        tokens: number of tokens, EOS included, estimated from `bytes` and a sample; an overestimate for files of
            rows; None if `bytes` is None.
        taken: number of tokens that would be prepared; None if unknown.
    """

    name: str
    bytes: int | None
    tokens: int | None
    taken: int | None


@dataclass(frozen=True)
class Estimate:
    """Estimated size of prepared data.

    Attributes:
        amounts: estimated size of each domain or file of a mix; without a mix, that of the source.
        tokens: number of tokens that would be prepared; None if it is unknown for any entry of `amounts`.
        shard_bytes: total size of the two shards; None if `tokens` is None.
    """

    amounts: list[Amount]
    tokens: int | None
    shard_bytes: int | None


def estimate(settings: Settings) -> Estimate:
    """Estimate the size of prepared data from file sizes and a sample of each domain; nothing is written.

    Raises:
        InputError: if the text cannot be read, or the tokenizer cannot be loaded or is to be trained on the text.
    """
    if trained_size(settings.tokenizer) is not None:
        raise InputError(
            f"tokenizer {settings.tokenizer} is trained on the text, so the number of tokens cannot be estimated: "
            "use the tokenizer of a model, or a folder with tokenizer.json"
        )
    tokenizer = _existing_tokenizer(settings)
    text = RequestedText(settings)
    rates = [stream.tokens_per_byte(tokenizer, eos=True) for stream in text.streams]
    sizes = [stream.size for stream in text.streams] if settings.mix else [text.total_bytes]
    tokens = [None if size is None else int(size * rate) for size, rate in zip(sizes, rates, strict=True)]
    taken = _taken(text.streams, tokens, rates, settings)
    rows = zip(text.streams, sizes, tokens, taken, strict=True)
    amounts = [Amount(stream.name or settings.source, *numbers) for stream, *numbers in rows]
    total = known_sum(taken)
    width = DTYPES[dtype_for(tokenizer.vocab_size)].itemsize
    return Estimate(amounts, total, None if total is None else total * width)


def _taken(streams: list[Stream], tokens: list[int | None], rates: list[float], settings: Settings) -> list[int | None]:
    """Return the tokens taken from each domain or file; None if unknown.

    Domains are read in proportion to their weights until one is exhausted, files at equal rates until all are, and both
    until a limit is reached.

    Args:
        tokens: available tokens; None if unknown.
        rates: tokens per byte.
    """
    weights = [stream.weight or 1.0 for stream in streams]
    ends = [math.inf if count is None else count / weight for count, weight in zip(tokens, weights, strict=True)]

    def reached(limit: int, costs: list[float]) -> float:
        """Return the tokens per unit of weight, x, at which all streams together reach `limit`; infinite if never.

        Their total is sum(cost * weight * min(x, end)) with end = tokens / weight. The cost of a token is 1 for a token
        limit, and the bytes per token for a byte limit.
        """
        at, left = 0.0, float(limit)
        for end in sorted(ends):
            slope = sum(cost * weight for cost, weight, own in zip(costs, weights, ends, strict=True) if own >= end)
            if slope * (end - at) >= left:
                return at + left / slope
            at, left = end, left - slope * (end - at)
        return math.inf

    stops = [max(ends) if streams[0].weight is None else min(ends)]
    if settings.token_limit is not None:
        stops.append(reached(settings.token_limit, [1.0] * len(rates)))
    if settings.text_limit_bytes is not None:
        stops.append(reached(settings.text_limit_bytes, [1 / rate for rate in rates]))
    read = [weight * min(*stops, end) for weight, end in zip(weights, ends, strict=True)]
    return [None if math.isinf(count) else round(count) for count in read]
