"""Hide the first keys in a Hugging Face model through the attention mask.

Attention modules of transformers accept `attention_mask`, which is None (causal), boolean or additive. One hook that
changes it therefore covers all model families, also those that do not use transformers' attention interface. The
model's own code still computes the attention. Calls of the hook are counted in every forward pass: a number other than
that of the attention layers is an error.
"""

import inspect
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel

from sinklab.errors import SinklabError
from sinklab.models import families as anatomy
from sinklab.models.families import family_of
from sinklab.models.hooks import FirstColumns, forward_pass_hooks

MASKLESS = ("flash", "flex", "paged")
"""Substrings of the names of attention implementations that accept no explicit mask."""


class HiddenKeys:
    """Hooks that hide the first n keys from later queries, and count the attention layers in which they do.

    Args:
        blocks: decoder blocks of the model.
        columns: function yielded by `HuggingFaceAdapter.first_columns`.

    Raises:
        SinklabError: if no layer has softmax attention; in a forward pass, if the attention implementation accepts no
            explicit mask, or the keys cannot be hidden in every attention layer.
    """

    def __init__(self, model: PreTrainedModel, blocks: Sequence[nn.Module], n: int, columns: FirstColumns) -> None:
        kinds = anatomy.layer_kinds(model.config)
        self._model, self._n, self._columns = model, n, columns
        self._blocks, self._true_hides = blocks, family_of(model).true_hides
        self._hybrid = bool(kinds.linear) or len(kinds.attention) < kinds.total
        self._expected, self._reached, self._running = anatomy.attention_layers(model.config), 0, False

    def register(self) -> Iterator[RemovableHandle]:
        """Register the hooks and yield their handles."""
        yield self._blocks[0].register_forward_pre_hook(self._beginning)
        yield from forward_pass_hooks({self._model, *anatomy.bodies(self._model)}, self._entering, self._ending)
        for block in self._blocks:
            parts = [part for part in block.modules() if part is not block]
            takers = [part for part in parts if "attention_mask" in inspect.signature(part.forward).parameters]
            attention = [part for part in takers if hasattr(part, "is_causal")]
            inside = {inner for part in attention for inner in part.modules() if inner is not part}  # such as indexers
            takers = [part for part in takers if part not in inside]
            for part in takers:
                if not any(inner is not part and inner in takers for inner in part.modules()):
                    yield part.register_forward_pre_hook(self._attending, with_kwargs=True)

    def _entering(self, *_: Any) -> None:
        self._running = False

    def _beginning(self, _: nn.Module, __: tuple[Any, ...]) -> None:
        self._reached, self._running = 0, True

    def _ending(self, output: Any) -> None:
        if output is not None and self._running and self._reached != self._expected:
            raise SinklabError(
                f"the first keys were hidden in {self._reached} of {self._expected} attention layers of a "
                f"{self._model.config.model_type!r} model: it does not pass `attention_mask` to each of them once, as "
                "other Hugging Face models do"
            )

    def _attending(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        names = list(inspect.signature(module.forward).parameters)
        arguments = dict(zip(names, args, strict=False)) | kwargs
        states_BTC = next(value for value in arguments.values() if isinstance(value, Tensor))
        mask = arguments.get("attention_mask")
        if self._hybrid and not getattr(module, "is_causal", False):
            return None  # a recurrent layer
        if mask is not None and not isinstance(mask, Tensor):
            raise SinklabError(f"{type(module).__name__} uses a {type(mask).__name__} as mask: no key can be hidden")
        implementation = str(self._model.config._attn_implementation)  # sinklab's own while calls are intercepted
        if any(name in implementation for name in MASKLESS):
            raise SinklabError(
                f"the attention implementation {implementation!r} accepts no explicit mask, so no keys can be hidden: "
                'load the model with attn_implementation="sdpa"'
            )
        self._reached += 1
        place_T = torch.arange(states_BTC.shape[1], device=states_BTC.device)
        if mask is not None and mask.shape[-1] != len(place_T):
            raise SinklabError(
                f"{type(module).__name__} has a mask of {mask.shape[-1]} keys for {len(place_T)} tokens: no key can be "
                "hidden"
            )
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
