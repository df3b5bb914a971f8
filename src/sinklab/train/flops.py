"""FLOP counts of models, and peak FLOP/s of GPUs.

A multiply-add counts as two operations. The forward pass over one sequence of T tokens has these parts, where L is T
plus the number of learned leading tokens:

matrices    2 * inputs * outputs * L for every linear layer except the LM head (times the number of query and KV heads
            in the feature map of a kernel): projections, feed-forward layers, gates
attention   2 * (D + V) * pairs per head and layer, for the scores and the weighted sum of values; D and V are the key
            and value dimensions of a head (2 D in place of D if a head has two queries). Pairs are the (query, key)
            pairs that the mask allows: L (L + 1) / 2 if causal. Kernels with causal and prefix masks count as linear
            attention: 4 * D * V * L, for writing and reading the state (V + 1 in place of V if normalised). A bias key
            adds 2 * D * L. The delta rule of linear layers counts 6 * D * V * L per head, for reading the state with
            the key, writing it, and reading it with the query, plus 2 * W * L per channel of the convolution of width W
head        2 * hidden size * vocabulary size per predicted token

A backward pass counts as two forward passes. Recomputation, masked scores, second passes of a backend, elementwise
operations and auxiliary losses are not counted: the count follows the formula, not the implementation, so that the MFU
is comparable between attention operations. A document mask counts as causal: the lengths of documents are unknown.
"""

from collections import Counter
from dataclasses import dataclass

import torch
from torch import nn

from sinklab.attention.masks import visible_keys
from sinklab.attention.operations.kernel import Kernel
from sinklab.model.block import LinearBlock
from sinklab.model.config import ModelConfig
from sinklab.model.gate import ValueGating
from sinklab.model.transformer import Transformer

FORWARD_AND_BACKWARD = 3

# Dense bfloat16 peak FLOP/s with float32 accumulation, from the vendor. The first matching name is used.
PEAKS = {
    "B200": 2250e12,
    "GH200": 990e12,
    "H200 NVL": 835e12,
    "H200": 990e12,
    "H100 PCIe": 756e12,
    "H100 NVL": 835e12,
    "H100": 990e12,
    "A100": 312e12,
    "L40S": 362e12,
    "L40": 181e12,
    "L4": 121e12,
}


@dataclass(frozen=True)
class Flops:
    """FLOPs of a forward and backward pass over one sequence, by part (see the module docstring)."""

    matrices: int
    attention: int
    head: int

    @property
    def total(self) -> int:
        return self.matrices + self.attention + self.head


def model_flops(config: ModelConfig) -> Flops:
    """Count the FLOPs of a forward and backward pass over one sequence of `config.context` tokens.

    Args:
        config: model config with `vocab_size` set.
    """
    model = shape_of(config)
    positions = config.context + model.leading
    kinds = Counter(map(config.of_layer, config.attention_layers))
    of_attention = sum(layers * _attention_flops(kind, positions) for kind, layers in kinds.items())
    predicted = config.context + 2 - config.first_target  # predicted tokens of a chunk, which has context + 1 tokens
    for linear in (block.attention for block in model.blocks if isinstance(block, LinearBlock)):
        rule = 6 * linear.heads * linear.key_width * linear.value_width  # without the convolution
        of_attention += positions * (rule + 2 * linear.conv.weight.numel())
    return Flops(
        FORWARD_AND_BACKWARD * _matrix_flops(model) * positions,
        FORWARD_AND_BACKWARD * of_attention,
        FORWARD_AND_BACKWARD * 2 * model.head.weight.numel() * predicted,
    )


def shape_of(config: ModelConfig) -> Transformer:
    """Build the model on the meta device: shapes without weights."""
    with torch.device("meta"):
        return Transformer(config)


def peak_flops(device: torch.device) -> float | None:
    """Return the dense bfloat16 peak FLOP/s of a GPU; None for other devices and GPUs that are not in `PEAKS`."""
    if device.type != "cuda":
        return None
    card = torch.cuda.get_device_name(device)
    return next((peak for name, peak in PEAKS.items() if name in card), None)


def _matrix_flops(model: Transformer) -> int:
    """Count the forward FLOPs per position of all linear maps except the LM head."""
    uses_of_features = model.config.heads + model.config.key_heads
    total = 0
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and module is not model.head:
            total += 2 * module.weight.numel() * (uses_of_features if ".core." in name else 1)
        elif isinstance(module, ValueGating):
            total += 2 * module.weight.numel()
    return total


def _attention_flops(config: ModelConfig, positions: int) -> int:
    """Count the forward FLOPs of the attention core of one layer for one sequence."""
    width, value_width, operation = config.query_width, config.value_width, config.attention.operation
    scored, mask = width * operation.queries_per_head, config.attention.mask.build()
    bias = 2 * scored * positions if config.attention.bias.adds_key else 0
    if isinstance(operation, Kernel) and mask.running_sum is not None:
        state = 2 * width * (value_width + int(operation.normalised))  # writing; reading costs the same
        return config.heads * (2 * state * positions + bias)
    pairs = int(visible_keys(mask, positions, torch.device("cpu")).sum())
    return config.heads * (2 * (scored + value_width) * pairs + bias)
