"""Who may see whom: what every mask answers, and counts made of its answers.

Positions are absolute key positions, 0-based: with S keys and T queries, query t stands at position S - T + t.
Besides the rule itself (`allowed`, in FlexAttention's signature) a mask knows, for a block of queries, which keys any
of them may see (`key_range`, so that blocks outside are never computed) and which keys all of them see (`full_range`,
so that no mask is applied there). The other answers are those of one rule for all unless a mask gives its own.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

COUNTED_ROWS = 128  # at a time


@dataclass(frozen=True)
class RunningSum:
    """Rows that add up from left to right, so that linear attention serves them: causal, but for two numbers.

    Attributes:
        leading: queries before this position are causal in any case.
        shared: every later query also sees the keys before this position; 0 for a causal mask.
    """

    leading: int = 0
    shared: int = 0


class Mask(ABC):
    """The rule of who may attend to whom."""

    @property
    def causal(self) -> bool:
        """True when no query sees a later key."""
        return True

    @property
    def plain(self) -> bool:
        """True for the causal rule and nothing else, which fused kernels know."""
        return False

    @property
    def rows(self) -> int:
        """Rows of the batch that the mask tells apart; 1 where one rule serves all."""
        return 1

    @property
    def heads(self) -> int:
        """Heads that the mask tells apart; 1 where one rule serves all."""
        return 1

    @property
    def may_be_empty(self) -> bool:
        """Whether a query may see no key at all."""
        return False

    @property
    def running_sum(self) -> RunningSum | None:
        """How the keys of a row are a running sum; None where they are not."""
        return None

    @abstractmethod
    def allowed(self, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        """Whether query position `q` may see key position `k` in batch row `b`, head `h` (broadcast, bool)."""

    def key_range(self, first: int, end: int, keys: int) -> tuple[int, int]:
        """The half-open range of keys that some query in positions [first, end) may see; it may be wider."""
        return 0, (min(end, keys) if self.causal else keys)

    def full_range(self, first: int, end: int, keys: int) -> tuple[int, int]:
        """A half-open range of keys that every query in positions [first, end) sees (may be empty)."""
        return 0, 0

    def block(self, first: int, end: int, low: int, high: int, device: torch.device) -> Tensor:
        """`allowed` of query positions [first, end) and keys [low, high); broadcasts to (rows, heads, Q, K)."""
        return self.allowed(
            torch.arange(self.rows, device=device).view(-1, 1, 1, 1),
            torch.arange(self.heads, device=device).view(-1, 1, 1),
            torch.arange(first, end, device=device).view(-1, 1),
            torch.arange(low, high, device=device),
        )

    def of(self, row: int, heads: slice) -> "Mask":
        """The mask of one row of the batch and some of its heads, as a batch of its own."""
        return self


def visible_keys(mask: Mask, queries: int, device: torch.device, keys: int | None = None) -> Tensor:
    """How many keys each query sees: (rows, T), of the first head; counted in blocks of rows.

    Args:
        queries: T; they stand at the last T of `keys` positions.
        keys: S; as many as queries unless given.
    """
    keys = queries if keys is None else keys
    starts = range(keys - queries, keys, COUNTED_ROWS)
    blocks = (mask.block(start, min(start + COUNTED_ROWS, keys), 0, keys, device) for start in starts)
    counts = [block.expand(mask.rows, mask.heads, -1, -1)[:, 0].sum(-1) for block in blocks]
    return torch.cat(counts, dim=-1)


def visible_queries(
    mask: Mask, queries: int, keys: int, device: torch.device, counted_BT: Tensor | None = None
) -> Tensor:
    """How many of the counted queries may see each key: (B or 1, H or 1, keys), counted in blocks of rows.

    Args:
        queries: T; they stand at the last T of `keys` positions.
        counted_BT: bool, which queries count (padding does not); None counts all.
    """
    if mask.plain and counted_BT is None:
        return torch.arange(keys, 0, -1, device=device).clamp(max=queries).view(1, 1, -1)
    rows = max(mask.rows, 1 if counted_BT is None else len(counted_BT))
    counts_BHS = torch.zeros(rows, mask.heads, keys, device=device, dtype=torch.long)
    offset = keys - queries
    for start in range(0, queries, COUNTED_ROWS):
        stop = min(start + COUNTED_ROWS, queries)
        low, high = mask.key_range(start + offset, stop + offset, keys)
        seen = mask.block(start + offset, stop + offset, low, high, device)
        if counted_BT is not None:
            seen = seen & counted_BT[:, None, start:stop, None]
        counts_BHS[..., low:high] += seen.sum(-2)
    return counts_BHS
