"""What of the paper is encoded: its tables, figures, takeaways and propositions with their claims (`coverage.yaml`)."""

from collections.abc import Mapping
from functools import cache
from importlib import resources
from typing import Self

from pydantic import Field, model_validator

from sinklab.files import parse_yaml
from sinklab.schema import Part


class Covered(Part):
    """A table, figure, takeaway, proposition or section of the paper.

    Attributes:
        says: what it says, in our words.
        claims: that encode it, each as EXPERIMENT.CLAIM.
        without: why none does, or what of it is not encoded, and why.
    """

    says: str
    claims: tuple[str, ...] = Field(default=())
    without: str = ""

    @model_validator(mode="after")
    def _is_encoded_or_has_a_reason(self) -> Self:
        if not self.claims and not self.without:
            raise ValueError("give claims, or `without`: the reason why there are none")
        return self


@cache
def paper_coverage() -> Mapping[str, Covered]:
    """Every part of the paper by its name, such as table_4, figure_7, takeaway_6.1, proposition_2, section_7.3."""
    text = (resources.files("sinklab") / "experiments" / "coverage.yaml").read_text(encoding="utf-8")
    return {name: Covered.model_validate(part) for name, part in parse_yaml(text).items()}
