"""Speed of a run: tokens per second, model FLOP utilisation, share of time spent waiting for data."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from sinklab.train.planning.flops import model_flops, peak_flops
from sinklab.train.recipe import Recipe


@dataclass(frozen=True)
class Speed:
    """Of the updates since the last evaluation; evaluations and checkpoints are not in it.

    Attributes:
        tokens_per_second: over all processes; None where there was no update.
        mfu: operations that the model's formula needs per second, over the peak of all cards (0..1); None on a CPU and
            on cards whose peak is not known (`train.peak_flops`).
        stall_share: share of the time in which this process waited for a batch (0..1).
    """

    tokens_per_second: float | None = None
    mfu: float | None = None
    stall_share: float | None = None


class Speedometer:
    """Times the updates between two evaluations, from its making.

    Args:
        recipe: with the model's `vocab_size` set.
        device: of this process.
        processes: that share the batch, each with a device like this one.
    """

    def __init__(self, recipe: Recipe, device: torch.device, processes: int = 1) -> None:
        self._tokens_per_step = recipe.train.batch_size * recipe.model.context
        self._flops_per_token = model_flops(recipe.model).total / recipe.model.context
        peak = recipe.train.peak_flops or peak_flops(device)
        self._peak = None if peak is None else peak * processes
        self._seconds, self._running_since = 0.0, time.perf_counter()
        self._step = self._waited = 0.0

    def begin(self, step: int, waited: float) -> None:
        """Start anew at `step`; `waited` are the seconds that had been spent on waiting for data by then."""
        self._seconds, self._running_since = 0.0, time.perf_counter()
        self._step, self._waited = step, waited

    @contextmanager
    def paused(self) -> Iterator[None]:
        """What is done within it does not count. All updates must have been made."""
        self._seconds += time.perf_counter() - self._running_since
        try:
            yield
        finally:
            self._running_since = time.perf_counter()

    def read(self, step: int, waited: float) -> Speed:
        """The speed from `begin` to `step`; to be asked while paused."""
        tokens = (step - self._step) * self._tokens_per_step
        if not tokens:
            return Speed()
        rate = tokens / self._seconds
        mfu = None if self._peak is None else rate * self._flops_per_token / self._peak
        return Speed(rate, mfu, (waited - self._waited) / self._seconds)
