"""Recipes: a recipe fully specifies a run. Defaults <- YAML file <- `--set a.b.c=value`, then validated.

A choice among kinds (a discriminated union) may be given by its bare name where its own defaults do:
`--set model.attention.operation=sigmoid` is `{kind: sigmoid}`. Setting another kind drops the old kind's values.
"""

import hashlib
import json
import re
import types
import typing
from collections.abc import Iterable, Mapping
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, Self

import yaml
from pydantic import BaseModel, Field, ValidationError, field_validator, model_validator

from sinklab.data.config import DataConfig, Selection
from sinklab.errors import InputError
from sinklab.files import parse_yaml
from sinklab.model.config import ModelConfig
from sinklab.schema import Part, leaves
from sinklab.train.config import AdamW, MetricConfig, OptimConfig, ScheduleConfig, TrainConfig
from sinklab.train.identity import without_later

KINDS = ("kind", "name")
"""The keys that say which of several kinds a part is."""

MUST_BE_SET = "???"
"""The value of a key that a recipe leaves to `--set`, as in OmegaConf."""

DATA_ORIGIN = {"source", "tokenizer", "valid_fraction", "text_limit_bytes", *Selection.model_fields}
"""What the fingerprint of prepared data stands for."""

MANNER = {"save_every", "keep", "device", "parallel", "compile", "recompute", "peak_flops"}
"""What may change from one call to the next that continues the run."""


class Recipe(Part):
    """Everything that decides a run's result."""

    name: str = Field(default="run", description="for people; it does not change the run")
    seed: int = Field(default=0, ge=0, description="of the initial weights and the order of the data")
    model: ModelConfig = ModelConfig()
    data: DataConfig = DataConfig()
    optim: OptimConfig = AdamW()
    schedule: ScheduleConfig = ScheduleConfig()
    train: TrainConfig = TrainConfig()
    metric: MetricConfig = MetricConfig()

    @field_validator("name")
    @classmethod
    def _begins_a_directory_name(cls, name: str) -> str:
        if not re.fullmatch(r"[^/\\\x00-\x1f.][^/\\\x00-\x1f]*", name):
            raise ValueError(f"{name!r} cannot begin a directory's name: give one without slashes or a leading dot")
        return name

    @model_validator(mode="after")
    def _parts_fit(self) -> Self:
        if self.metric.length > self.model.context:
            raise ValueError(
                f"metric.length {self.metric.length} is beyond model.context {self.model.context}: "
                "the model has not been trained at those positions"
            )
        if self.schedule.min_lr > self.optim.lr:
            raise ValueError(f"schedule.min_lr {self.schedule.min_lr} is above optim.lr {self.optim.lr}")
        return self

    def content_hash(self, data_fingerprint: str) -> str:
        """16 hexadecimal digits of everything that decides the result: the recipe and the data.

        The name is left out; where the data came from, since its fingerprint says what it is; and how the work is done:
        on what device, how several processes share it, how often it is saved. Keys that came later are left out where
        they change nothing (identity.py). Of a checkpoint the weights count, and not where they lie.
        """
        recipe = self.model_dump(mode="json", exclude={"name": True, "data": DATA_ORIGIN, "train": MANNER})
        without_later(recipe)
        del recipe["model"]["init_from"]
        truth = {"recipe": recipe, "data": data_fingerprint}
        return hashlib.sha256(json.dumps(truth, sort_keys=True).encode()).hexdigest()[:16]

    def to_yaml(self) -> str:
        """The resolved recipe as YAML, defaults included."""
        return yaml.safe_dump(self.model_dump(mode="json"), sort_keys=False)


def recipe_text(name: str) -> str:
    """The text of a recipe file, or of one that comes with sinklab (`tiny`, `mini`, `60m`, ..).

    Raises:
        InputError: there is neither such a file nor such a recipe, or it is not readable text.
    """
    path = Path(name)
    if path.is_file():
        try:
            return path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise InputError(f"cannot read {name}: {error}") from error
    packaged = resources.files("sinklab") / "recipes" / (name if name.endswith(".yaml") else f"{name}.yaml")
    if packaged.is_file():
        return packaged.read_text(encoding="utf-8")
    known = sorted(p.name for p in (resources.files("sinklab") / "recipes").iterdir() if p.name.endswith(".yaml"))
    raise InputError(f"no recipe at {name}: give a YAML file or one of {', '.join(k[:-5] for k in known)}")


def load_recipe(name: str, overrides: Iterable[str] = ()) -> Recipe:
    """Read a recipe file (or a packaged recipe by name) and apply `KEY=VALUE` overrides, in whatever order: a kind
    before its values.

    Raises:
        InputError: not YAML, or a key, type or combination that is not allowed; the message names the field.
    """
    text = recipe_text(name)
    try:
        values = parse_yaml(text)
    except ValueError as error:
        raise InputError(f"{name} is not valid YAML: {error}") from error
    if not isinstance(values, dict):
        found = "nothing" if values is None else f"a {type(values).__name__}"
        raise InputError(f"{name} must hold a mapping of recipe keys, and holds {found}")
    return build_recipe(values, *(parse_override(text) for text in sorted(overrides, key=_depth)), origin=name)


def build_recipe(values: Mapping[str, Any], *overlays: Mapping[str, Any], origin: str = "recipe") -> Recipe:
    """A validated recipe from nested values and overlays on them.

    Raises:
        InputError: a key, type or combination that is not allowed, or a key that must be set and is not; the message
            names the field.
    """
    merged: dict[str, Any] = {}
    try:
        for overlay in (values, *overlays):
            merged = merge(merged, overlay)
    except _NoSectionError as error:
        raise InputError(f"{origin} is not a valid recipe:\n  {error}") from error
    missing = [key for key, value in leaves(merged).items() if value == MUST_BE_SET]
    if missing:
        raise InputError(f"{origin} needs {missing[0]}: add --set {missing[0]}=VALUE, or null to do without")
    try:
        return Recipe.model_validate(merged)
    except ValidationError as error:
        raise InputError(_explain(error, origin)) from error


def _depth(override: str) -> int:
    """How deep in the recipe an override begins; one that names a kind belongs to what it is the kind of."""
    *above, last = override.partition("=")[0].split(".")
    return len(above) + (last not in KINDS)


def parse_override(text: str) -> dict[str, Any]:
    """`a.b.c=value` as nested mappings; the value is read as YAML."""
    key, equals, value = text.partition("=")
    if not equals or not all(key.split(".")):
        raise InputError(f"--set {text}: expected KEY=VALUE with a dotted key, for example --set optim.lr=3e-3")
    try:
        nested: Any = _number(parse_yaml(value))
    except ValueError as error:
        raise InputError(f"--set {text}: the value is not valid YAML: {error}") from error
    for part in reversed(key.split(".")):
        nested = {part: nested}
    return nested


def _number(value: Any) -> Any:
    """YAML 1.1 reads 3e-3 as a string; people mean a number."""
    if isinstance(value, str):
        try:
            return float(value)
        except ValueError:
            return value
    return value


class _NoSectionError(ValueError):
    """Something else stands where a section of the recipe belongs: laid over, it would drop the section unseen."""


def merge(
    base: Mapping[str, Any], overlay: Mapping[str, Any], part: Any = Recipe, path: tuple[str, ...] = ()
) -> dict[str, Any]:
    """`overlay` laid over `base`, mapping by mapping; a bare name or another kind replaces a choice whole.

    Args:
        part: whose keys they are.
        path: where the part stands in the recipe.

    Raises:
        ValueError: a value in the place of a section; the message names the section.
    """
    merged = dict(base)
    for key, value in overlay.items():
        field = _field_type(part, key)
        tag = _discriminator(field)
        if tag and isinstance(value, str):
            value = {tag: value}
        if isinstance(value, Mapping):
            old = merged.get(key)
            old = _default_kind(field) | (dict(old) if isinstance(old, Mapping) else {})
            changed = tag is not None and value.get(tag, old.get(tag)) != old.get(tag)
            value = merge({} if changed else old, value, field, (*path, key))
        elif sections := _sections(field, value):
            where, known = ".".join((*path, key)), ", ".join(sections[0].model_fields)
            got = "nothing" if value is None else f"{value!r}"
            raise _NoSectionError(f"{where}: a section with keys of its own ({known}) and not a value (got {got})")
        merged[key] = value
    return merged


def _sections(field: Any, value: Any) -> list[type[BaseModel]]:
    """The parts that a field may be, none where it may also be such a value."""
    members = [member for member in _members(field) if value is None or member is not type(None)]
    parts = [member for member in members if isinstance(member, type) and issubclass(member, BaseModel)]
    return parts if len(parts) == len(members) else []


def _field_type(part: Any, key: str) -> Any:
    """The annotation of field `key`, looked up in every member of a union; None where it is unknown."""
    for member in _members(part):
        if isinstance(member, type) and issubclass(member, BaseModel) and key in member.model_fields:
            field = member.model_fields[key]
            return Annotated[field.annotation, field] if field.discriminator else field.annotation
    return None


def _members(part: Any) -> tuple[Any, ...]:
    if typing.get_origin(part) is Annotated:
        part = typing.get_args(part)[0]
    if typing.get_origin(part) in (typing.Union, types.UnionType):
        return typing.get_args(part)
    return (part,)


def _discriminator(field: Any) -> str | None:
    """The key that tells the kinds of a choice apart: the discriminator of a union."""
    if typing.get_origin(field) is Annotated:
        tag = typing.get_args(field)[1].discriminator
        return tag if isinstance(tag, str) else None
    return None


def _default_kind(field: Any) -> dict[str, Any]:
    """The kind that a choice has unless the recipe names one, so that its values can be given alone."""
    tag = _discriminator(field)
    default = typing.get_args(field)[1].default if tag else None
    return {tag: getattr(default, tag)} if tag and isinstance(default, BaseModel) else {}


def _explain(error: ValidationError, origin: str) -> str:
    lines = []
    for item in error.errors():
        where = ".".join(_written(item["loc"])) or "the recipe as a whole"
        reason = item["msg"].removeprefix("Value error, ")
        if item["type"] == "extra_forbidden":
            part = _part_at(item["loc"][:-1])
            allowed = f"; allowed here: {', '.join(part.model_fields)}" if part else ""
            reason = f"unknown key{allowed}"
        elif item["type"] not in ("value_error", "missing"):
            reason += f" (got {item['input']!r})"
        lines.append(f"  {where}: {reason}")
    return f"{origin} is not a valid recipe:\n" + "\n".join(lines)


def _written(path: tuple[int | str, ...]) -> list[str]:
    """A validation path as the recipe spells it: without the kinds and types that pydantic puts in for a choice."""
    here: Any = Recipe
    kept = []
    for step in path:
        tagged = [m for m in _members(here) if step in _tags(m)]
        if tagged and _field_type(here, str(step)) is None:
            here = tagged[0]
            continue
        alternatives = [m for m in _members(here) if m is not types.NoneType]
        if isinstance(step, str) and not tagged and len(alternatives) > 1:
            here = next((m for m in alternatives if getattr(m, "__name__", "") == step), None)
            continue
        kept.append(str(step))
        here = _field_type(here, str(step))
    return kept


def _part_at(path: tuple[int | str, ...]) -> type[BaseModel] | None:
    """The config part that a validation path leads to (union tags are part of such a path)."""
    here: Any = Recipe
    for step in path:
        below = _field_type(here, str(step))
        if below is None:
            tagged = [m for m in _members(here) if step in _tags(m)]
            below = tagged[0] if tagged else here
        here = below
    members = _members(here)
    return members[0] if len(members) == 1 and isinstance(members[0], type) else None


def _tags(member: Any) -> list[Any]:
    fields = getattr(member, "model_fields", {})
    return [f.default for name, f in fields.items() if name in KINDS]
