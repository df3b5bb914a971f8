"""Hugging Face architectures: attribute names of their modules and config fields, and exceptions by model type.

Nearly all model types use the names below. To support a model type with another name for the same thing, add the name
to the tuple. A model type that behaves differently has an entry in `FAMILIES`. No other file compares model types.

Kinds of a model's layers: softmax attention, linear or recurrent, and feed-forward.

Find modules and read configs of a Hugging Face model, and set its attention implementation, without running it.
"""

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from sinklab.errors import SinklabError

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

LAYER_KINDS = ("layer_types", "layers_block_type")  # config fields with the kind of each layer
ATTENTION_LAYERS = ("minimax_m3_sparse",)  # layer kinds with attention whose names lack "attention"
TOKEN_WISE_LAYERS = ("moe", "mlp", "dense", "sparse")  # layer kinds without token mixing
POSITION_TABLES = ("wpe", "embed_positions", "positions_embed", "position_embedding", "position_embeddings")
FFN_WIDTHS = ("intermediate_size", "ffn_dim", "n_inner", "ffn_hidden_size")
LATENT_WIDTH = "kv_lora_rank"  # config field: latent width of MLA
ROTARY_EMBEDDING = "rotary_emb"  # attribute name of the rotary embedding
ROTARY_CLASS = "RotaryEmbedding"  # suffix of the class name of a rotary embedding
QUERIES, OUTPUT = "q_proj", "o_proj"  # projections of an attention module
GATES = (QUERIES, "gate_proj", "g_proj")  # projections that may compute gate logits
SINK_LOGITS = "sinks"  # parameter of an attention module
DEPTH_ATTENTION = "AttentionResidual"  # suffix of the class name of a module that attends to layers, not to tokens
SELECTED, SELECTED_BLOCKS = "indices", "block_indices"  # arguments of an attention call: keys selected by an indexer
OTHER_HEAD = re.compile(r"For(\w*Classification|\w*QuestionAnswering|MultipleChoice|\w*Reward\w*|\w*Regression)$")
"""Class names of models with another head than that of a language model."""


@dataclass(frozen=True)
class Family:
    """Properties in which a model type differs from most others.

    Attributes:
        exported: the model is a SinklabForCausalLM, as `sinklab export` writes it if transformers has no equivalent.
        convertible: `from_llama` can convert the weights to a sinklab transformer.
        alibi: all models of this type use ALiBi.
        alibi_twice: eager attention adds ALiBi twice, because the mask already contains it. The default, fused
            attention, adds it once (transformers 5.21 to 5.24).
        true_hides: True in a boolean attention mask means masked out.
        local_layers: config field with the kind of each layer, "global" or "local". Local layers have a sliding window
            that the mask does not contain; the config field `window_size` is its width. None without such layers.
    """

    exported: bool = False
    convertible: bool = False
    alibi: bool = False
    alibi_twice: bool = False
    true_hides: bool = False
    local_layers: str | None = None


EXPORTED = "sinklab"  # model type of a SinklabForCausalLM
FAMILIES = {
    EXPORTED: Family(exported=True),
    "llama": Family(convertible=True),
    "bloom": Family(alibi=True),
    "mpt": Family(alibi=True, true_hides=True),
    "falcon": Family(alibi_twice=True),
    "gpt_neo": Family(local_layers="attention_layers"),
}


def family_of(model: Any) -> Family:
    """Return the family of a Hugging Face model; `Family()` for model types that `FAMILIES` does not list."""
    return FAMILIES.get(getattr(getattr(model, "config", None), "model_type", ""), Family())


def alibi_exponent(config: Any) -> int:
    """Return the exponent a of the ALiBi slopes 2^(-a h / H) of heads h = 1 .. H: 8, or MPT's `alibi_bias_max`."""
    return getattr(getattr(config, "attn_config", None), "alibi_bias_max", 8)


def looped_layers(config: Any) -> tuple[range, int]:
    """Return the 0-based layers that a looped model (Dory, Inkling2) repeats in a forward pass, and how many times.

    An empty range and 1 for other models. `config` is that of the language model.
    """
    if passes := getattr(config, "n_recurrent_loops", None):
        return range(config.n_input_layers, config.n_input_layers + config.n_recurrent_layers), passes
    if passes := getattr(config, "loop_num_passes", None):
        return range(config.loop_layer_index_start, config.loop_layer_index_end), passes
    return range(0), 1


def text_config(config: Any) -> Any:
    """Return the language model's part of a Hugging Face config; the config itself for a sinklab transformer."""
    return config.get_text_config(decoder=True) if hasattr(config, "get_text_config") else config


def first_named(config: Any, names: tuple[str, ...]) -> Any:
    """Return the value of the first config field in `names` that exists and is truthy; None if there is none."""
    return next((value for name in names if (value := getattr(config, name, None))), None)


@dataclass(frozen=True)
class LayerKinds:
    """Layers of a model by kind; layer numbers are 1-based and increasing.

    Attributes:
        total: number of layers of the model.
        attention: layers with softmax attention (in a sinklab model: any attention operation). Only these are measured.
        linear: layers with linear attention, a recurrence or a convolution, possibly in addition to softmax attention.
    """

    total: int
    attention: tuple[int, ...]
    linear: tuple[int, ...] = ()

    def notes(self) -> list[str]:
        """Return a list with a note on which layers are measured; empty if all layers are."""
        number = len(self.attention)
        if number == self.total:
            return []
        others = set(range(1, self.total + 1)) - set(self.attention)
        what = "linear or recurrent" if others <= set(self.linear) else "linear, recurrent or feed-forward"
        have, numbered = ("has", "layer 1") if number == 1 else ("have", f"layers 1 to {number}")
        return [
            f"{number} of {self.total} layers {have} attention ({ranges_text(self.attention)}), here {numbered}; the "
            f"others are {what} and not included in the sink rate"
        ]

    def notes_on_hidden_keys(self) -> list[str]:
        """Return a list with a note that linear or recurrent layers see hidden tokens; empty without such layers."""
        if not self.linear:
            return []
        return [
            "tokens are hidden only from attention: the linear or recurrent part of "
            f"{layers_text(list(self.linear), self.total)} still sees them"
        ]


def layers_text(layers: Sequence[int], total: int) -> str:
    """Format increasing layer numbers as `all layers`, `layer 2` or `layers 1, 3..5`."""
    if len(layers) == total:
        return "all layers"
    return f"layer{'s' if len(layers) > 1 else ''} {ranges_text(layers)}"


def ranges_text(numbers: Sequence[int]) -> str:
    """Format increasing integers as ranges: `4..9, 12`."""
    runs = [[number for _, number in run] for _, run in groupby(enumerate(numbers), lambda pair: pair[1] - pair[0])]
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}..{run[-1]}" for run in runs)


def layer_kinds(config: "PretrainedConfig") -> LayerKinds:
    """Return the numbers of the language model's layers with softmax attention, and of linear or recurrent layers.

    If the config does not list the kinds of its layers, all layers count as softmax attention; none does if the config
    has no field `num_attention_heads`. A layer that a forward pass uses several times counts once per use.
    """
    text = text_config(config)
    kinds = first_named(text, LAYER_KINDS)
    if not kinds:
        everywhere = tuple(range(1, text.num_hidden_layers + 1))
        return LayerKinds(text.num_hidden_layers, everywhere if hasattr(text, "num_attention_heads") else ())
    repeated, passes = looped_layers(text)
    kinds = [*kinds[: repeated.stop], *kinds[repeated.start : repeated.stop] * (passes - 1), *kinds[repeated.stop :]]
    both = [n for n, kind in enumerate(kinds, 1) if kind.startswith("hybrid")]
    attention = [
        n
        for n, kind in enumerate(kinds, 1)
        if n in both or kind in ATTENTION_LAYERS or ("attention" in kind and "linear" not in kind)
    ]
    carrying = [
        n for n, kind in enumerate(kinds, 1) if n in both or (n not in attention and kind not in TOKEN_WISE_LAYERS)
    ]
    return LayerKinds(len(kinds), tuple(attention), tuple(carrying))


def sliding_window(config: Any) -> int | None:
    """Return the width of the sliding window of a Hugging Face model; None if there is none, or it is not used."""
    text = text_config(config)
    return getattr(text, "sliding_window", None) if getattr(text, "use_sliding_window", True) else None


def has_windows(config: Any) -> bool:
    """Return True if layers of a Hugging Face model attend to a sliding window or to chunks."""
    kinds = first_named(text_config(config), LAYER_KINDS)
    return any(one.startswith(("sliding", "chunked")) for one in kinds) if kinds else bool(sliding_window(config))


def attention_layers(config: "PretrainedConfig") -> int:
    """Return the number of layers of the language model with softmax attention (not all layers in a hybrid model).

    Raises:
        SinklabError: if no layer has softmax attention.
    """
    count = len(layer_kinds(config).attention)
    if not count:
        raise SinklabError(f"no layer of a {config.model_type!r} model has softmax attention: it has no attention sink")
    return count


def decoder_blocks(model: "PreTrainedModel") -> list[nn.Module]:
    """Return the decoder blocks in order.

    Empty if no module list has as many entries as the config has layers, or a forward pass uses some blocks several
    times (`looped_layers`). In LongCat-Flash, `num_hidden_layers` is the number of attention layers, of which each of
    its `num_layers` blocks has two.
    """
    config = text_config(model.config)
    if looped_layers(config)[1] > 1:
        return []
    counts = (config.num_hidden_layers, getattr(config, "num_layers", None))
    lists = [module for module in language_model(model).modules() if isinstance(module, nn.ModuleList)]
    return next((list(blocks) for count in counts for blocks in lists if len(blocks) == count), [])


def has_one_stream(config: "PretrainedConfig") -> bool:
    """Return True if the model has one residual stream.

    False with hyper-connections (DeepSeek-V4, Qwen4-Exp), AltUp (Gemma 3n), or attention to earlier layers (Inkling2).
    """
    text = text_config(config)
    streams = max(getattr(text, name, None) or 1 for name in ("hc_mult", "hc_count", "altup_num_inputs"))
    return streams == 1 and not hasattr(text, "n_layers_per_attn_res_block")


def bodies(model: "PreTrainedModel") -> list[nn.Module]:
    """Return the modules whose output may be the input of the LM head: base model and, if separate, decoder (OPT)."""
    base, decoder = model.base_model, language_model(model)
    return [base] if decoder is base or decoder is model else [base, decoder]


def language_model(model: "PreTrainedModel") -> nn.Module:
    """Return the language model in a model, without its LM head and without the encoders of images or sound.

    It is what transformers calls the decoder, except in ModernBERT, whose `decoder` is the LM head.
    """
    from transformers import PreTrainedModel

    decoder = model.get_decoder()
    return decoder if isinstance(decoder, PreTrainedModel) else model.base_model


def learned_positions(model: "PreTrainedModel") -> Tensor | None:
    """Return the learned positional embeddings (positions, hidden size), a view of the weight; None without them.

    Row 0 is position 1; unused rows (the first two in OPT) are excluded.
    """
    for name, module in language_model(model).named_modules():
        if name.rpartition(".")[2] in POSITION_TABLES and isinstance(module, nn.Embedding):
            return module.weight[getattr(module, "offset", 0) :]
    return None


def model_configs(model: "PreTrainedModel") -> "list[PretrainedConfig]":
    """Return every config of the model's modules, each once, including sub-configs."""
    from transformers import PretrainedConfig

    found: dict[int, PretrainedConfig] = {}
    read = (getattr(module, "config", None) for module in model.modules())
    waiting = [config for config in read if isinstance(config, PretrainedConfig)]
    while waiting:
        config = waiting.pop()
        if id(config) not in found:
            found[id(config)] = config
            subs = (getattr(config, name, None) for name in config.sub_configs)
            waiting += [sub for sub in subs if isinstance(sub, PretrainedConfig)]
    return list(found.values())


@contextmanager
def attention_implementation(model: "PreTrainedModel", name: str) -> Iterator[None]:
    """Set the attention implementation in every config of the model in the `with` block; then restore the old ones."""
    before = [(config, config._attn_implementation_internal) for config in model_configs(model)]
    try:
        for config, _ in before:
            config._attn_implementation_internal = name
        yield
    finally:
        for config, implementation in before:
            config._attn_implementation_internal = implementation


def rotary_parameters(config: "PretrainedConfig") -> list[dict[str, Any]]:
    """Return the RoPE parameters: one dict for all layers, or one per kind of layer; empty if the config has none."""
    given = getattr(text_config(config), "rope_parameters", None) or {}
    return [rope for rope in ((given,) if "rope_type" in given else given.values()) if isinstance(rope, dict)]


def context_limit(config: "PretrainedConfig") -> int | None:
    """Return `max_position_embeddings`; with linear, dynamic or yarn RoPE, the scaled context if that is longer."""
    context: Any = getattr(text_config(config), "max_position_embeddings", None)
    original = context
    if not context or context < 0:  # -1 in XLNet: no limit
        return None
    for rope in rotary_parameters(config):
        if rope.get("rope_type") in ("linear", "dynamic", "yarn"):
            before = rope.get("original_max_position_embeddings") or original
            context = max(context, int(before * (rope.get("factor") or 1)))
    return context


def quantisation(config: "PretrainedConfig") -> str | None:
    """Return the quantisation method of the weights ("bitsandbytes", "gptq", ...); None if they are not quantised."""
    given = getattr(config, "quantization_config", None)
    if not given:
        return None
    method = given.get("quant_method") if isinstance(given, dict) else given.quant_method
    return str(getattr(method, "value", method))


def input_device(model: "PreTrainedModel") -> torch.device:
    """Return the device for input tokens: that of the embedding, or its execution device if it is offloaded.

    If the model has no weights, the result is the meta device.
    """
    embedding: Any = model.get_input_embeddings()
    where = next(tensor.device for tensor in (*embedding.parameters(), *model.parameters(), *model.buffers()))
    if where.type != "meta":
        return where
    hook: Any = getattr(embedding, "_hf_hook", None)  # accelerate's hook of an offloaded model
    for one in getattr(hook, "hooks", (hook,)):
        if getattr(one, "execution_device", None) is not None:
            return torch.device(one.execution_device)
    return where


def vocabulary_size(model: "PreTrainedModel") -> int:
    """Return the number of rows of the token embedding, which may be quantised."""
    embedding: Any = model.get_input_embeddings()
    return embedding.num_embeddings if hasattr(embedding, "num_embeddings") else len(embedding.weight)


def weights_quantised(model: "PreTrainedModel") -> str | None:
    """Return the quantisation method of the weights in memory; None without one, and for dequantised GGUF weights."""
    method = quantisation(model.config)
    if method == "gguf" and not any(hasattr(module, "ggml_type") for module in model.modules()):
        return None  # dequantised
    return method
