"""Comparable timings of several functions, in turn over several rounds, and a description of the machine."""

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
    """Return the seconds of every round, by contestant.

    Each round runs all contestants once, so that slow periods of the machine affect all of them.

    Args:
        contestants: functions to time, by name. CUDA is synchronised before and after each.
        rounds: number of timed rounds.
        warm_up: number of rounds before them, which are not timed.
        clock: clock in seconds; `time.process_time` excludes the time of other processes.
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
    """Return the time of contestant `name` divided by that of the baseline, for each round."""
    return [mine / base for mine, base in zip(seconds[name], seconds[baseline], strict=True)]


def ratios(seconds: Mapping[str, list[float]], baseline: str) -> dict[str, float]:
    """Return, by contestant, the median over the rounds of its time divided by the baseline's in the same round."""
    return {name: statistics.median(over_rounds(seconds, name, baseline)) for name in seconds}


def median_interval(values: Sequence[float], level: float = 0.95) -> tuple[float, float]:
    """Return a distribution-free confidence interval of the median from n values, as (low, high).

    It is from the k-th smallest to the k-th largest value, for the largest k with
    P(Binomial(n, 1/2) < k) <= (1 - level) / 2. With too few values (fewer than six at 0.95) it is their whole range.
    """
    ordered, below, k = sorted(values), 0.0, 0
    while (below := below + math.comb(len(ordered), k) / 2 ** len(ordered)) <= (1 - level) / 2:
        k += 1
    return ordered[max(k - 1, 0)], ordered[-max(k, 1)]


def environment() -> dict[str, Any]:
    """Return versions, device, threads, load and git state, to be saved with the results."""
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
