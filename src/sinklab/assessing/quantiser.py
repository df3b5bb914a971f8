"""Simulated quantisation of the linear maps of a model's blocks: numbers are rounded to a grid and stay floats.

    q(x) = s * clip(round(x / s), -m, m),  s = max |x| / m,  m = 2^(bits - 1) - 1         (symmetric)

The maximum is over what shares a scale: a whole tensor, a token, an output channel, or a group of a row of weights.
Embedding, head, norms and the products inside attention keep their precision, as SmoothQuant (2211.10438) leaves the
first three.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sinklab.models.hooks import hooked

INT8, INT4 = 8, 4
GROUP = 32
Activations = Literal["full", "static per tensor", "dynamic per tensor", "per token"]
Weights = Literal["int8 per channel", "int4 in groups of 32"]
Maxima = dict[nn.Module, Tensor]


def on_grid(x: Tensor, bits: int, largest: Tensor) -> Tensor:
    """q(x), where `largest` (broadcast) is the maximum of |x| that the scale is made for; zero stays zero."""
    steps = 2 ** (bits - 1) - 1
    scale = largest / steps
    scale = torch.where(scale > 0, scale, torch.ones_like(scale))
    return (x / scale).round().clamp(-steps, steps) * scale


def quantised_weight(weight_OI: Tensor, kind: Weights) -> Tensor:
    """A weight with its output channels in rows; a last group may be shorter."""
    if kind == "int8 per channel":
        return on_grid(weight_OI, INT8, weight_OI.abs().amax(1, keepdim=True))
    width = weight_OI.shape[1]
    grouped_OGI = F.pad(weight_OI, (0, -width % GROUP)).unflatten(1, (-1, GROUP))
    return on_grid(grouped_OGI, INT4, grouped_OGI.abs().amax(-1, keepdim=True)).flatten(1)[:, :width]


@dataclass(frozen=True)
class LinearMap:
    """A linear map and how its weight lies: GPT-2's have their output channels in columns."""

    module: nn.Module
    transposed: bool

    @property
    def weight(self) -> Tensor:
        """The parameter itself."""
        found: Any = self.module.weight
        return found.data

    def quantised(self, kind: Weights) -> Tensor:
        """Its weight, quantised, as it lies."""
        return quantised_weight(self.weight.T, kind).T if self.transposed else quantised_weight(self.weight, kind)

    def apply(self, x: Tensor, weight: Tensor) -> Tensor:
        """The map with another weight."""
        bias: Any = self.module.bias
        return F.linear(x, weight.T if self.transposed else weight, bias)


def linear_maps(blocks: Sequence[nn.Module]) -> list[LinearMap]:
    """Of the blocks, in order; the gates of ours count, as they are matrix products too."""
    found = []
    for block in blocks:
        for module in block.modules():
            if isinstance(module, nn.Linear):
                found.append(LinearMap(module, transposed=False))
            elif type(module).__name__ == "Conv1D":
                found.append(LinearMap(module, transposed=True))
    return found


@contextmanager
def watched_maxima(maps: Sequence[LinearMap], skipped: int) -> Iterator[Maxima]:
    """The largest |x| that enters each map in the block; the first `skipped` positions are not looked at."""
    found: Maxima = {}

    def entering(module: nn.Module, args: tuple[Any, ...]) -> None:
        rest = args[0][:, skipped:]
        if rest.numel():
            here = rest.abs().amax()
            found[module] = torch.maximum(found[module], here) if module in found else here

    with hooked(one.module.register_forward_pre_hook(entering) for one in maps):
        yield found


@contextmanager
def quantised(
    maps: Sequence[LinearMap], weights: Weights, activations: Activations, maxima: Maxima, spared: int
) -> Iterator[None]:
    """Weights and inputs of the maps are quantised for the length of the block, and put back bit for bit.

    Args:
        maxima: of every map's input, for static scales.
        spared: so many first positions are computed in full precision, and are left out of dynamic scales.
    """
    by_module = {one.module: (one, one.weight.clone()) for one in maps}
    whole: dict[nn.Module, Tensor] = {}

    def entering(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        x_BTI = args[0]
        whole[module] = x_BTI[:, :spared]
        return (torch.cat((x_BTI[:, :spared], _rounded(x_BTI[:, spared:], activations, maxima.get(module))), 1),)

    def leaving(module: nn.Module, _: tuple[Any, ...], output: Tensor) -> Tensor | None:
        first = whole.pop(module)
        if not spared:
            return None
        one, weight = by_module[module]
        return torch.cat((one.apply(first, weight), output[:, spared:]), 1)

    try:
        for one in maps:
            one.weight.copy_(one.quantised(weights))
        with hooked(_around(maps, entering, leaving)):
            yield
    finally:
        for one, weight in by_module.values():
            one.weight.copy_(weight)


def _around(maps: Sequence[LinearMap], entering: Any, leaving: Any) -> Iterator[Any]:
    for one in maps:
        yield one.module.register_forward_pre_hook(entering)
        yield one.module.register_forward_hook(leaving)


def _rounded(x_BTI: Tensor, activations: Activations, largest: Tensor | None) -> Tensor:
    if activations == "full" or not x_BTI.numel():
        return x_BTI
    if activations == "per token":
        return on_grid(x_BTI, INT8, x_BTI.abs().amax(-1, keepdim=True))
    if activations == "dynamic per tensor":  # a tensor is one sequence: others in the batch change no result
        return on_grid(x_BTI, INT8, x_BTI.abs().amax((1, 2), keepdim=True))
    assert largest is not None, "static scales need the maxima of a calibration"
    return on_grid(x_BTI, INT8, largest)
