"""Preparation of token shards from text: tokenize, split, write the shards and the manifest.

The SHA-256 of a document decides whether it is held out for validation. The split is therefore independent of the order
and number of documents, and duplicates are in the same split. If a split would be empty, one document is moved into it.
EOS is appended to every document.

Files are written to the subfolder `partial` of the output folder and moved up when complete; data.json is written last.
A second process waits for the lock and then opens the finished data. After an interruption, the next call resumes after
the last finished part (`building.py`) and writes the same bytes.
"""

import hashlib
import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from sinklab.data.building import JOURNAL, Builder
from sinklab.data.config import DataConfig
from sinklab.data.shards import MANIFEST, Manifest, Settings, TokenDataset, is_prepared, read_manifest
from sinklab.data.sources.corpora import identity
from sinklab.data.sources.textfiles import expanded, notes_on_folder
from sinklab.data.texts import RequestedText, StageProgress, tokenizer_of
from sinklab.data.tokenizers import trained_size
from sinklab.errors import InputError, SinklabError
from sinklab.files import cache_folder, is_at, is_full, sha256_of, write_json, write_text

Counted = Callable[[int], None]
"""Callback that receives the number of tokens written to the shards so far."""

LOCK = "prepare.lock"
FILES = ("train.bin", "valid.bin", "tokenizer.json", "tokenizer_config.json")
PARTIAL, SETTINGS = "partial", "settings.json"


def settings_of(source: str, tokenizer: str, **selection: Any) -> Settings:
    """Build the settings of data preparation.

    Args:
        source, tokenizer: as in `DataConfig`.
        selection: `valid_fraction`, `text_limit_bytes`, `mix` and `token_limit`, with the defaults of `DataConfig`.

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
        config: data section of the recipe; tokenizer, split, mix and limits are ignored if `source` is prepared data.
        cache: cache folder; default: SINKLAB_CACHE, or ~/.cache/sinklab.
        progress: see `prepare`.

    Raises:
        InputError, SinklabError: see `prepare` and `TokenDataset`.
    """
    folder = expanded(config.source)
    if is_prepared(folder):
        return TokenDataset(folder)
    settings = _settings(config)
    return prepare(settings, _in_cache(settings, cache), progress)


def find_prepared(config: DataConfig) -> TokenDataset | None:
    """Return the opened token shards of a recipe's data if they are already prepared, else None; nothing is written.

    Args:
        config: see `prepared`.

    Raises:
        InputError, SinklabError: see `TokenDataset`; InputError also if the source does not exist or cannot be read.
    """
    folder = expanded(config.source)
    if not is_prepared(folder):
        folder = _in_cache(_settings(config))
    return TokenDataset(folder) if is_prepared(folder) else None


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
