"""The statistics of one attention layer, from its rows as they pass by in blocks (definitions: details.py).

B sequences, H query heads, G key heads, T columns of the batch, Q queries of a block, S its keys, R positions aligned
so that index 0 is the first real token.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from sinklab.attention import blocks as bl
from sinklab.attention.importance import Rows
from sinklab.attention.masks import Mask
from sinklab.measuring.metrics import accumulation, token_norms
from sinklab.measuring.padding import RealTokens
from sinklab.measuring.statistics.details import bucket_starts


@dataclass(frozen=True)
class LayerDetails:
    """One layer in one batch: means over the queries of each sequence.

    Attributes:
        entropy_BH: nats.
        distance_BHD: share of the attention by distance.
        first_BHR, rest_BHR: share of the first key, and of an average other key, of every query.
        cosine_BHR, product_BHR: of every key; None where queries are not seen.
        maps_PKRR: sums over the batch of attention, cosine and norm product of the heads asked for.
    """

    entropy_BH: Tensor
    distance_BHD: Tensor
    first_BHR: Tensor
    rest_BHR: Tensor
    cosine_BHR: Tensor | None
    product_BHR: Tensor | None
    maps_PKRR: Tensor


class Angles:
    """Cosines and norm products of the queries and keys of one layer, whose masks say who sees whom."""

    def __init__(self, q_BHTD: Tensor, k_BGTD: Tensor, mask: Mask) -> None:
        dtype = accumulation(q_BHTD.dtype)
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


@torch.no_grad()
def layer_details(
    rows: Iterable[Rows], real: RealTokens, angles: Angles | None, mapped: Sequence[int] = ()
) -> LayerDetails:
    """Read the rows of one layer.

    Args:
        rows: of all T queries over T keys.
        real: which columns of the batch are real tokens.
        angles: of the same queries and keys; None where queries are not seen.
        mapped: heads whose maps are wanted, 0-based.
    """
    reading: _Reading | None = None
    for one in rows:
        if reading is None:
            reading = _Reading(one.weights_BHQS, real, mapped)
        reading.read(one, angles)
    assert reading is not None
    return reading.result(angles)


class _Reading:
    """Sums over the blocks of one layer."""

    def __init__(self, weights_BHQS: Tensor, real: RealTokens, mapped: Sequence[int]) -> None:
        B, H = weights_BHQS.shape[:2]
        T, R = real.mask_BT.shape[1], real.index_BR.shape[1]
        self.real, self.mapped = real, mapped
        self.first_B = real.index_BR[:, 0].to(weights_BHQS.device)
        self.counted_BT = real.mask_BT.to(weights_BHQS.device, weights_BHQS.dtype)
        self.starts_D = torch.tensor(bucket_starts(0, R - 1), device=weights_BHQS.device)
        self.entropy_BH = weights_BHQS.new_zeros(B, H)
        self.distance_BHD = weights_BHQS.new_zeros(B, H, len(self.starts_D))
        self.first_BHT, self.rest_BHT, self.cosine_BHT, self.product_BHT, self.pairs_BHT = (
            weights_BHQS.new_zeros(B, H, T) for _ in range(5)
        )
        self.maps_PKRR = weights_BHQS.new_zeros(len(mapped), 3, R, R)

    def read(self, one: Rows, angles: Angles | None) -> None:
        part = one.block
        rows, keys = slice(part.start, part.stop), slice(part.low, part.high)
        counted = self.counted_BT[:, None, rows]
        weights = one.weights_BHQS * counted[..., None] if self.real.padded else one.weights_BHQS
        self.entropy_BH += torch.special.entr(weights).sum((-2, -1))
        if one.bias_BHQ is not None:
            self.entropy_BH += (torch.special.entr(one.bias_BHQ) * counted).sum(-1)
        by_distance_BHQD, first_BHQ, others_BQ = self._shares(weights, part)
        self.distance_BHD += by_distance_BHQD.sum(2)
        self.first_BHT[:, :, rows] = first_BHQ
        self.rest_BHT[:, :, rows] = (by_distance_BHQD.sum(-1) - first_BHQ) / others_BQ[:, None].clamp(min=1)
        cosine = seen = None
        if angles is not None:
            cosine, seen = angles.block(part)
            seen = seen.mul_(counted[..., None])
            self.cosine_BHT[:, :, keys] += (cosine * seen).sum(-2)
            self.product_BHT[:, :, keys] += (angles.q_norm_BHT[:, :, None, rows] @ seen)[:, :, 0]
            self.pairs_BHT[:, :, keys] += seen.sum(-2)
        for place, head in enumerate(self.mapped):
            layers = [weights[:, head]]
            if angles is not None and cosine is not None and seen is not None:
                norms_BQS = angles.q_norm_BHT[:, head, rows, None] * angles.k_norm_BHT[:, head, None, keys]
                layers += [cosine[:, head] * seen[:, head], norms_BQS * seen[:, head]]
            self._draw(place, torch.stack(layers, 1), part)

    def _shares(self, weights_BHQS: Tensor, part: bl.Block) -> tuple[Tensor, Tensor, Tensor]:
        """Of every query: the attention by distance (B, H, Q, D), that on the first token (B, H, Q), and how many
        other real tokens stand before or at it (B, Q).
        """
        B, H, Q, S = weights_BHQS.shape
        before = F.pad(weights_BHQS.cumsum(-1), (1, 0))  # the sum over the block's first so many keys

        def up_to(column: Tensor) -> Tensor:
            """The sum over keys before a column of the batch: (B, Q, X) -> (B, H, Q, X)."""
            return before.gather(-1, (column - part.low).clamp(0, S)[:, None].expand(B, H, Q, -1))

        first = self.first_B.view(B, 1, 1)
        query = torch.arange(part.start, part.stop, device=weights_BHQS.device).view(1, Q, 1)
        ends = torch.maximum(query - self.starts_D + 1, first)  # keys before these are at least so far back
        edges = up_to(torch.cat((ends, first.expand(B, Q, 1)), -1))
        on_first = up_to((first + 1).expand(B, Q, 1)) - edges[..., -1:]
        return edges[..., :-1] - edges[..., 1:], on_first[..., 0], (query - first)[..., 0]

    def _draw(self, place: int, layers_BKQS: Tensor, part: bl.Block) -> None:
        """Add the block to a map, every sequence from its first real token on."""
        for layers_KQS, first, count in zip(
            layers_BKQS, self.first_B.tolist(), self.real.count_B.tolist(), strict=True
        ):
            top, bottom = max(part.start, first), min(part.stop, first + count)
            left, right = max(part.low, first), min(part.high, first + count)
            if top < bottom and left < right:
                inside = layers_KQS[:, top - part.start : bottom - part.start, left - part.low : right - part.low]
                self.maps_PKRR[place, : len(inside), top - first : bottom - first, left - first : right - first] += (
                    inside
                )

    def result(self, angles: Angles | None) -> LayerDetails:
        align, count_B1 = self.real.align, self.real.count_B.to(self.entropy_BH)[:, None]
        cosine = product = None
        if angles is not None:
            pairs_BHT = self.pairs_BHT.clamp(min=1)
            cosine, product = (
                align(self.cosine_BHT / pairs_BHT),
                align(self.product_BHT * angles.k_norm_BHT / pairs_BHT),
            )
        return LayerDetails(
            entropy_BH=self.entropy_BH / count_B1,
            distance_BHD=self.distance_BHD / count_B1[..., None],
            first_BHR=align(self.first_BHT),
            rest_BHR=align(self.rest_BHT),
            cosine_BHR=cosine,
            product_BHR=product,
            maps_PKRR=self.maps_PKRR,
        )


def _unit(x_BHTD: Tensor, norm_BHT: Tensor) -> Tensor:
    return x_BHTD / norm_BHT.masked_fill(norm_BHT == 0, 1)[..., None]
