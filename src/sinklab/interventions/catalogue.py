"""The list of everything a recipe can change, read off its parts: nothing is said here that a config does not say."""

import re
import typing
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from sinklab.interventions.variants import NEUTRAL
from sinklab.schema import Part
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

TYPES = {bool: "true | false", int: "whole number", float: "number", str: "text"}


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
    rows = [row for root in ROOTS for row in _rows(Recipe.model_fields[root], root, None, baseline=True)]
    return [row for row in rows if not any(f"{row.key}.".startswith(f"{key}.") for key in NOT_INTERVENTIONS)]


def kinds() -> set[str]:
    """The names of all kinds of all choices."""
    return {row.kind for row in catalogue() if row.kind is not None}


def _rows(field: FieldInfo, key: str, kind: str | None, baseline: bool) -> Iterator[Intervention]:
    """`baseline`: every choice on the way here is its default kind, so that default values are those of the base."""
    parts = _parts(field.annotation)
    if field.discriminator:
        default = _tag(type(field.default))
        for part in parts:
            neutral = default if baseline else ""
            yield Intervention(key, _tag(part), _tag(part), default, neutral, _first_lines(part))
            yield from _fields(part, key, _tag(part), baseline and _tag(part) == default)
        return
    if not parts:
        yield Intervention(key, kind, _values(field), _said(field.default), _neutral(key, kind, field, baseline), "")
        return
    if len(_arguments(field.annotation)) > 1:
        explanation = field.description or _first_lines(parts[0])
        yield Intervention(key, kind, _values(field), _said(field.default), _said(field.default), explanation)
    for part in parts:
        yield from _fields(part, key, kind, baseline)


def _fields(part: type[Part], key: str, kind: str | None, baseline: bool) -> Iterator[Intervention]:
    documented = _attributes(part)
    for name, field in part.model_fields.items():
        if typing.get_origin(field.annotation) is Literal and len(typing.get_args(field.annotation)) == 1:
            continue  # the tag of a kind
        for row in _rows(field, f"{key}.{name}", kind, baseline):
            own = row.key == f"{key}.{name}" and not row.explanation
            text = (field.description or documented.get(name, "")) if own else row.explanation
            yield Intervention(row.key, row.kind, row.values, row.default, row.neutral, text)


def _arguments(annotation: Any) -> tuple[Any, ...]:
    """The members of a union, or the one type there is."""
    if typing.get_origin(annotation) is typing.Annotated:
        annotation = typing.get_args(annotation)[0]
    return typing.get_args(annotation) if typing.get_origin(annotation) in _UNIONS else (annotation,)


_UNIONS = (typing.Union, type(int | str))


def _parts(annotation: Any) -> list[type[Part]]:
    return [member for member in _arguments(annotation) if isinstance(member, type) and issubclass(member, Part)]


def _tag(part: type) -> str:
    fields = getattr(part, "model_fields", {})
    return next((fields[name].default for name in ("kind", "name") if name in fields), "")


def _values(field: FieldInfo) -> str:
    return " | ".join(_value(member, field) for member in _arguments(field.annotation))


def _value(member: Any, field: FieldInfo) -> str:
    if member is type(None):
        return "null"
    if typing.get_origin(member) is Literal:
        return " | ".join(str(value) for value in typing.get_args(member))
    if isinstance(member, type) and issubclass(member, Part):
        return "{" + ", ".join(member.model_fields) + "}"
    origin = typing.get_origin(member)
    if origin in (list, tuple):
        inner = [TYPES.get(_arguments(a)[0], "value") for a in typing.get_args(member)]
        return "[" + ", ".join(inner) + (", .." if origin is list else "") + "]"
    if typing.get_origin(member) is typing.Annotated:  # with bounds of its own
        member, field = typing.get_args(member)[:2]
    signs = {"gt": ">", "ge": ">=", "lt": "<", "le": "<="}
    bounds = [
        f"{sign} {getattr(limit, name):g}"
        for limit in field.metadata
        for name, sign in signs.items()
        if getattr(limit, name, None) is not None
    ]
    return " ".join([TYPES.get(member, str(member)), *bounds])


def _said(value: Any) -> str:
    if value is PydanticUndefined:
        return ""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return f"{value:g}" if isinstance(value, float) else str(value)


def _neutral(key: str, kind: str | None, field: FieldInfo, baseline: bool) -> str:
    known = NEUTRAL.get(f"{key} ({kind})") or NEUTRAL.get(key)
    if known is not None:
        return known.value
    return _said(field.default) if baseline else ""


def _first_lines(part: type[Part]) -> str:
    """The first paragraph of a part's docstring, on one line."""
    return " ".join((part.__doc__ or "").strip().split("\n\n")[0].split())


def _attributes(part: type[Part]) -> dict[str, str]:
    """What a docstring says under `Attributes:`; two names may share an entry."""
    _, _, section = (part.__doc__ or "").partition("Attributes:")
    found = {}
    for match in re.finditer(r"^ {8}(\w[\w, ]*): (.*(?:\n {12}.*)*)", section, flags=re.MULTILINE):
        for name in match[1].split(","):
            found[name.strip()] = " ".join(match[2].split())
    return found
