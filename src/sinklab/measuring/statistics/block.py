"""A block of a layer's rows, and what several statistics take from it: each is computed once, when first asked for.

B sequences, H query heads, G key heads, T columns of the batch, Q queries of a block, S its keys, D buckets of
distances, R positions aligned so that index 0 is the first real token.
"""

from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Tensor

from sinklab.attention import blocks as bl
from sinklab.attention.blocks import accumulate_dtype
from sinklab.attention.importance import Rows
from sinklab.attention.masks import Mask
from sinklab.attention.real_tokens import RealTokens
from sinklab.models.hooks import token_norms


def bucket_starts(first: int, last: int) -> list[int]:
    """`first` and the powers of two above it, up to `last`: 0, 1, 2, 4, .. or 1, 2, 4, .."""
    starts, power = [first], max(first * 2, 1)
    while power <= last:
        starts.append(power)
        power *= 2
    return starts


class Angles:
    """Cosines and norm products of the queries and keys of one layer, whose masks say who sees whom."""

    def __init__(self, q_BHTD: Tensor, k_BGTD: Tensor, mask: Mask) -> None:
        dtype = accumulate_dtype(q_BHTD.dtype)
        q_BHTD, k_BGTD = q_BHTD.detach().to(dtype), k_BGTD.detach().to(dtype)
        self.mask, self.positions = mask, k_BGTD.shape[2]
        self.q_norm_BHT = token_norms(q_BHTD)
        k_norm_BGT = token_norms(k_BGTD)
        self.k_norm_BHT = k_norm_BGT.repeat_interleave(q_BHTD.shape[1] // k_BGTD.shape[1], 1)
        self._q, self._k = _unit(q_BHTD, self.q_norm_BHT), _unit(k_BGTD, k_norm_BGT)

    def block(self, part: bl.Block) -> tuple[Tensor, Tensor]:
        """Cosines of a block (B, H, Q, S), and 1 where a query sees a key that is not later, else 0."""
        cosine = bl.raw_scores(self._q, self._k, part, 1.0)
        seen = bl.mask_block_(torch.ones_like(cosine), part, 0, self.positions, self.mask, value=0)
        return cosine.mul_(seen), seen.tril_(part.start - part.low)


class Layer:
    """What holds for all blocks of one layer in one batch.

    Attributes:
        real: which columns of the batch are real tokens.
        sees_queries: whether there are angles.
        first_B11: column of the first real token.
        count_B1: how many real tokens there are.
        counted_BT: 1 where a query is a real token, else 0.
        starts_D: first distance of each bucket.
    """

    def __init__(self, weights_BHQS: Tensor, real: RealTokens, angles: Angles | None) -> None:
        device = weights_BHQS.device
        self.real, self._angles, self.sees_queries = real, angles, angles is not None
        self.first_B11 = real.index_BR[:, :1, None].to(device)
        self.count_B1 = real.count_B.to(weights_BHQS)[:, None]
        self.counted_BT = real.mask_BT.to(device, weights_BHQS.dtype)
        self.starts_D = torch.tensor(bucket_starts(0, real.index_BR.shape[1] - 1), device=device)
        self._pairs_BHT = self.sums("LHT", weights_BHQS)

    def sums(self, axes: str, weights_BHQS: Tensor) -> Tensor:
        """Zeros for each sequence and head (B, H), and for each distance or column of the batch where axes has them."""
        columns, distances = self.counted_BT.shape[1], len(self.starts_D)
        wide = {"H": (), "D": (distances,), "T": (columns,), "Q": (columns,)}[axes[-1]]
        return weights_BHQS.new_zeros(*weights_BHQS.shape[:2], *wide)

    @property
    def angles(self) -> Angles:
        """Of the layer's queries and keys; only where queries are seen."""
        assert self._angles is not None
        return self._angles

    @property
    def seen_by_BHT(self) -> Tensor:
        """How many queries of the blocks so far see each key, at least 1; only where queries are seen."""
        assert self.sees_queries
        return self._pairs_BHT.clamp(min=1)

    def count(self, block: "ScoreBlock") -> None:
        """Take in who sees whom in the next block."""
        if self.sees_queries:
            self._pairs_BHT[:, :, block.keys] += block.cosine_and_seen[1].sum(-2)


class ScoreBlock:
    """The rows of a block of queries.

    Attributes:
        part: which queries and keys.
        layer: where the block belongs to.
        queries, keys: the same as slices of the columns of the batch.
        counted_B1Q: 1 where a query is a real token, else 0.
        weights_BHQS: shares of the row, 0 in the rows of padding.
        bias_BHQ: the share of an added bias; None where there is no bias.
        earlier_BQ: how many real tokens stand before a query.
    """

    def __init__(self, rows: Rows, layer: Layer) -> None:
        self.part, self.layer, self.bias_BHQ = rows.block, layer, rows.bias_BHQ
        self.queries, self.keys = slice(self.part.start, self.part.stop), slice(self.part.low, self.part.high)
        self.counted_B1Q, weights_BHQS = layer.counted_BT[:, None, self.queries], rows.weights_BHQS
        self.weights_BHQS = weights_BHQS * self.counted_B1Q[..., None] if layer.real.padded else weights_BHQS
        self._query_1Q1 = torch.arange(self.part.start, self.part.stop, device=weights_BHQS.device).view(1, -1, 1)
        self.earlier_BQ = (self._query_1Q1 - layer.first_B11)[..., 0]

    @cached_property
    def by_distance_BHQD(self) -> Tensor:
        """The attention of every query by distance."""
        first_B11 = self.layer.first_B11  # keys before an end are at least so far back
        ends_BQD = torch.maximum(self._query_1Q1 - self.layer.starts_D + 1, first_B11)
        edges = self._up_to(torch.cat((ends_BQD, first_B11.expand(-1, ends_BQD.shape[1], 1)), -1))
        return edges[..., :-1] - edges[..., 1:]

    @cached_property
    def first_BHQ(self) -> Tensor:
        """The attention of every query on the first token."""
        first_BQ1 = self.layer.first_B11.expand(-1, self._query_1Q1.shape[1], 1)
        return (self._up_to(first_BQ1 + 1) - self._up_to(first_BQ1))[..., 0]

    @cached_property
    def cosine_and_seen(self) -> tuple[Tensor, Tensor]:
        """Cosines of the block (B, H, Q, S), 0 where a query may not look, and 1 where a real query sees a key that is
        not later, else 0; only where queries are seen.
        """
        cosine, seen = self.layer.angles.block(self.part)
        return cosine, seen.mul_(self.counted_B1Q[..., None])

    @cached_property
    def _before(self) -> Tensor:
        """The sum over the block's first so many keys, 0 first."""
        return F.pad(self.weights_BHQS.cumsum(-1), (1, 0))

    def _up_to(self, column_BQX: Tensor) -> Tensor:
        """The sum over keys before a column of the batch: (B, Q, X) -> (B, H, Q, X)."""
        B, H, Q, S = self.weights_BHQS.shape
        return self._before.gather(-1, (column_BQX - self.part.low).clamp(0, S)[:, None].expand(B, H, Q, -1))


def _unit(x_BHTD: Tensor, norm_BHT: Tensor) -> Tensor:
    return x_BHTD / norm_BHT.masked_fill(norm_BHT == 0, 1)[..., None]
