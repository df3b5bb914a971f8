"""Catalogue of interventions: the recipe keys that change a model or its training, with variants and neutral values.

The rows of the catalogue come from the recipe's JSON schema. A key that has its neutral value does not affect training.
A variant is an overlay on a base recipe (`sinklab.train.recipe.build_recipe`). The variants in this module need at
least two layers and a head dimension that is a multiple of 8. Their windows of 8 tokens have an effect only in contexts
longer than 8.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, get_args

from sinklab.attention.config import Choice, examples_of, kinds_of
from sinklab.schema import NeutralExample
from sinklab.train.recipe import Schema, members, recipe_schema

Overlay = Mapping[str, Any]


@dataclass(frozen=True)
class Variant:
    """An example of one or more interventions: an overlay on a base recipe.

    Attributes:
        overlay: nested recipe values that replace those of a base recipe.
        may_diverge: True if training may diverge: the intervention's paper reports it, or outputs are unbounded.
    """

    overlay: Overlay
    may_diverge: bool = False


def _model(**parts: Any) -> Variant:
    return Variant({"model": parts})


def _attention(choice: Choice, values: Mapping[str, object]) -> Overlay:
    return {"model": {"attention": {choice: values}}}


_WINDOW = {"kind": "window", "width": 8}

_UNCLIPPED: Overlay = {"optim": {"clip": None}}  # with more weights, the norm that clipping uses is rounded differently

CHOICES: tuple[Choice, ...] = get_args(Choice)

VARIANTS: dict[str, Variant] = {
    "softmax": Variant({}),
    # positional encodings (2410.10781, table 3)
    **{f"position_{kind}": _model(position=kind) for kind in ("none", "absolute", "learnable", "t5", "alibi")},
    "position_relative": Variant({"model": {"position": "relative"}}, may_diverge=True),
    # norms, feed-forward, heads, projections, linear layers, gates
    "norm_post": _model(norm={"placement": "post"}),
    "norm_sandwich": _model(norm={"placement": "sandwich"}),
    "norm_layernorm": _model(norm={"kind": "layernorm"}),
    "norm_single": _model(norm={"kind": "rmsnorm_single"}),
    "embedding_projected": _model(embedding="projected"),
    "norm_dynamic_tanh": _model(norm={"kind": "dynamic_tanh"}),
    "qk_norm": _model(norm={"qk_norm": True}),
    "head_norm": _model(norm={"head_norm": True}),
    "norms_per_head": _model(norm={"qk_norm": "per_head", "head_norm": "per_head"}),
    "gated_norm": _model(norm={"gate_rank": 16}),
    **{f"ffn_{kind}": _model(ffn=kind) for kind in ("relu", "gelu", "swish", "reglu", "geglu")},
    "heads_1": _model(heads=1),
    "multi_query": _model(kv_heads=1),
    "heads_summed": _model(head_outputs="sum"),
    "mla": _model(projection="latent"),
    "mla_compressed": _model(projection={"kind": "latent", "kv_rank": 16, "q_rank": 24}),
    "mla_sink_logit": _model(projection="latent", attention={"bias": "sink_logit"}),
    "linear_hybrid": _model(mixer="gated_delta"),
    "linear_hybrid_half": _model(mixer={"kind": "gated_delta", "every": 2}),
    "kimi_hybrid": _model(mixer="kimi_delta"),
    "rotary_quarter": _model(position={"kind": "rotary", "share": 0.25}),
    "pattern_windows": _model(attention={"mask": _WINDOW}, pattern={"every": 2, "mask": "causal"}),
    "pattern_sinks": _model(
        attention={"mask": _WINDOW, "bias": "sink_logit"}, pattern={"every": 2, "mask": "causal", "bias": "none"}
    ),
    "pattern_nope": _model(pattern={"every": 2, "position": "none"}),
    "gate_head": _model(gate="head"),
    "gate_channels": _model(gate={"kind": "head", "channels": 12}),
    "gate_element": _model(gate="element"),
    "gate_value": _model(gate="value"),
    "v_scale": _model(gate="v_scale"),
    "exclusive": _model(exclusive=True),
    "value_residual": _model(value_residual="fixed"),
    "value_residual_learned": _model(value_residual="learned"),
    "first_values": _model(value_residual={"kind": "fixed", "first": 1.0, "own": 0.0}),
    "init_torch": _model(init="torch"),
    # attention: the examples of its operations, biases and masks
    **{
        name: Variant(_attention(choice, example.values), example.may_diverge)
        for choice in CHOICES
        for name, example in examples_of(choice).items()
    },
    "softcap": _model(attention={"softcap": 30.0}),
    "forgetting_no_position": _model(position="none", attention={"operation": "forgetting"}),
    "stick_breaking_no_position": _model(position="none", attention={"operation": "stick_breaking"}),
    "sigmoid_shifted_sandwich": _model(
        attention={"operation": {"kind": "sigmoid", "shift": "context"}}, norm={"placement": "sandwich"}
    ),
    "prefix_elu_kernel": _model(
        attention={"operation": {"kind": "elu_kernel", "normalised": True}, "mask": {"kind": "prefix", "length": 5}}
    ),
    # data
    "bos": Variant({"data": {"bos": True}}),
    "fixed_token": Variant({"data": {"fixed_token": {"token_id": 1, "positions": [1]}}}),
    "random_tokens": Variant({"data": {"random_tokens": {"start": 0, "end": 2}}}),
    # auxiliary losses and optimisation
    "hidden_z": Variant({"losses": {"hidden_z": {"weight": 1e-4}}}),
    "tweo": Variant({"losses": {"tweo": {}}}),
    "weight_decay_half": Variant({"optim": {"weight_decay": 0.5}}),
    "sgd": Variant({"optim": {"name": "sgd", "lr": 0.1, "nesterov": True}}),
    "muon": Variant({"optim": {"name": "muon", "lr": 3e-3}}),
    "muon_clip": Variant({"optim": {"name": "muon", "lr": 3e-3, "qk_clip": 10.0}}),
    "ortho_adam": Variant({"optim": {"name": "ortho_adam", "lr": 3e-3}}),
    "outlier_safe": Variant(
        {"model": {"norm": {"kind": "rmsnorm_single"}, "embedding": "projected"}, "optim": {"name": "muon", "lr": 3e-3}}
    ),
    "schedule_flat": Variant({"schedule": {"shape": "flat"}}),
    "schedule_wsd": Variant({"schedule": {"shape": "wsd"}}),
}

NEUTRAL: dict[str, NeutralExample] = {
    **{
        f"{f'model.attention.{choice}.{key}'.removesuffix('.')} ({kind.chosen({})['kind']})": NeutralExample(
            one.said,
            _attention(choice, kind.chosen(one.values)),
            None if one.against is None else _attention(choice, kind.chosen(one.against)),
        )
        for choice in CHOICES
        for kind in kinds_of(choice)
        for key, one in kind.neutral.items()
    },
    "model.attention.operation.start (forgetting)": NeutralExample(
        "1000, with optim.clip null",
        {**_attention("operation", {"kind": "forgetting", "start": 1000.0}), **_UNCLIPPED},
        against=_UNCLIPPED,
    ),
    "model.head_outputs": NeutralExample(
        "concat, or sum with one head", {"model": {"heads": 1, "head_outputs": "sum"}}, against={"model": {"heads": 1}}
    ),
    "model.value_residual.first (fixed)": NeutralExample(
        "0, with own 1", {"model": {"value_residual": {"kind": "fixed", "first": 0.0, "own": 1.0}}}
    ),
    "schedule.decay_fraction": NeutralExample("0", {"schedule": {"shape": "wsd", "decay_fraction": 0.0}}),
    "schedule.min_lr": NeutralExample("optim.lr", {"schedule": {"shape": "cosine", "min_lr": 3e-3}}),
    "model.pattern.every": NeutralExample(
        "1, with the mask of model.attention", {"model": {"pattern": {"every": 1, "mask": "causal"}}}
    ),
    "model.mixer.every (gated_delta)": NeutralExample("1", {"model": {"mixer": {"kind": "gated_delta", "every": 1}}}),
    "losses.hidden_z.weight": NeutralExample("0", {"losses": {"hidden_z": {"weight": 0.0}}}),
    "losses.tweo.weight": NeutralExample("0", {"losses": {"tweo": {"weight": 0.0}}}),
    "model.mixer.every (kimi_delta)": NeutralExample("1", {"model": {"mixer": {"kind": "kimi_delta", "every": 1}}}),
    "optim.clip": NeutralExample("null", _UNCLIPPED, against={"optim": {"clip": 1e9}}),
    "optim.qk_clip": NeutralExample("null", {}, against={"optim": {"qk_clip": 1e9}}),
}
"""Neutral values by dotted recipe key. A key of one member of a union has the member's kind added: `key (kind)`."""

ROOTS = ("model", "data", "losses", "optim", "schedule")

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
    "data.column",
    "data.token_limit",
    "data.mix",
}
"""Recipe keys that are not interventions, such as sizes of model and data, tokenizer, text mix and initial weights."""

TYPES = {
    "boolean": "true | false",
    "integer": "integer",
    "number": "number",
    "string": "text",
    "null": "null",
    "object": "mapping",
}
BOUNDS = {"exclusiveMinimum": ">", "minimum": ">=", "exclusiveMaximum": "<", "maximum": "<="}


@dataclass(frozen=True)
class Intervention:
    """A row of the catalogue.

    Attributes:
        key: dotted key of a recipe.
        kind: discriminator value (`kind`, for optimisers `name`) of the union member that the row describes or that
            contains the key; None outside unions.
        values: allowed values of the key, as text.
        default: default value, as text; empty for a required key.
        neutral: value at which the key has no effect on training, as text; empty if no such value is known.
        explanation: description in one line.
    """

    key: str
    kind: str | None
    values: str
    default: str
    neutral: str
    explanation: str

    @property
    def is_kind(self) -> bool:
        """True if the row describes a member of a union, and not a field of a member."""
        return self.kind is not None and self.values == self.kind


def catalogue() -> list[Intervention]:
    """Return a row for each union member, optional section and field of the recipe, in the order of `ROOTS`.

    Keys in `NOT_INTERVENTIONS`, and the keys below them, are excluded.
    """
    properties = recipe_schema()["properties"]
    rows = [row for root in ROOTS for row in _rows(properties[root], root, None, baseline=True)]
    return [row for row in rows if not any(f"{row.key}.".startswith(f"{key}.") for key in NOT_INTERVENTIONS)]


def _rows(field: Schema, key: str, kind: str | None, baseline: bool) -> Iterator[Intervention]:
    """List the rows of a field of the recipe's schema and of its nested fields.

    Args:
        baseline: whether the default of the field is the baseline's value. It is not if the field belongs to a union
            member that is not the default, or to a section that is null by default.
    """
    types = members(field)
    parts = [one for one in types if "properties" in one]
    values, default = " | ".join(map(_value, types)), _written(field["default"]) if "default" in field else ""
    unchanged = default if baseline else ""
    if choice := field.get("discriminator"):
        tag = choice["propertyName"]
        chosen = field["default"][tag]
        for part in parts:
            name = part["properties"][tag]["const"]
            yield Intervention(key, name, name, chosen, chosen if baseline else "", _first_paragraph(part))
            yield from _rows_below(part, key, name, baseline and name == chosen)
        return
    if nested := next((one["discriminator"] for one in field.get("anyOf", ()) if "discriminator" in one), None):
        names = [
            one["properties"][nested["propertyName"]]["const"] for one in parts
        ]  # their fields have rows elsewhere
        yield Intervention(key, kind, " | ".join([*names, "null"]), default, unchanged, field.get("description", ""))
        return
    if not parts:
        known = NEUTRAL.get(f"{key} ({kind})") or NEUTRAL.get(key)
        neutral = known.said if known is not None else unchanged
        yield Intervention(key, kind, values, default, neutral, field.get("description", ""))
    elif len(types) > 1:
        explanation = field.get("description") or _first_paragraph(parts[0])
        yield Intervention(key, kind, values, default, unchanged, explanation)
    for part in parts:  # a section whose default is null is added by setting any of its fields
        yield from _rows_below(part, key, kind, baseline and field.get("default", part) is not None)


def _rows_below(part: Schema, key: str, kind: str | None, baseline: bool) -> Iterator[Intervention]:
    for name, field in part["properties"].items():
        if "const" not in field:  # `const` is the union's tag
            yield from _rows(field, f"{key}.{name}", kind, baseline)


def _value(member: Schema) -> str:
    if "properties" in member:
        return "{" + ", ".join(member["properties"]) + "}"
    if "enum" in member or "const" in member:
        return " | ".join(map(str, member.get("enum") or [member["const"]]))
    if member["type"] == "array":
        inner = [TYPES[one["type"]] for one in member.get("prefixItems") or [member["items"]]]
        return "[" + ", ".join(inner) + (", .." if "items" in member else "") + "]"
    form = "," if member["type"] == "integer" else "g"
    bounds = [f"{sign} {member[name]:{form}}" for name, sign in BOUNDS.items() if name in member]
    return " ".join([TYPES[member["type"]], " and ".join(bounds)]).rstrip()


def _written(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return f"{value:g}" if isinstance(value, float) else str(value)


def _first_paragraph(part: Schema) -> str:
    return " ".join(part.get("description", "").split("\n\n")[0].split())
