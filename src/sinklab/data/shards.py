"""Prepared data on disk: one flat file of token ids each for training and validation, and a manifest.

    train.bin, valid.bin     token ids, little-endian uint16 (uint32 above 65,536 tokens of vocabulary), no header
    data.json                counts, ids, settings, fingerprint and checksums; written last, when the data is complete
    tokenizer.json, tokenizer_config.json

A flat file without a header can be split anywhere and read with a few lines of code.

Ids are read with positioned reads. With a memory map, a truncated file or failing disk would end the process without a
message (SIGBUS); a positioned read raises an error. Changed bytes of a file of the same size are detected by the file's
times, which are cheap to compare; the checksum is compared only if the times differ.
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
    """Settings of a preparation; they determine the shards."""

    source: str
    tokenizer: str
    valid_fraction: float
    text_limit_bytes: int | None
    identity: str
    """A digest that changes when the text or the tokenizer of these names may have changed."""


class Shard(Part):
    """One token file."""

    file: str
    tokens: int = Field(ge=1)
    documents: int = Field(ge=1)
    sha256: str


class Share(Part):
    """The documents and tokens of one domain of a mix (or of one file, for a uniform mix)."""

    documents: int = 0
    tokens: int = 0


class Manifest(Part):
    """The contents of data.json; `shares` is set only for a mix."""

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
    """A flat file of token ids. The file stays open, so it may be renamed or deleted while in use.

    Args:
        tokens: expected number of ids.
        sha256: SHA-256 of the bytes, in hexadecimal.
        remedy: sentence that explains how to recreate the file.

    Raises:
        SinklabError: if the file is missing, unreadable or of another size.
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
        """Read the id at a position, as a scalar, or the ids in a slice without step, (tokens,); nothing is cached.

        Raises:
            IndexError: if the position is out of range.
            SinklabError: if the file was truncated or its disk fails.
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
                    f"{self.path} was cut short while it was in use: it ends before byte {offset + size:,} of "
                    f"{len(self) * self.dtype.itemsize:,}. Restore it, or: {self._remedy}"
                )
            content += more
        return np.frombuffer(content, self.dtype)

    def verify(self) -> None:
        """Compare the bytes with their checksum.

        Raises:
            SinklabError: if they differ, or cannot be read.
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
        """Check that the file has not changed since it was opened, by its size and times.

        A file that was only touched, renamed or deleted is unchanged. Bytes changed and restored between two calls, and
        corruption on the disk itself, are not detected.

        Raises:
            SinklabError: if the file has been changed, or cannot be read.
        """
        times = self._checked_times()
        if times != self._times:
            self.verify()
            self._times = times

    def _checked_times(self) -> tuple[int, int]:
        """Times of the last change of content and of status, in nanoseconds; the size is compared."""
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
        return SinklabError(
            f"{self.path} cannot be read: {error.strerror or error}. Make it readable, or: {self._remedy}"
        )


class TokenDataset:
    """Prepared data, open for reading.

    Attributes:
        train, valid: the ids, (tokens,) uint16 or uint32; `train[start:stop]` reads them as an array.
        vocab_size, eos_id, bos_id: properties of the data's tokenizer.
        fingerprint: SHA-256 of everything that affects training: text, tokenizer, split and ids.
        tokenizer_path: path of the data's tokenizer.json.
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
    def open(cls, directory: Path, verify: bool = True) -> "TokenDataset":
        """Open a prepared directory.

        Args:
            directory: directory written by `prepare`.
            verify: whether to compare the SHA-256 of every file; sizes are always compared.

        Raises:
            InputError: if there is no prepared data.
            SinklabError: if a file is missing, truncated or changed; the message names the file and the remedy.
        """
        manifest = _manifest(directory)
        dtype, remedy = DTYPES[manifest.dtype], _remedy(directory, manifest)
        train, valid = (
            TokenFile(directory / shard.file, dtype, shard.tokens, shard.sha256, remedy)
            for shard in (manifest.train, manifest.valid)
        )
        tokenizer = directory / "tokenizer.json"
        if not tokenizer.is_file():
            raise SinklabError(f"{tokenizer} is missing. {remedy}")
        if verify:
            train.verify()
            valid.verify()
            try:
                found = sha256_of(tokenizer)
            except OSError as error:
                reason = error.strerror or error
                raise SinklabError(f"{tokenizer} cannot be read: {reason}. Make it readable, or: {remedy}") from error
            if found != manifest.tokenizer_sha256:
                raise SinklabError(f"{tokenizer} is corrupted: its checksum is not the one recorded. {remedy}")
        return cls(directory, manifest, train, valid)


def is_prepared(directory: Path) -> bool:
    """Whether `directory` has a finished data.json."""
    return (directory / MANIFEST).is_file()


def dtype_for(vocab_size: int) -> Literal["uint16", "uint32"]:
    """The smaller dtype, uint16 or uint32, that represents every id below `vocab_size`."""
    return "uint16" if vocab_size <= 2**16 else "uint32"


def _manifest(directory: Path) -> Manifest:
    path = directory / MANIFEST
    try:
        return Manifest.model_validate_json(path.read_bytes())
    except FileNotFoundError as error:
        raise InputError(
            f"{directory} holds no prepared data (there is no {MANIFEST}): "
            f"run sinklab data prepare SOURCE --tokenizer NAME --out {directory}"
        ) from error
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"]) or "the file"
        raise SinklabError(f"{path} is damaged ({where}: {first['msg']}). {_remedy(directory, None)}") from error


def _remedy(directory: Path, manifest: Manifest | None) -> str:
    source, tokenizer = (
        (manifest.settings.source, manifest.settings.tokenizer) if manifest else ("SOURCE", "NAME|train:SIZE")
    )
    return (
        f"Delete the folder {directory} and prepare it again: run the same command once more, or "
        f"sinklab data prepare {source} --tokenizer {tokenizer} --out {directory}"
    )
