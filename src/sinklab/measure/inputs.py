"""The N x T token matrix that a model is measured on.

natural   the first T tokens of each document that is long enough, documents in order (recipe.yaml, `metric`);
          of plain text files, which do not say where documents begin, consecutive pieces of T tokens
random    every token drawn uniformly from the vocabulary
repeat    one random token per sequence, T times

Special tokens that a tokenizer puts first (BOS) count as position 1 and within T; random and repeat have none.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from sinklab.data.corpora import documents
from sinklab.data.textfiles import Render, plain_conversation
from sinklab.errors import InputError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Encode = Callable[[str], Sequence[int]]


def natural_tokens(
    text: Path,
    encode: Encode,
    *,
    sequences: int,
    length: int,
    prefix: Sequence[int] = (),
    fewer: bool = False,
    render: Render = plain_conversation,
) -> Tensor:
    """Sequences of real text.

    Args:
        text: a .txt or .jsonl file, or a folder of them.
        encode: text to token ids, without special tokens.
        sequences, length: N and T, `prefix` included in T.
        prefix: token ids put before every sequence.
        fewer: one sequence is enough, where there are no more.
        render: writes conversations (`messages`) as text.

    Returns:
        tokens_NT, int64.

    Raises:
        InputError: the file is missing, empty or malformed, or too little of it is long enough; says how much is.
    """
    _check_shape(sequences, length, len(prefix))
    body = length - len(prefix)
    several = text.suffix.lower() == ".txt"
    rows: list[list[int]] = []
    read = 0
    for document in documents(str(text), render=render):
        ids = list(encode(document))
        read += 1
        starts = range(0, len(ids) - body + 1, body) if several else range(min(1, max(0, len(ids) - body + 1)))
        rows += [[*prefix, *ids[start : start + body]] for start in starts]
        if len(rows) >= sequences:
            return torch.tensor(rows[:sequences])
    if fewer and rows:
        return torch.tensor(rows)
    usable = "pieces" if several else f"of its {read} documents"
    less = f"lower --sequences to {len(rows)}, " if rows else ""
    raise InputError(
        f"{text} gives {len(rows)} usable sequences, and {sequences} are needed: {len(rows)} {usable} have "
        f"{body} tokens of text; {less}lower --length, or give more text"
    )


def random_tokens(vocabulary: int, *, sequences: int, length: int, seed: int = 0) -> Tensor:
    """tokens_NT uniform over ids 0 .. vocabulary - 1; the same seed gives the same tokens."""
    _check_shape(sequences, length)
    return torch.randint(vocabulary, (sequences, length), generator=torch.Generator().manual_seed(seed))


def repeated_tokens(vocabulary: int, *, sequences: int, length: int, seed: int = 0) -> Tensor:
    """tokens_NT, each row one token of ids 0 .. vocabulary - 1 repeated; the same seed gives the same tokens."""
    return random_tokens(vocabulary, sequences=sequences, length=1, seed=seed).repeat(1, length)


def pretrained_encode(tokenizer: "PreTrainedTokenizerBase") -> Encode:
    """Text to token ids without special tokens."""
    return lambda text: tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]  # type: ignore[return-value]


def default_prefix(tokenizer: "PreTrainedTokenizerBase") -> list[int]:
    """The special tokens that the tokenizer puts before a text by default, such as BOS; often none."""
    plain = tokenizer("text", add_special_tokens=False)["input_ids"]
    full = tokenizer("text")["input_ids"]
    for start in range(len(full) - len(plain) + 1):
        if full[start : start + len(plain)] == plain:
            return list(full[:start])
    return []


def _check_shape(sequences: int, length: int, prefix: int = 0) -> None:
    if sequences < 1:
        raise InputError(f"--sequences {sequences}: give at least 1")
    if length <= prefix:
        raise InputError(f"--length {length}: give at least {prefix + 1} ({prefix} of it are special tokens)")
