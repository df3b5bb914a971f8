"""UTF-8 size of each token of a text.

The bytes of a token are decoded from its vocabulary string and compared with the text; sizes are UNKNOWN from the first
mismatch on. Three encodings of vocabulary strings are supported:

    byte-level     one character per byte (`Ġ` is a space), as in GPT-2 and its successors
    sentencepiece  `▁` for a space and `<0x0A>` for a byte; a space added at the start of the text or after an added
                   token is removed
    added tokens   literal text

Rejected alternative: decoding tokens one by one, which gives U+FFFD (three bytes) for each token of a multi-token
character.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate, groupby
from operator import itemgetter
from typing import overload

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
