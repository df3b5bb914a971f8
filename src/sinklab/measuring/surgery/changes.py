"""Changing one thing in a model for the length of a `with` block: what it does without it shows what it is for.

    with masked_first_keys(model, 4):            # no query after the fourth sees the first four keys
    with zeroed(model, layer=2, position=1, dimension=447):
    with swapped_positions(model, 1, 5):         # learned positions; replaced_position(model, 1, 5) for p_1 := p_5

Each works on a Hugging Face causal language model and on ours, around a probe or inside of one, and leaves the model
as it was found, also after an exception. Positions and layers are 1-based, as in the results; with padding position 1
is the first real token of each sequence. Sequences are read whole, without a cache.
"""

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from sinklab.errors import InputError, SinklabError
from sinklab.model.transformer import Transformer

if TYPE_CHECKING:
    from transformers import PreTrainedModel

POSITION_TABLES = ("wpe", "embed_positions", "positions_embed", "position_embedding", "position_embeddings")


@contextmanager
def masked_first_keys(model: "PreTrainedModel | Transformer", n: int) -> Iterator[None]:
    """Keys 1..n are seen by no query after the n-th, in every attention layer.

    Queries 1..n keep what they saw, so that no row of the attention matrix is empty; keys outside the sequence (sink
    logits, key biases, a learned sink token) stay. So sequences of at most n tokens are read as ever.

    Raises:
        InputError: n below 1.
        SinklabError: in a forward pass, where the keys could not be hidden in every attention layer, or with a cache.
    """
    if n < 1:
        raise InputError(f"{n} keys to hide: give at least 1")
    if not isinstance(model, Transformer):
        from sinklab.measuring.surgery.hiding import hidden_first_keys

        with hidden_first_keys(model, n):
            yield
        return
    cores: list[Any] = [block.attention.core for block in model.blocks]  # type: ignore[union-attr]
    before = [core.hidden_first for core in cores]
    try:
        for core in cores:
            core.hidden_first = (*core.hidden_first, n)
        yield
    finally:
        for core, hidden in zip(cores, before, strict=True):
            core.hidden_first = hidden


@contextmanager
def zeroed(model: "PreTrainedModel | Transformer", layer: int, position: int, dimension: int) -> Iterator[None]:
    """One channel of the residual stream is set to zero after block `layer`, at one position of every sequence.

    Sequences that end before it are read as ever.

    Args:
        layer: 1-based.
        position: 1-based; 0 is a learned sink token.
        dimension: 0-based, as in `massive_activations`.

    Raises:
        InputError: the model has no such layer or position; in a forward pass, no such dimension.
        SinklabError: the blocks of the model could not be found; in a forward pass, a cache.
    """
    blocks = residual_blocks(model)
    if not 1 <= layer <= len(blocks):
        raise InputError(f"layer {layer} does not exist: give one of 1 to {len(blocks)}")
    first = 0 if isinstance(model, Transformer) and model.leading else 1
    if position < first:
        raise InputError(f"position {position} does not exist: they are counted from {first}")

    def leaving(_: nn.Module, __: tuple[Any, ...], output: Any) -> Any:
        hidden_BTC = (output[0] if isinstance(output, tuple) else output).clone()
        _, T, C = hidden_BTC.shape
        if not 0 <= dimension < C:
            raise InputError(f"dimension {dimension} does not exist: give one of 0 to {C - 1}")
        here_BT = torch.arange(T, device=hidden_BTC.device) == start.columns(hidden_BTC)[:, None] + position - 1
        hidden_BTC[..., dimension].masked_fill_(here_BT, 0)
        return (hidden_BTC, *output[1:]) if isinstance(output, tuple) else hidden_BTC

    with first_tokens(model) as start:
        handle = blocks[layer - 1].register_forward_hook(leaving)
        try:
            yield
        finally:
            handle.remove()


@contextmanager
def swapped_positions(model: "PreTrainedModel | Transformer", i: int, j: int) -> Iterator[None]:
    """The learned embeddings of positions i and j change places (table 7 of the paper, `swapped`).

    Raises:
        InputError: the model has no learned table of positions, or not these rows.
    """
    with _rewritten_positions(model, {i: j, j: i}):
        yield


@contextmanager
def replaced_position(model: "PreTrainedModel | Transformer", i: int, j: int) -> Iterator[None]:
    """Position i has the learned embedding of position j as well (table 7 of the paper, `replaced`).

    Raises:
        InputError: the model has no learned table of positions, or not these rows.
    """
    with _rewritten_positions(model, {i: j}):
        yield


def check_pair(i: int, j: int) -> None:
    """Refuse two positions that no table could swap.

    Raises:
        InputError: one is below 1, or they are the same.
    """
    if min(i, j) < 1:
        raise InputError(f"position {min(i, j)} does not exist: positions are counted from 1")
    if i == j:
        raise InputError(f"position {i} with itself changes nothing: give two different positions")


def learned_positions(model: nn.Module) -> Tensor | None:
    """The learned table of positions, row 0 being position 1: (positions, width), a view of the weight; None without.

    Rows that no position uses (OPT has two before its first) are left out.
    """
    if isinstance(model, Transformer):
        return model.position_table
    for name, module in model.named_modules():
        if name.rpartition(".")[2] in POSITION_TABLES and isinstance(module, nn.Embedding):
            return module.weight[getattr(module, "offset", 0) :]
    return None


def residual_blocks(model: "PreTrainedModel | Transformer") -> list[nn.Module]:
    """The blocks of the residual stream in order.

    Raises:
        SinklabError: they are not kept in one list.
    """
    if isinstance(model, Transformer):
        return list(model.blocks)
    from sinklab.measuring.huggingface.anatomy import decoder_blocks

    blocks = decoder_blocks(model)
    if not blocks:
        raise SinklabError(
            f"the blocks of a {model.config.model_type!r} model could not be found: its residual stream cannot be "
            "changed from outside"
        )
    return blocks


@dataclass
class FirstTokens:
    """Where the real tokens of the current forward pass begin."""

    leading: int = 0
    first_B: Tensor | None = None

    def columns(self, like: Tensor) -> Tensor:
        """The column of each sequence's first real token, on the device of `like` (B, ...)."""
        if self.first_B is None:
            return torch.full((len(like),), self.leading, device=like.device)
        return self.first_B.to(like.device)


@contextmanager
def first_tokens(model: "PreTrainedModel | Transformer") -> Iterator[FirstTokens]:
    """Know, in every forward pass, where the sequences begin behind their padding.

    Raises:
        InputError: in a forward pass, where the attention mask is not a padding mask.
        SinklabError: in a forward pass that continues from a cache.
    """
    if isinstance(model, Transformer):
        yield FirstTokens(leading=model.leading)
        return
    from sinklab.measuring.padding import real_tokens

    start, signature = FirstTokens(), inspect.signature(model.forward)

    def entering(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        given = signature.bind_partial(*args, **kwargs).arguments
        cache = given.get("past_key_values")
        if cache is not None and cache.get_seq_length():
            raise SinklabError(
                "a model under surgery reads whole sequences only: call it without past_key_values, and generate "
                "with use_cache=False"
            )
        mask_BT = given.get("attention_mask")
        start.first_B = None if mask_BT is None else real_tokens(mask_BT).index_BR[:, 0]

    handle = model.register_forward_pre_hook(entering, with_kwargs=True)
    try:
        yield start
    finally:
        handle.remove()


@contextmanager
def _rewritten_positions(model: "PreTrainedModel | Transformer", source: dict[int, int]) -> Iterator[None]:
    """Rows of the learned table overwritten, each by the row `source` names, and put back bit for bit."""
    table_PC = learned_positions(model)
    if table_PC is None:
        raise InputError(
            "the model has no learned table of positions to change: that is for models such as GPT-2, OPT and GPT-Neo, "
            "or ours with model.position.kind learnable"
        )
    if table_PC.is_meta:
        raise InputError(
            "the model's table of positions is not in memory (it was left on disk), so it cannot be changed: load the "
            "model onto one device"
        )
    check_pair(*next(iter(source.items())))
    for position in {*source, *source.values()}:
        if position > len(table_PC):
            raise InputError(f"position {position} does not exist: the table has positions 1 to {len(table_PC)}")
    rows = torch.tensor(list(source), device=table_PC.device) - 1
    others = torch.tensor(list(source.values()), device=table_PC.device) - 1
    before = table_PC.detach()[rows].clone()
    try:
        _write(table_PC, rows, table_PC.detach()[others].clone())
        yield
    finally:
        _write(table_PC, rows, before)


@torch.no_grad()
def _write(table_PC: Tensor, rows: Tensor, values: Tensor) -> None:
    table_PC.detach()[rows] = values
