"""Which architecture of transformers computes a variant exactly, and the weights under its names.

variant                                                         architecture        loads with
the default                                                     LlamaForCausalLM    transformers
the default with a sink logit or off-by-one, causal or window   GraniteSWAForCausalLM, its multipliers 1; the same
everything else                                                 SinklabForCausalLM  sinklab, or the code beside it

GraniteSWA scales the attention output by sigmoid(lse - s), which is the sink logit itself; its layers may have a window
each, here all of them or none. gpt-oss has the same logit, but its feed-forward layers are a mixture of experts.
"""

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from sinklab.attention.biases import BiasParameters
from sinklab.model.llama import differences, llama_sizes, llama_weights
from sinklab.model.transformer import Transformer

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

CODE = "modeling_sinklab"  # the module beside the weights of a variant that transformers lacks
SINK_LOGITS = ("sink_logit", "off_by_one")


@dataclass(frozen=True)
class SpecialTokens:
    """Ids of BOS and EOS."""

    bos: int
    eos: int


@dataclass(frozen=True)
class Form:
    """A model as transformers loads it.

    Attributes:
        config: of the architecture, with everything but tokens.
        architecture: its class.
        weights: by the names of that class.
        is_foreign: whether transformers has the class; otherwise its code is exported too.
    """

    config: "PreTrainedConfig"
    architecture: str
    weights: dict[str, Tensor]
    is_foreign: bool


def form_of(model: Transformer, tokens: SpecialTokens) -> Form:
    """The simplest form that computes the model exactly.

    Args:
        tokens: for the config.
    """
    other = differences(model.config)
    if not other:
        return _as_llama(model, tokens)
    if set(other) <= {"attention.bias", "attention.mask"} and _has_sink_logit(model):
        return _as_granite(model, tokens)
    return _as_itself(model, tokens)


def _has_sink_logit(model: Transformer) -> bool:
    attention = model.config.attention
    return attention.bias.kind in SINK_LOGITS and attention.mask.kind in ("causal", "window")


def _as_llama(model: Transformer, tokens: SpecialTokens) -> Form:
    from transformers import LlamaConfig

    config = LlamaConfig(**llama_sizes(model.config), bos_token_id=tokens.bos, eos_token_id=tokens.eos)
    return Form(config, "LlamaForCausalLM", llama_weights(model), is_foreign=True)


def _as_granite(model: Transformer, tokens: SpecialTokens) -> Form:
    from transformers import GraniteSWAConfig

    mask, layers = model.config.attention.mask, model.config.layers
    config = GraniteSWAConfig(
        **llama_sizes(model.config),
        bos_token_id=tokens.bos,
        eos_token_id=tokens.eos,
        attention_multiplier=1 / math.sqrt(model.config.head_width),
        layer_types=["sliding_attention" if mask.kind == "window" else "full_attention"] * layers,
        sliding_window=mask.width if mask.kind == "window" else model.config.context,  # it must be a number
    )
    weights = llama_weights(model)
    for i in range(layers):
        bias = model.get_submodule(f"blocks.{i}.attention.core.bias")
        assert isinstance(bias, BiasParameters)
        sinks = bias.logit_per_head(model.embedding.weight)
        assert sinks is not None
        weights[f"model.layers.{i}.self_attn.sinks"] = sinks.detach().contiguous()
    return Form(config, "GraniteSWAForCausalLM", weights, is_foreign=True)


def _as_itself(model: Transformer, tokens: SpecialTokens) -> Form:
    from sinklab.model.huggingface.configuration import SinklabConfig
    from sinklab.model.huggingface.modeling import SinklabForCausalLM

    config = SinklabConfig(
        model.config.model_dump(mode="json", exclude={"init_from", "init_sha256"}),
        bos_token_id=tokens.bos,
        eos_token_id=tokens.eos,
    )
    config.auto_map = {
        "AutoConfig": f"{CODE}.{SinklabConfig.__name__}",
        "AutoModelForCausalLM": f"{CODE}.{SinklabForCausalLM.__name__}",
    }
    prefix = SinklabForCausalLM.base_model_prefix
    weights = {f"{prefix}.{name}": tensor.detach().contiguous() for name, tensor in model.state_dict().items()}
    return Form(config, SinklabForCausalLM.__name__, weights, is_foreign=False)
