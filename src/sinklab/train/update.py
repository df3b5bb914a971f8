"""One update: gradient of the global batch, check for NaN and infinity, optimiser step.

A batch depends only on (seed, step); no global random generator is used. Apart from rounding, an update does not depend
on the number of processes.

Loss and gradient norm are checked before the optimiser step, which is skipped if either is not finite. Reading both on
the host would synchronise a CUDA device at every update. With AdamW on CUDA, the host therefore reads both one update
late, and the fused kernel skips the optimiser steps from a non-finite value on (`found_inf`).

`replay` repeats the forward and backward pass of one step to find the first NaN or infinity, without modifying the run.
"""

import contextlib
import math
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from sinklab.data.loader import Prefetcher
from sinklab.device import compiled, float32_matmul
from sinklab.errors import InputError, SinklabError
from sinklab.model.transformer import Transformer
from sinklab.models.hooks import hooked
from sinklab.train.checkpoint import TrainState, load_checkpoint, take_newest
from sinklab.train.optim import QKClip, build_optimizer, learning_rate
from sinklab.train.run import Run
from sinklab.train.start import load_initial_weights, load_start
from sinklab.train.world import ALONE, World, compiles_loss, local, recompute_blocks, share, whole


class Updater:
    """Training step of a run, with its model, optimiser and training data.

    Args:
        run: opened run; its directory is neither read nor written.
        world: training processes.
        check_stop: callback before every tensor operation of the model's initialisation; an exception from it ends the
            construction.

    Attributes:
        model: unwrapped model on its device; with FSDP its parameters are sharded.
        optimizer: optimiser of the model's parameters.
        state: training state; `state.step` is also the index of the next batch.
        device: device of this process.
        batches: prefetcher of this process's rows of every batch.
        compiles_loss: True if the training loss is compiled (`world.compiles_loss`).

    Raises:
        InputError: if the device does not exist, the text is too short, a data intervention is outside the chunk or
            vocabulary, the batch size is not a multiple of the number of processes, or the initial checkpoint is
            unusable.
        SinklabError: as `load_start`.
    """

    def __init__(self, run: Run, world: World = ALONE, check_stop: Callable[[], None] = lambda: None) -> None:
        self.recipe, self.world = run.recipe, world
        self.device = world.device(self.recipe.train.device)
        rows, loader = world.on_all_ranks(lambda: (world.rows(self.recipe.train.batch_size), run.loader("train")))
        self.batches = Prefetcher(lambda index: loader.batch(index, rows), self.device, self.recipe.train.steps)
        with _CheckedInit(check_stop):
            model = Transformer(self.recipe.model, self.recipe.seed)
        if (init_from := self.recipe.model.init_from) is not None:
            world.on_all_ranks(lambda: load_initial_weights(model, load_start(init_from), run.dataset.tokenizer_path))
        self.model = model.to(self.device)
        recompute_blocks(self.model, self.recipe.train.recompute)
        with self.autocast():  # `share` runs a forward pass for FSDP
            self._losses, self._no_sync = share(self.model, self.recipe.losses, self.recipe.train.parallel, world)
        limit = getattr(self.recipe.optim, "qk_clip", None)
        self._qk_clip = None if limit is None else QKClip(model, limit, world)
        self.compiles_loss = limit is None and compiles_loss(self.recipe.train.compile, self.device, world)
        self._training_losses = compiled(self._losses, dynamic=False) if self.compiles_loss else self._losses
        self.optimizer = build_optimizer(self.model, self.recipe.optim)
        late = self.device.type == "cuda" and isinstance(self.optimizer, torch.optim.AdamW)
        self.finite = FiniteCheck(self.optimizer, world, late)
        self.state = TrainState()
        self._loss = 0.0

    @property
    def rate(self) -> float:
        """Learning rate of the next update."""
        return learning_rate(self.state.step, self.recipe.train.steps, self.recipe.optim.lr, self.recipe.schedule)

    def update(self) -> float:
        """Do one optimiser step; return the newest available cross-entropy of the global batch, nats per token.

        This is the loss of this step, or with AdamW on CUDA of the previous step (0 for the first step of this object).

        Raises:
            NotFiniteError: on all processes, if a loss or gradient of any process is not finite in this update, or with
                AdamW on CUDA in the previous update.
            SinklabError: if the training shard cannot be read.
        """
        state, clip = self.state, self.recipe.optim.clip
        for group in self.optimizer.param_groups:
            group["lr"] = self.rate
        loss, norm = self.gradient()
        with self._not_updated():
            self.finite.add(state.step + 1, loss, norm)
        if clip is not None:
            torch.nn.utils.clip_grads_with_norm_(self.model.parameters(), clip, norm)
        self.optimizer.step()
        if self._qk_clip is not None:
            self._qk_clip.clip()
        self.optimizer.zero_grad(set_to_none=True)
        state.step += 1
        self.settle(late=int(self.finite.late))
        return self._loss

    def settle(self, late: int = 0) -> None:
        """Wait for all updates but the last `late`, check them, and record their losses and gradient norms in `state`.

        Raises:
            NotFiniteError: on all processes, if a loss or gradient norm of these updates is not finite on any process.
        """
        state = self.state
        with self._not_updated():
            for loss, grad_norm in self.finite.read(late):
                self._loss, state.grad_norm = loss, grad_norm
                state.loss_sum, state.loss_count = state.loss_sum + loss, state.loss_count + 1

    def has_finite_weights(self) -> bool:
        """Return True if this process's (sharded) weights are finite; an update with finite gradients may overflow."""
        return bool(torch.stack([local(p.detach()).isfinite().all() for p in self.model.parameters()]).all())

    @contextlib.contextmanager
    def _not_updated(self) -> Iterator[None]:
        """On NotFiniteError in the `with` block, set `state.step` to the last completed update and clear gradients."""
        try:
            yield
        except NotFiniteError as error:
            self.state.step = error.step - 1
            self.optimizer.zero_grad(set_to_none=True)
            raise

    def gradient(self, hooked: bool = False) -> tuple[Tensor, Tensor]:
        """Accumulate the gradients of the mean loss over the global batch, auxiliary losses included, in `.grad`.

        Args:
            hooked: True if modules have hooks; the loss then runs uncompiled, because compiled code ignores hooks.

        Returns:
            The mean cross-entropy over this process's rows, nats per token, and the global gradient norm before
            clipping, both scalars on the device.

        Raises:
            SinklabError: if the training shard cannot be read.
        """
        tokens_BT = self.batches.batch(self.state.step)
        parts = tokens_BT.split(self.recipe.train.micro_batch or len(tokens_BT))
        losses_of = self._losses if hooked else self._training_losses
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        for number, part in enumerate(parts, 1):
            no_sync = contextlib.nullcontext() if number == len(parts) else self._no_sync()
            with no_sync, float32_matmul(self.recipe.train.float32_matmul, self.device):
                with self.autocast():
                    losses = losses_of(part) * (len(part) / len(tokens_BT))
                losses.sum().backward()
            total += losses[0].detach()
        gradients = [p.grad for p in self.model.parameters() if p.grad is not None]
        return total, whole(torch.nn.utils.get_total_norm(gradients))

    def autocast(self) -> contextlib.AbstractContextManager[Any]:
        """Return the autocast context of the recipe's precision."""
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.recipe.train.precision == "bf16")


class _CheckedInit(TorchFunctionMode):
    """Mode that calls `check_stop` before every torch function: a stop request can interrupt the initialisation."""

    def __init__(self, check_stop: Callable[[], None]) -> None:
        super().__init__()
        self._check_stop = check_stop

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._check_stop()
        return func(*args, **(kwargs or {}))


class DivergedError(SinklabError):
    """Training diverged: a training or validation loss, a gradient or a weight is not finite.

    Repeating the run gives the same result.
    """


class NotFiniteError(SinklabError):
    """The loss or gradient of an update is not finite. The update was not applied on any process.

    Attributes:
        step: number of the update, 1-based.
    """

    def __init__(self, step: int, loss: float, grad_norm: float) -> None:
        super().__init__(
            f"training diverged at step {step}: loss {loss}, gradient norm {grad_norm}, batch index {step - 1}. "
            "The weights were not updated."
        )
        self.step = step


class FiniteCheck:
    """Check that loss and gradient norm of every update are finite.

    If either is not finite on any process, all processes raise NotFiniteError: in `add`, or with `late` in `read`.

    Args:
        optimizer: optimiser; with `late`, its step is skipped on the device after a non-finite loss or gradient norm.
        world: training processes; all must call the methods.
        late: read loss and gradient norm one update late; requires a fused AdamW on CUDA.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, world: World, late: bool) -> None:
        self._optimizer, self._world, self.late = optimizer, world, late
        self._waiting: deque[tuple[int, Tensor, torch.cuda.Event | None]] = deque()
        self._broken: Tensor | None = None

    def add(self, step: int, loss: Tensor, grad_norm: Tensor) -> None:
        """Register loss and gradient norm of an update, after its backward pass and before its optimiser step.

        Args:
            step: number of the update, 1-based.
            loss: mean cross-entropy over this process's rows.
            grad_norm: global gradient norm before clipping.
        """
        broken = ~(loss.isfinite() & grad_norm.isfinite())
        sums = self._world.sum_on_device(torch.stack((loss.double(), broken.double())))
        numbers = torch.stack((sums[0] / self._world.size, grad_norm.double(), sums[1]))
        if not self.late:
            _finite(step, numbers)
            self._waiting.append((step, numbers, None))
            return
        now = (sums[1] > 0).float()
        self._broken = now if self._broken is None else torch.maximum(self._broken, now)
        self._optimizer.found_inf = self._broken  # type: ignore[attr-defined]  # like GradScaler
        host, copied = numbers, None
        if numbers.is_cuda:  # copied asynchronously, until the event
            host = torch.empty_like(numbers, device="cpu", pin_memory=True)
            host.copy_(numbers, non_blocking=True)
            copied = torch.cuda.Event()
            copied.record(torch.cuda.current_stream(numbers.device))
        self._waiting.append((step, host, copied))

    def read(self, left: int = 0) -> Iterator[tuple[float, float]]:
        """Yield loss and gradient norm of the updates that were not yet read, except the last `left` updates.

        The loss is the mean cross-entropy over the global batch, nats per token. The norm is that before clipping.
        """
        while len(self._waiting) > left:
            step, numbers, copied = self._waiting.popleft()
            if copied is not None:
                copied.synchronize()
            yield _finite(step, numbers)


def _finite(step: int, numbers: Tensor) -> tuple[float, float]:
    """Return loss and gradient norm; raise NotFiniteError if the third number, a count of processes, is not 0."""
    loss, grad_norm, broken_processes = numbers.tolist()
    if broken_processes:
        raise NotFiniteError(step, loss, grad_norm)
    return loss, grad_norm


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
    forward = [f"weight {name}" for name, p in model.named_parameters() if not _all_finite(p)]
    backward: list[str] = []

    def after_module(name: str, module: nn.Module, args: Any, output: Any) -> None:
        if isinstance(output, Tensor) and not _all_finite(output):
            forward.append(f"output of {name or 'the model'}")

    def after_gradient(name: str, parameter: Tensor) -> None:
        if parameter.grad is not None and not _all_finite(parameter.grad):
            backward.append(f"gradient of {name}")

    hooks = [m.register_forward_hook(partial(after_module, name)) for name, m in model.named_modules()]
    hooks += [
        p.register_post_accumulate_grad_hook(partial(after_gradient, name)) for name, p in model.named_parameters()
    ]
    with hooked(hooks):
        yield forward, backward


def _all_finite(tensor: Tensor) -> bool:
    return bool(torch.isfinite(tensor).all())


def _as_json(number: float) -> float | str:
    return number if math.isfinite(number) else str(number)
