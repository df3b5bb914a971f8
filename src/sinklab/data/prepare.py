"""Preparation of token shards from text: tokenize, split, write the shards and the manifest.

The SHA-256 of a document decides whether it is held out for validation. The split is therefore independent of the order
and number of documents, and duplicates are in the same split. If a split would be empty, one document is moved into it.
EOS is appended to every document.

Files are written to the subfolder `partial` of the output folder and moved up when complete; data.json is written last.
A second process waits for the lock and then opens the finished data. After an interruption, the next call resumes after
the last finished part and writes the same bytes.

Resumable writing of token shards: the text is encoded in parts, with a journal entry after each part.

Part boundaries depend only on the text, so interruptions do not change the result. One part is held in memory at a
time. When writing resumes, the token ids (checksum) and the text (fingerprint) of every journal entry are verified, and
the first mismatching part and all later ones are encoded again.
"""

import hashlib
import json
import math
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from itertools import chain
from pathlib import Path
from typing import Any, Literal

import numpy as np
from pydantic import ValidationError

from sinklab.data.corpora import Fingerprint, identity
from sinklab.data.loader import (
    DTYPES,
    MANIFEST,
    DataConfig,
    Manifest,
    Settings,
    Shard,
    Share,
    TokenDataset,
    dtype_for,
    is_prepared,
    read_manifest,
)
from sinklab.data.textfiles import expanded, notes_on_folder
from sinklab.data.texts import RequestedText, StageProgress, tokenizer_of
from sinklab.data.tokenizers import Tokenizer, trained_size
from sinklab.errors import InputError, SinklabError
from sinklab.files import append_line, cache_folder, is_at, is_full, sha256_of, write_json, write_text
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


Counted = Callable[[int], None]
"""Callback that receives the number of tokens written to the shards so far."""

LOCK = "prepare.lock"
FILES = ("train.bin", "valid.bin", "tokenizer.json", "tokenizer_config.json")
PARTIAL, SETTINGS = "partial", "settings.json"


def settings_of(source: str, tokenizer: str, **selection: Any) -> Settings:
    """Build the settings of data preparation.

    Args:
        source, tokenizer: as in `DataConfig`.
        selection: `valid_fraction`, `text_limit_bytes` and the fields of `Selection`, with the defaults of
            `DataConfig`.

    Raises:
        InputError: if a value is invalid, or the source does not exist or is already prepared.
    """
    try:
        config = DataConfig(source=source, tokenizer=tokenizer, **selection)
    except ValidationError as error:
        first = error.errors()[0]
        reason = first["msg"].removeprefix("Value error, ")
        raise InputError(f"{first['loc'][0]} {first['input']!r}: {reason}" if first["loc"] else reason) from error
    return _settings(config)


def prepared(config: DataConfig, cache: Path | None = None, progress: StageProgress | None = None) -> TokenDataset:
    """Return the opened token shards of a recipe's data; they are first prepared in the cache if they do not exist.

    Args:
        config: data section of the recipe; tokenizer, split, column, mix and limits are ignored if `source` is prepared
            data.
        cache: cache folder; default: SINKLAB_CACHE, or ~/.cache/sinklab.
        progress: see `prepare`.
    """
    folder = expanded(config.source)
    if is_prepared(folder):
        return TokenDataset(folder)
    settings = _settings(config)
    return prepare(settings, _in_cache(settings, cache), progress)


def known_vocabulary(config: DataConfig) -> int | None:
    """Return the vocabulary size of a recipe's data if it is known before preparation, else None.

    The size is exact for prepared data; for a tokenizer `train:SIZE`, it is the upper bound SIZE.

    Raises:
        SinklabError: if the data.json of prepared data is damaged.
    """
    folder = expanded(config.source)
    return read_manifest(folder).vocab_size if is_prepared(folder) else trained_size(config.tokenizer)


def _settings(config: DataConfig) -> Settings:
    if is_prepared(expanded(config.source)):
        raise InputError(f"source {config.source} is already prepared: set data.source to it instead of preparing it")
    path = expanded(config.tokenizer)
    path = path / "tokenizer.json" if path.is_dir() else path
    tokens = sha256_of(path) if path.is_file() else config.tokenizer
    digest = hashlib.sha256(json.dumps([identity(config.source), tokens]).encode()).hexdigest()
    return Settings(
        **{key: getattr(config, key) for key in Settings.model_fields if key != "identity"}, identity=digest
    )


def _in_cache(settings: Settings, cache: Path | None = None) -> Path:
    key = hashlib.sha256(settings.model_dump_json().encode()).hexdigest()[:20]
    return (cache or cache_folder()) / "data" / key


def prepare(
    settings: Settings, out: Path, progress: StageProgress | None = None, counted: Counted | None = None
) -> TokenDataset:
    """Write the token shards for `settings` to `out`, unless they exist, and return them opened.

    Args:
        out: output folder; other files in it are not modified.
        progress, counted: see `StageProgress` and `Counted`.

    Raises:
        InputError: if the source or tokenizer cannot be used, there are fewer than two documents, `out` is a file, or
            `out` contains data with other settings, or files that would be overwritten and were not written by data
            preparation.
        SinklabError: if `out` cannot be written (after a full disk, finished parts are kept and the same call resumes),
            or the data in `out` is damaged.
    """
    try:
        if not is_prepared(out):
            if out.exists() and not out.is_dir():
                raise InputError(f"{out} is a file, not a folder: choose another --out")
            if not (out / LOCK).exists():  # checked before anything is written, and again under the lock
                _check_replaceable(out)
            with _locked(out):
                if not is_prepared(out):
                    _build(settings, out, progress or (lambda *_: None), counted or (lambda _: None))
    except OSError as error:
        remedy = "Finished parts are kept: free some space, or choose" if is_full(error) else "Choose"
        raise SinklabError(
            f"cannot prepare data in {out}: {error.strerror or error}. {remedy} another folder with --out "
            "or SINKLAB_CACHE, and run the same command again."
        ) from error
    dataset = TokenDataset(out)
    if dataset.manifest.settings != settings:
        raise InputError(
            f"{out} contains data prepared with other settings or from text that has changed since: "
            "choose another --out, or delete that folder first"
        )
    return dataset


def _check_replaceable(out: Path) -> None:
    """Raise InputError if `out` has files that would be overwritten and were not written by data preparation."""
    partial = out / PARTIAL
    if (partial / SETTINGS).is_file():
        return
    found = [out / name for name in FILES if (out / name).exists()]
    if partial.exists() and not (
        partial.is_dir() and all(path.name.startswith(f".{SETTINGS}") for path in partial.iterdir())
    ):
        found.append(partial)
    if found:
        raise InputError(
            f"{found[0]} exists and was not written by data preparation, so it is not overwritten: choose another "
            "--out, or move it"
        )


def _build(settings: Settings, out: Path, progress: StageProgress, counted: Counted) -> None:
    _check_replaceable(out)
    partial = out / PARTIAL
    found, wanted = partial / SETTINGS, settings.model_dump_json()
    try:
        if not found.is_file() or found.read_text(encoding="utf-8") != wanted:
            shutil.rmtree(partial, ignore_errors=True)  # written for other settings or another text
            partial.mkdir()
            write_text(found, wanted)
        manifest = _write_shards(settings, partial, progress, counted)
        for name in FILES:
            (partial / name).replace(out / name)
        write_json(out / MANIFEST, manifest.model_dump(mode="json"))
    except BaseException:
        journal = partial / JOURNAL
        if not journal.is_file() or not journal.stat().st_size:  # no part is finished
            shutil.rmtree(partial, ignore_errors=True)
        raise
    shutil.rmtree(partial, ignore_errors=True)


def _write_shards(settings: Settings, folder: Path, progress: StageProgress, counted: Counted) -> Manifest:
    text = RequestedText(settings)
    tokenizer = tokenizer_of(settings, text, folder, progress)
    builder = Builder(folder, tokenizer, settings)

    def report(done: int, tokens: int) -> None:
        progress("tokens", done, text.total_bytes)
        counted(tokens)

    train, valid = builder.build(text.named_documents(tokenizer), report)
    return Manifest(
        dtype=builder.dtype,
        vocab_size=tokenizer.vocab_size,
        eos_id=tokenizer.eos_id,
        bos_id=tokenizer.bos_id,
        text_bytes=builder.text.text_bytes,
        text_sha256=builder.text.hexdigest(),
        tokenizer_sha256=sha256_of(folder / "tokenizer.json"),
        train=train,
        valid=valid,
        shares=builder.shares or None,
        settings=settings,
        notes=[*text.counts.notes(), *notes_on_folder(expanded(settings.source))] or None,
    )


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Hold the file lock of `folder` during the `with` block; the lock is released if the process dies."""
    import fcntl

    while True:
        is_new = not folder.exists()
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / LOCK).open("a") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            if not is_at(file, folder / LOCK):
                continue  # the process that held the lock failed and removed the folder
            try:
                yield
            except BaseException:
                if is_new and [path.name for path in folder.iterdir()] == [LOCK]:
                    shutil.rmtree(folder, ignore_errors=True)  # nothing was written
                raise
            return
