"""Base classes of recipe parts and of documents written by sinklab."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import AllowInfNan, BaseModel, BeforeValidator, ConfigDict, Field, PlainSerializer, field_validator

LARGEST = 10**7
"""Largest dimension in a recipe. The byte count of a square matrix of this size fits in 64 bits."""


class Part(BaseModel):
    """Base class of the parts of a recipe. Parts are immutable, and unknown keys are errors.

    Numbers must be finite, and integers must fit in 64 bits.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    @field_validator("*")
    @classmethod
    def _fits_64_bits(cls, value: Any) -> Any:
        for number in value if isinstance(value, list | tuple) else (value,):
            if isinstance(number, int) and abs(number) >= 2**63:
                raise ValueError(f"{number} is out of range: integers must be greater than -2^63 and less than 2^63")
        return value


BEYOND = 2**20
"""A window width or token id beyond every context and vocabulary of the examples, used as a neutral value."""


@dataclass(frozen=True)
class Example:
    """Example values of a `Kind`, such as an attention operation.

    Attributes:
        values: field values that differ from the kind's defaults.
        may_diverge: True if training may diverge: the intervention's paper reports it, or outputs are unbounded.
    """

    values: Mapping[str, object] = field(default_factory=dict)
    may_diverge: bool = False


@dataclass(frozen=True)
class NeutralExample:
    """Values of a kind's fields, or of a recipe, with which training is bit-identical to a baseline.

    Attributes:
        said: description of the values in the catalogue.
        values: in `Kind.neutral` values of the kind's fields, in `interventions.NEUTRAL` nested recipe values.
        against: such values of the baseline; None if the baseline is the base recipe.
    """

    said: str
    values: Mapping[str, object]
    against: Mapping[str, object] | None = None


class Kind(Part):
    """A member of a union discriminated by `kind`.

    Attributes:
        examples: examples by name; only attention operations, biases and masks have them. Each is a tested variant
            (`interventions.VARIANTS`).
        neutral: neutral examples by recipe key, relative to the key of the union; "" is the key of the whole kind.
    """

    examples: ClassVar[Mapping[str, Example]] = {}
    neutral: ClassVar[Mapping[str, NeutralExample]] = {}

    @classmethod
    def chosen(cls, values: Mapping[str, object]) -> dict[str, object]:
        """Return the recipe values that select this kind with these values."""
        return {"kind": cls.model_fields["kind"].default, **values}


class ReadDocument(BaseModel):
    """Base class of documents that sinklab writes and reads. Unknown keys, from other versions, are ignored."""

    model_config = ConfigDict(extra="ignore", frozen=True)


class VersionedDocument(ReadDocument):
    """Base class of documents with a schema version, such as sft.json."""

    model_config = ConfigDict(populate_by_name=True)

    schema_version: Literal[1] = Field(default=1, alias="schema")

    def document(self) -> dict[str, Any]:
        """Return the content as a JSON-serializable dict."""
        return self.model_dump(mode="json", by_alias=True)


def finite_or_none(value: float | None) -> float | None:
    """Return the value, or None for NaN and infinity, which JSON cannot represent."""
    return value if value is not None and math.isfinite(value) else None


T = TypeVar("T")
Omitted = Annotated[T | None, Field(exclude_if=lambda value: value is None)]
"""A value that is left out of a document if it is None."""

Ratio = Annotated[
    float,
    AllowInfNan(True),
    Field(ge=0),
    BeforeValidator(lambda value: math.inf if value is None else value),
    PlainSerializer(finite_or_none, return_type=float | None, when_used="json"),
]
"""A ratio of at least 0. It is infinite (null in JSON) if the denominator is 0. NaN is an error."""


def leaves(values: Mapping[str, object], path: str = "", *, empty: bool = False) -> dict[str, object]:
    """Flatten nested mappings to values by dotted key, such as `model.width`. Empty mappings are kept if `empty`."""
    found: dict[str, object] = {}
    for key, value in values.items():
        below = f"{path}.{key}" if path else str(key)
        if isinstance(value, Mapping) and (value or not empty):
            found |= leaves(value, below, empty=empty)
        else:
            found[below] = value
    return found
