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

Special tokens that the tokenizer prepends (BOS) precede the text and are included in T; random and repeat have none
unless requested (--bos).
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from sinklab.data.sources.corpora import documents
from sinklab.data.sources.textfiles import (
    ReadCounts,
    Render,
    expanded,
    is_plain,
    plain_conversation,
    read_documents,
    read_pieces,
    text_files,
)
from sinklab.data.spelling import Spelled
from sinklab.errors import InputError
from sinklab.models.adapter import type_text

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


Encode = Callable[[str], Sequence[int]]

CHARACTERS = 2**16  # longer documents (some have 1e8 characters) are first truncated to this length
PER_TOKEN = 16  # minimum length of a truncated document, in characters per requested token
POOL = 64  # maximum size of the pool from which draws are taken, in multiples of the requested sequences
SHARES = 5  # minimum number of draws of a text with at least 5 sequences; the verdict of a claim needs five


def natural_text(
    text: Path,
    encode: Encode,
    *,
    sequences: int,
    length: int,
    prefix: Sequence[int] = (),
    fewer: bool = False,
    render: Render = plain_conversation,
    counts: ReadCounts | None = None,
) -> list[Sequence[int]]:
    """Tokenise real text and cut it into sequences, without the prefix (`with_prefix` adds it).

    Args:
        text: text file, folder of such files, or another source of documents (data/sources/corpora.py).
        encode: function from text to token ids, without special tokens.
        sequences, length: N and T; T includes `prefix`.
        prefix: token ids that will be prepended to each sequence.
        fewer: accept fewer sequences, but at least one, if the text is too short.
        render: function (messages of a conversation, its place in the file) -> text.
        counts: counts to which the rows that are read are added.

    Returns:
        The sequences, each a slice of T - len(prefix) tokens of a result of `encode`.

    Raises:
        InputError: if the text is missing, cannot be read, is empty or malformed, or has too few sequences (the message
            states how many); or if T is not greater than the length of `prefix`.
    """
    _check_shape(length, len(prefix))
    cutter = _Cutter(encode, length - len(prefix), render, counts)
    rows = list(islice(cutter.sequences(text), sequences))
    if len(rows) < sequences and not (fewer and rows):
        found, counted = len(rows), cutter.documents and not cutter.pieces
        usable = f"of its {cutter.documents} documents" if counted else "pieces"
        less = f"lower --sequences to {found}, " if found else ""
        raise InputError(
            f"{text} gives {found} usable sequences, and {sequences} are needed: {found} {usable} have "
            f"{cutter.body} tokens of text; {less}lower --length, or use more text"
        )
    return rows


def drawn_text(
    text: Path,
    encode: Encode,
    *,
    sequences: int,
    length: int,
    draw: int,
    prefix: Sequence[int] = (),
    render: Render = plain_conversation,
    counts: ReadCounts | None = None,
) -> list[Sequence[int]]:
    """Draw random sequences from a text; different draws are disjoint.

    A draw has N sequences. If the text has fewer than 5 N sequences, a draw has a fifth of them, rounded down, but at
    least one. The other arguments and the result are those of `natural_text`.

    Args:
        draw: index of the draw, from 0; its sequences do not depend on the number of draws.

    Raises:
        InputError: if the text is missing, cannot be read, is empty or malformed, or has no sequence left for this
            draw; or if T is not greater than the length of `prefix`.
    """
    _check_shape(length, len(prefix))
    cutter = _Cutter(encode, length - len(prefix), render, counts, everything=True)
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


def with_prefix(bodies: Sequence[Sequence[int]], prefix: Sequence[int]) -> Tensor:
    """Return the bodies, sequences of equal length, each preceded by the prefix: tokens_NT, int64."""
    return torch.tensor([[*prefix, *ids] for ids in bodies])


def sizes_of(bodies: Sequence[Sequence[int]], prefix: Sequence[int]) -> Tensor | None:
    """Return the number of UTF-8 bytes of text of each token in the tensor that `with_prefix` builds: sizes_NT.

    Tokens of the prefix have size 0, and tokens that cannot be aligned with the text have size UNKNOWN
    (data/spelling.py). The result is None if a body is not a `Spelled`, which has the sizes of its tokens.
    """
    known = [body for body in bodies if isinstance(body, Spelled)]
    if len(known) < len(bodies):
        return None
    return torch.tensor([[*(0 for _ in prefix), *body.sizes] for body in known])


@dataclass
class _Cutter:
    """Cuts sequences of `body` tokens out of texts.

    Attributes:
        body: number of tokens of a sequence, without the prefix.
        everything: whether all sequences of a document are cut, not only the first; very long documents are then
            truncated. From a .txt or .md file, all sequences are always cut.
        documents: number of documents read so far, without those of .txt and .md files.
        pieces: whether a .txt or .md file was read.
    """

    encode: Encode
    body: int
    render: Render
    counts: ReadCounts | None = None
    everything: bool = False
    documents: int = 0
    pieces: bool = False

    def sequences(self, text: Path) -> Iterator[Sequence[int]]:
        """Yield the sequences of a file or another source of documents; from a folder, one from each file in turn."""
        here = expanded(str(text))
        if not here.exists():
            yield from self._of_documents(documents(str(text), render=self.render, counts=self.counts))
            return
        turns = [
            self._of_pieces(read_pieces(file))
            if is_plain(file)
            else self._of_documents(read_documents(file, self.render, self.counts))
            for file in text_files(here)
        ]
        while turns:
            for turn in list(turns):
                ids = next(turn, None)
                if ids is None:
                    turns.remove(turn)
                else:
                    yield ids

    def _of_documents(self, texts: Iterator[str]) -> Iterator[Sequence[int]]:
        for document in texts:
            self.documents += 1
            if self.everything:
                ids = self.encode(document[: max(CHARACTERS, PER_TOKEN * self.body)])
            else:
                ids = self._first(document)[: self.body]
            yield from self._cut(ids)

    def _cut(self, ids: Sequence[int]) -> Iterator[Sequence[int]]:
        for start in range(0, len(ids) - self.body + 1, self.body):
            yield ids[start : start + self.body]

    def _first(self, document: str) -> Sequence[int]:
        """Tokenise a document, or the beginning of a long document that has at least twice the needed tokens.

        The last tokens of this beginning may differ from those of the whole document.
        """
        size = max(CHARACTERS, PER_TOKEN * self.body)
        while size < len(document):
            ids = self.encode(document[:size])
            if len(ids) >= 2 * self.body:
                return ids
            size *= 4
        return self.encode(document)

    def _of_pieces(self, pieces: Iterator[tuple[str, bool]]) -> Iterator[Sequence[int]]:
        self.pieces = True
        held, enough = "", 0
        for text, ends in pieces:
            held += text
            if len(held) < enough and not ends:
                continue
            ids = self.encode(held)
            if len(ids) < self.body and not ends:
                enough = max(2 * len(held), enough)
                continue
            yield from self._cut(ids)
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


def _check_shape(length: int, prefix: int) -> None:
    if length <= prefix:
        raise InputError(
            f"--length {length}: use at least {prefix + 1}, one more than the number of special tokens ({prefix})"
        )


def token_matrix(tokens: Any, name: str = "tokens") -> Tensor:
    """Convert rows of integers to an int64 tensor; a tensor stays on its device.

    Args:
        tokens: tensor or array of any shape, or rows (lists, arrays or tensors) of equal length.
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
            raise InputError(f"{name} are {type_text(tokens)}; expected rows of integers, (sequences, length)")
        try:
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
    return tokens.long()
