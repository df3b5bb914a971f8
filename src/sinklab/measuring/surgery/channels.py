"""One channel of the residual stream set to zero."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from sinklab.errors import InputError
from sinklab.measuring.hooks import hidden_states, hooked
from sinklab.measuring.surgery.places import first_tokens, residual_blocks
from sinklab.model.transformer import Transformer

if TYPE_CHECKING:
    from transformers import PreTrainedModel


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
        hidden_BTC = hidden_states(output).clone()
        T, C = hidden_BTC.shape[1:]
        if not 0 <= dimension < C:
            raise InputError(f"dimension {dimension} does not exist: give one of 0 to {C - 1}")
        here_BT = torch.arange(T, device=hidden_BTC.device) == start.columns(hidden_BTC)[:, None] + position - 1
        hidden_BTC[..., dimension].masked_fill_(here_BT, 0)
        return (hidden_BTC, *output[1:]) if isinstance(output, tuple) else hidden_BTC

    with first_tokens(model) as start, hooked([blocks[layer - 1].register_forward_hook(leaving)]):
        yield
