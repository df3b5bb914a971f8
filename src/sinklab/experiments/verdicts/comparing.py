"""Claims that compare cells, or numbers within one: greater, less, equal, alike, rising, falling, precedes."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import combinations, pairwise

from sinklab.experiments.claims import Alike, Differs, Equal, Monotone, Precedes
from sinklab.experiments.verdicts.bounded import keeps_bounds
from sinklab.experiments.verdicts.contrasts import differing, steps_between, trend
from sinklab.experiments.verdicts.estimates import (
    EQUIVALENCE,
    LEVEL,
    MeanOverSeeds,
    equivalent,
    holm,
)
from sinklab.experiments.verdicts.evidence import Evidence, Finding, missing, undecided
from sinklab.experiments.verdicts.families import AdjustedP, Compared, comparison
from sinklab.experiments.verdicts.margins import beyond_margin, beyond_times
from sinklab.experiments.verdicts.observations import Observations
from sinklab.experiments.verdicts.wording import (
    bounds,
    difference,
    each_seed,
    factor,
    mean_with_interval,
    p_value,
    seeds,
    step_unit,
    trend_per_cell,
)

ALPHA = 1 - LEVEL

Adjusted = Mapping[Compared, AdjustedP]


def judge_differs(check: Differs, evidence: Evidence, adjusted: Adjusted) -> Finding:
    """Greater or less: a paired t test, its p adjusted, then the size that is stated."""
    seen, mean = evidence.of(check.value, check.at_step), differing(check, evidence)
    if absent := [cell for cell in check.cells if cell not in seen.by_cell]:
        return missing(check.value, check.at_step, absent)
    sign = 1 if check.kind == "greater" else -1
    said = f"{each_seed(seen, check.cell)} against {each_seed(seen, check.than)}"
    if mean is None:
        return Finding(None, said, note="no seed has both")
    shared = seen.shared(check.cells)
    said += f" ({seeds(mean.n)}): {difference(seen, mean, check.than, shared)}"
    p = adjusted.get(comparison(check), AdjustedP(1.0, 1.0, 1))
    said += f", {p_value(p.adjusted, p.comparisons)}" if mean.spread else ""
    found = _tested(said, mean, sign, p)
    found = _with_steps_never_reached(found, seen, {check.cell: sign, check.than: -sign})
    return _with_size(found, check, seen) if found.holds else found


def _tested(said: str, mean: MeanOverSeeds, sign: int, p: AdjustedP) -> Finding:
    """Whether a mean differs from 0, and in the direction of `sign`."""
    if p.adjusted < ALPHA:
        return Finding(mean.mean * sign > 0, said)
    return undecided(said, [mean], lambda n: p.times * mean.with_seeds(n).p < ALPHA)


def _with_steps_never_reached(found: Finding, seen: Observations, helped_by: Mapping[str, float]) -> Finding:
    """Seeds that never reached a step count as their last one where that makes the claim harder to establish.

    Args:
        helped_by: above 0 where a larger number of the cell is in favour of the claim, below 0 where a smaller one is.
    """
    never = [cell for cell, weight in helped_by.items() if weight and seen.never_reached(cell)]
    if never and (not found.holds or any(helped_by[cell] < 0 for cell in never)):
        return Finding(None, found.said, note=f"{' and '.join(never)} did not get there at every seed")
    return found


def _with_size(found: Finding, check: Differs, seen: Observations) -> Finding:
    """An established direction, and whether the size that the claim states is established, too."""
    greater, said, size = check.kind == "greater", found.said, True
    high, low = (check.cell, check.than) if greater else (check.than, check.cell)
    if check.by is not None:
        size = _beyond(beyond_margin(seen, high, low, check.by))
        said += f"; claimed: by {check.by:g}{step_unit(seen.quantity)}"
    if check.times is not None:
        size = size and _beyond(beyond_times(seen, high, low, check.times))
        said += f"; claimed: {check.times:g} times as {'large' if greater else 'small'}"
    if check.at_least is not None or check.at_most is not None:
        size = size and keeps_bounds(seen, check.cell, check.at_least, check.at_most) is True
        limits = bounds(check.at_least, check.at_most, seen.quantity)
        said += f"; {check.cell} {mean_with_interval(seen, check.cell)}, claimed {limits}"
    return replace(found, said=said, size=size)


def _beyond(mean: MeanOverSeeds | None) -> bool:
    return mean is not None and mean.interval()[0] >= 0


def judge_equal(check: Equal, evidence: Evidence) -> Finding:
    """Equal up to a margin: two one-sided tests."""
    return _equivalence(evidence, check, [(check.cell, check.to)])


def judge_alike(check: Alike, evidence: Evidence) -> Finding:
    """Any two equal up to a margin, which is taken around the lower one of each two."""
    seen = evidence.of(check.value, check.at_step)
    there = [cell for cell in check.of if cell in seen.by_cell]
    by_mean = sorted(there, key=lambda cell: (-seen.mean_of(cell).mean, cell))
    return _equivalence(evidence, check, list(combinations(by_mean, 2)))


def _equivalence(evidence: Evidence, check: Equal | Alike, pairs: Sequence[tuple[str, str]]) -> Finding:
    """All pairs are equal (True), one of them is not (False), or neither can be said."""
    seen = evidence.of(check.value, check.at_step)
    if absent := [cell for cell in check.cells if cell not in seen.by_cell]:
        return missing(check.value, check.at_step, absent)
    said = "; ".join(each_seed(seen, cell) for cell in check.cells)
    differences = {pair: mean for pair in pairs if (mean := seen.contrast({pair[0]: 1.0, pair[1]: -1.0}))}
    if len(differences) < len(pairs):
        return Finding(None, said, note="no seed has all")
    sides = [
        side for cell, to in pairs for high, low in ((cell, to), (to, cell))
        if (side := beyond_margin(seen, high, low, check.margin))
    ]  # fmt: skip
    farthest = max(differences, key=lambda pair: (abs(differences[pair].mean), pair))
    which = "" if len(pairs) == 1 else f"largest {farthest[0]} and {farthest[1]}, "
    shared = seen.shared(farthest)
    said += f" ({seeds(min(mean.n for mean in differences.values()))}): {which}"
    said += difference(seen, differences[farthest], farthest[1], shared, EQUIVALENCE)
    said += f" at 90 %, margin {check.margin:g}{step_unit(seen.quantity)}"
    said += f", {p_value(max(side.one_sided_p() for side in sides))}" if sides else ""

    def outcome(n: int) -> bool | None:
        return equivalent([side.with_seeds(n) for side in sides], len(pairs))

    holds = equivalent(sides, len(pairs)) if all(mean.spread for mean in differences.values()) else None
    found = Finding(holds, said) if holds is not None else undecided(said, sides, lambda n: outcome(n) is not None)
    return _with_steps_never_reached(found, seen, dict.fromkeys(check.cells, -1.0))


def judge_monotone(check: Monotone, evidence: Evidence) -> Finding:
    """Rising or falling: the linear trend over the ranks, and no neighbours that clearly go the other way."""
    seen = evidence.of(check.value, check.at_step)
    if absent := [cell for cell in check.over if cell not in seen.by_cell]:
        return missing(check.value, check.at_step, absent)
    sign, weights = (1 if check.kind == "rising" else -1), trend(check.over)
    said, mean = "; ".join(each_seed(seen, cell) for cell in check.over), seen.contrast(weights)
    if mean is None:
        return Finding(None, said, note="no seed has all")
    said += f" ({seeds(mean.n)}): {trend_per_cell(mean, seen.quantity)}"
    said += f", {p_value(mean.p)}" if mean.spread else ""
    found = _tested(said, mean, sign, AdjustedP(mean.p, mean.p, 1))
    if found.holds and (against := _neighbours_against(seen, check.over, sign)):
        found = Finding(None, said, note=f"{' and '.join(against)} goes the other way")
    return _with_steps_never_reached(found, seen, {cell: sign * weight for cell, weight in weights.items()})


def _neighbours_against(seen: Observations, over: Sequence[str], sign: int) -> list[str]:
    steps = {pair: seen.contrast({pair[1]: 1.0, pair[0]: -1.0}) for pair in pairwise(over)}
    known = {pair: mean for pair, mean in steps.items() if mean}
    p_values = holm({pair: mean.p for pair, mean in known.items()})
    return [
        f"{pair[0]} to {pair[1]} ({p_value(p_values[pair], len(known))})"
        for pair, mean in known.items()
        if p_values[pair] < ALPHA and mean.mean * sign < 0
    ]


def judge_precedes(check: Precedes, evidence: Evidence, adjusted: Adjusted) -> Finding:
    """One step before another within the runs of a cell."""
    first, then = evidence.of(check.first), evidence.of(check.then)
    for name, seen in ((check.first, first), (check.then, then)):
        if check.cell not in seen.by_cell:
            return missing(name, None, [check.cell])
    mean = steps_between(check, evidence)
    said = f"{each_seed(first, check.cell)} ({check.first}) and {each_seed(then, check.cell)} ({check.then})"
    if mean is None:
        return Finding(None, said, note="no seed has both")
    p = adjusted.get(comparison(check), AdjustedP(1.0, 1.0, 1))
    said += f" ({seeds(mean.n)}): {factor(mean, 'ratio')}" + (
        f", {p_value(p.adjusted, p.comparisons)}" if mean.spread else ""
    )
    found = _with_steps_never_reached(_tested(said, mean, -1, p), first, {check.cell: -1.0})
    return _with_steps_never_reached(found, then, {check.cell: 1.0})
