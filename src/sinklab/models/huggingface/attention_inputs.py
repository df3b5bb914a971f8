"""The inputs of the attention modules of a model of transformers, found in a pass of a few tokens, changed by hooks."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel

from sinklab.errors import InputError
from sinklab.models.hooks import evaluating, hidden_states, hooked
from sinklab.models.huggingface.anatomy import quantisation
from sinklab.models.huggingface.gguf import is_unpacked
from sinklab.models.huggingface.interface import attention_function, read_call

NORM = "norm"  # in the lower-case name of the class of a norm
HIDDEN = "hidden_states"  # the argument of an attention module, where it is given by name


def check_differentiable(model: PreTrainedModel) -> None:
    """Refuse models through which no gradient can be taken.

    Raises:
        InputError: quantised weights, unless they come unpacked from a gguf file, or weights that are not in memory.
    """
    method = quantisation(model.config)
    if method and not (method == "gguf" and is_unpacked(model)):
        raise InputError(
            f"the weights are quantised ({method}), and gradients through them are not defined: measure the gradients "
            "of the model without quantisation"
        )
    if any(parameter.is_meta for parameter in model.parameters()):
        raise InputError("some weights are offloaded and would be gone before the backward pass: load the whole model")


def attention_modules(model: PreTrainedModel, tokens_1T: Tensor) -> list[nn.Module]:
    """The module of every attention call, in their order; each reads the output of a norm, itself.

    Raises:
        InputError: an attention module reads anything else (the residual stream, as in OLMo 2, or a scaled norm).
    """
    inputs: dict[nn.Module, Tensor | None] = {}
    norms: list[Tensor] = []
    found: list[nn.Module] = []

    def entering(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        inputs[module] = args[0] if args else kwargs.get(HIDDEN)

    def normed(module: nn.Module, _: Any, output: Any) -> None:
        if NORM in type(module).__name__.lower():
            norms.append(hidden_states(output))

    def attention(module: nn.Module, *args: Any, **options: Any) -> tuple[Tensor, None]:
        found.append(module)
        layer = read_call(module, *args, **options)
        out_BHTV = layer.output() if layer.library is None else layer.library.output()
        return out_BHTV.to(layer.value_BGSV.dtype).transpose(1, 2).contiguous(), None

    handles = (
        handle
        for module in model.modules()
        for handle in (
            module.register_forward_pre_hook(entering, with_kwargs=True),
            module.register_forward_hook(normed),
        )
    )
    with evaluating(model), hooked(handles), attention_function(model, attention):
        model(tokens_1T, use_cache=False)
    for number, module in enumerate(found, 1):
        if not any(inputs.get(module) is output for output in norms):
            raise InputError(
                f"attention layer {number} of this {model.config.model_type!r} model does not read the output of a "
                "norm, of which the gradient is defined: leave out the gradients, or measure a model with a norm "
                "before each attention"
            )
    return found


def replaced_inputs(modules: list[nn.Module], change: Callable[[int, Tensor], Tensor]) -> AbstractContextManager[None]:
    """Inside the block, the n-th module (from 1) reads `change(n, x)` in place of x."""

    def entering(index: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if args:
            return (change(index, args[0]), *args[1:]), kwargs
        return args, kwargs | {HIDDEN: change(index, kwargs[HIDDEN])}

    return hooked(
        module.register_forward_pre_hook(
            lambda _, args, kwargs, index=index: entering(index, args, kwargs), with_kwargs=True
        )
        for index, module in enumerate(modules, 1)
    )
