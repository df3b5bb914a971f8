"""Config of an exported model for transformers: the model part of a recipe, and the names that libraries look up."""

from collections.abc import Mapping
from typing import Any

from transformers.configuration_utils import PreTrainedConfig

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
"""What transformers calls the sizes of a recipe."""


class SinklabConfig(PreTrainedConfig):
    """config.json of an exported run.

    Args:
        model: the model part of a recipe, with `vocab_size` set.
        **others: of every config of transformers; the sizes in DERIVED are always those of `model`.
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
