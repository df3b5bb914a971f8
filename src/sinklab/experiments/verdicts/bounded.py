"""Claims that hold the numbers of one cell against bounds: within, stands_at, appears."""

import math

from sinklab.experiments.claims import Appears, StandsAt, Within
from sinklab.experiments.verdicts.contrasts import ahead_of_others
from sinklab.experiments.verdicts.estimates import within
from sinklab.experiments.verdicts.evidence import Evidence, Finding, missing, undecided
from sinklab.experiments.verdicts.observations import Observations
from sinklab.experiments.verdicts.wording import bounds, each_seed, factor, mean_with_interval, seeds


def keeps_bounds(seen: Observations, cell: str, at_least: float | None, at_most: float | None) -> bool | None:
    """Whether the mean of a cell lies within bounds.

    A seed that never reached a step counts as its last one for a lower bound, and leaves all else open.
    """
    holds = within(seen.mean_of(cell), *seen.bounds(at_least, at_most, cell))
    if seen.never_reached(cell) and (at_most is not None or not holds):
        return None
    return holds


def judge_within(check: Within, evidence: Evidence) -> Finding:
    """The interval of the mean lies within the bounds, outside, or neither."""
    seen = evidence.of(check.value, check.at_step)
    if check.cell not in seen.by_cell:
        return missing(check.value, check.at_step, [check.cell])
    mean, (low, high) = seen.mean_of(check.cell), seen.bounds(check.at_least, check.at_most, check.cell)
    said = f"{each_seed(seen, check.cell)} ({seeds(mean.n)}): {mean_with_interval(seen, check.cell)}"
    said += f", claimed {bounds(check.at_least, check.at_most, seen.quantity)}"
    holds = keeps_bounds(seen, check.cell, check.at_least, check.at_most)
    if holds is not None:
        return Finding(holds, said)
    if seen.never_reached(check.cell):
        return Finding(None, said, note="not every seed got there")
    return undecided(said, [mean], lambda n: within(mean.with_seeds(n), low, high) is not None)


def judge_stands_at(check: StandsAt, evidence: Evidence) -> Finding:
    """The position has the largest rate at every seed, and clearly so; then how large it is."""
    name = f"sink_{check.position}"
    seen, (ahead, mean) = evidence.of(name), ahead_of_others(check.cell, check.position, evidence)
    if mean is None or check.cell not in seen.by_cell:
        return missing(name, None, [check.cell])
    largest = sum(d > 0 for d in ahead)
    said = f"{each_seed(seen, check.cell)} at position {check.position}, the largest of all at {largest} of "
    said += f"{seeds(len(ahead))}: {factor(mean, 'odds against the next')}"
    if not (all(d > 0 for d in ahead) or all(d < 0 for d in ahead)):
        return Finding(None, said, note="it is neither ahead nor behind at every seed")
    found = within(mean, 0.0, math.inf)
    if found is None:
        return undecided(said, [mean], lambda n: within(mean.with_seeds(n), 0.0, math.inf) is not None)
    size = keeps_bounds(seen, check.cell, check.at_least, None) is True
    said += f"; {mean_with_interval(seen, check.cell)}, claimed at least {check.at_least:g} %"
    return Finding(found, said, size)


def judge_appears(check: Appears, evidence: Evidence) -> Finding:
    """The rate is not there after one step, if given, and there before another."""
    asked = [(check.before, True)] + ([(check.after, False)] if check.after is not None else [])
    means, said = [], []
    for step, reached in asked:
        seen = evidence.of("sink_1", step)
        if check.cell not in seen.by_cell:
            return missing("sink_1", step, [check.cell])
        mean = seen.mean_of(check.cell)
        low, high = seen.bounds(check.rate, None, check.cell) if reached else seen.bounds(None, check.rate, check.cell)
        means.append((mean, low, high))
        said.append(f"up to step {step:,}: {each_seed(seen, check.cell)}, {mean_with_interval(seen, check.cell)}")

    def outcome(n: int | None) -> bool | None:
        found = [within(mean.with_seeds(n) if n else mean, low, high) for mean, low, high in means]
        return False if False in found else None if None in found else True

    evidence_said = f"{'; '.join(said)} ({seeds(min(mean.n for mean, _, _ in means))}), claimed {check.rate:g} %"
    holds = outcome(None)
    if holds is not None:
        return Finding(holds, evidence_said)
    return undecided(evidence_said, [mean for mean, _, _ in means], lambda n: outcome(n) is not None)
