"""Tokenizers behind one interface: read from a folder, fetched by name, or trained on the corpus.

`tokenizer.json` is read directly with the `tokenizers` library: it is what every fast tokenizer is underneath, and
needs no `transformers`.
"""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from sinklab.data.encoding import PIECE, EncodeBatch, encoder, pieces
from sinklab.errors import InputError
from sinklab.files import write_json, write_text

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Backend

EOS = "<|endoftext|>"
BOS = "<|bos|>"
SMALLEST_VOCABULARY = 256 + 2  # every byte, EOS and BOS
LARGEST_VOCABULARY = 2**24  # tokenizers sets memory aside for so many, and aborts where there is too little
_HUB_FILES = ["*token*.json", "vocab.*", "merges.txt", "*.model", "config.json"]


@dataclass(frozen=True)
class Tokenizer:
    """A tokenizer as the data needs it.

    Attributes:
        backend: the `tokenizers.Tokenizer` underneath.
        source: the name, path or `train:SIZE` it came from.
        eos_id: the token written after every document.
        bos_id: the token at a chunk's start; `eos_id` where the tokenizer has no BOS of its own (GPT-NeoX, GPT-2).
    """

    backend: "Backend"
    source: str
    eos_id: int
    bos_id: int

    @cached_property
    def vocab_size(self) -> int:
        """One more than the largest id, added tokens included: what an embedding must hold."""
        return max(self.backend.get_vocab(with_added_tokens=True).values()) + 1

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Token ids of each text. Nothing is added, and text that spells a special token stays text."""
        ids, lengths = self.encode_flat(texts)
        return [row.tolist() for row in np.split(ids, lengths.cumsum()[:-1])] if texts else []

    def encode_flat(self, texts: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
        """As `encode_batch`: (tokens,) the ids of all texts one after the other, and (texts,) how many each has."""
        return self._encode(texts)

    @cached_property
    def _encode(self) -> EncodeBatch:
        return encoder(self.backend)

    def token(self, token_id: int) -> str:
        """A token as the vocabulary has it; one that was added as it was added, and not as a normaliser changes it."""
        added = self.backend.get_added_tokens_decoder().get(token_id)
        token = self.backend.id_to_token(token_id) if added is None else added.content
        assert token is not None, f"{token_id} is no id of this vocabulary"
        return token

    def save(self, directory: Path) -> Path:
        """Write tokenizer.json and tokenizer_config.json, as `AutoTokenizer` reads them; returns the former."""
        path = directory / "tokenizer.json"
        write_text(path, self.backend.to_str(pretty=True))
        names = {"eos_token": self.token(self.eos_id), "bos_token": self.token(self.bos_id)}
        write_json(directory / "tokenizer_config.json", {"tokenizer_class": "PreTrainedTokenizerFast", **names})
        return path


def trained_size(name: str) -> int | None:
    """The SIZE of `train:SIZE`, None for any other name.

    Raises:
        InputError: SIZE is no whole number, too small for the 256 bytes and the two special tokens, or too large.
    """
    if not name.startswith("train:"):
        return None
    size = name.removeprefix("train:")
    fits = size.isdecimal() and len(size) < 10 and SMALLEST_VOCABULARY <= int(size) <= LARGEST_VOCABULARY
    if not fits:
        raise InputError(
            f"tokenizer {name[:40]!r}: train:SIZE needs a whole number of at least {SMALLEST_VOCABULARY} and at most "
            f"{LARGEST_VOCABULARY}, such as train:1024"
        )
    return int(size)


def load_tokenizer(name_or_path: str) -> Tokenizer:
    """The tokenizer in a folder, in a tokenizer.json, or of a model on the Hugging Face hub.

    Raises:
        InputError: it cannot be found, fetched or read, or has no end-of-text token.
    """
    path = Path(name_or_path).expanduser()
    if path.is_file():
        return _read(path, source=name_or_path)
    if not path.is_dir():
        if path.is_absolute() or name_or_path.startswith((".", "~")):
            raise InputError(f"no tokenizer at {name_or_path}: give a folder with tokenizer.json, or train:SIZE")
        path = _fetched(name_or_path)
    if (path / "tokenizer.json").is_file():
        return _read(path / "tokenizer.json", source=name_or_path)
    return _converted(path, source=name_or_path)


def train_bpe(documents: Iterable[str], size: int, out: Path) -> Tokenizer:
    """Train a byte-level BPE of at most `size` tokens and save it into the folder `out`.

    EOS (`<|endoftext|>`) has id 0 and BOS (`<|bos|>`) id 1. The same documents give the same tokenizer. Where the
    text has too few different pairs, the vocabulary is smaller than `size`: `Tokenizer.vocab_size` tells.

    Raises:
        InputError: `size` is below 258.
    """
    from tokenizers import Tokenizer as Backend
    from tokenizers import decoders, models, pre_tokenizers, trainers

    trained_size(f"train:{size}")
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


def _read(path: Path, source: str) -> Tokenizer:
    from tokenizers import Tokenizer as Backend

    try:
        backend = Backend.from_file(str(path))
    except Exception as error:  # the Rust library raises bare Exception
        raise InputError(f"{path} is not a readable tokenizer.json: {error}") from error
    return _tokenizer(backend, source, _special_tokens(path.parent))


def _tokenizer(backend: "Backend", source: str, special: dict[str, str]) -> Tokenizer:
    backend.no_truncation()
    backend.no_padding()
    backend.encode_special_tokens = True  # a document that mentions <|endoftext|> does not end there
    eos = backend.token_to_id(special.get("eos_token", EOS))
    if eos is None:
        raise InputError(
            f"tokenizer {source} has no end-of-text token, which is written between documents: "
            "name it as eos_token in tokenizer_config.json"
        )
    bos = backend.token_to_id(special["bos_token"]) if "bos_token" in special else None
    return Tokenizer(backend, source, eos_id=eos, bos_id=eos if bos is None else bos)


def _special_tokens(folder: Path) -> dict[str, str]:
    """`eos_token` and `bos_token` by what the files beside tokenizer.json call them."""
    found: dict[str, str] = {}
    for name in ("special_tokens_map.json", "tokenizer_config.json"):
        path = folder / name
        if not path.is_file():
            continue
        try:
            entries: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise InputError(f"{path} is not valid JSON: {error}") from error
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
            f"tokenizer {name!r} is neither a folder here nor could it be fetched from the Hugging Face hub "
            f"({type(error).__name__}). Check the name and the connection, give the path of a folder with "
            "tokenizer.json, or use train:SIZE to train one on the corpus."
        ) from error


def _converted(folder: Path, source: str) -> Tokenizer:
    """A tokenizer without tokenizer.json (vocabulary and merges, sentencepiece), converted by transformers."""
    from transformers import AutoTokenizer

    try:
        slow = AutoTokenizer.from_pretrained(folder)
        backend = slow.backend_tokenizer
    except Exception as error:  # whatever the converter of that one format raises
        raise InputError(
            f"no usable tokenizer in {source}: there is no tokenizer.json and transformers cannot convert what "
            f"is there ({type(error).__name__}). Give a folder with tokenizer.json, or use train:SIZE."
        ) from error
    named = {key: token for key in ("eos_token", "bos_token") if (token := getattr(slow, key, None))}
    return _tokenizer(backend, source, named)
