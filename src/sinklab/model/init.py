"""Initialisation of all weights by one of two schemes (`model.init`).

tensor, d_in its last dimension              declared                            torch
linear weights, convolutions, value gates    normal, std sqrt(2 / (5 d_in))      uniform in +-1 / sqrt(d_in)
output projection of each feed-forward       normal, std 1 / (sqrt(d_in) layers) uniform in +-1 / sqrt(d_in)
token embedding, learned positions           normal, std sqrt(2 / (5 d_in))      normal, std 1
T5 bias table                                normal, std 0.02                    normal, std 1
bias of a value gate                         zero                                uniform in +-1 / sqrt(d)

In both schemes, learned keys, values and logits of biases and the sink token are normal with std 0.02; norms have
weight one and bias zero; the slope of dynamic tanh is `norm.alpha`. A module may set the mean and std of its parameters
in `initial`, as biases with `start` and attention operations do, or a separate initialiser in `starts`.

`declared` is the scheme of the paper (2410.10781) and its code. `torch` is PyTorch's `reset_parameters` of nn.Linear
(kaiming_uniform with a = sqrt(5)) and nn.Embedding. The published models probably used `torch`: with several devices,
the library pinned by the paper's code discards the declared weights. PyTorch has no scheme for the last two rows and
learned positions: lookup tables are treated like nn.Embedding, the value gate like nn.Linear with d, the dimension of a
value, as d_in.

q, k and v are one matrix here, as are both halves of a gated feed-forward; d_in is the same as for separate matrices.
"""

import hashlib
import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

from sinklab.model.config import ModelConfig

Law = Callable[[Tensor, torch.Generator], object]
"""Function that initialises a tensor in place."""

SMALL = 0.02  # std of the paper's attention biases and sink token
TABLES = ("embedding.weight", "position_table", "distance.weight")


@torch.no_grad()
def initialise(model: nn.Module, config: ModelConfig, seed: int) -> None:
    """Initialise all weights of a transformer by the scheme of `config.init`.

    Each tensor has its own random generator, seeded by the seed and the tensor's name, so that an intervention that
    adds a tensor leaves all others identical to the baseline. Tensors on the meta device are skipped.
    """
    by_kind = _declared if config.init.kind == "declared" else _torch
    for name, parameter in model.named_parameters():
        if not parameter.is_meta:
            law = _by_both(model, name, config) or by_kind(name, parameter.shape[-1], config)
            law(parameter, _stream(seed, name, parameter.device))


def _by_both(model: nn.Module, name: str, config: ModelConfig) -> Law | None:
    owner, _, leaf = name.rpartition(".")
    initial = getattr(model.get_submodule(owner), "initial", {})
    if leaf in initial:
        mean, std = initial[leaf]
        return _normal(std, mean)
    if leaf in (starts := getattr(model.get_submodule(owner), "starts", {})):
        return starts[leaf]
    if name.endswith("norm.weight"):
        return _constant(1.0)
    if name.endswith("norm.bias"):
        return _constant(0.0)
    if name.endswith("norm.alpha"):
        return _constant(config.norm.alpha)
    return _normal(SMALL) if ".bias." in name or name == "sink_token" else None


def _declared(name: str, d_in: int, config: ModelConfig) -> Law:
    if name.endswith("gate.bias"):
        return _constant(0.0)
    if name.endswith("ffn.down.weight"):
        return _normal(1 / (math.sqrt(d_in) * config.layers))
    return _normal(SMALL if name == "distance.weight" else math.sqrt(2 / (5 * d_in)))


def _torch(name: str, d_in: int, config: ModelConfig) -> Law:
    if name in TABLES:
        return _normal(1.0)
    return _uniform(1 / math.sqrt(config.value_width if name.endswith("gate.bias") else d_in))


def _constant(value: float) -> Law:
    return lambda tensor, _: tensor.fill_(value)


def _normal(std: float, mean: float = 0.0) -> Law:
    return lambda tensor, stream: tensor.normal_(mean, std, generator=stream)


def _uniform(bound: float) -> Law:
    return lambda tensor, stream: tensor.uniform_(-bound, bound, generator=stream)


def _stream(seed: int, name: str, device: torch.device) -> torch.Generator:
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    return torch.Generator(device=device).manual_seed(int.from_bytes(digest[:8], "little") >> 1)
