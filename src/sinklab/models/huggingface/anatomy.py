"""Find modules and read configs of a Hugging Face model, and set its attention implementation, without running it."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from sinklab.errors import SinklabError
from sinklab.models.families import (
    ATTENTION_LAYERS,
    LAYER_KINDS,
    POSITION_TABLES,
    TOKEN_WISE_LAYERS,
    LayerKinds,
    first_named,
    looped_layers,
    text_config,
)

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel


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
