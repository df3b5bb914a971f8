"""Prepared data on disk: a flat file of token ids each for training and validation, and a manifest.

    train.bin, valid.bin     token ids, little-endian uint16 (uint32 above 65,536 tokens of vocabulary), no header
    data.json                counts, ids, settings, fingerprint and checksums; written last, when the data is complete
    tokenizer.json, tokenizer_config.json

Ids are read with positioned reads (pread): with a memory map, a truncated file or a failing disk would kill the process
without a message (SIGBUS). Changes to a file of the same size are detected by its timestamps; the checksum is computed
only if they differ.
"""

import hashlib
import json
import os
import weakref
from pathlib import Path
from typing import Literal

import numpy as np
from pydantic import Field, ValidationError

from sinklab.data.config import Selection
from sinklab.errors import InputError, SinklabError
from sinklab.files import sha256_of
from sinklab.schema import Part

MANIFEST = "data.json"
DTYPES = {"uint16": np.dtype("<u2"), "uint32": np.dtype("<u4")}


class Settings(Selection):
    """Settings of data preparation; together with the text they determine the token shards."""

    source: str
    tokenizer: str
    valid_fraction: float
    text_limit_bytes: int | None
    identity: str
    """Hash that changes if the text or the tokenizer may have changed."""


class Shard(Part):
    """Entry of a token file in data.json."""

    file: str
    tokens: int = Field(ge=1)
    documents: int = Field(ge=1)
    sha256: str


class Share(Part):
    """Number of documents and tokens, in both shards, of a domain of a mix (of a file, for a uniform mix)."""

    documents: int = 0
    tokens: int = 0


class Manifest(Part):
    """Contents of data.json.

    Attributes:
        dtype: data type of the ids in both shards.
        vocab_size, eos_id, bos_id: see `Tokenizer`.
        text_bytes, text_sha256: UTF-8 size and hash of all documents in order (`corpora.Fingerprint`).
        shares: documents and tokens by domain; None without a mix.
    """

    schema_version: Literal[1] = 1
    dtype: Literal["uint16", "uint32"]
    vocab_size: int = Field(ge=1)
    eos_id: int = Field(ge=0)
    bos_id: int = Field(ge=0)
    text_bytes: int
    text_sha256: str
    tokenizer_sha256: str
    train: Shard
    valid: Shard
    shares: dict[str, Share] | None = None
    settings: Settings


class TokenFile:
    """A flat file of token ids. It is kept open, so it may be renamed or deleted while in use.

    Args:
        tokens: expected number of ids.
        sha256: expected SHA-256 in hexadecimal.
        remedy: instruction for recreating the file, added to error messages.

    Raises:
        SinklabError: if the file is missing, unreadable or has another size.
    """

    def __init__(self, path: Path, dtype: np.dtype, tokens: int, sha256: str, remedy: str) -> None:
        self.path, self.dtype = path, dtype
        self._tokens, self._sha256, self._remedy = tokens, sha256, remedy
        if not path.is_file():
            raise SinklabError(f"{path} is missing. {remedy}")
        try:
            self._file = os.open(path, os.O_RDONLY)
        except OSError as error:
            raise self._unreadable(error) from error
        weakref.finalize(self, os.close, self._file)
        self._times = self._checked_times()

    def __len__(self) -> int:
        return self._tokens

    def __getitem__(self, where: int | slice) -> np.ndarray:
        """Read the token id at an index (a scalar), or the ids of a contiguous slice, (tokens,); nothing is cached.

        Raises:
            IndexError: if the index is out of range, or the step of the slice is not 1.
            SinklabError: if the file was truncated or cannot be read.
        """
        if not isinstance(where, slice):
            where = range(self._tokens)[where]
            return self[where : where + 1][0]
        start, stop, step = where.indices(self._tokens)
        if step != 1:
            raise IndexError(f"token ids are read contiguously: a slice with step {step} is not supported")
        offset, size = start * self.dtype.itemsize, max(stop - start, 0) * self.dtype.itemsize
        content = b""
        while len(content) < size:
            try:
                more = os.pread(self._file, size - len(content), offset + len(content))
            except OSError as error:
                raise self._unreadable(error) from error
            if not more:
                raise SinklabError(
                    f"{self.path} was truncated while in use: it ends before byte {offset + size:,} of "
                    f"{len(self) * self.dtype.itemsize:,}. Restore it, or: {self._remedy}"
                )
            content += more
        return np.frombuffer(content, self.dtype)

    def verify(self) -> None:
        """Read the whole file and verify its checksum.

        Raises:
            SinklabError: if the checksum differs or the file cannot be read.
        """
        try:
            with open(self._file, "rb", closefd=False) as file:
                file.seek(0)
                found = hashlib.file_digest(file, "sha256").hexdigest()
        except OSError as error:
            raise self._unreadable(error) from error
        if found != self._sha256:
            raise SinklabError(f"{self.path} is corrupted: its checksum is not the one recorded. {self._remedy}")

    def check_unchanged(self) -> None:
        """Check that the file has not changed since it was opened: its size and times, and its checksum if they differ.

        A file that was only touched, renamed or deleted counts as unchanged. Silent disk corruption is not detected.

        Raises:
            SinklabError: if the file has been changed, or cannot be read.
        """
        times = self._checked_times()
        if times != self._times:
            self.verify()
            self._times = times

    def _checked_times(self) -> tuple[int, int]:
        """Check the file's size; return its modification and status change times, ns."""
        try:
            status = os.fstat(self._file)
        except OSError as error:
            raise self._unreadable(error) from error
        if status.st_size != (expected := self._tokens * self.dtype.itemsize):
            raise SinklabError(
                f"{self.path} has {status.st_size:,} bytes where {expected:,} were written. {self._remedy}"
            )
        return status.st_mtime_ns, status.st_ctime_ns

    def _unreadable(self, error: OSError) -> SinklabError:
        return _unreadable(self.path, error, self._remedy)


class TokenDataset:
    """Prepared data, open for reading.

    Attributes:
        train, valid: token files; `train[start:stop]` reads ids as an array (uint16 or uint32).
        vocab_size, eos_id, bos_id: vocabulary size and special tokens of the tokenizer.
        fingerprint: SHA-256 of everything that affects training: text, tokenizer, split and ids.
        tokenizer_path: path of tokenizer.json.
        directory, manifest: directory of the data, and the contents of its data.json.
    """

    def __init__(self, directory: Path, manifest: Manifest, train: TokenFile, valid: TokenFile) -> None:
        self.directory = directory
        self.manifest = manifest
        self.vocab_size = manifest.vocab_size
        self.eos_id = manifest.eos_id
        self.bos_id = manifest.bos_id
        self.tokenizer_path = directory / "tokenizer.json"
        self.train, self.valid = train, valid
        parts = manifest.model_dump(mode="json", exclude={"settings", "shares"})
        self.fingerprint = hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()

    @classmethod
    def open(cls, directory: Path) -> "TokenDataset":
        """Open a directory written by `prepare`, and verify the SHA-256 of the token files and tokenizer.json.

        Raises:
            InputError: if there is no prepared data.
            SinklabError: if a file is missing, unreadable, of another size or changed, or data.json is damaged; the
                message names the file and the remedy.
        """
        manifest = read_manifest(directory)
        dtype, remedy = DTYPES[manifest.dtype], _remedy(directory, manifest)
        train, valid = (
            TokenFile(directory / shard.file, dtype, shard.tokens, shard.sha256, remedy)
            for shard in (manifest.train, manifest.valid)
        )
        tokenizer = directory / "tokenizer.json"
        if not tokenizer.is_file():
            raise SinklabError(f"{tokenizer} is missing. {remedy}")
        train.verify()
        valid.verify()
        try:
            found = sha256_of(tokenizer)
        except OSError as error:
            raise _unreadable(tokenizer, error, remedy) from error
        if found != manifest.tokenizer_sha256:
            raise SinklabError(f"{tokenizer} is corrupted: its checksum is not the one recorded. {remedy}")
        return cls(directory, manifest, train, valid)


def is_prepared(directory: Path) -> bool:
    """Return True if `directory` contains complete prepared data (a data.json)."""
    return (directory / MANIFEST).is_file()


def dtype_for(vocab_size: int) -> Literal["uint16", "uint32"]:
    """Return the smaller of uint16 and uint32 that fits all ids below `vocab_size`."""
    return "uint16" if vocab_size <= 2**16 else "uint32"


def read_manifest(directory: Path) -> Manifest:
    """Read the data.json of a prepared directory; raises as `TokenDataset.open`."""
    path = directory / MANIFEST
    try:
        return Manifest.model_validate_json(path.read_bytes())
    except (FileNotFoundError, NotADirectoryError) as error:
        raise InputError(
            f"{directory} contains no prepared data (there is no {MANIFEST}): "
            f"run sinklab data prepare SOURCE --tokenizer NAME --out {directory}"
        ) from error
    except OSError as error:
        raise _unreadable(path, error, _remedy(directory, None)) from error
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"]) or "the file"
        raise SinklabError(f"{path} is damaged ({where}: {first['msg']}). {_remedy(directory, None)}") from error


def _unreadable(path: Path, error: OSError, remedy: str) -> SinklabError:
    return SinklabError(f"{path} cannot be read: {error.strerror or error}. Make it readable, or: {remedy}")


def _remedy(directory: Path, manifest: Manifest | None) -> str:
    source, tokenizer = (
        (manifest.settings.source, manifest.settings.tokenizer) if manifest else ("SOURCE", "NAME|train:SIZE")
    )
    return (
        f"Delete the folder {directory} and prepare it again: run the same command once more, or "
        f"sinklab data prepare {source} --tokenizer {tokenizer} --out {directory} with the options used before"
    )
