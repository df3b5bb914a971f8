"""The definitions of the details (details.py), each on numbers small enough to be worked out on paper."""

import math

import pytest
import torch

from sinklab.attention.importance import Rows, score_rows
from sinklab.attention.masks import CAUSAL, Window, real_tokens
from sinklab.attention.query_blocks import Block, ScoreMatrix
from sinklab.measuring.statistics.collecting import BatchDetails, DetailTotals, layer_details
from sinklab.measuring.statistics.details import MatrixEntropy, kurtosis
from sinklab.measuring.statistics.secondary import SecondarySearch, SecondaryToken
from sinklab.measuring.statistics.statistic_base import Angles, bucket_starts
from sinklab.models.families import ranges_text

UNIFORM = torch.ones(4, 4).tril() / torch.arange(1, 5)[:, None]


def _of_rows(weights_TT: torch.Tensor, mask: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
    T = len(weights_TT)
    rows = Rows(Block(0, T, 0, T), weights_TT[None, None], None)
    return layer_details([rows], real_tokens(torch.ones(1, T) if mask is None else mask), None)[0]


def test_entropy_of_uniform_attention_is_the_mean_of_ln_t() -> None:
    assert float(_of_rows(UNIFORM)["entropy"]) == pytest.approx(math.log(math.factorial(4)) / 4)
    assert float(_of_rows(torch.eye(4))["entropy"]) == 0


def test_attention_by_distance_of_uniform_attention() -> None:
    # rows (1), (1/2, 1/2), (1/3 ..), (1/4 ..): themselves 1 + 1/2 + 1/3 + 1/4; one back the same without the first
    own, one_back = 25 / 12, 13 / 12
    two_or_three_back = 1 / 3 + 2 / 4
    expected = torch.tensor([own, one_back, two_or_three_back]) / 4
    torch.testing.assert_close(_of_rows(UNIFORM)["by_distance"][0, 0], expected)


def test_the_shares_of_the_first_key_and_of_an_average_other_one() -> None:
    rows = torch.tensor([[1.0, 0, 0], [0.9, 0.1, 0], [0.6, 0.1, 0.3]])
    means = _of_rows(rows)
    torch.testing.assert_close(means["first_by_query"][0, 0], torch.tensor([1.0, 0.9, 0.6]))
    torch.testing.assert_close(means["rest_by_query"][0, 0], torch.tensor([0.0, 0.1, 0.2]))


def test_a_head_is_dormant_for_the_later_queries_that_look_at_the_first_token_or_the_bias_most() -> None:
    rows = torch.tensor([[1.0, 0, 0, 0], [0.6, 0.4, 0, 0], [0.3, 0.3, 0.4, 0], [0.25, 0.25, 0.25, 0.25]])
    assert float(_of_rows(rows)["dormant"]) == pytest.approx(2 / 3)  # the uniform query counts, t = 1 does not
    assert float(_of_rows(torch.zeros(4, 4))["dormant"]) == 0
    with_bias = Rows(Block(0, 4, 0, 4), rows[None, None], torch.tensor([0.0, 0, 0.5, 0])[None, None])
    assert float(layer_details([with_bias], real_tokens(torch.ones(1, 4)), None)[0]["dormant"]) == 1
    late = torch.tensor([[1.0, 0, 0, 0], [0, 1, 0, 0], [0, 0.6, 0.4, 0], [0, 0.2, 0.2, 0.6]])  # padding on the left
    assert float(_of_rows(late, torch.tensor([[0.0, 1, 1, 1]]))["dormant"]) == pytest.approx(1 / 2)


def test_attention_weighted_by_value_norms() -> None:
    alpha = torch.tensor([(1 + 0.9 + 0.6) / 3, (0.1 + 0.1) / 2, 0.3])  # columns of sums 2.5, 0.2 and 0.3
    totals = DetailTotals(0.3, 3)
    layer = _of_rows(torch.tensor([[1.0, 0, 0], [0.9, 0.1, 0], [0.6, 0.1, 0.3]]))
    layer["value_ratio"] = torch.tensor([[[0.1, 2.0, 1.0]]])  # norms of the values
    batch = BatchDetails({name: [x] for name, x in layer.items()}, {}, torch.zeros(1, 3, dtype=torch.long), {})
    totals.add(batch, alpha[None, None, None], None, torch.ones(1, 3, dtype=torch.bool))
    assert totals.details().value_weighted == pytest.approx(0.25 / (0.25 + 0.4 + 0.3))


def test_cosine_and_norm_product_of_two_tokens() -> None:
    q = torch.tensor([[3.0, 0.0], [0.0, 2.0]])[None, None]
    k = torch.tensor([[1.0, 0.0], [4.0, 4.0]])[None, None]
    real = real_tokens(torch.ones(1, 2))
    means = layer_details(score_rows(ScoreMatrix(q, k)), real, Angles(q, k, CAUSAL))[0]
    # key 1: cosines 1 and 0, norm products 3 and 2; key 2: cosine 1/sqrt(2), norm product 2 * sqrt(32)
    torch.testing.assert_close(means["cosine"][0, 0], torch.tensor([0.5, math.sqrt(0.5)]))
    torch.testing.assert_close(means["norm_product"][0, 0], torch.tensor([2.5, 2 * math.sqrt(32)]))
    narrow = layer_details(score_rows(ScoreMatrix(q, k, Window(1))), real, Angles(q, k, Window(1)))[0]
    torch.testing.assert_close(narrow["cosine"][0, 0], torch.tensor([1.0, math.sqrt(0.5)]))


def test_the_share_of_a_bias_counts_in_the_entropy() -> None:
    rows = Rows(Block(0, 1, 0, 1), torch.full((1, 1, 1, 1), 0.5), torch.full((1, 1, 1), 0.5))
    assert float(layer_details([rows], real_tokens(torch.ones(1, 1)), None)[0]["entropy"]) == pytest.approx(math.log(2))


def test_kurtosis_is_not_excess_kurtosis_and_of_one_hot_states_the_number_of_channels() -> None:
    assert float(kurtosis(torch.tensor([1.0, -1.0, 1.0, -1.0]))) == 1
    alone = torch.zeros(1000)
    alone[7] = 1e12
    assert float(kurtosis(alone)) == pytest.approx(1000 - 2 + 1 / 999, rel=1e-4)
    gaussian = torch.randn(200_000, generator=torch.Generator().manual_seed(0))
    assert float(kurtosis(gaussian)) == pytest.approx(3, abs=0.1)
    assert float(kurtosis(torch.ones(4))) == 0


def test_matrix_entropy_is_0_for_one_direction_and_1_for_the_most_directions_possible() -> None:
    alike = torch.ones(1, 5, 3)
    apart = torch.eye(5)[None, :, :4]
    one_long = torch.eye(5)[None] * torch.tensor([1e6, 1, 1, 1, 1])[:, None]
    for states, entropy in ((alike, 0.0), (apart, 1.0), (torch.eye(5)[None], 1.0), (one_long, 0.0)):
        assert float(MatrixEntropy().read(states, torch.tensor([5]))) == pytest.approx(entropy, abs=1e-9)
    padded = torch.cat([torch.eye(5)[None, :3], torch.zeros(1, 2, 5)], 1)
    assert float(MatrixEntropy().read(padded, torch.tensor([3]))) == pytest.approx(1)
    assert float(MatrixEntropy().read(torch.ones(1, 1, 4), torch.tensor([1]))) == 0
    assert float(MatrixEntropy().read(torch.zeros(1, 3, 4), torch.tensor([3]))) == 0


def test_buckets_are_powers_of_two() -> None:
    assert bucket_starts(0, 13) == [0, 1, 2, 4, 8]
    assert bucket_starts(1, 16) == [1, 2, 4, 8, 16]
    assert bucket_starts(0, 0) == [0]


def test_the_secondary_sink_rate_leaves_out_the_first_positions_and_the_second_half() -> None:
    layers, sequences, heads, T = 1, 2, 2, 16
    alpha = torch.zeros(layers, sequences, heads, T)
    alpha[0, 1, 0, 5] = 0.8  # sequence 2, head 1, position 6
    alpha[0, 0, :, [0, 3, 8, 15]] = 0.9  # position 1; 4, listed but not counted; 9 and 16, seen by few queries
    alignment = torch.zeros(2, sequences, T)
    alignment[1, 0, [6, 10]] = 0.95  # after block 1 tokens 7 and 11 of sequence 1 are like its first token
    norms = torch.ones(2, sequences, T)
    norms[1, 0, 0] = 10
    rows = Rows(Block(0, T, 0, T), torch.eye(T).expand(sequences, heads, T, T), None)
    means, _ = layer_details([rows], real_tokens(torch.ones(sequences, T)), None)
    layers = {name: [mean] for name, mean in means.items()} | {"value_ratio": [torch.ones(sequences, heads, T)]}
    stream = {"kurtosis": torch.ones(2, sequences, T), "alignment": alignment}
    details = BatchDetails(layers, stream, _ids(sequences, T), {})
    totals = DetailTotals(0.3, T)
    totals.add(details, alpha, norms, torch.ones(sequences, T, dtype=torch.bool))
    found = totals.details()
    assert [(one.sequence, one.position, one.token, one.heads) for one in found.secondary_sinks] == [
        (1, 4, 3, 100.0),
        (2, 6, 105, 50.0),
        (1, 7, 6, 0.0),
    ]
    assert found.secondary_sinks[2].alignment == pytest.approx(0.95)
    assert found.secondary_sinks[2].block == 1
    assert [(one.layers, one.alike) for one in found.secondary_sinks] == [([1], []), ([1], []), ([], [1])]
    assert found.secondary_tokens == [SecondaryToken(token=105, sinks=1, occurrences=1)]
    assert found.secondary.tolist() == [[50.0, 0.0]]
    assert found.secondary_rate == 25


def test_the_layers_of_a_sink_are_those_of_its_heads_and_tokens_are_counted_over_batches() -> None:
    layers, heads, T = 4, 2, 16
    search = SecondarySearch(0.3)
    alpha = torch.zeros(layers, 2, heads, T)
    alpha[[1, 2], 0, 1, 6] = 0.5  # sequence 1, head 2, position 7, layers 2 and 3
    alpha[3, 1, 0, 5] = 0.4  # sequence 2, position 6, layer 4
    norms, alike = torch.ones(layers + 1, 2, T), torch.zeros(layers + 1, 2, T)
    norms[2:, :, 0] = 20
    alike[[2, 3, 4], 0, 6] = 0.95
    tokens = torch.arange(T).repeat(2, 1)
    tokens[1, 5] = 6  # the same token in both
    valid = torch.ones(2, T, dtype=torch.bool)
    for _ in range(2):
        search.find(alpha, norms, alike, tokens, valid)
    assert [(one.sequence, one.position, one.layers, one.alike) for one in search.strongest] == [
        (1, 7, [2, 3], [2, 3, 4]),
        (3, 7, [2, 3], [2, 3, 4]),
        (2, 6, [4], []),
        (4, 6, [4], []),
    ]
    assert search.tokens() == [SecondaryToken(token=6, sinks=4, occurrences=6)]
    assert ranges_text([4, 5, 6, 9, 11, 12]) == "4..6, 9, 11..12"


@pytest.mark.parametrize(("T", "last"), [(2, 0), (4, 2), (15, 7), (30, 15), (31, 16), (40, 25)])
def test_tokens_are_listed_from_position_2_to_where_half_of_the_queries_or_16_are_left(T: int, last: int) -> None:
    search = SecondarySearch(0.3)
    padded = T + 5
    valid = (torch.arange(padded) < T)[None]
    found = search.find(torch.full((1, 1, 1, padded), 0.9), None, None, torch.arange(padded)[None], valid)
    positions = {one.position for one in search.strongest}
    assert positions == set(range(2, min(last, 12) + 1))  # 3 of the first few, and 8 past them
    assert sum(one.occurrences for one in search.tokens()) == min(8, max(0, last - 4))
    assert float(found) == (100 if T >= 10 else 0)


def test_sinks_at_the_first_positions_do_not_displace_later_ones_from_the_list() -> None:
    search, T = SecondarySearch(0.3), 64
    alpha = torch.zeros(1, 20, 2, T)
    alpha[..., 1] = 0.9
    alpha[0, 7, 0, 40] = 0.4
    search.find(alpha, None, None, torch.arange(T).repeat(20, 1), torch.ones(20, T, dtype=torch.bool))
    assert [(one.sequence, one.position) for one in search.strongest] == [*((n, 2) for n in range(1, 9)), (8, 41)]
    assert search.tokens() == [SecondaryToken(token=40, sinks=1, occurrences=20)]


def _ids(sequences: int, T: int) -> torch.Tensor:
    return torch.arange(T) + 100 * torch.arange(sequences)[:, None]
