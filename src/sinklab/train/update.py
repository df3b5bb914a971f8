"""One update: the gradient of the global batch, the check that it is finite, the optimiser's step.

A batch depends on (seed, step) alone, and no global random generator is used. Apart from rounding, an update does not
depend on the number of processes either.

On a CPU loss and gradient norm are read before the optimiser's step: where one is not finite, no step follows. On CUDA
reading would make the processor wait for the device at every update. There the device decides: AdamW's fused kernel
leaves all parameters and moments alone once a loss or a gradient was not finite, in that update and all later ones, and
the processor reads one update late.
"""

import contextlib
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from sinklab.data.loader import Prefetcher
from sinklab.device import float32_matmul
from sinklab.errors import SinklabError
from sinklab.model.transformer import Transformer
from sinklab.train.directory.checkpoint import TrainState
from sinklab.train.directory.run import Run
from sinklab.train.optim import build_optimizer, learning_rate
from sinklab.train.parallelize import local, recompute_blocks, share, whole
from sinklab.train.start import begin, load_start
from sinklab.train.world import ALONE, World


class Updater:
    """Model, optimiser and training batches of a run.

    Args:
        run: opened run directory; its files are neither read nor written here.
        world: processes that train together.
        look: called between the tensors of the new model; an exception from it ends the construction.

    Attributes:
        model: unwrapped model, on its device; with FSDP its parameters are sharded.
        optimizer: optimiser of the model's parameters.
        state: training state; `state.step` is also the index of the next batch.
        device: device of this process.
        batches: this process's rows of every batch.

    Raises:
        InputError: text too short for the recipe, a batch that the processes cannot share equally, or a checkpoint to
            start from that cannot be used.
    """

    def __init__(self, run: Run, world: World = ALONE, look: Callable[[], None] = lambda: None) -> None:
        self.recipe, self.world = run.recipe, world
        self.device = world.device(self.recipe.train.device)
        rows, loader = world.together(lambda: (world.rows(self.recipe.train.batch_size), run.loader("train")))
        self.batches = Prefetcher(lambda index: loader.batch(index, rows), self.device, self.recipe.train.steps)
        with _Looking(look):
            model = Transformer(self.recipe.model, self.recipe.seed)
        if self.recipe.model.init_from is not None:
            begin(model, load_start(self.recipe.model.init_from), run.dataset.tokenizer_path)
        self.model = model.to(self.device)
        recompute_blocks(self.model, self.recipe.train.recompute)
        with self.autocast():  # FSDP needs a forward pass
            self._shared = share(self.model, self.recipe.losses, self.recipe.train.parallel, world)
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
        """One step; returns the newest known training loss, in nats per token over the global batch.

        On a CPU it is this step's; on CUDA the previous step's.

        Raises:
            NotFiniteError: on all processes, where a loss or gradient of one of them is not finite.
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
        self.optimizer.zero_grad(set_to_none=True)
        state.step += 1
        self._take_results()
        return self._loss

    def settle(self) -> None:
        """Wait until all updates are made and checked: `state` and weights are then those of `state.step`.

        Raises:
            NotFiniteError: as `update`.
        """
        self._take_results(all_of_them=True)

    def has_finite_weights(self) -> bool:
        """Whether this process's weights are finite: a large step may overflow them though its gradient was finite."""
        return bool(torch.stack([local(p.detach()).isfinite().all() for p in self.model.parameters()]).all())

    def _take_results(self, all_of_them: bool = False) -> None:
        state = self.state
        with self._not_updated():
            for made in self.finite.read(all_of_them):
                self._loss, state.grad_norm = made.loss, made.grad_norm
                state.loss_sum, state.loss_count = state.loss_sum + made.loss, state.loss_count + 1

    @contextlib.contextmanager
    def _not_updated(self) -> Iterator[None]:
        """Reset step and gradients where an update is refused within it."""
        try:
            yield
        except NotFiniteError as error:
            self.state.step = error.step - 1
            self.optimizer.zero_grad(set_to_none=True)
            raise

    def gradient(self) -> tuple[Tensor, Tensor]:
        """The gradient of the mean loss over the global batch, added losses included, left in the parameters.

        Returns:
            The mean cross-entropy over this process's rows, and the norm of the whole gradient.
        """
        tokens_BT = self.batches.batch(self.state.step)
        parts = tokens_BT.split(self.recipe.train.micro_batch or len(tokens_BT))
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        for number, part in enumerate(parts, 1):
            apart = contextlib.nullcontext() if number == len(parts) else self._shared.apart()
            with apart, float32_matmul(self.recipe.train.float32_matmul, self.device):
                with self.autocast():
                    losses = self._shared.losses(part) * (len(part) / len(tokens_BT))
                losses.sum().backward()
            total += losses[0].detach()
        gradients = [p.grad for p in self.model.parameters() if p.grad is not None]
        return total, whole(torch.nn.utils.get_total_norm(gradients))

    def autocast(self) -> contextlib.AbstractContextManager[Any]:
        """The precision of the recipe."""
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.recipe.train.precision == "bf16")


class _Looking(TorchFunctionMode):
    """Within it, `look` is called before every operation of PyTorch: a large model takes minutes to initialise."""

    def __init__(self, look: Callable[[], None]) -> None:
        super().__init__()
        self._look = look

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._look()
        return func(*args, **(kwargs or {}))


class DivergedError(SinklabError):
    """The numbers of a run became non-finite; training it again would give the same result."""


class NotFiniteError(SinklabError):
    """The loss or the gradient of a step is not finite; no process has made that update.

    Attributes:
        step: of that update, counted from 1.
    """

    def __init__(self, step: int, loss: float, grad_norm: float) -> None:
        super().__init__(
            f"step {step} diverged: loss {loss}, gradient norm {grad_norm}, batch index {step - 1}. The weights were "
            "not updated."
        )
        self.step = step


@dataclass(frozen=True)
class UpdateResult:
    """The mean loss over the global batch in nats per token, and the norm of its gradient before clipping."""

    loss: float
    grad_norm: float


class FiniteCheck:
    """Loss and gradient norm of every update of one process, in order, and whether they are finite.

    Args:
        optimizer: skips its step on CUDA where a number is not finite.
        world: the processes that train together; all of them call the methods.
        late: read one update late; needs a fused AdamW.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, world: World, late: bool) -> None:
        self._optimizer, self._world, self._late = optimizer, world, late
        self._waiting: deque[tuple[int, Tensor, torch.cuda.Event | None]] = deque()
        self._broken: Tensor | None = None

    def add(self, step: int, loss: Tensor, grad_norm: Tensor) -> None:
        """Add an update whose gradient is computed and whose optimiser step is not made yet.

        Args:
            step: of the update, counted from 1.
            loss: mean over this process's rows.
            grad_norm: of the whole gradient.

        Raises:
            NotFiniteError: on all processes, where one is not finite; when read late, from `read`.
        """
        broken = ~(loss.isfinite() & grad_norm.isfinite())
        sums = self._world.sum_on_device(torch.stack((loss.double(), broken.double())))
        numbers = torch.stack((sums[0] / self._world.size, grad_norm.double(), sums[1]))
        if not self._late:
            _refuse(step, numbers.tolist())
            self._waiting.append((step, numbers, None))
            return
        now = (sums[1] > 0).float()
        self._broken = now if self._broken is None else torch.maximum(self._broken, now)
        self._optimizer.found_inf = self._broken  # type: ignore[attr-defined]  # as GradScaler sets it
        self._waiting.append((step, *_begin_copy(numbers)))

    def read(self, all_of_them: bool = False) -> list[UpdateResult]:
        """The updates that have not been read, without the last one if it is read late.

        Raises:
            NotFiniteError: on all processes, where one is not finite.
        """
        left, found = int(self._late and not all_of_them), []
        while len(self._waiting) > left:
            step, numbers, copied = self._waiting.popleft()
            if copied is not None:
                copied.synchronize()
            loss, grad_norm, _ = _refuse(step, numbers.tolist())
            found.append(UpdateResult(loss, grad_norm))
        return found


def _refuse(step: int, numbers: list[float]) -> list[float]:
    loss, grad_norm, broken_processes = numbers
    if broken_processes:
        raise NotFiniteError(step, loss, grad_norm)
    return numbers


def _begin_copy(numbers: Tensor) -> tuple[Tensor, torch.cuda.Event | None]:
    """The numbers on the CPU, and the event after which they are valid."""
    if not numbers.is_cuda:
        return numbers, None
    host = torch.empty_like(numbers, device="cpu", pin_memory=True)
    host.copy_(numbers, non_blocking=True)
    copied = torch.cuda.Event()
    copied.record(torch.cuda.current_stream(numbers.device))
    return host, copied
