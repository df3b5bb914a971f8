"""Summary of a measurement in two sentences, for terminal, report and notebook; docs/reading.md has the thresholds."""

from dataclasses import dataclass

import numpy as np

from sinklab.measuring.findings import Propositions
from sinklab.measuring.measurement import Measurement
from sinklab.measuring.options import Inputs
from sinklab.models.families import ranges_text
from sinklab.tables import NO_SINK, highest_rate

STRENGTHS = ((70.0, "Strong"), (30.0, "Moderate"), (NO_SINK, "Weak"))
"""Minimum sink rate in percent for each adjective."""
MOST_STRETCHES = 4  # maximum number of layer ranges in a summary; if there are more, it states the number of layers
INPUTS: dict[Inputs, str] = {"natural": "", "random": " (random tokens)", "repeat": " (one token repeated)"}


def answer(m: Measurement) -> list[str]:
    """Return two sentences: one on the sink, and one on massive activations and secondary sinks.

    The first sentence states presence, position and strength of the sink, or that the sequences are too short to detect
    one. If the propositions of 2410.10781 were checked (on repeated tokens), the second sentence states the outcome of
    the check instead of the secondary sinks. Massive activations and secondary sinks that were not measured are
    reported as not measured.
    """
    beside = f"{_massive(m)}; {_secondary(m) if m.propositions is None else _proposition(m.propositions)}."
    return [_sink(m), beside[0].upper() + beside[1:]]


@dataclass(frozen=True)
class _Place:
    """A candidate sink: a position, or all of bias, sink logit, learned tokens and stick-breaking remainder together.

    Attributes:
        name: how the summary refers to it, such as `BOS` or `position 5`.
        rate: percentage of (sequence, layer, head) triples with an importance above the threshold.
        above_LH: whether the importance, mean over sequences, is above the threshold, by layer and head; None if some
            layers do not have this place.
        overall: sink rate with the importance averaged over all queries t >= k; None unless `rate` is computed with
            the average over the queries that see the position.
        always: whether a candidate that is not the strongest sink is listed even if its rate is below NO_SINK.
    """

    name: str
    rate: float
    above_LH: np.ndarray | None
    overall: float | None = None
    always: bool = True

    def __str__(self) -> str:
        return f"{percent(self.rate)} on {self.name}"


def _sink(m: Measurement) -> str:
    lengths = m.sequence_lengths or [m.length]
    uniform = float(np.mean([np.mean(1 / np.arange(1, length + 1)) for length in lengths]))
    if uniform >= m.eps:
        tokens = " to ".join(map(str, sorted({min(lengths), max(lengths)})))
        return (
            f"Sequences of {tokens} tokens are too short to detect a sink: uniform attention to the first token is "
            f"already {uniform:.2f}, and the threshold is {m.eps:g}."
        )
    places = _places(m)
    strongest = max(places, key=lambda place: place.rate)
    of = f"{'heads (proxy scores)' if m.proxy else 'heads'} at eps {m.eps:g}"
    if strongest.rate < NO_SINK:
        rates = ", ".join(map(str, places)).replace(" %", f" % of {of}", 1)
        return f"No sink{INPUTS[m.inputs]}: {rates}."
    parts = [f"{percent(strongest.rate)} of {of}", *_layers(strongest.above_LH)]
    if strongest.overall is not None:
        parts[0] += f", over the queries that see it ({percent(strongest.overall)} over all)"
    parts += [str(one) for one in places if one is not strongest and (one.always or one.rate >= NO_SINK)]
    if (m.sink_rate_window_start or 0) >= NO_SINK:
        parts.append(f"{percent(m.sink_rate_window_start or 0)} on the first key of a window")
    strength = next(word for least, word in STRENGTHS if strongest.rate >= least)
    return f"{strength} sink on {strongest.name}{INPUTS[m.inputs]}: {'; '.join(parts)}."


def _places(m: Measurement) -> list[_Place]:
    rates = m.sink_rate_visible or m.sink_rate
    importance_LHT = m.importance if m.importance_visible is None else m.importance_visible

    def position(number: int, name: str) -> _Place:
        overall = None if m.sink_rate_visible is None else m.sink_rate[number - 1]
        return _Place(name, rates[number - 1], importance_LHT[:, :, number - 1] > m.eps, overall, always=number == 1)

    found = [position(1, "BOS" if m.bos else "the first token")]
    if m.sink_rate_bias is not None:
        token = m.norm_ratio_sink_token is not None or m.importance_registers is not None
        name = "the sink token or registers" if token else "the bias, sink logit or stick-breaking's rest"
        above_LH = None if m.importance_bias is None else m.importance_bias > m.eps
        found.append(_Place(name, m.sink_rate_bias, above_LH))
    if later := highest_rate([None, *m.settled(rates)[1:]]):
        found.append(position(later[0], f"position {later[0]}"))
    return found


def _layers(above_LH: np.ndarray | None) -> list[str]:
    """Return a list with a phrase on the layers in which more than half of the heads have the sink.

    If there is no such layer, the phrase names the layer in which the most heads have the sink. If these layers
    form more than MOST_STRETCHES ranges, the phrase states only how many they are. The list is empty if no head has the
    sink.
    """
    if above_LH is None:
        return ["in the layers that have one"]
    share_L = above_LH.mean(1)
    most = [layer for layer, share in enumerate(share_L, 1) if share > 0.5]
    if len(most) == len(share_L):
        return ["most heads of every layer"]
    if not most:
        best, heads = int(share_L.argmax()), above_LH.shape[1]
        count = int(above_LH[best].sum())
        return [f"most in layer {best + 1} ({count} of {heads} heads)"] if count else []
    named = [one.replace("..", " to ") for one in ranges_text(most).split(", ")]
    if len(named) > MOST_STRETCHES:
        return [f"most heads of {len(most)} of {len(share_L)} layers"]
    listed = " and ".join(filter(None, (", ".join(named[:-1]), named[-1])))
    return [f"most heads of layer{'s' * (len(most) > 1)} {listed}"]


def _massive(m: Measurement) -> str:
    if not m.massive_activations:
        return "massive activations were not measured"
    largest = next((one for one in m.massive_activations if one.is_massive), m.massive_activations[0])
    times = f"{largest.ratio_to_median:,.0f} times the median"
    if not largest.is_massive:
        return f"no massive activation (at most {times})"
    return (
        f"massive activation in channel {largest.dimension} at position {largest.position}, strongest after layer "
        f"{largest.layer} ({times})"
    )


def _secondary(m: Measurement) -> str:
    if m.details is None:
        return "secondary sinks were not measured (--details)"
    rate = m.details.secondary_rate
    return (
        f"no secondary sinks (below {NO_SINK:g} %)"
        if rate < NO_SINK
        else f"secondary sinks in {percent(rate)} of heads"
    )


def _proposition(one: Propositions) -> str:
    if one.number is None:
        return "none of the paper's propositions covers these positional embeddings"
    holds = {True: "holds", False: "does not hold", None: "cannot be decided in this precision"}[one.holds]
    return f"proposition {one.number} of the paper {holds}"


def percent(rate: float) -> str:
    """Format a rate as `74 %`, `4.6 %` or `0 %`."""
    return f"{rate:.0f} %" if rate >= 9.95 or rate == 0 else f"{rate:.1f} %"
