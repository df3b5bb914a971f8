"""Batches that are halved where memory runs out, with their progress, time and peak memory."""

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from sinklab.errors import SinklabError, is_out_of_memory
from sinklab.models.hooks import Progress, hooked


def in_batches(sequences: int, batch_size: int, step: Callable[[int, int], None]) -> list[str]:
    """Call step(start, stop) over all sequences; out of memory halves the batch and repeats the part that failed.

    Args:
        step: without side effects where it raises.

    Returns:
        notes for the reader of the result; empty where no batch was halved.

    Raises:
        SinklabError: one sequence alone does not fit.
    """
    size, start = min(batch_size, sequences), 0
    while start < sequences:
        stop = min(start + size, sequences)
        try:
            step(start, stop)
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            if stop - start == 1:
                raise SinklabError(
                    "out of memory with one sequence at a time: lower --length, or try --dtype bfloat16"
                ) from error
            size = (stop - start) // 2
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
            continue
        start = stop
    if size == min(batch_size, sequences):
        return []
    return [f"out of memory: the batch was halved from {min(batch_size, sequences)} to {size} sequences"]


class Steps:
    """Reports progress in sequences; each block of the model that has run counts as a part of its batch."""

    def __init__(self, progress: Progress | None, blocks: int, sequences: int) -> None:
        self._progress, self._blocks, self._sequences = progress, blocks, sequences
        self._start = self._stop = self._ran = 0

    def begin(self, start: int, stop: int) -> None:
        """A batch begins, or is repeated."""
        self._start, self._stop, self._ran = start, stop, 0

    def end(self) -> None:
        """The batch is done."""
        if self._progress:
            self._progress(self._stop, self._sequences)

    def block_ran(self, *_: Any) -> None:
        """A forward hook of a block; after the last block the head remains."""
        self._ran += 1
        if self._progress:
            done = (self._stop - self._start) * self._ran / (self._blocks + 1)
            self._progress(self._start + done, self._sequences)


@contextmanager
def reporting(blocks: Sequence[nn.Module], progress: Progress | None, sequences: int) -> Iterator[Steps]:
    """Report progress block by block, as one long sequence may take minutes."""
    steps = Steps(progress, len(blocks), sequences)
    with hooked(block.register_forward_hook(steps.block_ran) for block in blocks):
        yield steps


@dataclass
class Cost:
    """Time and peak memory, set when the timed block ends."""

    seconds: float = 0.0
    peak_memory_mb: float | None = None


@contextmanager
def costing(device: torch.device) -> Iterator[Cost]:
    """Time the block; peak memory is the device's for CUDA, else the peak of the whole process so far (MB = 2**20).

    Peak memory is None where the system does not report it.
    """
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    cost, start = Cost(), time.perf_counter()
    yield cost
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        cost.peak_memory_mb = torch.cuda.max_memory_allocated(device) / 2**20
    else:
        cost.peak_memory_mb = process_peak_mb()
    cost.seconds = time.perf_counter() - start


def process_peak_mb() -> float | None:
    """The largest memory that this process has had so far (MB = 2**20), None where the system does not report it."""
    try:
        import resource
    except ImportError:  # not a Unix system
        return None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / (2**20 if sys.platform == "darwin" else 2**10)
