"""Initialisation of all weights by one of two schemes (`model.init`).

tensor, d_in its last dimension              declared                            torch
linear weights, convolutions, value gates    normal, std sqrt(2 / (5 d_in))      uniform in +-1 / sqrt(d_in)
output projection of each feed-forward       normal, std 1 / (sqrt(d_in) layers) uniform in +-1 / sqrt(d_in)
token embedding, learned positions           normal, std sqrt(2 / (5 d_in))      normal, std 1
T5 bias table                                normal, std 0.02                    normal, std 1
bias of a value gate                         zero                                uniform in +-1 / sqrt(d)

In both schemes, learned tokens and the learned keys, values and logits of attention biases are normal with std 0.02.
Norms have weight one and bias zero. The slope of dynamic tanh is `norm.alpha`. A module may set the mean and std of its
parameters in its attribute `initial`, as biases with `start` and attention operations do. Its attribute `starts` may
contain functions that initialise its parameters.

`declared` is the scheme of the paper (2410.10781) and its code. `torch` is PyTorch's `reset_parameters` of nn.Linear
(kaiming_uniform with a = sqrt(5)) and nn.Embedding. The published models probably used `torch`: with several devices,
the library pinned by the paper's code discards the declared weights. PyTorch has no scheme for the T5 bias table,
learned positions and the value gate. The two tables are treated like nn.Embedding, and the value gate like nn.Linear
with d_in equal to d, the dimension of a value.

q, k and v are one matrix here, and so are both halves of a gated feed-forward network. d_in is the same as for separate
matrices.
"""

import hashlib
import math

import torch
from torch import nn

from sinklab.model.config import ModelConfig

SMALL = 0.02  # std of attention biases and sink token in the paper
TABLES = ("embedding.weight", "position_table", "distance.weight")


@torch.no_grad()
def initialise(model: nn.Module, config: ModelConfig, seed: int) -> None:
    """Initialise all weights of a transformer, in place, by the scheme of `config.init`.

    Each tensor has its own random generator, seeded by `seed` and the tensor's name. If an intervention adds a tensor,
    all other tensors are therefore identical to the baseline. Tensors on the meta device are skipped.
    """
    for name, tensor in model.named_parameters():
        if tensor.is_meta:
            continue
        digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
        stream = torch.Generator(device=tensor.device).manual_seed(int.from_bytes(digest[:8], "little") >> 1)
        owner, _, leaf = name.rpartition(".")
        module = model.get_submodule(owner)
        if leaf in (starts := getattr(module, "starts", {})):
            starts[leaf](tensor, stream)
        elif law := getattr(module, "initial", {}).get(leaf) or _mean_and_std(name, tensor.shape[-1], config):
            tensor.normal_(*law, generator=stream)
        else:
            bound = 1 / math.sqrt(config.value_width if name.endswith("gate.bias") else tensor.shape[-1])
            tensor.uniform_(-bound, bound, generator=stream)


def _mean_and_std(name: str, d_in: int, config: ModelConfig) -> tuple[float, float] | None:
    """Return mean and std of a normally distributed tensor (std 0: constant); None for a uniformly distributed one."""
    declared = config.init.kind == "declared"
    if name.endswith("norm.weight"):
        return 1.0, 0.0
    if name.endswith("norm.alpha"):
        return config.norm.alpha, 0.0
    if name.endswith("norm.bias") or (declared and name.endswith("gate.bias")):
        return 0.0, 0.0
    if ".bias." in name or name == "sink_token" or (declared and name == "distance.weight"):
        return 0.0, SMALL
    if declared:
        last = name.endswith("ffn.down.weight")
        return 0.0, 1 / (math.sqrt(d_in) * config.layers) if last else math.sqrt(2 / (5 * d_in))
    return (0.0, 1.0) if name in TABLES else None
