"""Memory estimate of a process of a run, and the refusal of a recipe beyond the memory of its device.

weights       4 bytes per parameter (float32, also under bf16 autocast); one share of them with FSDP
gradients     4 bytes per parameter, as weights; all of them where FSDP adds up several micro-batches before it shares
optimizer     AdamW 8, Muon 4 for hidden matrices and 8 for the rest, SGD 4 (without momentum 0), as weights
activations   what autograd keeps between forward and backward of a micro-batch. It is counted, not guessed: a model of
              the recipe's sizes but one layer (two where some are linear: the first one of them is, and no values
              are mixed) runs forward on the CPU at two short lengths; no operation here keeps
              more than linearly many bytes per position, so that the two give the bytes per position and the bytes
              that do not depend on it (copies of the weights in bfloat16)
              With `train.recompute: blocks` every block keeps the residual stream before it only
loss          logits and their gradients as far as they exist at a time, the gradient of the head in float32
working       gradients inside one block, taken as large as what the block keeps; where it is computed again, that too

Not in it: the libraries themselves (CUDA: about 0.5 GB), what the allocator loses to fragments, a layer's own values
where learned value residuals keep them beside the mixed ones, and what `torch.compile` saves by not keeping everything;
with FSDP, the whole of one block and of all that is outside the blocks is added to `working`.

The check comes before anything is built: Linux grants memory that it does not have and kills the process that uses it.
"""

import os
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from sinklab.attention.query_blocks import CHUNK
from sinklab.errors import InputError
from sinklab.model.config import ModelConfig
from sinklab.model.loss import WHOLE, rows_per_chunk
from sinklab.model.transformer import Transformer
from sinklab.model.values import NoValueResidual
from sinklab.models.memory_budget import total_bytes
from sinklab.train.config import Muon, OptimConfig, Sgd
from sinklab.train.optim import hidden_matrices
from sinklab.train.planning.flops import shape_of
from sinklab.train.recipe import Recipe
from sinklab.train.world import World

FLOAT32 = 4
MB = 2**20
LENGTHS = (32, 64)  # of the forward passes in which bytes are counted


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes, by part (see the module)."""

    weights: int
    gradients: int
    optimizer: int
    activations: int
    loss: int
    working: int

    @property
    def total(self) -> int:
        return sum(asdict(self).values())


@dataclass(frozen=True)
class _Kept:
    """Bytes that autograd keeps of a forward pass: inside the blocks, and outside of them."""

    inside: float
    outside: float


def memory_estimate(recipe: Recipe, device: torch.device, processes: int = 1) -> MemoryEstimate:
    """What one of `processes` will need at its fullest.

    Args:
        recipe: with the model's `vocab_size` and a `precision` other than auto.
        device: of the process; it decides how many logits are held at a time.
    """
    config, train = recipe.model, recipe.train
    model = shape_of(config)
    sharded = processes > 1 and train.parallel == "fsdp"
    share = processes if sharded else 1
    parameters = sum(p.numel() for p in model.parameters())
    mine = train.batch_size // processes
    sequences = min(train.micro_batch or mine, mine)
    bf16 = train.precision == "bf16"
    fixed, per_position = _kept(config, bf16, layers=1)
    positions = sequences * (config.context + model.leading)
    block = fixed.inside + per_position.inside * positions
    with_attention = len(config.attention_layers)
    outside, inside = fixed.outside + per_position.outside * positions, with_attention * block
    if with_attention < config.layers:
        fixed, per_position = _kept(config, bf16, layers=2)
        linear = fixed.inside + per_position.inside * positions
        inside += (config.layers - with_attention) * linear
        block = max(block, linear)
    recomputed = 0.0
    if train.recompute == "blocks":
        inside, recomputed = FLOAT32 * config.layers * config.width * positions, block
    others = sum(p.numel() for part in model.blocks[1:] for p in part.parameters())
    gathered = FLOAT32 * (parameters - others) if sharded else 0
    return MemoryEstimate(
        weights=FLOAT32 * parameters // share,
        gradients=FLOAT32 * parameters // (share if sequences == mine else 1),
        optimizer=_optimizer_bytes(model, recipe.optim) // share,
        activations=round(inside + outside),
        loss=_loss_bytes(config, sequences * config.context, device, bf16),
        working=round(block + recomputed) + gathered,
    )


def _kept(config: ModelConfig, bf16: bool, layers: int) -> tuple[_Kept, _Kept]:
    """Bytes of the first of so many layers and of the rest that do not depend on the positions, and per position."""
    lengths = LENGTHS if layers == 1 else (CHUNK, 2 * CHUNK)  # a linear layer keeps chunks
    lengths = lengths if config.context >= max(lengths) else (config.context // 2, config.context)
    # A linear first layer, which such a recipe need not have, has no values for the second to mix with its own.
    short = {"layers": layers, "vocab_size": 2} | ({} if layers == 1 else {"value_residual": NoValueResidual()})
    model = Transformer(config.model_copy(update=short))
    first, second = (_kept_at(model, length, bf16) for length in lengths)
    between = lengths[1] - lengths[0]
    slope = _Kept((second.inside - first.inside) / between, (second.outside - first.outside) / between)
    reach = lengths[0] + model.leading
    return _Kept(max(0.0, first.inside - slope.inside * reach), 0.0), slope


def _kept_at(model: Transformer, length: int, bf16: bool) -> _Kept:
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept: dict[bool, dict[int, Tensor]] = {True: {}, False: {}}
    inside = False

    def keep(tensor: Tensor) -> Tensor:
        where = tensor.untyped_storage().data_ptr()
        if where not in own and where not in kept[not inside]:
            kept[inside][where] = tensor  # held, so that its place in memory is not used again
        return tensor

    def entering(*_: Any) -> None:
        nonlocal inside
        inside = True

    def leaving(*_: Any) -> None:
        nonlocal inside
        inside = False

    block = model.blocks[0]
    block.register_forward_pre_hook(entering)
    block.register_forward_hook(leaving)
    tokens = torch.zeros(1, length, dtype=torch.long)
    with (
        torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor),
        torch.autocast("cpu", torch.bfloat16, enabled=bf16),
    ):
        model.hidden(tokens)
    sizes = {where: sum(t.untyped_storage().nbytes() for t in kept[where].values()) for where in (True, False)}
    return _Kept(sizes[True], sizes[False])


def _optimizer_bytes(model: Transformer, config: OptimConfig) -> int:
    parameters = sum(p.numel() for p in model.parameters())
    if isinstance(config, Sgd):
        return FLOAT32 * parameters if config.momentum else 0
    matrices = sum(p.numel() for p in hidden_matrices(model)) if isinstance(config, Muon) else 0
    return FLOAT32 * (2 * parameters - matrices)


def _loss_bytes(config: ModelConfig, positions: int, device: torch.device, bf16: bool) -> int:
    words = config.vocab_size or 0
    narrow = 2 if bf16 else FLOAT32
    head = words * config.width
    if positions * words <= WHOLE:
        return positions * words * (2 * FLOAT32 + (2 * narrow if bf16 else 0))
    rows = min(positions, rows_per_chunk(positions, words, device))
    fused = device.type == "cuda"  # no float32 form of the logits is stored; the gradient of the chunk before still is
    chunk = rows * words * (3 * narrow if fused else 2 * FLOAT32 + (2 * narrow if bf16 else 0))
    gradients = FLOAT32 * (head + positions * config.width)
    return gradients + max(gradients, chunk + (narrow * head if bf16 else 0))  # in the backward, or in the forward pass


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
