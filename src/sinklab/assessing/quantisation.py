"""Quantisation: what rounding weights and activations costs, and how much of that the sink positions cost.

A sink position has activations hundreds of times those of the others. Where it shares a scale with them, they are
rounded to few steps or to none: so everything quantised is held against the same with the sink positions spared, whose
values then are in no scale either.
"""

from contextlib import ExitStack

import torch
from torch import Tensor

from sinklab.assessing.documents import Outliers, Quantisation, Quantised
from sinklab.assessing.layers import Patient, as_it_is
from sinklab.assessing.quantiser import Activations, Weights, linear_maps, quantised, watched_maxima
from sinklab.assessing.reading import PairedReader, Step
from sinklab.measuring.statistics.stream import kurtosis
from sinklab.models.hooks import evaluating, residual_stream, token_norms

SETTINGS: tuple[tuple[str, Weights, Activations], ...] = (
    ("int8 static per tensor", "int8 per channel", "static per tensor"),
    ("int8 dynamic per tensor", "int8 per channel", "dynamic per tensor"),
    ("int8 per token", "int8 per channel", "per token"),
    ("int4 weights", "int4 in groups of 32", "full"),
)
DESTROYED = 10  # times the loss of the unchanged model
DEVIATIONS = 6  # from the mean, beyond which a value is an outlier (2306.12929)


def assess_quantisation(
    patient: Patient, tokens_NT: Tensor, calibration_NT: Tensor, sink_tokens: int, step: Step
) -> Quantisation:
    """Loss under every way of quantising, with and without the sink positions.

    Args:
        calibration_NT: other text, for static scales.
        sink_tokens: so many first tokens are sinks, beside a learned sink token.
    """
    spared = patient.leading + sink_tokens
    maps = linear_maps(patient.blocks)
    reader = PairedReader(patient, tokens_NT, step)
    maxima = {skipped: _calibrated(patient, calibration_NT, skipped, step) for skipped in (0, spared)}
    before = reader.unchanged.effect()
    found = []
    for name, weights, activations in SETTINGS:
        everything, without = (
            reader.under(as_it_is, quantised(maps, weights, activations, maxima[skipped], skipped)).effect()
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
    outliers = outliers_by_block(patient, tokens_NT)
    return Quantisation(
        sequences=N, length=T, unchanged=before, sink_positions=spared, settings=found, outliers=outliers
    )


def _calibrated(patient: Patient, tokens_NT: Tensor, skipped: int, step: Step) -> dict[torch.nn.Module, Tensor]:
    with evaluating(patient.module), watched_maxima(linear_maps(patient.blocks), skipped) as maxima:
        for tokens_T in tokens_NT:
            patient.hidden(tokens_T[None].to(patient.device))
            step()
    return maxima


def outliers_by_block(patient: Patient, tokens_NT: Tensor) -> list[Outliers]:
    """Of the residual stream of the first sequence, after each block."""
    with ExitStack() as stack:
        stack.enter_context(evaluating(patient.module))
        found = stack.enter_context(residual_stream(patient.blocks, _outliers))
        patient.hidden(tokens_NT[:1].to(patient.device))
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
