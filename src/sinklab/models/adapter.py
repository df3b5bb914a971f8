"""`Adapter`: common interface to sinklab and Hugging Face causal language models in memory."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeAlias, cast

from torch import nn

from sinklab.errors import InputError, SinklabError
from sinklab.model.transformer import Transformer
from sinklab.models.families import OTHER_HEAD
from sinklab.models.hooks import NO_BLOCKS
from sinklab.models.native import NativeAdapter, own_transformer

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from sinklab.models.huggingface.pretrained_adapter import HuggingFaceAdapter

LanguageModel: TypeAlias = "PreTrainedModel | Transformer"
"""A Hugging Face causal language model, or a sinklab transformer."""


Adapter: TypeAlias = "NativeAdapter | HuggingFaceAdapter"
"""Common interface to a causal language model. Both classes have the same methods; `NativeAdapter` documents them.

Attributes:
    module: the wrapped model.
    device: device of the input tokens.
    dtype: dtype of the weights.
    blocks: decoder blocks in order; empty if they cannot be found, are used several times in a forward pass, or have
        several residual streams.
    kinds: layer numbers by kind (`LayerKinds`).
    attention_layers: number of layers with attention. For a Hugging Face model without softmax attention, reading this
        attribute raises SinklabError.
    heads: number of query heads per layer. A model whose layers differ in it is probed but not measured.
    leading: number of learned tokens (a sink token or registers) that the model adds before every sequence.
    first_target: 1-based position of the first target: 2, or the first after the prefix of a prefix mask.
    post_norms: norms of a post-norm sinklab transformer, two per block; empty for other models.
    quantised: quantisation method of the weights; None without one, and for dequantised GGUF weights.
    has_head: False for a Hugging Face model without an LM head (AutoModel), which is measured without a loss.
    proxy: True if importance is computed from proxy scores, because the attention weights of a layer do not sum to one.
    dispatches: True if attention calls can be intercepted; otherwise attention is measured from the matrices that the
        model returns. Reading this attribute may run a Hugging Face model once.
    context: context length in tokens; 2,048 if the config of a Hugging Face model has none.
    limit: maximum number of tokens of a sequence; None if there is none.
    position_table: learned positional embeddings (positions, hidden size): the weight, or a view of it without unused
        rows (the first two in OPT). Row 0 is position 1. None if the model has none.
    ends: reason why sequences beyond `context` are impossible; None if they are possible.
"""


WRAPPERS = {"OptimizedModule": "_orig_mod", "DataParallel": "module", "DistributedDataParallel": "module"}
"""Attributes with the wrapped model, by class name: torch.compile, and PyTorch's data parallelism."""


def unwrapped(model: Any) -> Any:
    """Return the model in a wrapper of PyTorch (`WRAPPERS`) or peft (`PeftModel`); any other object unchanged."""
    while (inner := WRAPPERS.get(type(model).__name__)) is not None:
        model = getattr(model, inner)
    if hasattr(model, "peft_config") and hasattr(model, "get_base_model"):
        return unwrapped(model.get_base_model())
    return model


def adapt(model: LanguageModel) -> Adapter:
    """Return the `Adapter` of a sinklab or Hugging Face model; for a SinklabForCausalLM, that of its transformer.

    A compiled model, or one in a wrapper of peft or of data parallelism, has the adapter of the model inside
    (`unwrapped`).

    Raises:
        InputError: if `model` is neither, its weights are on the meta device, or a sinklab model is on several devices.
    """
    model = unwrapped(model)
    own = own_transformer(model)
    if own is not None:
        adapter = NativeAdapter(own)
    else:
        check_causal_lm(model)
        from sinklab.models.huggingface.pretrained_adapter import HuggingFaceAdapter

        adapter = HuggingFaceAdapter(cast("PreTrainedModel", model))
    if adapter.device.type == "meta":
        raise InputError("the model has no weights (they are on the meta device): load them first")
    return adapter


def residual_blocks(adapter: Adapter) -> Sequence[nn.Module]:
    """Return the decoder blocks of a model.

    Raises:
        SinklabError: if a Hugging Face model has several residual streams, uses blocks several times in a forward pass,
            or has no module list with one entry per layer.
    """
    if not adapter.blocks:
        raise SinklabError(
            f"the residual stream of a {cast('PreTrainedModel', adapter.module).config.model_type!r} model cannot be "
            f"read or changed: {NO_BLOCKS}"
        )
    return adapter.blocks


def check_causal_lm(model: Any) -> None:
    """Check that the argument is a Hugging Face model: a module with a transformers config.

    Raises:
        InputError: if `model` is anything else. The message contains the start of a string, or the type of another
            object.
    """
    if isinstance(model, str):
        raise InputError(
            f"the model is a string, {model[:80]!r}: load it first with AutoModelForCausalLM.from_pretrained, or pass "
            "the name to `sinklab measure`"
        )
    if not isinstance(model, nn.Module) or not hasattr(getattr(model, "config", None), "get_text_config"):
        raise InputError(
            f"the model is {type_text(model)}: expected a Hugging Face causal language model, as "
            "AutoModelForCausalLM.from_pretrained returns it, or a sinklab transformer"
        )
    if OTHER_HEAD.search(type(model).__name__):
        raise InputError(
            f"the model is a {type(model).__name__}, which has another head than a language model: pass its layers "
            "alone, model.base_model, which are measured without a loss"
        )


def type_text(thing: Any) -> str:
    """Return the type of an object as text: `of type list` or `of type numpy.ndarray`."""
    kind = type(thing)
    return f"of type {kind.__name__}" if kind.__module__ == "builtins" else f"of type {kind.__module__}.{kind.__name__}"
