"""A sinklab transformer for transformers: `from_pretrained`, `generate` with a cache, a loss over labels.

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
from sinklab.model.huggingface.padding import Padding, padding_of
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
            attention_mask: 1 at tokens and 0 at padding, on the left, the right or both; (B, S), the tokens of
                `past_key_values` included. Padding counts nowhere, and the logits there have no meaning.
            past_key_values: of an earlier call with `use_cache`; the tokens are added to it.
            labels: (B, T), the tokens to be predicted (transformers shifts them); IGNORED ones do not count, nor does
                padding, nor do those that a prefix mask shows to every query.
            use_cache: return a past that can be continued; the default is not to.
            logits_to_keep: so many of the last positions, or these; 0 for all.
            others: what transformers hands to every model. `position_ids` are not looked at: a token's position is its
                place in its sequence, padding left out.

        Raises:
            InputError: padding within a sequence, a mask of another shape, embeddings in the place of tokens, attention
                matrices or hidden states as a result, or a cache that is not of this model.
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
        """`Transformer.hidden`, which knows padding on the left: that on the right is put there, where it matters.

        It does where it is kept in a cache, and where a mask lets earlier queries see it.
        """
        if padding is None:
            return self.transformer.hidden(tokens_BT, past)
        before_B, behind_B1 = padding.before_B, padding.behind_B[:, None]
        if not bool(behind_B1.any()) or (past is None and self.transformer.config.shared_tokens == 1):
            padded = past is not None or bool(before_B.any())
            return self.transformer.hidden(tokens_BT, past, before_B if padded else None)
        T = tokens_BT.shape[1]
        at_T = torch.arange(T, device=tokens_BT.device)
        turned_BT = tokens_BT.gather(1, (at_T - behind_B1) % T)
        hidden_BTE = self.transformer.hidden(turned_BT, past, before_B + padding.behind_B)
        return hidden_BTE.gather(1, ((at_T + behind_B1) % T)[..., None].expand_as(hidden_BTE))

    def _counted(self, labels_BT: Tensor, first: int, padding: Padding | None) -> Tensor:
        """The labels without padding and those tokens that are not predicted; `first` tokens are before them."""
        at_T = torch.arange(first, first + labels_BT.shape[1], device=labels_BT.device)
        first_counted = self.transformer.config.first_target - 1
        if padding is None:
            return labels_BT.masked_fill(at_T < first_counted, IGNORED)
        before_B1, end_B1 = padding.before_B[:, None], (first + labels_BT.shape[1] - padding.behind_B)[:, None]
        return labels_BT.masked_fill((at_T < before_B1 + first_counted) | (at_T >= end_B1), IGNORED)

    def prepare_inputs_for_generation(  # type: ignore[override]
        self, input_ids: Tensor, past_key_values: Past | None = None, **kwargs: Any
    ) -> dict[str, Any]:
        """The tokens that the cache does not have yet, and what `forward` takes.

        Only with a parameter of the name `kwargs` does `generate` take what `forward` does (transformers 5.17 to 5.23).

        Raises:
            InputError: sequences that end with padding, which cannot be continued.
        """
        mask = kwargs.get("attention_mask")
        if mask is not None and not bool(mask[:, -1].all()):
            raise InputError(
                "the prompts are padded on the right, where new tokens come: pad them on the left, with "
                "tokenizer.padding_side = 'left'"
            )
        read = 0 if past_key_values is None else past_key_values.get_seq_length()
        wanted = {name: kwargs[name] for name in ("attention_mask", "use_cache", "logits_to_keep") if name in kwargs}
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
