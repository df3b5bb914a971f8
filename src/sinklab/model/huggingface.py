"""A sinklab transformer for transformers: config.json, `from_pretrained`, `generate` with a cache, a loss over labels.

B batch, T tokens, S tokens of a past and those that continue it, V vocabulary.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers.configuration_utils import PreTrainedConfig
from transformers.generation.utils import GenerationMixin
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.modeling_utils import PreTrainedModel

from sinklab.errors import InputError
from sinklab.model.config import ModelConfig
from sinklab.model.loss import IGNORED
from sinklab.model.past import Past
from sinklab.model.position import DistanceTerm
from sinklab.model.transformer import Transformer

MODEL_TYPE = "sinklab"
DERIVED = {
    "vocab_size": "vocab_size",
    "hidden_size": "width",
    "intermediate_size": "ffn_width",
    "num_hidden_layers": "layers",
    "num_attention_heads": "heads",
    "num_key_value_heads": "kv_heads",
    "max_position_embeddings": "context",
}
"""Names of transformers for the sizes of a recipe."""


class SinklabConfig(PreTrainedConfig):
    """config.json of an exported run.

    Args:
        model: model part of a recipe, with `vocab_size` set.
        **others: keys common to all transformers configs; the sizes in DERIVED are always those of `model`.
    """

    model_type = MODEL_TYPE

    def __init__(self, model: Mapping[str, Any] | None = None, **others: Any) -> None:
        self.model = dict(model or {})
        for name, ours in DERIVED.items():
            others.pop(name, None)
            setattr(self, name, self.model.get(ours))
        if self.model.get("kv_heads") is None:
            self.num_key_value_heads = self.model.get("heads")
        others.setdefault("tie_word_embeddings", False)
        super().__init__(**others)


@dataclass(frozen=True)
class Padding:
    """Number of the S tokens of each sequence that are padding, at its start and at its end."""

    before_B: Tensor
    behind_B: Tensor


def padding_of(mask_BS: Tensor | None, tokens_BT: Tensor, past: Past | None) -> Padding | None:
    """Read the padding from an attention mask, or without a mask from the past; None if there is none.

    Args:
        mask_BS: non-zero at tokens, including those of the past.
        tokens_BT: tokens that continue the past.

    Raises:
        InputError: if the mask has a wrong shape, or padding between tokens or after tokens that continue a past.
    """
    earlier, padded_B = (0, None) if past is None else (past.get_seq_length(), past.padding_B)
    if mask_BS is None:
        return None if padded_B is None else Padding(padded_B, torch.zeros_like(padded_B))
    B, S = len(tokens_BT), earlier + tokens_BT.shape[1]
    if tuple(mask_BS.shape) != (B, S):
        raise InputError(
            f"attention_mask has shape {tuple(mask_BS.shape)}: expected (sequences, tokens), here ({B}, {S}), those in "
            "past_key_values included"
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
        raise InputError("tokens that continue past_key_values are padding: pad on the left, before the first tokens")
    return Padding(before_B, behind_B)


class SinklabForCausalLM(PreTrainedModel, GenerationMixin):
    """Any variant of sinklab, with the interface of a causal language model of transformers.

    Attributes:
        transformer: the model itself, which sinklab measures.
    """

    config_class = SinklabConfig
    base_model_prefix = "transformer"
    main_input_name = "input_ids"
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
        **others: Any,
    ) -> CausalLMOutputWithPast | tuple[Tensor, ...]:
        """Compute the logits of the next token.

        Args:
            input_ids: (B, T); with `past_key_values` the tokens that continue it.
            attention_mask: 1 at tokens and 0 at padding, on the left, the right or both; (B, S), the tokens of
                `past_key_values` included. Padding is ignored, and the logits there have no meaning.
            past_key_values: cache returned by an earlier call with `use_cache`; it is extended.
            labels: (B, T), the tokens to be predicted (transformers shifts them); IGNORED ones do not count, nor does
                padding, nor do tokens of a prefix that a mask shows to every query.
            use_cache: return a cache that can be continued; off by default.
            logits_to_keep: the number of last positions, or these positions; 0 for all.
            others: arguments common to all transformers models. `position_ids` are ignored: a token's position is its
                index in its sequence without padding.

        Raises:
            InputError: if a sequence has padding inside, the mask has a wrong shape, embeddings are passed instead of
                tokens, attention matrices or hidden states are requested, or the cache is from another model.
        """
        _check_supported(others)
        if past_key_values is not None and not isinstance(past_key_values, Past):
            if past_key_values.get_seq_length():
                raise InputError(
                    f"a {type(past_key_values).__name__} was filled by another model: continue from the "
                    "past_key_values that this model returned"
                )
            past_key_values = None
        past = self.transformer.new_past() if use_cache and past_key_values is None else past_key_values
        first = 0 if past is None else past.get_seq_length()
        padding = padding_of(attention_mask, input_ids, past)
        hidden_BTE = self._hidden(input_ids, past, padding)
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) and logits_to_keep else slice(None)
        logits_BTV = self.transformer.head(
            hidden_BTE[:, logits_to_keep if isinstance(logits_to_keep, Tensor) else kept]
        )
        loss = None
        if labels is not None:
            labels = self._counted(labels, first, padding)
            counted = {name: others[name] for name in ("num_items_in_batch",) if name in others}
            loss = self.loss_function(logits_BTV, labels, vocab_size=logits_BTV.shape[-1], **counted)
        output = CausalLMOutputWithPast(loss=loss, logits=logits_BTV, past_key_values=past)  # type: ignore[arg-type]
        return output.to_tuple() if return_dict is False else output

    def _hidden(self, tokens_BT: Tensor, past: Past | None, padding: Padding | None) -> Tensor:
        """`Transformer.hidden`, which supports padding on the left only: padding on the right is moved there.

        Not where it has no effect: without a cache, and where no earlier query can see it.
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
        """The labels with padding and unpredicted tokens IGNORED; `first` is their first position."""
        at_T = torch.arange(first, first + labels_BT.shape[1], device=labels_BT.device)
        first_counted = self.transformer.config.first_target - 1
        if padding is None:
            return labels_BT.masked_fill(at_T < first_counted, IGNORED)
        before_B1, end_B1 = padding.before_B[:, None], (first + labels_BT.shape[1] - padding.behind_B)[:, None]
        return labels_BT.masked_fill((at_T < before_B1 + first_counted) | (at_T >= end_B1), IGNORED)

    def prepare_inputs_for_generation(  # type: ignore[override]
        self, input_ids: Tensor, past_key_values: Past | None = None, **kwargs: Any
    ) -> dict[str, Any]:
        """The tokens that the cache lacks, and the arguments of `forward`.

        `generate` accepts those only with a parameter of the name `kwargs` (transformers 5.17 to 5.23).

        Raises:
            InputError: sequences that end with padding, which cannot be continued.
        """
        mask = kwargs.get("attention_mask")
        if mask is not None and not bool(mask[:, -1].all()):
            raise InputError(
                "the prompts are padded on the right, where new tokens are appended: pad them on the left, with "
                "tokenizer.padding_side = 'left'"
            )
        read = 0 if past_key_values is None else past_key_values.get_seq_length()
        wanted = {name: kwargs[name] for name in ("attention_mask", "use_cache", "logits_to_keep") if name in kwargs}
        return {"input_ids": input_ids[:, read:], "past_key_values": past_key_values, **wanted}

    @classmethod
    def _supports_default_dynamic_cache(cls) -> bool:
        """False: the first call creates a `Past` and returns it."""
        return False

    def get_input_embeddings(self) -> nn.Module:
        return self.transformer.embedding

    def get_output_embeddings(self) -> nn.Module:
        return self.transformer.head

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        """Weights are the transformer's initial ones; after loading, values that are not stored are recomputed."""
        if isinstance(module, DistanceTerm):
            module.reset()


def _check_supported(others: dict[str, Any]) -> None:
    if others.get("inputs_embeds") is not None:
        raise InputError("a sinklab model needs tokens: pass input_ids, not inputs_embeds")
    for name in ("output_attentions", "output_hidden_states"):
        if others.get(name):
            raise InputError(f"{name}: a sinklab model returns logits only; use sinklab.measure for its attention")
