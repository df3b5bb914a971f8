"""Refuses, before anything is built, a recipe whose estimate is beyond the memory there is.

On a CPU nothing can be caught later: Linux grants memory that it does not have and kills the process when it is used.
"""

import os
from dataclasses import asdict

import torch

from sinklab.errors import InputError
from sinklab.model.config import ModelConfig
from sinklab.models.memory import total_bytes
from sinklab.train.planning.flops import shape_of
from sinklab.train.planning.memory import FLOAT32, memory_estimate
from sinklab.train.recipe import Recipe
from sinklab.train.world import World

MB = 2**20


def check_fits(recipe: Recipe, world: World) -> None:
    """Compare the estimate for a process of `world` with the memory of its card, or its share of the machine's.

    Args:
        recipe: with the model's `vocab_size` and a `precision` other than auto.

    Raises:
        InputError: it cannot fit; the message says what the largest part is and what makes it smaller.
    """
    device = world.device(recipe.train.device)
    have = total_bytes(device)
    if have is None:
        return
    if device.type == "cpu":
        have //= _on_this_machine(world)
    share = world.size if world.size > 1 and recipe.train.parallel == "fsdp" else 1
    weights = 2 * FLOAT32 * _parameters(recipe.model) // share
    if weights > have:  # the estimate itself builds one layer
        raise _refusal(f"at least {weights / MB:,.0f} MB for its weights and gradients", have, device, "weights")
    estimate = memory_estimate(recipe, device, world.size)
    if estimate.total > have:
        largest, size = max(asdict(estimate).items(), key=lambda part: part[1])
        needs = f"{estimate.total / MB:,.0f} MB by estimate, {size / MB:,.0f} of them for its {largest},"
        raise _refusal(needs, have, device, largest)


def _refusal(needs: str, have: int, device: torch.device, largest: str) -> InputError:
    of_the_model = largest in ("weights", "gradients", "optimizer")
    smaller = "model.width, model.layers or model.vocab_size" if of_the_model else "train.micro_batch or model.context"
    smaller += ", or train.recompute to blocks" if largest == "activations" else ""
    return InputError(
        f"a process needs {needs} and has {have / MB:,.0f} MB ({device}): set a smaller {smaller} "
        "(--dry-run says what each part takes), or try all the same with --anyway"
    )


def _parameters(config: ModelConfig) -> int:
    """Of the model, from its first layers: one of ten thousand layers takes a while to build, also without memory."""
    one, two = (
        sum(p.numel() for p in shape_of(config.model_copy(update={"layers": layers})).parameters()) for layers in (1, 2)
    )
    return one + (config.layers - 1) * (two - one)


def _on_this_machine(world: World) -> int:
    """How many of the processes share this machine's memory."""
    told = os.environ.get("LOCAL_WORLD_SIZE", "")
    return int(told) if world.size > 1 and told.isdecimal() and int(told) else world.size
