"""Interventions on a model in a `with` block: hidden keys, zeroed channels, swapped or replaced learned positions.

In sinklab transformers, keys are hidden directly in the attention cores; in Hugging Face models, through the attention
mask. Attention modules of transformers accept `attention_mask`, which is None (causal), boolean or additive, so one
hook covers all model families. The hooked modules are counted: an attention layer that is not reached is an error.
"""

import inspect
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from sinklab.attention.real_tokens import real_tokens
from sinklab.errors import InputError, SinklabError
from sinklab.model.transformer import Transformer
from sinklab.models.adapter import LanguageModel
from sinklab.models.families import family_of
from sinklab.models.hooks import hidden_states, hooked
from sinklab.models.huggingface import anatomy
from sinklab.models.native import attention_cores

if TYPE_CHECKING:
    from transformers import PreTrainedModel

MASKLESS = ("flash", "flex", "paged")
"""Substrings of the names of attention implementations that accept no explicit mask."""

FirstColumns = Callable[[Tensor], Tensor]
"""Function from a tensor (B, ...) to the column of each sequence's first real token (B,), on the same device."""


def residual_blocks(model: LanguageModel) -> list[nn.Module]:
    """Return the decoder blocks, in order.

    Raises:
        SinklabError: if the model has no module list with one entry per layer.
    """
    if isinstance(model, Transformer):
        return list(model.blocks)
    blocks = anatomy.decoder_blocks(model)
    if not blocks:
        raise SinklabError(
            f"the blocks of a {model.config.model_type!r} model could not be found: its residual stream cannot be "
            "read or changed"
        )
    return blocks


def learned_positions(model: LanguageModel) -> Tensor | None:
    """Return the learned positional embeddings (positions, C), a view of the weight; None if the model has none.

    Row 0 is position 1; unused rows (the first two in OPT) are excluded.
    """
    return model.position_table if isinstance(model, Transformer) else anatomy.learned_positions(model)


@contextmanager
def first_columns(model: LanguageModel) -> Iterator[FirstColumns]:
    """Provide a function that returns the column of each sequence's first real token in the current forward pass.

    Left padding and learned tokens precede this column.

    Raises:
        InputError: in a forward pass of a Hugging Face model, if the attention mask is not a padding mask.
        SinklabError: in a forward pass of a Hugging Face model, if a KV cache with tokens is passed.
    """
    if isinstance(model, Transformer):
        yield lambda like: torch.full((len(like),), model.leading, device=like.device)
        return
    first_B, signature = None, inspect.signature(model.forward)

    def entering(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        nonlocal first_B
        arguments = signature.bind_partial(*args, **kwargs).arguments
        cache, mask_BT = arguments.get("past_key_values"), arguments.get("attention_mask")
        if cache is not None and cache.get_seq_length():
            raise SinklabError(
                "an ablated model does not support a KV cache: call it without past_key_values, and generate with "
                "use_cache=False"
            )
        first_B = None if mask_BT is None else real_tokens(mask_BT).index_BR[:, 0]

    with hooked([model.register_forward_pre_hook(entering, with_kwargs=True)]):
        yield lambda like: like.new_zeros(len(like), dtype=torch.long) if first_B is None else first_B.to(like.device)


@contextmanager
def zeroed(
    model: LanguageModel, layer: int, position: int, dimension: int, last_layer: int | None = None
) -> Iterator[None]:
    """Set one channel of the residual stream to zero at one position of every sequence, after one block or several.

    Sequences that end before the position are unchanged. Other hooks of a block read its output with the zero,
    independent of the order in which they were registered.

    Args:
        layer: number of the block, 1-based.
        last_layer: the channel is zeroed after each block from `layer` to this one; by default only after `layer`.
        position: position, 1-based, without padding; 0, -1, .. count learned tokens (sink token or registers) backwards
            from the last one.
        dimension: channel, 0-based, as in `massive_activations`.

    Raises:
        InputError: if a layer or the position does not exist, or `last_layer` is below `layer`; in a forward pass, if
            the dimension does not exist, or the attention mask is not a padding mask.
        SinklabError: if the blocks cannot be found; in a forward pass, if a KV cache with tokens is passed.
    """
    blocks = residual_blocks(model)
    last_layer = layer if last_layer is None else last_layer
    for number in (layer, last_layer):
        if not 1 <= number <= len(blocks):
            raise InputError(f"layer {number} does not exist: use 1 to {len(blocks)}")
    if last_layer < layer:
        raise InputError(f"layers {layer} to {last_layer} are an empty range: use a last layer of at least {layer}")
    first = 1 - model.leading if isinstance(model, Transformer) else 1
    if position < first:
        raise InputError(f"position {position} does not exist: positions start at {first}")

    def leaving(_: nn.Module, __: tuple[Any, ...], output: Any) -> Any:
        hidden_BTC = hidden_states(output).clone()
        T, C = hidden_BTC.shape[1:]
        if not 0 <= dimension < C:
            raise InputError(f"dimension {dimension} does not exist: use 0 to {C - 1}")
        here_BT = torch.arange(T, device=hidden_BTC.device) == columns(hidden_BTC)[:, None] + position - 1
        hidden_BTC[..., dimension].masked_fill_(here_BT, 0)
        return (hidden_BTC, *output[1:]) if isinstance(output, tuple) else hidden_BTC

    chosen = blocks[layer - 1 : last_layer]
    with (
        first_columns(model) as columns,
        hooked(block.register_forward_hook(leaving, prepend=True) for block in chosen),
    ):
        yield


def swapped_positions(model: LanguageModel, i: int, j: int) -> AbstractContextManager[None]:
    """Swap the learned embeddings of positions i and j in the `with` block (table 7 of the paper, `swapped`).

    Raises:
        InputError: when entered, if the model has no learned positional embeddings, they are offloaded, a position does
            not exist, or i equals j.
    """
    return _rewritten_positions(model, {i: j, j: i})


def replaced_position(model: LanguageModel, i: int, j: int) -> AbstractContextManager[None]:
    """Replace the learned embedding of position i by that of position j in the `with` block (table 7, `replaced`).

    Raises:
        InputError: see `swapped_positions`.
    """
    return _rewritten_positions(model, {i: j})


def check_pair(i: int, j: int) -> None:
    """Check that two positions are at least 1 and different.

    Raises:
        InputError: if a position is below 1, or i equals j.
    """
    if min(i, j) < 1:
        raise InputError(f"position {min(i, j)} does not exist: positions start at 1")
    if i == j:
        raise InputError(f"position {i} with itself changes nothing: use two different positions")


@contextmanager
def _rewritten_positions(model: LanguageModel, source: dict[int, int]) -> Iterator[None]:
    """Give each position that is a key of `source` the learned embedding of the position that is its value."""
    table_PC = learned_positions(model)
    if table_PC is None:
        raise InputError(
            "the model has no learned positional embeddings to change, unlike GPT-2, OPT, GPT-Neo, "
            "or sinklab models with model.position.kind learnable"
        )
    if table_PC.is_meta:
        raise InputError(
            "the model's learned positional embeddings are offloaded and cannot be changed: load the whole model onto "
            "one device"
        )
    check_pair(*next(iter(source.items())))
    for position in {*source, *source.values()}:
        if position > len(table_PC):
            raise InputError(f"position {position} does not exist: the model has positions 1 to {len(table_PC)}")
    table_PC = table_PC.detach()
    rows, others = (torch.tensor(list(pick), device=table_PC.device) - 1 for pick in (source, source.values()))
    before, after = table_PC[rows].clone(), table_PC[others].clone()
    try:
        with torch.no_grad():
            table_PC[rows] = after
        yield
    finally:
        with torch.no_grad():
            table_PC[rows] = before


@contextmanager
def masked_first_keys(model: LanguageModel, n: int) -> Iterator[None]:
    """Hide keys 1..n from every query after the n-th, in every attention layer.

    Queries 1..n are unchanged, so that no row of the attention matrix is empty; keys outside the sequence (sink
    logits, key biases, a learned sink token) remain visible. Sequences of at most n tokens are unchanged.

    Raises:
        InputError: if n is below 1; in a forward pass, if the attention mask is not a padding mask.
        SinklabError: if the blocks cannot be found, or the model's attention accepts no explicit mask; in a forward
            pass, if the keys cannot be hidden in every attention layer, or a KV cache with tokens is passed.
    """
    if n < 1:
        raise InputError(f"{n} keys to hide: use at least 1")
    if not isinstance(model, Transformer):
        with first_columns(model) as columns, hooked(_HiddenKeys(model, n, columns).register()):
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


class _HiddenKeys:
    """Hooks that hide the first n keys, and count the attention layers reached in the current forward pass."""

    def __init__(self, model: "PreTrainedModel", n: int, columns: FirstColumns) -> None:
        implementation, kinds = str(model.config._attn_implementation), anatomy.layer_kinds(model.config)
        if any(name in implementation for name in MASKLESS):
            raise SinklabError(
                f"the attention implementation {implementation!r} accepts no explicit mask, so no keys can be hidden: "
                'load the model with attn_implementation="sdpa"'
            )
        self._model, self._n, self._columns = model, n, columns
        self._blocks, self._true_hides = residual_blocks(model), family_of(model).true_hides
        self._hybrid = bool(kinds.linear) or len(kinds.attention) < kinds.total
        self._expected, self._reached, self._running = anatomy.attention_layers(model.config), 0, False

    def register(self) -> Iterator[Any]:
        yield self._blocks[0].register_forward_pre_hook(self._beginning)
        yield self._model.register_forward_hook(self._ending)
        for block in self._blocks:
            parts = [part for part in block.modules() if part is not block]
            takers = [part for part in parts if "attention_mask" in inspect.signature(part.forward).parameters]
            for part in takers:
                if not any(inner is not part and inner in takers for inner in part.modules()):
                    yield part.register_forward_pre_hook(self._attending, with_kwargs=True)

    def _beginning(self, _: nn.Module, __: tuple[Any, ...]) -> None:
        self._reached, self._running = 0, True

    def _ending(self, _: nn.Module, __: tuple[Any, ...], ___: Any) -> None:
        if self._running and self._reached != self._expected:
            raise SinklabError(
                f"the first keys were hidden in {self._reached} of {self._expected} attention layers of a "
                f"{self._model.config.model_type!r} model: it does not pass `attention_mask` to each of them once, as "
                "other Hugging Face models do"
            )
        self._running = False

    def _attending(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        names = list(inspect.signature(module.forward).parameters)
        arguments = dict(zip(names, args, strict=False)) | kwargs
        states_BTC = next(value for value in arguments.values() if isinstance(value, Tensor))
        mask = arguments.get("attention_mask")
        if self._hybrid and not getattr(module, "is_causal", False):
            return None  # a recurrent layer
        if mask is not None and not isinstance(mask, Tensor):
            raise SinklabError(f"{type(module).__name__} uses a {type(mask).__name__} as mask: no key can be hidden")
        self._reached += 1
        place_T = torch.arange(states_BTC.shape[1], device=states_BTC.device)
        first_B1 = self._columns(states_BTC)[:, None]
        late_BT = place_T >= first_B1 + self._n
        hidden_B1TT = (late_BT[:, :, None] & ((place_T >= first_B1) & ~late_BT)[:, None, :])[:, None]
        if mask is None:
            mask = (place_T <= place_T[:, None]) & ~hidden_B1TT
        elif mask.dtype != torch.bool:
            mask = mask.masked_fill(hidden_B1TT, torch.finfo(mask.dtype).min)
        else:
            mask = mask | hidden_B1TT if self._true_hides else mask & ~hidden_B1TT
        place = names.index("attention_mask")
        if place < len(args):
            return (*args[:place], mask, *args[place + 1 :]), kwargs
        return args, kwargs | {"attention_mask": mask}
