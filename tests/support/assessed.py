"""Small models to be assessed, in float64, and tokens for them."""

from typing import Any

import torch

from sinklab.assessing.part import AssessPart
from sinklab.assessing.reading import PartInput, Passes
from sinklab.assessing.settings import AssessSettings
from sinklab.model.config import ModelConfig
from sinklab.model.transformer import Transformer
from sinklab.models.adapter import Adapter, NativeAdapter

VOCABULARY, CONTEXT = 24, 32

ASSESSED: dict[str, dict[str, Any]] = {
    "softmax": {},
    "grouped keys": {"kv_heads": 2},
    "k biases": {"attention": {"bias": {"kind": "k"}}},
    "sink logit": {"attention": {"bias": {"kind": "sink_logit"}}},
    "sink token": {"attention": {"bias": {"kind": "sink_token"}}},
    "sigmoid": {"attention": {"operation": {"kind": "sigmoid"}}},
    "gate": {"gate": {"kind": "head"}},
    "softpick": {"attention": {"operation": {"kind": "softpick"}}},
    "off by one": {"attention": {"bias": {"kind": "off_by_one"}}},
    "no positions": {"position": {"kind": "none"}},
    "alibi": {"position": {"kind": "alibi"}},
    "differential v2": {"kv_heads": 2, "attention": {"operation": {"kind": "differential_v2"}}},
    "latent": {"projection": {"kind": "latent", "kv_rank": 12}},
}


def small(variant: str = "softmax", **changes: Any) -> NativeAdapter:
    """A random model with enlarged weights, so that its outputs depend on which keys are visible."""
    config = {"layers": 2, "width": 32, "heads": 4, "ffn_width": 48, "vocab_size": VOCABULARY, "context": CONTEXT}
    model = Transformer(ModelConfig.model_validate({**config, **ASSESSED[variant], **changes}), seed=5)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".bias." in name or name == "sink_token":
                parameter.normal_(std=1.0, generator=torch.Generator().manual_seed(8))
            elif not name.endswith("norm.weight"):
                parameter.mul_(2.5)
    return NativeAdapter(model.double().eval())


def some_tokens(sequences: int = 2, length: int = 20, vocabulary: int = VOCABULARY) -> torch.Tensor:
    return torch.randint(vocabulary, (sequences, length), generator=torch.Generator().manual_seed(4))


def part_settings(**options: Any) -> AssessSettings:
    """Settings of a part that is given its sequences, so that their numbers and lengths are not used."""
    unused: dict[str, Any] = {"sequences": 1, "length": 8, "stream_sequences": 1, "stream_length": 8}
    return AssessSettings(**(unused | {"long_length": None, "positions": "cache"} | options))


def run_part(
    part: type[AssessPart], adapter: Adapter, *given: torch.Tensor | AssessSettings, passes: Passes | None = None
) -> Any:
    """Result of a part; `given` are its sequences, its separate sequences, and settings that differ from the usual."""
    first, *others = [one for one in given if isinstance(one, torch.Tensor)]
    settings = next((one for one in given if isinstance(one, AssessSettings)), part_settings())
    return part.run(PartInput(adapter, settings, first, others[0] if others else None, passes or Passes()))
