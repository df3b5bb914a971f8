"""Check that the loss and gradient norm of every update are finite, and the time at which they are read.

On a CPU it is read before the optimiser's step: where one is not finite, no step follows. On CUDA reading would make
the processor wait for the device at every update. There the device decides: AdamW's fused kernel leaves all parameters
and moments alone once a loss or a gradient was not finite, that update and all after it, and the processor reads one
update late.
"""

from collections import deque
from dataclasses import dataclass

import torch
from torch import Tensor

from sinklab.errors import SinklabError
from sinklab.train.world import World


class DivergedError(SinklabError):
    """A run whose numbers are not finite any more. To train it again would come to the same."""


class NotFiniteError(SinklabError):
    """The loss or the gradient of a step is not finite; nothing has been updated since, on any process.

    Attributes:
        step: the update that was not made, counted from 1.
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
        optimizer: whose steps are left out.
        world: the processes that train together; all of them take part.
        late: read one update late; needs a fused AdamW.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, world: World, late: bool) -> None:
        self._optimizer, self._world, self._late = optimizer, world, late
        self._waiting: deque[tuple[int, Tensor, torch.cuda.Event | None]] = deque()
        self._broken: Tensor | None = None

    def add(self, step: int, loss: Tensor, grad_norm: Tensor) -> None:
        """Take in an update whose gradient is known and whose step has not been made.

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
        self._optimizer.found_inf = self._broken  # type: ignore[attr-defined]  # as GradScaler tells a fused optimiser
        self._waiting.append((step, *_begin_copy(numbers)))

    def read(self, all_of_them: bool = False) -> list[UpdateResult]:
        """The updates that have not been read, but for the last one when it is read late.

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
    """The numbers on the CPU, and what to wait for before it is looked at."""
    if not numbers.is_cuda:
        return numbers, None
    host = torch.empty_like(numbers, device="cpu", pin_memory=True)
    host.copy_(numbers, non_blocking=True)
    copied = torch.cuda.Event()
    copied.record(torch.cuda.current_stream(numbers.device))
    return host, copied
