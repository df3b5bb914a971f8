"""Blocks of queries: the T x S score matrix is computed block by block, and not stored as a whole.

B batch, H query heads, G KV heads (H a multiple of G), T queries, S keys, D key dimension.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from sinklab.attention.masks import CAUSAL, Mask
from sinklab.attention.scores import Score

BLOCK_ELEMENTS = 2**18  # scores held at a time: 1 MB in float32, which stays in a core's cache
BLOCK_ELEMENTS_CUDA = 2**24  # scores held at a time on CUDA: 64 MB, for fewer and larger kernels
SMALLEST_BLOCK = 32  # minimum number of queries per block
CHUNK = 64  # positions per chunk of linear attention; scores within a chunk are computed explicitly


@dataclass(frozen=True)
class Block:
    """Block of the score matrix: queries [start, stop) and keys [low, high), 0-based."""

    start: int
    stop: int
    low: int
    high: int

    @property
    def rows(self) -> slice:
        """Slice of the queries."""
        return slice(self.start, self.stop)

    @property
    def keys(self) -> slice:
        """Slice of the keys."""
        return slice(self.low, self.high)


def default_scale(q_BHTD: Tensor) -> float:
    """Return the default score scale 1 / sqrt(D)."""
    return 1.0 / math.sqrt(q_BHTD.shape[-1])


def check_shapes(q_BHTD: Tensor, k_BGSD: Tensor) -> None:
    """Raise ValueError if the shapes of queries and keys do not match."""
    (B, H, T, D), (Bk, G, S, Dk) = q_BHTD.shape, k_BGSD.shape
    if Bk != B or Dk != D or H % G or S < T:
        raise ValueError(
            f"queries {tuple(q_BHTD.shape)} and keys {tuple(k_BGSD.shape)} do not match: batch size and width "
            "must be equal, query heads a multiple of key heads, keys at least as many as queries"
        )


def grouped_product(a_BHTD: Tensor, b_BGDS: Tensor) -> Tensor:
    """Multiply (B, H, T, D) x (B, G, D, S) -> (B, H, T, S); H / G successive heads share each of the G matrices."""
    B, H, T, D = a_BHTD.shape
    G, S = b_BGDS.shape[1], b_BGDS.shape[3]
    if H == G:
        return a_BHTD @ b_BGDS
    return (a_BHTD.reshape(B, G, H // G * T, D) @ b_BGDS).reshape(B, H, T, S)


def grouped_transpose_product(a_BHTS: Tensor, b_BHTD: Tensor, groups: int) -> Tensor:
    """Sum a[t, s] b[t, d] over t and over the H / G heads of each group: (B, G, S, D)."""
    B, H, T, S = a_BHTS.shape
    if groups != H:
        a_BHTS = a_BHTS.reshape(B, groups, H // groups * T, S)
        b_BHTD = b_BHTD.reshape(B, groups, H // groups * T, -1)
    return a_BHTS.transpose(-1, -2) @ b_BHTD


def accumulate_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the accumulation dtype: float64 for float64, else float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def indices(z_BHTS: Tensor, block: Block, offset: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return batch, head, query position and key position indices that broadcast over a block's scores.

    Args:
        offset: position of the first query among the keys, S - T.
    """
    B, H, _, _ = z_BHTS.shape
    device = z_BHTS.device
    return (
        torch.arange(B, device=device).view(-1, 1, 1, 1),
        torch.arange(H, device=device).view(-1, 1, 1),
        torch.arange(block.start + offset, block.stop + offset, device=device).view(-1, 1),
        torch.arange(block.low, block.high, device=device),
    )


def floored_exp_(exponents: Tensor) -> Tensor:
    """Compute exponentials in place; results are at least the smallest normal number.

    Subnormal numbers are 10x slower on CPUs. No result is exactly zero, so masked entries must be masked again.
    """
    return exponents.clamp_(min=math.log(torch.finfo(exponents.dtype).tiny) + 0.1).exp_()


def mask_block_(
    logits_BHTS: Tensor, block: Block, offset: int, keys: int, mask: Mask, value: float = -math.inf
) -> Tensor:
    """Set the masked entries of a block's logits to `value`, in place, and return the logits.

    Args:
        offset: position of the first query among the keys, S - T.
        keys: number of keys S.
    """
    first, end = block.start + offset, block.stop + offset
    low, high = mask.full_range(first, end, keys)
    low, high = max(low, block.low), min(high, block.high)
    outside = [(block.low, low), (high, block.high)] if low < high else [(block.low, block.high)]
    for start, stop in outside:
        if start < stop:
            seen = mask.block(first, end, start, stop, logits_BHTS.device)
            logits_BHTS[..., start - block.low : stop - block.low].masked_fill_(~seen, value)
    return logits_BHTS


@dataclass(frozen=True, eq=False)  # Dynamo hashes the object before its fields are set
class ScoreMatrix:
    """Scores of T queries with S keys, computed in blocks of queries. The queries are at the last T of the S positions.

    Attributes:
        mask: mask of visible keys.
        score: score function applied to q.k * scale; None is the identity.
        scale: factor of q.k; None is 1 / sqrt(D).
    """

    q_BHTD: Tensor
    k_BGSD: Tensor
    mask: Mask = CAUSAL
    score: Score | None = None
    scale: float | None = None

    @property
    def factor(self) -> float:
        """Factor of q.k."""
        return default_scale(self.q_BHTD) if self.scale is None else self.scale

    @property
    def offset(self) -> int:
        """Position of the first query among the keys, S - T."""
        return self.k_BGSD.shape[2] - self.q_BHTD.shape[2]

    def blocks(self) -> Iterator[Block]:
        """Yield the blocks of queries in order, each with the keys that any of its queries may see.

        A block has at most BLOCK_ELEMENTS scores (BLOCK_ELEMENTS_CUDA on CUDA) over all sequences and heads, unless it
        has only SMALLEST_BLOCK queries.
        """
        (B, H, T, _), S = self.q_BHTD.shape, self.k_BGSD.shape[2]
        elements = BLOCK_ELEMENTS_CUDA if self.q_BHTD.is_cuda else BLOCK_ELEMENTS
        size = max(SMALLEST_BLOCK, elements // (B * H * S))
        for start in range(0, T, size):
            stop = min(start + size, T)
            yield Block(start, stop, *self.mask.key_range(start + S - T, stop + S - T, S))

    def raw(self, block: Block) -> Tensor:
        """Compute a block's raw scores z = q.k * scale: (B, H, queries, keys), in the accumulation dtype."""
        q, k = self.q_BHTD[:, :, block.rows], self.k_BGSD[:, :, block.keys]
        z = grouped_product(q, k.transpose(-1, -2)).to(accumulate_dtype(q.dtype))
        return z.mul_(self.factor) if not z.requires_grad else z * self.factor

    def scored(self, z_BHTS: Tensor, block: Block) -> Tensor:
        """Apply the score function to a block's raw scores; the returned logits are not masked."""
        return z_BHTS if self.score is None else self.score(z_BHTS, *indices(z_BHTS, block, self.offset))

    def logits(self, block: Block) -> Tensor:
        """Compute a block's logits, -inf at masked keys."""
        return self.hide_(self.scored(self.raw(block), block), block)

    def hide_(self, scores_BHTS: Tensor, block: Block, value: float = -math.inf) -> Tensor:
        """Set the masked entries of a block to `value`, in place, and return the block."""
        return mask_block_(scores_BHTS, block, self.offset, self.k_BGSD.shape[2], self.mask, value)
