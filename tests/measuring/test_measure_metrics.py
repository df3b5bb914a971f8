"""The metric against a brute-force loop, whole and streamed, padded or not."""

import pytest
import torch
from closeness import assert_close
from hypothesis import given, settings
from hypothesis import strategies as st
from measure_reference import importance_by_loops, sink_rate_by_loops, uniform_ratio_by_loops

from sinklab.attention.importance import first_to_rest, importance_from_sums
from sinklab.attention.masks import real_tokens
from sinklab.errors import InputError, SinklabError
from sinklab.measuring.accumulate import Accumulator
from sinklab.measuring.records import Batch

SHAPES = st.tuples(st.integers(1, 5), st.integers(1, 3), st.integers(1, 3), st.integers(1, 6))
SEEDS = st.integers(0, 2**31 - 1)


def _causal_attention(*shape: int, seed: int) -> torch.Tensor:
    logits = 3 * torch.randn(*shape, shape[-1], generator=torch.Generator().manual_seed(seed))
    future = torch.ones(shape[-1], shape[-1], dtype=torch.bool).triu(1)
    return logits.masked_fill(future, -torch.inf).softmax(-1)


def _batch(importance_NLHT: torch.Tensor, valid_NT: torch.Tensor | None = None, loss: float = 0.0) -> Batch:
    N, L, _, T = importance_NLHT.shape
    norms = torch.ones(L, N, T)
    recorded = {"importance_BHT": importance_NLHT.transpose(0, 1), "key_norm_BT": norms, "value_norm_BT": norms}
    valid_NT = torch.ones(N, T, dtype=torch.bool) if valid_NT is None else valid_NT
    return Batch(recorded, valid_NT, torch.tensor(loss), N * (T - 1))


def _sink_rate(importance_NLHT: torch.Tensor, eps: float) -> list[float] | None:
    totals = Accumulator((eps,), importance_NLHT.shape[-1])
    totals.add(_batch(importance_NLHT))
    return totals.sink_rate()


@settings(deadline=None, max_examples=40)
@given(SHAPES, SEEDS, st.sampled_from([0.05, 0.3, 0.7]))
def test_the_metric_is_the_papers_formula(shape: tuple[int, int, int, int], seed: int, eps: float) -> None:
    N, L, H, T = shape
    attention = _causal_attention(N, L, H, T, seed=seed)
    sums_NLHT = attention.sum(-2)
    alpha = torch.stack([importance_from_sums(sums_NLHT[:, i], torch.full((N,), T)) for i in range(L)], 1)
    expected = torch.stack([importance_by_loops(attention[n]) for n in range(N)])
    assert_close(alpha, expected)
    assert _sink_rate(expected, eps) == pytest.approx(sink_rate_by_loops(expected, eps), abs=1e-12)


@settings(deadline=None, max_examples=40)
@given(SHAPES, SEEDS, st.integers(1, 5))
def test_streaming_in_batches_gives_what_all_at_once_gives(
    shape: tuple[int, int, int, int], seed: int, batch: int
) -> None:
    alpha = torch.rand(*shape, generator=torch.Generator().manual_seed(seed))
    totals = Accumulator((0.3,), shape[-1])
    for start in range(0, shape[0], batch):
        totals.add(_batch(alpha[start : start + batch]))
    mean = totals.mean("importance_BHT")
    assert mean is not None
    assert totals.sink_rate() == pytest.approx(sink_rate_by_loops(alpha, 0.3), abs=1e-12)
    assert totals.uniform_ratio() == pytest.approx(uniform_ratio_by_loops(alpha), rel=1e-6)
    assert_close(mean.float(), alpha.mean(0))
    torch.testing.assert_close(torch.cat(totals.first), alpha[..., 0])


@settings(deadline=None, max_examples=40)
@given(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 5), st.integers(0, 3)), min_size=1, max_size=4), SEEDS)
def test_positions_are_counted_from_the_first_real_token(rows: list[tuple[int, int, int]], seed: int) -> None:
    width = max(sum(row) for row in rows)
    mask = torch.zeros(len(rows), width)
    for row, (left, count, _) in zip(mask, rows, strict=True):
        row[left : left + count] = 1
    values = torch.rand(len(rows), 2, width, generator=torch.Generator().manual_seed(seed))
    real = real_tokens(mask)
    aligned = real.align(values)
    assert real.padded == bool((mask == 0).any())
    for row, (left, count, _) in enumerate(rows):
        assert torch.equal(aligned[row, :, :count], values[row, :, left : left + count])
        assert not aligned[row, :, count:].any()


def test_a_position_that_only_some_sequences_have_is_averaged_over_those() -> None:
    alpha = torch.full((2, 1, 1, 3), 0.5)
    valid = torch.tensor([[True, True, True], [True, False, False]])
    alpha[1, 0, 0, 1:] = 0
    totals = Accumulator((0.3,), 3)
    totals.add(_batch(alpha, valid))
    assert totals.sink_rate() == [100, 100, 100]
    mean = totals.mean("importance_BHT")
    assert mean is not None
    assert mean.flatten().tolist() == [0.5, 0.5, 0.5]


@pytest.mark.parametrize("counts", [(64, 64), (1024, 1024), (64, 9)])
def test_uniform_attention_has_a_ratio_of_one_at_any_length_and_padding(counts: tuple[int, int]) -> None:
    longest = max(counts)
    valid = torch.stack([torch.arange(longest) < count for count in counts])
    uniform = torch.zeros(2, 1, 1, longest)
    for row, count in enumerate(counts):
        matrix = torch.ones(count, count).tril() / torch.arange(1, count + 1)[:, None]
        uniform[row, ..., :count] = matrix.sum(0) / torch.arange(count, 0, -1)
    totals = Accumulator((0.3,), longest)
    totals.add(_batch(uniform, valid))
    assert totals.uniform_ratio() == pytest.approx([1.0] * longest, rel=1e-4)


def test_the_threshold_is_strict_and_applied_before_averaging() -> None:
    alpha = torch.tensor([0.25, 0.75, 0.0]).view(3, 1, 1, 1)
    assert _sink_rate(alpha, 0.25) == pytest.approx([100 / 3])
    assert _sink_rate(alpha.mean(0, keepdim=True), 0.25) == [100]


def test_a_query_counts_for_its_own_key_so_that_one_token_alone_has_importance_1() -> None:
    assert importance_from_sums(torch.ones(1, 1, 1), torch.tensor([1])).item() == 1


def test_the_norm_ratio_is_the_first_position_over_the_mean_of_the_rest() -> None:
    assert first_to_rest(torch.tensor([[6.0, 1.0, 2.0, 3.0]])).tolist() == [3.0]


def test_the_norm_ratio_is_1_if_all_norms_are_zero() -> None:
    assert first_to_rest(torch.tensor([[0.0, 0.0, 0.0], [4.0, 2.0, 2.0]])).tolist() == [1.0, 2.0]


def test_nan_is_an_error_that_names_the_layer() -> None:
    alpha = torch.full((2, 3, 1, 4), 0.1)
    alpha[1, 1, 0, 2] = torch.nan
    with pytest.raises(SinklabError, match="importance values contain NaN or infinity in attention layer 2"):
        Accumulator((0.3,), 4).add(_batch(alpha))


@pytest.mark.parametrize(
    ("mask", "sentence"),
    [
        ([[1, 0, 1]], "padding between its tokens"),
        ([[1, 1], [0, 0]], r"sequence 1 \(from 0\) of the batch is all padding"),
    ],
)
def test_masks_that_are_not_padding_are_refused(mask: list[list[int]], sentence: str) -> None:
    with pytest.raises(InputError, match=sentence):
        real_tokens(torch.tensor(mask))
