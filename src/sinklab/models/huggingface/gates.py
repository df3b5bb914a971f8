"""Gates on the attention output of Hugging Face models: the input of o_proj is out * sigmoid(logits).

The gate logits are rows of the query projection, after the queries of each head (Qwen3-Next, Qwen3.5) or of each KV
head (the models of 2505.06708), or the output of a separate projection (AFMoE, Step 3.7), per head or per channel. The
layout is not derived from the architecture name: each layout is tried on a few tokens, and used if out *
sigmoid(logits) equals the input of o_proj. Other kinds of gates are not detected.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from sinklab.attention.layer_call import LayerCall
from sinklab.attention.query_blocks import accumulate_dtype
from sinklab.models.families import GATES, OUTPUT, QUERIES
from sinklab.models.hooks import hooked


@dataclass(frozen=True)
class GatePlace:
    """Projections of an attention module that may have gates.

    Attributes:
        logits: projection that may compute the gate logits.
        output: output projection.
    """

    logits: nn.Linear
    output: nn.Linear


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
        """Compute the gates (B, H, T, X) in (0, 1) from the output of the projection."""
        logits_BTGX = output_BTC.unflatten(-1, (self.groups, -1))[..., -self.gates :]
        exact = logits_BTGX.flatten(-2).to(accumulate_dtype(output_BTC.dtype))
        return torch.sigmoid(exact.unflatten(-1, (self.heads, -1))).transpose(1, 2)


def gate_places(model: nn.Module) -> list[GatePlace]:
    """Return the projections that may compute gates: gate projections, and q_proj if wider than the input of o_proj."""
    found = []
    for module in model.modules():
        output = getattr(module, OUTPUT, None)
        for name in GATES:
            logits = getattr(module, name, None)
            if not isinstance(output, nn.Linear) or not isinstance(logits, nn.Linear):
                continue
            if name != QUERIES or logits.out_features > output.in_features:
                found.append(GatePlace(logits, output))
    return found


@dataclass
class GateTrial:
    """A forward pass that finds the gate layout of each attention layer.

    Attributes:
        found: gate layout by attention layer, 1-based; layers without a matching layout are missing.
    """

    found: dict[int, GateLayout] = field(default_factory=dict)
    _call: LayerCall | None = None
    _out_BHTV: Tensor | None = None
    _logits: dict[nn.Linear, Tensor] = field(default_factory=dict)

    def attention(self, layer: LayerCall) -> Tensor:
        """Compute an attention call as the model does, and store its output."""
        self._out_BHTV = layer.output() if layer.library is None else layer.library.output()
        self._call = layer
        return self._out_BHTV

    def projected(self, linear: Any, _: Any, output_BTC: Any) -> None:
        """Store the output of a projection that may compute gate logits (a forward hook)."""
        self._logits[linear] = output_BTC

    def entering(self, place: GatePlace, _: Any, args: Any) -> None:
        """Store the layout whose gated output equals the input of an output projection, if any (a forward pre-hook)."""
        logits_BTC, x_BTC = self._logits.pop(place.logits, None), args[0]
        if self._call is None or self._out_BHTV is None or logits_BTC is None:
            return
        out_BHTV, x_BTC = self._out_BHTV.to(x_BTC.device, x_BTC.dtype), x_BTC.reshape(*logits_BTC.shape[:2], -1)
        if x_BTC.shape[-1] != out_BHTV.shape[1] * out_BHTV.shape[3]:
            return
        x_BHTV = x_BTC.unflatten(-1, (out_BHTV.shape[1], -1)).transpose(1, 2)
        layouts = list(_layouts(place, self._call, logits_BTC.shape[-1]))
        errors = [float((x_BHTV - out_BHTV * one.read(logits_BTC)).norm() / x_BHTV.norm()) for one in layouts]
        best = min(range(len(errors)), key=errors.__getitem__, default=None)
        if best is not None and errors[best] < torch.finfo(x_BTC.dtype).eps ** 0.5:
            self.found[self._call.index] = layouts[best]


def _layouts(place: GatePlace, layer: LayerCall, width: int) -> Iterator[GateLayout]:
    _, H, _, D = layer.call.q_BHTD.shape
    value_width = layer.value_BGSV.shape[-1]
    for gates in dict.fromkeys((value_width, 1)):
        if width == H * gates:
            yield GateLayout(place.logits, H, H, gates)
        if width == H * (D + gates):
            for groups in dict.fromkeys((H, layer.call.k_BGTD.shape[1])):
                yield GateLayout(place.logits, H, groups, gates * H // groups)


@contextmanager
def trying_gates(places: Sequence[GatePlace]) -> Iterator[GateTrial]:
    """Try all gate layouts in the forward pass of the `with` block, which must call `GateTrial.attention`."""
    trial = GateTrial()
    with hooked(
        handle
        for place in places
        for handle in (
            place.logits.register_forward_hook(trial.projected),
            place.output.register_forward_pre_hook(partial(trial.entering, place)),
        )
    ):
        yield trial


def watched_gates(
    layouts: dict[int, GateLayout], receive: Callable[[int, Tensor], None]
) -> AbstractContextManager[None]:
    """Call `receive` with the gates of `layouts` in every forward pass of the `with` block (see `Adapter.gated`)."""
    return hooked(
        one.linear.register_forward_hook(lambda *call, n=n, one=one: receive(n, one.read(call[-1])))
        for n, one in layouts.items()
    )
