"""Hooks and other changes of a model that last for a `with` block, and recording of norms and hidden states.

Intercept a model's attention calls to observe, edit or replace them; uses can be nested in any order.

    with intercept(adapter, observe=records.observe):      # observe every call
    with intercept(adapter, edit=RollingCache(64, 4)):     # edit the inputs of every call
    with intercept(adapter, compute=keys.value_zeroed):    # replace the output of every call

For each attention call, all edits run first. Then every observer is called once with the edited call. The output comes
from the first of these that is available: `compute`; an observer that returns an output; `LayerCall.library` (unedited
calls of Hugging Face models); the attention operation.

With `unchanged`, and for a model with an attention function that is not transformers' own, the model's functions are
called, and an observer's output is not used (`LibraryKernel.fixed`).

Locks of a model. Measuring and probing change its hooks, modes and configs: one thread at a time may do each.

Arguments and output of a call of a Hugging Face model, whose KV cache has two names.

From transformers 5.24 on, the KV cache is the argument and output field `cache`. In earlier versions, and in code from
a model's repository, it is `past_key_values`.
"""

import inspect
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Protocol, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from sinklab.attention.layer_call import LayerCall
from sinklab.attention.query_blocks import accumulate_dtype
from sinklab.errors import SinklabError

Progress = Callable[[float, int], None]  # (finished sequences, possibly fractional; total sequences)
Seen = TypeVar("Seen")
HIDDEN = "hidden_states"  # keyword argument of blocks and attention modules
NO_CACHE = "an ablated model does not support a KV cache: call it without one, and generate with use_cache=False"
NO_BLOCKS = "its blocks could not be found, are used several times in a forward pass, or have several residual streams"
FirstColumns = Callable[[Tensor], Tensor]
"""Function from a tensor (B, ...) to the column of each sequence's first real token (B,), on the same device."""


@contextmanager
def hooked(registered: Iterable[RemovableHandle]) -> Iterator[None]:
    """Remove hooks at the end of the `with` block, also after an exception.

    Args:
        registered: handles of the hooks. If it is a generator that raises an exception, the hooks registered until then
            are removed.
    """
    handles: list[RemovableHandle] = []
    try:
        handles.extend(registered)
        yield
    finally:
        for handle in handles:
            handle.remove()


def forward_pass_hooks(
    modules: Iterable[nn.Module],
    entering: Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], None],
    leaving: Callable[[Any], None] = lambda output: None,
) -> Iterator[RemovableHandle]:
    """Register hooks that run once per forward pass, and yield their handles.

    A forward pass is a call of one of `modules` that is not inside a call of another one.

    Args:
        modules: a model and its submodules that may be called alone.
        entering: called with (module, args, kwargs) before the forward pass.
        leaving: called with the output after the forward pass; with None after an exception.
    """
    outermost: nn.Module | None = None

    def enter(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        nonlocal outermost
        if outermost is None:
            outermost = module
            entering(module, args, kwargs)

    def leave(module: nn.Module, _: Any, output: Any) -> None:
        nonlocal outermost
        if module is outermost:
            outermost = None
            leaving(output)

    for module in modules:
        yield module.register_forward_pre_hook(enter, prepend=True, with_kwargs=True)
        yield module.register_forward_hook(leave, always_call=True)


_guard = threading.Lock()
_eager: list[Any] = []  # stance of the active blocks of `uncompiled`, once for each


@contextmanager
def uncompiled() -> Iterator[None]:
    """Run compiled code uncompiled in the `with` block, but not the attention functions of intercepted calls.

    Compiled code ignores hooks that are added later, or they are compiled with it. Blocks may end in any order.
    """
    with _guard:
        _eager.append(_eager[0] if _eager else torch.compiler.set_stance("force_eager"))
    try:
        yield
    finally:
        with _guard:
            stance = _eager.pop()
            if not _eager:
                stance.__exit__(None, None, None)


@contextmanager
def compiled_kernels() -> Iterator[None]:
    """Suspend `uncompiled` in the `with` block: FlexAttention needs its compiled kernel, or it stores T x T scores."""
    for stance in _eager[:1]:
        stance.__exit__(None, None, None)
    try:
        yield
    finally:
        for stance in _eager[:1]:
            stance.__enter__()


def _is_compiled(part: nn.Module) -> bool:
    by_forward = hasattr(vars(part).get("forward"), "get_compiler_config")  # model.forward = torch.compile(..)
    return by_forward or type(part).__name__ == "OptimizedModule" or part._compiled_call_impl is not None


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Set evaluation mode, without gradients and compiled modules, in the `with` block; then restore every module."""
    before = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        with torch.no_grad(), uncompiled() if any(map(_is_compiled, model.modules())) else nullcontext():
            yield
    finally:
        for module, training in before:
            module.training = training


@contextmanager
def changed_entries(*changes: tuple[Tensor, Any, Tensor | float]) -> Iterator[None]:
    """Set `tensor[index]` to values, for all triples (tensor, index, values), in the `with` block; then restore it."""
    before = [tensor[index].detach().clone() for tensor, index, _ in changes]
    with torch.no_grad():
        for tensor, index, values in changes:
            tensor[index] = values
    try:
        yield
    finally:
        with torch.no_grad():
            for (tensor, index, _), values in zip(changes, before, strict=True):
                tensor[index] = values


@contextmanager
def requiring_grad(parameters: Iterable[Tensor], wanted: bool) -> Iterator[None]:
    """Set `requires_grad` of parameters in the `with` block; then restore it."""
    before = [(parameter, parameter.requires_grad) for parameter in parameters]
    try:
        for parameter, _ in before:
            parameter.requires_grad_(wanted)
        yield
    finally:
        for parameter, required in before:
            parameter.requires_grad_(required)


def token_norms(x: Tensor) -> Tensor:
    """Compute the l2 norm over the last axis in float32 (float64 for float64 input)."""
    return torch.linalg.vector_norm(x, dim=-1, dtype=accumulate_dtype(x.dtype))


def first_input(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """Return the first argument of a module, which may be passed as `hidden_states`."""
    return args[0] if args else kwargs[HIDDEN]


def replaced_inputs(
    modules: Iterable[nn.Module], change: Callable[[int, Tensor], Tensor]
) -> AbstractContextManager[None]:
    """Replace the first argument x of the n-th module, counted from 1, by `change(n, x)` in the `with` block."""

    def entering(index: int, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        x = change(index, first_input(args, kwargs))
        return ((x, *args[1:]), kwargs) if args else (args, kwargs | {HIDDEN: x})

    return hooked(
        module.register_forward_pre_hook(partial(entering, index), with_kwargs=True)
        for index, module in enumerate(modules, 1)
    )


def hidden_states(output: Any) -> Tensor:
    """Return the hidden states (B, T, C) from the output of a block or norm, which may be a tuple or a list."""
    return output if isinstance(output, Tensor) else output[0]


@contextmanager
def entering_norms(modules: Sequence[nn.Module]) -> Iterator[list[Tensor]]:
    """Yield a list of the l2 norms |x| (B, T) of each module's input x; every forward pass refills the list.

    Args:
        modules: modules that a forward pass calls in this order, each once.
    """
    found: list[Tensor] = []

    def entering(module: nn.Module, args: tuple[Any, ...]) -> None:
        if module is modules[0]:
            found.clear()
        found.append(token_norms(args[0].detach()))

    with hooked(module.register_forward_pre_hook(entering) for module in modules):
        yield found


@contextmanager
def residual_stream(blocks: Sequence[nn.Module], read: Callable[[Tensor], Seen]) -> Iterator[list[Seen]]:
    """Yield a list of read(h) for the residual stream h (B, T, C); every forward pass refills the list.

    The list contains one entry for the input of the first block and one for the output of every block. The last h is
    the input of the final norm (as in figure 2 of 2410.10781).

    Raises:
        SinklabError: in a forward pass, if the blocks have several residual streams.
    """
    found: list[Seen] = []

    def entering(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        hidden = first_input(args, kwargs).detach()
        if hidden.ndim > 3:
            raise SinklabError(
                f"models with several residual streams cannot be measured: the hidden states have shape "
                f"{tuple(hidden.shape)}"
            )
        found[:] = [read(hidden)]

    def leaving(_: nn.Module, __: tuple[Any, ...], output: Any) -> None:
        found.append(read(hidden_states(output).detach()))

    with hooked(
        [
            *(block.register_forward_hook(leaving) for block in blocks),
            *(block.register_forward_pre_hook(entering, with_kwargs=True) for block in blocks[:1]),
        ]
    ):
        yield found


Locks = WeakKeyDictionary[nn.Module, Any]  # reentrant locks by model

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

    @compiled_kernels()
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


CACHE = "cache"
FORMER = "past_key_values"


def forward_signature(module: nn.Module) -> inspect.Signature:
    """Return the signature of `forward` in the module's class, since that of the module may be wrapped (nnsight)."""
    return inspect.signature(partial(type(module).forward, module))


def named_arguments(signature: inspect.Signature, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the passed arguments of `forward` by name, with the KV cache as `cache`; None if no cache is passed.

    Args:
        signature: signature of `forward`; the cache may be passed by either name.
    """
    own = CACHE if CACHE in signature.parameters else FORMER
    renamed = {own if name in (CACHE, FORMER) else name: value for name, value in kwargs.items()}
    arguments = signature.bind_partial(*args, **renamed).arguments
    return {**arguments, CACHE: arguments.get(own)}


def cache_field(output: Any) -> str:
    """Return the name of the KV cache in the output of a model."""
    return CACHE if CACHE in getattr(output, "__dict__", {}) else FORMER


@contextmanager
def without_bars() -> Iterator[None]:
    """Disable the progress bars of transformers in the `with` block."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()
