"""Estimates for a run before it is started: parameters, tokens, FLOPs, memory.

The memory estimate of a process has these parts:

weights       4 bytes per parameter (float32, also under bf16 autocast); sharded with FSDP
gradients     4 bytes per parameter, sharded like the weights; unsharded if FSDP accumulates several micro-batches
optimizer     bytes per parameter: AdamW 8, Muon 4 for its matrices and 8 for the rest, SGD 4 (0 without momentum),
              OrthoAdam 8 and 4 per entry of its rotations; sharded like the weights
activations   tensors that autograd saves in the forward pass of a micro-batch. They are measured on the CPU, for each
              kind of layer in a model with the recipe's widths and one layer (two for a linear layer, because the last
              layer has attention). Saved bytes are linear in the sequence length, so two short lengths determine the
              bytes per position and the constant part (bfloat16 copies of the weights). With `train.recompute: blocks`,
              a block saves only its input. Auxiliary losses save further tensors outside the blocks
loss          logits in memory at a time, and their gradients; if the logits are chunked, also the float32 gradients of
              the LM head and of its input
working       gradients inside the largest block, estimated by the size of its activations; for a recomputed block also
              its activations; with FSDP also the gathered weights of one block and of all modules outside the blocks

The estimate ignores library overhead (CUDA: about 0.5 GB), fragmentation, the values before mixing that learned value
residuals save, and savings by `torch.compile`.

Memory is checked before the model is built, because Linux overcommits memory and later kills the process.
"""

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from sinklab.attention.query_blocks import CHUNK
from sinklab.data.prepare import known_vocabulary, prepared
from sinklab.data.shards import TokenDataset
from sinklab.errors import InputError
from sinklab.model.config import ModelConfig
from sinklab.model.loss import WHOLE, rows_per_chunk
from sinklab.model.transformer import Transformer
from sinklab.model.values import NoValueResidual
from sinklab.models.memory_budget import total_bytes
from sinklab.train.config import Muon, OptimConfig, OrthoAdam, Sgd
from sinklab.train.directory.run import resolved_precision
from sinklab.train.flops import Flops, model_flops, peak_flops, shape_of
from sinklab.train.optim import LONGEST_ROTATED, hidden_matrices
from sinklab.train.recipe import Recipe
from sinklab.train.world import World

FLOAT32 = 4
MB = 2**20
LENGTHS = (32, 64)  # sequence lengths at which the saved bytes of attention layers are counted


@dataclass(frozen=True)
class MemoryEstimate:
    """Estimated peak memory of one process in bytes, by part (see the module docstring)."""

    weights: int
    gradients: int
    optimizer: int
    activations: int
    loss: int
    working: int

    @property
    def total(self) -> int:
        return sum(asdict(self).values())


def memory_estimate(recipe: Recipe, device: torch.device, processes: int = 1) -> MemoryEstimate:
    """Estimate the peak memory of one process in bytes (see the module docstring).

    Args:
        recipe: recipe with `vocab_size` set and a `precision` other than auto.
        device: device of the process; determines the number and dtype of the logits in memory at a time.
        processes: number of processes that share the batch; must divide the batch size.
    """
    config, train = recipe.model, recipe.train
    model = shape_of(config)
    sharded = processes > 1 and train.parallel == "fsdp"
    share = processes if sharded else 1
    parameters = _size(model)
    mine = train.batch_size // processes
    sequences = min(train.micro_batch or mine, mine)
    bf16 = train.precision == "bf16"
    positions = sequences * (config.context + model.leading)
    counted = [(kind.layers, number, *_saved(kind, bf16)) for kind, number in _kinds(config)]
    outside = max(per_position for layers, *_, per_position in counted if layers == 1) * positions
    blocks = [(number, fixed + per_position * positions) for _, number, fixed, per_position, _ in counted]
    inside, block = sum(number * size for number, size in blocks), max(size for _, size in blocks)
    recomputed = 0.0
    if train.recompute == "blocks":
        inside, recomputed = FLOAT32 * config.layers * config.width * positions, block
    outputs = [torch.zeros(1, 1, config.width, requires_grad=True) for _ in range(config.layers)]
    _, of_losses = _saved_bytes(outputs, lambda: [term.of(outputs) for term in recipe.losses.terms.values()])
    others = sum(p.numel() for part in model.blocks[1:] for p in part.parameters())
    gathered = FLOAT32 * (parameters - others) if sharded else 0
    return MemoryEstimate(
        weights=FLOAT32 * parameters // share,
        gradients=FLOAT32 * parameters // (share if sequences == mine else 1),
        optimizer=_optimizer_bytes(model, recipe.optim) // share,
        activations=round(inside + outside + of_losses * positions),
        loss=_loss_bytes(config, sequences * config.context, device, bf16),
        working=round(block + recomputed) + gathered,
    )


def _kinds(config: ModelConfig) -> list[tuple[ModelConfig, int]]:
    """Return, for each kind of layer, a small model's config with it as first layer, and the number of such layers."""
    attention = Counter(map(config.of_layer, config.attention_layers)).items()
    kinds = [(kind.model_copy(update={"layers": 1}), number) for kind, number in attention]
    if linear := config.layers - len(config.attention_layers):
        # Value residuals are disabled, because a linear first layer has no values for them.
        kinds.append((config.model_copy(update={"layers": 2, "value_residual": NoValueResidual()}), linear))
    return kinds


def _saved(config: ModelConfig, bf16: bool) -> tuple[float, float, float]:
    """Return saved bytes: constant inside the first block, per position inside it, and per position outside it."""
    lengths = LENGTHS if config.layers == 1 else (CHUNK, 2 * CHUNK)  # linear layers save activations per chunk
    first, second = lengths if config.context >= max(lengths) else (config.context // 2, config.context)
    model = Transformer(config.model_copy(update={"vocab_size": 2}))

    def bytes_at(length: int) -> tuple[int, int]:
        with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
            tokens = torch.zeros(1, length, dtype=torch.long)
            return _saved_bytes(model.parameters(), lambda: model.hidden(tokens), model.blocks[0])

    less, more = bytes_at(first), bytes_at(second)
    inside, outside = ((b - a) / (second - first) for a, b in zip(less, more, strict=True))
    return max(0.0, less[0] - inside * (first + model.leading)), inside, outside


def _saved_bytes(own: Iterable[Tensor], forward: Callable[[], Any], block: nn.Module | None = None) -> tuple[int, int]:
    """Return the bytes that autograd saves in `forward`, inside and outside `block`, excluding the tensors in `own`."""
    counted = {tensor.untyped_storage().data_ptr(): tensor for tensor in own}
    sizes, places = {True: 0, False: 0}, [False]  # True: inside the block; the last of `places` is the current one

    def save(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in counted:
            counted[storage.data_ptr()] = tensor  # kept alive, so that its address is not reused
            sizes[places[-1]] += storage.nbytes()
        return tensor

    if block is not None:
        block.register_forward_pre_hook(lambda *_: places.append(True))
        block.register_forward_hook(lambda *_: places.append(False))
    with torch.autograd.graph.saved_tensors_hooks(save, lambda tensor: tensor):
        forward()
    return sizes[True], sizes[False]


def _optimizer_bytes(model: Transformer, config: OptimConfig) -> int:
    parameters = _size(model)
    if isinstance(config, Sgd):
        return FLOAT32 * parameters if config.momentum else 0
    matrices = sum(p.numel() for p in hidden_matrices(model)) if isinstance(config, Muon) else 0
    axes = [n for p in model.parameters() for n in p.shape] if isinstance(config, OrthoAdam) else []
    return FLOAT32 * (2 * parameters - matrices + sum(n * n for n in axes if n <= LONGEST_ROTATED))


def _loss_bytes(config: ModelConfig, positions: int, device: torch.device, bf16: bool) -> int:
    words = config.vocab_size or 0
    narrow = 2 if bf16 else FLOAT32
    head = words * config.width
    if positions * words <= WHOLE:
        return positions * words * (2 * FLOAT32 + (2 * narrow if bf16 else 0))
    rows = min(positions, rows_per_chunk(positions, words, device))
    fused = device.type == "cuda"  # no float32 logits; the previous chunk's gradient is still in memory
    chunk = rows * words * (3 * narrow if fused else 2 * FLOAT32 + (2 * narrow if bf16 else 0))
    gradients = FLOAT32 * (head + positions * config.width)
    return gradients + max(gradients, chunk + (narrow * head if bf16 else 0))  # maximum of backward and forward pass


def check_fits(recipe: Recipe, world: World) -> None:
    """Check that the estimated memory of a process fits into its GPU, or into its share of the machine or cgroup.

    The limit is the total memory, not the free memory. Nothing is checked if the total is unknown.

    Args:
        recipe: recipe with `vocab_size` set and a `precision` other than auto.
        world: training processes.

    Raises:
        InputError: if the run does not fit (the message names the largest part and the settings that reduce it); also
            as `World.device`.
    """
    device = world.device(recipe.train.device)
    have = total_bytes(device)
    if have is None:
        return
    if device.type == "cpu" and world.size > 1:
        have //= world.local_size
    share = world.size if world.size > 1 and recipe.train.parallel == "fsdp" else 1
    # One small model per kind of layer, because building all layers is slow even on the meta device. The weights of
    # value residuals are not counted.
    models = [(shape_of(kind), number) for kind, number in _kinds(recipe.model)]
    parameters = max(_size(model) - _size(model.blocks) for model, _ in models)
    parameters += sum(number * _size(model.blocks[0]) for model, number in models)
    weights = 2 * FLOAT32 * parameters // share
    if weights > have:  # building one layer for the estimate could already fail
        largest, needs = "weights", f"at least {weights / MB:,.0f} MB for weights and gradients,"
    else:
        estimate = memory_estimate(recipe, device, world.size)
        if estimate.total <= have:
            return
        largest, size = max(asdict(estimate).items(), key=lambda part: part[1])
        needs = f"an estimated {estimate.total / MB:,.0f} MB, of which {size / MB:,.0f} MB are for {largest},"
    of_the_model = largest in ("weights", "gradients", "optimizer")
    smaller = "model.width, model.layers or vocabulary" if of_the_model else "train.micro_batch or model.context"
    if largest == "activations" and recipe.train.recompute == "none":
        smaller += ", set train.recompute to blocks"
    raise InputError(
        f"a process needs {needs} but has only {have / MB:,.0f} MB ({device}): decrease {smaller} "
        "(--dry-run prints each part), or pass --anyway to skip this check"
    )


def _size(module: nn.Module) -> int:
    """Return the number of a module's parameters."""
    return sum(p.numel() for p in module.parameters())


@dataclass(frozen=True)
class TrainingPlan:
    """Size and cost of a run.

    Attributes:
        name, steps: name of the recipe and number of updates.
        parameters: number of model parameters.
        tokens, tokens_per_step: number of training tokens of all processes, in total and per step.
        flops: FLOPs of one sequence, forward and backward (`train/flops.py`).
        flops_per_step: FLOPs of the global batch.
        memory: estimated peak memory of one process.
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
    memory: MemoryEstimate
    device: str
    processes: int
    hours_at_peak: float | None

    def document(self) -> dict[str, Any]:
        """Return the plan as a JSON-serializable dict, memory in MB (2**20 bytes)."""
        memory = {name: round(size / MB, 1) for name, size in asdict(self.memory).items()}
        return {**asdict(self), "memory": memory | {"total": round(self.memory.total / MB, 1)}}


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
        parameters=_size(shape_of(config)),
        steps=train.steps,
        tokens=train.steps * train.batch_size * config.context,
        tokens_per_step=train.batch_size * config.context,
        flops=flops,
        flops_per_step=per_step,
        memory=memory_estimate(recipe, device, processes),
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
    size = recipe.model.vocab_size or known_vocabulary(recipe.data) or prepare().vocab_size
    model = recipe.model.model_copy(update={"vocab_size": size})
    train = recipe.train.model_copy(update={"precision": resolved_precision(recipe.train.precision, device)})
    return recipe.model_copy(update={"model": model, "train": train})


def memory_line(recipe: Recipe, device: torch.device, processes: int) -> str:
    """Format the memory estimate of a recipe (see `memory_estimate`) as one line, in MB (2**20 bytes)."""
    memory = memory_estimate(recipe, device, processes)
    parts = ", ".join(f"{name} {megabytes(size)}" for name, size in asdict(memory).items())
    return f"estimated memory per process: {megabytes(memory.total)} MB ({parts})"


def megabytes(size: int) -> str:
    """Format bytes as a number of MB (2**20 bytes) without the unit, with one decimal below ten."""
    return f"{size / MB:,.0f}" if size >= 10 * MB else f"{size / MB:.1f}"
