"""Hugging Face wrapper of a sinklab transformer: config, `from_pretrained`, `generate` with a KV cache, loss.

B batch, T tokens, S cached and new tokens, V vocabulary.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor, nn
from transformers.configuration_utils import PreTrainedConfig
from transformers.generation.utils import GenerationMixin
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.modeling_utils import PreTrainedModel

from sinklab.errors import InputError
from sinklab.model.block import Past
from sinklab.model.config import ModelConfig
from sinklab.model.llama import SIZES
from sinklab.model.loss import IGNORED
from sinklab.model.position import DistanceTerm
from sinklab.model.transformer import Transformer, check_on_one_device

MODEL_TYPE = "sinklab"
CACHE = next(field.name for field in fields(CausalLMOutputWithPast) if field.name in ("cache", "past_key_values"))
"""Name of the KV cache in outputs: `cache` from transformers 5.24 on, `past_key_values` before."""


class SinklabConfig(PreTrainedConfig):
    """Config of a sinklab model in transformers (config.json).

    Args:
        model: model section of a recipe, with `vocab_size` set. transformers also creates a default config without
            arguments; None leaves the sizes unset.
        **others: keys common to all transformers configs. Sizes (the keys of SIZES) are ignored and taken from `model`.
    """

    model_type = MODEL_TYPE

    def __init__(self, model: Mapping[str, Any] | None = None, **others: Any) -> None:
        self.model = dict(model or {})
        for name, ours in SIZES.items():
            others.pop(name, None)
            setattr(self, name, self.model.get(ours))
        if self.model.get("kv_heads") is None:
            self.num_key_value_heads = self.model.get("heads")
        others.setdefault("tie_word_embeddings", False)
        super().__init__(**others)


@dataclass(frozen=True)
class Padding:
    """Number of padding tokens at the start (cached ones included) and at the end of each sequence."""

    before_B: Tensor
    behind_B: Tensor


def padding_of(mask_BS: Tensor | None, tokens_BT: Tensor, past: Past | None) -> Padding | None:
    """Return the padding according to an attention mask, or that of the cache if there is no mask.

    Returns None if neither the mask nor the cache has padding.

    Args:
        mask_BS: attention mask, non-zero at real tokens, including cached tokens; None without a mask.
        tokens_BT: new tokens.
        past: cache that these tokens continue; None without a cache.

    Raises:
        InputError: if the mask has a wrong shape, if there is padding between the tokens of a sequence, or if a
            sequence with cached tokens ends with padding.
    """
    earlier, padded_B = (0, None) if past is None else (past.get_seq_length(), past.padding_B)
    if mask_BS is None:
        return None if padded_B is None else Padding(padded_B, torch.zeros_like(padded_B))
    B, S = len(tokens_BT), earlier + tokens_BT.shape[1]
    if tuple(mask_BS.shape) != (B, S):
        raise InputError(
            f"attention_mask has shape {tuple(mask_BS.shape)}: expected (sequences, tokens), here {(B, S)}"
        )
    real_BS = mask_BS.to(tokens_BT.device) != 0
    if padded_B is None and bool(real_BS.all()):
        return None
    count_B = real_BS.sum(1)
    before_B = torch.where(count_B > 0, real_BS.int().argmax(1), S)
    behind_B, at_S = S - before_B - count_B, torch.arange(S, device=real_BS.device)
    if not torch.equal(real_BS, (at_S >= before_B[:, None]) & (at_S < (before_B + count_B)[:, None])):
        raise InputError(
            "there is padding between the tokens of a sequence: pad on the left (tokenizer.padding_side = 'left'), or "
            "on the right if nothing is generated"
        )
    if earlier and bool(behind_B.any()):
        raise InputError("tokens that continue a KV cache are padding: pad on the left, before the first tokens")
    return Padding(before_B, behind_B)


class SinklabForCausalLM(PreTrainedModel, GenerationMixin):
    """A sinklab transformer with the interface of a Hugging Face causal language model.

    Attributes:
        transformer: the sinklab transformer.
    """

    config_class = SinklabConfig
    base_model_prefix = "transformer"
    supports_gradient_checkpointing = True
    _supports_sdpa = True  # `attn_implementation="sdpa"` is accepted; the attention is sinklab's in any case
    _no_split_modules = ["DecoderBlock"]  # noqa: RUF012  as transformers declares it

    def __init__(self, config: SinklabConfig) -> None:
        super().__init__(config)
        self.transformer = Transformer(ModelConfig.model_validate(config.model))
        self.post_init()

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        past_key_values: Past | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        return_dict: bool | None = None,
        cache: Past | None = None,
        **others: Any,
    ) -> CausalLMOutputWithPast | tuple[Tensor, ...]:
        """Compute the next-token logits, (B, T, V), and the mean loss in nats per target if labels are passed.

        Args:
            input_ids: token ids (B, T); with a KV cache, only the new tokens.
            attention_mask: 1 at tokens and 0 at padding, on the left, the right or both; (B, S), including the tokens
                in the KV cache. Logits at padding are undefined.
            past_key_values, cache: KV cache returned by an earlier call with `use_cache`, under either name; it is
                extended in place.
            labels: target token ids (B, T), shifted internally. The loss excludes labels of -100, padding, and targets
                inside the prefix of a prefix mask.
            use_cache: create and return a KV cache, if none is passed; off by default. A passed cache is always used.
            logits_to_keep: number of last positions, or indices of positions, whose logits are computed; 0 for all.
            return_dict: False returns a tuple.
            others: `num_items_in_batch`, if given, divides the summed loss. Other arguments of transformers models are
                ignored, such as `position_ids`: a token's position is its index in the sequence without padding.

        Raises:
            InputError: see `padding_of` and `check_on_one_device`. Also if embeddings are passed instead of tokens, if
                attention matrices or hidden states are requested, if labels are passed with `logits_to_keep`, if the KV
                cache is not empty and of another class, or if there are more tokens than learned positional embeddings.
        """
        check_on_one_device(self)
        if others.get("inputs_embeds") is not None:
            raise InputError("a sinklab model needs tokens: pass input_ids, not inputs_embeds")
        if others.get("output_attentions") or others.get("output_hidden_states"):
            raise InputError(
                "output_attentions, output_hidden_states: not supported by sinklab models; use sinklab.measure"
            )
        past = past_key_values if cache is None else cache
        if past is not None and not isinstance(past, Past):
            if past.get_seq_length():
                kind = type(past).__name__
                raise InputError(f"the KV cache is a {kind} filled by another model: pass one of this model")
            past = None
        if labels is not None and (isinstance(logits_to_keep, Tensor) or logits_to_keep):
            raise InputError("labels need the logits of every position: leave out logits_to_keep")
        past = self.transformer.new_past() if use_cache and past is None else past
        first = 0 if past is None else past.get_seq_length()
        padding = padding_of(attention_mask, input_ids, past)
        hidden_BTE = self._hidden(input_ids, past, padding)
        kept = logits_to_keep if isinstance(logits_to_keep, Tensor) else slice(-logits_to_keep or None, None)
        logits_BTV, loss = self.transformer.head(hidden_BTE[:, kept]), None
        if labels is not None:
            labels = self._counted(labels, first, padding)
            counted = {name: others[name] for name in ("num_items_in_batch",) if name in others}
            loss = self.loss_function(logits_BTV, labels, vocab_size=logits_BTV.shape[-1], **counted)
        kept_cache: dict[str, Any] = {CACHE: past}
        output = CausalLMOutputWithPast(loss=loss, logits=logits_BTV, **kept_cache)
        return output.to_tuple() if return_dict is False else output

    def _hidden(self, tokens_BT: Tensor, past: Past | None, padding: Padding | None) -> Tensor:
        """Compute the hidden states of sequences that may be padded.

        `Transformer.hidden` supports left padding only. The tokens of right-padded sequences are therefore shifted
        right, and their hidden states shifted back. This is skipped if there is no cache and no prefix mask, because
        no token then attends to the padding on its right.
        """
        if padding is None:
            return self.transformer.hidden(tokens_BT, past)
        before_B, behind_B1 = padding.before_B, padding.behind_B[:, None]
        if not bool(behind_B1.any()) or (past is None and self.transformer.config.shared_tokens == 1):
            padded = past is not None or bool(before_B.any())
            return self.transformer.hidden(tokens_BT, past, before_B if padded else None)
        T = tokens_BT.shape[1]
        at_T = torch.arange(T, device=tokens_BT.device)
        shifted_BT = tokens_BT.gather(1, (at_T - behind_B1) % T)
        hidden_BTE = self.transformer.hidden(shifted_BT, past, before_B + padding.behind_B)
        return hidden_BTE.gather(1, ((at_T + behind_B1) % T)[..., None].expand_as(hidden_BTE))

    def _counted(self, labels_BT: Tensor, first: int, padding: Padding | None) -> Tensor:
        """Return the labels, IGNORED at padding and before the first target; `first` is the column of label 0."""
        at_T = torch.arange(first, first + labels_BT.shape[1], device=labels_BT.device)
        first_counted = self.transformer.config.first_target - 1
        if padding is None:
            return labels_BT.masked_fill(at_T < first_counted, IGNORED)
        before_B1, end_B1 = padding.before_B[:, None], (first + labels_BT.shape[1] - padding.behind_B)[:, None]
        return labels_BT.masked_fill((at_T < before_B1 + first_counted) | (at_T >= end_B1), IGNORED)

    def prepare_inputs_for_generation(  # type: ignore[override]
        self, input_ids: Tensor, past_key_values: Past | None = None, cache: Past | None = None, **kwargs: Any
    ) -> dict[str, Any]:
        """Return the arguments of `forward` in `generate`: the tokens not cached yet, cache, mask and options.

        `generate` passes mask and options only to a parameter named `kwargs` (transformers 5.21 to 5.24).

        Raises:
            InputError: if a sequence is padded on the right, because it cannot be continued.
        """
        mask = kwargs.get("attention_mask")
        if mask is not None and not bool(mask[:, -1].all()):
            raise InputError("the prompts are padded on the right, not left: set tokenizer.padding_side = 'left'")
        past = past_key_values if cache is None else cache
        read = 0 if past is None else past.get_seq_length()
        wanted = {name: kwargs[name] for name in ("attention_mask", "use_cache", "logits_to_keep") if name in kwargs}
        return {"input_ids": input_ids[:, read:], CACHE: past, **wanted}

    @classmethod
    def _supports_default_dynamic_cache(cls) -> bool:
        """Return False: the model creates its own cache, a `Past`."""
        return False

    def get_input_embeddings(self) -> nn.Module:
        return self.transformer.embedding

    def get_output_embeddings(self) -> nn.Module:
        return self.transformer.head

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        """Recompute constants that are not stored in checkpoints. `Transformer` has already initialised all weights."""
        if isinstance(module, DistanceTerm):
            module.reset()
