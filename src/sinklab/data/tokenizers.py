"""Loading of tokenizers from a folder or the hub, training on the corpus, and fast exact encoding.

`tokenizer.json` is read with the `tokenizers` library, without `transformers`.

The `fastokens` library encodes about 50 times faster with BPE tokenizers. It is used if it is installed, supports the
tokenizer, and returns the same ids as `tokenizers` for all `PROBES`. Both libraries use all cores, or RAYON_NUM_THREADS
threads.

`tokenizers` needs about 100 times the memory of the text that it encodes. For this library, documents above PIECE
characters are therefore split into pieces, between words where the split changes no token.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from sinklab.data.textfiles import expanded
from sinklab.errors import InputError
from sinklab.files import parse_json, write_json, write_text

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Backend

EOS = "<|endoftext|>"
BOS = "<|bos|>"
SMALLEST_VOCABULARY = 256 + 2  # every byte, EOS and BOS
LARGEST_VOCABULARY = 2**24  # `tokenizers` allocates this many entries upfront, and aborts if out of memory
_HUB_FILES = ["*token*.json", "vocab.*", "merges.txt", "*.model", "config.json"]

EncodeBatch = Callable[[Sequence[str]], tuple[np.ndarray, np.ndarray]]
"""Function from texts to their concatenated ids, shape (tokens,), and token counts, shape (texts,)."""

PIECE = 2**19  # characters per piece; shorter documents are not split
AT_ONCE = 8  # pieces per batch
AROUND = 2**10  # characters on each side of a split that are encoded to check it
TRIES = 33  # maximum number of split positions tried

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


@dataclass(frozen=True)
class Tokenizer:
    """Tokenizer of the `tokenizers` library with its EOS and BOS tokens.

    Attributes:
        backend: the `tokenizers.Tokenizer`.
        source: name, path, `train:SIZE` or `words`.
        eos_id: id of the token appended to every document.
        bos_id: id of the token at the start of a chunk with `data.bos`; `eos_id` if there is no BOS (GPT-NeoX, GPT-2).
    """

    backend: "Backend"
    source: str
    eos_id: int
    bos_id: int

    @cached_property
    def vocab_size(self) -> int:
        """Largest token id plus one, added tokens included: the number of embedding rows."""
        return max(self.backend.get_vocab(with_added_tokens=True).values()) + 1

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the token ids of each text. No special tokens are added, and their strings are encoded as text."""
        ids, lengths = self.encode_flat(texts)
        return [row.tolist() for row in np.split(ids, lengths.cumsum()[:-1])] if texts else []

    @cached_property
    def encode_flat(self) -> "EncodeBatch":
        """Function from texts to their concatenated token ids, (tokens,), and numbers of tokens, (texts,)."""
        return encoder(self.backend)

    def token(self, token_id: int) -> str:
        """Return the vocabulary string of a token id, which may be an added token."""
        added = self.backend.get_added_tokens_decoder().get(token_id)
        token = self.backend.id_to_token(token_id) if added is None else added.content
        assert token is not None, f"{token_id} is not an id of this vocabulary"
        return token

    def save(self, directory: Path) -> None:
        """Write tokenizer.json and tokenizer_config.json for `AutoTokenizer`.

        Raises:
            SinklabError: if a file cannot be written.
        """
        write_text(directory / "tokenizer.json", self.backend.to_str(pretty=True))
        names = {"eos_token": self.token(self.eos_id), "bos_token": self.token(self.bos_id)}
        write_json(directory / "tokenizer_config.json", {"tokenizer_class": "PreTrainedTokenizerFast", **names})


def trained_size(name: str) -> int | None:
    """Return the SIZE of `train:SIZE`, the maximum vocabulary size; None for any other name.

    Raises:
        InputError: if SIZE is not a whole number from 258 (256 bytes and two special tokens) to 2^24.
    """
    if not name.startswith("train:"):
        return None
    size = name.removeprefix("train:")
    if not (size.isdecimal() and len(size) < 10 and SMALLEST_VOCABULARY <= int(size) <= LARGEST_VOCABULARY):
        raise InputError(
            f"tokenizer {name[:40]!r}: SIZE must be a whole number, at least {SMALLEST_VOCABULARY} and at most "
            f"{LARGEST_VOCABULARY}, as in train:1024"
        )
    return int(size)


def load_tokenizer(name_or_path: str) -> Tokenizer:
    """Load a tokenizer from a folder, from a tokenizer.json, or from a model on the Hugging Face hub.

    EOS and BOS are read from tokenizer_config.json, else from special_tokens_map.json. The default EOS is
    `<|endoftext|>`, and the default BOS is EOS.

    Raises:
        InputError: if the tokenizer cannot be found, downloaded, read or converted, or has no EOS token.
    """
    from tokenizers import Tokenizer as Backend

    path = expanded(name_or_path)
    if not path.exists():
        if path.is_absolute() or name_or_path.startswith((".", "~")):
            raise InputError(f"no tokenizer at {name_or_path}: pass a folder, a name on the hub, or train:SIZE")
        path = _fetched(name_or_path)
    file = path / "tokenizer.json" if path.is_dir() else path
    if file.is_file():
        try:
            backend = Backend.from_file(str(file))
        except Exception as error:  # the Rust library raises bare Exception
            raise InputError(f"{file} is not a readable tokenizer.json: {error}") from error
        special = _special_tokens(file.parent)
    else:
        backend, special = _converted(path, name_or_path)
    backend.no_truncation()
    backend.no_padding()
    backend.encode_special_tokens = True  # encode a literal <|endoftext|> as text
    eos = backend.token_to_id(special.get("eos_token", EOS))
    if eos is None:
        raise InputError(
            f"tokenizer {name_or_path} has no EOS token, which is appended to every document: "
            "set eos_token in tokenizer_config.json to a token of its vocabulary"
        )
    bos = backend.token_to_id(special["bos_token"]) if "bos_token" in special else None
    return Tokenizer(backend, name_or_path, eos_id=eos, bos_id=eos if bos is None else bos)


def train_bpe(documents: Iterable[str], size: int, out: Path) -> Tokenizer:
    """Train a byte-level BPE tokenizer with at most `size` tokens and save it in the folder `out`.

    EOS (`<|endoftext|>`) has id 0 and BOS (`<|bos|>`) id 1. Training is deterministic. The vocabulary
    (`Tokenizer.vocab_size`) is smaller than `size` if the text has too few distinct pairs of tokens to merge.

    Raises:
        InputError: if `documents` raises it.
        SinklabError: if the tokenizer cannot be saved.
    """
    from tokenizers import Tokenizer as Backend
    from tokenizers import decoders, models, pre_tokenizers, trainers

    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=[EOS, BOS],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    backend.train_from_iterator((piece for text in documents for piece in pieces(text, PIECE)), trainer)
    backend.encode_special_tokens = True
    tokenizer = Tokenizer(backend, f"train:{size}", eos_id=0, bos_id=1)
    tokenizer.save(out)
    return tokenizer


def _special_tokens(folder: Path) -> dict[str, str]:
    """Read `eos_token` and `bos_token` from tokenizer_config.json or else special_tokens_map.json."""
    found: dict[str, str] = {}
    for name in ("special_tokens_map.json", "tokenizer_config.json"):
        path = folder / name
        try:
            entries = parse_json(path.read_text(encoding="utf-8")) if path.is_file() else {}
            if not isinstance(entries, dict):
                raise ValueError("the top level is not an object")
        except (OSError, ValueError) as error:
            raise InputError(f"{path} is not a readable JSON object: {error}") from error
        for key in ("eos_token", "bos_token"):
            token = entries.get(key)
            token = token.get("content") if isinstance(token, dict) else token
            if isinstance(token, str):
                found[key] = token
    return found


def _fetched(name: str) -> Path:
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, allow_patterns=_HUB_FILES))
    except Exception as error:  # network, hub, name and cache errors share no base class
        raise InputError(
            f"tokenizer {name!r} is not a local folder and could not be downloaded from the Hugging Face hub "
            f"({type(error).__name__}). Check the name and the connection, use a folder with "
            "tokenizer.json, or use train:SIZE to train one on the corpus."
        ) from error


def _converted(folder: Path, source: str) -> tuple["Backend", dict[str, str]]:
    """Convert a tokenizer without tokenizer.json (vocab and merges files, sentencepiece) with transformers.

    Returns:
        The tokenizer, and its `eos_token` and `bos_token` if they are set.
    """
    from transformers import AutoTokenizer

    try:
        slow: Any = AutoTokenizer.from_pretrained(folder)
        backend = slow.backend_tokenizer
    except Exception as error:  # each format's converter raises its own exceptions
        raise InputError(
            f"no usable tokenizer in {source}: tokenizer.json is missing, and transformers cannot convert the other "
            f"files ({type(error).__name__}). Use a folder with tokenizer.json, or train:SIZE."
        ) from error
    return backend, {key: token for key in ("eos_token", "bos_token") if (token := getattr(slow, key, None))}


def encoder(backend: "Backend") -> EncodeBatch:
    """Return a function that encodes texts without adding special tokens: `fastokens` if usable, else `tokenizers`."""

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
    except Exception:  # not installed, or an unsupported tokenizer
        return exact

    def quick(texts: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
        try:
            ids, ends = fast.encode_batch_flat(list(texts), split_special_tokens=True)
        except Exception:  # unsupported regular expressions
            return exact(texts)
        return np.frombuffer(ids, "<u4"), np.diff(np.frombuffer(ends, "<u8").astype(np.int64))

    same = all(map(np.array_equal, quick(PROBES), exact(PROBES)))
    return quick if same else exact


def pieces(
    text: str, size: int, changes_nothing: Callable[[str, str], bool] = lambda left, right: True
) -> Iterator[str]:
    """Split a text into pieces of at most `size` characters; if no split position is found, the rest is one piece.

    Splits are between an ASCII letter or digit and a space followed by a letter, where byte-level BPE starts a word.

    Args:
        changes_nothing: predicate on up to `AROUND` characters on each side; True if the split changes no token.
    """
    start = 0
    while len(text) - start > size:
        second_half = start + size - size // 2
        found = re.finditer(r"[A-Za-z0-9](?= [A-Za-z])", text[second_half : start + size])
        for cut in (second_half + one.end() for one in islice(found, TRIES)):
            if changes_nothing(text[max(start, cut - AROUND) : cut], text[cut : cut + AROUND]):
                break
        else:
            break
        yield text[start:cut]
        start = cut
    yield text[start:]
