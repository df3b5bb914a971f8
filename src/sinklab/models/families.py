"""Architectures of transformers: the attribute names of parts, and the exceptions by model type.

Nearly all model types follow conventions: a part has one of the names below. A model type that departs from them is a
row of `FAMILIES`; no other file compares the name of an architecture. New names of parts are added to the tuples.
"""

from dataclasses import dataclass
from typing import Any

LAYER_KINDS = ("layer_types", "layers_block_type")  # of a config: the kind of each layer
TOKEN_WISE_LAYERS = ("moe", "mlp", "dense", "sparse")  # kinds of layers that read every token alone
POSITION_TABLES = ("wpe", "embed_positions", "positions_embed", "position_embedding", "position_embeddings")
FFN_WIDTHS = ("intermediate_size", "ffn_dim", "n_inner", "ffn_hidden_size")
EXPERT_COUNTS = ("num_local_experts", "num_experts", "n_routed_experts")
LATENT_WIDTH = "kv_lora_rank"  # of a config: keys and values are made from a latent of this width
ROTARY_EMBEDDING = "rotary_emb"  # the module that turns queries and keys
ROTARY_CLASS = "RotaryEmbedding"  # how its class name ends
QUERIES, OUTPUT = "q_proj", "o_proj"  # linear maps of an attention module
GATES = (QUERIES, "gate_proj", "g_proj")  # linear maps of an attention module that may give the logits of its gates
SINK_LOGITS = "sinks"  # of an attention module
SELECTED = "indices"  # an argument of an attention call: the keys that an indexer has chosen for each query
UNREADABLE_EXTRAS = ("sinks", "block_indices")  # arguments of an attention call that change its scores in unknown ways


@dataclass(frozen=True)
class Family:
    """Departures of a model type from the conventions.

    Attributes:
        exported: it is a model that `sinklab export` wrote.
        convertible: `from_llama` converts its weights to ours.
        alibi: its scores have ALiBi.
        alibi_twice: its eager attention adds ALiBi to the scores and then a mask that holds it already, by head; its
            fused attention, the default, adds it once (transformers 5.17 to 5.23).
        true_hides: True in a boolean attention mask hides a key.
        local_layers: the attribute of its config with the kind of each layer; a "local" one has a window of
            `window_size` that is in no mask.
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
CONVENTIONAL = Family()


def family_of(model: Any) -> Family:
    """The family of a model of transformers; the conventions for anything else."""
    return FAMILIES.get(getattr(getattr(model, "config", None), "model_type", ""), CONVENTIONAL)


def first_named(config: Any, names: tuple[str, ...]) -> Any:
    """The first of these attributes that a config has and that is not empty; None if it has none."""
    return next((value for name in names if (value := getattr(config, name, None))), None)
