"""The data section of a recipe (`DataConfig`), prepared data on disk, and its batches.

`Loader` has random access to batches by index, and `Prefetcher` prepares them in a background thread.

For given data and settings, a batch depends only on (seed, index), so the loader state is one integer. The shard is
split into non-overlapping chunks of context + 1 tokens, or of BOS and context tokens. Training reads every chunk once
per epoch, in a permutation drawn from (seed, epoch); a batch may span several epochs. Validation reads the chunks once,
in order.

Prepared data on disk: one flat file of token ids per split, and a manifest.

    train.bin, valid.bin     token ids, little-endian uint16 (uint32 for vocabularies above 65,536 tokens), no header
    data.json                manifest: token counts, special token ids, settings and checksums; written last
    tokenizer.json, tokenizer_config.json

Token ids are read with pread. Rejected alternative: a memory map, because a truncated file or a failing disk would kill
the process without a message (SIGBUS). Checksums are verified when the data is opened. Later changes that keep the file
size are detected by the timestamps of the file, and the checksum is verified again only if the timestamps differ.
"""

import hashlib
import json
import os
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import lru_cache
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Self

import numpy as np
import yaml
from pydantic import Field, ValidationError, field_validator, model_validator

from sinklab.data.corpora import WORDS, installed_names, parse
from sinklab.data.tokenizers import trained_size
from sinklab.errors import InputError, SinklabError, cause
from sinklab.files import sha256_of
from sinklab.schema import Omitted, Part

if TYPE_CHECKING:
    import torch
    from torch import Tensor


def paper_weights() -> dict[str, float]:
    """Load the weights of the 17 domains of the corpus of 2410.10781 (data/regmix.yaml), by domain."""
    return yaml.safe_load((resources.files("sinklab") / "data" / "regmix.yaml").read_text(encoding="utf-8"))


class WeightedMix(Part):
    """Interleave domains with token shares proportional to their weights, until the first domain is exhausted."""

    kind: Literal["weights"] = "weights"
    weights: dict[str, float] = Field(
        default_factory=paper_weights,
        min_length=1,
        description="positive weight of each domain, divided by the sum of all; default: the weights of 2410.10781",
    )
    seed: int = Field(default=0, ge=0, description="random seed of the interleaving")
    absent: Literal["refuse", "renormalise"] = Field(
        default="refuse",
        description="if a domain has no file: raise an error, or drop the domain and renormalise the other weights",
    )

    @model_validator(mode="after")
    def _weights_are_positive(self) -> Self:
        if bad := [name for name, weight in self.weights.items() if not 0 < weight < float("inf")]:
            raise ValueError(f"weights.{bad[0]} is {self.weights[bad[0]]}: weights must be positive and finite")
        return self


class UniformMix(Part):
    """Interleave all files at equal token rates, as in the code of 2410.10781, until all files are exhausted."""

    kind: Literal["files"] = "files"
    seed: int = Field(default=0, ge=0, description="random seed of the interleaving")


Mix = WeightedMix | UniformMix


class Selection(Part):
    """Column, mix and token limit. Null fields are not serialised: they do not affect the name of the cache folder."""

    column: Omitted[str] = Field(
        default=None, description="column of the text in rows; null: `text`, a conversation, `content`, or `prompt`"
    )
    mix: Omitted[Mix] = Field(
        default=None,
        discriminator="kind",
        description="interleaving of the files of a folder or dataset; null: files are read sequentially",
    )
    token_limit: Omitted[int] = Field(
        default=None,
        ge=2,
        description="maximum number of tokens in both shards together; the last document is truncated",
    )


class FixedToken(Part):
    """Replace the tokens at given positions of every chunk by a fixed token (2410.10781, section 5: `x[p] = token`)."""

    token_id: int = Field(default=1, ge=0, description="id of the token, below the vocabulary size")
    positions: list[int] = Field(min_length=1, description="0-based positions in a chunk, which has context + 1 tokens")

    @field_validator("positions")
    @classmethod
    def _distinct_and_not_negative(cls, positions: list[int]) -> list[int]:
        if min(positions) < 0 or len(set(positions)) < len(positions):
            raise ValueError(f"positions must be distinct and 0-based, such as [0, 1, 2]; got {positions}")
        return positions


class RandomTokens(Part):
    """Replace the tokens at 0-based positions [start, end) of every chunk by uniformly random tokens.

    A chunk has the same random tokens in every epoch.
    """

    start: int = Field(ge=0, description="first replaced position, 0-based")
    end: int = Field(ge=1, description="end of the replaced range, exclusive")

    @model_validator(mode="after")
    def _not_empty(self) -> Self:
        if self.end <= self.start:
            raise ValueError(f"end must be greater than start; got {self.start}..{self.end}")
        return self


class DataConfig(Selection):
    """Text source, tokenizer, validation split and data interventions."""

    source: str = Field(
        default="stdlib",
        min_length=1,
        description="`stdlib`, `site-packages`, `stdlib+site-packages`, a text file (.txt, .md, .jsonl, .json, .csv, "
        ".tsv or .parquet, also .gz, .zst, .bz2 or .xz), a folder of them, a "
        "directory written by `sinklab data prepare` (tokenizer, valid_fraction, text_limit_bytes, column, token_limit "
        "and mix are then ignored), `hf:NAME[:CONFIG[:SPLIT]]`, or "
        "`synthetic:NAME[:length=N,documents=N,seed=N]` with NAME bigram_backcopy or trigger_average",
    )
    tokenizer: str = Field(
        default="train:1024",
        min_length=1,
        description="Hugging Face name or path, `train:SIZE` for a byte-level BPE trained on the corpus, or `words` "
        "for a synthetic source",
    )
    valid_fraction: float = Field(
        default=0.02,
        gt=0,
        le=0.5,
        description="expected fraction of the documents that are held out for validation, at most 0.5",
    )
    text_limit_bytes: int | None = Field(
        default=None, ge=1, description="maximum number of bytes of UTF-8 text to read"
    )
    bos: bool = Field(default=False, description="begin every chunk with BOS (EOS if the tokenizer has none)")
    fixed_token: FixedToken | None = None
    random_tokens: RandomTokens | None = None
    token_budget: int | None = Field(
        default=None, ge=1, description="number of tokens of the training shard to use, from its start; null: all"
    )

    @field_validator("tokenizer")
    @classmethod
    def _size_is_possible(cls, tokenizer: str) -> str:
        trained_size(tokenizer)
        return tokenizer

    @model_validator(mode="after")
    def _parts_fit(self) -> Self:
        if (parse(self.source) is not None) != (self.tokenizer == WORDS):
            raise ValueError(
                f"source {self.source} with tokenizer {self.tokenizer}: sources synthetic:NAME "
                f"require the tokenizer {WORDS}, and other sources require another tokenizer"
            )
        if self.mix is not None and (installed_names(self.source) or parse(self.source)):
            raise ValueError(
                f"source {self.source} cannot be mixed: mix requires a folder or hub dataset (hf:NAME) with one "
                "file or subfolder per domain"
            )
        fixed = self.fixed_token.positions if self.fixed_token else ()
        drawn = range(self.random_tokens.start, self.random_tokens.end) if self.random_tokens else range(0)
        if both := [position for position in fixed if position in drawn]:
            raise ValueError(f"fixed_token and random_tokens both replace position {min(both)}: use disjoint positions")
        if self.bos and (0 in fixed or 0 in drawn):
            raise ValueError("position 0 is BOS: set bos: false, or start fixed_token and random_tokens at position 1")
        return self


MANIFEST = "data.json"
DTYPES = {"uint16": np.dtype("<u2"), "uint32": np.dtype("<u4")}


class Settings(Selection):
    """Settings of data preparation, which together with the text determine the token shards."""

    source: str
    tokenizer: str
    valid_fraction: float
    text_limit_bytes: int | None
    identity: str
    """Hash of the source (`corpora.identity`) and of the tokenizer."""


class Shard(Part):
    """Entry of a token file in data.json: file name, number of tokens and of documents, and SHA-256."""

    file: str
    tokens: int = Field(ge=1)
    documents: int = Field(ge=1)
    sha256: str


class Share(Part):
    """Number of documents and tokens of a domain (of a file in a uniform mix) in both shards together."""

    documents: int = 0
    tokens: int = 0


class Manifest(Part):
    """Contents of data.json.

    Attributes:
        dtype: data type of the ids in both shards.
        vocab_size, eos_id, bos_id: see `Tokenizer`.
        text_bytes, text_sha256: UTF-8 size and hash of all documents in order (`corpora.Fingerprint`).
        tokenizer_sha256: SHA-256 of tokenizer.json.
        train, valid: entries of the two token files.
        shares: number of documents and tokens of each domain; None without a mix.
        notes: notes on skipped rows and on files of the folder that were not read; None if there are none.
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
    shares: Omitted[dict[str, Share]] = None
    settings: Settings
    notes: Omitted[list[str]] = None


class TokenFile:
    """Flat file of token ids. It is kept open, so it may be renamed or deleted while in use.

    Args:
        tokens: expected number of ids.
        sha256: expected SHA-256 in hexadecimal.
        remedy: instruction for recreating the file, added to error messages.

    Raises:
        SinklabError: if the file is missing, cannot be read or has the wrong size.
    """

    def __init__(self, path: Path, dtype: np.dtype, tokens: int, sha256: str, remedy: str) -> None:
        self.path, self.dtype = path, dtype
        self._tokens, self._sha256, self._remedy = tokens, sha256, remedy
        with _reading(path, remedy):
            self._file = os.open(path, os.O_RDONLY)
        weakref.finalize(self, os.close, self._file)
        self._times = self._checked_times()

    def __len__(self) -> int:
        return self._tokens

    def __getitem__(self, where: slice) -> np.ndarray:
        """Read the ids of a contiguous slice, (tokens,); nothing is cached.

        Raises:
            SinklabError: if the file was truncated or cannot be read.
        """
        start, stop, step = where.indices(self._tokens)
        assert step == 1, "token ids are read contiguously"
        offset, size = start * self.dtype.itemsize, max(stop - start, 0) * self.dtype.itemsize
        content = b""
        while len(content) < size:
            with _reading(self.path, self._remedy):
                more = os.pread(self._file, size - len(content), offset + len(content))
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
        with _reading(self.path, self._remedy), open(self._file, "rb", closefd=False) as file:
            file.seek(0)
            found = hashlib.file_digest(file, "sha256").hexdigest()
        if found != self._sha256:
            raise SinklabError(f"{self.path} is corrupted: its SHA-256 differs from that in data.json. {self._remedy}")

    def check_unchanged(self) -> None:
        """Check that the size of the file is unchanged, and verify its checksum if its timestamps have changed.

        A file that was only touched, renamed or deleted passes the check. Silent disk corruption is not detected.

        Raises:
            SinklabError: if the file has been changed, or cannot be read.
        """
        times = self._checked_times()
        if times != self._times:
            self.verify()
            self._times = times

    def _checked_times(self) -> tuple[int, int]:
        """Check the file size; return the modification and status change times in ns."""
        with _reading(self.path, self._remedy):
            status = os.fstat(self._file)
        if status.st_size != (expected := self._tokens * self.dtype.itemsize):
            raise SinklabError(f"{self.path} has {status.st_size:,} bytes, expected {expected:,}. {self._remedy}")
        return status.st_mtime_ns, status.st_ctime_ns


class TokenDataset:
    """Prepared data in a directory written by `prepare`, opened for reading.

    The checksums of the token files and of tokenizer.json are verified on opening.

    Attributes:
        train, valid: token files; `train[start:stop]` reads ids as an array (uint16 or uint32).
        vocab_size, eos_id, bos_id: vocabulary size and special tokens of the tokenizer.
        fingerprint: SHA-256 of all contents of the data that affect training: text, tokenizer, split and ids.
        tokenizer_path: path of tokenizer.json.
        directory, manifest: directory of the data, and the contents of its data.json.

    Raises:
        InputError: if the directory contains no prepared data.
        SinklabError: if a file is missing, cannot be read, or has the wrong size or checksum, or data.json is damaged;
            the message names the file and the remedy.
    """

    def __init__(self, directory: Path) -> None:
        self.directory, self.manifest = directory, read_manifest(directory)
        manifest, dtype = self.manifest, DTYPES[self.manifest.dtype]
        remedy = _remedy(directory, manifest.settings.source, manifest.settings.tokenizer)
        self.vocab_size, self.eos_id, self.bos_id = manifest.vocab_size, manifest.eos_id, manifest.bos_id
        self.train, self.valid = (
            TokenFile(directory / shard.file, dtype, shard.tokens, shard.sha256, remedy)
            for shard in (manifest.train, manifest.valid)
        )
        self.train.verify()
        self.valid.verify()
        self.tokenizer_path = directory / "tokenizer.json"
        with _reading(self.tokenizer_path, remedy):
            found = sha256_of(self.tokenizer_path)
        if found != manifest.tokenizer_sha256:
            raise SinklabError(
                f"{self.tokenizer_path} is corrupted: its SHA-256 differs from that in data.json. {remedy}"
            )
        parts = manifest.model_dump(mode="json", exclude={"settings", "shares"})
        self.fingerprint = hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def is_prepared(directory: Path) -> bool:
    """Return True if `directory` contains complete prepared data (a data.json)."""
    return (directory / MANIFEST).is_file()


def dtype_for(vocab_size: int) -> Literal["uint16", "uint32"]:
    """Return the smaller of uint16 and uint32 that fits all ids below `vocab_size`."""
    return "uint16" if vocab_size <= 2**16 else "uint32"


def read_manifest(directory: Path) -> Manifest:
    """Read the data.json of a prepared directory. Raises the same errors as `TokenDataset`."""
    path, remedy = directory / MANIFEST, _remedy(directory, "SOURCE", "NAME|train:SIZE")
    with _reading(path, remedy):
        if not path.exists():
            raise InputError(
                f"{directory} contains no prepared data ({MANIFEST} is missing): "
                f"run sinklab data prepare SOURCE --tokenizer NAME --out {directory}"
            )
        content = path.read_bytes()
    try:
        return Manifest.model_validate_json(content)
    except ValidationError as error:
        raise SinklabError(f"{path} is damaged ({cause(error)}). {remedy}") from error


@contextmanager
def _reading(path: Path, remedy: str) -> Iterator[None]:
    """Convert an OSError of the `with` block to a SinklabError that names the file."""
    try:
        yield
    except FileNotFoundError as error:
        raise SinklabError(f"{path} is missing. {remedy}") from error
    except OSError as error:
        reason = f"{path} cannot be read: {error.strerror or error}. Make it readable, or: {remedy}"
        raise SinklabError(reason) from error


def _remedy(directory: Path, source: str, tokenizer: str) -> str:
    return (
        f"Delete the folder {directory} and prepare the data again: rerun the same command, or run "
        f"sinklab data prepare {source} --tokenizer {tokenizer} --out {directory} with the original options"
    )


_ORDER, _DRAWN, _DRAWN_VALID = 1, 2, 3  # random streams derived from one seed


class Loader:
    """Random access to the batches of a token shard.

    Args:
        tokens: (tokens,) integer ids, such as `TokenDataset.train`; read lazily.
        context: number of input tokens per sequence; a chunk has one more token, the last target.
        batch_size: chunks per global batch.
        seed: random seed of the chunk order and of the random tokens.
        config: settings with `bos`, `fixed_token`, `random_tokens` and, for training, `token_budget`.
        vocab_size: exclusive upper bound of the ids.
        bos_id: id of the first token of every chunk if `config.bos` is True.
        shuffle: True for training; False for validation, which ignores the token budget.

    Attributes:
        chunks: number of chunks.

    Raises:
        InputError: if the data is smaller than one chunk or than the token budget, or `fixed_token` or `random_tokens`
            uses a position outside the chunk or a token outside the vocabulary.
    """

    def __init__(
        self,
        tokens: TokenFile | np.ndarray,
        *,
        context: int,
        batch_size: int,
        seed: int,
        config: DataConfig,
        vocab_size: int,
        bos_id: int,
        shuffle: bool = True,
    ) -> None:
        fixed, drawn = config.fixed_token, config.random_tokens
        if fixed and max(fixed.positions) > context:
            raise InputError(
                f"data.fixed_token.positions has {max(fixed.positions)}, but a chunk has positions 0..{context}"
            )
        if fixed and fixed.token_id >= vocab_size:
            raise InputError(f"data.fixed_token.token_id is {fixed.token_id}, but token ids are 0..{vocab_size - 1}")
        if drawn and drawn.end > context + 1:
            raise InputError(f"data.random_tokens.end is {drawn.end}, but a chunk has positions 0..{context}")
        count, budget = len(tokens), config.token_budget if shuffle else None
        if budget is not None and budget > count:
            raise InputError(
                f"data.token_budget is {budget:,}, but the training shard has {count:,} tokens: "
                "lower the budget, add text, or raise data.token_limit or data.text_limit_bytes if set"
            )
        count = count if budget is None else budget
        stride = context if config.bos else context + 1
        self.chunks = count // stride
        if self.chunks == 0:
            raise InputError(
                f"the {'training' if shuffle else 'validation'} data has {count:,} tokens, but one chunk needs "
                f"{stride:,} (context {context}): add text, "
                + ("raise data.token_budget if set, " if shuffle else "raise data.valid_fraction, ")
                + "or reduce the context"
            )
        self.context, self.batch_size = context, batch_size
        self._tokens, self._stride, self._shuffle, self._seed = tokens, stride, shuffle, seed
        self._config, self._vocab_size, self._bos_id = config, vocab_size, bos_id
        # orders of two epochs are cached, because a batch rarely spans more
        self._order = lru_cache(maxsize=2)(
            lambda epoch: np.random.default_rng([_ORDER, self._seed, epoch]).permutation(self.chunks)
        )

    def __len__(self) -> int:
        """Number of batches per epoch, rounded up; the last batch of a validation loader may have fewer rows."""
        return -(-self.chunks // self.batch_size)

    def batch(self, index: int, rows: slice | None = None) -> "Tensor":
        """Read batch `index`, counted from 0 over all epochs.

        Args:
            index: batch index >= 0; below `len(self)` for validation.
            rows: slice of the global batch to read, such as the rows of one process; default: all rows.

        Returns:
            int64 token ids, shape (rows, context + 1): inputs are `[:, :-1]`, targets `[:, 1:]`. The last batch of a
            validation loader may have fewer rows.

        Raises:
            SinklabError: if the shard cannot be read.
        """
        assert 0 <= index < (np.inf if self._shuffle else len(self)), f"batch {index} is out of range"
        ids = np.arange(index * self.batch_size, (index + 1) * self.batch_size)
        if self._shuffle:
            ids = np.array([self._order(place // self.chunks)[place % self.chunks] for place in ids.tolist()])
        ids = ids[ids < self.chunks][rows or slice(None)]
        chunks_BT = np.empty((len(ids), self.context + 1), dtype=np.int64)
        if self._config.bos:
            chunks_BT[:, 0] = self._bos_id
        stride = self._stride
        for row_T, chunk in zip(chunks_BT, ids.tolist(), strict=True):
            row_T[-stride:] = self._tokens[chunk * stride : (chunk + 1) * stride]
        if fixed := self._config.fixed_token:
            chunks_BT[:, fixed.positions] = fixed.token_id
        if drawn := self._config.random_tokens:
            stream = _DRAWN if self._shuffle else _DRAWN_VALID
            for row_T, chunk in zip(chunks_BT, ids.tolist(), strict=True):
                generator = np.random.default_rng([stream, self._seed, chunk])
                row_T[drawn.start : drawn.end] = generator.integers(self._vocab_size, size=drawn.end - drawn.start)
        import torch  # here, so that processes that prepare data do not import it

        return torch.from_numpy(chunks_BT)


class Prefetcher:
    """Prefetches one batch in a background thread; for CUDA, with pinned memory and an asynchronous copy.

    Args:
        fetch: function that returns the batch of an index on the CPU, such as `Loader.batch`.
        device: device of the batches.
        end: number of batches; batches from this index on are not prefetched.

    Attributes:
        waited: total time that `batch` has waited for prefetched batches, in seconds.
    """

    def __init__(self, fetch: "Callable[[int], Tensor]", device: "torch.device", end: int) -> None:
        self.waited = 0.0
        self._fetch, self._device, self._end = fetch, device, end
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="batches")
        self._ahead: tuple[int, Future[Tensor]] | None = None

    def batch(self, index: int) -> "Tensor":
        """Return batch `index` on the device, and start fetching the next one, if it is below `end`.

        Raises the same errors as `fetch`.
        """
        started = time.perf_counter()
        ahead = self._ahead[1] if self._ahead and self._ahead[0] == index else self._thread.submit(self._ready, index)
        tokens = ahead.result()
        self.waited += time.perf_counter() - started
        following = index + 1
        self._ahead = (following, self._thread.submit(self._ready, following)) if following < self._end else None
        return tokens.to(self._device, non_blocking=True)

    def _ready(self, index: int) -> "Tensor":
        tokens = self._fetch(index)
        return tokens.pin_memory() if self._device.type == "cuda" else tokens
