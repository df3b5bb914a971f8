"""The errors of flash-linear-attention's kernels, in outputs and gradients, against our own code in float64.

    TRITON_INTERPRET=1 python tests/support/fla_agreement.py [NAME...]

runs the kernels on the CPU in Triton's interpreter, in float32 and float16 (its bfloat16 products are wrong), and
prints a line of JSON per case.
"""

import copy
import json
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from attention_cases import B, G, H, config_of, core_of
from torch import Tensor

from sinklab.attention.operations import fla_kernels
from sinklab.model.mixer import GatedDelta, KimiDelta, LinearAttention, RuleInputs, gated_delta

LENGTH, KEY_WIDTH, VALUE_WIDTH = 70, 16, 24  # more than one chunk of 64 positions
ATTENTION = {
    "elu_kernel": "linear",
    "elu_kernel_normalised": "linear",
    "identity": "linear",
    "identity_normalised": "linear",
    "mlp_normalised": "linear",
    "forgetting": "forgetting",
    "stick_breaking": "stick_breaking",
    "stick_breaking_rest_own": "stick_breaking",
    "stick_breaking_rest_learned": "stick_breaking",
}
DELTA = {"gated_delta": GatedDelta, "gated_delta_continued": GatedDelta, "kimi_delta": KimiDelta}
KERNELS = {**ATTENTION, **dict.fromkeys(DELTA, "gated_delta_by_fla")}
"""The function of `fla_kernels` that each case is to call."""


def _random(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def attention_case(name: str) -> tuple[list[Tensor], Callable[..., Any], Callable[..., Any]]:
    """Inputs, the core under test, and the same core in our own code."""
    core = core_of(config_of(name, "none", "causal"), head_width=KEY_WIDTH)
    own = copy.deepcopy(core)
    own.backend = "chunked"
    given = [_random(B, H, LENGTH, KEY_WIDTH), *(_random(B, G, LENGTH, KEY_WIDTH) for _ in range(2))]
    if core.operation.forgets:
        given.append(F.logsigmoid(_random(B, LENGTH, H)).cumsum(1))
    return given, core, own


def delta_case(name: str) -> tuple[list[Tensor], Callable[..., Any], Callable[..., Any]]:
    """Inputs, the delta rule of a mixer, and our own code for it."""
    kind = DELTA[name]
    decay = -_random(B, H, LENGTH, *[KEY_WIDTH] * (kind is KimiDelta)).exp()
    q, k = (F.normalize(_random(B, H, LENGTH, KEY_WIDTH), dim=-1) for _ in range(2))
    given = [q, k, _random(B, H, LENGTH, VALUE_WIDTH), decay, _random(B, H, LENGTH).sigmoid()]
    if name.endswith("continued"):
        given.append(_random(B, H, KEY_WIDTH, VALUE_WIDTH))
    mixer = LinearAttention(kind(), H * KEY_WIDTH, H, 1e-6)

    def rule(*parts: Tensor) -> tuple[Tensor, Tensor]:
        return mixer.rule(RuleInputs(*parts[:5]), parts[5] if len(parts) > 5 else None)

    return given, rule, gated_delta


def error(name: str, device: str, dtype: torch.dtype, by_fla: bool = True) -> float:
    """The largest difference from our own code in float64, relative to the largest entry of each output and gradient.

    As in training under autocast, gates, rates and states are float32, and so are parameters.

    Args:
        dtype: of queries, keys and values.
        by_fla: False for the error of our own code in `dtype`.
    """
    torch.manual_seed(0)
    given, tested, own = (attention_case if name in ATTENTION else delta_case)(name)
    reference = _results(own, name, given)
    rounded = [x.to(device, dtype if i < 3 else torch.float32) for i, x in enumerate(given)]
    function = tested if by_fla else own
    if isinstance(function, torch.nn.Module):
        function = function.to(device, torch.float32)
    pairs = zip(_results(function, name, rounded), reference, strict=True)
    return max(float((one - other).abs().max() / other.abs().max()) for one, other in pairs)


def _results(function: Callable[..., Any], name: str, given: list[Tensor]) -> list[Tensor]:
    """Outputs and gradients, of inputs and parameters, of a weighted sum of the outputs."""
    leaves = [x.detach().requires_grad_() for x in given]
    out = function(*leaves[:3], None, leaves[3]) if name == "forgetting" else function(*leaves)
    outs = [out] if isinstance(out, Tensor) else list(out)
    parameters = list(function.parameters()) if isinstance(function, torch.nn.Module) else []
    generator = torch.Generator().manual_seed(1)
    weights = [torch.randn(x.shape, generator=generator, dtype=torch.float64).to(x.device) for x in outs]
    total = torch.stack([(x.double() * weight).sum() for x, weight in zip(outs, weights, strict=True)]).sum()
    return [x.detach().cpu().double() for x in (*outs, *torch.autograd.grad(total, [*leaves, *parameters]))]


def _interpret() -> None:
    """Run Triton's kernels on the CPU.

    Its interpreter needs a driver, which is only asked to time variants of a kernel, and loop variables that are
    tensors, as they are in a compiled kernel.
    """
    import ast
    from types import SimpleNamespace

    from triton.runtime import driver, interpreter

    driver.set_active(SimpleNamespace(get_benchmarker=lambda: lambda call, quantiles: [1.0] * len(quantiles)))

    def visit_loop(transformer: Any, node: ast.For) -> ast.AST:
        node = transformer.generic_visit(node)
        if isinstance(node.iter, ast.Call) and isinstance(node.iter.func, ast.Name) and node.iter.func.id == "range":
            variable = ast.unparse(node.target)
            node.body[:0] = ast.parse(f"{variable} = interpreter_semantic.to_tensor({variable}, False)").body
        return node

    interpreter.ASTTransformer.visit_For = visit_loop


def noted_calls(set_attribute: Callable[[object, str, Any], None]) -> list[str]:
    """The list to which calls of the functions of `fla_kernels` are from now on appended."""
    called: list[str] = []

    def noted(kernel: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            called.append(kernel)
            return function(*arguments)

        return call

    for kernel in set(KERNELS.values()):
        set_attribute(fla_kernels, kernel, noted(kernel, getattr(fla_kernels, kernel)))
    return called


def main(names: list[str]) -> None:
    """Print a line of JSON per case and dtype: functions of `fla_kernels` called, their error, that of our own code."""
    _interpret()
    fla_kernels.serves = lambda q, v: True  # type: ignore[assignment]  # also on a CPU, in float32 and float16
    called = noted_calls(setattr)
    for name in names or KERNELS:
        for dtype in (torch.float32, torch.float16):
            called.clear()
            errors = {"error": error(name, "cpu", dtype), "own": error(name, "cpu", dtype, by_fla=False)}
            print(json.dumps({"name": name, "dtype": str(dtype), "called": called, **errors}))


if __name__ == "__main__":
    main(sys.argv[1:])
