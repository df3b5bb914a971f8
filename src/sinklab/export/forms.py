"""Select a transformers architecture that is equivalent to a sinklab model, and convert the weights.

model                                                           architecture           loads with
the default recipe, of any size                                 LlamaForCausalLM       transformers
the default with a sink logit or off-by-one in every layer      GraniteSWAForCausalLM  transformers
the default with two kinds of layers (mask, RoPE or NoPE)       SmolLM3ForCausalLM     transformers
the default with sandwich norms, QK norm and GeGLU              Gemma3ForCausalLM      transformers
everything else                                                 SinklabForCausalLM     sinklab, or the exported code

GraniteSWA, SmolLM3 and Gemma 3 support causal and sliding-window layers; all windows must have the same width.
GraniteSWA and SmolLM3 support layers without positional embedding (NoPE). GraniteSWA supports a RoPE theta per layer;
Gemma 3 supports one theta for sliding-window layers and one for the others; SmolLM3 supports one theta.

GraniteSWA multiplies the attention output by sigmoid(lse - s), where lse is the log-sum-exp of the scores. This is
equivalent to a sink logit s. Two other architectures have sink logits but cannot be used: the feed-forward layers of
gpt-oss are mixtures of experts without SwiGLU; MiMo-V2-Flash has sink logits only in its sliding-window layers, which
have twice as many KV heads as its other layers.

Gemma 3 multiplies embeddings by the square root of the hidden size, and normalised states by 1 + w, where w is the norm
weight. The weights are converted accordingly. The default GELU of Gemma 3 is approximate; the exported config selects
the exact GELU.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor

from sinklab.attention.biases import BiasParameters
from sinklab.data.tokenizers import Tokenizer
from sinklab.model.config import ModelConfig
from sinklab.model.llama import differences, llama_sizes, llama_weights
from sinklab.model.norm import NormConfig
from sinklab.model.position import NoPosition, Rotary
from sinklab.model.transformer import Transformer

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

CODE = "modeling_sinklab"  # name of the module with the exported code
SINK_LOGITS = ("sink_logit", "off_by_one")
BY_LAYER = {"attention.bias", "attention.mask", "position"}
GEMMA_NORMS = {
    "attention_norm": "input_layernorm",
    "attention_post_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "ffn_post_norm": "post_feedforward_layernorm",
    "attention.q_norm": "self_attn.q_norm",
    "attention.k_norm": "self_attn.k_norm",
}


@dataclass(frozen=True)
class Form:
    """A model converted to a transformers architecture.

    Attributes:
        config: config of the architecture.
        architecture: class name of the model.
        weights: weights by the parameter names of that class.
        is_foreign: True if transformers contains the class; if False, the model's code must be exported too.
    """

    config: "PreTrainedConfig"
    architecture: str
    weights: dict[str, Tensor]
    is_foreign: bool


def form_of(model: Transformer, tokenizer: Tokenizer) -> Form:
    """Convert a model to the first architecture in the table of the module docstring that is equivalent to it.

    The config of the architecture contains the tokenizer's BOS and EOS ids.
    """
    tokens: dict[str, Any] = {"bos_token_id": tokenizer.bos_id, "eos_token_id": tokenizer.eos_id}
    config, kinds = model.config, model.config.layer_kinds
    layers = [config.of_layer(layer) for layer in range(1, config.layers + 1)]
    other = {key for kind in kinds for key in differences(kind)}
    biases = {kind.attention.bias.kind for kind in kinds}
    masks = [layer.attention.mask for layer in layers]
    windows = {mask.width for mask in masks if mask.kind == "window"}
    rotary = [kind for kind in kinds if isinstance(kind.position, Rotary) and kind.position.share == 1]
    is_common = len(rotary) == sum(not isinstance(kind.position, NoPosition) for kind in kinds) > 0
    if not is_common or len(windows) > 1 or any(mask.kind not in ("causal", "window") for mask in masks):
        return _as_itself(model, tokens)
    if not other and len(kinds) == 1:
        from transformers import LlamaConfig

        return Form(LlamaConfig(**llama_sizes(kinds[0]), **tokens), "LlamaForCausalLM", llama_weights(model), True)
    thetas = [layer.position.theta if isinstance(layer.position, Rotary) else 0.0 for layer in layers]  # 0 for NoPE
    sizes = {
        **llama_sizes(rotary[0]),
        **tokens,
        "layer_types": ["sliding_attention" if mask.kind == "window" else "full_attention" for mask in masks],
        "sliding_window": next(iter(windows), config.context),  # must not be None; unused without windows
    }
    if other <= BY_LAYER and biases <= set(SINK_LOGITS):
        return _as_granite(model, sizes, thetas)
    if other <= BY_LAYER and biases == {"none"} and len(kinds) == 2 and len({*thetas} - {0.0}) == 1:
        return _as_smollm3(model, sizes, thetas)
    if other <= BY_LAYER | {"norm", "ffn"} and biases == {"none"} and _is_gemma(kinds):
        return _as_gemma3(model, sizes, thetas)
    return _as_itself(model, tokens)


def _is_gemma(kinds: Sequence[ModelConfig]) -> bool:
    """Return True if norms and feed-forward layers are those of Gemma 3 and all layers have RoPE.

    All layers with the same kind of mask must have the same RoPE theta.
    """
    config = kinds[0]
    norm = NormConfig(placement="sandwich", qk_norm=True, eps=config.norm.eps)
    masks = {kind.attention.mask.kind for kind in kinds}
    rotary = all(isinstance(kind.position, Rotary) for kind in kinds)
    by_mask = len(masks) == len({(kind.attention.mask.kind, kind.position) for kind in kinds})
    return rotary and by_mask and config.norm == norm and config.ffn == "geglu"


def _as_granite(model: Transformer, sizes: dict[str, Any], thetas: list[float]) -> Form:
    from transformers import GraniteSWAConfig

    config = GraniteSWAConfig(
        **sizes,
        attention_multiplier=1 / math.sqrt(model.config.head_width),
        layer_rope_theta=thetas,
    )
    weights = llama_weights(model)
    for i in range(model.config.layers):
        bias = model.get_submodule(f"blocks.{i}.attention.core.bias")
        assert isinstance(bias, BiasParameters)
        sinks = bias.logit_per_head(model.embedding.weight)
        assert sinks is not None
        weights[f"model.layers.{i}.self_attn.sinks"] = sinks.detach().contiguous()
    return Form(config, "GraniteSWAForCausalLM", weights, is_foreign=True)


def _as_smollm3(model: Transformer, sizes: dict[str, Any], thetas: list[float]) -> Form:
    from transformers import SmolLM3Config

    config = SmolLM3Config(
        **sizes,
        pad_token_id=None,  # the default id may be outside the vocabulary
        use_sliding_window="sliding_attention" in sizes["layer_types"],
        no_rope_layers=[int(theta != 0) for theta in thetas],
    )
    return Form(config, "SmolLM3ForCausalLM", llama_weights(model), is_foreign=True)


def _as_gemma3(model: Transformer, sizes: dict[str, Any], thetas: list[float]) -> Form:
    from transformers import Gemma3TextConfig

    rope = {
        kind: {"rope_type": "default", "rope_theta": theta}
        for kind, theta in zip(sizes["layer_types"], thetas, strict=True)
    }
    config = Gemma3TextConfig(
        **{key: value for key, value in sizes.items() if key not in ("mlp_bias", "rope_parameters")},
        rope_parameters=rope,
        pad_token_id=None,
        head_dim=model.config.head_width,
        query_pre_attn_scalar=model.config.head_width,
        hidden_activation="gelu",
    )
    weights = llama_weights(model)
    weights["model.embed_tokens.weight"] = weights["model.embed_tokens.weight"] / math.sqrt(model.config.width)
    weights["model.norm.weight"] = weights["model.norm.weight"] - 1
    for i in range(model.config.layers):
        for ours, theirs in GEMMA_NORMS.items():
            weight = model.get_parameter(f"blocks.{i}.{ours}.weight").detach()
            weights[f"model.layers.{i}.{theirs}.weight"] = weight - 1
    return Form(config, "Gemma3ForCausalLM", weights, is_foreign=True)


def _as_itself(model: Transformer, tokens: dict[str, Any]) -> Form:
    from sinklab.model.huggingface import SinklabConfig, SinklabForCausalLM

    config = SinklabConfig(model.config.model_dump(mode="json", exclude={"init_from", "init_sha256"}), **tokens)
    config.auto_map = {
        "AutoConfig": f"{CODE}.{SinklabConfig.__name__}",
        "AutoModelForCausalLM": f"{CODE}.{SinklabForCausalLM.__name__}",
    }
    prefix = SinklabForCausalLM.base_model_prefix
    weights = {f"{prefix}.{name}": tensor.detach().contiguous() for name, tensor in model.state_dict().items()}
    return Form(config, SinklabForCausalLM.__name__, weights, is_foreign=False)
