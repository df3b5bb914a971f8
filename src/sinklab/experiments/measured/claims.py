"""Which comparisons of measured cells decide the claims of an experiment, for the models and texts that were given."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from sinklab.experiments.claims import Claim
from sinklab.experiments.measured.definition import (
    AlikeOverDomains,
    GrowsWithSize,
    MeasuredClaim,
    MeasuredExperiment,
)
from sinklab.experiments.measured.planning import Subject, cell_name
from sinklab.experiments.measured.published import open_model
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
    experiment: MeasuredExperiment, subjects: Sequence[Subject], positions_added: bool | None
) -> Iterator[Claim | Undecidable]:
    """The claims that are made of these models, each about cells by their names in the results.

    Args:
        positions_added: whether the model adds positions to its embedding; None where that is not known (yet).
    """
    for claim in experiment.claims:
        roles = {experiment.cells[cell].model for cell in claim.check.cells}
        if absent := sorted(roles - {role for one in subjects for role in one.models}):
            yield Undecidable(claim, f"no {absent[0]} model was given: it is the second --model")
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
        case GrowsWithSize() as check:
            yield from _by_family(claim, check, subjects)
        case check:
            yield claim.with_check(check)


def _by_family(
    claim: MeasuredClaim, check: GrowsWithSize, subjects: Sequence[Subject]
) -> Iterator[Claim | Undecidable]:
    known = [(model, one.name) for one in subjects if (model := open_model(one.models["base"]))]
    families: dict[str, list[tuple[OpenModel, str]]] = {}
    for model, name in sorted(known, key=lambda pair: pair[0].parameters):
        families.setdefault(model.family, []).append((model, name))
    enough = {family: members for family, members in families.items() if len(members) >= FEWEST}
    for family, members in enough.items():
        yield claim.with_check(check.over(tuple(cell_name(name, check.cell) for _, name in members)), family)
    if not enough:
        yield Undecidable(claim, f"it takes {FEWEST} models of one family of the paper's list")
