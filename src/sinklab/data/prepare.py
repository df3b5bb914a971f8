"""Preparation of token shards from text: tokenize, pack, split; the manifest is written last.

Which documents are kept for validation is decided by the SHA-256 of each text: neither the order of the documents
nor how many there are matters, and copies of a text fall on the same side. At least one document is on each side.
Every document is followed by EOS.

Files grow in a folder `partial` inside the target, are moved up when they are whole, and data.json comes last; a lock
keeps a second process waiting, which then finds the work done. A process killed anywhere leaves no data.json, and the
next one goes on from the last finished part (`building.py`) to the same bytes.
"""

import hashlib
import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from sinklab.data.building import FILE as JOURNAL
from sinklab.data.building import Builder
from sinklab.data.config import DataConfig, Mix
from sinklab.data.shards import MANIFEST, Manifest, Settings, TokenDataset, is_prepared
from sinklab.data.sources.corpora import identity
from sinklab.data.texts import RequestedText, StageProgress, tokenizer_of
from sinklab.data.tokenizers import trained_size
from sinklab.errors import InputError, SinklabError
from sinklab.files import cache_folder, is_at, is_full, sha256_of, write_json, write_text

Counted = Callable[[int], None]
"""Called with the number of tokens that stand in the shards so far."""

LOCK = "prepare.lock"
FILES = ("train.bin", "valid.bin", "tokenizer.json", "tokenizer_config.json")
PARTIAL, ASKED = "partial", "settings.json"


def prepare(
    source: str,
    tokenizer: str,
    out: Path,
    *,
    valid_fraction: float = 0.02,
    text_limit_bytes: int | None = None,
    mix: Mix | None = None,
    token_limit: int | None = None,
    progress: StageProgress | None = None,
    counted: Counted | None = None,
) -> TokenDataset:
    """Write the token shards of a source into `out`; a finished `out` with the same settings is opened as it is.

    Args:
        source, tokenizer, valid_fraction, text_limit_bytes, mix, token_limit: as in `DataConfig`.
        out: a folder; what else lies in it is left alone.
        progress, counted: see `StageProgress` and `Counted`.

    Raises:
        InputError: the source or tokenizer cannot be used, the text is a single document, or `out` holds data made
            with other settings or files that no preparation has written; a number is out of range.
        SinklabError: the disk is full or not writable; what was finished is kept, and the same call goes on from
            there.
    """
    settings = settings_of(
        source,
        tokenizer,
        valid_fraction=valid_fraction,
        text_limit_bytes=text_limit_bytes,
        mix=mix,
        token_limit=token_limit,
    )
    return prepare_settings(settings, out, progress, counted)


def settings_of(
    source: str,
    tokenizer: str,
    *,
    valid_fraction: float = 0.02,
    text_limit_bytes: int | None = None,
    mix: Mix | None = None,
    token_limit: int | None = None,
) -> Settings:
    """What is to be prepared, once it is known to be possible.

    Raises:
        InputError: a number is out of range, or there is no such source.
    """
    trained_size(tokenizer)
    if not 0 < valid_fraction <= 0.5:
        raise InputError(f"valid_fraction is {valid_fraction}: it must be greater than 0 and at most 0.5")
    if text_limit_bytes is not None and text_limit_bytes < 1:
        raise InputError(f"text_limit_bytes is {text_limit_bytes}: it must be at least 1, or left out")
    if token_limit is not None and token_limit < 2:
        raise InputError(f"token_limit is {token_limit}: it must be at least 2, or left out")
    return Settings(
        source=source,
        tokenizer=tokenizer,
        valid_fraction=valid_fraction,
        text_limit_bytes=text_limit_bytes,
        mix=mix,
        token_limit=token_limit,
        identity=_identity(source, tokenizer),
    )


def prepared(config: DataConfig, cache: Path | None = None, progress: StageProgress | None = None) -> TokenDataset:
    """The data of a recipe: opened where it is prepared, otherwise prepared once and kept in the cache.

    Args:
        config: where `source` is a prepared directory, its tokenizer, split, mix and limits are those it was made
            with.
        cache: a folder; SINKLAB_CACHE, or ~/.cache/sinklab, unless given.
        progress: as `prepare`.

    Raises:
        InputError, SinklabError: as `prepare` and `TokenDataset.open`.
    """
    folder = Path(config.source).expanduser()
    if is_prepared(folder):
        return TokenDataset.open(folder)
    settings = _settings(config)
    return prepare_settings(settings, _in_cache(settings, cache), progress)


def find_prepared(config: DataConfig, cache: Path | None = None) -> TokenDataset | None:
    """The data of a recipe where it is prepared already, else None; nothing is written.

    Args:
        config, cache: as `prepared`.

    Raises:
        InputError, SinklabError: as `TokenDataset.open`, and where there is no such source.
    """
    folder = Path(config.source).expanduser()
    if not is_prepared(folder):
        folder = _in_cache(_settings(config), cache)
    return TokenDataset.open(folder) if is_prepared(folder) else None


def _settings(config: DataConfig) -> Settings:
    return Settings(
        source=config.source,
        tokenizer=config.tokenizer,
        valid_fraction=config.valid_fraction,
        text_limit_bytes=config.text_limit_bytes,
        mix=config.mix,
        token_limit=config.token_limit,
        identity=_identity(config.source, config.tokenizer),
    )


def _in_cache(settings: Settings, cache: Path | None) -> Path:
    key = hashlib.sha256(settings.model_dump_json().encode()).hexdigest()[:20]
    return (cache or cache_folder()) / "data" / key


def _remedy(error: OSError) -> str:
    return "What was finished is kept: free some space, or choose" if is_full(error) else "Choose"


def prepare_settings(
    settings: Settings, out: Path, progress: StageProgress | None = None, counted: Counted | None = None
) -> TokenDataset:
    """`prepare`, of settings that `settings_of` has made."""
    try:
        if not is_prepared(out):
            if not (out / LOCK).exists():  # before anything is written; again when it is ours alone
                _check_folder(out)
            with _locked(out):
                if not is_prepared(out):
                    _build(settings, out, progress or (lambda *_: None), counted or (lambda _: None))
    except OSError as error:
        raise SinklabError(
            f"cannot prepare data in {out}: {error.strerror or error}. {_remedy(error)} another folder with --out "
            "or SINKLAB_CACHE, and run the same command again."
        ) from error
    dataset = TokenDataset.open(out)
    if dataset.manifest.settings != settings:
        raise InputError(
            f"{out} holds data prepared with other settings or from text that has changed since: "
            "choose another --out, or delete that folder first"
        )
    return dataset


def _check_folder(out: Path) -> None:
    """Refuse a place that holds something else under the names of what is written: it would be replaced."""
    if out.exists() and not out.is_dir():
        raise InputError(f"{out} is a file: choose another --out")
    begun = out / PARTIAL
    if (begun / ASKED).is_file():
        return  # by us
    found = [out / name for name in FILES if (out / name).exists()]
    if begun.exists() and not (begun.is_dir() and all(path.name.startswith(f".{ASKED}") for path in begun.iterdir())):
        found.append(begun)
    if found:
        raise InputError(
            f"{found[0]} is there already and is not of a preparation, so it stays as it is: choose another --out, or "
            "move it away"
        )


def _build(settings: Settings, out: Path, progress: StageProgress, counted: Counted) -> None:
    _check_folder(out)
    partial = out / PARTIAL
    asked = partial / ASKED
    wanted = settings.model_dump_json()
    if not asked.is_file() or asked.read_text(encoding="utf-8") != wanted:
        shutil.rmtree(partial, ignore_errors=True)  # begun with other settings, or the text has changed since
        partial.mkdir()
    try:
        if not asked.is_file():
            write_text(asked, wanted)
        manifest = _write_shards(settings, partial, progress, counted)
        for name in FILES:
            (partial / name).replace(out / name)
        unset = {"shares"} if manifest.shares is None else None
        write_json(out / MANIFEST, manifest.model_dump(mode="json", exclude=unset))
    except BaseException:
        if not (partial / JOURNAL).is_file() or not (partial / JOURNAL).stat().st_size:
            shutil.rmtree(partial, ignore_errors=True)  # nothing is finished
        raise
    shutil.rmtree(partial, ignore_errors=True)


def _write_shards(settings: Settings, folder: Path, progress: StageProgress, counted: Counted) -> Manifest:
    text = RequestedText(settings)
    tokenizer = tokenizer_of(settings, text, folder, progress)
    builder = Builder(folder, tokenizer, settings.valid_fraction, settings.token_limit)

    def report(done: int, tokens: int) -> None:
        progress("tokens", done, text.total_bytes)
        counted(tokens)

    with builder.build(text.named_documents(tokenizer), report) as writer:
        if writer.documents < 2:
            (folder / JOURNAL).unlink(missing_ok=True)
            raise InputError(
                f"source {settings.source} is a single document, which cannot be split into training and validation: "
                "give more text, or several files or rows"
            )
        train, valid = writer.finish()
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
    )


def _identity(source: str, tokenizer: str) -> str:
    path = Path(tokenizer).expanduser()
    path = path / "tokenizer.json" if path.is_dir() else path
    tokens = sha256_of(path) if path.is_file() else tokenizer
    if is_prepared(Path(source).expanduser()):
        raise InputError(f"source {source} is prepared already: use it as it is, or give the text it was made from")
    return hashlib.sha256(json.dumps([identity(source), tokens]).encode()).hexdigest()


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Hold `folder` alone. The lock goes with the process, however it ends."""
    import fcntl

    while True:
        is_new = not folder.exists()
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / LOCK).open("a") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            if not is_at(file, folder / LOCK):
                continue  # who held it has failed and removed the folder
            try:
                yield
            except BaseException:
                if is_new and [path.name for path in folder.iterdir()] == [LOCK]:
                    shutil.rmtree(folder, ignore_errors=True)  # nothing has come of it
                raise
            return
