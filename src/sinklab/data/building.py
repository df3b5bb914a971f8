"""Token shards from a stream of documents: cut into parts, encoded, written in order, each part with a journal entry.

Parts are cut by the text alone, so the bytes do not depend on when a preparation was interrupted; memory holds one
part, however large the text is. An entry is written after the ids of its part. A resumed preparation verifies the ids
of every entry against its checksum and the text against its fingerprint, and repeats everything from the first
difference on: neither a killed process, nor a power failure, nor changed text leaves a trace in the result.
"""

import hashlib
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Literal

import numpy as np
from pydantic import ValidationError

from sinklab.data.packing import SplitState, SplitWriter, rank
from sinklab.data.shards import DTYPES, Share, dtype_for
from sinklab.data.sources.corpora import Fingerprint
from sinklab.data.tokenizers import Tokenizer
from sinklab.files import append_line, write_text
from sinklab.schema import Part

FILE = "journal.jsonl"


class Entry(Part):
    """The state after one part: everything is counted from the start of the text.

    Attributes:
        documents: of the text that are in the shards.
        text_bytes, text_sha256: of these documents, see `corpora.Fingerprint`.
        shares: of the voices of a mix.
    """

    documents: int
    text_bytes: int
    text_sha256: str
    train: SplitState
    valid: SplitState
    shares: dict[str, Share]


class Journal:
    """The lines of a folder.

    Attributes:
        entries: whole lines whose ids are in the shards as they were written.
    """

    def __init__(self, folder: Path, token_bytes: int) -> None:
        self._path = folder / FILE
        lines = _lines(self._path)
        sound = min(
            _sound(folder / "train.bin", [line.train for line in lines], token_bytes),
            _sound(folder / "valid.bin", [line.valid for line in lines], token_bytes),
        )
        self.entries = lines[:sound]

    def keep(self, count: int) -> Entry | None:
        """Forget all but the first `count` entries; returns the last one kept."""
        self.entries = self.entries[:count]
        write_text(self._path, "".join(f"{entry.model_dump_json()}\n" for entry in self.entries))
        return self.entries[-1] if self.entries else None

    def add(self, entry: Entry) -> None:
        """Record a finished part; its ids have been written.

        Raises:
            SinklabError: the disk is full.
        """
        append_line(self._path, entry.model_dump_json())


def _lines(path: Path) -> list[Entry]:
    """The lines up to the first torn one."""
    entries = []
    for line in path.read_bytes().splitlines() if path.exists() else ():
        try:
            entries.append(Entry.model_validate_json(line))
        except ValidationError:
            break
    return entries


def _sound(path: Path, sides: list[SplitState], token_bytes: int) -> int:
    """How many parts, from the first one on, stand in the file as they were written."""
    if not path.exists():
        return 0
    before = 0
    with path.open("rb") as file:
        for index, side in enumerate(sides):
            content = file.read((side.tokens - before) * token_bytes)
            before = side.tokens
            if hashlib.sha256(content).hexdigest() != side.sha256:
                return index
    return len(sides)


NamedDocument = tuple[str, str]  # the voice of a mix (nothing where there is none), and a document
NamedDocuments = list[NamedDocument]

PART_CHARACTERS = 2**20


@dataclass(frozen=True)
class Encoded:
    """Documents as ids.

    Attributes:
        ids: (tokens,) of all documents, each followed by EOS.
        lengths: (documents,) tokens of each, EOS included.
        ranks: (documents,) see `packing.rank`.
    """

    ids: np.ndarray
    lengths: np.ndarray
    ranks: np.ndarray


class Builder:
    """Writes the shards of a text into a folder, after the parts that stand there already.

    Args:
        folder: what an interrupted builder of the same text and tokenizer left in it is continued.
        tokenizer: saved in `folder`.
        valid_fraction: see `packing.rank`.
        token_limit: stop after this many tokens; the last document is cut there, and ends with EOS all the same.
    """

    def __init__(self, folder: Path, tokenizer: Tokenizer, valid_fraction: float, token_limit: int | None) -> None:
        self.folder, self.tokenizer, self.valid_fraction = folder, tokenizer, valid_fraction
        self.dtype: Literal["uint16", "uint32"] = dtype_for(tokenizer.vocab_size)
        self.token_limit = token_limit
        self.text = Fingerprint()
        self.shares: dict[str, Share] = {}
        self.journal = Journal(folder, DTYPES[self.dtype].itemsize)

    def build(self, documents: Iterator[NamedDocument], progress: Callable[[int, int], None]) -> SplitWriter:
        """Write everything; the shards still have to be finished.

        Args:
            documents: the whole text, from its start.
            progress: called with the bytes of text done and the tokens written so far.

        Raises:
            InputError: the text is malformed.
            SinklabError: the disk is full; what was finished stays.
        """
        parts = _parts(documents)
        changed, last = self._replayed(parts)
        writer = SplitWriter(self.folder, self.dtype, self.valid_fraction, last and last.train, last and last.valid)
        source = chain([changed] if changed else [], parts)
        limit = math.inf if self.token_limit is None else self.token_limit
        try:
            while writer.tokens < limit and (part := next(source, None)):
                self._write(writer, part)
                progress(self.text.text_bytes, writer.tokens)
        except BaseException:
            writer.__exit__(None, None, None)
            raise
        return writer

    def _replayed(self, parts: Iterator[NamedDocuments]) -> tuple[NamedDocuments | None, Entry | None]:
        """Read the text of finished parts again; returns the first part that has changed, and the last sound entry."""
        for index, entry in enumerate(self.journal.entries):
            part = next(parts, [])
            before = self.text.copy()
            for _, text in part[: entry.documents - self.text.documents]:
                self.text.add(text)
            if self.text.hexdigest() != entry.text_sha256:
                self.text = before
                return part or None, self._continued(index)
        return None, self._continued(len(self.journal.entries))

    def _continued(self, count: int) -> Entry | None:
        last = self.journal.keep(count)
        self.shares = dict(last.shares) if last else {}
        return last

    def _write(self, writer: SplitWriter, part: NamedDocuments) -> None:
        encoded = _encoded([text for _, text in part], self.tokenizer, DTYPES[self.dtype])
        if self.token_limit is not None:
            encoded = _limited(encoded, self.token_limit - writer.tokens, self.tokenizer.eos_id)
        writer.add(encoded.ids, encoded.lengths, encoded.ranks)
        for (name, text), tokens in zip(part, encoded.lengths.tolist(), strict=False):
            self.text.add(text)
            if name:
                share = self.shares.get(name, Share())
                self.shares[name] = Share(documents=share.documents + 1, tokens=share.tokens + tokens)
        self.journal.add(
            Entry(
                documents=self.text.documents,
                text_bytes=self.text.text_bytes,
                text_sha256=self.text.hexdigest(),
                train=writer.train,
                valid=writer.valid,
                shares=self.shares,
            )
        )


def _encoded(texts: list[str], tokenizer: Tokenizer, dtype: np.dtype) -> Encoded:
    ids, lengths = tokenizer.encode_flat(texts)
    ended = np.insert(ids, lengths.cumsum(), tokenizer.eos_id)
    return Encoded(ended.astype(dtype), lengths + 1, np.array([rank(text) for text in texts]))


def _limited(encoded: Encoded, tokens: int, eos_id: int) -> Encoded:
    """The first `tokens` of a part at most; the last document then ends in EOS where it is cut."""
    if len(encoded.ids) <= tokens:
        return encoded
    ids = encoded.ids[:tokens].copy()
    ids[-1] = eos_id
    ends = np.minimum(encoded.lengths.cumsum(), tokens)
    count = int(np.searchsorted(ends, tokens)) + 1
    return Encoded(ids, np.diff(ends[:count], prepend=0), encoded.ranks[:count])


def _parts(documents: Iterator[NamedDocument]) -> Iterator[NamedDocuments]:
    part: NamedDocuments = []
    size = 0
    for document in documents:
        part.append(document)
        size += len(document[1])
        if size >= PART_CHARACTERS:
            yield part
            part, size = [], 0
    if part:
        yield part
