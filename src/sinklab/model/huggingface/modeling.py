"""A sinklab transformer as transformers calls it: `from_pretrained`, `generate` with a cache, a loss over labels.

B batch, T tokens, V vocabulary.
"""

from typing import Any

import torch
from torch import Tensor, nn
from transformers.generation.utils import GenerationMixin
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.modeling_utils import PreTrainedModel

from sinklab.errors import InputError
from sinklab.model.config import ModelConfig
from sinklab.model.huggingface.configuration import SinklabConfig
from sinklab.model.loss import IGNORED
from sinklab.model.past import Past
from sinklab.model.position import DistanceTerm
from sinklab.model.transformer import Transformer


class SinklabForCausalLM(PreTrainedModel, GenerationMixin):
    """Any variant of sinklab, behind the interface of a causal language model of transformers.

    Attributes:
        transformer: the model itself; what sinklab measures.
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
        """Logits of the next token.

        Args:
            input_ids: (B, T), those that continue `past_key_values` where it is given.
            attention_mask: 1 at tokens and 0 at padding, which must be on the right.
            past_key_values: of an earlier call with `use_cache`; the tokens are added to it.
            labels: (B, T), the tokens to be predicted (transformers shifts them); IGNORED ones do not count, nor do
                those that a prefix mask shows to every query.
            use_cache: return a past that can be continued; the default is not to.
            logits_to_keep: so many of the last positions, or these; 0 for all.
            others: what transformers hands to every model. `position_ids` are not looked at: a token stands where it is
                in its sequence.

        Raises:
            InputError: padding on the left or within a sequence, embeddings in the place of tokens, attention matrices
                or hidden states as a result, or a cache that is not of this model.
        """
        _check_supported(others)
        _check_padding(attention_mask)
        if past_key_values is not None and not isinstance(past_key_values, Past):
            if past_key_values.get_seq_length():
                raise InputError(
                    f"a {type(past_key_values).__name__} was filled by another model: continue from the "
                    "past_key_values that this model returned"
                )
            past_key_values = None
        past = self.transformer.new_past() if use_cache and past_key_values is None else past_key_values
        first = 0 if past is None else past.get_seq_length()
        hidden_BTE = self.transformer.hidden(input_ids, past)
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) and logits_to_keep else slice(None)
        logits_BTV = self.transformer.head(
            hidden_BTE[:, logits_to_keep if isinstance(logits_to_keep, Tensor) else kept]
        )
        loss = None
        if labels is not None:
            shown = max(self.transformer.config.first_target - 1 - first, 0)
            labels = torch.cat(
                (labels.new_full((len(labels), shown), IGNORED)[:, : labels.shape[1]], labels[:, shown:]), 1
            )
            counted = {name: others[name] for name in ("num_items_in_batch",) if name in others}
            loss = self.loss_function(logits_BTV, labels, vocab_size=logits_BTV.shape[-1], **counted)
        output = CausalLMOutputWithPast(loss=loss, logits=logits_BTV, past_key_values=past)  # type: ignore[arg-type]
        return output.to_tuple() if return_dict is False else output

    def prepare_inputs_for_generation(  # type: ignore[override]
        self, input_ids: Tensor, past_key_values: Past | None = None, **others: Any
    ) -> dict[str, Any]:
        """The tokens that the cache does not have yet, and what `forward` takes."""
        read = 0 if past_key_values is None else past_key_values.get_seq_length()
        wanted = {name: others[name] for name in ("attention_mask", "use_cache", "logits_to_keep") if name in others}
        return {"input_ids": input_ids[:, read:], "past_key_values": past_key_values, **wanted}

    @classmethod
    def _supports_default_dynamic_cache(cls) -> bool:
        """No: the first call makes a `Past`, and returns it."""
        return False

    def get_input_embeddings(self) -> nn.Module:
        return self.transformer.embedding

    def get_output_embeddings(self) -> nn.Module:
        return self.transformer.head

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        """Weights start as the transformer has them; after loading, what is not stored is worked out again."""
        if isinstance(module, DistanceTerm):
            module.reset()


def _check_supported(others: dict[str, Any]) -> None:
    if others.get("inputs_embeds") is not None:
        raise InputError("a sinklab model reads tokens: give input_ids, not inputs_embeds")
    for name in ("output_attentions", "output_hidden_states"):
        if others.get(name):
            raise InputError(f"{name}: a sinklab model returns logits only; sinklab.measure watches what is inside it")


def _check_padding(attention_mask: Tensor | None) -> None:
    """Padding on the right changes nothing before it; elsewhere it would be read as text."""
    if attention_mask is None:
        return
    if attention_mask.dim() != 2:
        raise InputError(f"attention_mask is {tuple(attention_mask.shape)}: give one of (sequences, tokens)")
    if bool((attention_mask[:, 1:] > attention_mask[:, :-1]).any()):
        raise InputError(
            "there is padding before a token, and a sinklab model has no mask for it: pad on the right, or generate "
            "for prompts of one length at a time"
        )
