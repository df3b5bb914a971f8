"""The first keys hidden from later queries: in our attention cores, and in Hugging Face models through their masks.

Every attention module of transformers takes `attention_mask`, whether its attention goes through the interface or not,
and the masks that it may get are few: none (causal), boolean (True attends; in MPT True hides) and additive. So one
hook serves all families, under any probe. Modules are counted: keys that stay visible somewhere are an error.
"""

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from sinklab.errors import InputError, SinklabError
from sinklab.measuring.surgery.places import FirstTokens, first_tokens, residual_blocks
from sinklab.model.transformer import Transformer
from sinklab.models.hooks import hooked
from sinklab.models.huggingface.anatomy import attention_layers, layer_kinds
from sinklab.models.native import attention_cores

if TYPE_CHECKING:
    from transformers import PreTrainedModel

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
