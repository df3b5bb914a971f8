"""Prepared data on disk: one flat file of token ids each for training and validation, and a manifest.

    train.bin, valid.bin     token ids, little-endian uint16 (uint32 above 65,536 tokens of vocabulary), no header
    data.json                counts, ids, settings, fingerprint and checksums; written last: with it the data is whole
    tokenizer.json, tokenizer_config.json

A flat file without a header can be cut anywhere, and read by ten lines of any language.
"""

import hashlib
import json
from pathlib import Path
from typing import Literal

import numpy as np
from pydantic import Field, ValidationError

from sinklab.data.config import Selection
from sinklab.data.tokenfile import TokenFile
from sinklab.errors import InputError, SinklabError
from sinklab.files import sha256_of
from sinklab.schema import Part

MANIFEST = "data.json"
DTYPES = {"uint16": np.dtype("<u2"), "uint32": np.dtype("<u4")}


class Settings(Selection):
    """What the data was asked to be; the same settings give the same shards."""

    source: str
    tokenizer: str
    valid_fraction: float
    text_limit_bytes: int | None
    identity: str
    """Changes when the text or the tokenizer behind the names may have changed."""


class Shard(Part):
    """One token file."""

    file: str
    tokens: int = Field(ge=1)
    documents: int = Field(ge=1)
    sha256: str


class Share(Part):
    """What one domain (or file, where all go at the same pace) has given to a mix."""

    documents: int = 0
    tokens: int = 0


class Manifest(Part):
    """The contents of data.json; `shares` only where the text is a mix."""

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


class TokenDataset:
    """Prepared data, open for reading.

    Attributes:
        train, valid: the ids, (tokens,) uint16 or uint32; `train[start:stop]` reads them as an array.
        vocab_size, eos_id, bos_id: of the tokenizer the data was made with.
        fingerprint: one SHA-256 for everything a training run sees: text, tokenizer, split and ids.
        tokenizer_path: the tokenizer.json that belongs to the data.
        directory, manifest: where it lies, and the contents of data.json.
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
            directory: what `prepare` wrote.
            verify: compare the SHA-256 of every file; sizes are always compared.

        Raises:
            InputError: there is no prepared data.
            SinklabError: a file is missing, cut short or changed; the message names it and the remedy.
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
            _check_tokenizer(tokenizer, manifest.tokenizer_sha256, remedy)
        return cls(directory, manifest, train, valid)


def is_prepared(directory: Path) -> bool:
    """Whether a finished data.json lies in `directory`."""
    return (directory / MANIFEST).is_file()


def dtype_for(vocab_size: int) -> Literal["uint16", "uint32"]:
    """The narrowest of the two dtypes that holds every id below `vocab_size`."""
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


def _check_tokenizer(path: Path, expected: str, remedy: str) -> None:
    try:
        found = sha256_of(path)
    except OSError as error:
        raise SinklabError(
            f"{path} cannot be read: {error.strerror or error}. Make it readable, or: {remedy}"
        ) from error
    if found != expected:
        raise SinklabError(f"{path} is corrupted: its checksum is not the one recorded. {remedy}")


def _remedy(directory: Path, manifest: Manifest | None) -> str:
    source, tokenizer = (
        (manifest.settings.source, manifest.settings.tokenizer) if manifest else ("SOURCE", "NAME|train:SIZE")
    )
    return (
        f"Delete the folder {directory} and prepare it again: run the same command once more, or "
        f"sinklab data prepare {source} --tokenizer {tokenizer} --out {directory}"
    )
