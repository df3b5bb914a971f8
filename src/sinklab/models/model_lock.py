"""Locks of a model. Measuring and probing change its hooks, modes and configs: one thread at a time may do each."""

import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any
from weakref import WeakKeyDictionary

from torch import nn

from sinklab.errors import SinklabError

Locks = WeakKeyDictionary[nn.Module, Any]  # reentrant locks by model

_guard = threading.Lock()
_measured: Locks = WeakKeyDictionary()
_probed: Locks = WeakKeyDictionary()


def measured_in_turn(model: nn.Module) -> AbstractContextManager[Any]:
    """Return the reentrant lock that a thread holds while it measures the model."""
    return _lock(_measured, model)


@contextmanager
def probed_alone(model: nn.Module) -> Iterator[None]:
    """Let only one thread probe, intercept or change the model in the `with` block.

    Another thread gets an error instead of waiting, because waiting could deadlock.

    Raises:
        SinklabError: if another thread probes, intercepts or changes the model.
    """
    lock = _lock(_probed, model)
    if not lock.acquire(blocking=False):
        raise SinklabError(
            "another thread measures or changes this model: wait until it ends, or use a separate model per thread"
        )
    try:
        yield
    finally:
        lock.release()


def _lock(locks: Locks, model: nn.Module) -> Any:
    with _guard:
        return locks.setdefault(model, threading.RLock())
