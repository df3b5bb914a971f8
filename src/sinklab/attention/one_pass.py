"""Attention output and column sums in one pass over blocks of scores.

PyTorch's fused kernels do not return the attention weights, so computing the sums separately repeats q.k and exp. Here
the scores of a block of queries, small enough for the CPU cache, are normalised in place and used for both output and
column sums. benchmarks/measure.py compares the cost with the fused kernel alone. Rejected alternatives: another exp
with the kernel's `lse`, and a matrix product with ones for the sums, as neither was faster on the tested machine.

B batch, H query heads, G KV heads, T queries, S keys, D key dimension, V value dimension; no gradients.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from sinklab.attention import query_blocks as bl
from sinklab.attention.importance import ColumnSums
from sinklab.attention.masks import Mask
from sinklab.attention.operations.call import Call
from sinklab.attention.scores import Score

BLOCK_SCORES = 2**21  # scores per block: 8 MB in float32
MOST_SCORES = 2**24  # maximum, with many threads or many query heads per KV head: 64 MB
BLOCK_QUERIES = 128


@torch.no_grad()
def attend_and_sum(
    call: Call,
    v_BGSV: Tensor,
    counted_BT: Tensor | None = None,
    ends: Sequence[int] = (),
) -> tuple[Tensor, ColumnSums, Tensor]:
    """Compute the output of softmax attention and the column sums of its weights in one pass.

    Args:
        call: softmax call without a bias key; a sink logit is supported.
        counted_BT: bool, queries to include in the sums (excluding padding); None includes all.
        ends: increasing lengths to which the sequence is truncated, at most T.

    Returns:
        The output (B, H, T, V); the column sums over all counted queries; and the column sums (B, H, E, S) over the
        counted queries t >= k before each of the E `ends`, which are those of the truncated sequences.

    Raises:
        ValueError: if the shapes of queries and keys do not match.
    """
    q_BHTD, k_BGSD, mask, score = call.q_BHTD, call.k_BGTD, call.mask, call.score()
    scale = bl.default_scale(q_BHTD) if call.scale is None else call.scale
    bl.check_shapes(q_BHTD, k_BGSD)
    (B, H, T, _), (S, V) = q_BHTD.shape, v_BGSV.shape[2:]
    dtype = bl.accumulate_dtype(q_BHTD.dtype)
    out_BHTV = q_BHTD.new_empty(B, H, T, V)
    segments_BHES = q_BHTD.new_zeros(B, H, len(ends) + 1, S, dtype=dtype)
    bias_BH = None if call.logit_H is None else q_BHTD.new_zeros(B, H, dtype=dtype)
    earlier_BHS = None if mask.causal else q_BHTD.new_zeros(B, H, S, dtype=dtype)
    uniform = mask.plain and score is None and bias_BH is None and counted_BT is None
    rows = 1 if uniform else B  # sequences with equal masks are computed as one sequence with B times the heads
    turned_BGDS = k_BGSD.mT.contiguous()  # transposed once instead of in every product
    q, k, v = (x.to(dtype).reshape(rows, -1, *x.shape[2:]) for x in (q_BHTD * scale, turned_BGDS, v_BGSV))
    walk = _Walk(mask, score, call.logit_H, q.shape[1] // k.shape[1], S, (*ends, T), q.new_empty(0))
    out, sums = out_BHTV.view(rows, -1, T, V), segments_BHES.view(rows, -1, len(ends) + 1, S)
    for b in range(rows):
        bias_H, earlier_HS, counted_T = (None if x is None else x[b] for x in (bias_BH, earlier_BHS, counted_BT))
        walk.sequence(b, q[b], k[b], v[b], out[b], sums[b], bias_H, earlier_HS, counted_T)
    prefixes_BHES = segments_BHES.cumsum(2) if ends else segments_BHES
    return out_BHTV, ColumnSums(prefixes_BHES[:, :, -1], bias_BH, earlier_BHS), prefixes_BHES[:, :, :-1]


@dataclass
class _Walk:
    """Computes output and column sums of one sequence at a time, with one buffer for the scores of a block."""

    mask: Mask
    score: Score | None
    logit_H: Tensor | None
    repeats: int
    keys: int
    ends: tuple[int, ...]
    buffer: Tensor

    def sequence(
        self,
        b: int,
        q_HTD: Tensor,
        k_GDS: Tensor,
        v_GSV: Tensor,
        out_HTV: Tensor,
        sums_HES: Tensor,
        bias_H: Tensor | None,
        earlier_HS: Tensor | None,
        counted_T: Tensor | None,
    ) -> None:
        (H, T, _), S, R = q_HTD.shape, self.keys, self.repeats
        queries = max(1, min(T, BLOCK_QUERIES, MOST_SCORES // (R * S)))
        groups = self._groups(R * queries * S)
        mask = self.mask
        for g in range(0, H // R, groups):
            ends = slice(g, min(g + groups, H // R))
            heads = slice(ends.start * R, ends.stop * R)
            for start, stop, segment in self._rows(T, queries):
                low, high = mask.key_range(start + S - T, stop + S - T, S)
                block, rows = bl.Block(start, stop, low, high), slice(start, stop)
                counted = None if counted_T is None else counted_T[rows, None]
                weights = self._products(q_HTD[heads, rows], k_GDS[ends, :, low:high])
                weights, share = self._normalise(weights, b, heads, block, S - T)
                if share is not None and bias_H is not None:
                    bias_H[heads] += ((1 - share) if counted is None else (1 - share) * counted).sum((1, 2))
                flat = weights.view(ends.stop - ends.start, -1, high - low)
                out_HTV[heads, rows] = torch.bmm(flat, v_GSV[ends, low:high]).view(-1, stop - start, v_GSV.shape[2])
                if counted is not None:
                    weights *= counted
                if earlier_HS is not None:
                    diagonal = start + S - T - low
                    earlier_HS[heads, low:high] += weights.triu(diagonal + 1).sum(1)
                    weights = weights.tril_(diagonal)
                sums_HES[heads, segment, low:high] += weights.sum(1)

    @staticmethod
    def _groups(scores: int) -> int:
        """Return the number of KV heads per block: at least one per thread, as long as the buffer stays small."""
        return max(1, min(max(torch.get_num_threads(), BLOCK_SCORES // scores), MOST_SCORES // scores))

    def _rows(self, T: int, queries: int) -> Iterator[tuple[int, int, int]]:
        """Yield (start, stop, number of earlier `ends`) of blocks of queries that do not cross one of the `ends`."""
        begin = 0
        for segment, end in enumerate(self.ends):
            for start in range(begin, min(end, T), queries):
                yield start, min(start + queries, end, T), segment
            begin = end

    def _products(self, q_HQD: Tensor, k_GDS: Tensor) -> Tensor:
        (H, Q, D), (G, _, S) = q_HQD.shape, k_GDS.shape
        if self.buffer.numel() < H * Q * S:
            self.buffer = q_HQD.new_empty(H * Q * self.keys)
        z = self.buffer[: H * Q * S].view(G, -1, S)
        torch.bmm(q_HQD.reshape(G, -1, D), k_GDS, out=z)
        return z.view(H, Q, S)

    def _normalise(
        self, z_HQS: Tensor, b: int, heads: slice, block: bl.Block, offset: int
    ) -> tuple[Tensor, Tensor | None]:
        """Return the softmax of a block's scores, and each row's total attention to keys; None without a sink logit."""
        if self.score is not None:
            device = z_HQS.device
            z_HQS = self.score(
                z_HQS,
                torch.tensor(b, device=device).view(1, 1, 1),
                torch.arange(heads.start, heads.stop, device=device).view(-1, 1, 1),
                torch.arange(block.start + offset, block.stop + offset, device=device).view(-1, 1),
                torch.arange(block.low, block.high, device=device),
            )
        empty = self._hide(z_HQS, b, heads, block, offset)
        share = None
        if self.logit_H is not None:
            lse = torch.logsumexp(z_HQS, -1, keepdim=True)
            share = torch.sigmoid(lse - self.logit_H[heads, None, None].to(lse.dtype))
        torch.softmax(z_HQS, -1, out=z_HQS)
        if empty is not None:
            z_HQS.masked_fill_(empty, 0)
        if share is not None:
            z_HQS *= share
        return z_HQS, share

    def _hide(self, z_HQS: Tensor, b: int, heads: slice, block: bl.Block, offset: int) -> Tensor | None:
        """Set scores of masked keys to -inf; return a boolean mask of rows without keys, or None if no row is empty."""
        mask = self.mask.of(b, heads)
        bl.mask_block_(z_HQS[None], block, offset, self.keys, mask)
        if not mask.may_be_empty:
            return None
        seen = mask.block(block.start + offset, block.stop + offset, block.low, block.high, z_HQS.device)
        return ~seen[0].any(-1, keepdim=True)
