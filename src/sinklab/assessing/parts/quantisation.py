"""Quantisation: what rounding weights and activations costs, and how much of that the sink positions cost.

A sink position has activations hundreds of times those of the others. Where it shares a scale with them, they are
rounded to few steps or to none: so everything quantised is held against the same with the sink positions spared, whose
values then are in no scale either.
"""

from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial

import torch
from torch import Tensor

from sinklab.assessing.part import (
    GROWTH,
    AssessPart,
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
from sinklab.assessing.quantiser import Activations, Weights, linear_maps, quantised, watched_maxima
from sinklab.assessing.reading import PairedReader, Step
from sinklab.assessing.text import AssessText
from sinklab.measuring.statistics.details import kurtosis
from sinklab.models.adapter import Adapter
from sinklab.models.hooks import evaluating, residual_stream, token_norms
from sinklab.schema import ReadDocument

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
