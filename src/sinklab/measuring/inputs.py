"""Input tokens of a measurement, N sequences of T tokens, by kind of input.

natural   the first T tokens of each document that is long enough, in document order;
          from a .txt or .md file, consecutive sequences of T tokens: pieces (`read_pieces`) of a document that are too
          short are joined, and tokens that remain after the last sequence of a piece are skipped;
          from a folder, one sequence from each file in turn
drawn     all sequences of T tokens of every document (only of its beginning, if it is very long), at most
          POOL x N, shuffled and split into disjoint draws; the spread over draws estimates the uncertainty of
          a measurement on this text
random    every token drawn uniformly from the vocabulary
repeat    one random token per sequence, repeated T times

A sequence of plain text begins with the special tokens that the tokenizer prepends (BOS), which are included in T. A
conversation written by a chat template is encoded as `apply_chat_template(tokenize=True)` encodes it: its first
sequence begins with the template's own tokens, and nothing is added. Random and repeat have no special tokens unless
requested (--bos).

For bits per byte, the bytes of a token (`spelling`) are decoded from its vocabulary string and compared with the text;
sizes are UNKNOWN from the first mismatch on. Three encodings of vocabulary strings are supported:

    byte-level     one character per byte (`Ġ` is a space), as in GPT-2 and its successors
    sentencepiece  `▁` for a space and `<0x0A>` for a byte; a space added at the start of the text or after an added
                   token is removed
    added tokens   literal text

Rejected alternative: decoding tokens one by one, which gives U+FFFD (three bytes) for each token of a multi-token
character.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import accumulate, groupby, islice
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, overload

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from sinklab.data.corpora import default_text, documents
from sinklab.data.textfiles import (
    ChatText,
    ReadCounts,
    Render,
    expanded,
    is_plain,
    plain_conversation,
    read_documents,
    read_pieces,
    text_files,
)
from sinklab.errors import InputError
from sinklab.models.adapter import type_text

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


Encode = Callable[[str], Sequence[int]]
"""Function from text to token ids, without adding special tokens. Those written in the text are encoded as such."""

CHARACTERS = 2**16  # longer documents (some have 1e8 characters) are first truncated to this length
PER_TOKEN = 16  # minimum length of a truncated document, in characters per requested token
POOL = 64  # maximum size of the pool from which draws are taken, in multiples of the requested sequences
SHARES = 5  # minimum number of draws of a text with at least 5 sequences; the verdict of a claim needs five


@dataclass(frozen=True)
class Encoded:
    """Token ids of a document, or of a sequence cut from it.

    Attributes:
        prefix: special tokens at the start of every sequence of the document; may be empty.
        ids: the other token ids.
        doubled: True if a plain text begins with these special tokens itself, and the tokenizer would prepend them
            again; `prefix` has them once.
    """

    prefix: tuple[int, ...]
    ids: Sequence[int]
    doubled: bool = False

    def __len__(self) -> int:
        return len(self.prefix) + len(self.ids)


@dataclass(frozen=True)
class DocumentEncoder:
    """Encodes documents as the users of a model do: `tokenizer(text)` or `apply_chat_template(tokenize=True)`.

    Special tokens at the start of a document become its prefix. A plain text without any gets those of the tokenizer, a
    conversation written by a chat template (`ChatText`) gets none.

    Attributes:
        encode: function from text to token ids, without adding special tokens.
        special: ids that the tokenizer prepends to a plain text.
        bos_ids: ids of the BOS tokens of tokenizer and config, most of the time one; empty if the model has none.
        forced: prepend BOS to the documents that would have no prefix, conversations included.
        bare: remove the prefix of every document.
    """

    encode: Encode
    special: tuple[int, ...] = ()
    bos_ids: tuple[int, ...] = ()
    forced: bool = False
    bare: bool = False

    def __call__(self, document: str) -> Encoded:
        """Encode a document."""
        ids, plain = self.encode(document), not isinstance(document, ChatText)
        own = len(self.special) if self.special == tuple(ids[: len(self.special)]) else 0
        while own < len(ids) and ids[own] in self.bos_ids:
            own += 1
        written = tuple(ids[:own])
        if self.bare:
            return Encoded((), ids[own:])
        if written:
            return Encoded(written, ids[own:], doubled=plain and bool(self.special))
        prefix = self.special if plain else ()
        return Encoded(prefix or (self.forced_prefix if self.forced else ()), ids)

    @property
    def forced_prefix(self) -> tuple[int, ...]:
        """Special tokens that `forced` prepends; empty if the model has none."""
        return self.special or self.bos_ids[:1]


def natural_text(
    text: Path,
    encode: Callable[[str], Encoded],
    *,
    sequences: int,
    length: int,
    fewer: bool = False,
    render: Render = plain_conversation,
    counts: ReadCounts | None = None,
    column: str | None = None,
) -> list[Encoded]:
    """Tokenise real text and cut it into sequences.

    Args:
        text: text file, folder of such files, or another source of documents (data/corpora.py).
        encode: function that encodes a document, such as a `DocumentEncoder`.
        sequences, length: N and T; T includes the prefix of a sequence.
        fewer: accept fewer sequences, but at least one, if the text is too short.
        render: function (messages of a conversation, its place in the file) -> text.
        counts: counts to which the rows that are read are added.
        column: column of the text in rows; None for `KEYS` (textfiles.py).

    Returns:
        The sequences, each with T tokens. All sequences of a document begin with its prefix.

    Raises:
        InputError: if the text is missing, cannot be read, is empty or malformed, or has too few sequences (the message
            states how many); or if T is not greater than the length of a prefix.
    """
    cutter = _Cutter(encode, length, render, counts, column)
    rows = list(islice(cutter.sequences(text), sequences))
    if len(rows) < sequences and not (fewer and rows):
        found, counted = len(rows), cutter.documents and not cutter.pieces
        usable = f"of its {cutter.documents} documents" if counted else "pieces"
        longest = f", and the longest has {cutter.longest}" if counted and not found else ""
        less = f"lower --sequences to {found}, " if found else ""
        needed = "" if fewer else f", and {sequences} are needed"
        name, more = (text, "use more text") if text != default_text() else ("sinklab's text", "pass yours with --text")
        raise InputError(
            f"{name} gives {found} usable sequences{needed}: {found} {usable} have {cutter.body} tokens of text"
            f"{longest}; {less}lower --length, or {more}"
        )
    return rows


def drawn_text(
    text: Path,
    encode: Callable[[str], Encoded],
    *,
    sequences: int,
    length: int,
    draw: int,
    render: Render = plain_conversation,
    counts: ReadCounts | None = None,
    column: str | None = None,
) -> list[Encoded]:
    """Draw random sequences from a text; different draws are disjoint.

    A draw has N sequences. If the text has fewer than 5 N sequences, a draw has a fifth of them, rounded down, but at
    least one. The other arguments and the result are those of `natural_text`.

    Args:
        draw: index of the draw, from 0; its sequences do not depend on the number of draws.

    Raises:
        InputError: if the text is missing, cannot be read, is empty or malformed, or has no sequence left for this
            draw; or if T is not greater than the length of a prefix.
    """
    cutter = _Cutter(encode, length, render, counts, column, everything=True)
    pool = list(islice(cutter.sequences(text), POOL * sequences))
    if not pool:
        counted = cutter.documents and not cutter.pieces
        of = f"none of its {cutter.documents} documents has" if counted else "it does not have"
        raise InputError(f"{text} gives no sequence: {of} {cutter.body} tokens of text; use a longer text")
    each = max(1, min(sequences, len(pool) // SHARES))
    draws = len(pool) // each
    if draw >= draws:
        raise InputError(
            f"{text} gives {len(pool)} sequences of {cutter.body} tokens, enough for {draws} draws of {each}: "
            f"use a longer text or at most {draws} draws (--seeds {draws})"
        )
    order = torch.randperm(len(pool), generator=torch.Generator().manual_seed(0)).tolist()
    return [pool[index] for index in order[draw * each : (draw + 1) * each]]


def token_rows(rows: Sequence[Encoded]) -> Tensor:
    """Return sequences of equal length as a tensor: tokens_NT, int64."""
    return torch.tensor([[*row.prefix, *row.ids] for row in rows])


@dataclass
class _Cutter:
    """Cuts sequences of `length` tokens out of texts.

    Attributes:
        everything: whether all sequences of a document are cut, not only the first; very long documents are then
            truncated. From a .txt or .md file, all sequences are always cut.
        documents: number of documents read so far, without those of .txt and .md files.
        pieces: whether a .txt or .md file was read.
        longest: number of tokens of the longest of these documents, without the prefix.
        body: number of tokens of a sequence of the last document, without the prefix.
    """

    encode: Callable[[str], Encoded]
    length: int
    render: Render
    counts: ReadCounts | None = None
    column: str | None = None
    everything: bool = False
    documents: int = 0
    pieces: bool = False
    longest: int = 0
    body: int = 0

    def sequences(self, text: Path) -> Iterator[Encoded]:
        """Yield the sequences of a file or another source of documents; from a folder, one from each file in turn."""
        here = expanded(str(text))
        if not here.exists():
            texts = documents(str(text), render=self.render, counts=self.counts, column=self.column)
            yield from self._of_documents(texts)
            return
        turns = [
            self._of_pieces(read_pieces(file))
            if is_plain(file)
            else self._of_documents(read_documents(file, self.render, self.counts, self.column))
            for file in text_files(here)
        ]
        while turns:
            for turn in list(turns):
                row = next(turn, None)
                if row is None:
                    turns.remove(turn)
                else:
                    yield row

    def _of_documents(self, texts: Iterator[str]) -> Iterator[Encoded]:
        for document in texts:
            found = self._encoded(document)
            self.documents, self.longest = self.documents + 1, max(self.longest, len(found.ids))
            if self.counts is not None:
                self.counts.short += len(found) < self.length
            yield from islice(self._cut(found), None if self.everything else 1)

    def _cut(self, found: Encoded) -> Iterator[Encoded]:
        self._check(found)
        for start in range(0, len(found.ids) - self.body + 1, self.body):
            yield replace(found, ids=found.ids[start : start + self.body])

    def _check(self, found: Encoded) -> None:
        self.body, special = self.length - len(found.prefix), len(found.prefix)
        if self.body < 1:
            raise InputError(
                f"sequences of {self.length} tokens: use a length of at least {special + 1}, one more than the number "
                f"of special tokens ({special})"
            )

    def _encoded(self, document: str) -> Encoded:
        """Tokenise a document, or the beginning of a long document that has at least twice the needed tokens.

        The last tokens of this beginning may differ from those of the whole document. If all sequences of a document
        are cut, only the beginning is used.
        """
        size, kind = max(CHARACTERS, PER_TOKEN * self.length), type(document)
        while size < len(document):
            found = self.encode(kind(document[:size]))
            if self.everything or len(found) >= 2 * self.length:
                return found
            size *= 4
        return self.encode(document)

    def _of_pieces(self, pieces: Iterator[tuple[str, bool]]) -> Iterator[Encoded]:
        self.pieces = True
        held, enough = "", 0
        for text, ends in pieces:
            held += text
            if len(held) < enough and not ends:
                continue
            found = self.encode(held)
            self._check(found)
            if len(found) < self.length and not ends:
                enough = max(2 * len(held), enough)
                continue
            yield from self._cut(found)
            held = ""


def random_tokens(vocabulary: int, *, sequences: int, length: int, seed: int = 0) -> Tensor:
    """Draw tokens_NT (int64) uniformly from the ids 0 .. vocabulary - 1; the same seed gives the same tokens."""
    return torch.randint(vocabulary, (sequences, length), generator=torch.Generator().manual_seed(seed))


def repeated_tokens(vocabulary: int, *, sequences: int, length: int, seed: int = 0) -> Tensor:
    """Draw one token id per sequence and repeat it to `length`: tokens_NT; the same seed gives the same tokens."""
    return random_tokens(vocabulary, sequences=sequences, length=1, seed=seed).repeat(1, length)


def pretrained_encode(tokenizer: "PreTrainedTokenizerBase") -> Encode:
    """Return a function from text to the token ids of this tokenizer, without special tokens."""
    return lambda text: tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]  # type: ignore[return-value]


def default_prefix(tokenizer: "PreTrainedTokenizerBase") -> list[int]:
    """Return the ids of special tokens that the tokenizer prepends to a text by default, such as BOS; may be empty."""
    plain = tokenizer("text", add_special_tokens=False)["input_ids"]
    full = tokenizer("text")["input_ids"]
    for start in range(len(full) - len(plain) + 1):
        if full[start : start + len(plain)] == plain:
            return list(full[:start])
    return []


def token_matrix(tokens: Any, name: str = "tokens") -> Tensor:
    """Convert rows of integers to an int64 tensor (rows, length); a tensor stays on its device.

    Args:
        tokens: tensor, array or rows (lists, arrays or tensors) of equal length; a single row has no outer list.
        name: plural noun for the integers in error messages.

    Raises:
        InputError: if `tokens` is none of these, rows have different lengths, or numbers are not integers.
    """
    if isinstance(tokens, np.ndarray) and tokens.dtype.kind in "iubf":
        tokens = torch.from_numpy(tokens if tokens.dtype.kind == "f" else tokens.astype(np.int64))
    if not isinstance(tokens, Tensor):
        if (
            isinstance(tokens, str | bytes)
            or not isinstance(tokens, Sequence)
            or any(isinstance(x, str | bytes | dict) for x in tokens)
        ):
            texts = "; documents are passed as text=[..]" if name == "tokens" else ""
            expected = f"expected rows of integers (input_ids of a tokenizer){texts}"
            raise InputError(f"{name} are {type_text(tokens)}; {expected}")
        try:
            tokens = [tokens] if tokens and isinstance(tokens[0], int) else tokens
            lengths = {len(row) for row in tokens}
            rows = torch.tensor([list(row) for row in tokens] or [[]]) if len(lengths) < 2 else None
        except (TypeError, ValueError, RuntimeError, OverflowError) as error:
            raise InputError(f"{name} are not a matrix of integers, such as [[1, 2, 3]]: {error}") from error
        if rows is None:
            raise InputError(
                f"the rows have {min(lengths)} to {max(lengths)} entries: truncate sequences to one length, or pad "
                "them and pass attention_mask"
            )
        tokens = rows
    if tokens.numel() and (tokens.is_floating_point() or tokens.is_complex()):
        kind = str(tokens.dtype).removeprefix("torch.")
        raise InputError(f"{name} are {kind} numbers; expected integers, as returned by a tokenizer")
    return torch.atleast_2d(tokens.long())


def batch_tokens(tokens: Any) -> tuple[Any, Tensor | None]:
    """Return tokens without change, or those of batches with `input_ids`, with their attention mask.

    Args:
        tokens: as in `token_matrix`; or a batch, an example of a data set, or several of them, such as a DataLoader.
            They are padded to the longest, on the side where they are padded already (else right). Batches of a
            DataLoader may also be matrices of token ids, alone or as the only tensor of a TensorDataset.

    Raises:
        InputError: see `token_matrix`.
    """
    batches = [tokens] if isinstance(tokens, Mapping) else tokens
    if isinstance(tokens, Iterable) and not isinstance(tokens, Tensor | np.ndarray | Sequence | Mapping):
        batches = tokens = [_of_tensor_dataset(one) for one in tokens]
    if not (isinstance(batches, list | tuple) and batches) or not all(
        isinstance(one, Mapping) and "input_ids" in one for one in batches
    ):
        return tokens, None
    rows = [token_matrix(one["input_ids"]) for one in batches]
    given = [one.get("attention_mask") for one in batches]
    width = max(one.shape[-1] for one in rows)
    if all(mask is None for mask in given) and all(one.shape[-1] == width for one in rows):
        return torch.cat(rows), None
    masks = [
        torch.ones_like(one) if mask is None else token_matrix(mask, "the entries of attention_mask")
        for one, mask in zip(rows, given, strict=True)
    ]
    left = any(not one[:, :1].all() for one in masks)

    def joined(parts: list[Tensor]) -> Tensor:
        free = [width - one.shape[-1] for one in parts]
        return torch.cat([F.pad(one, (n, 0) if left else (0, n)) for one, n in zip(parts, free, strict=True)])

    return joined(rows), joined(masks)


def _of_tensor_dataset(batch: Any) -> Any:
    """Return a batch that is or contains only a matrix of token ids as a mapping; other batches are unchanged."""
    ids = batch[0] if isinstance(batch, list | tuple) and len(batch) == 1 else batch
    return {"input_ids": ids} if isinstance(ids, Tensor) and ids.ndim == 2 else batch


UNKNOWN = -1
"""Size of a token whose bytes differ from the text, and of all tokens after it."""


@dataclass(frozen=True)
class Spelled(Sequence[int]):
    """Token ids of a text, and the size of each token in bytes.

    Attributes:
        ids: token ids.
        sizes: number of UTF-8 bytes of each token, or UNKNOWN.
    """

    ids: Sequence[int]
    sizes: Sequence[int]

    def __len__(self) -> int:
        return len(self.ids)

    @overload
    def __getitem__(self, at: int) -> int: ...
    @overload
    def __getitem__(self, at: slice) -> "Spelled": ...
    def __getitem__(self, at: int | slice) -> "int | Spelled":
        return Spelled(self.ids[at], self.sizes[at]) if isinstance(at, slice) else self.ids[at]


def spelling(
    encode: Callable[[str], Sequence[int]], token: Callable[[int], str | None], added: Collection[int]
) -> Callable[[str], Spelled]:
    """Return a function from text to `Spelled`: the ids of `encode`, and the number of UTF-8 bytes of each token.

    Args:
        encode: function from text to token ids, without special tokens.
        token: function from an id to its vocabulary string; None for an unknown id, which counts as empty.
        added: ids of tokens whose strings are literal text.
    """
    pieces = any("▁" in (token(one) or "") for one in encode("a a") if one not in added)

    @cache
    def bytes_of(one: int) -> bytes:
        written = token(one) or ""
        if one in added:
            return written.encode()
        if pieces:
            is_byte = len(written) == 6 and written.startswith("<0x") and written.endswith(">")
            return bytes([int(written[3:5], 16)]) if is_byte else written.replace("▁", " ").encode()
        table = _byte_level()
        return bytes(table[char] for char in written) if all(char in table for char in written) else written.encode()

    def spelled(text: str) -> Spelled:
        ids = encode(text)
        return Spelled(ids, _sizes(text.encode("utf-8", "replace"), [(bytes_of(one), one in added) for one in ids]))

    return spelled


def _sizes(text: bytes, tokens: Sequence[tuple[bytes, bool]]) -> list[int]:
    """Return the size of each token in bytes; UNKNOWN from the first mismatch between tokens and text on.

    Args:
        tokens: bytes of each token, and whether it is an added token, before which and after which the tokenizer
            encodes separately.
    """
    sizes: list[int] = []
    for _, group in groupby(tokens, key=itemgetter(1)):
        part = [one for one, _ in group]
        found = _sizes_between(text, part)
        sizes += found
        if UNKNOWN in found:
            break
        text = text[sum(found) :]
    return sizes + [UNKNOWN] * (len(tokens) - len(sizes))


def _sizes_between(text: bytes, tokens: Sequence[bytes]) -> list[int]:
    """Return the sizes of tokens at the start of `text` that are all added tokens, or that have none among them."""
    sizes, joined = [len(one) for one in tokens], b"".join(tokens)
    if joined[:1] == b" " and _common(joined[1:], text) > _common(joined, text):
        joined, sizes[0] = joined[1:], sizes[0] - 1
    known = _common(joined, text)
    if known < len(joined):
        sizes = [size if end <= known else UNKNOWN for size, end in zip(sizes, accumulate(sizes), strict=True)]
    return sizes


def _common(one: bytes, other: bytes) -> int:
    """Return the length of the longest common prefix of two byte strings."""
    differ = (place for place, (a, b) in enumerate(zip(one, other, strict=False)) if a != b)
    return next(differ, min(len(one), len(other)))


@cache
def _byte_level() -> dict[str, int]:
    """Map byte-level characters to bytes: printable Latin-1 is unchanged, the other bytes use U+0100 and above."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + n): byte for n, byte in enumerate(others)}
