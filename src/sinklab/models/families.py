"""Hugging Face architectures: attribute names of their modules and config fields, and exceptions by model type.

Nearly all model types use the names below. To support a model type with another name for the same thing, add the name
to the tuple. A model type that behaves differently has an entry in `FAMILIES`. No other file compares model types.

Kinds of a model's layers: softmax attention, linear or recurrent, and feed-forward.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

LAYER_KINDS = ("layer_types", "layers_block_type")  # config fields with the kind of each layer
ATTENTION_LAYERS = ("minimax_m3_sparse",)  # layer kinds with attention whose names lack "attention"
TOKEN_WISE_LAYERS = ("moe", "mlp", "dense", "sparse")  # layer kinds without token mixing
POSITION_TABLES = ("wpe", "embed_positions", "positions_embed", "position_embedding", "position_embeddings")
FFN_WIDTHS = ("intermediate_size", "ffn_dim", "n_inner", "ffn_hidden_size")
EXPERT_COUNTS = ("num_local_experts", "num_experts", "n_routed_experts")
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
            attention, adds it once (transformers 5.17 to 5.24).
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


FAMILIES = {
    "sinklab": Family(exported=True),
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
