"""Presses of NVIDIA/kvpress: read a prompt with a press, and its continuation with the KV cache that the press leaves.

A press is a context manager, `with press(model)`, in whose block the forward pass of a prompt removes keys and values
from the cache. It uses forward hooks of the attention modules. sinklab does not import kvpress, but uses three names
of it:

    press.score(module, hidden_states, keys, ..)    scores (B, G, S) of keys, of which the press keeps the highest
    press.press                                     press whose scores another one uses, as in AdaKVPress
    module.masked_key_indices                       keys (sequence, head, key) that are hidden instead of removed, as
                                                    the heads of a layer keep different numbers of keys

kvpress hides such keys by fake keys, found for the queries of a single token. Here the mask of the attention hides
them, so that the continuation is read in one pass. The mask also allows a different number of keys in every layer.

kvpress 0.5 reads the arguments of attention modules by the names that transformers had until 5.2 (`past_key_values`,
`cache_position`). They are added to the arguments while the press is active.
"""

import copy
import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from transformers import DynamicCache

from sinklab.attention.layer_call import LayerCall
from sinklab.attention.masks import Dense
from sinklab.errors import InputError
from sinklab.models.adapter import Adapter
from sinklab.models.families import sliding_window
from sinklab.models.hooks import CACHE, FORMER, evaluating, first_input, hooked, probed_alone
from sinklab.models.huggingface.interface import attention_computed_by
from sinklab.models.huggingface.pretrained_adapter import HuggingFaceAdapter


class Press(Protocol):
    """Context manager of a model that removes keys and values from the cache in the forward pass of a prompt."""

    def __call__(self, model: Any) -> AbstractContextManager[Any]: ...


@dataclass(frozen=True)
class PressedRead:
    """Sequences that were read with a press.

    Attributes:
        hidden_NTE: final hidden states, those of the continuation with the cache that the press left.
        kept_NLG: number of keys of the prompt that each KV head of each layer keeps.
        first_kept_NLG: True where the key of the first token is kept, also if some of its channels are set to zero.
    """

    hidden_NTE: Tensor
    kept_NLG: Tensor
    first_kept_NLG: Tensor


def read_pressed(adapter: Adapter, tokens_NT: Tensor, press: Press, prompt: int, seed: int = 0) -> PressedRead:
    """Read sequences whose first `prompt` tokens are read with a press, one sequence at a time.

    The prompt is read by the model's own attention functions. The tokens after it have their positions in the text;
    those of the cache if the press rotates keys to these (`rerotate_keys`).

    Raises:
        InputError: if the model is not a Hugging Face model of the kind that kvpress supports, a layer has a sliding
            window, or the press raises an exception.
    """
    modules = [getattr(block, "self_attn", None) for block in adapter.blocks]
    if not isinstance(adapter, HuggingFaceAdapter) or None in modules or not modules:
        raise InputError("presses need a Hugging Face model with a module `self_attn` in every block")
    window = sliding_window(adapter.module.config)
    if window and window < tokens_NT.shape[1]:
        raise InputError(f"presses need full attention, and layers have a sliding window of {window} tokens")
    with torch.random.fork_rng():
        torch.manual_seed(seed)  # some presses draw random numbers
        read = [_read_one(adapter, modules, row[None].to(adapter.device), press, prompt) for row in tokens_NT]
    hidden, kept, first = (torch.cat(found) for found in zip(*read, strict=True))
    return PressedRead(hidden, kept, first)


def with_first_keys(press: Any, first: int, prompt: int, *, kept: bool) -> Press | None:
    """Return a copy of a press that keeps the first keys of a prompt, or drops them, by their scores.

    None if the press does not score keys: neither it nor a press that it wraps has a method `score`.

    Raises:
        InputError: in the forward pass of a prompt, if the press scores only some of its keys at a time.
    """
    changed = copy.copy(press)
    if not callable(getattr(press, "score", None)):
        inner = getattr(press, "press", None)
        changed.press = None if inner is None else with_first_keys(inner, first, prompt, kept=kept)
        return None if changed.press is None else changed

    def score(module: nn.Module, hidden_states: Tensor, keys: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if keys.shape[2] != prompt:
            raise InputError("the press scores parts of the prompt, so that its first keys cannot be kept or dropped")
        score_BGS = type(press).score(changed, module, hidden_states, keys, *args, **kwargs).clone()
        score_BGS[..., :first] = torch.inf if kept else -torch.inf
        return score_BGS

    changed.score = score
    return changed


def _read_one(
    adapter: HuggingFaceAdapter, modules: list[Any], tokens_1T: Tensor, press: Press, prompt: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Return hidden states (1, T, E), number of kept keys (1, L, G) and whether the first is kept (1, L, G)."""
    model, cache = adapter.module, DynamicCache()
    hidden_GS: dict[nn.Module, Tensor] = {}  # True for keys of the cache that are hidden

    def continued(module: nn.Module, layer: LayerCall) -> Tensor:
        H, G, S = layer.call.q_BHTD.shape[1], *layer.call.k_BGTD.shape[1:3]
        seen_GTS = torch.ones(G, layer.length, S, dtype=torch.bool, device=layer.call.k_BGTD.device)
        seen_GTS = seen_GTS.tril(S - layer.length)
        seen_GTS[..., : S - layer.length] &= ~hidden_GS[module][:, None]
        return layer.changed(mask=Dense(seen_GTS.repeat_interleave(H // G, 0)[None])).output()

    with probed_alone(model), evaluating(model), warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # of the former name of the cache
        with _watched(modules, cache) as before:
            try:
                with press(model):
                    read_1PE = model.base_model(
                        input_ids=tokens_1T[:, :prompt], use_cache=True, **{FORMER: cache}
                    ).last_hidden_state
            except Exception as error:
                raise InputError(f"{press!r} failed: {type(error).__name__}: {error}") from error
        kept, first_kept = [], []
        for module in modules:
            keys_GSD = cache.layers[module.layer_idx].keys[0]
            hidden_GS[module] = torch.zeros(keys_GSD.shape[:2], dtype=torch.bool, device=keys_GSD.device)
            if (masked := getattr(module, "masked_key_indices", None)) is not None:
                hidden_GS[module][masked[1], masked[2]] = True
                module.masked_key_indices = None  # as the mask hides them
            first_GS = ((keys_GSD == before[module]) | (keys_GSD == 0)).all(-1)
            first_kept.append((first_GS & ~hidden_GS[module]).any(-1))
            kept.append((~hidden_GS[module]).sum(-1))
        start = cache.get_seq_length() if getattr(press, "rerotate_keys", False) else prompt
        places_1T = torch.arange(start, start + tokens_1T.shape[1] - prompt, device=tokens_1T.device)[None]
        with attention_computed_by(model, continued):
            rest_1TE = model.base_model(
                input_ids=tokens_1T[:, prompt:], position_ids=places_1T, use_cache=True, **{FORMER: cache}
            ).last_hidden_state
    both_1TE = torch.cat((read_1PE, rest_1TE), 1)
    return both_1TE, torch.stack(kept).cpu()[None], torch.stack(first_kept).cpu()[None]


@contextmanager
def _watched(modules: list[Any], cache: Any) -> Iterator[dict[nn.Module, Tensor]]:
    """Yield the first key (G, 1, D) of every module, before a press that is entered later removes it.

    The arguments of the modules have the former names in addition to those of the installed transformers.
    """
    first: dict[nn.Module, Tensor] = {}

    def entering(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        x_BTE, start = first_input(args, kwargs), cache.get_seq_length(module.layer_idx)
        places_T = torch.arange(start, start + x_BTE.shape[1], device=x_BTE.device)
        given = kwargs[CACHE] if CACHE in kwargs else kwargs[FORMER]
        return args, {**kwargs, FORMER: given, "cache_position": places_T}

    def leaving(module: Any, _: Any, __: Any) -> None:
        first.setdefault(module, cache.layers[module.layer_idx].keys[0, :, :1].clone())

    handles = [module.register_forward_pre_hook(entering, with_kwargs=True) for module in modules]
    with hooked([*handles, *(module.register_forward_hook(leaving) for module in modules)]):
        yield first
