"""All initial weights, in one place (recipe.yaml, `init`)."""

import hashlib
import math

import torch
from torch import nn

from sinklab.model.config import ModelConfig

SMALL = 0.02  # std of what the paper calls biases: extra keys and values, the sink token, the t5 table


@torch.no_grad()
def initialise(model: nn.Module, config: ModelConfig, seed: int) -> None:
    """Set all weights of a transformer.

    Linear and embedding weights, and a learned table of positions: normal, std sqrt(2 / (5 d_in)), d_in the weight's
    last dimension. Output projection of each feed-forward: normal, std 1 / (sqrt(d_in) * layers). Biases of keys and
    values, the sink token and the t5 table: normal, std 0.02. Norms: weight one, bias zero, slope `norm.alpha`. Biases
    of gates: zero. A module that names the mean and std of its tensors in `initial` has it so.

    Each tensor is drawn from its own stream, named by the seed and the tensor's name, so that an intervention that
    adds a tensor leaves all others as they are in the baseline. Tensors on the meta device have no values to set.
    """
    for name, parameter in model.named_parameters():
        if parameter.is_meta:
            continue
        start, law = _constant(name, config), _own_law(model, name)
        if law is not None:
            parameter.normal_(*law, generator=_stream(seed, name, parameter.device))
        elif start is not None:
            parameter.fill_(start)
        else:
            std = _std(name, parameter, config)
            parameter.normal_(0.0, std, generator=_stream(seed, name, parameter.device))


def _constant(name: str, config: ModelConfig) -> float | None:
    """What every element starts as, None for those that are drawn."""
    if name.endswith("norm.weight"):
        return 1.0
    if name.endswith("norm.alpha"):
        return config.norm.alpha
    return 0.0 if name.endswith(("norm.bias", "gate.bias")) else None


def _own_law(model: nn.Module, name: str) -> tuple[float, float] | None:
    """Mean and std that the tensor's own module asks for in `initial`, as attention operations do."""
    owner, _, leaf = name.rpartition(".")
    return getattr(model.get_submodule(owner), "initial", {}).get(leaf)


def _std(name: str, parameter: nn.Parameter, config: ModelConfig) -> float:
    d_in = parameter.shape[-1]
    if name.endswith("ffn.down.weight"):
        return 1 / (math.sqrt(d_in) * config.layers)
    if ".bias." in name or name in ("sink_token", "distance.weight"):
        return SMALL
    return math.sqrt(2 / (5 * d_in))


def _stream(seed: int, name: str, device: torch.device) -> torch.Generator:
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    return torch.Generator(device=device).manual_seed(int.from_bytes(digest[:8], "little") >> 1)
