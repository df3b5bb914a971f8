"""Comparisons with one and the same baseline, whose p values are adjusted together."""

from collections.abc import Iterable
from dataclasses import dataclass

from sinklab.experiments.claims import Claim, Differs, Precedes
from sinklab.experiments.verdicts.contrasts import differing, steps_between
from sinklab.experiments.verdicts.estimates import holm
from sinklab.experiments.verdicts.evidence import Evidence

Compared = tuple[str, ...]
"""What is compared; two claims about the same comparison are one of its family."""


@dataclass(frozen=True)
class AdjustedP:
    """A p value of a family.

    Attributes:
        raw, adjusted: before and after Holm's method.
        comparisons: of the family.
    """

    raw: float
    adjusted: float
    comparisons: int

    @property
    def times(self) -> float:
        """What it was multiplied by."""
        return self.adjusted / self.raw if self.raw else 1.0


def adjusted_p(claims: Iterable[Claim], evidence: Evidence) -> dict[Compared, AdjustedP]:
    """The p values of all comparisons that the claims make and the runs allow, each adjusted within its family."""
    families: dict[Compared, dict[Compared, float]] = {}
    for claim in claims:
        check = claim.check
        if isinstance(check, Differs):
            mean, family = differing(check, evidence), ("than", check.than)
        elif isinstance(check, Precedes):
            mean, family = steps_between(check, evidence), ("steps", check.first, check.then)
        else:
            continue
        if mean and mean.spread:
            families.setdefault(family, {})[comparison(check)] = mean.p
    found: dict[Compared, AdjustedP] = {}
    for family in families.values():
        for key, p in holm(family).items():
            found[key] = AdjustedP(family[key], p, len(family))
    return found


def comparison(check: Differs | Precedes) -> Compared:
    """What a claim compares."""
    if isinstance(check, Precedes):
        return (check.cell, check.first, check.then)
    return (check.cell, check.than, check.value, str(check.at_step))
