"""Conversion between a sinklab transformer with the architecture of Llama and a Hugging Face Llama."""

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from sinklab.attention.biases import NoBias
from sinklab.attention.config import CausalMask
from sinklab.attention.operations import Softmax
from sinklab.errors import InputError
from sinklab.model.config import ModelConfig
from sinklab.model.mixer import AttentionOnly
from sinklab.model.norm import NormConfig
from sinklab.model.position import Rotary
from sinklab.model.transformer import Transformer
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
