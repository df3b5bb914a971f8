"""Base classes of recipe parts and of documents written by sinklab."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AllowInfNan, BaseModel, BeforeValidator, ConfigDict, Field, PlainSerializer, field_validator

LARGEST = 10**7
"""Upper bound of dimensions: the byte count of a square matrix of this size fits in 64 bits."""


class Part(BaseModel):
    """A part of a recipe: immutable, unknown keys are errors.

    Numbers are finite, and integers fit in 64 bits.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    @field_validator("*")
    @classmethod
    def _fits_64_bits(cls, value: Any) -> Any:
        for number in value if isinstance(value, list | tuple) else (value,):
            if isinstance(number, int) and abs(number) >= 2**63:
                raise ValueError(f"{number} is out of range: whole numbers are between -2^63 and 2^63")
        return value


BEYOND = 2**20
"""A window or token id larger than any context or vocabulary of the examples; used for neutral values."""


@dataclass(frozen=True)
class Example:
    """An example configuration of a kind.

    Attributes:
        values: field values that differ from the kind's defaults.
        may_diverge: divergence is an expected result, because the paper reports it or the outputs are unbounded.
    """

    values: Mapping[str, object] = field(default_factory=dict)
    may_diverge: bool = False


@dataclass(frozen=True)
class NeutralExample:
    """Values of a kind's fields, or of a recipe, at which the model is bit-identical to a baseline.

    Attributes:
        said: description of the values in the catalogue.
        values: values of the kind's fields, or recipe values.
        against: the same of the baseline; None if the baseline is the base recipe.
    """

    said: str
    values: Mapping[str, object]
    against: Mapping[str, object] | None = None


class Kind(Part):
    """A member of a union discriminated by `kind`.

    Attributes:
        examples: examples by name, of attention operations, biases and masks; each is a tested variant
            (`interventions.VARIANTS`).
        neutral: neutral examples by key, relative to the key of the union; "" for the kind as a whole.
    """

    examples: ClassVar[Mapping[str, Example]] = {}
    neutral: ClassVar[Mapping[str, NeutralExample]] = {}

    @classmethod
    def chosen(cls, values: Mapping[str, object]) -> dict[str, object]:
        """Return the recipe values that select this kind with these values."""
        return {"kind": cls.model_fields["kind"].default, **values}


class ReadDocument(BaseModel):
    """Base class for reading documents written by sinklab. Unknown keys, from other versions, are ignored."""

    model_config = ConfigDict(extra="ignore", frozen=True)


class VersionedDocument(ReadDocument):
    """Base class of documents with the number of their schema, such as sft.json."""

    model_config = ConfigDict(populate_by_name=True)

    schema_version: Literal[1] = Field(default=1, alias="schema")

    def document(self) -> dict[str, Any]:
        """Return the content as a JSON-serializable dict."""
        return self.model_dump(mode="json", by_alias=True)


def finite_or_none(value: float | None) -> float | None:
    """Return the value, or None for NaN and infinity, which JSON lacks."""
    return value if value is not None and math.isfinite(value) else None


Ratio = Annotated[
    float,
    AllowInfNan(True),
    Field(ge=0),
    BeforeValidator(lambda value: math.inf if value is None else value),
    PlainSerializer(finite_or_none, return_type=float | None, when_used="json"),
]
"""A ratio of at least 0; infinite (null in JSON) if the denominator is 0. NaN is an error."""


def leaves(values: Mapping[str, object], path: str = "") -> dict[str, object]:
    """Flatten nested mappings to a dictionary of values by dotted key, such as `model.width`; empty mappings vanish."""
    found: dict[str, object] = {}
    for key, value in values.items():
        below = f"{path}.{key}" if path else str(key)
        found |= leaves(value, below) if isinstance(value, Mapping) else {below: value}
    return found
