"""Gates on the attention output of Hugging Face models: the input of o_proj is out * sigmoid(logits).

The gate logits, one per head or per channel, are outputs of the query projection, after the queries of each head
(Qwen3-Next, Qwen3.5) or of each KV head (the models of 2505.06708), or outputs of a separate projection (AFMoE, Step
3.7). The layout is not derived from the architecture name: each layout is tried on a few tokens, and used if out *
sigmoid(logits) equals the input of o_proj. Other kinds of gates are not detected.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from sinklab.attention.layer_call import LayerCall
from sinklab.attention.query_blocks import accumulate_dtype
from sinklab.models.families import GATES, OUTPUT, QUERIES
from sinklab.models.hooks import Compute, evaluating, hooked


@dataclass(frozen=True)
class GateLayout:
    """Layout of the gate logits among the outputs of a projection.

    Attributes:
        linear: projection whose output contains the gate logits.
        heads: number of query heads H.
        groups: number of groups of outputs; the last outputs of each group are gate logits.
        gates: number of gate logits per group.
    """

    linear: nn.Linear
    heads: int
    groups: int
    gates: int

    def read(self, output_BTC: Tensor) -> Tensor:
        """Compute the gates, shape (B, H, T, X), from the output of the projection (B, T, outputs).

        Gates are between 0 and 1. X is the number of gates per head: one, or one per channel.
        """
        logits_BTGX = output_BTC.unflatten(-1, (self.groups, -1))[..., -self.gates :]
        exact = logits_BTGX.flatten(-2).to(accumulate_dtype(output_BTC.dtype))
        return torch.sigmoid(exact.unflatten(-1, (self.heads, -1))).transpose(1, 2)


def find_gates(
    model: nn.Module, intercepted: Callable[[Compute], AbstractContextManager[None]], run: Callable[[], None]
) -> tuple[dict[int, GateLayout], list[str]]:
    """Find the gate layout of each attention layer in one forward pass.

    Gate logits may be outputs of g_proj, gate_proj, and q_proj if its output is wider than the input of o_proj.

    Args:
        intercepted: `HuggingFaceAdapter.intercepted`.
        run: function that runs the model on a few tokens.

    Returns:
        The gate layout by attention layer, 1-based, of the layers with a matching layout. A list with a note if no
        layout matches in any layer although a projection is named after a gate.
    """
    pairs = (
        (name, getattr(module, name, None), getattr(module, OUTPUT, None))
        for module in model.modules()
        for name in GATES
    )
    places = [
        (name, linear, output)
        for name, linear, output in pairs
        if isinstance(linear, nn.Linear) and isinstance(output, nn.Linear)
        if name != QUERIES or linear.out_features > output.in_features
    ]
    found: dict[int, GateLayout] = {}
    latest: tuple[LayerCall, Tensor] | None = None  # attention call and its output
    logits: dict[nn.Module, Tensor] = {}

    def attention(layer: LayerCall) -> Tensor:
        nonlocal latest
        latest = layer, layer.own_output()
        return latest[1]

    def projected(linear: nn.Module, _: Any, output_BTC: Tensor) -> None:
        logits[linear] = output_BTC

    def entering(linear: nn.Linear, _: Any, args: Any) -> None:
        """Store the layout whose gated output equals the input of an output projection, if there is one."""
        logits_BTC, x_BTC = logits.pop(linear, None), args[0]
        if latest is None or logits_BTC is None:
            return
        layer, out_BHTV = latest
        out_BHTV, x_BTC = out_BHTV.to(x_BTC.device, x_BTC.dtype), x_BTC.reshape(*logits_BTC.shape[:2], -1)
        if x_BTC.shape[-1] != out_BHTV.shape[1] * out_BHTV.shape[3]:
            return
        x_BHTV = x_BTC.unflatten(-1, (out_BHTV.shape[1], -1)).transpose(1, 2)
        best = torch.finfo(x_BTC.dtype).eps ** 0.5
        for layout in _layouts(linear, layer, logits_BTC.shape[-1]):
            error = float((x_BHTV - out_BHTV * layout.read(logits_BTC)).norm() / x_BHTV.norm())
            if error < best:
                best, found[layer.index] = error, layout

    if places:
        hooks = [linear.register_forward_hook(projected) for _, linear, _ in places]
        hooks += [output.register_forward_pre_hook(partial(entering, linear)) for _, linear, output in places]
        with evaluating(model), hooked(hooks), intercepted(attention):
            run()
    names = " and ".join(sorted({name for name, *_ in places} - {QUERIES}))
    if found or not names:
        return found, []
    note = f"no gates: the attention output is not multiplied by the sigmoid of {names}; other gates are not read"
    return found, [note]


def _layouts(linear: nn.Linear, layer: LayerCall, width: int) -> Iterator[GateLayout]:
    _, H, _, D = layer.call.q_BHTD.shape
    value_width = layer.value_BGSV.shape[-1]
    for gates in dict.fromkeys((value_width, 1)):
        if width == H * gates:
            yield GateLayout(linear, H, H, gates)
        if width == H * (D + gates):
            for groups in dict.fromkeys((H, layer.call.k_BGTD.shape[1])):
                yield GateLayout(linear, H, groups, gates * H // groups)
