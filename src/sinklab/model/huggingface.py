"""Hugging Face wrapper of a sinklab transformer: config, `from_pretrained`, `generate` with a KV cache, loss.

B batch, T tokens, S cached and new tokens, V vocabulary.

Conversion between a sinklab transformer with the architecture of Llama and a Hugging Face Llama.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers.configuration_utils import PreTrainedConfig
from transformers.generation.utils import GenerationMixin
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.modeling_utils import PreTrainedModel

from sinklab.attention.biases import NoBias
from sinklab.attention.config import CausalMask
from sinklab.attention.operations import Softmax
from sinklab.errors import InputError
from sinklab.model.config import ModelConfig
from sinklab.model.loss import IGNORED
from sinklab.model.mixer import AttentionOnly
from sinklab.model.norm import NormConfig
from sinklab.model.past import Past
from sinklab.model.position import DistanceTerm, Rotary
from sinklab.model.transformer import Transformer, check_on_one_device
from sinklab.model.values import FullProjection, NoGate, NoValueResidual
from sinklab.schema import Part

if TYPE_CHECKING:
    from transformers import PreTrainedModel

SIZES = {
    "num_hidden_layers": "layers",
    "hidden_size": "width",
    "num_attention_heads": "heads",
    "num_key_value_heads": "kv_heads",
    "intermediate_size": "ffn_width",
    "vocab_size": "vocab_size",
    "max_position_embeddings": "context",
}
"""Recipe key of each size, by its name in transformers' configs."""


def differences(config: ModelConfig) -> dict[str, str]:
    """Describe the settings in which a model differs from a plain Llama, by recipe key; empty if there are none.

    Sizes, RoPE theta and eps may have any value. Projected embeddings and norms with a scalar weight are not
    differences, because `llama_weights` converts them.
    """
    attention, norm = config.attention, config.norm
    if norm.kind == "rmsnorm_single":
        norm = norm.model_copy(update={"kind": "rmsnorm"})
    plain: dict[str, tuple[Any, Any]] = {
        "attention.operation": (attention.operation, Softmax()),
        "attention.bias": (attention.bias, NoBias()),
        "attention.mask": (attention.mask, CausalMask()),
        "attention.softcap": (attention.softcap, None),
        "mixer": (config.mixer, AttentionOnly()),
        "pattern": (config.pattern, None),
        "projection": (config.projection, FullProjection()),
        "position": (config.position, Rotary(theta=getattr(config.position, "theta", 1.0))),
        "norm": (norm, NormConfig(eps=config.norm.eps)),
        "gate": (config.gate, NoGate()),
        "ffn": (config.ffn, "swiglu"),
        "head_outputs": (config.head_outputs, "concat"),
        "exclusive": (config.exclusive, False),
        "value_residual": (config.value_residual, NoValueResidual()),
    }
    return {key: f"model.{key} is {_difference(is_, must)}" for key, (is_, must) in plain.items() if is_ != must}


def llama_sizes(config: ModelConfig) -> dict[str, Any]:
    """Return transformers config values of a Llama-like model with RoPE, by key: sizes, eps, RoPE and flags."""
    assert isinstance(config.position, Rotary)
    return {theirs: getattr(config, ours) for theirs, ours in SIZES.items()} | {
        "num_key_value_heads": config.key_heads,
        "rms_norm_eps": config.norm.eps,
        "rope_parameters": {"rope_type": "default", "rope_theta": config.position.theta},
        "tie_word_embeddings": False,
        "attention_bias": False,
        "mlp_bias": False,
    }


def _difference(is_: Any, must: Any) -> str:
    if not isinstance(is_, Part) or not isinstance(must, Part):
        return f"{is_} (a Llama has {must})"
    if (mine := getattr(is_, "kind", None)) != (theirs := getattr(must, "kind", None)):
        return f"{mine} (a Llama has {theirs})"
    expected = must.model_dump()
    differ = {key: value for key, value in is_.model_dump().items() if value != expected[key]}
    return ", ".join(f"{key}={value} (a Llama has {expected[key]})" for key, value in differ.items())


OUTSIDE = {
    "embedding.weight": "model.embed_tokens.weight",
    "final_norm.weight": "model.norm.weight",
    "head.weight": "lm_head.weight",
}
IN_BLOCK = {
    "attention.qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "attention.out": ("self_attn.o_proj",),
    "ffn.up": ("mlp.gate_proj", "mlp.up_proj"),
    "ffn.down": ("mlp.down_proj",),
    "attention_norm": ("input_layernorm",),
    "ffn_norm": ("post_attention_layernorm",),
}
"""Names of the Llama weights whose concatenation is a weight of a sinklab block."""


def llama_weights(model: Transformer) -> dict[str, Tensor]:
    """Return the model's weights by parameter name in transformers' Llama.

    Fused projections are split. Projections of embeddings are multiplied into the embedding and the LM head in
    float64. The scalar weight of a norm is repeated for every channel. Weights that a Llama does not have, such as sink
    logits, are left out.
    """
    config = model.config
    rows = {"attention.qkv": [n * config.head_width for n in (config.heads, config.key_heads, config.key_heads)]}
    weights: dict[str, Tensor] = {theirs: model.get_parameter(ours) for ours, theirs in OUTSIDE.items()}
    if config.embedding == "projected":
        before, behind = (model.get_parameter(f"{name}.weight").double() for name in ("embedding_map", "head_map"))
        for theirs, matrix in (("model.embed_tokens.weight", before.T), ("lm_head.weight", behind)):
            weights[theirs] = (weights[theirs].double() @ matrix).to(weights[theirs].dtype)
    for i in range(config.layers):
        for ours, theirs in IN_BLOCK.items():
            weight = model.get_parameter(f"blocks.{i}.{ours}.weight")
            parts = weight.split(rows.get(ours, len(weight) // len(theirs)))
            weights |= {f"model.layers.{i}.{name}.weight": part for name, part in zip(theirs, parts, strict=True)}
    gains = {name: weight.expand(config.width) for name, weight in weights.items() if weight.shape == (1,)}
    return {name: weight.detach().contiguous() for name, weight in (weights | gains).items()}


def from_llama(llama: "PreTrainedModel") -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Build the model section of a recipe equivalent to a Llama, and the float32 weights by parameter name in sinklab.

    Tied embeddings become two tensors with the same values.

    Raises:
        InputError: if the Llama has settings that no recipe supports: biases in projections, an activation other than
            SiLU, RoPE scaling, or a head width other than hidden size / heads.
    """
    config = llama.config
    rope: dict[str, Any] = dict(config.rope_parameters or {})
    head_width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    others = {
        "attention_bias": (config.attention_bias, False),
        "mlp_bias": (config.mlp_bias, False),
        "hidden_act": (config.hidden_act, "silu"),
        "rope_type": (rope.get("rope_type", "default"), "default"),
        "head_dim * num_attention_heads": (head_width * config.num_attention_heads, config.hidden_size),
    }
    if wrong := [f"{key} is {is_} (supported: {must})" for key, (is_, must) in others.items() if is_ != must]:
        raise InputError("this Llama has settings that no recipe supports: " + "; ".join(wrong))
    model = {ours: getattr(config, theirs) for theirs, ours in SIZES.items()} | {
        "position": {"kind": "rotary", "theta": float(rope["rope_theta"])},
        "norm": {"kind": "rmsnorm", "eps": config.rms_norm_eps},
    }
    found = {name: weight.detach().float() for name, weight in llama.state_dict().items()}
    weights = {ours: found[theirs] for ours, theirs in OUTSIDE.items()}
    weights["head.weight"] = weights["head.weight"].clone()
    for i in range(config.num_hidden_layers):
        for ours, theirs in IN_BLOCK.items():
            parts = [found[f"model.layers.{i}.{name}.weight"] for name in theirs]
            weights[f"blocks.{i}.{ours}.weight"] = torch.cat(parts) if len(parts) > 1 else parts[0]
    return model, weights


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

        `generate` passes mask and options only to a parameter named `kwargs` (transformers 5.17 to 5.24).

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
