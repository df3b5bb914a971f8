"""Text to token ids, fast: each word is encoded once and looked up from then on.

Nearly all words of a text have been seen before. A byte-level BPE with the GPT-2 pattern (GPT-2, GPT-NeoX, those
trained here) cuts text before it merges, so the ids of a text are those of its pieces, one after the other, as
long as the pieces end where the pattern cuts. `_PIECE` finds such places with Python's `re`. It looks only at ASCII
characters: where another one is near, it goes on to the next blank, which leaves letters of other alphabets, blanks
of other kinds and Unicode normalisation to the tokenizer. Blanks stay with what follows them, since the
pattern gives the last one to the next word.

Any other tokenizer encodes whole texts. The ids are the same either way, in every case.
"""

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from sinklab.data.packing import rank

if TYPE_CHECKING:
    from sinklab.data.tokenizers import Tokenizer

_BLANK = r"[\t-\r ]"
_ALONE = r"(?![^\0-\x7f])"  # what follows is ASCII or the end
_PIECE = re.compile(
    rf"{_BLANK}*+(?:"
    rf"'[A-Za-z]++{_ALONE}"  # 's and 'll are one piece, and 'quoted may follow a newline
    rf"|[A-Za-z]++{_ALONE}"
    rf"|[0-9]++{_ALONE}"
    rf"|(?!'[A-Za-z])[^\t-\r A-Za-z0-9\x80-\U0010ffff]++{_ALONE}"
    # To the next blank; a blank beyond ASCII before it belongs to the same run of blanks.
    rf"|[^\t-\r ]++(?:(?<=[\x85\xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000]){_BLANK}++[^\t-\r ]*+)*+"
    rf")|{_BLANK}++"
)
_REMEMBERED = 2**26  # characters of words kept: some hundred megabytes at most, then the memory starts afresh
_TOGETHER = 2048  # words

Encode = Callable[[Sequence[str]], list[np.ndarray]]
"""From texts to the ids of each, in the dtype asked for."""


@dataclass(frozen=True)
class Encoded:
    """Documents as ids.

    Attributes:
        ids: (tokens,) of all documents, each followed by EOS.
        lengths: (documents,) tokens of each, EOS included.
        ranks: (documents,) see `packing.rank`.
    """

    ids: np.ndarray
    lengths: np.ndarray
    ranks: np.ndarray


def encode_documents(texts: Sequence[str], encode: Encode, eos_id: int) -> Encoded:
    """The ids of documents with EOS after each."""
    rows = encode(texts)
    eos = np.array([eos_id], rows[0].dtype)
    ids = np.concatenate([part for row in rows for part in (row, eos)])
    return Encoded(ids, np.array([len(row) + 1 for row in rows]), np.array([rank(text) for text in texts]))


def encoder(tokenizer: "Tokenizer", dtype: np.dtype) -> Encode:
    """The fastest exact way to encode with this tokenizer."""
    description = json.loads(tokenizer.backend.to_str())
    plain_end = any(
        token["id"] == tokenizer.eos_id and token["special"] and not (token["lstrip"] or token["rstrip"])
        for token in description.get("added_tokens", ())
    )
    if plain_end and cuts_at_words(description):
        return _WordByWord(tokenizer, description, dtype)
    return lambda texts: [np.asarray(ids, dtype) for ids in tokenizer.encode_batch(texts)]


def cuts_at_words(description: dict[str, Any]) -> bool:
    """Whether a tokenizer.json is a byte-level BPE whose text may be cut at the ends of `_PIECE`.

    Tokens added to the vocabulary must not reach over such an end: runs of spaces do not.
    """
    model, cutting, normal = (description.get(key) or {} for key in ("model", "pre_tokenizer", "normalizer"))
    added = [token for token in description.get("added_tokens", ()) if not token["special"]]
    return (
        model.get("type") == "BPE"
        and not model.get("dropout")
        and cutting.get("type") == "ByteLevel"
        and cutting.get("use_regex", True)
        and not cutting.get("add_prefix_space", True)
        and normal.get("type", "NFC") == "NFC"
        and all(
            len(token["content"]) > 1
            and not token["content"].strip(" ")
            and not (token["lstrip"] or token["rstrip"] or token["single_word"])
            for token in added
        )
    )


class _WordByWord:
    """New words are encoded many at a time, EOS between them, which no word can reach over: a call has its price.

    Where a word spells a special token, these words are encoded one by one.
    """

    def __init__(self, tokenizer: "Tokenizer", description: dict[str, Any], dtype: np.dtype) -> None:
        from tokenizers import Tokenizer as Backend

        self._tokenizer, self._dtype = tokenizer, dtype
        special = {token["id"]: token["content"] for token in description["added_tokens"] if token["special"]}
        self._end = special.pop(tokenizer.eos_id)
        self._others = list(special.values())
        self._joining = Backend.from_str(json.dumps(description))
        self._joining.encode_special_tokens = False
        self._known: dict[str, bytes] = {}
        self._characters = 0

    def __call__(self, texts: Sequence[str]) -> list[np.ndarray]:
        cut = [_PIECE.findall(text) for text in texts]
        known = self._known
        if self._characters > _REMEMBERED:
            known.clear()
            self._characters = 0
        self._learn(list(set().union(*cut) - known.keys()))
        return [np.frombuffer(b"".join(map(known.__getitem__, words)), self._dtype) for words in cut]

    def _learn(self, words: list[str]) -> None:
        chunks = [words[first : first + _TOGETHER] for first in range(0, len(words), _TOGETHER)]
        joined = [self._end.join(chunk) for chunk in chunks]
        for chunk, text, ids in zip(chunks, joined, self._encode_joined(joined), strict=True):
            ends = np.flatnonzero(ids == self._tokenizer.eos_id)
            if len(ends) != len(chunk) - 1 or any(token in text for token in self._others):
                rows = [np.asarray(row, self._dtype) for row in self._tokenizer.encode_batch(chunk)]
                self._known.update(zip(chunk, (row.tobytes() for row in rows), strict=True))
                continue
            content, width = ids.tobytes(), self._dtype.itemsize
            starts = [0, *((ends + 1) * width).tolist()]
            stops = [*(ends * width).tolist(), len(content)]
            self._known.update(
                (word, content[start:stop]) for word, start, stop in zip(chunk, starts, stops, strict=True)
            )
        self._characters += sum(map(len, words))

    def _encode_joined(self, texts: list[str]) -> list[np.ndarray]:
        rows = self._joining.encode_batch_fast(texts, add_special_tokens=False)
        return [np.asarray(row.ids, self._dtype) for row in rows]
