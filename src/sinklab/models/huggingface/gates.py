"""Gates on the attention output of models of transformers: o_proj reads out * sigmoid(logits).

The logits are rows of the query projection, after the queries of each head (Qwen3-Next, Qwen3.5) or of each key head
(the models of 2505.06708), or the output of a map of their own (AFMoE, Step 3.7), with a gate for each head or for each
channel. Names of architectures do not decide: each layout is tried on a few tokens, and used where
out * sigmoid(logits) is what o_proj reads. Models with gates of another kind have none here.
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
    """An attention module that may have gates: the map that may give their logits, and the output projection."""

    logits: nn.Linear
    output: nn.Linear


@dataclass(frozen=True)
class GateLayout:
    """Where the logits of gates are among the outputs of a linear map.

    Attributes:
        linear: the map.
        heads: H.
        groups: into which its outputs are split; of each the last ones are gates.
        gates: how many of each group.
    """

    linear: nn.Linear
    heads: int
    groups: int
    gates: int

    def read(self, output_BTC: Tensor) -> Tensor:
        """The gates (B, H, T, X) in (0, 1), from the output of the map."""
        logits_BTGX = output_BTC.unflatten(-1, (self.groups, -1))[..., -self.gates :]
        exact = logits_BTGX.flatten(-2).to(accumulate_dtype(output_BTC.dtype))
        return torch.sigmoid(exact.unflatten(-1, (self.heads, -1))).transpose(1, 2)


def gate_places(model: nn.Module) -> list[GatePlace]:
    """Attention modules with a map for gates, or with more outputs for queries than the output projection reads."""
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
    """One forward pass in which layouts are compared with the input of the output projections.

    Attributes:
        found: the layouts by attention layer, counted from 1.
    """

    found: dict[int, GateLayout] = field(default_factory=dict)
    _call: LayerCall | None = None
    _out_BHTV: Tensor | None = None
    _logits: dict[nn.Linear, Tensor] = field(default_factory=dict)

    def attention(self, layer: LayerCall) -> Tensor:
        """Computes a call as the model does, and keeps its output."""
        self._out_BHTV = layer.output() if layer.library is None else layer.library.output()
        self._call = layer
        return self._out_BHTV

    def projected(self, linear: nn.Linear, output_BTC: Tensor) -> None:
        """The output of a map that may give logits."""
        self._logits[linear] = output_BTC

    def entering(self, place: GatePlace, x_BTC: Tensor) -> None:
        """The input of an output projection."""
        logits_BTC = self._logits.pop(place.logits, None)
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
    """Every layout that a map with so many outputs can have."""
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
    """A trial of the forward pass inside the block, whose attention calls are computed by `GateTrial.attention`."""
    trial = GateTrial()
    with hooked(
        handle
        for place in places
        for handle in (
            place.logits.register_forward_hook(partial(_after_projection, trial)),
            place.output.register_forward_pre_hook(partial(_before_output, trial, place)),
        )
    ):
        yield trial


def watched_gates(
    layouts: dict[int, GateLayout], receive: Callable[[int, Tensor], None]
) -> AbstractContextManager[None]:
    """Inside the block, `receive` gets the gates of these layers in every forward pass, as `Adapter.gated` says."""
    return hooked(
        one.linear.register_forward_hook(partial(_read_gates, receive, index, one)) for index, one in layouts.items()
    )


def _after_projection(trial: GateTrial, linear: Any, _: Any, output: Any) -> None:
    trial.projected(linear, output)


def _before_output(trial: GateTrial, place: GatePlace, _: Any, args: Any) -> None:
    trial.entering(place, args[0])


def _read_gates(receive: Callable[[int, Tensor], None], index: int, layout: GateLayout, *call: Any) -> None:
    receive(index, layout.read(call[-1]))
