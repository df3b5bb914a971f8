"""Every backend of the primitive computes what the eager specification computes, gradients included."""

import pytest
import torch
from torch import Tensor

from sinklab.attention import masks
from sinklab.attention.importance import score_rows, sum_rows
from sinklab.attention.operations.two_pass import DEFICIT, EXCESS
from sinklab.attention.primitive import Backend, attend, attend_output
from sinklab.attention.query_blocks import ScoreMatrix
from sinklab.attention.scores import Score, compose, log_elu_plus_one, log_magnitude, log_relu, log_sigmoid, softcap

MASKS = {
    "causal": masks.CAUSAL,
    "window_1": masks.Window(1),
    "window_7": masks.Window(7),
    "prefix_5": masks.Prefix(5),
    "sink_token": masks.Leading(masks.CAUSAL),
    "sink_token_window": masks.Leading(masks.Window(3)),
    "sink_token_prefix": masks.Leading(masks.Prefix(4)),
}
SCORES = {
    "softmax": None,
    "sigmoid": log_sigmoid(),
    "elu1": log_elu_plus_one(),
    "softcap": softcap(2.0),
    "softcap_sigmoid": compose(softcap(2.0), log_sigmoid()),
}
SHAPES = {"one_block": (2, 4, 4, 20, 20), "grouped": (2, 4, 2, 45, 45), "later_queries": (1, 2, 1, 7, 29)}


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of a few queries, so that short sequences cross block borders."""
    monkeypatch.setattr("sinklab.attention.query_blocks.SMALLEST_BLOCK", 8)
    monkeypatch.setattr("sinklab.attention.query_blocks.BLOCK_ELEMENTS", 1)


def tensors(shape: tuple[int, int, int, int, int], seed: int = 0, width: int = 6) -> tuple[Tensor, Tensor, Tensor]:
    """Float64 q (B, H, T, D), k (B, G, S, D), v (B, G, S, D + 2) that require gradients."""
    B, H, G, T, S = shape
    generator = torch.Generator().manual_seed(seed)
    sizes = ((B, H, T, width), (B, G, S, width), (B, G, S, width + 2))
    q, k, v = (torch.randn(size, generator=generator, dtype=torch.float64) for size in sizes)
    return (2 * q).requires_grad_(), k.requires_grad_(), v.requires_grad_()


def outcome(
    backend: Backend, qkv: tuple[Tensor, Tensor, Tensor], score: Score | None, mask: masks.Mask
) -> tuple[Tensor, ...]:
    """out, lse and the gradients of a loss that uses both."""
    out, lse = attend(ScoreMatrix(*qkv[:2], mask, score), qkv[2], backend)
    weight = torch.randn(out.shape, generator=torch.Generator().manual_seed(1), dtype=out.dtype)
    loss = (out * weight).sum() + (lse.clamp(min=-50) * weight[..., 0]).sum()
    return out.detach(), lse.detach(), *torch.autograd.grad(loss, qkv)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("score", SCORES)
def test_chunked_equals_eager(shape: str, mask: str, score: str) -> None:
    qkv = tensors(SHAPES[shape])
    chunked = outcome("chunked", qkv, SCORES[score], MASKS[mask])
    eager = outcome("eager", qkv, SCORES[score], MASKS[mask])
    for ours, reference in zip(chunked, eager, strict=True):
        torch.testing.assert_close(ours, reference, rtol=0, atol=1e-10)


@pytest.mark.parametrize("mask", MASKS)
def test_a_mask_is_plain_exactly_if_it_is_the_causal_one(mask: str) -> None:
    is_causal = torch.equal(MASKS[mask].block(0, 20, 0, 20, torch.device("cpu")), torch.ones(20, 20).tril().bool())
    assert MASKS[mask].plain == is_causal


@pytest.mark.parametrize("shape", ["one_block", "grouped"])
@pytest.mark.parametrize("mask", MASKS)
def test_sdpa_equals_eager_where_it_applies(shape: str, mask: str) -> None:
    q, k, v = tensors(SHAPES[shape])
    qkv = (q, k, v[..., : q.shape[-1]].detach().requires_grad_())
    for ours, reference in zip(
        outcome("sdpa", qkv, None, MASKS[mask]), outcome("eager", qkv, None, MASKS[mask]), strict=True
    ):
        torch.testing.assert_close(ours, reference, rtol=0, atol=1e-10)


def test_sdpa_refuses_what_it_cannot_compute() -> None:
    q, k, v = tensors(SHAPES["one_block"])
    with pytest.raises(ValueError, match="use backend auto, chunked or eager"):
        attend(ScoreMatrix(q, k, score=log_sigmoid()), v, "sdpa")


@pytest.mark.parametrize("score", SCORES)
def test_chunked_gradients_pass_gradcheck(score: str) -> None:
    qkv = tensors((1, 2, 1, 9, 9), width=2)

    def outputs(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        return attend(ScoreMatrix(q, k, score=SCORES[score]), v, "chunked")

    assert torch.autograd.gradcheck(outputs, qkv, fast_mode=True)


def test_tensors_of_a_score_function_get_gradients() -> None:
    def outcome_with_table(backend: Backend) -> tuple[Tensor, ...]:
        table = torch.randn(4, 45, generator=torch.Generator().manual_seed(2), dtype=torch.float64).requires_grad_()
        frozen = torch.full((4,), 0.5, dtype=torch.float64)
        score = Score(lambda z, b, h, q, k, t, f: z * f[h] + t[h, q - k], (table, frozen))
        q, k, v = tensors(SHAPES["grouped"])
        return *outcome(backend, tensors(SHAPES["grouped"]), score, masks.CAUSAL), *torch.autograd.grad(
            attend(ScoreMatrix(q, k, score=score), v, backend)[0].square().sum(), [table]
        )

    for ours, reference in zip(outcome_with_table("chunked"), outcome_with_table("eager"), strict=True):
        torch.testing.assert_close(ours, reference, rtol=0, atol=1e-10)


@pytest.mark.parametrize("backend", ["eager", "chunked"])
def test_a_query_that_sees_nothing_gives_zero_and_no_nan(backend: Backend) -> None:
    q, k, v = tensors((2, 2, 1, 12, 12))
    allowed = torch.ones(2, 1, 12, 12, dtype=torch.bool).tril()
    allowed[1, :, :5] = False
    out, lse, *gradients = outcome(backend, (q, k, v), None, masks.Dense(allowed))
    assert (out[1, :, :5] == 0).all()
    assert (lse[1, :, :5] == -torch.inf).all()
    assert all(g.isfinite().all() for g in gradients)


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("score", SCORES)
def test_column_sums_equal_those_of_the_matrix(mask: str, score: str) -> None:
    q, k, _ = tensors(SHAPES["grouped"])
    identity = torch.eye(45, dtype=torch.float64).expand(2, 2, -1, -1)
    matrix = ScoreMatrix(q, k, MASKS[mask], SCORES[score])
    expected = attend(matrix, identity, "eager")[0].tril().sum(-2)
    sums = sum_rows(score_rows(matrix), q, 45, MASKS[mask])
    torch.testing.assert_close(sums.keys_BHS, expected, rtol=0, atol=1e-10)


def test_column_sums_leave_out_queries_that_do_not_count_and_share_with_a_bias() -> None:
    q, k, _ = tensors(SHAPES["grouped"])
    counted = torch.rand(2, 45, generator=torch.Generator().manual_seed(3)) > 0.4
    bias = torch.randn(2, 4, 45, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    z = (q @ k.repeat_interleave(2, 1).mT) / 6**0.5
    z = z.masked_fill(~torch.ones(45, 45, dtype=torch.bool).tril(), -torch.inf)
    scores = torch.softmax(torch.cat([bias[..., None], z], -1), -1) * counted[:, None, :, None]
    sums = sum_rows(score_rows(ScoreMatrix(q, k), bias), q, 45, masks.CAUSAL, counted)
    torch.testing.assert_close(sums.keys_BHS, scores[..., 1:].sum(-2), rtol=0, atol=1e-10)
    torch.testing.assert_close(sums.bias_BH, scores[..., 0].sum(-1), rtol=0, atol=1e-10)


@pytest.mark.parametrize("score", [log_sigmoid(), log_elu_plus_one(), log_relu(), log_magnitude(), EXCESS, DEFICIT])
def test_the_similarity_of_a_score_is_its_exponential(score: Score) -> None:
    z = torch.linspace(-20, 20, 401, dtype=torch.float64)
    here = torch.zeros((), dtype=torch.long)
    assert score.similarity is not None
    torch.testing.assert_close(score.similarity(z, here, here, here, here), score(z, here, here, here, here).exp())


@pytest.mark.parametrize("score", [log_sigmoid(), log_elu_plus_one(), EXCESS, DEFICIT])
@pytest.mark.parametrize("size", [1e-3, 1.0, 200.0])
def test_row_sums_out_of_range_equal_eager_as_well(score: Score, size: float) -> None:
    q, k, v = tensors(SHAPES["grouped"])
    qkv = ((q * size).detach().requires_grad_(), k, v)
    for ours, reference in zip(
        outcome("chunked", qkv, score, masks.CAUSAL), outcome("eager", qkv, score, masks.CAUSAL), strict=True
    ):
        torch.testing.assert_close(ours, reference, rtol=1e-9, atol=1e-9)


def test_output_without_lse_is_the_same() -> None:
    q, k, v = tensors((1, 2, 1, 300, 300))
    fused, plain = attend_output(ScoreMatrix(q, k), v[..., :6]), attend(ScoreMatrix(q, k), v[..., :6], "eager")[0]
    torch.testing.assert_close(fused, plain, rtol=0, atol=1e-10)


def test_shapes_that_do_not_go_together_are_refused() -> None:
    q, k, v = tensors(SHAPES["one_block"])
    with pytest.raises(ValueError, match="do not match"):
        attend(ScoreMatrix(q[:, :3], k[:, :2]), v[:, :2])
