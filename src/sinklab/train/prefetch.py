"""Batches made ready in the background, so that the device does not wait for them.

A batch is a pure function of its number, so there is no state to save: what was prepared and not used is forgotten.
"""

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

import torch
from torch import Tensor


class Prefetcher:
    """One batch ahead of the loop, in a thread; on CUDA in pinned memory, from where it is copied asynchronously.

    Args:
        fetch: number -> the batch on the CPU, as `Loader.batch`.
        device: where batches go.
        end: number of the first batch that will not be asked for.

    Attributes:
        waited: seconds that `batch` has waited for batches so far.
    """

    def __init__(self, fetch: Callable[[int], Tensor], device: torch.device, end: int) -> None:
        self.waited = 0.0
        self._fetch, self._device, self._end = fetch, device, end
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="batches")
        self._ahead: tuple[int, Future[Tensor]] | None = None

    def batch(self, index: int) -> Tensor:
        """Batch number `index` on the device; the one after it is begun.

        Raises:
            Whatever `fetch` raises.
        """
        started = time.perf_counter()
        future = self._ahead[1] if self._ahead and self._ahead[0] == index else self._begin(index)
        tokens = future.result()
        self.waited += time.perf_counter() - started
        self._ahead = (index + 1, self._begin(index + 1)) if index + 1 < self._end else None
        return tokens.to(self._device, non_blocking=True)

    def _begin(self, index: int) -> Future[Tensor]:
        return self._thread.submit(self._ready, index)

    def _ready(self, index: int) -> Tensor:
        tokens = self._fetch(index)
        return tokens.pin_memory() if self._device.type == "cuda" else tokens
