"""The architecture of transformers that computes a variant exactly, and the weights under its names.

variant                                                         architecture        loads with
the default                                                     LlamaForCausalLM    transformers
the default with a sink logit or off-by-one, causal or window   GraniteSWAForCausalLM, its multipliers 1; the same
everything else                                                 SinklabForCausalLM  sinklab, or the code beside it

GraniteSWA scales the attention output by sigmoid(lse - s), which is the sink logit itself; its layers may have a window
each, here all of them or none. gpt-oss has the same logit, but its feed-forward layers are a mixture of experts.
"""

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor

from sinklab.attention.biases import BiasParameters
from sinklab.data.tokenizers import Tokenizer
from sinklab.model.llama import differences, llama_sizes, llama_weights
from sinklab.model.transformer import Transformer

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

CODE = "modeling_sinklab"  # the module beside the weights of a variant that transformers lacks
SINK_LOGITS = ("sink_logit", "off_by_one")


@dataclass(frozen=True)
class Form:
    """A model in the format of transformers.

    Attributes:
        config: of the architecture.
        architecture: its class.
        weights: by the names of that class.
        is_foreign: whether transformers has the class; otherwise its code is exported too.
    """

    config: "PreTrainedConfig"
    architecture: str
    weights: dict[str, Tensor]
    is_foreign: bool


def form_of(model: Transformer, tokenizer: Tokenizer) -> Form:
    """The simplest architecture that computes the model exactly, with the ids of BOS and EOS in its config."""
    tokens: dict[str, Any] = {"bos_token_id": tokenizer.bos_id, "eos_token_id": tokenizer.eos_id}
    attention, other = model.config.attention, differences(model.config)
    if not other:
        from transformers import LlamaConfig

        config = LlamaConfig(**llama_sizes(model.config), **tokens)
        return Form(config, "LlamaForCausalLM", llama_weights(model), is_foreign=True)
    has_sink_logit = attention.bias.kind in SINK_LOGITS and attention.mask.kind in ("causal", "window")
    if has_sink_logit and set(other) <= {"attention.bias", "attention.mask"}:
        return _as_granite(model, tokens)
    return _as_itself(model, tokens)


def _as_granite(model: Transformer, tokens: dict[str, Any]) -> Form:
    from transformers import GraniteSWAConfig

    mask, layers = model.config.attention.mask, model.config.layers
    config = GraniteSWAConfig(
        **llama_sizes(model.config),
        **tokens,
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
