"""Catalogue of everything a recipe can change, read from the recipe's JSON schema."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from sinklab.interventions.variants import NEUTRAL
from sinklab.train.recipe import Recipe

ROOTS = ("model", "data", "optim", "schedule")

NOT_INTERVENTIONS = {
    "model.layers",
    "model.width",
    "model.ffn_width",
    "model.vocab_size",
    "model.context",
    "model.init_from",
    "model.init_sha256",
    "model.attention.backend",
    "model.attention.mask.eos_id",
    "data.tokenizer",
    "data.valid_fraction",
    "data.text_limit_bytes",
    "data.token_limit",
    "data.mix",
}
"""Sizes, which text, and how things are computed or stored: keys of the same parts that are no interventions."""

TYPES = {
    "boolean": "true | false",
    "integer": "whole number",
    "number": "number",
    "string": "text",
    "null": "null",
    "object": "mapping",
}
BOUNDS = {"exclusiveMinimum": ">", "minimum": ">=", "exclusiveMaximum": "<", "maximum": "<="}
Schema = Mapping[str, Any]


@dataclass(frozen=True)
class Intervention:
    """A row of the catalogue.

    Attributes:
        key: dotted key of a recipe.
        kind: for a choice among kinds, the kind that this row is about, or to which the key belongs; else None.
        values: what the key may be.
        default: what it is unless a recipe says otherwise; empty where it must be given.
        neutral: the value that changes nothing, where one is known to.
        explanation: one line.
    """

    key: str
    kind: str | None
    values: str
    default: str
    neutral: str
    explanation: str

    @property
    def is_kind(self) -> bool:
        """Whether this row is a kind of a choice, not a value that the kind has."""
        return self.kind is not None and self.values == self.kind


def catalogue() -> list[Intervention]:
    """Every intervention: a row per kind of every choice and per value of every part."""
    schema = Recipe.model_json_schema()
    reader = _Reader(schema["$defs"])
    rows = [row for root in ROOTS for row in reader.rows(schema["properties"][root], root, None, baseline=True)]
    return [row for row in rows if not any(f"{row.key}.".startswith(f"{key}.") for key in NOT_INTERVENTIONS)]


def kinds() -> set[str]:
    """The names of all kinds of all choices."""
    return {row.kind for row in catalogue() if row.kind is not None}


@dataclass(frozen=True)
class _Reader:
    """Rows of the fields of a JSON schema with these definitions.

    `baseline`: every choice on the way to a field is its default kind, so that default values are those of the base.
    """

    definitions: Mapping[str, Schema]

    def rows(self, field: Schema, key: str, kind: str | None, baseline: bool) -> Iterator[Intervention]:
        members = self._members(field)
        parts = [member for member in members if "properties" in member]
        values, default = " | ".join(map(_value, members)), _said(field["default"]) if "default" in field else ""
        if choice := field.get("discriminator"):
            tag = choice["propertyName"]
            chosen = field["default"][tag]
            for part in parts:
                name = part["properties"][tag]["const"]
                yield Intervention(key, name, name, chosen, chosen if baseline else "", _first_paragraph(part))
                yield from self._fields(part, key, name, baseline and name == chosen)
            return
        if not parts:
            known = NEUTRAL.get(f"{key} ({kind})") or NEUTRAL.get(key)
            neutral = known.value if known is not None else default if baseline else ""
            yield Intervention(key, kind, values, default, neutral, field.get("description", ""))
        elif len(members) > 1:
            explanation = field.get("description") or _first_paragraph(parts[0])
            yield Intervention(key, kind, values, default, default, explanation)
        for part in parts:
            yield from self._fields(part, key, kind, baseline)

    def _fields(self, part: Schema, key: str, kind: str | None, baseline: bool) -> Iterator[Intervention]:
        for name, field in part["properties"].items():
            if "const" not in field:  # the tag of a kind
                yield from self.rows(field, f"{key}.{name}", kind, baseline)

    def _members(self, field: Schema) -> list[Schema]:
        """The members of a union, or the one type there is."""
        if union := field.get("oneOf") or field.get("anyOf"):
            return [member for one in union for member in self._members(one)]
        return [self.definitions[field["$ref"].rpartition("/")[2]] if "$ref" in field else field]


def _value(member: Schema) -> str:
    if "properties" in member:
        return "{" + ", ".join(member["properties"]) + "}"
    if "enum" in member or "const" in member:
        return " | ".join(map(str, member.get("enum") or [member["const"]]))
    if member["type"] == "array":
        inner = [TYPES[one["type"]] for one in member.get("prefixItems") or [member["items"]]]
        return "[" + ", ".join(inner) + (", .." if "items" in member else "") + "]"
    bounds = [f"{sign} {member[name]:g}" for name, sign in BOUNDS.items() if name in member]
    return " ".join([TYPES[member["type"]], *bounds])


def _said(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return f"{value:g}" if isinstance(value, float) else str(value)


def _first_paragraph(part: Schema) -> str:
    return " ".join(part.get("description", "").split("\n\n")[0].split())
