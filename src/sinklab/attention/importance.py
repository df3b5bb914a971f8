"""Importance alpha of every key position, computed without storing the attention matrix.

alpha_k is the mean over queries t = k .. T of the attention weight A_tk, including query k (2410.10781, section 3.2).
It is a column mean of the attention matrix, accumulated over blocks of queries. For operations whose attention weights
A_ts do not sum to one over the keys s, it is computed from the proxy scores |A_tk| / sum_s |A_ts|.

Under a mask other than the causal one, some queries t >= k may not see key k, and some earlier queries may see it.
`Importance.visible_BHT` is a second mean, over the queries that may see key k.

B batch, H query heads, G KV heads, T queries, S keys, D key dimension, Q queries of a block.

The sink metric as pure functions on tensors (2410.10781, section 3.2).

N or B sequences, L layers, H heads, T positions. Arrays are 0-based; position 1 of the paper is index 0.
"""

import functools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from sinklab.attention import query_blocks as bl
from sinklab.attention.masks import Mask, Turned, visible_queries
from sinklab.attention.primitive import exponentials_, finite_normaliser, flex_attend, log_normaliser
from sinklab.attention.scores import Score


@dataclass(frozen=True)
class ColumnSums:
    """Sums of attention per key over the counted queries: all queries, or those of real tokens in padded batches.

    Attributes:
        keys_BHS: attention to each key k, summed over counted queries t >= k; float32 (float64 for float64 input).
        bias_BH: attention to a bias key, to a sink logit or to the stick-breaking remainder, summed over all counted
            queries; None if there are none of these.
        earlier_BHS: attention to each key k, summed over counted queries t < k; None under a causal mask.
    """

    keys_BHS: Tensor
    bias_BH: Tensor | None
    earlier_BHS: Tensor | None = None

    def all_queries(self) -> Tensor:
        """Return the attention to each key, summed over all counted queries: (B, H, S)."""
        return self.keys_BHS if self.earlier_BHS is None else self.keys_BHS + self.earlier_BHS


@dataclass(frozen=True)
class Importance:
    """Importance alpha of the positions, and of a bias or learned tokens.

    Attributes:
        positions_BHT: alpha of the T positions of the sequence, without learned leading tokens.
        bias_BH: sum of the alphas of the bias key, sink logit, sink token, registers and stick-breaking remainder
            that the layer has; None if it has none.
        row_sums_BH: mean of sum_s A_ts over the queries t of the sequence; None if the operation's rows sum to one.
        seen_by_BGT: number of queries that may see each position, on the CPU. B and G are here the batch and head axes
            of the mask, which may have size 1.
        visible_BHT: mean attention over the queries that may see each position; None if equal to `positions_BHT`.
        registers_BHN: alpha of each of N registers; None for fewer than 2 registers.
    """

    positions_BHT: Tensor
    bias_BH: Tensor | None
    row_sums_BH: Tensor | None
    seen_by_BGT: Tensor
    visible_BHT: Tensor | None
    registers_BHN: Tensor | None = None


@dataclass(frozen=True)
class Rows:
    """Attention weights of a block of queries.

    Attributes:
        block: index ranges of the queries and keys.
        weights_BHQS: attention weights, or proxy scores if the weights of a row do not sum to one; 0 at masked keys;
            float32 (float64 for float64 input).
        bias_BHQ: attention to a bias key, to a sink logit or to the stick-breaking remainder; None if there are none of
            these.
    """

    block: bl.Block
    weights_BHQS: Tensor
    bias_BHQ: Tensor | None


@torch.no_grad()
def score_rows(matrix: bl.ScoreMatrix, bias_logits_BHT: Tensor | None = None) -> Iterator[Rows]:
    """Yield the rows of the attention matrix, exp(logit) divided by the row sum, in blocks of queries.

    Args:
        matrix: queries, keys, mask and score function.
        bias_logits_BHT: logit of a bias key or sink logit, which is included in the row sum, broadcastable to
            (B, H, T); None without one.

    Raises:
        ValueError: if the shapes of queries and keys do not match.
    """
    matrix = replace(matrix, k_BGSD=matrix.k_BGSD.mT.contiguous().mT)  # laid out once instead of in every product
    q_BHTD, score = matrix.q_BHTD, matrix.score
    bl.check_shapes(q_BHTD, matrix.k_BGSD)
    bias_BHT = None
    if bias_logits_BHT is not None:
        bias_BHT = bias_logits_BHT.to(bl.accumulate_dtype(q_BHTD.dtype)).expand(q_BHTD.shape[:3])
    for part in matrix.blocks():
        logits = matrix.logits(part)
        lse, share = torch.logsumexp(logits, -1), None
        if bias_BHT is not None:
            lse = torch.logaddexp(lse, bias_BHT[:, :, part.rows])
            share = torch.exp(bias_BHT[:, :, part.rows] - finite_normaliser(lse))
        weights = exponentials_(logits.sub_(finite_normaliser(lse)[..., None]), score)
        if score is not None and score.deep:
            weights = matrix.hide_(weights, part, 0.0)
        yield Rows(part, weights, share)


def sum_rows(
    rows: Iterable[Rows], q_BHTD: Tensor, keys: int, mask: Mask, counted_BT: Tensor | None = None
) -> ColumnSums:
    """Sum attention rows over the counted queries, for each key and for the bias.

    Args:
        rows: blocks of rows; their weights may be changed in place.
        q_BHTD: queries of the rows, at the last T of `keys` positions.
        keys: number of keys S.
        mask: mask of visible keys.
        counted_BT: bool, queries to count; None counts all.
    """
    B, H, T, _ = q_BHTD.shape
    keys_BHS = q_BHTD.new_zeros(B, H, keys, dtype=bl.accumulate_dtype(q_BHTD.dtype))
    bias_BH: Tensor | None = None
    earlier_BHS = None if mask.causal else torch.zeros_like(keys_BHS)
    for one in rows:
        weights, bias_BHQ = one.weights_BHQS, one.bias_BHQ
        if counted_BT is not None:
            counted_B1Q = counted_BT[:, None, one.block.rows]
            weights = weights.mul_(counted_B1Q[..., None])
            bias_BHQ = None if bias_BHQ is None else bias_BHQ * counted_B1Q
        if bias_BHQ is not None:
            bias_BH = bias_BHQ.sum(-1) if bias_BH is None else bias_BH + bias_BHQ.sum(-1)
        if earlier_BHS is not None:
            diagonal = one.block.start + keys - T - one.block.low
            earlier_BHS[:, :, one.block.keys] += weights.triu(diagonal + 1).sum(-2)
            weights = weights.tril_(diagonal)
        keys_BHS[:, :, one.block.keys] += weights.sum(-2)
    return ColumnSums(keys_BHS, bias_BH, earlier_BHS)


@torch.no_grad()
def flex_column_sums(
    matrix: bl.ScoreMatrix, bias_logits_BHT: Tensor | None = None, counted_BT: Tensor | None = None
) -> ColumnSums:
    """Compute `sum_rows` of `score_rows` with FlexAttention, which stores no scores.

    sum_t exp(l_tk - lse_t) is the exponential of the log-sum-exp of key k over the queries: that of a second call, in
    which keys and queries change roles and lse_t is subtracted from the scores. The products are those of the dtype of
    the queries, accumulated in float32.

    Args:
        matrix: queries, keys, mask and score function.
        bias_logits_BHT: as for `score_rows`.
        counted_BT: as for `sum_rows`.
    """
    q_BHTD, k_BGSD, score, first = matrix.q_BHTD, matrix.k_BGSD, matrix.score, matrix.offset
    lse_BHT, bias_BH = log_normaliser(matrix, "flex"), None
    if bias_logits_BHT is not None:
        logits_BHT = bias_logits_BHT.to(lse_BHT.dtype).expand(lse_BHT.shape)
        lse_BHT = torch.logaddexp(lse_BHT, logits_BHT)
        share_BHT = torch.exp(logits_BHT - finite_normaliser(lse_BHT))
        bias_BH = (share_BHT if counted_BT is None else share_BHT * counted_BT[:, None]).sum(-1)

    def divided(z: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor, lse_BHT: Tensor, *tensors: Tensor) -> Tensor:
        logit = z if score is None else score.function(z, b, h, k + first, q + first, *tensors)
        return logit - lse_BHT[b, h, k]

    turned = Score(divided, (finite_normaliser(lse_BHT), *(score.tensors if score else ())))
    k_BHSD = k_BGSD.repeat_interleave(q_BHTD.shape[1] // k_BGSD.shape[1], 1)

    def sums(later: bool) -> Tensor:
        mask = Turned(matrix.mask, first, later, counted_BT)
        return flex_attend(k_BHSD, q_BHTD, q_BHTD[..., :0], turned, mask, matrix.factor)[1].exp()

    return ColumnSums(sums(later=False), bias_BH, None if matrix.mask.causal else sums(later=True))


def importance_from_sums(keys_BHT: Tensor, queries_B: Tensor) -> Tensor:
    """Compute alpha_k = (sum over queries t = k .. n of A_tk) / (n - k + 1), k = 1 .. n.

    Args:
        keys_BHT: column sums of the attention matrix; index 0 is position k = 1.
        queries_B: number of queries n of each sequence; alpha is 0 at positions after the n-th.

    Returns:
        alpha_BHT in [0, 1], in the dtype of the sums.
    """
    k_T = torch.arange(keys_BHT.shape[-1], device=keys_BHT.device)
    left_BT = queries_B.to(keys_BHT.device)[:, None] - k_T
    return torch.where(left_BT[:, None] > 0, keys_BHT / left_BT.clamp(min=1)[:, None], 0)


def unpadded_importance(sums_BHS: Tensor, length: int) -> Tensor:
    """Compute alpha (B, H, length) from column sums over the first `length` queries of sequences without padding."""
    return importance_from_sums(sums_BHS[..., :length], torch.full((len(sums_BHS),), length, device=sums_BHS.device))


@functools.lru_cache(maxsize=4)
def seen_by(mask: Mask, positions: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Count the queries that can attend to each position, for as many queries as positions.

    Returns the counts, (B or 1, H or 1, positions), on the device, and a copy on the CPU. The result is cached, so that
    the device is synchronised only once per mask.
    """
    counts_BGS = visible_queries(mask, positions, positions, device)
    return counts_BGS, counts_BGS.cpu()


def uniform_importance(queries_B: Tensor, length: int) -> Tensor:
    """Compute alpha_BT of uniform causal attention, A[t, k] = 1/t for k <= t, in float64 on the CPU.

    alpha_k = (1/k + .. + 1/n) / (n - k + 1); alpha_1 is the n-th harmonic number divided by n.

    Args:
        queries_B: number of real tokens n of each sequence; the result is 1 at later positions.
        length: number of positions T of the result.
    """
    t_T = torch.arange(1, length + 1, dtype=torch.float64)
    left_BT = queries_B.cpu()[:, None] - t_T + 1
    shares_BT = torch.where(left_BT > 0, 1 / t_T, 0)
    sums_BT = shares_BT.flip(-1).cumsum(-1).flip(-1)
    return torch.where(left_BT > 0, sums_BT / left_BT.clamp(min=1), 1)


def sink_hits(importance_LNHT: Tensor, eps: float, valid_NT: Tensor) -> Tensor:
    """Count the (sequence, layer, head) triples with alpha_k > eps at each position k: counts_T.

    Sink_k is the fraction of such triples; the counts of several batches can be added.

    Args:
        importance_LNHT: alpha per sequence.
        eps: threshold; alpha must be strictly above it.
        valid_NT: bool, False at positions past a sequence's end.
    """
    return ((importance_LNHT > eps) & valid_NT[:, None]).sum((0, 1, 2))


def first_to_rest(norm_LT: Tensor) -> Tensor:
    """Compute |h_1| / mean over t > 1 of |h_t| from norms averaged over sequences.

    Args:
        norm_LT: mean l2 norm per layer (or layer and head) and position, T >= 2.

    Returns:
        ratio_L, without the axis of positions. It is 1 if all norms are zero (for example, keys after weight decay),
        and infinite if only the norms of later positions are zero (for example, with closed value gates).
    """
    first_L, rest_L = norm_LT[..., 0], norm_LT[..., 1:].mean(-1)
    return torch.where((first_L == 0) & (rest_L == 0), 1.0, first_L / rest_L)
