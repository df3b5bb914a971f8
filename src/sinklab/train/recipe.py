"""Recipe: the full specification of a run. A YAML file overrides the defaults, and `--set a.b.c=value` overrides both.

A discriminated union may be set to the name of a kind, which selects its defaults:
`--set model.attention.operation=sigmoid` means `{kind: sigmoid}`. Changing the kind drops the values of the old kind.

The sections of training are in this file: optimiser, schedule, training loop, sink metric.
"""

import hashlib
import json
import re
from collections.abc import Iterable, Mapping
from contextlib import suppress
from functools import cache, reduce
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import yaml
from pydantic import Field, ValidationError, field_validator, model_validator

from sinklab.data.loader import DataConfig, Selection
from sinklab.errors import InputError
from sinklab.files import parse_yaml
from sinklab.model.config import ModelConfig
from sinklab.model.loss import AddedLosses
from sinklab.schema import LARGEST, Part, leaves

Fraction = Annotated[float, Field(ge=0, lt=1)]
Parallel = Literal["ddp", "fsdp"]
Recompute = Literal["none", "blocks"]
Compile = Literal["auto", "on", "off", "loss"]

Clip = Annotated[float | None, Field(gt=0, description="maximum global gradient norm; null: no clipping")]


class AdamW(Part):
    """AdamW. Weight decay applies to all parameters, including norms, as in the paper's code (2410.10781)."""

    name: Literal["adamw"] = "adamw"
    lr: float = Field(default=4e-4, gt=0, description="peak learning rate")
    betas: tuple[Fraction, Fraction] = Field(default=(0.9, 0.95), description="AdamW's beta_1 and beta_2")
    eps: float = Field(default=1e-8, gt=0, description="AdamW's epsilon, added to the square root of the second moment")
    weight_decay: float = Field(default=0.1, ge=0, description="decoupled: w -= lr * weight_decay * w")
    clip: Clip = 1.0
    qk_clip: float | None = Field(
        default=None,
        gt=0,
        description="tau of QK-Clip: after each update whose largest logit S exceeds tau, the weights of queries and "
        "keys are multiplied by sqrt(tau / S), by KV head; null: no clipping",
    )


class Sgd(Part):
    """SGD with momentum, for gradients g and weights w: m = momentum * m + g + weight_decay * w, then w -= lr * m."""

    name: Literal["sgd"] = "sgd"
    lr: float = Field(default=0.1, gt=0, description="peak learning rate")
    momentum: float = Field(default=0.9, ge=0, lt=1, description="momentum factor")
    nesterov: bool = Field(default=False, description="w -= lr * (g + weight_decay * w + momentum * m)")
    weight_decay: float = Field(
        default=0.0, ge=0, description="coupled weight decay (L2): weight_decay * w is added to the gradient"
    )
    clip: Clip = 1.0

    @model_validator(mode="after")
    def _nesterov_has_momentum(self) -> Self:
        if self.nesterov and self.momentum == 0:
            raise ValueError("nesterov requires a momentum greater than 0")
        return self


class Muon(AdamW):
    """Muon for the linear layers of the blocks and `model.embedding: projected`, AdamW for all other parameters.

    The update of a matrix is the orthogonalised Nesterov momentum of its gradient (torch.optim.Muon, five Newton-Schulz
    iterations). The factor 0.2 * sqrt(max(rows, columns)) gives it the RMS of AdamW's updates (2502.16982), so that
    Muon and AdamW share learning rate and weight decay. A fused projection, such as QKV, is one matrix.
    """

    name: Literal["muon"] = "muon"  # type: ignore[assignment]  # parts are immutable
    lr: float = Field(default=4e-4, gt=0, description="peak learning rate of both Muon and AdamW")
    momentum: float = Field(default=0.95, ge=0, lt=1, description="Muon's momentum")


class OrthoAdam(AdamW):
    """AdamW with moments of rotated gradients (OrthoAdam, 2410.17174, algorithm 1).

    The gradient is multiplied by a fixed random orthogonal matrix per axis of the parameter, and the step by its
    transpose. Axes longer than 4,096, such as that of a large vocabulary, are not rotated. Weight decay is AdamW's.
    """

    name: Literal["ortho_adam"] = "ortho_adam"  # type: ignore[assignment]


OptimConfig = Annotated[AdamW | Sgd | Muon | OrthoAdam, Field(discriminator="name")]


class ScheduleConfig(Part):
    """Learning-rate schedule: linear warm-up to `optim.lr`, then one of three shapes."""

    shape: Literal["flat", "cosine", "wsd"] = Field(
        default="cosine",
        description="flat: constant; cosine: decay to min_lr; wsd: constant, then linear decay to min_lr",
    )
    warmup_steps: int = Field(default=100, ge=0, description="number of linear warm-up steps")
    min_lr: float = Field(default=0.0, ge=0, description="learning rate of cosine and wsd after the last step")
    decay_fraction: float = Field(default=0.2, ge=0, le=1, description="decay phase of wsd, as a fraction of all steps")


class TrainConfig(Part):
    """Settings of the training loop. A step is one update on `batch_size` sequences of `model.context` tokens.

    The model is evaluated at step 0, every `eval_every` steps and after the last step. Checkpoints are saved every
    `save_every` steps, after the last step and when training is stopped.
    """

    steps: int = Field(default=20000, ge=1)
    batch_size: int = Field(default=512, ge=1, le=LARGEST, description="global batch size, over all processes")
    micro_batch: int | None = Field(
        default=None,
        ge=1,
        description="micro-batch size of a process, for gradient accumulation; null: no accumulation",
    )
    eval_every: int = Field(default=1000, ge=1)
    eval_sequences: int = Field(
        default=256,
        ge=1,
        description="number of validation sequences for the loss; raised to metric.sequences, limited by the text",
    )
    save_every: int = Field(default=1000, ge=1)
    keep: int = Field(default=2, ge=1, description="number of newest checkpoints to keep")
    precision: Literal["auto", "fp32", "bf16"] = Field(
        default="fp32",
        description="bf16: autocast, weights stay float32; auto: bf16 if the device supports it natively, else fp32",
    )
    float32_matmul: Literal["highest", "high"] = Field(
        default="highest",
        description="precision of float32 matmuls in training on CUDA: highest is float32, high is TF32. Under bf16, "
        "the delta rule, kernels and the logits of bias keys still use float32 matmuls",
    )
    device: str = Field(default="auto", description="auto (CUDA if available), cpu, cuda or cuda:N")
    parallel: Parallel = Field(
        default="ddp",
        description="data parallelism over torchrun processes: ddp replicates the model, fsdp shards it; ignored with "
        "one process",
    )
    compile: Compile = Field(
        default="auto",
        description="torch.compile. on: compile each block before and after its attention core; auto: as on, but only "
        "on CUDA; loss: compile the whole training loss on one CPU process with a C++ compiler (faster in bf16), "
        "otherwise as auto",
    )
    recompute: Recompute = Field(
        default="none",
        description="blocks: activation checkpointing per block; none: store all activations",
    )
    peak_flops: float | None = Field(
        default=None,
        gt=0,
        description="peak FLOP/s of one device, for the MFU and --dry-run; null: bfloat16 peak of the GPU if known",
    )

    @field_validator("compile", mode="before")
    @classmethod
    def _on_and_off_are_no_booleans(cls, value: Any) -> Any:
        """Convert booleans back to "on" and "off", which YAML 1.1 parses as booleans."""
        return {True: "on", False: "off"}[value] if isinstance(value, bool) else value

    @model_validator(mode="after")
    def _whole_micro_batches(self) -> Self:
        if self.micro_batch and self.batch_size % self.micro_batch:
            raise ValueError(f"batch_size {self.batch_size} is not a multiple of micro_batch {self.micro_batch}")
        return self


class MetricConfig(Part):
    """Settings of the sink metric (2410.10781, section 3.2), for evaluations and the final measurement.

    The metric is computed on the first `length` tokens of the first `sequences` validation sequences.
    """

    eps: float = Field(
        default=0.3, gt=0, lt=1, description="threshold: a position is a sink if its importance exceeds it"
    )
    sequences: int = Field(default=100, ge=1)
    length: int = Field(default=64, ge=2, description="tokens per sequence, BOS included")


KINDS = ("kind", "name")
"""Keys that discriminate unions."""

MUST_BE_SET = "???"
"""Placeholder for a mandatory value, as in OmegaConf. An overlay or `--set` must replace it."""

DATA_ORIGIN = {"source", "tokenizer", "valid_fraction", "text_limit_bytes", *Selection.model_fields}
"""Keys of `data` that the run hash excludes, because the fingerprint of the prepared data covers them."""

UNHASHED_TRAIN_KEYS = {"micro_batch", "save_every", "keep", "device", "parallel", "compile", "recompute", "peak_flops"}
"""Keys of `train` that the run hash excludes: they affect results at most by rounding, and may change on resuming."""

NEUTRAL_VALUES: dict[str, object] = {
    "model.embedding": "plain",
    "model.init": {"kind": "declared"},
    "model.init_sha256": None,
    "model.attention.bias.start": None,
    "model.attention.bias.count": 1,
    "model.attention.operation.shift": "none",
    "model.gate.channels": None,
    "model.exclusive": False,
    "model.projection": {"kind": "full"},
    "model.mixer": {"kind": "attention"},
    "model.pattern": None,
    "model.position.share": 1.0,
    "model.value_residual": {"kind": "none"},
    "model.norm.head_norm": False,
    "model.norm.gate_rank": None,
    "optim.qk_clip": None,
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
        if getattr(self.optim, "qk_clip", None) is not None:
            self._check_qk_clip()
        return self

    def _check_qk_clip(self) -> None:
        model = self.model
        if model.attention.operation.kind != "softmax" or model.mixer.kind != "attention":
            raise ValueError("optim.qk_clip limits the logits of softmax attention in every layer: leave it out")
        if model.norm.qk_norm:
            raise ValueError("optim.qk_clip: model.norm.qk_norm normalises queries and keys: leave one of them out")
        if model.projection.kind != "full":
            raise ValueError("optim.qk_clip is implemented for model.projection full")
        if self.train.parallel == "fsdp":
            raise ValueError("optim.qk_clip requires whole weights: set train.parallel to ddp")

    def content_hash(self, data_fingerprint: str) -> str:
        """Return the hash of recipe and data (`TokenDataset.fingerprint`) that identifies the run, 16 hex digits.

        The hash excludes `name`, the keys in `UNHASHED_TRAIN_KEYS` and `DATA_ORIGIN` (the fingerprint identifies the
        data), keys with their neutral value in `NEUTRAL_VALUES`, and `model.init_from` (`model.init_sha256` identifies
        the weights).
        """
        recipe = self.model_dump(mode="json", exclude={"name": True, "data": DATA_ORIGIN, "train": UNHASHED_TRAIN_KEYS})
        recipe["train"]["micro_batch"] = None  # as in hashes made when it was part of them
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
            key, sections = item["loc"][-1], recipe_schema()["properties"].items()
            kinds = [kind for one in members(field) if key in one.get("properties", ()) for kind in _kinds(one)]
            if "." in str(key):
                reason = f"a dotted key, as in --set; write it nested: {_nested(str(key))}"
            elif kinds and (tag := _discriminator(field)):
                reason += f". It is a key of {', '.join(kinds)}: set {'.'.join([*above, tag])} too"
            elif near := [f"{section}.{key}" for section, node in sections if _field(node, str(key))]:
                reason += f". Did you mean {' or '.join(near)}?"
        elif item["type"] == "union_tag_invalid" and "ctx" in item:
            tag, kinds = (item["ctx"][part].replace("'", "") for part in ("discriminator", "expected_tags"))
            reason = f"unknown {tag} {item['ctx']['tag']!r}; allowed here: {kinds}"
        elif item["type"] not in ("value_error", "missing"):
            reason += f" (got {item['input']!r})"
        lines.append(f"  {where}: {reason}")
    return f"{origin} is not a valid recipe:\n" + "\n".join(lines)


def _nested(key: str) -> str:
    """Return a dotted key as a YAML mapping: `model: {gate: ..}` for model.gate."""
    return key.replace(".", ": {") + ": .." + "}" * key.count(".")


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
