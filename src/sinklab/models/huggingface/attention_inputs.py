"""Find the attention modules of a Hugging Face model in a trial forward pass, to compute gradients at their inputs."""

from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel

from sinklab.attention.layer_call import LayerCall
from sinklab.errors import InputError
from sinklab.models.hooks import HIDDEN, evaluating, hidden_states, hooked
from sinklab.models.huggingface.gguf import weights_quantised
from sinklab.models.huggingface.interface import attention_computed_by

NORM = "norm"  # substring of a norm's class name in lower case


def attention_modules(model: PreTrainedModel, tokens_1T: Tensor) -> list[nn.Module]:
    """Return the attention modules in call order, and check that gradients can be computed at their inputs.

    Args:
        tokens_1T: token ids on which the model is run once.

    Raises:
        InputError: if weights are quantised (dequantised GGUF weights are allowed) or offloaded, or the input of an
            attention module is not the output of a norm (in OLMo 2, the input is the residual stream), or a module is
            used several times in a forward pass.
        SinklabError: if an attention call cannot be interpreted (`read_call`).
    """
    if method := weights_quantised(model):
        raise InputError(
            f"the weights are quantised ({method}) and do not support gradients: load the model without quantisation"
        )
    if any(parameter.is_meta for parameter in model.parameters()):
        raise InputError("some weights are offloaded and do not support gradients: load the whole model into memory")
    inputs: dict[nn.Module, Tensor | None] = {}
    norms: list[Tensor] = []
    found: list[nn.Module] = []

    def entering(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        inputs[module] = args[0] if args else kwargs.get(HIDDEN)

    def normed(module: nn.Module, _: Any, output: Any) -> None:
        if NORM in type(module).__name__.lower():
            norms.append(hidden_states(output))

    def attention(module: nn.Module, layer: LayerCall) -> Tensor:
        found.append(module)
        return layer.own_output()

    handles = (
        handle
        for module in model.modules()
        for handle in (
            module.register_forward_pre_hook(entering, with_kwargs=True),
            module.register_forward_hook(normed),
        )
    )
    with evaluating(model), hooked(handles), attention_computed_by(model, attention):
        model(tokens_1T, use_cache=False)
    if len(set(found)) < len(found):
        raise InputError(
            f"a {model.config.model_type!r} model uses layers several times in a forward pass: leave out the gradients"
        )
    for number, module in enumerate(found, 1):
        if not any(inputs.get(module) is output for output in norms):
            raise InputError(
                "gradients are defined at the output of the norm before attention, and the input of attention layer "
                f"{number} of this {model.config.model_type!r} model is not a norm's output: leave out the gradients"
            )
    return found
