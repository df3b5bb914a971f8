"""Gates on the attention output of Hugging Face models: the input of o_proj is out * sigmoid(logits).

The gate logits, one per head or per channel, are outputs of the query projection, after the queries of each head
(Qwen3-Next, Qwen3.5) or of each KV head (the models of 2505.06708), or outputs of a separate projection (AFMoE, Step
3.7). The layout is not derived from the architecture name: each layout is tried on a few tokens, and used if out *
sigmoid(logits) equals the input of o_proj. Other kinds of gates are not detected.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from sinklab.attention.layer_call import LayerCall
from sinklab.attention.query_blocks import accumulate_dtype
from sinklab.models.families import GATES, OUTPUT, QUERIES


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


def gate_places(model: nn.Module) -> list[tuple[str, nn.Linear, nn.Linear]]:
    """Return the projections that may compute gate logits, by name, with the output projection of their module.

    Candidates are g_proj, gate_proj, and q_proj if its output is wider than the input of o_proj.
    """
    pairs = (
        (name, getattr(module, name, None), getattr(module, OUTPUT, None))
        for module in model.modules()
        for name in GATES
    )
    return [
        (name, logits, output)
        for name, logits, output in pairs
        if isinstance(logits, nn.Linear) and isinstance(output, nn.Linear)
        if name != QUERIES or logits.out_features > output.in_features
    ]


@dataclass
class GateTrial:
    """Finds the gate layout of each attention layer in one forward pass.

    For this pass, the caller registers `hooks` and passes `attention` to `Adapter.intercepted`.

    Attributes:
        found: gate layout by attention layer, 1-based; layers for which no layout matches are missing.
    """

    found: dict[int, GateLayout] = field(default_factory=dict)
    _call: LayerCall | None = None
    _out_BHTV: Tensor | None = None
    _logits: dict[nn.Linear, Tensor] = field(default_factory=dict)

    def hooks(self, places: Sequence[tuple[str, nn.Linear, nn.Linear]]) -> Iterator[RemovableHandle]:
        """Register hooks on the projections of `gate_places` and yield their handles."""
        for _, logits, output in places:
            yield logits.register_forward_hook(self._projected)
            yield output.register_forward_pre_hook(partial(self._entering, logits))

    def notes(self, places: Sequence[tuple[str, nn.Linear, nn.Linear]]) -> list[str]:
        """Return a note if no layout matches in any layer although a projection of `places` is named after a gate."""
        names = " and ".join(sorted({name for name, *_ in places} - {QUERIES}))
        if self.found or not names:
            return []
        return [f"no gates: the attention output is not multiplied by the sigmoid of {names}; other gates are not read"]

    def attention(self, layer: LayerCall) -> Tensor:
        """Compute an attention call as the model does; store the call and its output."""
        self._out_BHTV = layer.own_output()
        self._call = layer
        return self._out_BHTV

    def _projected(self, linear: Any, _: Any, output_BTC: Any) -> None:
        self._logits[linear] = output_BTC

    def _entering(self, linear: nn.Linear, _: Any, args: Any) -> None:
        """Store the layout whose gated output equals the input of an output projection, if there is one."""
        logits_BTC, x_BTC = self._logits.pop(linear, None), args[0]
        if self._call is None or self._out_BHTV is None or logits_BTC is None:
            return
        out_BHTV, x_BTC = self._out_BHTV.to(x_BTC.device, x_BTC.dtype), x_BTC.reshape(*logits_BTC.shape[:2], -1)
        if x_BTC.shape[-1] != out_BHTV.shape[1] * out_BHTV.shape[3]:
            return
        x_BHTV = x_BTC.unflatten(-1, (out_BHTV.shape[1], -1)).transpose(1, 2)
        best = torch.finfo(x_BTC.dtype).eps ** 0.5
        for layout in _layouts(linear, self._call, logits_BTC.shape[-1]):
            error = float((x_BHTV - out_BHTV * layout.read(logits_BTC)).norm() / x_BHTV.norm())
            if error < best:
                best, self.found[self._call.index] = error, layout


def _layouts(linear: nn.Linear, layer: LayerCall, width: int) -> Iterator[GateLayout]:
    _, H, _, D = layer.call.q_BHTD.shape
    value_width = layer.value_BGSV.shape[-1]
    for gates in dict.fromkeys((value_width, 1)):
        if width == H * gates:
            yield GateLayout(linear, H, H, gates)
        if width == H * (D + gates):
            for groups in dict.fromkeys((H, layer.call.k_BGTD.shape[1])):
                yield GateLayout(linear, H, groups, gates * H // groups)
