"""Plan of a run before it is started: parameters, tokens, operations, memory."""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch

from sinklab.data.prepare import prepared
from sinklab.data.shards import TokenDataset
from sinklab.data.tokenizers import trained_size
from sinklab.train.directory.run import resolved_precision
from sinklab.train.planning.flops import Flops, model_flops, peak_flops, shape_of
from sinklab.train.planning.memory import MemoryEstimate, memory_estimate
from sinklab.train.recipe import Recipe
from sinklab.train.world import World

MB = 2**20


@dataclass(frozen=True)
class TrainingPlan:
    """A recipe in numbers.

    Attributes:
        parameters: of the model.
        tokens, tokens_per_step: over all processes.
        flops: of one sequence, forward and backward (`train/planning/flops.py`).
        flops_per_step: of the global batch.
        memory: of one process at its fullest (`train/planning/memory.py`).
        device: of this process, as PyTorch calls it.
        processes: that share the batch.
        hours_at_peak: at the cards' full dense bfloat16 speed, which no run reaches; None where it is not known.
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
        """As JSON has it, memory in MB."""
        memory = {name: round(size / MB, 1) for name, size in asdict(self.memory).items()}
        return {**asdict(self), "memory": memory | {"total": round(self.memory.total / MB, 1)}}


def plan_of(recipe: Recipe, device: torch.device, processes: int = 1) -> TrainingPlan:
    """The plan of a recipe on devices like `device`.

    Text is prepared only where the vocabulary's size is not known otherwise.

    Raises:
        InputError: text that cannot be used, or a batch that the processes cannot share equally.
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
        memory=memory_estimate(recipe, device, processes),
        device=str(device),
        processes=processes,
        hours_at_peak=None if peak is None else per_step * train.steps / (peak * processes) / 3600,
    )


def sized(recipe: Recipe, device: torch.device, prepare: Callable[[], TokenDataset]) -> Recipe:
    """The recipe with the vocabulary's size and the precision that it will have on such a device.

    Args:
        prepare: makes its data; called only where the size is not known otherwise.
    """
    size = recipe.model.vocab_size or trained_size(recipe.data.tokenizer) or prepare().vocab_size
    model = recipe.model.model_copy(update={"vocab_size": size})
    train = recipe.train.model_copy(update={"precision": resolved_precision(recipe.train.precision, device)})
    return recipe.model_copy(update={"model": model, "train": train})


def memory_line(recipe: Recipe, device: torch.device, processes: int) -> str:
    """The estimate for a resolved recipe, in one line."""
    memory = memory_estimate(recipe, device, processes)
    parts = ", ".join(f"{name} {megabytes(size)}" for name, size in asdict(memory).items())
    return f"memory per process, estimated: {megabytes(memory.total)} MB ({parts})"


def megabytes(size: int) -> str:
    """Bytes as text: MB of 2**20 bytes, one decimal below ten."""
    return f"{size / MB:,.0f}" if size >= 10 * MB else f"{size / MB:.1f}"
