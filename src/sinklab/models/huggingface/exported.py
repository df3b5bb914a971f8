"""A sinklab transformer inside a model of transformers, as `sinklab export` writes one: it is measured as our own."""

from typing import Any

from torch import nn

from sinklab.model.config import ModelConfig
from sinklab.model.transformer import Transformer


def own_transformer(model: Any) -> Transformer | None:
    """The transformer of ours that a model is or holds; None for other models.

    One that came with its own code (`trust_remote_code`) is of another class: a transformer with its weights.
    """
    if isinstance(model, Transformer):
        return model
    config, held = getattr(model, "config", None), getattr(model, "transformer", None)
    if not isinstance(model, nn.Module) or config is None or getattr(config, "model_type", "") != "sinklab":
        return None
    if isinstance(held, Transformer) or not isinstance(held, nn.Module):
        return held if isinstance(held, Transformer) else None
    first = next(held.parameters())
    own = Transformer(ModelConfig.model_validate(config.model)).to(first.device, first.dtype)
    own.load_state_dict(held.state_dict())
    return own.eval()
