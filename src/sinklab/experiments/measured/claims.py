"""Which comparisons of measured cells decide the claims of an experiment, for the models and texts that were given."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from sinklab.experiments.claims import Claim, Within
from sinklab.experiments.measured.definition import (
    AlikeOverDomains,
    AlikeOverSizes,
    GrowsWithSize,
    MeasuredClaim,
    MeasuredExperiment,
)
from sinklab.experiments.measured.planning import Subject, cell_name
from sinklab.experiments.measured.published import open_model
from sinklab.measuring.findings import Propositions
from sinklab.survey.open_models import OpenModel

FEWEST = 3
"""Models of a family that a trend is over."""


@dataclass(frozen=True)
class Undecidable:
    """A claim that nothing which was given can decide.

    Attributes:
        why: a sentence.
    """

    claim: MeasuredClaim
    why: str


def claims_about(
    experiment: MeasuredExperiment, subjects: Sequence[Subject], found: Propositions | None
) -> Iterator[Claim | Undecidable]:
    """The claims that are made of these models, each about cells by their names in the results.

    Args:
        found: what repeated tokens have shown of the model; None where that is not known (yet).
    """
    positions_added = None if found is None else found.number is None
    for claim in experiment.claims:
        roles = {experiment.cells[cell].model for cell in claim.check.cells}
        if absent := sorted(roles - {role for one in subjects for role in one.models}):
            yield Undecidable(claim, f"no {absent[0]} model was given: it is the second --model")
        elif claim.proposition is not None:
            if found is None:
                yield Undecidable(claim, "no proposition of the paper speaks of the model, or it is not measured yet")
            elif found.number == claim.proposition:
                yield from _about(claim, subjects)
        elif claim.positions is None:
            yield from _about(claim, subjects)
        elif positions_added is None:
            yield Undecidable(claim, "how the model tells positions apart is not known before repeated tokens are read")
        elif (claim.positions == "added") == positions_added:
            yield from _about(claim, subjects)


def _about(claim: MeasuredClaim, subjects: Sequence[Subject]) -> Iterator[Claim | Undecidable]:
    match claim.check:
        case AlikeOverDomains() as check:
            if len(subjects) < 2:
                yield Undecidable(claim, "it takes two domains or more")
            else:
                yield claim.with_check(check.over(tuple(cell_name(one.name, check.cell) for one in subjects)))
        case GrowsWithSize() | AlikeOverSizes() as check:
            yield from _by_family(claim, check, subjects)
        case Within() as check if subjects[0].name:
            for one in subjects:
                cell = check.model_copy(update={"cell": cell_name(one.name, check.cell)})
                yield claim.with_check(cell, re.sub(r"\W", "_", one.name))
        case check:
            yield claim.with_check(check)


def _by_family(
    claim: MeasuredClaim, check: GrowsWithSize | AlikeOverSizes, subjects: Sequence[Subject]
) -> Iterator[Claim | Undecidable]:
    known = [(model, one.name) for one in subjects if (model := open_model(one.models["base"]))]
    families: dict[str, list[tuple[OpenModel, str]]] = {}
    for model, name in sorted(known, key=lambda pair: pair[0].parameters):
        families.setdefault(model.family, []).append((model, name))
    enough = {
        family: members for family, members in families.items() if len(members) >= FEWEST and check.is_about(family)
    }
    for family, members in enough.items():
        yield claim.with_check(check.over(tuple(cell_name(name, check.cell) for _, name in members)), family)
    if not enough:
        asked = f"of {' or '.join(check.families)}" if check.families else "of one family of the paper's list"
        besides = f", {' and '.join(check.but)} apart" if check.but else ""
        yield Undecidable(claim, f"it takes {FEWEST} models {asked}{besides}")
