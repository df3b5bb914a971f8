"""Batches whose size is halved on out-of-memory errors, with progress reports; run time and peak memory."""

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from sinklab.errors import SinklabError, is_out_of_memory
from sinklab.models.hooks import Progress


class Batches:
    """Iterator over batches, as ranges [start, stop) of sequence indices.

        for start, stop in batches:
            with batches.attempt():  # on out-of-memory, the batch size is halved and the batch repeated
                ...

    Args:
        sequences: total number of sequences.
        size: initial number of sequences per batch; at most `sequences` are used.
        progress: called with (finished sequences, possibly fractional; total sequences) after every batch, and after
            every block that has the hook `block_ran`; None disables reports.
        blocks: number of blocks of the model; the LM head counts as one more progress step.
    """

    def __init__(self, sequences: int, size: int, progress: Progress | None, blocks: int) -> None:
        self.sequences, self._progress, self._blocks = sequences, progress, blocks
        self._first_size = self._size = min(size, sequences)
        self._start = self._stop = self._ran = 0

    def __iter__(self) -> Iterator[tuple[int, int]]:
        while self._start < self.sequences:
            self._stop, self._ran = min(self._start + self._size, self.sequences), 0
            yield self._start, self._stop

    @contextmanager
    def attempt(self) -> Iterator[None]:
        """Process one batch in the `with` block.

        An out-of-memory error inside the block is suppressed: the batch size is halved, and the iterator yields a
        smaller batch that starts at the same sequence. A block that runs out of memory must therefore leave no side
        effects.

        Raises:
            SinklabError: if a batch of one sequence runs out of memory.
        """
        try:
            yield
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            if self._stop - self._start == 1:
                raise SinklabError(
                    "out of memory with one sequence at a time: use shorter sequences (--length; --sink-length of sft; "
                    "metric.length of a recipe), or bfloat16 (--dtype bfloat16; train.precision: bf16 of a recipe)"
                ) from error
            self._size = (self._stop - self._start) // 2
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
            return
        self._start = self._stop
        if self._progress:
            self._progress(self._stop, self.sequences)

    def block_ran(self, *_: Any) -> None:
        """Forward hook of every block, which reports progress (a long sequence may take minutes)."""
        self._ran += 1
        if self._progress:
            done = (self._stop - self._start) * self._ran / (self._blocks + 1)
            self._progress(self._start + done, self.sequences)

    def notes(self) -> list[str]:
        """Return a list with a note if the batch size was reduced; otherwise an empty list."""
        if self._size == self._first_size:
            return []
        return [f"out of memory: the batch size was reduced from {self._first_size} to {self._size} sequences"]


@dataclass
class Cost:
    """Wall-clock time in seconds and peak memory in MiB of a `with` block; `costing` sets them when the block ends."""

    seconds: float = 0.0
    peak_memory_mb: float | None = None


@contextmanager
def costing(device: torch.device) -> Iterator[Cost]:
    """Record the wall-clock time and peak memory of the `with` block in the yielded `Cost`.

    On a CUDA device, peak memory is the maximum of the memory of PyTorch's tensors inside the block; PyTorch's peak
    memory statistics are reset for this. On other devices, it is the peak memory of the whole process so far, or None
    if unavailable.
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
    """Return the peak memory of this process so far in MiB; None if unavailable."""
    try:
        import resource
    except ImportError:  # not a Unix system
        return None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / (2**20 if sys.platform == "darwin" else 2**10)
