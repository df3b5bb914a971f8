"""Base models of config parts and of documents, and flattening of nested values."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar

from pydantic import AllowInfNan, BaseModel, BeforeValidator, ConfigDict, Field, PlainSerializer, field_validator

LARGEST = 10**7
"""Upper bound of sizes: above any model, and the byte count of a matrix of such sizes fits 64 bits."""


class Part(BaseModel):
    """A part of a recipe: immutable, unknown keys are refused.

    Numbers are finite, and integers fit 64 bits, as they end in tensors.
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
"""Upper bound of positions and tokens."""


@dataclass(frozen=True)
class Example:
    """A named variant of a kind.

    Attributes:
        values: values that differ from the kind's defaults.
        may_diverge: whether divergence of a run is a result and not a failure, because the paper reports that the
            variant does not train, or because its outputs are unbounded.
    """

    values: Mapping[str, object] = field(default_factory=dict)
    may_diverge: bool = False


@dataclass(frozen=True)
class NeutralExample:
    """Values of a kind that are equivalent to a baseline, bit for bit.

    Attributes:
        said: values as text.
        values: values of the kind.
        against: values of the kind that are the baseline; None for the base recipe.
    """

    said: str
    values: Mapping[str, object]
    against: Mapping[str, object] | None = None


class Kind(Part):
    """A member of a discriminated union by `kind`.

    Attributes:
        examples: examples by name. Each is a variant of the catalogue, trained, tested and timed under that name.
        neutral: neutral examples by key, relative to the key of the union; "" for the kind as a whole.
    """

    examples: ClassVar[Mapping[str, Example]] = {}
    neutral: ClassVar[Mapping[str, NeutralExample]] = {}

    @classmethod
    def chosen(cls, values: Mapping[str, object]) -> dict[str, object]:
        """The recipe values that choose this kind with these values."""
        return {"kind": cls.model_fields["kind"].default, **values}


class ReadDocument(BaseModel):
    """A file written by sinklab, when read again. Unknown keys, written by other versions, are ignored."""

    model_config = ConfigDict(extra="ignore", frozen=True)


def finite_or_none(value: float | None) -> float | None:
    """The number if it is finite, else None: JSON has no infinities and no NaN."""
    return value if value is not None and math.isfinite(value) else None


Ratio = Annotated[
    float,
    AllowInfNan(True),
    Field(ge=0),
    BeforeValidator(lambda value: math.inf if value is None else value),
    PlainSerializer(finite_or_none, return_type=float | None, when_used="json"),
]
"""A quotient whose denominator may be 0; it is then infinite, and null in JSON. NaN is an error."""


def leaves(values: Mapping[str, object], path: str = "") -> dict[str, object]:
    """Flatten nested mappings to values by dotted key."""
    found: dict[str, object] = {}
    for key, value in values.items():
        below = f"{path}.{key}" if path else str(key)
        found |= leaves(value, below) if isinstance(value, Mapping) else {below: value}
    return found
