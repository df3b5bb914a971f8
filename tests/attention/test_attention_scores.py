"""Terms and factors of attention scores: scalable softmax, shifted sigmoid, forgetting."""

import math

import pytest
import torch
from attention_cases import H, T, core_of, documents, log_kept, qkv
from closeness import assert_close

from sinklab.attention.config import AttentionConfig
from sinklab.attention.layer_call import AttentionCore
from sinklab.train.recipe import load_recipe

SHIFT = "model.attention.operation={{kind: sigmoid, shift: {}}}"


def core_with(operation: dict[str, object], **others: object) -> AttentionCore:
    return core_of(AttentionConfig.model_validate({"operation": operation, **others}))


def test_scalable_softmax_is_softmax_of_scores_times_s_log_n() -> None:
    """n^(s z) / sum n^(s z), the paper's form, with as many keys as the query sees."""
    core = core_with({"kind": "scalable_softmax"})
    q, k, _ = (x.detach() for x in qkv())
    scale = core.get_parameter("learned.scale")
    z = q @ k.repeat_interleave(2, 1).mT / math.sqrt(q.shape[-1])
    for rows in core.layer_call(q, k, k).rows():
        for t in range(rows.block.start, rows.block.stop):
            powers = (t + 1) ** (scale[:, None] * z[:, :, t, : t + 1])
            ours = rows.weights_BHQS[:, :, t - rows.block.start, : t + 1]
            assert_close(ours, powers / powers.sum(-1, keepdim=True), 1e-11)


def test_scalable_softmax_with_scale_zero_and_offset_one_is_softmax() -> None:
    core, plain = core_with({"kind": "scalable_softmax", "offset": 1.0}), core_with({"kind": "softmax"})
    torch.nn.init.zeros_(core.get_parameter("learned.scale"))
    torch.nn.init.ones_(core.get_parameter("learned.offset"))
    assert_close(core(*qkv()), plain(*qkv()), 1e-11)


@pytest.mark.parametrize(
    ("others", "expected"),
    [
        ({}, list(range(1, T + 1))),
        ({"mask": {"kind": "window", "width": 3}}, [1, 2, *[3] * (T - 2)]),
        ({"mask": {"kind": "document"}}, [1, 2, 3, 4, 1, 2, 3, 4, 5, 1, 2, 3, 4]),
        ({"bias": {"kind": "kv"}}, list(range(2, T + 2))),
        ({"bias": {"kind": "off_by_one"}}, list(range(2, T + 2))),
    ],
    ids=str,
)
def test_scalable_softmax_counts_the_keys_that_a_query_sees(others: dict[str, object], expected: list[int]) -> None:
    core = core_with({"kind": "scalable_softmax"}, **others)
    q, k, _ = (x.detach() for x in qkv())
    found = core.layer_call(q, k, k, documents() if core.by_document else None).call.keys_per_row()
    assert found[0].tolist() == [expected]


def test_scalable_softmax_starts_with_scale_0_168_and_the_offset_of_its_config() -> None:
    learned = AttentionConfig.model_validate({"operation": {"kind": "scalable_softmax", "offset": 0.7}})
    parameters = dict(AttentionCore(learned, H, 8).named_parameters())
    assert parameters["learned.scale"].tolist() == pytest.approx([0.168] * H)
    assert parameters["learned.offset"].tolist() == pytest.approx([0.7] * H)
    assert 1 / (math.lgamma(1025) / 1024) == pytest.approx(0.168, abs=5e-4)


def test_a_shifted_sigmoid_of_small_scores_sums_to_about_one() -> None:
    """The row sums of scores near zero: n / 2 without a shift, n / (n + 1) by row, t / (context + 1) by context."""
    queries, keys, values = (0 * x.detach() for x in qkv())
    sizes = torch.arange(1, T + 1, dtype=torch.float64)
    expected = {"none": sizes / 2, "row": sizes / (sizes + 1), "context": sizes / (T + 1)}
    for shift, sums in expected.items():
        core = core_with({"kind": "sigmoid", "shift": shift})
        assert_close(core(queries, keys, values + 1)[0, 0, :, 0], sums, 1e-12)


def test_a_learned_shift_starts_at_minus_the_logarithm_of_the_context() -> None:
    config = AttentionConfig.model_validate({"operation": {"kind": "sigmoid", "shift": "learned"}})
    core = AttentionCore(config, 2, 8, heads=H, context=64)
    fixed = AttentionConfig.model_validate({"operation": {"kind": "sigmoid", "shift": "context"}})
    draw = torch.Generator().manual_seed(0)
    q, k, v = torch.randn(3, 2, H, 9, 8, generator=draw, dtype=torch.float64)
    assert_close(core.double()(q, k, v), AttentionCore(fixed, 2, 8, heads=H, context=64)(q, k, v), 1e-12)
    assert core.get_parameter("learned.shift").tolist() == [0.0] * H, "so that weight decay leads back to that"


def test_a_shift_of_minus_log_context_needs_the_context() -> None:
    config = AttentionConfig.model_validate({"operation": {"kind": "sigmoid", "shift": "context"}})
    with pytest.raises(AssertionError, match="with shift context needs the context"):
        AttentionCore(config, 2, 8)


def test_the_hash_of_a_recipe_without_a_shift_is_that_of_earlier_versions() -> None:
    plain = load_recipe("tiny-128", ["model.attention.operation=sigmoid"])
    assert plain.content_hash("d") == "fcdcc00b64d5c090"
    assert load_recipe("tiny-128", [SHIFT.format("none")]).content_hash("d") == plain.content_hash("d")
    assert load_recipe("tiny-128", [SHIFT.format("context")]).content_hash("d") != plain.content_hash("d")


def test_keys_fade_by_the_product_of_the_gates_after_them() -> None:
    """exp(z) times f_(s+1) .. f_t, over the row's sum, gate by gate; the bias key does not fade."""
    core = core_with({"kind": "forgetting"}, bias={"kind": "kv"})
    q, k, _ = (x.detach() for x in qkv())
    sums = log_kept().detach()
    gates = sums.diff(dim=1, prepend=torch.zeros_like(sums[:, :1])).exp()
    z = q @ k.repeat_interleave(2, 1).mT / math.sqrt(q.shape[-1])
    key = core.bias.key_per_head()
    assert key is not None
    to_bias = torch.exp((q * key[:, None]).sum(-1) / math.sqrt(q.shape[-1]))
    for rows in core.layer_call(q, k, k, None, sums).rows():
        assert rows.bias_BHQ is not None
        for t in range(rows.block.start, rows.block.stop):
            left = torch.stack([gates[:, s + 1 : t + 1].prod(1) for s in range(t + 1)], -1)
            weights = torch.cat((to_bias[:, :, t, None], left * torch.exp(z[:, :, t, : t + 1])), -1)
            ours = torch.cat(
                (
                    rows.bias_BHQ[:, :, t - rows.block.start, None],
                    rows.weights_BHQS[:, :, t - rows.block.start, : t + 1],
                ),
                -1,
            )
            assert_close(ours, weights / weights.sum(-1, keepdim=True), 1e-11)


def test_open_forget_gates_are_softmax() -> None:
    forgetting, plain = core_with({"kind": "forgetting"}), core_with({"kind": "softmax"})
    assert_close(forgetting(*qkv(), None, torch.zeros_like(log_kept())), plain(*qkv()), 1e-12)


def test_forgetting_without_gates_is_refused() -> None:
    with pytest.raises(AssertionError, match="requires gates"):
        core_with({"kind": "forgetting"})(*qkv())
