"""A channel of the residual stream set to zero; rows of a learned table of positions swapped or replaced."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from sinklab.errors import InputError
from sinklab.measuring.surgery.places import first_tokens, learned_positions, residual_blocks
from sinklab.model.transformer import Transformer
from sinklab.models.hooks import hidden_states, hooked

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@contextmanager
def zeroed(
    model: "PreTrainedModel | Transformer", layer: int, position: int, dimension: int, last_layer: int | None = None
) -> Iterator[None]:
    """One channel of the residual stream is set to zero after a block or several, at one position of every sequence.

    Sequences that end before it are read as ever.

    Args:
        layer: 1-based.
        last_layer: it is zeroed after each block from `layer` to this one; after `layer` alone unless given.
        position: 1-based; 0 is a learned sink token, 0, -1, .. are registers, the last first.
        dimension: 0-based, as in `massive_activations`.

    Raises:
        InputError: the model has no such layer or position; in a forward pass, no such dimension.
        SinklabError: the blocks of the model could not be found; in a forward pass, a cache.
    """
    blocks = residual_blocks(model)
    last_layer = layer if last_layer is None else last_layer
    for number in (layer, last_layer):
        if not 1 <= number <= len(blocks):
            raise InputError(f"layer {number} does not exist: give one of 1 to {len(blocks)}")
    if last_layer < layer:
        raise InputError(f"layers {layer} to {last_layer} are none: give a last layer from {layer} on")
    first = 1 - model.leading if isinstance(model, Transformer) else 1
    if position < first:
        raise InputError(f"position {position} does not exist: they are counted from {first}")

    def leaving(_: nn.Module, __: tuple[Any, ...], output: Any) -> Any:
        hidden_BTC = hidden_states(output).clone()
        T, C = hidden_BTC.shape[1:]
        if not 0 <= dimension < C:
            raise InputError(f"dimension {dimension} does not exist: give one of 0 to {C - 1}")
        here_BT = torch.arange(T, device=hidden_BTC.device) == start.columns(hidden_BTC)[:, None] + position - 1
        hidden_BTC[..., dimension].masked_fill_(here_BT, 0)
        return (hidden_BTC, *output[1:]) if isinstance(output, tuple) else hidden_BTC

    chosen = blocks[layer - 1 : last_layer]
    with first_tokens(model) as start, hooked(block.register_forward_hook(leaving) for block in chosen):
        yield


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
