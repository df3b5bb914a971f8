"""Several files as one text: by the weights of domains, or all files at the same pace.

Whoever has the least of what it is owed is next, so that at any time each domain has its share of the tokens, but for
about one document and a head start of up to a thousand tokens, which the seed draws so that not all begin at once.

Tokens are counted before there are any: a sample from the start of each domain says how many there are to a byte of
its text. How far this is from the whole domain is how far the shares are off; data.json has them as they came out.
"""

import heapq
import random
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from sinklab.data.selection import Mix, WeightedMix
from sinklab.data.sources.hub import PREFIX, hub_documents, hub_files
from sinklab.data.sources.textfiles import read_documents, text_files
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
