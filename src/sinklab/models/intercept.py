"""Intercept a model's attention calls to observe, edit or replace them; uses can be nested in any order.

    with intercept(adapter, observe=records.observe):      # observe every call
    with intercept(adapter, edit=RollingCache(64, 4)):     # edit the inputs of every call
    with intercept(adapter, compute=keys.value_zeroed):    # replace the output of every call

For each attention call, all edits run first. Then every observer is called once with the edited call. The output comes
from the first of these that is available: `compute`; an observer that returns an output; `LayerCall.library` (unedited
calls of Hugging Face models); the attention operation.

With `unchanged`, and for a model with an attention function that is not transformers' own, the model's functions are
called, and an observer's output is not used (`LibraryKernel.fixed`).

Locks of a model. Measuring and probing change its hooks, modes and configs: one thread at a time may do each.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Protocol
from weakref import WeakKeyDictionary

from torch import Tensor, nn

from sinklab.attention.layer_call import LayerCall
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


Edit = Callable[[LayerCall], LayerCall]
Compute = Callable[[LayerCall], Tensor]  # (B, H, T, V)
Observe = Callable[[LayerCall], Tensor | None]  # may return the attention output, if it computes it


class Interceptable(Protocol):
    """Part of `Adapter` that `intercept` uses; importing `Adapter` here would be circular."""

    @property
    def module(self) -> nn.Module: ...

    def intercepted(
        self, compute: Compute, edit: Edit = ..., unchanged: bool = ...
    ) -> AbstractContextManager[None]: ...


@dataclass(eq=False)
class Interception:
    """Functions of one use of `intercept`, and the backends that computed the attention.

    Attributes:
        edit, compute, observe, unchanged: arguments of `intercept`.
        backends: backends that computed attention outputs: "compute" (the argument `compute`), "one pass" (an
            observer), the name of `LayerCall.library`, "operation" (the attention operation).
    """

    edit: Edit | None = None
    compute: Compute | None = None
    observe: Observe | None = None
    unchanged: bool = False
    backends: set[str] = field(default_factory=set)


@dataclass(eq=False)
class _Handler:
    """All active uses of `intercept` on one model, in the order in which they were entered."""

    uses: list[Interception] = field(default_factory=list)
    installed: ExitStack = field(default_factory=ExitStack)
    unchanged: bool | None = None  # as installed

    def install(self, adapter: Interceptable) -> None:
        """Install the interception that the active uses need, if another one is installed."""
        unchanged = all(use.unchanged for use in self.uses)
        if unchanged != self.unchanged:
            self.installed.close()
            self.installed.enter_context(adapter.intercepted(self.output, self.edited, unchanged))
            self.unchanged = unchanged

    def edited(self, layer: LayerCall) -> LayerCall:
        for use in self.uses:
            if use.edit is not None:
                layer = use.edit(layer)
        return layer

    def output(self, layer: LayerCall) -> Tensor:
        compute = next((use.compute for use in self.uses if use.compute is not None), None)
        fixed = compute is not None or (layer.library is not None and layer.library.fixed)
        out: Tensor | None = None
        for use in self.uses:
            if use.observe is not None:
                free = not fixed and out is None
                answer = use.observe(layer if free else replace(layer, library=None))
                out = answer if free else out
        if compute is not None:
            backend, out = "compute", compute(layer)
        elif out is not None:
            backend = "one pass"
        elif layer.library is not None:
            backend, out = layer.library.name, layer.library.output()
        else:  # not `own_output`, which the `LayerCall` in the exported code of an earlier sinklab may lack
            backend, out = "operation", layer.output()
        for use in self.uses:
            use.backends.add(backend)
        return out


_handlers: WeakKeyDictionary[nn.Module, _Handler] = WeakKeyDictionary()


@contextmanager
def intercept(
    adapter: Interceptable,
    *,
    edit: Edit | None = None,
    compute: Compute | None = None,
    observe: Observe | None = None,
    unchanged: bool = False,
) -> Iterator[Interception]:
    """Edit, compute or observe every attention call of a model inside the `with` block.

    The yielded `Interception` collects the names of the backends that computed the attention.

    Args:
        edit: function that returns the call to use instead of the given one.
        compute: function that returns the attention output of a call, (B, H, T, V).
        observe: function that receives each edited call, and returns its attention output or None.
        unchanged: if True, forward passes remain the same bit for bit, unless another use changes them.

    Raises:
        SinklabError: if another thread probes, intercepts or changes this model, or another `compute` is active. In a
            forward pass, if the model's own attention function is called and does not compute softmax attention.
    """
    use = Interception(edit, compute, observe, unchanged)
    with probed_alone(adapter.module):
        handler = _handlers.setdefault(adapter.module, _Handler())
        if compute is not None and any(other.compute is not None for other in handler.uses):
            raise SinklabError("the attention of this model is already replaced: exit the other `intercept` first")
        handler.uses.append(use)
        try:
            handler.install(adapter)
            yield use
        finally:
            handler.uses.remove(use)
            if handler.uses:
                handler.install(adapter)
            else:
                del _handlers[adapter.module]
                handler.installed.close()
