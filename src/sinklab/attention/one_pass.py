"""Attention output and column sums in one pass over blocks of scores.

PyTorch's fused kernels do not return the attention weights, so a separate computation of the sums repeats q.k and exp.
Here the scores of a block of queries are normalised in place and used for both output and column sums. A block usually
fits in the CPU cache (`BLOCK_SCORES`). benchmarks/measure.py compares a measurement with a forward pass of the model.
Rejected alternatives: a second exp with the kernel's `lse`, and a matrix product with ones for the sums. Neither was
faster on the tested machine.

B batch, H query heads, G KV heads, T queries, S keys, D key dimension, V value dimension; no gradients.
"""

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor

from sinklab.attention import query_blocks as bl
from sinklab.attention.importance import ColumnSums
from sinklab.attention.operations.base import Call

BLOCK_SCORES = 2**21  # scores per block: 8 MB in float32
MOST_SCORES = 2**24  # upper limit of scores per block with many threads or query heads per KV head: 64 MB
BLOCK_QUERIES = 128  # maximum number of queries per block


@torch.no_grad()
def attend_and_sum(
    call: Call, v_BGSV: Tensor, counted_BT: Tensor | None = None, ends: Sequence[int] = ()
) -> tuple[Tensor, ColumnSums, Tensor]:
    """Compute the output of softmax attention and the column sums of its weights in one pass.

    Args:
        call: softmax call without a bias key; a sink logit is supported.
        counted_BT: bool, queries to count in the sums (real tokens); None counts all.
        ends: E increasing lengths, at most T, of truncated sequences whose column sums are returned.

    Returns:
        The output (B, H, T, V), without a V bias; the column sums over all counted queries; and for every length in
        `ends` the column sums over the counted queries t >= k of the truncated sequence, (B, H, E, S).

    Raises:
        ValueError: if the shapes of queries and keys do not match.
    """
    q_BHTD, k_BGSD, mask, score = call.q_BHTD, call.k_BGTD, call.mask, call.score()
    bl.check_shapes(q_BHTD, k_BGSD)
    (B, H, T, D), (G, S, V) = q_BHTD.shape, v_BGSV.shape[1:]
    dtype = bl.accumulate_dtype(q_BHTD.dtype)
    out_BHTV = q_BHTD.new_empty(B, H, T, V)
    segments_BHES = q_BHTD.new_zeros(B, H, len(ends) + 1, S, dtype=dtype)
    bias_BH = None if call.logit_BHT is None else q_BHTD.new_zeros(B, H, dtype=dtype)
    earlier_BHS = None if mask.causal else q_BHTD.new_zeros(B, H, S, dtype=dtype)
    uniform = mask.plain and score is None and bias_BH is None and counted_BT is None
    rows = 1 if uniform else B  # sequences with one mask are computed as one sequence with B times the heads
    turned_BGDS = k_BGSD.mT.contiguous()  # transposed once instead of in every product
    scaled_BHTD = q_BHTD * call.matrix().factor
    q, k, v = (x.to(dtype).reshape(rows, -1, *x.shape[2:]) for x in (scaled_BHTD, turned_BGDS, v_BGSV))
    out, sums = out_BHTV.view(rows, -1, T, V), segments_BHES.view(rows, -1, len(ends) + 1, S)
    repeats = H // G
    queries = max(1, min(T, BLOCK_QUERIES, MOST_SCORES // (repeats * S)))
    each = repeats * queries * S  # scores of one KV head; a block has one or more per thread if MOST_SCORES allows it
    most = max(1, min(max(torch.get_num_threads(), BLOCK_SCORES // each), MOST_SCORES // each, k.shape[1]))
    buffer = q.new_empty(most * each)
    segments = enumerate(itertools.pairwise((0, *ends, T)))
    starts = [
        (at, start, min(start + queries, end)) for at, (begin, end) in segments for start in range(begin, end, queries)
    ]
    for b, first, (segment, start, stop) in itertools.product(range(rows), range(0, k.shape[1], most), starts):
        groups = slice(first, min(first + most, k.shape[1]))
        heads = slice(groups.start * repeats, groups.stop * repeats)
        block = bl.Block(start, stop, *mask.key_range(start + S - T, stop + S - T, S))
        q_GRD, k_GDS = q[b, heads, block.rows].reshape(groups.stop - first, -1, D), k[b, groups, :, block.keys]
        z_GRS = buffer[: q_GRD.shape[0] * q_GRD.shape[1] * k_GDS.shape[2]].view(*q_GRD.shape[:2], -1)
        torch.bmm(q_GRD, k_GDS, out=z_GRS)
        weights, share = _normalise(z_GRS.view(heads.stop - heads.start, stop - start, -1), call, b, heads, block)
        counted = None if counted_BT is None else counted_BT[b, block.rows, None]
        if share is not None and bias_BH is not None:
            bias_BH[b, heads] += ((1 - share) if counted is None else (1 - share) * counted).sum((1, 2))
        flat = weights.view(*z_GRS.shape)
        out[b, heads, block.rows] = torch.bmm(flat, v[b, groups, block.keys]).view(-1, stop - start, V)
        if counted is not None:
            weights *= counted
        if earlier_BHS is not None:
            diagonal = start + S - T - block.low
            earlier_BHS[b, heads, block.keys] += weights.triu(diagonal + 1).sum(1)
            weights = weights.tril_(diagonal)
        sums[b, heads, segment, block.keys] += weights.sum(1)
    prefixes_BHES = segments_BHES.cumsum(2) if ends else segments_BHES
    return out_BHTV, ColumnSums(prefixes_BHES[:, :, -1], bias_BH, earlier_BHS), prefixes_BHES[:, :, :-1]


def _normalise(z_HQS: Tensor, call: Call, b: int, heads: slice, block: bl.Block) -> tuple[Tensor, Tensor | None]:
    """Return the softmax of a block's scores, which may be overwritten, and each row's total attention to keys.

    The total is None without a sink logit; it is then 1, or 0 in a row without visible keys.
    """
    score, mask, device = call.score(), call.mask.of(b, heads), z_HQS.device
    first, end = block.start + call.first, block.stop + call.first
    if score is not None:
        z_HQS = score(
            z_HQS,
            torch.tensor(b, device=device).view(1, 1, 1),
            torch.arange(heads.start, heads.stop, device=device).view(-1, 1, 1),
            torch.arange(first, end, device=device).view(-1, 1),
            torch.arange(block.low, block.high, device=device),
        )
    bl.mask_block_(z_HQS[None], block, call.first, call.k_BGTD.shape[2], mask)
    share = None
    if call.logit_BHT is not None:
        lse = torch.logsumexp(z_HQS, -1, keepdim=True)
        logit_BHT = call.logit_BHT.expand(call.q_BHTD.shape[:3])
        share = torch.sigmoid(lse - logit_BHT[b, heads, block.rows, None].to(lse.dtype))
    torch.softmax(z_HQS, -1, out=z_HQS)
    if mask.may_be_empty:
        seen = mask.block(first, end, block.low, block.high, device)
        z_HQS.masked_fill_(~seen[0].any(-1, keepdim=True), 0)
    if share is not None:
        z_HQS *= share
    return z_HQS, share
