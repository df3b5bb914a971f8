"""One update: the gradient of the global batch, the check that it is finite, the optimiser's step.

A batch depends on (seed, step) alone, and nothing here draws from a global random generator. Rounding apart, nothing
depends on the number of processes either.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from sinklab.data.loader import Prefetcher
from sinklab.device import float32_matmul
from sinklab.model.transformer import Transformer
from sinklab.train.blocks import recompute_blocks
from sinklab.train.directory.checkpoint_state import TrainState
from sinklab.train.directory.run import Run
from sinklab.train.finite import FiniteCheck, NotFiniteError
from sinklab.train.optim import build_optimizer, learning_rate
from sinklab.train.parallel import local, share, whole
from sinklab.train.start import begin, load_start
from sinklab.train.world import ALONE, World


class Updater:
    """Model, optimiser and training batches of a run.

    Args:
        run: an opened run directory; nothing is read from or written to it here.
        world: the processes that train together.
        look: called between the tensors of the model that is built; where it raises, nothing is built.

    Attributes:
        model: the bare model, on its device; with FSDP its parameters are sharded.
        optimizer: over the model's parameters.
        state: what has been reached; `state.step` is also the index of the next batch.
        device: of this process.
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
            self._shared = share(self.model, self.recipe.train.parallel, world)
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
        """One step; returns the newest training loss that is known, in nats per token over the global batch.

        On a CPU it is this step's; on CUDA it is that of the step before (see finite.py).

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
        """Wait until all updates are made, and known to be good: `state` and weights are then those of `state.step`.

        Raises:
            NotFiniteError: as `update`.
        """
        self._take_results(all_of_them=True)

    def has_finite_weights(self) -> bool:
        """Of this process. A step too large overflows weights though its gradient was finite."""
        return bool(torch.stack([local(p.detach()).isfinite().all() for p in self.model.parameters()]).all())

    def _take_results(self, all_of_them: bool = False) -> None:
        state = self.state
        with self._not_updated():
            for made in self.finite.read(all_of_them):
                self._loss, state.grad_norm = made.loss, made.grad_norm
                state.loss_sum, state.loss_count = state.loss_sum + made.loss, state.loss_count + 1

    @contextlib.contextmanager
    def _not_updated(self) -> Iterator[None]:
        """Leave things as they were before an update that is refused within it."""
        try:
            yield
        except NotFiniteError as error:
            self.state.step = error.step - 1
            self.optimizer.zero_grad(set_to_none=True)
            raise

    def gradient(self) -> tuple[Tensor, Tensor]:
        """The gradient of the mean loss over the global batch, left in the parameters.

        Returns:
            The mean loss over this process's rows, and the norm of the whole gradient.
        """
        tokens_BT = self.batches.batch(self.state.step)
        parts = tokens_BT.split(self.recipe.train.micro_batch or len(tokens_BT))
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        for number, part in enumerate(parts, 1):
            apart = contextlib.nullcontext() if number == len(parts) else self._shared.apart()
            with apart, float32_matmul(self.recipe.train.float32_matmul, self.device):
                with self.autocast():
                    loss = self._shared.loss(part) * (len(part) / len(tokens_BT))
                loss.backward()
            total += loss.detach()
        gradients = [p.grad for p in self.model.parameters() if p.grad is not None]
        return total, whole(torch.nn.utils.get_total_norm(gradients))

    def autocast(self) -> contextlib.AbstractContextManager[Any]:
        """The precision of the recipe."""
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.recipe.train.precision == "bf16")


class _Looking(TorchFunctionMode):
    """Within it, `look` is called before every operation of PyTorch: a large model takes minutes to draw."""

    def __init__(self, look: Callable[[], None]) -> None:
        super().__init__()
        self._look = look

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._look()
        return func(*args, **(kwargs or {}))
