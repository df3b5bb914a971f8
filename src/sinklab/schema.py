"""Base models of config parts and of documents, and a walk through nested values."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar

from pydantic import AllowInfNan, BaseModel, BeforeValidator, ConfigDict, Field, PlainSerializer, field_validator

LARGEST = 10**7
"""Of a size: beyond any model, and the bytes of a matrix of such sizes are a 64-bit number."""


class Part(BaseModel):
    """A part of a recipe. Unknown keys are refused, values are not changed after validation.

    Numbers are finite, and whole numbers fit 64 bits, as they end in tensors.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    @field_validator("*")
    @classmethod
    def _fits_64_bits(cls, value: Any) -> Any:
        for number in value if isinstance(value, list | tuple) else (value,):
            if isinstance(number, int) and abs(number) >= 2**63:
                raise ValueError(f"{number} is too large: whole numbers are below 2^63")
        return value


BEYOND = 2**20
"""Beyond any context, and any token."""


@dataclass(frozen=True)
class Example:
    """Values of a kind that are worth a name.

    Attributes:
        values: those that differ from the kind's defaults.
        may_diverge: the paper reports that it does not train, or nothing keeps its outputs bounded: a run that stops
            as diverged is then a result, not a defect.
    """

    values: Mapping[str, object] = field(default_factory=dict)
    may_diverge: bool = False


@dataclass(frozen=True)
class NeutralExample:
    """Values of a kind at which it is a baseline, bit for bit.

    Attributes:
        said: as a person writes or says the value.
        values: those of the kind.
        against: values of the kind that are the baseline; None for the base recipe.
    """

    said: str
    values: Mapping[str, object]
    against: Mapping[str, object] | None = None


class Kind(Part):
    """A part that is one of several, told apart by `kind`.

    Attributes:
        examples: by name. Each is a variant of the catalogue, which is trained, tested and timed under that name.
        neutral: by the key it is about, relative to the choice's; "" for the choice as a whole.
    """

    examples: ClassVar[Mapping[str, Example]] = {}
    neutral: ClassVar[Mapping[str, NeutralExample]] = {}

    @classmethod
    def chosen(cls, values: Mapping[str, object]) -> dict[str, object]:
        """What a recipe says to choose this kind with these values."""
        return {"kind": cls.model_fields["kind"].default, **values}


class ReadDocument(BaseModel):
    """A file of ours as a later command reads it. Keys it does not know are another version's, and left alone."""

    model_config = ConfigDict(extra="ignore", frozen=True)


def finite_or_none(value: float | None) -> float | None:
    """The number where it is finite: JSON has no word for others."""
    return value if value is not None and math.isfinite(value) else None


Ratio = Annotated[
    float,
    AllowInfNan(True),
    Field(ge=0),
    BeforeValidator(lambda value: math.inf if value is None else value),
    PlainSerializer(finite_or_none, return_type=float | None, when_used="json"),
]
"""Something over something that may be 0: infinite there, which is null in JSON. NaN is refused."""


def leaves(values: Mapping[str, object], path: str = "") -> dict[str, object]:
    """The values of nested mappings by their dotted keys."""
    found: dict[str, object] = {}
    for key, value in values.items():
        below = f"{path}.{key}" if path else str(key)
        found |= leaves(value, below) if isinstance(value, Mapping) else {below: value}
    return found
