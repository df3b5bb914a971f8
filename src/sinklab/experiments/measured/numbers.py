"""From a measurement to the numbers that claims are about (`experiments/quantities.py`)."""

import math
from statistics import fmean

import numpy as np

from sinklab.experiments.measured.definition import MeasuredCell
from sinklab.experiments.quantities import Reading, RunNumbers
from sinklab.measuring.findings import Propositions
from sinklab.measuring.measurement import Measurement
from sinklab.schema import finite_or_none


def numbers_of(cell: MeasuredCell, measured: Measurement, draw: int) -> RunNumbers:
    """What one draw says of a cell.

    Args:
        measured: the pass over its sequences; of a cell that is shorter than they are, only its sink rates are there.
        draw: which, in the place of a seed.
    """
    whole = cell.length == measured.length
    reading = Reading(
        step=0,
        tokens=None,
        sink_rate=_rates(cell, measured),
        sink_rate_visible=_visible_rates(cell, measured) if whole else None,
        sink_bias=measured.sink_rate_bias if whole and cell.eps == measured.eps else None,
        valid_loss=measured.loss if whole else None,
        train_loss=None,
        norm_ratio=finite_or_none(max(measured.hidden_norm_ratio or (), default=None)) if whole else None,
    )
    kurtosis = measured.details.by_layer.get("kurtosis_by_block") if whole and measured.details else None
    return RunNumbers(
        seed=draw,
        readings=[reading],
        kurtosis=max(kurtosis) if kurtosis else None,
        seconds=measured.seconds,
        measured=_others(cell, measured) if whole else {},
    )


def _rates(cell: MeasuredCell, measured: Measurement) -> list[float]:
    eps = f"{cell.eps:g}"
    if cell.length < measured.length:
        return (measured.sink_rate_by_length or {})[str(cell.length)][eps]
    return measured.sink_rates[eps] if measured.sink_rates else measured.sink_rate


def _visible_rates(cell: MeasuredCell, measured: Measurement) -> list[float] | None:
    several = measured.sink_rates_visible
    return several[f"{cell.eps:g}"] if several else measured.sink_rate_visible


def _others(cell: MeasuredCell, measured: Measurement) -> dict[str, float]:
    found: dict[str, float] = dict(measured.scores or {}) | _importance(measured)
    if measured.propositions:
        found["proposition_excess"] = _excess(measured.propositions)
    for name, ratios in (("key_norm_ratio", measured.key_norm_ratio), ("value_norm_ratio", measured.value_norm_ratio)):
        if ratios and math.isfinite(mean := fmean(ratios)):
            found[name] = mean
    if measured.massive_activations:
        found["largest_activation"] = max(abs(one.value) for one in measured.massive_activations)
        found["activation_ratio"] = max(one.ratio_to_median for one in measured.massive_activations)
    return found | _angles(measured, cell.eps)


def _importance(measured: Measurement) -> dict[str, float]:
    """alpha of the first position, percent: over all layers, over the first quarter of them, and of the rest above."""
    layers_L = 100 * measured.importance[..., 0].mean(-1)
    early, late = np.split(layers_L, [max(1, len(layers_L) // 4)])
    found = {"importance_first": float(layers_L.mean()), "importance_early": float(early.mean())}
    return found | ({"importance_gap": float(late.mean() - early.mean())} if late.size else {})


def _excess(found: Propositions) -> float:
    """The largest deviation from what is proved, in units of the tolerance for rounding."""
    deviations = (found.hidden_deviation, found.attention_deviation or 0.0, -(found.bound_slack or 0.0))
    return max(deviations) / found.tolerance


def _angles(measured: Measurement, eps: float) -> dict[str, float]:
    """Means over the heads whose importance of the first token is above eps on average; nothing without any."""
    heads_LH = measured.importance[:, :, 0] > eps
    cosine_LHT = measured.details.cosine if measured.details else None
    product_LHT = measured.details.norm_product if measured.details else None
    if cosine_LHT is None or product_LHT is None or not heads_LH.any() or measured.length < 2:
        return {}
    first, rest = _first_and_rest(cosine_LHT[heads_LH])
    product_first, product_rest = _first_and_rest(product_LHT[heads_LH])
    if product_rest == 0:
        return {}
    return {
        "cosine_first": first,
        "cosine_rest": rest,
        "cosine_gap": first - rest,
        "norm_product_ratio": product_first / product_rest,
    }


def _first_and_rest(of_heads_ST: np.ndarray) -> tuple[float, float]:
    return float(of_heads_ST[:, 0].mean()), float(of_heads_ST[:, 1:].mean())
