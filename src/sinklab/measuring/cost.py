"""What a measurement costs: wall-clock seconds and peak memory."""

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch


@dataclass
class Cost:
    """Filled in when the block that is timed ends."""

    seconds: float = 0.0
    peak_memory_mb: float | None = None


@contextmanager
def costing(device: torch.device) -> Iterator[Cost]:
    """Time the block; peak memory is the device's for CUDA, else the peak of the whole process so far (MB = 2**20).

    None where the system does not report it.
    """
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    cost, start = Cost(), time.perf_counter()
    yield cost
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        cost.peak_memory_mb = torch.cuda.max_memory_allocated(device) / 2**20
    else:
        cost.peak_memory_mb = _process_peak_mb()
    cost.seconds = time.perf_counter() - start


def _process_peak_mb() -> float | None:
    try:
        import resource
    except ImportError:  # not a Unix system
        return None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / (2**20 if sys.platform == "darwin" else 2**10)
