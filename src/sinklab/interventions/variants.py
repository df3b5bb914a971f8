"""Overlays by name: every kind of every choice once, and the values at which an intervention changes nothing.

An overlay is laid over a base recipe (`sinklab.train.recipe.build_recipe`). Those here fit any model whose width over
heads is a multiple of 4, and any context above 8.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, get_args

from sinklab.attention.config import Choice, examples_of, kinds_of
from sinklab.schema import Kind

Overlay = Mapping[str, Any]


@dataclass(frozen=True)
class Variant:
    """A named overlay.

    Attributes:
        overlay: what changes.
        may_diverge: the paper reports that it does not train, or nothing keeps its outputs bounded: a run that stops
            as diverged is then a result, not a defect.
    """

    overlay: Overlay
    may_diverge: bool = False


@dataclass(frozen=True)
class Neutral:
    """A value at which an intervention is the baseline, bit for bit.

    Attributes:
        value: as a person writes or says it.
        overlay: the recipe's change with that value.
        against: the baseline it equals, as an overlay; the base recipe itself unless given.
    """

    value: str
    overlay: Overlay
    against: Overlay = field(default_factory=dict)


def _model(**parts: Any) -> Variant:
    return Variant({"model": parts})


def _attention(choice: Choice, values: Mapping[str, object]) -> Overlay:
    return {"model": {"attention": {choice: values}}}


def _attention_key(choice: Choice, key: str, kind: type[Kind]) -> str:
    return f"{f'model.attention.{choice}.{key}'.removesuffix('.')} ({kind.chosen({})['kind']})"


_UNCLIPPED: Overlay = {"optim": {"clip": None}}  # the norm that clips is rounded otherwise where there are more weights

CHOICES: tuple[Choice, ...] = get_args(Choice)

VARIANTS: dict[str, Variant] = {
    "softmax": Variant({}),
    # positions (table 3)
    **{f"position_{kind}": _model(position=kind) for kind in ("none", "absolute", "learnable", "t5", "alibi")},
    "position_relative": Variant({"model": {"position": "relative"}}, may_diverge=True),
    # norms, feed-forward, heads, projections, linear layers, gates
    "norm_post": _model(norm={"placement": "post"}),
    "norm_sandwich": _model(norm={"placement": "sandwich"}),
    "norm_layernorm": _model(norm={"kind": "layernorm"}),
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
    "gate_head": _model(gate="head"),
    "gate_element": _model(gate="element"),
    "gate_value": _model(gate="value"),
    "exclusive": _model(exclusive=True),
    "value_residual": _model(value_residual="fixed"),
    "value_residual_learned": _model(value_residual="learned"),
    "first_values": _model(value_residual={"kind": "fixed", "first": 1.0, "own": 0.0}),
    "init_torch": _model(init="torch"),
    # attention: what its operations, biases and masks declare themselves
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
    # optimisation
    "weight_decay_half": Variant({"optim": {"weight_decay": 0.5}}),
    "sgd": Variant({"optim": {"name": "sgd", "lr": 0.1, "nesterov": True}}),
    "muon": Variant({"optim": {"name": "muon", "lr": 3e-3}}),
    "schedule_flat": Variant({"schedule": {"shape": "flat"}}),
    "schedule_wsd": Variant({"schedule": {"shape": "wsd"}}),
}

NEUTRAL: dict[str, Neutral] = {
    **{
        _attention_key(choice, key, kind): Neutral(
            one.said,
            _attention(choice, kind.chosen(one.values)),
            against={} if one.against is None else _attention(choice, kind.chosen(one.against)),
        )
        for choice in CHOICES
        for kind in kinds_of(choice)
        for key, one in kind.neutral.items()
    },
    "model.attention.operation.start (forgetting)": Neutral(
        "1000, with optim.clip null",
        {**_attention("operation", {"kind": "forgetting", "start": 1000.0}), **_UNCLIPPED},
        against=_UNCLIPPED,
    ),
    "model.head_outputs": Neutral(
        "concat, or sum with one head", {"model": {"heads": 1, "head_outputs": "sum"}}, against={"model": {"heads": 1}}
    ),
    "model.value_residual.first (fixed)": Neutral(
        "0, with own 1", {"model": {"value_residual": {"kind": "fixed", "first": 0.0, "own": 1.0}}}
    ),
    "schedule.decay_fraction": Neutral("0", {"schedule": {"shape": "wsd", "decay_fraction": 0.0}}),
    "schedule.min_lr": Neutral("optim.lr", {"schedule": {"shape": "cosine", "min_lr": 3e-3}}),
    "model.mixer.every (gated_delta)": Neutral("1", {"model": {"mixer": {"kind": "gated_delta", "every": 1}}}),
    "optim.clip": Neutral("null", _UNCLIPPED, against={"optim": {"clip": 1e9}}),
}
"""By the dotted key that it is about, and behind it in brackets the kind of the choice that has the key."""
