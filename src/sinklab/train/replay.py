"""Replay the forward and backward pass of one step to find the first NaN or infinity. The run is not modified."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from sinklab.errors import InputError
from sinklab.models.hooks import hooked
from sinklab.train.directory.checkpoint import load_checkpoint, take_newest
from sinklab.train.directory.run import Run
from sinklab.train.update import Updater


@dataclass(frozen=True)
class Replay:
    """Result of a replayed forward and backward pass.

    Attributes:
        step: number of the update, 1-based; the batch index is step - 1.
        checkpoint: folder of the checkpoint from which the replay started; None for the initial weights.
        repeated: number of updates that were repeated before this step, from the checkpoint or initial weights on.
        loss: cross-entropy without auxiliary losses, nats per token.
        grad_norm: global gradient norm, before clipping.
        grad_norms: gradient norm of each parameter that has a gradient, by name.
        first_not_finite: first tensor with NaN or infinity, such as "output of blocks.0.ffn"; None if all are finite.
            The order is weights, module outputs (forward order), loss, gradients (backward order).
    """

    step: int
    checkpoint: Path | None
    repeated: int
    loss: float
    grad_norm: float
    grad_norms: dict[str, float]
    first_not_finite: str | None

    def document(self) -> dict[str, Any]:
        """Return the result as a JSON-serializable dict; non-finite numbers are strings."""
        return asdict(self) | {
            "checkpoint": None if self.checkpoint is None else str(self.checkpoint),
            "loss": _as_json(self.loss),
            "grad_norm": _as_json(self.grad_norm),
            "grad_norms": {name: _as_json(norm) for name, norm in self.grad_norms.items()},
        }


def replay(run: Run, step: int) -> Replay:
    """Repeat the forward and backward pass of `step`, starting from the newest valid checkpoint before it.

    Without a checkpoint before `step`, the replay starts from the initial weights.

    Raises:
        InputError: if the run has no such step; also as `Updater`.
        NotFiniteError: if the loss or gradient of a repeated earlier step is not finite; the message names the step.
        SinklabError: if there are earlier checkpoints but none is valid, or the training shard cannot be read; also as
            `Updater`.
    """
    if not 1 <= step <= run.recipe.train.steps:
        raise InputError(f"--replay {step}: the run has steps 1..{run.recipe.train.steps}")
    updater = Updater(run)
    newest = take_newest(
        run.checkpoints,
        updater.model,
        lambda checkpoint: load_checkpoint(checkpoint, updater.model, updater.optimizer),
        run.hashes,
        at_most=step - 1,
    )
    checkpoint, updater.state = newest or (None, updater.state)
    begin = updater.state.step
    while updater.state.step < step - 1:
        updater.update()
    updater.settle()
    with _not_finite(updater.model) as (forward, backward):
        mean, norm = updater.gradient(hooked=True)
    loss = mean.item()
    if not math.isfinite(loss):
        forward.append("the loss")
    gradients = {name: p.grad for name, p in updater.model.named_parameters() if p.grad is not None}
    return Replay(
        step=step,
        checkpoint=checkpoint,
        repeated=step - 1 - begin,
        loss=loss,
        grad_norm=norm.item(),
        grad_norms={name: gradient.norm().item() for name, gradient in gradients.items()},
        first_not_finite=next(iter(forward + backward), None),
    )


@contextmanager
def _not_finite(model: nn.Module) -> Iterator[tuple[list[str], list[str]]]:
    """Collect the names of non-finite weights and module outputs, in forward order, and of non-finite gradients."""
    forward = [f"weight {name}" for name, p in model.named_parameters() if not _finite(p)]
    backward: list[str] = []

    def after_module(name: str, module: nn.Module, args: Any, output: Any) -> None:
        if isinstance(output, Tensor) and not _finite(output):
            forward.append(f"output of {name or 'the model'}")

    def after_gradient(name: str, parameter: Tensor) -> None:
        if parameter.grad is not None and not _finite(parameter.grad):
            backward.append(f"gradient of {name}")

    hooks = [m.register_forward_hook(partial(after_module, name)) for name, m in model.named_modules()]
    hooks += [
        p.register_post_accumulate_grad_hook(partial(after_gradient, name)) for name, p in model.named_parameters()
    ]
    with hooked(hooks):
        yield forward, backward


def _finite(tensor: Tensor) -> bool:
    return bool(torch.isfinite(tensor).all())


def _as_json(number: float) -> float | str:
    return number if math.isfinite(number) else str(number)
