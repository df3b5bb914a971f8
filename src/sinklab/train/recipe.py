"""Recipe: the full specification of a run. A YAML file overrides the defaults, and `--set a.b.c=value` overrides both.

A discriminated union may be set to the name of a kind, which selects its defaults:
`--set model.attention.operation=sigmoid` means `{kind: sigmoid}`. Changing the kind drops the values of the old kind.
"""

import hashlib
import json
import re
from collections.abc import Iterable, Mapping
from contextlib import suppress
from functools import cache, reduce
from importlib import resources
from pathlib import Path
from typing import Any, Self

import yaml
from pydantic import Field, ValidationError, field_validator, model_validator

from sinklab.data.loader import DataConfig, Selection
from sinklab.errors import InputError
from sinklab.files import parse_yaml
from sinklab.model.config import ModelConfig
from sinklab.model.loss import AddedLosses
from sinklab.schema import Part, leaves
from sinklab.train.config import AdamW, MetricConfig, OptimConfig, ScheduleConfig, TrainConfig

KINDS = ("kind", "name")
"""Keys that discriminate unions."""

MUST_BE_SET = "???"
"""Placeholder for a mandatory value, as in OmegaConf. An overlay or `--set` must replace it."""

DATA_ORIGIN = {"source", "tokenizer", "valid_fraction", "text_limit_bytes", *Selection.model_fields}
"""Keys of `data` that the run hash excludes, because the fingerprint of the prepared data covers them."""

UNHASHED_TRAIN_KEYS = {"save_every", "keep", "device", "parallel", "compile", "recompute", "peak_flops"}
"""Keys of `train` that the run hash excludes: they affect results at most by rounding, and may change on resuming."""

NEUTRAL_VALUES: dict[str, object] = {
    "model.embedding": "plain",
    "model.init": {"kind": "declared"},
    "model.init_sha256": None,
    "model.attention.bias.start": None,
    "model.attention.bias.count": 1,
    "model.attention.operation.shift": "none",
    "model.exclusive": False,
    "model.projection": {"kind": "full"},
    "model.mixer": {"kind": "attention"},
    "model.pattern": None,
    "model.position.share": 1.0,
    "model.value_residual": {"kind": "none"},
    "model.norm.head_norm": False,
    "model.norm.gate_rank": None,
    "train.float32_matmul": "highest",
    "losses": {"hidden_z": None, "tweo": None},
}
"""Neutral values of keys that were added after the first runs, by dotted key. A neutral value has no effect.

The run hash excludes keys with their neutral value, so that the hashes of runs from before these keys stay valid. The
table can be removed when those runs are no longer used.
"""


class Recipe(Part):
    """Full specification of a run: model, data, auxiliary losses, optimiser, schedule, training loop, sink metric."""

    name: str = Field(default="run", description="label of the run, used in the directory name; no effect on results")
    seed: int = Field(default=0, ge=0, description="random seed of initial weights, data order and data.random_tokens")
    model: ModelConfig = ModelConfig()
    data: DataConfig = DataConfig()
    losses: AddedLosses = AddedLosses()
    optim: OptimConfig = AdamW()
    schedule: ScheduleConfig = ScheduleConfig()
    train: TrainConfig = TrainConfig()
    metric: MetricConfig = MetricConfig()

    @field_validator("name")
    @classmethod
    def _begins_a_directory_name(cls, name: str) -> str:
        if not re.fullmatch(r"[^/\\\x00-\x1f.][^/\\\x00-\x1f]*", name):
            raise ValueError(
                f"{name!r} cannot be used in a directory name: use a non-empty name without slashes, "
                "backslashes, control characters or a leading dot"
            )
        return name

    @model_validator(mode="after")
    def _parts_fit(self) -> Self:
        if self.metric.length > self.model.context:
            raise ValueError(
                f"metric.length {self.metric.length} exceeds model.context {self.model.context}: set metric.length "
                f"to at most {self.model.context}"
            )
        if self.schedule.min_lr > self.optim.lr:
            raise ValueError(
                f"schedule.min_lr {self.schedule.min_lr} exceeds optim.lr {self.optim.lr}: set schedule.min_lr too"
            )
        if self.optim.name == "ortho_adam" and self.train.parallel == "fsdp":
            raise ValueError("optim.name ortho_adam requires whole gradients: set train.parallel to ddp")
        return self

    def content_hash(self, data_fingerprint: str) -> str:
        """Return the hash of recipe and data (`TokenDataset.fingerprint`) that identifies the run, 16 hex digits.

        The hash excludes `name`, the keys in `UNHASHED_TRAIN_KEYS` and `DATA_ORIGIN` (the fingerprint identifies the
        data), keys with their neutral value in `NEUTRAL_VALUES`, and `model.init_from` (`model.init_sha256` identifies
        the weights).
        """
        recipe = self.model_dump(mode="json", exclude={"name": True, "data": DATA_ORIGIN, "train": UNHASHED_TRAIN_KEYS})
        for key, neutral in NEUTRAL_VALUES.items():
            *above, last = key.split(".")
            part = reduce(lambda part, name: part[name], above, recipe)
            if part.get(last, neutral) == neutral:
                part.pop(last, None)
        del recipe["model"]["init_from"]
        hashed = {"recipe": recipe, "data": data_fingerprint}
        return hashlib.sha256(json.dumps(hashed, sort_keys=True).encode()).hexdigest()[:16]

    def to_yaml(self) -> str:
        """Return the recipe as YAML, with the default values included."""
        return yaml.safe_dump(self.model_dump(mode="json"), sort_keys=False)


def recipe_values(name: str) -> dict[str, Any]:
    """Read the keys and values of a recipe file or of a shipped recipe, such as `tiny`, before validation.

    Raises:
        InputError: if there is no such file or shipped recipe, the file cannot be read as UTF-8, or the recipe is not a
            YAML mapping.
    """
    shipped = resources.files("sinklab") / "recipes"
    file = Path(name) if Path(name).is_file() else shipped / f"{name.removesuffix('.yaml')}.yaml"
    if not file.is_file():
        known = sorted(one.name.removesuffix(".yaml") for one in shipped.iterdir() if one.name.endswith(".yaml"))
        raise InputError(f"recipe {name} not found: use a YAML file or one of {', '.join(known)}")
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"cannot read {name}: {error}") from error
    try:
        values = parse_yaml(text)
    except ValueError as error:
        raise InputError(f"{name} is not valid YAML: {error}") from error
    if not isinstance(values, dict):
        found = "nothing" if values is None else f"a {type(values).__name__}"
        raise InputError(f"{name} must contain a mapping of recipe keys, not {found}")
    return values


def load_recipe(name: str, overrides: Iterable[str] = ()) -> Recipe:
    """Read a recipe file or a shipped recipe and apply `KEY=VALUE` overrides, outermost keys first.

    This order selects a kind before its values are set.

    Raises:
        InputError: as `recipe_values`, `parse_override` and `build_recipe`.
    """
    overlays = [parse_override(text) for text in sorted(overrides, key=_depth)]
    return build_recipe(recipe_values(name), *overlays, origin=name)


def build_recipe(values: Mapping[str, Any], *overlays: Mapping[str, Any], origin: str = "recipe") -> Recipe:
    """Build a validated recipe from nested values and overlays, which are merged in order (`merge`).

    Args:
        origin: name of the recipe in error messages.

    Raises:
        InputError: if a key, type or combination is invalid, or a required key is not set; the message names the field.
    """
    merged: dict[str, Any] = {}
    try:
        for overlay in (values, *overlays):
            merged = merge(merged, overlay)
    except ValueError as error:
        raise InputError(f"{origin} is not a valid recipe:\n  {error}") from error
    missing = [key for key, value in leaves(merged).items() if value == MUST_BE_SET]
    if missing:
        raise InputError(f"{origin} requires a value for {missing[0]}: add --set {missing[0]}=VALUE or edit the file")
    try:
        return Recipe.model_validate(merged)
    except ValidationError as error:
        raise InputError(_explain(error, origin)) from error


def _depth(override: str) -> int:
    """Return the nesting depth of an override's key; a discriminator has the depth of its union."""
    *above, last = override.partition("=")[0].split(".")
    return len(above) + (last not in KINDS)


def parse_override(text: str) -> dict[str, Any]:
    """Parse `a.b.c=value` into nested mappings. The value is YAML, except that a text such as 3e-3 becomes a float.

    Raises:
        InputError: if the text is not of this form, or the value is not YAML.
    """
    key, equals, value = text.partition("=")
    if not equals or not all(key.split(".")):
        raise InputError(f"--set {text}: expected KEY=VALUE with a dotted key, for example --set optim.lr=3e-3")
    try:
        parsed = parse_yaml(value)
    except ValueError as error:
        raise InputError(f"--set {text}: the value is not valid YAML: {error}") from error
    if isinstance(parsed, str):
        with suppress(ValueError):  # YAML 1.1 reads 3e-3 as a string
            parsed = float(parsed)
    *above, last = key.split(".")
    return reduce(lambda below, part: {part: below}, reversed(above), {last: parsed})


Schema = Mapping[str, Any]
"""A node of a JSON schema."""


@cache
def recipe_schema() -> Schema:
    """Return the JSON schema of a recipe."""
    return Recipe.model_json_schema()


def members(node: Schema) -> list[Schema]:
    """Return the schemas of all types that a schema allows: the members of a union, or the only type."""
    if union := node.get("oneOf") or node.get("anyOf"):
        return [member for one in union for member in members(one)]
    return [recipe_schema()["$defs"][node["$ref"].rpartition("/")[2]] if "$ref" in node else node]


def _field(node: Schema, key: str) -> Schema | None:
    """Return the schema of a key; None if no type that the node allows has the key."""
    found = (member["properties"][key] for member in members(node) if key in member.get("properties", ()))
    return next(found, None)


def _discriminator(field: Schema) -> str | None:
    """Return the discriminator key of a union; None for other fields."""
    nodes = (field, *field.get("anyOf", ()))
    return next((node["discriminator"]["propertyName"] for node in nodes if "discriminator" in node), None)


def merge(
    base: Mapping[str, Any], overlay: Mapping[str, Any], node: Schema | None = None, path: tuple[str, ...] = ()
) -> dict[str, Any]:
    """Return a copy of `base` with `overlay` merged into it recursively.

    A union may be set to the name of a kind. If the kind changes, the values of the old kind are dropped.

    Args:
        node: schema of `base`; default: the schema of a recipe.
        path: keys that lead to `base` in the recipe, for messages.

    Raises:
        ValueError: if a section is set to a plain value, or to null where it is required; the message names it.
    """
    merged = dict(base)
    for key, value in overlay.items():
        field = _field(recipe_schema() if node is None else node, key) or {}
        tag = _discriminator(field)
        if tag and isinstance(value, str):
            value = {tag: value}
        if isinstance(value, Mapping):
            old = merged.get(key)
            old = dict(old) if isinstance(old, Mapping) else {}
            if tag and field.get("default"):
                old = {tag: field["default"][tag]} | old
            changed = tag is not None and value.get(tag, old.get(tag)) != old.get(tag)
            value = merge({} if changed else old, value, field, (*path, key))
        else:
            types = [one for one in members(field) if value is None or one.get("type") != "null"]
            if all("properties" in one for one in types):
                where, known = ".".join((*path, key)), ", ".join(types[0]["properties"])
                got = "null" if value is None else f"{value!r}"
                kinds = f"one of {', '.join(kind for one in types for kind in _kinds(one))}, or " if tag else ""
                raise ValueError(f"{where} must be {kinds}a section with keys such as {known} (got {got})")
        merged[key] = value
    return merged


def _explain(error: ValidationError, origin: str) -> str:
    lines = []
    for item in error.errors():
        where = ".".join(_walk(item["loc"])[0]) or "the recipe"
        reason = item["msg"].removeprefix("Value error, ")
        if item["type"] == "extra_forbidden":
            above, here = _walk(item["loc"][:-1])
            allowed = here.get("properties", ())
            reason = f"unknown key; allowed here: {', '.join(allowed)}" if allowed else "unknown key"
            field = reduce(lambda node, key: _field(node, key) or {}, above, recipe_schema())
            kinds = [
                kind for one in members(field) if item["loc"][-1] in one.get("properties", ()) for kind in _kinds(one)
            ]
            if kinds and (tag := _discriminator(field)):
                reason += f". It is a key of {', '.join(kinds)}: set {'.'.join([*above, tag])} too"
        elif item["type"] == "union_tag_invalid" and "ctx" in item:
            tag, kinds = (item["ctx"][part].replace("'", "") for part in ("discriminator", "expected_tags"))
            reason = f"unknown {tag} {item['ctx']['tag']!r}; allowed here: {kinds}"
        elif item["type"] not in ("value_error", "missing"):
            reason += f" (got {item['input']!r})"
        lines.append(f"  {where}: {reason}")
    return f"{origin} is not a valid recipe:\n" + "\n".join(lines)


def _walk(path: tuple[int | str, ...]) -> tuple[list[str], Schema]:
    """Return the recipe keys of a pydantic error location, and the schema at this location.

    Names of union members in the location are omitted. The schema is {} if the location is a union of several types.
    """
    here, kept = recipe_schema(), []
    for step in path:
        types = [one for one in members(here) if one.get("type") != "null"]
        below = _field(here, str(step))
        if below is None and isinstance(step, str) and len(types) > 1:
            here = next((one for one in types if step in _kinds(one)), {})
        else:
            kept.append(str(step))
            here = below or {}
    found = [one for one in members(here) if one.get("type") != "null"]
    return kept, found[0] if len(found) == 1 else {}


def _kinds(part: Schema) -> list[str]:
    return [field["const"] for key, field in part.get("properties", {}).items() if key in KINDS and "const" in field]
