"""Text to token ids, exactly those of `tokenizers`, which defines them, and fast.

`fastokens` reads the same tokenizer.json of a BPE tokenizer and encodes some fifty times faster. It is used where it is
installed, can read the tokenizer, and gives the ids of `tokenizers` for all of `PROBES`. Both encode in threads on all
cores; RAYON_NUM_THREADS sets another number.

`tokenizers` needs a hundred times the size of a text while it encodes it. A very long document is therefore encoded in
pieces, cut between two words where that is seen to change no token.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Backend

EncodeBatch = Callable[[Sequence[str]], tuple[np.ndarray, np.ndarray]]
"""From texts to (tokens,) the ids of all of them one after the other, and (texts,) how many each has."""

PIECE = 2**19  # characters; what is no longer is encoded whole
AT_ONCE = 8  # pieces
AROUND = 2**10  # characters on both sides of a cut that show whether it changes a token
TRIES = 32  # of cuts that change one

PROBES = (
    "",
    " ",
    "The attention sink, it's the first token's. We'll say: isn't it so? They'd DON'T 'LL 'twas 's's",
    "a  b   c    d     e\n\n\n  f\t\tg \n h\r\n\r\ni \x0b\x0c\x1c\x85\u2028 \xa0\u3000\u2003 j   ",
    "def f(x):\n        return x[0] + 1e-5  # 3.14159 1000000 12345 x1y2 __init__ <!-- --> {}()\\//::==>>",
    "é e\u0301 ﬁ ² ½ İ ı ß ſ Å \u0301 \u1100\u1161 가 한국어",
    "日本語のテキスト 中文 Русский ελληνικά עברית العربية हिन्दी ไทย ٣",
    "😀👩\u200d👩\u200d👧 🇩🇪 \u200b\ufeff\ufffd\x00\x7f\U0010ffff",
    "<|endoftext|><|padding|><s></s><unk>[UNK][CLS] <|im_start|> ▁ ▁▁a Ġ Ċ",
    "a" * 300 + " " * 100 + "!" * 100 + "\n" * 50 + "ab" * 100,
)


def encoder(backend: "Backend") -> EncodeBatch:
    """The fastest exact way to encode; nothing is added, and text that spells a special token stays text."""

    def whole(texts: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
        rows = [row.ids for row in backend.encode_batch_fast(list(texts), add_special_tokens=False)]
        lengths = np.array([len(row) for row in rows], np.int64)
        return np.fromiter((i for row in rows for i in row), np.uint32, lengths.sum()), lengths

    def changes_nothing(left: str, right: str) -> bool:
        (apart, _), (together, _) = whole([left, right]), whole([left + right])
        return np.array_equal(apart, together)

    def exact(texts: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
        if max(map(len, texts), default=0) <= PIECE:
            return whole(texts)
        found = []
        for text in texts:
            parts = list(pieces(text, PIECE, changes_nothing))
            found.append(np.concatenate([whole(parts[i : i + AT_ONCE])[0] for i in range(0, len(parts), AT_ONCE)]))
        return np.concatenate(found), np.array([len(ids) for ids in found], np.int64)

    try:
        from fastokens import Tokenizer as Fast

        fast = Fast.from_json_str(backend.to_str())
    except Exception:  # not installed, or what it raises for tokenizers it does not know
        return exact

    def quick(texts: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
        try:
            ids, ends = fast.encode_batch_flat(list(texts), split_special_tokens=True)
        except Exception:  # its regular expressions have limits
            return exact(texts)
        return np.frombuffer(ids, "<u4"), np.diff(np.frombuffer(ends, "<u8").astype(np.int64))

    same = all(map(np.array_equal, quick(PROBES), exact(PROBES)))
    return quick if same else exact


def pieces(
    text: str, size: int, changes_nothing: Callable[[str, str], bool] = lambda left, right: True
) -> Iterator[str]:
    """A text in pieces of about `size` characters, or of more where every cut would change something.

    Args:
        changes_nothing: whether two strings may be cut apart, given the characters before and after the cut. Cuts are
            between an ASCII letter or digit and a space before a letter, where byte-level BPE always begins a new word.
    """
    start = 0
    while len(text) - start > size:
        cut = _cut(text, start, start + size, changes_nothing)
        if cut is None:
            break
        yield text[start:cut]
        start = cut
    yield text[start:]


def _cut(text: str, start: int, stop: int, changes_nothing: Callable[[str, str], bool]) -> int | None:
    for number, found in enumerate(re.finditer(r"[A-Za-z0-9](?= [A-Za-z])", text[stop - (stop - start) // 2 : stop])):
        cut = stop - (stop - start) // 2 + found.end()
        if changes_nothing(text[max(start, cut - AROUND) : cut], text[cut : cut + AROUND]):
            return cut
        if number == TRIES:
            break
    return None
