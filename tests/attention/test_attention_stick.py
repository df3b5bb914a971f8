"""Stick-breaking: shares of what is left, the rest as the implicit sink, and gradients in blocks."""

import math

import pytest
import torch
import torch.nn.functional as F
from attention_cases import H, T, assert_core_equals_formula, config_of, core_of, qkv
from closeness import assert_close
from torch import Tensor

from sinklab.attention.config import AttentionConfig
from sinklab.attention.layer_call import AttentionCore

RESTS = ("stick_breaking", "stick_breaking_rest_own", "stick_breaking_rest_learned")


def published(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    """Shares and rest as `sb_ref.py` of github.com/shawntan/stickbreaking-attention computes them, diagonal masked."""
    logits = q @ k.repeat_interleave(q.shape[1] // k.shape[1], 1).mT / math.sqrt(q.shape[-1])
    barred = torch.ones(T, T, dtype=torch.bool).triu()
    log_take = F.logsigmoid(logits).masked_fill(barred, -1e5)
    log_leave = F.logsigmoid(-logits).masked_fill(barred, 0)
    newer = torch.einsum("bhij,jk->bhik", log_leave, torch.ones(T, T, dtype=q.dtype).tril(-1))
    shares = (log_take + newer).exp()
    return shares, 1 - shares.sum(-1)


def matrix(core: AttentionCore, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    """A and the rest, from the rows of blocks."""
    shares, rest = torch.zeros(len(q), H, T, T, dtype=q.dtype), torch.zeros(len(q), H, T, dtype=q.dtype)
    for rows in core.layer_call(q, k, k).rows():
        here = slice(rows.block.start, rows.block.stop)
        shares[:, :, here, rows.block.low : rows.block.high] = rows.weights_BHQS
        assert rows.bias_BHQ is not None
        rest[:, :, here] = rows.bias_BHQ
    return shares, rest


@pytest.mark.parametrize("backend", ["chunked", "eager"])
def test_shares_and_rest_are_those_of_the_published_code(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sinklab.attention.query_blocks.SMALLEST_BLOCK", 4)
    monkeypatch.setattr("sinklab.attention.query_blocks.BLOCK_ELEMENTS", 1)
    core = core_of(config_of("stick_breaking", "none", "causal", backend=backend))
    q, k, v = (x.detach() for x in qkv())
    shares, rest = published(q, k)
    for ours, theirs in zip(matrix(core, q, k), (shares, rest), strict=True):
        assert_close(ours, theirs, 1e-11)
    assert_close(core(q, k, v), shares @ v.repeat_interleave(2, 1), 1e-11)


def test_the_rest_multiplies_the_value_that_the_config_selects() -> None:
    q, k, v = (x.detach() for x in qkv())
    dropped, own, learned = (core_of(config_of(name, "none", "causal")) for name in RESTS)
    rest = published(q, k)[1][..., None]
    assert_close(own(q, k, v) - dropped(q, k, v), rest * v.repeat_interleave(2, 1), 1e-11)
    vector = learned.get_parameter("learned.value")
    assert_close(learned(q, k, v) - dropped(q, k, v), rest * vector[:, None], 1e-11)


def test_the_vector_of_the_rest_starts_at_zero() -> None:
    config = AttentionConfig.model_validate({"operation": {"kind": "stick_breaking", "rest": "learned"}})
    assert not AttentionCore(config, 2, 8, heads=H).get_parameter("learned.value").any()


@pytest.mark.parametrize("operation", RESTS)
@pytest.mark.parametrize(("position", "mask"), [("slopes", "document"), ("table", "window"), ("table", "prefix")])
def test_stick_breaking_equals_its_formula_with_positions_and_masks(operation: str, position: str, mask: str) -> None:
    assert_core_equals_formula(core_of(config_of(operation, "none", mask, softcap=3.0), position))
    assert_core_equals_formula(core_of(config_of(operation, "v_biases", mask), position))


def test_the_first_query_has_no_key_and_all_of_its_attention_is_rest() -> None:
    core = core_of(config_of("stick_breaking", "none", "causal"))
    q, k, v = (x.detach() for x in qkv())
    assert (core(q, k, v)[:, :, 0] == 0).all()
    _, rest = matrix(core, q, k)
    assert (rest[..., 0] == 1).all()
    found = core.layer_call(q, k, k).importance()
    assert found.bias_BH is not None
    assert_close(found.bias_BH, rest.mean(-1), 1e-12)


def test_the_bias_share_with_a_sink_token_is_its_share_plus_the_rest() -> None:
    core = core_of(config_of("stick_breaking", "sink_token", "causal"))
    q, k, _ = (x.detach() for x in qkv())
    shares, rest = published(q, k)
    found = core.layer_call(q, k, k).importance()
    assert found.bias_BH is not None
    assert_close(found.bias_BH, (shares[..., 0] + rest)[..., 1:].mean(-1), 1e-11)


def test_scores_of_any_size_stay_finite_in_single_precision() -> None:
    core = core_of(config_of("stick_breaking", "none", "causal"), dtype=torch.float32)
    q, k, v = qkv(dtype=torch.float32)
    for size in (0.0, 1e-4, 300.0):
        out = core(q * size, k, v)
        gradients = torch.autograd.grad(out.sum(), (q, k, v))
        assert all(x.isfinite().all() for x in (out, *gradients))
