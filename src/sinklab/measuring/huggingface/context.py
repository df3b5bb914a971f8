"""How far the positions of a Hugging Face model reach, by its config."""

from typing import TYPE_CHECKING, Any

from sinklab.errors import InputError

if TYPE_CHECKING:
    from transformers import PretrainedConfig


def check_length(config: "PretrainedConfig", length: int) -> None:
    """Refuse sequences longer than the context that the config says the model was made for.

    That is `max_position_embeddings`, or with linear, dynamic or yarn scaling of the rotary embedding the longest that
    the scaling reaches.

    Raises:
        InputError: with the longest length possible.
    """
    text = config.get_text_config(decoder=True)
    context = getattr(text, "max_position_embeddings", None)
    if not context:
        return
    for rope in rotary_parameters(config):
        if rope.get("rope_type") in ("linear", "dynamic", "yarn"):
            original = rope.get("original_max_position_embeddings") or text.max_position_embeddings
            context = max(context, int(original * (rope.get("factor") or 1)))
    if length > context:
        raise InputError(
            f"sequences of {length} tokens are beyond the model's context of {context}, where it knows no positions: "
            f"give at most --length {context}, or cut the tokens"
        )


def rotary_parameters(config: "PretrainedConfig") -> list[dict[str, Any]]:
    """How the model turns its positions: one for all layers, or one for each kind of layer; none without rotary."""
    given = getattr(config.get_text_config(decoder=True), "rope_parameters", None) or {}
    return [rope for rope in ((given,) if "rope_type" in given else given.values()) if isinstance(rope, dict)]
