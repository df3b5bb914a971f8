"""Overlays by name: every kind of every choice once, and the values at which an intervention changes nothing.

An overlay is laid over a base recipe (`sinklab.train.recipe.build_recipe`). Those here fit any model whose width over
heads is a multiple of 4, and any context above 8.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

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


def _operation(kind: str, may_diverge: bool = False, **values: Any) -> Variant:
    return Variant({"model": {"attention": {"operation": {"kind": kind, **values}}}}, may_diverge)


def _bias(kind: str, **values: Any) -> Variant:
    return _model(attention={"bias": {"kind": kind, **values}})


def _mask(kind: str, **values: Any) -> Variant:
    return _model(attention={"mask": {"kind": kind, **values}})


VARIANTS: dict[str, Variant] = {
    "softmax": Variant({}),
    # positions (table 3)
    **{f"position_{kind}": _model(position=kind) for kind in ("none", "absolute", "learnable", "t5", "alibi")},
    "position_relative": Variant({"model": {"position": "relative"}}, may_diverge=True),
    # norms, feed-forward, heads, gates
    "norm_post": _model(norm={"placement": "post"}),
    "norm_sandwich": _model(norm={"placement": "sandwich"}),
    "norm_layernorm": _model(norm={"kind": "layernorm"}),
    "norm_dynamic_tanh": _model(norm={"kind": "dynamic_tanh"}),
    "qk_norm": _model(norm={"qk_norm": True}),
    **{f"ffn_{kind}": _model(ffn=kind) for kind in ("relu", "gelu", "swish", "reglu", "geglu")},
    "heads_1": _model(heads=1),
    "multi_query": _model(kv_heads=1),
    "heads_summed": _model(head_outputs="sum"),
    "gate_head": _model(gate="head"),
    "gate_element": _model(gate="element"),
    "gate_value": _model(gate="value"),
    "init_torch": _model(init="torch"),
    # biases (tables 4, 5, 12, 13)
    "sink_token": _bias("sink_token"),
    "k_biases": _bias("k"),
    "k_biases_shared": _bias("k", shared=True),
    "k_biases_one_dim": _bias("k", learnable_dims=1),
    "k_biases_fixed_first": _bias("k", value={"direction": "first", "norm": 1.0}),
    "k_biases_fixed_uniform": _bias("k", value={"direction": "uniform", "norm": 5.0}),
    "kv_biases": _bias("kv"),
    "kv_biases_shared": _bias("kv", shared=True),
    "v_biases": _bias("v"),
    "sink_logit": _bias("sink_logit"),
    "off_by_one": _bias("off_by_one"),
    # operations (tables 6, 14, 15, figure 29)
    "softmax_sums_to_2": _operation("softmax", alpha=2.0),
    "softmax_sums_to_a_tenth": _operation("softmax", alpha=0.1),
    "softmax_p_half": _operation("softmax", p=0.5),
    "softmax_p_2": _operation("softmax", may_diverge=True, p=2.0),
    "softcap": _model(attention={"softcap": 30.0}),
    "sigmoid": _operation("sigmoid"),
    "sigmoid_normalised": _operation("sigmoid", normalised=True),
    "sigmoid_p_2": _operation("sigmoid", normalised=True, p=2.0),
    "elu1": _operation("elu1"),
    "elu1_normalised": _operation("elu1", may_diverge=True, normalised=True),
    "relu": _operation("relu"),
    "relu_normalised": _operation("relu", normalised=True),
    "elu_kernel_normalised": _operation("elu_kernel", normalised=True),
    "elu_kernel": _operation("elu_kernel", may_diverge=True),
    "identity_normalised": _operation("identity", may_diverge=True, normalised=True),
    "identity": _operation("identity", may_diverge=True),
    "mlp_normalised": _operation("mlp", may_diverge=True, normalised=True),
    "mlp": _operation("mlp", may_diverge=True),
    "clipped_softmax": _operation("clipped_softmax"),
    "softpick": _operation("softpick"),
    "elastic_softmax": _operation("elastic_softmax", start=-1.0),
    "differential": _operation("differential"),
    "differential_constant": _operation("differential", lambda_init=0.8),
    # masks and losses
    "window": _mask("window", width=8),
    "prefix": _mask("prefix", length=5),
    "prefix_elu_kernel": _model(
        attention={"operation": {"kind": "elu_kernel", "normalised": True}, "mask": {"kind": "prefix", "length": 5}}
    ),
    "document": _mask("document"),
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

EVERYTHING = 2**20  # beyond any context

NEUTRAL: dict[str, Neutral] = {
    "model.attention.operation.alpha": Neutral("1", _operation("softmax", alpha=1.0).overlay),
    "model.attention.operation.p": Neutral("1", _operation("softmax", p=1.0).overlay),
    "model.attention.operation.gamma": Neutral("0, zeta 1", _operation("clipped_softmax", gamma=0.0).overlay),
    "model.attention.bias.norm": Neutral(
        "0",
        _bias("k", value={"direction": "first", "norm": 0.0}).overlay,
        against=_bias("k").overlay,
    ),
    "model.attention.mask.width": Neutral("the context or more", _mask("window", width=EVERYTHING).overlay),
    "model.attention.mask.length": Neutral("1", _mask("prefix", length=1).overlay),
    "model.attention.mask": Neutral("document, on text without EOS", _mask("document", eos_id=EVERYTHING).overlay),
    "model.head_outputs": Neutral(
        "concat, or sum with one head", {"model": {"heads": 1, "head_outputs": "sum"}}, against={"model": {"heads": 1}}
    ),
    "schedule.decay_fraction": Neutral("0", {"schedule": {"shape": "wsd", "decay_fraction": 0.0}}),
    "schedule.min_lr": Neutral("optim.lr", {"schedule": {"shape": "cosine", "min_lr": 3e-3}}),
    "optim.clip": Neutral("null", {"optim": {"clip": None}}, against={"optim": {"clip": 1e9}}),
}
