"""Timing that can be compared: the contestants in one process, in turn, several rounds, medians; and where it ran."""

import math
import os
import platform
import statistics
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from sinklab.device import processor_name

RESULTS = Path(__file__).parent / "results"


def in_turn(
    contestants: Mapping[str, Callable[[], object]],
    rounds: int,
    warm_up: int = 1,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, list[float]]:
    """Seconds of every round, per contestant.

    Each round runs all of them once, so that a slow spell of the machine meets all alike.

    Args:
        contestants: name -> work. On CUDA the device is waited for before and after.
        rounds: how often each is timed.
        warm_up: rounds before, which do not count.
        clock: `time.process_time` counts the processor time of this process alone, for work of minutes beside others.
    """
    seconds: dict[str, list[float]] = {name: [] for name in contestants}
    for turn in range(warm_up + rounds):
        for name, work in contestants.items():
            _wait()
            start = clock()
            work()
            _wait()
            if turn >= warm_up:
                seconds[name].append(clock() - start)
    return seconds


def over_rounds(seconds: Mapping[str, list[float]], name: str, baseline: str) -> list[float]:
    """A contestant's time over the baseline's, of each round."""
    return [mine / base for mine, base in zip(seconds[name], seconds[baseline], strict=True)]


def ratios(seconds: Mapping[str, list[float]], baseline: str) -> dict[str, float]:
    """Median over the rounds of each contestant's time over the baseline's of the same round."""
    return {name: statistics.median(over_rounds(seconds, name, baseline)) for name in seconds}


def median_interval(values: Sequence[float], level: float = 0.95) -> tuple[float, float]:
    """Between which two of the values the median lies at that level, whatever they are spread like.

    By order statistics: from the k-th smallest to the k-th largest with P(Binomial(n, 1/2) < k) <= (1 - level) / 2; the
    smallest and the largest where there are too few (fewer than six at 0.95).
    """
    ordered, below, k = sorted(values), 0.0, 0
    while (below := below + math.comb(len(ordered), k) / 2 ** len(ordered)) <= (1 - level) / 2:
        k += 1
    return ordered[max(k - 1, 0)], ordered[-max(k, 1)]


def environment() -> dict[str, Any]:
    """Versions, device, threads and the state of the repository, to be kept with the numbers."""
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else platform.machine(),
        "cpu": processor_name(),
        "capability": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
        "load": os.getloadavg()[0],
        "commit": _git("rev-parse", "--short", "HEAD"),
        "modified": bool(_git("status", "--porcelain", "--untracked-files=no")),
    }


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def _git(*arguments: str) -> str:
    done = subprocess.run(["git", *arguments], capture_output=True, text=True, cwd=Path(__file__).parent, check=False)
    return done.stdout.strip()
