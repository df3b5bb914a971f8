"""Changes of a model within a `with` block: hidden keys, zeroed channels, swapped or replaced learned positions.

Keys are hidden in our attention cores, and in Hugging Face models through their masks. Every attention module of
transformers takes `attention_mask`, whether its attention is dispatched through the interface or not, and the possible
masks are few: none (causal), boolean and additive. So one hook serves all families, under any probe. The hooked modules
are counted: keys that stay visible somewhere are an error.
"""

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from sinklab.attention.real_tokens import real_tokens
from sinklab.errors import InputError, SinklabError
from sinklab.model.transformer import Transformer
from sinklab.models.hooks import hidden_states, hooked
from sinklab.models.huggingface import anatomy
from sinklab.models.huggingface.anatomy import attention_layers, layer_kinds
from sinklab.models.native import attention_cores

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def residual_blocks(model: "PreTrainedModel | Transformer") -> list[nn.Module]:
    """The blocks of the residual stream in order.

    Raises:
        SinklabError: they are not kept in one list.
    """
    if isinstance(model, Transformer):
        return list(model.blocks)
    blocks = anatomy.decoder_blocks(model)
    if not blocks:
        raise SinklabError(
            f"the blocks of a {model.config.model_type!r} model could not be found: its residual stream cannot be "
            "changed from outside"
        )
    return blocks


def learned_positions(model: "PreTrainedModel | Transformer") -> Tensor | None:
    """The learned table of positions, row 0 being position 1: (positions, width), a view of the weight; None without.

    Rows that no position uses (OPT has two before its first) are left out.
    """
    return model.position_table if isinstance(model, Transformer) else anatomy.learned_positions(model)


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

    with hooked([model.register_forward_pre_hook(entering, with_kwargs=True)]):
        yield start


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


NOT_READING_MASKS = ("flash", "flex", "paged")


@contextmanager
def masked_first_keys(model: "PreTrainedModel | Transformer", n: int) -> Iterator[None]:
    """Keys 1..n are seen by no query after the n-th, in every attention layer.

    Queries 1..n keep what they saw, so that no row of the attention matrix is empty; keys outside the sequence (sink
    logits, key biases, a learned sink token) stay. So sequences of at most n tokens are read as ever.

    Raises:
        InputError: n below 1.
        SinklabError: the model's attention reads no explicit mask; in a forward pass, where the keys could not be
            hidden in every attention layer, or with a cache.
    """
    if n < 1:
        raise InputError(f"{n} keys to hide: give at least 1")
    if not isinstance(model, Transformer):
        with _hidden_in_pretrained(model, n):
            yield
        return
    cores = attention_cores(model)
    before = [core.hidden_first for core in cores]
    try:
        for core in cores:
            core.hidden_first = (*core.hidden_first, n)
        yield
    finally:
        for core, hidden in zip(cores, before, strict=True):
            core.hidden_first = hidden


@contextmanager
def _hidden_in_pretrained(model: "PreTrainedModel", n: int) -> Iterator[None]:
    implementation = str(model.config._attn_implementation)
    if any(name in implementation for name in NOT_READING_MASKS):
        raise SinklabError(
            f"the attention implementation {implementation!r} takes no explicit mask, so no keys can be hidden: load "
            'the model with attn_implementation="sdpa"'
        )
    blocks = residual_blocks(model)
    with first_tokens(model) as start:
        kinds = layer_kinds(model.config)
        hiding = _Hiding(model, n, start, hybrid=bool(kinds.linear) or len(kinds.attention) < kinds.total)
        with hooked(
            [
                blocks[0].register_forward_pre_hook(hiding.beginning),
                model.register_forward_hook(hiding.ending),
                *(
                    module.register_forward_pre_hook(hiding.attending, with_kwargs=True)
                    for block in blocks
                    for module in _mask_readers(block)
                ),
            ]
        ):
            yield


class _Hiding:
    """The hooks of one model, and how many attention layers they have reached in its current forward pass."""

    def __init__(self, model: "PreTrainedModel", n: int, start: FirstTokens, hybrid: bool) -> None:
        self._n, self._start, self._hybrid, self._kind = n, start, hybrid, model.config.model_type
        self._expected, self._reached, self._running = attention_layers(model.config), 0, False

    def beginning(self, _: nn.Module, __: tuple[Any, ...]) -> None:
        self._reached, self._running = 0, True

    def ending(self, _: nn.Module, __: tuple[Any, ...], ___: Any) -> None:
        if self._running and self._reached != self._expected:
            raise SinklabError(
                f"the first keys could be hidden in {self._reached} of {self._expected} attention layers of a "
                f"{self._kind!r} model: it does not hand its attention mask to them as other models of transformers do"
            )
        self._running = False

    def attending(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        names = list(inspect.signature(module.forward).parameters)
        given = dict(zip(names, args, strict=False)) | kwargs
        states_BTC = next(value for value in given.values() if isinstance(value, Tensor))
        mask = given.get("attention_mask")
        if self._hybrid and not getattr(module, "is_causal", False):
            return None  # a recurrent layer
        if mask is not None and not isinstance(mask, Tensor):
            raise SinklabError(f"{type(module).__name__} reads a {type(mask).__name__}, in which no key can be hidden")
        self._reached += 1
        mask = self._without_first(mask, states_BTC)
        place = names.index("attention_mask")
        if place < len(args):
            return (*args[:place], mask, *args[place + 1 :]), kwargs
        return args, kwargs | {"attention_mask": mask}

    def _without_first(self, mask: Tensor | None, states_BTC: Tensor) -> Tensor:
        T = states_BTC.shape[1]
        place_T = torch.arange(T, device=states_BTC.device)
        first_B1 = self._start.columns(states_BTC)[:, None]
        late_BT = place_T >= first_B1 + self._n
        hidden_B1TT = (late_BT[:, :, None] & ((place_T >= first_B1) & ~late_BT)[:, None, :])[:, None]
        if mask is None:
            return (place_T <= place_T[:, None]) & ~hidden_B1TT
        if mask.dtype != torch.bool:
            return mask.masked_fill(hidden_B1TT, torch.finfo(mask.dtype).min)
        true_hides = bool(mask[..., 0, -1].all())  # the first query never sees the last key
        return mask | hidden_B1TT if true_hides else mask & ~hidden_B1TT


def _mask_readers(block: nn.Module) -> list[nn.Module]:
    """The modules of a block that take an attention mask and hand it to no part of their own."""
    parts = (part for part in block.modules() if part is not block)
    takes = [part for part in parts if "attention_mask" in inspect.signature(part.forward).parameters]
    return [part for part in takes if not any(inner is not part and inner in takes for inner in part.modules())]
