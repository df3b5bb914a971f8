"""Quantisation: the loss after simulated rounding of weights and activations, with and without the sink positions.

Activations of a sink position are hundreds of times those of other tokens. Tokens that share a scale with it are
rounded to few steps, or to zero. Every setting is therefore measured twice: with all tokens quantised, and with the
sink positions in full precision and outside the scales.

Numbers are rounded to a grid and remain floats:

    q(x) = s * clip(round(x / s), -m, m),  s = max |x| / m,  m = 2^(bits - 1) - 1         (symmetric)

The maximum is over the values of one scale: a tensor, a token, an output channel, or a group within a row of weights.
Only the linear maps of the blocks are quantised. Embedding, head, norms and the products inside attention keep their
precision; SmoothQuant (2211.10438) leaves out the first three.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sinklab.assessing.part import (
    GROWTH,
    AssessPart,
    AssessText,
    Effect,
    PartFigure,
    PartJob,
    PartNumber,
    PlotAxis,
    ResultRow,
    counted,
    plot_row,
)
from sinklab.assessing.plan import AssessSettings
from sinklab.assessing.reading import PairedReader, Step
from sinklab.measuring.statistics.details import kurtosis
from sinklab.models.adapter import Adapter
from sinklab.models.hooks import evaluating, hooked, residual_stream, token_norms
from sinklab.schema import ReadDocument

INT8, INT4 = 8, 4
GROUP = 32
Activations = Literal["full", "static per tensor", "dynamic per tensor", "per token"]
Weights = Literal["int8 per channel", "int4 in groups of 32"]
Maxima = dict[nn.Module, Tensor]

STATIC = "int8 static per tensor"
SETTINGS: tuple[tuple[str, Weights, Activations], ...] = (
    (STATIC, "int8 per channel", "static per tensor"),
    ("int8 dynamic per tensor", "int8 per channel", "dynamic per tensor"),
    ("int8 per token", "int8 per channel", "per token"),
    ("int4 weights", "int4 in groups of 32", "full"),
)
CALIBRATED = 4  # sequences at most
DESTROYED = 10  # times the loss of the unchanged model
DEVIATIONS = 6  # from the mean, beyond which a value is an outlier (2306.12929)


class Quantised(ReadDocument):
    """One way of quantising.

    Attributes:
        weights, activations: what is done to each.
        everything: all tokens quantised.
        without_sink: the sink positions in full precision, and left out of the scales.
        due_to_sink: loss of the one less loss of the other.
        destroyed: whether the loss has grown tenfold.
    """

    name: str
    weights: str
    activations: str
    everything: Effect
    without_sink: Effect
    due_to_sink: float
    destroyed: bool


class Outliers(ReadDocument):
    """The residual stream after one block.

    Attributes:
        kurtosis: of a token over its channels, mean over tokens.
        largest: of all absolute values.
        largest_norm, median_norm: l2, over tokens.
        channels: those with a value more than six standard deviations from the mean.
    """

    layer: int
    kurtosis: float
    largest: float
    largest_norm: float
    median_norm: float
    channels: int


class Quantisation(AssessPart):
    """Loss after simulated quantisation, and the outliers that make it hard, by block."""

    name = "quantisation"
    rank = 2
    numbers = (
        PartNumber(
            "int8_added",
            "Static int8, added loss",
            ("Int8", "static, nats added"),
            "weights and activations in 8 bits, with fixed scales",
        ),
        PartNumber(
            "int8_due_to_sink",
            "Of static int8's, due to the sink",
            ("of the sink", "of these"),
            "how much of what Int8 adds is due to the sink",
        ),
    )

    sink_positions: int
    settings: list[Quantised]
    outliers: list[Outliers]

    @classmethod
    def job(cls, text: AssessText, settings: AssessSettings) -> PartJob:
        calibrated = min(settings.sequences, CALIBRATED)
        both_NT = text.sequences(settings.sequences + calibrated, settings.length, fewest=2)
        N = max(1, len(both_NT) - calibrated)
        run = partial(assess_quantisation, text.model.adapter, both_NT[:N], both_NT[N:], settings.sink_tokens)
        return PartJob((1 + 2 * len(SETTINGS)) * N + 2 * (len(both_NT) - N), run)

    def rows(self) -> Iterator[ResultRow]:
        yield self.unchanged_row()
        for one in self.settings:
            due = f"due to the sink {one.due_to_sink:+.4f}" + (", destroyed" if one.destroyed else "")
            yield ResultRow(one.name, one.everything, due)

    def values(self) -> Iterator[tuple[str, float]]:
        """Everything in int8 with static scales per tensor."""
        for one in self.settings:
            if one.name == STATIC:
                yield "int8_added", self.added(one.everything)
                yield "int8_due_to_sink", one.due_to_sink

    def figure(self) -> PartFigure:
        rows = [
            {**plot_row(effect, None, series, self.added(effect)), "y": one.name}
            for one in self.settings
            for series, effect in (("everything", one.everything), ("sink positions spared", one.without_sink))
        ]
        return PartFigure(
            "dots",
            "Quantisation with and without the sink",
            f"What simulated quantisation adds to the loss of {self.unchanged.loss:.3f}, and how much of it is left "
            f"where the first {counted(self.sink_positions, 'token')} stays in full precision and out of the scales.",
            rows,
            PlotAxis(GROWTH, "x", "nats per token"),
            PlotAxis("", "y", "setting", order=[one.name for one in self.settings]),
            reference=0.0,
        )


def assess_quantisation(
    adapter: Adapter, tokens_NT: Tensor, calibration_NT: Tensor, sink_tokens: int, step: Step
) -> Quantisation:
    """Loss under every way of quantising, with and without the sink positions.

    Args:
        calibration_NT: other text, for static scales.
        sink_tokens: so many first tokens are sinks, beside a learned sink token.
    """
    spared = adapter.leading + sink_tokens
    maps = linear_maps(adapter.blocks)
    reader = PairedReader(adapter, tokens_NT, step)
    maxima = {skipped: _calibrated(adapter, calibration_NT, skipped, step) for skipped in (0, spared)}
    before = reader.unchanged.effect()
    found = []
    for name, weights, activations in SETTINGS:
        everything, without = (
            reader.under(surgery=quantised(maps, weights, activations, maxima[skipped], skipped)).effect()
            for skipped in (0, spared)
        )
        found.append(
            Quantised(
                name=name,
                weights=weights,
                activations=activations,
                everything=everything,
                without_sink=without,
                due_to_sink=everything.loss - without.loss,
                destroyed=everything.loss >= DESTROYED * before.loss,
            )
        )
    N, T = tokens_NT.shape
    outliers = outliers_by_block(adapter, tokens_NT)
    return Quantisation(
        sequences=N, length=T, unchanged=before, sink_positions=spared, settings=found, outliers=outliers
    )


def _calibrated(adapter: Adapter, tokens_NT: Tensor, skipped: int, step: Step) -> dict[torch.nn.Module, Tensor]:
    with evaluating(adapter.module), watched_maxima(linear_maps(adapter.blocks), skipped) as maxima:
        for tokens_T in tokens_NT:
            adapter.hidden(tokens_T[None].to(adapter.device))
            step()
    return maxima


def outliers_by_block(adapter: Adapter, tokens_NT: Tensor) -> list[Outliers]:
    """Of the residual stream of the first sequence, after each block."""
    with ExitStack() as stack:
        stack.enter_context(evaluating(adapter.module))
        found = stack.enter_context(residual_stream(adapter.blocks, _outliers))
        adapter.hidden(tokens_NT[:1].to(adapter.device))
    return [one.model_copy(update={"layer": number}) for number, one in enumerate(found) if number]


def _outliers(x_BTC: Tensor) -> Outliers:
    x_BTC = x_BTC.float()
    norms_BT = token_norms(x_BTC)
    far_BTC = (x_BTC - x_BTC.mean()).abs() > DEVIATIONS * x_BTC.std(correction=0)
    return Outliers(
        layer=0,
        kurtosis=float(kurtosis(x_BTC).mean()),
        largest=float(x_BTC.abs().max()),
        largest_norm=float(norms_BT.max()),
        median_norm=float(norms_BT.median()),
        channels=int(far_BTC.any((0, 1)).sum()),
    )


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
