"""An assessment as lines that a person reads: what was done, and what came of it."""

import math
from collections.abc import Iterator
from dataclasses import dataclass

from sinklab.assessing.documents import Assessment, AssessPart, Effect, TextRead


@dataclass(frozen=True)
class AssessLine:
    """One change, or the unchanged model.

    Attributes:
        what: was done.
        more: what else is worth saying.
    """

    part: AssessPart
    what: str
    effect: Effect
    more: str = ""


def assess_lines(assessment: Assessment) -> Iterator[AssessLine]:
    """Everything that has a loss, part by part."""
    a = assessment
    if a.streaming is not None:
        yield _unchanged("streaming", a.streaming)
        for row in a.streaming.caches:
            yield AssessLine("streaming", f"cache {row.cache}, first {row.first} kept", row)
    if a.quantisation is not None:
        yield _unchanged("quantisation", a.quantisation)
        for setting in a.quantisation.settings:
            due = f"due to the sink {setting.due_to_sink:+.4f}" + (", destroyed" if setting.destroyed else "")
            yield AssessLine("quantisation", setting.name, setting.everything, due)
    if a.eviction is not None:
        yield _unchanged("eviction", a.eviction)
        for policy in a.eviction.policies:
            yield AssessLine("eviction", f"{policy.policy}, {policy.budget} keys", policy)
    if a.length is not None:
        for bucket in a.length.buckets:
            within = f"within the context {bucket.within.loss:.4f}" if bucket.start > a.length.context else ""
            yield AssessLine("length", f"positions {bucket.start:,} to {bucket.stop - 1:,}", bucket.whole, within)
    if a.carries is not None:
        yield _unchanged("carries", a.carries)
        for keys in a.carries.keys:
            share = f"share {100 * keys.share:.1f} %"
            for what, effect in (("value zeroed", keys.value_zeroed), ("hidden", keys.hidden), ("spread", keys.spread)):
                yield AssessLine("carries", f"{keys.keys}: {what}", effect, share)
                share = ""
            for shift in keys.shifted:
                if shift.by is not None:
                    yield AssessLine("carries", f"{keys.keys}: logit {shift.by:+g}", shift)


def _unchanged(part: AssessPart, read: TextRead) -> AssessLine:
    return AssessLine(part, "unchanged", read.unchanged, f"{read.sequences} x {read.length:,} tokens")


def head_counts(assessment: Assessment) -> str:
    """How many heads are of each kind, as text; empty where they were not looked at."""
    if assessment.heads is None:
        return ""
    return ", ".join(f"{count} {kind}" for kind, count in sorted(assessment.heads.counts.items()))


def perplexity_text(loss: float) -> str:
    """exp(loss) with two decimals, an en dash beyond any use."""
    return f"{math.exp(loss):,.2f}" if loss < 20 else "–"
