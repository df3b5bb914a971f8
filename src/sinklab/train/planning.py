"""Estimates for a run before it is started: parameters, tokens, FLOPs, and a rough estimate of the memory.

FLOP counts of models, and peak FLOP/s of GPUs.

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
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import nn

from sinklab.attention.masks import visible_keys
from sinklab.attention.operations.kernel import Kernel
from sinklab.data.loader import TokenDataset
from sinklab.data.prepare import known_vocabulary, prepared
from sinklab.errors import InputError
from sinklab.model.block import LinearBlock
from sinklab.model.config import ModelConfig
from sinklab.model.loss import WHOLE
from sinklab.model.transformer import Transformer
from sinklab.model.values import ValueGating
from sinklab.models.memory_budget import total_bytes
from sinklab.train.optim import hidden_matrices
from sinklab.train.recipe import Muon, Recipe, Sgd
from sinklab.train.run import resolved_precision
from sinklab.train.world import ALONE, World

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


FLOAT32 = 4
MB = 2**20


def memory_estimate(recipe: Recipe, processes: int = 1) -> dict[str, int]:
    """Estimate the peak memory of one process in bytes: "weights" (with gradients and optimizer) and "activations".

    Weights, gradients and the moments of the optimizer are counted in float32, sharded with FSDP. The activations are
    roughly 12 hidden vectors and 4 of the feed-forward width per position and layer of a micro-batch (with
    `train.recompute`, one vector, and one layer in full), and the logits in memory at a time, with their gradients.
    Other operations and other layers save more or less.

    Args:
        recipe: recipe with `vocab_size` set and a `precision` other than auto.
        processes: number of processes that share the batch; must divide the batch size.
    """
    config, train, optim = recipe.model, recipe.train, recipe.optim
    model = shape_of(config)
    parameters = sum(p.numel() for p in model.parameters())
    moments = 2 * parameters
    if isinstance(optim, Sgd):
        moments = parameters if optim.momentum else 0
    elif isinstance(optim, Muon):
        moments -= sum(p.numel() for p in hidden_matrices(model))
    share = processes if train.parallel == "fsdp" else 1
    mine = train.batch_size // processes
    positions = min(train.micro_batch or mine, mine) * (config.context + model.leading)
    layer = (12 * config.width + 4 * config.ffn_width) * positions
    inside = config.layers * layer
    if train.recompute == "blocks":
        inside = config.layers * config.width * positions + layer
    logits = min(positions * (config.vocab_size or 0), WHOLE)
    number = FLOAT32 if train.precision != "bf16" else 2
    return {
        "weights": FLOAT32 * (2 * parameters + moments) // share,
        "activations": number * inside + 3 * FLOAT32 * logits,
    }


def check_fits(recipe: Recipe, world: World) -> None:
    """Check that the estimated memory of a process fits into its GPU, or into its share of the machine or cgroup.

    Linux overcommits memory and later kills the process, so this is checked before the model is built. The limit is the
    total memory, not the free memory. Nothing is checked if the total is unknown.

    Args:
        recipe: recipe with `vocab_size` set and a `precision` other than auto.
        world: training processes.

    Raises:
        InputError: if the run does not fit; also as `World.device`.
    """
    device = world.device(recipe.train.device)
    have = total_bytes(device)
    if have is None:
        return
    if device.type == "cpu":
        have //= world.local_size
    needed = memory_estimate(recipe, world.size)
    if sum(needed.values()) <= have:
        return
    smaller = "train.micro_batch or model.context, or set train.recompute to blocks"
    if needed["weights"] > needed["activations"]:
        smaller = "model.width, model.layers or the vocabulary"
    parts = " and ".join(f"{size / MB:,.0f} MB for {name}" for name, size in needed.items())
    raise InputError(
        f"a process needs roughly {parts}, but has only {have / MB:,.0f} MB ({device}): decrease {smaller}; or pass "
        "--anyway to skip this check"
    )


def most_at_once(recipes: Sequence[Recipe], devices: int = 1) -> int | None:
    """Return how many of the runs fit at once into the total memory, by `memory_estimate`; at least one per device.

    Unknown vocabulary sizes count as 1. The result is None if the total memory is unknown.

    Args:
        recipes: recipes of the runs, all with the same `train.device`; at least one.
        devices: number of GPUs among which the runs are divided; 1 on a CPU.
    """
    device = ALONE.device(recipes[0].train.device)
    have = total_bytes(device)
    if have is None:
        return None
    needed = 1
    for recipe in recipes:
        estimate = memory_estimate(_resolved(recipe, device, known_vocabulary(recipe.data) or 1))
        needed = max(needed, sum(estimate.values()))
    return devices * max(1, have // needed)


@dataclass(frozen=True)
class TrainingPlan:
    """Size and cost of a run.

    Attributes:
        name, steps: name of the recipe and number of updates.
        parameters: number of model parameters.
        tokens, tokens_per_step: number of training tokens of all processes, in total and per step.
        flops: FLOPs of one sequence, forward and backward (`train/planning.py`).
        flops_per_step: FLOPs of the global batch.
        memory: estimated peak memory of one process in bytes, by part (`memory_estimate`).
        device: PyTorch's name of this process's device, such as "cuda:0".
        processes: number of processes that share the batch.
        hours_at_peak: lower bound of the training time, in hours: that at the devices' peak FLOP/s (`train.peak_flops`,
            else the bfloat16 peak of a known GPU); None if the peak is unknown.
    """

    name: str
    parameters: int
    steps: int
    tokens: int
    tokens_per_step: int
    flops: Flops
    flops_per_step: int
    memory: dict[str, int]
    device: str
    processes: int
    hours_at_peak: float | None

    def document(self) -> dict[str, Any]:
        """Return the plan as a JSON-serializable dict, memory in MB (2**20 bytes)."""
        return {**asdict(self), "memory": {name: round(size / MB, 1) for name, size in self.memory.items()}}


def plan_of(recipe: Recipe, device: torch.device, processes: int) -> TrainingPlan:
    """Return the plan of a recipe on `processes` devices like `device`.

    The text is prepared only if the vocabulary size is otherwise unknown.

    Raises:
        InputError: if the text is unusable, or the batch size is not a multiple of `processes`.
        SinklabError: if the text cannot be prepared, for example because the disk is full, or prepared data is damaged.
    """
    World(size=processes).rows(recipe.train.batch_size)
    recipe = sized(recipe, device, lambda: prepared(recipe.data))
    train, config = recipe.train, recipe.model
    flops = model_flops(config)
    per_step = flops.total * train.batch_size
    peak = train.peak_flops or peak_flops(device)
    return TrainingPlan(
        name=recipe.name,
        parameters=sum(p.numel() for p in shape_of(config).parameters()),
        steps=train.steps,
        tokens=train.steps * train.batch_size * config.context,
        tokens_per_step=train.batch_size * config.context,
        flops=flops,
        flops_per_step=per_step,
        memory=memory_estimate(recipe, processes),
        device=str(device),
        processes=processes,
        hours_at_peak=None if peak is None else per_step * train.steps / (peak * processes) / 3600,
    )


def sized(recipe: Recipe, device: torch.device, prepare: Callable[[], TokenDataset]) -> Recipe:
    """Return the recipe with its vocabulary size set and precision "auto" replaced by that of the device.

    The vocabulary size is `model.vocab_size`, else `known_vocabulary`, else that of the data that `prepare` returns.

    Args:
        prepare: function that prepares the data; called only if the vocabulary size is otherwise unknown.

    Raises:
        SinklabError: if the source is prepared data that is damaged; also as `prepare`.
    """
    known = recipe.model.vocab_size or known_vocabulary(recipe.data)
    return _resolved(recipe, device, known or prepare().vocab_size)


def _resolved(recipe: Recipe, device: torch.device, vocabulary: int) -> Recipe:
    """Return the recipe with the precision of the device, and this vocabulary size if it has none."""
    model = recipe.model.model_copy(update={"vocab_size": recipe.model.vocab_size or vocabulary})
    train = recipe.train.model_copy(update={"precision": resolved_precision(recipe.train.precision, device)})
    return recipe.model_copy(update={"model": model, "train": train})
