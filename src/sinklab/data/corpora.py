"""Documents of a source, fingerprints of texts, and corpora of the Python installation.

`Fingerprint` hashes a text: all documents in order. `identity` hashes a source: files by path, size and modification
time (or by contents), corpora of the Python installation by file names, sizes and Python version, others by name.

The two corpora of the Python installation are `stdlib` and `site-packages`. `stdlib` has the source files of the
standard library (with tests, if installed), the language reference in `pydoc`, and .rst and .txt files. `site-packages`
has source files, type stubs, .md, .rst and .txt files of the installed packages. Files are ordered by the SHA-256 of
their relative paths, so the order is the same on every machine, and a size limit selects a pseudorandom sample.
Duplicates, empty or unreadable files and files that are not UTF-8 are skipped.

Streaming of datasets from the Hugging Face hub (extra `data`).

Synthetic tasks in which heads can use a sink as a no-op.

Sources are named `synthetic:NAME[:KEY=VALUE,...]`, with the keys `length` (tokens per document, EOS included; default
64), `documents` (16384) and `seed` (0). With `length` equal to `model.context` and `data.bos: true`, every document
fills one chunk. The tokenizer `words` has one token per word: EOS 0, BOS 1, then triggers t0, t1, .. and symbols s0,
s1, ..

bigram_backcopy (2410.13835): a Markov chain over symbols in which the token after a trigger repeats the token before
the trigger. A head that copies at triggers is a no-op at other tokens, where it attends to BOS.

trigger_average (2603.11487): symbols are uniform. A symbol has a trigger with probability 0.2, unless it is the first
or follows a trigger (t5 is symbol 5 with a trigger, s5 without). The symbol after a trigger is that of a token
drawn uniformly from those before the trigger. The distribution of the next symbol equals the target of 2603.11487: the
average of the preceding one-hot vectors at a trigger, a constant elsewhere. There, a model regresses vectors; here,
next-token prediction allows the training loop, loss and metric of other sources.

The trigger is a property of a symbol, not a separate token: a token without a symbol would not contribute to the
average, so heads could use it as a sink instead of BOS.
"""

import hashlib
import importlib
import json
import os
import platform
import sys
import sysconfig
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from sinklab.data.textfiles import (
    ReadCounts,
    Render,
    expanded,
    is_compressed,
    kind_of,
    plain_conversation,
    read_documents,
    text_files,
    texts_of_rows,
)
from sinklab.errors import InputError, require_extra
from sinklab.files import sha256_of

if TYPE_CHECKING:
    from sinklab.data.tokenizers import Tokenizer

SYNTHETIC = "synthetic:"
WORDS = "words"
VERSION = 1  # version of the generators; increase it if the text of a source changes


@dataclass(frozen=True)
class Task:
    """Vocabulary and generator of a synthetic task.

    Attributes:
        triggers, symbols: number of trigger and symbol words.
        draw: function (generator, number of documents, tokens per document) -> indices into `words`, shape (documents,
            tokens).
    """

    triggers: int
    symbols: int
    draw: Callable[[np.random.Generator, int, int], np.ndarray]

    @property
    def words(self) -> list[str]:
        """Words of the vocabulary without EOS and BOS: triggers, then symbols."""
        return [f"t{i}" for i in range(self.triggers)] + [f"s{i}" for i in range(self.symbols)]


def _bigram_backcopy(random: np.random.Generator, documents: int, tokens: int) -> np.ndarray:
    """Sample word indices of a Markov chain.

    After a symbol, the next word is a trigger with probability 0.2, else a symbol from a distribution drawn once per
    symbol from Dirichlet(0.3). After a trigger, it is the word before the trigger.
    """
    symbols = random.dirichlet(np.full(64, 0.3), size=64) * 0.8
    chain = np.concatenate((np.full((64, 3), 0.2 / 3), symbols), axis=1).cumsum(1)
    words = np.empty((documents, tokens), dtype=np.int64)
    words[:, 0] = 3 + random.integers(64, size=documents)
    for t in range(1, tokens):
        before = words[:, t - 1]
        drawn = (chain[np.maximum(before - 3, 0)] < random.random((documents, 1))).sum(1)
        words[:, t] = np.where(before < 3, words[:, max(t - 2, 0)], np.minimum(drawn, 66))
    return words


def _trigger_average(random: np.random.Generator, documents: int, tokens: int) -> np.ndarray:
    """Sample word indices; each symbol has a trigger with probability 0.2, unless it follows a trigger or is first."""
    symbols = random.integers(64, size=(documents, tokens))
    triggers = random.random((documents, tokens)) < 0.2
    triggers[:, 0] = False
    rows = np.arange(documents)
    for t in range(2, tokens):
        triggered = triggers[:, t - 1]
        drawn = symbols[rows, random.integers(t - 1, size=documents)]
        symbols[:, t] = np.where(triggered, drawn, symbols[:, t])
        triggers[:, t] &= ~triggered
    return np.where(triggers, symbols, 64 + symbols)


TASKS = {
    "bigram_backcopy": Task(triggers=3, symbols=64, draw=_bigram_backcopy),
    "trigger_average": Task(triggers=64, symbols=64, draw=_trigger_average),
}


@dataclass(frozen=True)
class SyntheticTask:
    """Parameters of a synthetic source, parsed from its name.

    Attributes:
        name: key in `TASKS`.
        length: tokens per document, EOS included.
        documents: number of documents.
        seed: random seed of the generator.
    """

    name: str
    length: int = 64
    documents: int = 16384
    seed: int = 0

    @property
    def task(self) -> Task:
        return TASKS[self.name]


def parse(source: str) -> SyntheticTask | None:
    """Parse the name of a synthetic source; return None for any other source.

    Raises:
        InputError: if the task or a key is unknown, or a value is not a whole number or is too small.
    """
    if not source.startswith(SYNTHETIC):
        return None
    name, _, options = source.removeprefix(SYNTHETIC).partition(":")
    if name not in TASKS:
        raise InputError(f"source {source}: unknown task {name!r}; choose from {', '.join(TASKS)}")
    values: dict[str, int] = {}
    least = {"length": 4, "documents": 2, "seed": 0}
    for option in filter(None, options.split(",")):
        key, _, value = option.partition("=")
        if key not in least or not value.isdecimal() or int(value) < least[key]:
            wanted = ", ".join(f"{key}=N with N at least {low}" for key, low in least.items())
            raise InputError(f"source {source}: invalid option {option!r}: use {wanted}")
        values[key] = int(value)
    return SyntheticTask(name, **values)


def synthetic_documents(request: SyntheticTask) -> Iterator[str]:
    """Yield the documents of a task as space-separated words; `length` includes the EOS that `prepare` adds."""
    words = np.array(request.task.words)
    random = np.random.default_rng([VERSION, request.seed])
    for row in request.task.draw(random, request.documents, request.length - 1):
        yield " ".join(words[row])


def word_tokenizer(request: SyntheticTask) -> "Tokenizer":
    """Build the word tokenizer of a synthetic task: EOS 0, BOS 1, then the words."""
    from tokenizers import Tokenizer as Backend
    from tokenizers import models, pre_tokenizers

    from sinklab.data.tokenizers import BOS, EOS, Tokenizer

    ids = {word: i for i, word in enumerate([EOS, BOS, *request.task.words])}
    backend = Backend(models.WordLevel(ids, unk_token=EOS))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.add_special_tokens([EOS, BOS])
    backend.encode_special_tokens = True
    return Tokenizer(backend, WORDS, eos_id=0, bos_id=1)


HUB = "hf:"
_TEXTS = (
    ".jsonl",
    ".jsonl.gz",
    ".jsonl.zst",
    ".txt",
    ".csv",
    ".parquet",
)  # text formats that `datasets` can read file by file


def hub_documents(
    source: str,
    render: Render = plain_conversation,
    files: list[str] | None = None,
    counts: ReadCounts | None = None,
    column: str | None = None,
) -> Iterator[str]:
    """Stream the documents of `hf:NAME[:CONFIG[:SPLIT]]`, one per non-empty row; the default split is `train`.

    NAME may also be a local folder that `datasets` can read. Remote code is never executed.

    Args:
        render: function that renders a conversation as text.
        files: files of the dataset to read instead of the split; default: all files of the split.
        counts: counts to which the rows are added.
        column: column of the text; None for `KEYS`.

    Raises:
        InputError: if the source is malformed, `datasets` is not installed, the dataset cannot be fetched, a message
            is malformed, or no row has text.
    """
    name, config, split = _parts(source)
    require_extra("data", ("datasets",), f"source {source}")
    datasets: Any = importlib.import_module("datasets")
    selected: dict[str, Any] = {"split": split} if files is None else {"split": "train", "data_files": files}
    try:
        rows = enumerate(datasets.load_dataset(name, config, streaming=True, **selected), start=1)
        placed = ((row, f"{source}, row {number}") for number, row in rows)
        yield from texts_of_rows(placed, source, render, counts, column)
    except InputError:
        raise
    except Exception as error:  # network, hub and format errors share no base class
        raise InputError(
            f"cannot read {source} (name {name}, config {config or 'default'}, split {split}): {error}. "
            "Check the name, the config, the split and the connection."
        ) from error


def hub_files(source: str) -> list[str]:
    """List the text files (`_TEXTS`) of a dataset on the hub or in a local folder, sorted.

    If any of these files is in a folder with the name of the split, only files in such folders are listed.

    Raises:
        InputError: if the source is malformed, the dataset cannot be listed, or it has no such file.
    """
    name, _, split = _parts(source)
    folder = expanded(name)
    try:
        if folder.is_dir():
            found = [path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()]
        else:
            from huggingface_hub import HfApi

            found = HfApi().list_repo_files(name, repo_type="dataset")
    except Exception as error:  # network, hub and name errors share no base class
        raise InputError(
            f"cannot list the files of {source} ({type(error).__name__}): {error}. Check the name and the connection."
        ) from error
    texts = sorted(file for file in found if file.lower().endswith(_TEXTS))
    files = [file for file in texts if split in file.split("/")[:-1]] or texts
    if not files:
        raise InputError(f"source {source} has no files that can be mixed ({', '.join(_TEXTS)})")
    return files


def _parts(source: str) -> tuple[str, str | None, str]:
    parts = source.removeprefix(HUB).split(":")
    if not parts[0] or len(parts) > 3:
        raise InputError(f"invalid source {source!r}: use hf:NAME, hf:NAME:CONFIG or hf:NAME:CONFIG:SPLIT")
    name, config, split = (*parts, "", "")[:3]
    return name, config or None, split or "train"


CORPORA = ("stdlib", "site-packages")
_SUFFIXES = {"stdlib": (".py", ".rst", ".txt"), "site-packages": (".py", ".pyi", ".md", ".rst", ".txt")}
_FOLDERS = {"stdlib": ("stdlib",), "site-packages": ("purelib", "platlib")}
_LEFT_OUT = {"site-packages", "dist-packages", "__pycache__"}
_TOPICS = Path("pydoc_data", "topics.py")


class Fingerprint:
    """Incremental SHA-256 of documents and their lengths, in order; document boundaries affect the hash.

    Attributes:
        documents, text_bytes: number of documents and bytes added so far.
    """

    def __init__(self) -> None:
        self._hash = hashlib.sha256()
        self.text_bytes = 0
        self.documents = 0

    def add(self, document: str) -> None:
        """Add the next document."""
        encoded = document.encode()
        self._hash.update(len(encoded).to_bytes(8, "little"))
        self._hash.update(encoded)
        self.text_bytes += len(encoded)
        self.documents += 1

    def hexdigest(self) -> str:
        """Return the SHA-256 of the documents so far in hexadecimal."""
        return self._hash.hexdigest()

    def copy(self) -> Self:
        """Return an independent copy."""
        other = type(self)()
        other._hash, other.text_bytes, other.documents = self._hash.copy(), self.text_bytes, self.documents
        return other


DEFAULT_TEXT_NOTE = (
    "the text is that of sinklab, 128 short texts in 11 languages and code: pass yours with --text (text=)"
)


def default_text() -> Path:
    """Return the path of the text that is measured if none is given.

    It has 128 documents of 420 to 620 bytes, written for sinklab: prose in English and ten other languages, dialogues
    and code.
    """
    return Path(str(resources.files("sinklab") / "data" / "default_text.jsonl"))


def documents(
    source: str,
    *,
    render: Render = plain_conversation,
    counts: ReadCounts | None = None,
    column: str | None = None,
) -> Iterator[str]:
    """Yield the non-empty documents of a source in a fixed order.

    Args:
        source: see `DataConfig.source`, except a directory of prepared data.
        render: function that renders a conversation as text.
        counts: counts to which the rows of files and datasets are added.
        column: column of the text in the rows of files and datasets; None for `KEYS` (textfiles.py).

    Raises:
        InputError: if the source is missing, empty or malformed; the message names the source or file, and for a
            malformed row also the line.
    """
    if names := installed_names(source):
        texts = installed_documents(names)
    elif source.startswith(HUB):
        texts = hub_documents(source, render, counts=counts, column=column)
    elif request := parse(source):
        texts = synthetic_documents(request)
    else:
        files = text_files(expanded(source))
        texts = (text for path in files for text in read_documents(path, render, counts, column))
    found = False
    for text in texts:
        found = True
        yield text
    if not found:
        raise InputError(f"source {source} contains no text: all its documents are empty")


def total_bytes(source: str) -> int | None:
    """Estimate the amount of text of a source in bytes from file sizes; None if it is unknown.

    It is unknown for hub and synthetic sources and for compressed files.

    Raises:
        InputError: if the source does not exist or has no files.
    """
    if names := installed_names(source):
        return sum(entry.size for entry in entries(names))
    if source.startswith(HUB) or parse(source):
        return None
    return known_sum([size_of(path) for path in text_files(expanded(source))])


def size_of(path: Path) -> int | None:
    """Return the size of a file in bytes; None for a compressed file, which has an unknown amount of text."""
    return None if is_compressed(path) or kind_of(path) == ".parquet" else path.stat().st_size


def known_sum(values: list[int | None]) -> int | None:
    """Return the sum of the values; None if any value is None."""
    known = [value for value in values if value is not None]
    return sum(known) if len(known) == len(values) else None


def identity(source: str, contents: bool = False) -> str:
    """Return the SHA-256 of a source in hexadecimal, which changes if the text may have changed, with two exceptions.

    For `hf:` sources only the name is hashed, so changes on the hub are not detected. For corpora of the Python
    installation, the Python version and the names and sizes of the documents are hashed, so a change that keeps the
    sizes is not detected.

    Args:
        contents: hash the contents of files, so that a copy of the files has the same hash. Default: hash their paths,
            sizes and modification times, which is fast for a large corpus. Other sources ignore this argument.

    Raises:
        InputError: if the source does not exist, or a file cannot be read.
    """
    if names := installed_names(source):
        listing = [[entry.name, entry.size] for entry in entries(names)]
        state: list[object] = [source, platform.python_version(), listing]
    elif source.startswith(HUB):
        state = [source]
    elif request := parse(source):
        state = [source, VERSION, repr(request)]
    else:
        files = text_files(expanded(source))
        try:
            state = [
                [p.suffix.lower(), sha256_of(p)]
                if contents
                else [str(p.resolve()), p.stat().st_size, p.stat().st_mtime_ns]
                for p in files
            ]
        except OSError as error:
            raise InputError(f"cannot read {error.filename}: {error.strerror}") from error
    return hashlib.sha256(json.dumps(state).encode()).hexdigest()


def cut(documents: Iterable[tuple[str, str]], limit_bytes: int) -> Iterator[tuple[str, str]]:
    """Yield (domain, text) pairs up to `limit_bytes` of UTF-8 text in total; the last text is truncated."""
    left = limit_bytes
    for name, text in documents:
        encoded = text.encode()
        if len(encoded) < left:
            left -= len(encoded)
            yield name, text
            continue
        if rest := encoded[:left].decode(errors="ignore"):
            yield name, rest
        return


@dataclass(frozen=True)
class InstalledText:
    """Document of a corpus of the Python installation: a file, or a topic of the language reference in `pydoc`.

    Attributes:
        name: corpus and relative path; for a topic, followed by the name of the topic.
        path: the file; for a topic, the file that contains all topics.
        size: size of the document in bytes.
        text: text of a topic; None for a file.
    """

    name: str
    path: Path
    size: int
    text: str | None = None


def installed_names(source: str) -> list[str] | None:
    """Split a source such as `stdlib+site-packages` into names of `CORPORA`; return None for any other source."""
    names = source.split("+")
    return names if all(name in CORPORA for name in names) else None


def entries(names: list[str]) -> list[InstalledText]:
    """List all documents of the named corpora, in a fixed order.

    Raises:
        InputError: if the Python installation has no such files, for example because it is zipped.
    """
    found = {entry.name: entry for name in names for entry in _below(name)}
    if not found:
        raise InputError(
            f"the Python installation in {sys.prefix} has no files of {'+'.join(names)}: use another source, such as "
            "a text file"
        )
    return sorted(found.values(), key=lambda entry: hashlib.sha256(entry.name.encode()).digest())


def installed_documents(names: list[str]) -> Iterator[str]:
    """Yield the texts of the named corpora; duplicates and files that are empty or not readable UTF-8 are skipped."""
    seen: set[bytes] = set()
    for entry in entries(names):
        try:
            text = entry.path.read_text(encoding="utf-8") if entry.text is None else entry.text
        except (UnicodeDecodeError, OSError):
            continue
        digest = hashlib.blake2b(text.encode(), digest_size=16).digest()
        if text.strip() and digest not in seen:
            seen.add(digest)
            yield text


def _below(corpus: str) -> Iterator[InstalledText]:
    for folder in sorted({sysconfig.get_path(name) for name in _FOLDERS[corpus]}):
        for parent, folders, files in os.walk(folder):
            folders[:] = [name for name in folders if name not in _LEFT_OUT]
            for file in files:
                path = Path(parent, file)
                inside = path.relative_to(folder)
                if corpus == "stdlib" and inside == _TOPICS:
                    from pydoc_data.topics import topics

                    for name, text in topics.items():
                        yield InstalledText(f"stdlib/{inside.as_posix()}/{name}", path, len(text.encode()), text)
                elif path.suffix in _SUFFIXES[corpus] and path.is_file():
                    yield InstalledText(f"{corpus}/{inside.as_posix()}", path, path.stat().st_size)
