"""Hooks and other changes of a model that last for a `with` block, and recording of norms and hidden states."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

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


def uncompiled(module: nn.Module) -> AbstractContextManager[Any]:
    """Run compiled code uncompiled in the `with` block if the module or one of its parts is compiled.

    Compiled code ignores hooks that are added later, or is compiled again because of them.
    """
    parts = module.modules()
    compiled = any(type(part).__name__ == "OptimizedModule" or part._compiled_call_impl is not None for part in parts)
    return torch.compiler.set_stance("force_eager") if compiled else nullcontext()


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Set evaluation mode and disable gradients in the `with` block; then restore the mode of every module."""
    before = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        with torch.no_grad():
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
