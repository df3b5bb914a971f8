"""Resumable writing of token shards: the text is encoded in parts, with a journal entry after each part.

Part boundaries depend only on the text, so interruptions do not change the result. One part is held in memory at a
time. When writing resumes, the token ids (checksum) and the text (fingerprint) of every journal entry are verified, and
the first mismatching part and all later ones are encoded again.
"""

import hashlib
import math
import os
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from itertools import chain
from pathlib import Path
from typing import Literal

import numpy as np
from pydantic import ValidationError

from sinklab.data.shards import DTYPES, Settings, Shard, Share, dtype_for
from sinklab.data.sources.corpora import Fingerprint
from sinklab.data.tokenizers import Tokenizer
from sinklab.errors import InputError
from sinklab.files import append_line, sha256_of, write_text
from sinklab.schema import Part

JOURNAL = "journal.jsonl"
PART_CHARACTERS = 2**20  # minimum size of a part; parts end at document boundaries
MOVED_BYTES = 2**22  # block size for removing ids from the middle of a file

NamedDocument = tuple[str, str]
"""Domain (empty without a mix) and text of a document."""
NamedDocuments = list[NamedDocument]


def rank(document: str) -> float:
    """Map a document to a rank in [0, 1) by its SHA-256; ranks below `valid_fraction` are held out for validation."""
    return int.from_bytes(hashlib.sha256(document.encode()).digest()[:6], "big") / 2**48


class Nearest(Part):
    """Document of a shard with the rank nearest to `valid_fraction`; it is moved if the other shard is empty.

    Attributes:
        distance: |rank - valid_fraction|.
        first, tokens: index of the document's first token in the shard, and its number of tokens.
    """

    distance: float
    first: int
    tokens: int


class SplitState(Part):
    """State of one shard after a part has been written.

    Attributes:
        tokens, documents: number of tokens and documents in the shard.
        nearest: document whose rank is nearest to `valid_fraction`; None while the shard is empty.
        sha256: SHA-256 of the bytes added by the last part.
    """

    tokens: int = 0
    documents: int = 0
    nearest: Nearest | None = None
    sha256: str = ""


class Entry(Part):
    """Journal entry: cumulative state of both shards after a part has been written.

    Attributes:
        documents: number of documents written to the shards.
        text_bytes, text_sha256: size and hash of these documents (`corpora.Fingerprint`).
        shares: number of documents and tokens of each domain of a mix.
    """

    documents: int
    text_bytes: int
    text_sha256: str
    train: SplitState
    valid: SplitState
    shares: dict[str, Share]


class _GrowingShard:
    """Token file opened for appending, after truncation to the size in `state`."""

    def __init__(self, path: Path, dtype: np.dtype, state: SplitState) -> None:
        self.state, self._dtype = state, dtype
        self.file = path.open("r+b" if path.exists() else "w+b")
        self.file.truncate(state.tokens * dtype.itemsize)
        self.file.seek(0, os.SEEK_END)

    def append(self, ids: np.ndarray, lengths: np.ndarray, distances: np.ndarray) -> None:
        state, content = self.state, ids.tobytes()
        self.file.write(content)
        self.file.flush()
        nearest = state.nearest
        if len(lengths) and (nearest is None or distances.min() < nearest.distance):
            index = int(distances.argmin())
            first = state.tokens + int(lengths[:index].sum())
            nearest = Nearest(distance=float(distances[index]), first=first, tokens=int(lengths[index]))
        self.state = SplitState(
            tokens=state.tokens + len(ids),
            documents=state.documents + len(lengths),
            nearest=nearest,
            sha256=hashlib.sha256(content).hexdigest(),
        )

    def take_out(self, document: Nearest) -> np.ndarray:
        """Remove a document's token ids from the file, block by block, and return them."""
        start, size = document.first * self._dtype.itemsize, document.tokens * self._dtype.itemsize
        self.file.seek(start)
        ids = np.frombuffer(self.file.read(size), self._dtype)
        while block := self.file.read(MOVED_BYTES):
            self.file.seek(start)
            start += self.file.write(block)
            self.file.seek(start + size)
        self.file.truncate(start)
        self.state = SplitState(tokens=self.state.tokens - document.tokens, documents=self.state.documents - 1)
        return ids

    def finish(self) -> Shard:
        self.file.flush()
        os.fsync(self.file.fileno())
        path, state = Path(self.file.name), self.state
        return Shard(file=path.name, tokens=state.tokens, documents=state.documents, sha256=sha256_of(path))


class Builder:
    """Writes the token shards of a text to a folder, and resumes after the last valid journal entry.

    Args:
        folder: folder of the shards and the journal.
        tokenizer: tokenizer of the text.
        settings: preparation settings; at `token_limit`, the last document is truncated and its last token is EOS.

    Attributes:
        dtype: data type of the token ids.
        text: fingerprint of the documents written.
        shares: number of documents and tokens of each domain of a mix; empty without a mix.
    """

    def __init__(self, folder: Path, tokenizer: Tokenizer, settings: Settings) -> None:
        self.folder, self.tokenizer, self.settings = folder, tokenizer, settings
        self.dtype: Literal["uint16", "uint32"] = dtype_for(tokenizer.vocab_size)
        self.text = Fingerprint()
        self.shares: dict[str, Share] = {}

    def build(self, documents: Iterator[NamedDocument], progress: Callable[[int, int], None]) -> tuple[Shard, Shard]:
        """Write the training and validation shards, and return their entries for data.json.

        An empty shard gets the `Nearest` document of the other one.

        Args:
            documents: all documents, including those of finished parts.
            progress: callback, called after each part with the bytes of text and the tokens written so far.

        Raises:
            InputError: if `documents` raises it, or there are fewer than two documents.
            OSError, SinklabError: if a file cannot be written, for example because the disk is full; finished parts are
                kept.
        """
        parts, last = self._replay(_parts(documents))
        limit = math.inf if self.settings.token_limit is None else self.settings.token_limit
        dtype = DTYPES[self.dtype]
        train = _GrowingShard(self.folder / "train.bin", dtype, last.train if last else SplitState())
        valid = _GrowingShard(self.folder / "valid.bin", dtype, last.valid if last else SplitState())
        with closing(train.file), closing(valid.file):
            while (written := train.state.tokens + valid.state.tokens) < limit and (part := next(parts, None)):
                self._write(part, train, valid, written)
                progress(self.text.text_bytes, train.state.tokens + valid.state.tokens)
            if train.state.documents + valid.state.documents < 2:
                (self.folder / JOURNAL).unlink(missing_ok=True)
                raise InputError(
                    f"fewer than two documents were read from {self.settings.source}, but the training and validation "
                    "shards need at least one each: add documents (in a .txt file, end each with a line <|endoftext|>; "
                    "a long file without such lines is split), or raise data.token_limit "
                    "(--limit-tokens) or data.text_limit_bytes (--limit-bytes) if one is set"
                )
            full, empty = (train, valid) if train.state.documents else (valid, train)
            if not empty.state.documents:
                moved = full.state.nearest
                assert moved is not None
                empty.append(full.take_out(moved), np.array([moved.tokens]), np.array([moved.distance]))
            return train.finish(), valid.finish()

    def _replay(self, parts: Iterator[NamedDocuments]) -> tuple[Iterator[NamedDocuments], Entry | None]:
        """Reread the text of finished parts; return the remaining parts and the last valid journal entry.

        An entry is valid if its line is complete, its text and token ids are unchanged, and all earlier ones are valid.
        """
        path, entries = self.folder / JOURNAL, list[Entry]()
        with suppress(ValidationError):
            for line in path.read_bytes().splitlines() if path.exists() else ():
                entries.append(Entry.model_validate_json(line))
        width, valid = DTYPES[self.dtype].itemsize, list[Entry]()
        in_train = _intact(self.folder / "train.bin", [entry.train for entry in entries], width)
        in_valid = _intact(self.folder / "valid.bin", [entry.valid for entry in entries], width)
        for entry in entries[: min(in_train, in_valid)]:
            part, before = next(parts, []), self.text.copy()
            for _, text in part[: entry.documents - self.text.documents]:
                self.text.add(text)
            if self.text.hexdigest() != entry.text_sha256:
                self.text, parts = before, chain([part] if part else [], parts)
                break
            valid.append(entry)
        write_text(path, "".join(f"{entry.model_dump_json()}\n" for entry in valid))
        last = valid[-1] if valid else None
        self.shares = dict(last.shares) if last else {}
        return parts, last

    def _write(self, part: NamedDocuments, train: _GrowingShard, valid: _GrowingShard, written: int) -> None:
        """Append the documents of a part to the shards selected by their ranks, and an entry to the journal."""
        ids, lengths, ranks = self._encode([text for _, text in part], written)
        distances = ranks - self.settings.valid_fraction
        for shard, chosen in ((train, distances >= 0), (valid, distances < 0)):
            shard.append(ids[np.repeat(chosen, lengths)], lengths[chosen], abs(distances[chosen]))
        for (name, text), tokens in zip(part, lengths.tolist(), strict=False):
            self.text.add(text)
            if name:
                share = self.shares.get(name, Share())
                self.shares[name] = Share(documents=share.documents + 1, tokens=share.tokens + tokens)
        entry = Entry(
            documents=self.text.documents,
            text_bytes=self.text.text_bytes,
            text_sha256=self.text.hexdigest(),
            train=train.state,
            valid=valid.state,
            shares=self.shares,
        )
        append_line(self.folder / JOURNAL, entry.model_dump_json())

    def _encode(self, texts: list[str], written: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Encode documents up to the token limit, of which `written` tokens are already used.

        Returns:
            Ids with EOS (tokens,), lengths (documents,) and ranks (documents,).
        """
        ids, lengths = self.tokenizer.encode_flat(texts)
        ids = np.insert(ids, lengths.cumsum(), self.tokenizer.eos_id).astype(DTYPES[self.dtype])
        lengths, ranks = lengths + 1, np.array([rank(text) for text in texts])
        limit = self.settings.token_limit
        if limit is None or len(ids) <= limit - written:
            return ids, lengths, ranks
        ids = ids[: limit - written].copy()
        ids[-1] = self.tokenizer.eos_id
        ends = np.minimum(lengths.cumsum(), len(ids))
        count = int(np.searchsorted(ends, len(ids))) + 1
        return ids, np.diff(ends[:count], prepend=0), ranks[:count]


def _intact(path: Path, states: list[SplitState], token_bytes: int) -> int:
    """Return the number of leading parts whose bytes in the file match their checksums."""
    if not path.exists():
        return 0
    before = 0
    with path.open("rb") as file:
        for index, state in enumerate(states):
            content = file.read((state.tokens - before) * token_bytes)
            before = state.tokens
            if hashlib.sha256(content).hexdigest() != state.sha256:
                return index
    return len(states)


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
