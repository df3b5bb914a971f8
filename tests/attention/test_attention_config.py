"""Meaningless combinations are refused with the reason; neutral values give the baseline."""

from typing import Any

import pytest
import torch
from attention_cases import config_of, core_of, legal, qkv
from closeness import assert_close
from pydantic import ValidationError

from sinklab.attention.config import AttentionConfig

REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "window of nothing": ({"mask": {"kind": "window", "width": 0}}, "greater than or equal to 1"),
    "p-norm on a kernel": ({"operation": {"kind": "identity", "normalised": True, "p": 2}}, "Extra inputs are not"),
    "p-norm that does not divide": ({"operation": {"kind": "sigmoid", "p": 2}}, "set normalised to true"),
    "softcap on a kernel": (
        {"operation": {"kind": "mlp"}, "softcap": 5},
        "softcap acts on logits",
    ),
    "sink logit on a kernel": (
        {"operation": {"kind": "elu_kernel"}, "bias": {"kind": "sink_logit"}},
        "acts on logits",
    ),
    "a start on a kernel": (
        {"operation": {"kind": "elu_kernel"}, "bias": {"kind": "kv", "start": 0}},
        "bias.start acts on logits",
    ),
    "K biases without a row sum": ({"operation": {"kind": "sigmoid"}, "bias": {"kind": "k"}}, "change nothing"),
    "fixed value of norm 0": (
        {"operation": {"kind": "relu"}, "bias": {"kind": "k", "value": {"direction": "first", "norm": 0}}},
        "use bias kv",
    ),
    "off by one where zero counts nothing": (
        {"operation": {"kind": "softpick"}, "bias": {"kind": "off_by_one"}},
        "use bias sink_logit",
    ),
    "sdpa with softcap": ({"backend": "sdpa", "softcap": 5}, "use auto, chunked or eager"),
    "sdpa with alpha": ({"backend": "sdpa", "operation": {"kind": "softmax", "alpha": 2}}, "plain softmax only"),
    "clipping inwards": ({"operation": {"kind": "clipped_softmax", "zeta": 0.9}}, "greater than or equal to 1"),
    "a key in line for the rest": (
        {"operation": {"kind": "stick_breaking"}, "bias": {"kind": "kv"}},
        "the remaining attention: use operation.rest instead",
    ),
    "a logit in line for the rest": (
        {"operation": {"kind": "stick_breaking"}, "bias": {"kind": "sink_logit"}},
        "the remaining attention: use operation.rest instead",
    ),
    "flex with shares of what is left": (
        {"operation": {"kind": "stick_breaking"}, "backend": "flex"},
        "use auto, chunked or eager",
    ),
    "softcap of zero": ({"softcap": 0}, "greater than 0"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_meaningless_combinations_are_refused_with_the_reason(case: str) -> None:
    values, reason = REFUSED[case]
    with pytest.raises(ValidationError, match=reason):
        AttentionConfig.model_validate(values)


@pytest.mark.parametrize(
    ("values", "head_width", "on_scores", "reason"),
    [
        ({"bias": {"kind": "k", "learnable_dims": 9}}, 8, False, "learnable_dims 9 is above the head width 8"),
        ({"operation": {"kind": "differential"}}, 7, False, "7 is odd"),
        ({"operation": {"kind": "identity"}}, 8, True, "kernel without logits"),
        ({"backend": "sdpa"}, 8, True, "cannot add a position"),
    ],
)
def test_attention_that_does_not_fit_the_model_is_refused_with_the_reason(
    values: dict[str, Any], head_width: int, on_scores: bool, reason: str
) -> None:
    config = AttentionConfig.model_validate(values)
    with pytest.raises(ValueError, match=reason):
        config.check_fit(head_width, on_scores)


NEUTRAL: dict[str, dict[str, Any]] = {
    "alpha 1, p 1": {"operation": {"kind": "softmax", "alpha": 1, "p": 1}},
    "clipped softmax that does not stretch": {"operation": {"kind": "clipped_softmax", "zeta": 1, "gamma": 0}},
    "no softcap": {"softcap": None},
    "no bias": {"bias": {"kind": "none"}},
    "causal": {"mask": {"kind": "causal"}},
}


@pytest.mark.parametrize("backend", ["auto", "chunked"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("neutral", NEUTRAL)
def test_a_neutral_value_is_the_baseline_bit_for_bit(neutral: str, dtype: torch.dtype, backend: str) -> None:
    results = []
    for values in ({}, NEUTRAL[neutral]):
        core = core_of(AttentionConfig.model_validate({**values, "backend": backend}), dtype=dtype)
        q, k, v = qkv(dtype=dtype)
        out = core(q, k, v)
        results.append((out, *torch.autograd.grad(out.float().square().sum(), (q, k, v))))
        assert not core.proxy
    for baseline, other in zip(*results, strict=True):
        assert torch.equal(baseline, other)


# Another kernel, or another order of additions, computes these: equal to rounding, not to the bit.
NEARLY_NEUTRAL: dict[str, tuple[dict[str, Any], float]] = {
    "window as long as the sequence": ({"mask": {"kind": "window", "width": 13}}, 0.0),
    "prefix of one": ({"mask": {"kind": "prefix", "length": 1}}, 0.0),
    "elastic softmax with tau 0": ({"operation": {"kind": "elastic_softmax"}}, 0.0),
    "p-norm next to 1": ({"operation": {"kind": "softmax", "p": 1 + 1e-13}}, 0.0),
    "sink logit of minus infinity": ({"bias": {"kind": "sink_logit"}}, -1e9),
    "v bias of zero": ({"bias": {"kind": "v"}}, 0.0),
}


@pytest.mark.parametrize("neutral", NEARLY_NEUTRAL)
def test_a_neutral_value_on_another_path_is_the_baseline_to_rounding(neutral: str) -> None:
    values, parameter = NEARLY_NEUTRAL[neutral]
    inputs = qkv()
    core = core_of(AttentionConfig.model_validate(values))
    for tensor in core.parameters():
        torch.nn.init.constant_(tensor, parameter)
    baseline = core_of(AttentionConfig())
    assert_close(core(*inputs), baseline(*inputs), 1e-11)


def test_one_document_is_the_causal_mask() -> None:
    inputs = qkv()
    one = torch.zeros(2, 13, dtype=torch.long)
    torch.testing.assert_close(
        core_of(config_of("sigmoid", "none", "document"))(*inputs, one),
        core_of(config_of("sigmoid", "none", "causal"))(*inputs),
        rtol=0,
        atol=1e-12,
    )


def test_only_the_learned_dimensions_of_a_key_bias_are_parameters() -> None:
    core = core_of(config_of("softmax", "k_biases_two_dims", "causal"))
    key = core.bias.key_per_head()
    assert core.bias.key is not None
    assert key is not None
    assert core.bias.key.shape == (2, 2)
    assert key.shape == (4, 6)
    assert (key[:, 2:] == 0).all()


@pytest.mark.parametrize(
    ("bias", "expected"), [("k_biases_fixed_first", [1.0, 0, 0, 0, 0, 0]), ("k_biases_fixed_uniform", [5 / 6**0.5] * 6)]
)
def test_fixed_values_have_the_direction_and_norm_of_table_5(bias: str, expected: list[float]) -> None:
    value = core_of(config_of("softmax", bias, "causal")).bias.value_per_head()
    assert value is not None
    torch.testing.assert_close(value, torch.tensor([expected] * 4, dtype=torch.float64))


def test_positions_on_scores_are_accepted_for_differential_attention_and_not_for_kernels() -> None:
    assert legal("differential", "kv_biases", "window", 3.0, "table")
    assert not legal("identity", "kv_biases", "window", None, "table")
