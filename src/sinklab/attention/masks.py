"""Attention masks, as functions like FlexAttention's `mask_mod`, and counts of keys per query and of queries per key.

Positions are absolute key positions, 0-based: with S keys and T queries, query t is at position S - T + t. In addition
to the mask function (`allowed`), a mask has two ranges of keys for a block of queries. Keys outside `key_range` are
seen by no query of the block, and are skipped. Keys in `full_range` are seen by all queries of the block, and need no
masking.

B batch, H query heads, T queries, S keys.

Real tokens of padded batches (B, T). Position 1 is the first token of each sequence that is not padding.
"""

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from sinklab.attention.scores import broadcast_index
from sinklab.errors import InputError

COUNTED_ROWS = 128  # rows (queries) of the mask that are computed at a time for the counts


class Mask(ABC):
    """Base class of attention masks, which are dataclasses.

    Masks are keys of caches. Two masks are equal if they have the same class, the same tensor objects and otherwise
    equal fields. The `==` of dataclasses would compare tensors elementwise.
    """

    def _key(self) -> tuple[object, ...]:
        return type(self), *(id(x) if isinstance(x, Tensor) else x for x in vars(self).values())

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Mask) and other._key() == self._key()

    def __hash__(self) -> int:
        return hash(self._key())

    @property
    def causal(self) -> bool:
        """True if no query sees a later key."""
        return True

    @property
    def plain(self) -> bool:
        """True for the plain causal mask, which fused kernels compute without an explicit mask."""
        return False

    @property
    def sizes(self) -> tuple[int, int]:
        """Sizes of the mask's batch and head axes. A size is 1 if all sequences, or all heads, share one mask."""
        return 1, 1

    @property
    def may_be_empty(self) -> bool:
        """True if some query may see no key."""
        return False

    @property
    def running_sum(self) -> tuple[int, int] | None:
        """Numbers (leading, shared) if linear attention can use running sums under this mask; otherwise None.

        Under such a mask, every query sees its own key and all earlier keys. Queries from position `leading` on also
        see all keys before position `shared`, which is 0 for a causal mask.
        """
        return None

    @abstractmethod
    def allowed(self, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        """Return True where query position `q` sees key `k` in batch row `b` and head `h`, with broadcasting."""

    def key_range(self, first: int, end: int, keys: int) -> tuple[int, int]:
        """Return a half-open range that contains all keys seen by any query at positions [first, end)."""
        return 0, (min(end, keys) if self.causal else keys)

    def full_range(self, first: int, end: int, keys: int) -> tuple[int, int]:
        """Return a half-open range of keys that every query at positions [first, end) sees; it may be empty."""
        return 0, 0

    def block(self, first: int, end: int, low: int, high: int, device: torch.device) -> Tensor:
        """Return the boolean mask of queries at positions [first, end) and keys [low, high), True at visible keys.

        The shape of the mask broadcasts to (*sizes, end - first, high - low).
        """
        rows, heads = self.sizes
        return self.allowed(
            torch.arange(rows, device=device).view(-1, 1, 1, 1),
            torch.arange(heads, device=device).view(-1, 1, 1),
            torch.arange(first, end, device=device).view(-1, 1),
            torch.arange(low, high, device=device),
        )

    def of(self, row: int, heads: slice) -> "Mask":
        """Return the mask of one sequence of the batch and a slice of heads, with batch size 1."""
        return self


def visible_keys(mask: Mask, queries: int, device: torch.device, keys: int | None = None) -> Tensor:
    """Count the keys that each query sees: (B or 1, H or 1, T).

    Args:
        queries: number of queries T, at the last T of `keys` positions.
        keys: number of keys S; by default T.
    """
    keys = queries if keys is None else keys
    starts = range(keys - queries, keys, COUNTED_ROWS)
    blocks = (mask.block(start, min(start + COUNTED_ROWS, keys), 0, keys, device) for start in starts)
    return torch.cat([block.expand(*mask.sizes, -1, -1).sum(-1) for block in blocks], dim=-1)


def visible_queries(
    mask: Mask, queries: int, keys: int, device: torch.device, counted_BT: Tensor | None = None
) -> Tensor:
    """Count the queries that may see each key: (B or 1, H or 1, S).

    Args:
        queries: number of queries T, at the last T of `keys` positions.
        keys: number of keys S.
        counted_BT: bool, queries to count (real tokens); None counts all.
    """
    if mask.plain and counted_BT is None:
        return torch.arange(keys, 0, -1, device=device).clamp(max=queries).view(1, 1, -1)
    rows, heads = mask.sizes
    rows = rows if counted_BT is None else max(rows, len(counted_BT))
    counts_BHS = torch.zeros(rows, heads, keys, device=device, dtype=torch.long)
    offset = keys - queries
    for start in range(0, queries, COUNTED_ROWS):
        stop = min(start + COUNTED_ROWS, queries)
        low, high = mask.key_range(start + offset, stop + offset, keys)
        seen = mask.block(start + offset, stop + offset, low, high, device)
        if counted_BT is not None:
            seen = seen & counted_BT[:, None, start:stop, None]
        counts_BHS[..., low:high] += seen.sum(-2)
    return counts_BHS


@dataclass(frozen=True, eq=False)
class Causal(Mask):
    """Causal mask: query t sees keys s <= t."""

    @property
    def plain(self) -> bool:
        return True

    @property
    def running_sum(self) -> tuple[int, int]:
        return 0, 0

    def allowed(self, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return k <= q

    def full_range(self, first: int, end: int, keys: int) -> tuple[int, int]:
        return 0, min(first + 1, keys)


@dataclass(frozen=True, eq=False)
class Window(Mask):
    """Sliding window mask: query t sees keys t - width + 1 .. t (2410.10781, figure 6)."""

    width: int

    def allowed(self, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return (k <= q) & (k > q - self.width)

    def key_range(self, first: int, end: int, keys: int) -> tuple[int, int]:
        return max(0, first - self.width + 1), min(end, keys)

    def full_range(self, first: int, end: int, keys: int) -> tuple[int, int]:
        start = max(0, end - self.width)
        return start, max(start, min(first + 1, keys))


@dataclass(frozen=True, eq=False)
class Prefix(Mask):
    """Prefix mask: causal, and every query also sees the first `length` keys (2410.10781, figure 5)."""

    length: int

    @property
    def causal(self) -> bool:
        return False

    @property
    def running_sum(self) -> tuple[int, int]:
        return 0, self.length

    def allowed(self, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return (k <= q) | (k < self.length)

    def key_range(self, first: int, end: int, keys: int) -> tuple[int, int]:
        return 0, min(max(end, self.length), keys)

    def full_range(self, first: int, end: int, keys: int) -> tuple[int, int]:
        return 0, min(max(first + 1, self.length), keys)


@dataclass(frozen=True, eq=False)
class WrappedMask(Mask):
    """Base class of masks that modify another mask, `rest`."""

    rest: Mask

    @property
    def causal(self) -> bool:
        return self.rest.causal

    @property
    def sizes(self) -> tuple[int, int]:
        return self.rest.sizes

    @property
    def may_be_empty(self) -> bool:
        return self.rest.may_be_empty

    def of(self, row: int, heads: slice) -> Mask:
        return replace(self, rest=self.rest.of(row, heads))


@dataclass(frozen=True, eq=False)
class Leading(WrappedMask):
    """Mask with `count` learned leading tokens before a sequence that has the mask `rest`.

    Every query of the sequence sees all leading tokens. Leading tokens see only each other, causally.
    """

    count: int = 1

    @property
    def plain(self) -> bool:
        return self.rest.plain  # leading tokens before a causal sequence: the whole is causal

    @property
    def running_sum(self) -> tuple[int, int] | None:
        inner = self.rest.running_sum
        return (self.count + inner[0], self.count + inner[1]) if inner and inner[1] else inner

    def allowed(self, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        led, leads = (k < self.count) & (k <= q), (q >= self.count) & (k >= self.count)
        return led | (leads & self.rest.allowed(b, h, q - self.count, k - self.count))

    def key_range(self, first: int, end: int, keys: int) -> tuple[int, int]:
        rest = self.rest.key_range(max(first - self.count, 0), max(end - self.count, 1), keys - self.count)
        return 0, self.count + rest[1]

    def full_range(self, first: int, end: int, keys: int) -> tuple[int, int]:
        if first < self.count:
            return 0, first + 1
        low, high = self.rest.full_range(first - self.count, end - self.count, keys - self.count)
        return 0, self.count + (high if low == 0 else 0)


@dataclass(frozen=True, eq=False)
class Turned(Mask):
    """Mask `rest` with the roles of keys and queries exchanged: query q of this mask is key q, key k is query k.

    Attributes:
        rest: mask of T queries at the last T of S positions.
        first: position of the first query among the keys, S - T.
        later: whether to keep the keys after a query's position, instead of those up to it.
        counted_BT: bool, queries to keep; None keeps all.
    """

    rest: Mask
    first: int
    later: bool = False
    counted_BT: Tensor | None = None

    @property
    def sizes(self) -> tuple[int, int]:
        rows, heads = self.rest.sizes
        return (rows if self.counted_BT is None else max(rows, len(self.counted_BT))), heads

    def allowed(self, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        key, query = q + self.first, k + self.first  # the positions of FlexAttention's queries begin at T - S
        seen = self.rest.allowed(b, h, query, key) & ((key > query) == self.later)
        return seen if self.counted_BT is None else seen & self.counted_BT[b, k]


@dataclass(frozen=True, eq=False)
class HiddenFirst(WrappedMask):
    """Mask that hides the first `count` keys from the queries after them; the first `count` queries are unchanged."""

    count: int = 1

    def allowed(self, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return self.rest.allowed(b, h, q, k) & ((q < self.count) | (k >= self.count))

    def key_range(self, first: int, end: int, keys: int) -> tuple[int, int]:
        low, high = self.rest.key_range(first, end, keys)
        return (low if first < self.count else max(low, self.count)), high

    def full_range(self, first: int, end: int, keys: int) -> tuple[int, int]:
        low, high = self.rest.full_range(first, end, keys)
        low = low if end <= self.count else max(low, self.count)
        return low, max(low, high)


@dataclass(frozen=True, eq=False)
class Padded(WrappedMask):
    """Mask with left padding; the number of padding positions may differ between rows.

    No real query sees padding. A padding query sees only its own key, so that every query sees a key. `rest` is the
    mask of the sequence without its padding.

    Args:
        padding_B: number of padding positions at the start of each row.
    """

    padding_B: Tensor

    @property
    def sizes(self) -> tuple[int, int]:
        return len(self.padding_B), self.rest.sizes[1]

    def of(self, row: int, heads: slice) -> Mask:
        return Padded(self.rest.of(row, heads), self.padding_B[row : row + 1])

    def allowed(self, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        before = self.padding_B[b]
        seen = (k >= before) & (q >= before) & self.rest.allowed(b, h, q - before, k - before)
        return seen | ((k == q) & (q < before))


@dataclass(frozen=True, eq=False)
class Document(Mask):
    """Document mask: query t sees the keys s <= t with the same document ID.

    Args:
        documents_BS: integer document ID of every position.
    """

    documents_BS: Tensor

    @property
    def sizes(self) -> tuple[int, int]:
        return len(self.documents_BS), 1

    def of(self, row: int, heads: slice) -> Mask:
        return Document(self.documents_BS[row : row + 1])

    def allowed(self, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        # `Leading` and `Padded` pass negative positions for leading tokens and padding, and ignore the results.
        return (k <= q) & (self.documents_BS[b, q.clamp(min=0)] == self.documents_BS[b, k.clamp(min=0)])


@dataclass(frozen=True, eq=False)
class Dense(Mask):
    """Explicit boolean mask, under which a query may see no key, for example at padding.

    Args:
        allowed_BHTS: bool, True where a query sees a key; axes B and H may have size 1. The T queries are at the last T
            key positions.
        later: True if some query may see a later key.
    """

    allowed_BHTS: Tensor
    later: bool = False

    @property
    def causal(self) -> bool:
        return not self.later

    @property
    def sizes(self) -> tuple[int, int]:
        return self.allowed_BHTS.shape[0], self.allowed_BHTS.shape[1]

    @property
    def may_be_empty(self) -> bool:
        return True

    @property
    def _offset(self) -> int:
        return self.allowed_BHTS.shape[3] - self.allowed_BHTS.shape[2]

    def of(self, row: int, heads: slice) -> Mask:
        rows, all_heads = self.sizes
        mine = slice(row, row + 1) if rows > 1 else slice(None)
        return replace(self, allowed_BHTS=self.allowed_BHTS[mine, heads if all_heads > 1 else slice(None)])

    def allowed(self, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        b, h = broadcast_index(b, self.sizes[0]), broadcast_index(h, self.sizes[1])
        return self.allowed_BHTS[b, h, q - self._offset, k]

    def block(self, first: int, end: int, low: int, high: int, device: torch.device) -> Tensor:
        return self.allowed_BHTS[:, :, first - self._offset : end - self._offset, low:high]


@dataclass(frozen=True, eq=False)
class Both(Mask):
    """Intersection of two masks."""

    one: Mask
    other: Mask

    @property
    def causal(self) -> bool:
        return self.one.causal or self.other.causal

    @property
    def sizes(self) -> tuple[int, int]:
        (rows, heads), (other_rows, other_heads) = self.one.sizes, self.other.sizes
        return max(rows, other_rows), max(heads, other_heads)

    @property
    def may_be_empty(self) -> bool:
        return True

    def of(self, row: int, heads: slice) -> Mask:
        return Both(self.one.of(row, heads), self.other.of(row, heads))

    def allowed(self, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return self.one.allowed(b, h, q, k) & self.other.allowed(b, h, q, k)

    def block(self, first: int, end: int, low: int, high: int, device: torch.device) -> Tensor:
        return self.one.block(first, end, low, high, device) & self.other.block(first, end, low, high, device)

    def key_range(self, first: int, end: int, keys: int) -> tuple[int, int]:
        return _overlap(self.one.key_range(first, end, keys), self.other.key_range(first, end, keys))

    def full_range(self, first: int, end: int, keys: int) -> tuple[int, int]:
        return _overlap(self.one.full_range(first, end, keys), self.other.full_range(first, end, keys))


def _overlap(one: tuple[int, int], other: tuple[int, int]) -> tuple[int, int]:
    low = max(one[0], other[0])
    return low, max(low, min(one[1], other[1]))


def both(one: Mask, other: Mask) -> Mask:
    """Return the intersection of two masks; `other` itself if it is causal and `one` is `Causal`.

    `Leading` is kept, although it may be plain, because `without_first` needs its number of leading tokens.
    """
    return other if isinstance(one, Causal) and other.causal else Both(one, other)


def without_first(mask: Mask, count: int) -> Mask:
    """Return a mask that also hides the first `count` keys of the sequence from the queries after them.

    The sequence begins after padding and leading tokens.
    """
    if isinstance(mask, Leading | Padded):
        return replace(mask, rest=without_first(mask.rest, count))
    if isinstance(mask, Both):
        return replace(mask, one=without_first(mask.one, count))  # `one` has the padding and leading tokens, if any
    return HiddenFirst(mask, count)


CAUSAL = Causal()


class MaskTensor(Tensor):
    """Boolean mask (B, 1, T, S) whose entries are computed only by the first operation on it.

    A model's code passes it to its attention layers like any other tensor, so that they can read `rule` instead of
    T x S entries. Copies to other devices keep the rule.

    Args:
        rule: mask with the same visible keys at all real tokens.
        compute: function that returns the entries, as a plain tensor.
    """

    rule: Mask
    compute: Callable[[], Any]
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]  # results are plain tensors

    @staticmethod
    def __new__(cls, rule: Mask, compute: Callable[[], Any], shape: Sequence[int], device: torch.device) -> Self:
        made: Self = Tensor._make_wrapper_subclass(cls, shape, dtype=torch.bool, device=device)
        made.rule, made.compute = rule, functools.cache(compute)
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        assert not func._schema.is_mutable, "a mask that is changed in place would no longer have its rule"
        given, options = args[0], kwargs or {}
        if func is torch.ops.aten._to_copy.default and options.get("dtype") in (None, torch.bool):
            device = options.get("device") or given.device
            return cls(given.rule, lambda: given.compute().to(device), given.shape, device)
        plain, options = tree_map_only(cls, lambda mask: mask.compute(), (args, options))
        return func(*plain, **options)


@dataclass(frozen=True)
class RealTokens:
    """Positions of the real tokens of a batch.

    Attributes:
        mask_BT: bool, True at real tokens; they are contiguous in every row.
        count_B: number of real tokens of each row.
        index_BR: column of the r-th real token (from 0) of each row, r < R = max(count_B); arbitrary where `valid_BR`
            is False.
        valid_BR: bool, False past the last real token of a row.
        padded: True if any position is padding.
    """

    mask_BT: Tensor
    count_B: Tensor
    index_BR: Tensor
    valid_BR: Tensor
    padded: bool

    def to(self, device: torch.device) -> "RealTokens":
        """Return a copy with all tensors on `device`, without synchronising it; self if they are already on it."""
        if self.mask_BT.device == device:
            return self
        return _aligned(self.mask_BT.to(device, non_blocking=True), self.index_BR.shape[1], self.padded)

    def from_position(self, position: int) -> Tensor:
        """Return a boolean mask (B, T) of the real tokens from the `position`-th of each row (1-based) on."""
        return self.mask_BT & (self.mask_BT.cumsum(1) >= position)

    def align(self, x: Tensor) -> Tensor:
        """Shift x (B, ..., T) to (B, ..., R), with each row's first real token at index 0 and zeros past its last."""
        shape = (x.shape[0],) + (1,) * (x.ndim - 2) + (-1,)
        index, valid = (part.to(x.device).view(shape) for part in (self.index_BR, self.valid_BR))
        return torch.where(valid, x.gather(-1, index.expand(*x.shape[:-1], -1)), 0)


def real_tokens(mask_BT: Tensor) -> RealTokens:
    """Build `RealTokens` from a padding mask (non-zero = real token) with padding on the left, the right or both.

    Raises:
        InputError: if the mask does not have the shape (sequences, positions), or if a row has no real token or has
            padding between its tokens.
    """
    if mask_BT.ndim != 2:
        raise InputError(
            f"attention mask of shape {tuple(mask_BT.shape)}: expected (sequences, positions), 0 at padding"
        )
    mask_BT = mask_BT != 0
    count_B, first_B = mask_BT.sum(1), mask_BT.int().argmax(1)
    if not bool(count_B.all()):
        row = int((count_B == 0).nonzero()[0])
        raise InputError(f"sequence {row} (from 0) of the batch is all padding: remove it or check the attention mask")
    columns_T = torch.arange(mask_BT.shape[1], device=mask_BT.device)
    block_BT = (columns_T >= first_B[:, None]) & (columns_T < (first_B + count_B)[:, None])
    if not torch.equal(block_BT, mask_BT):
        row = int((block_BT != mask_BT).any(1).nonzero()[0])
        raise InputError(
            f"sequence {row} (from 0) of the batch has padding between its tokens: pad on the right, or on the left "
            "(for generation)"
        )
    return _aligned(mask_BT, int(count_B.max()), not bool(mask_BT.all()))


def _aligned(mask_BT: Tensor, longest: int, padded: bool) -> RealTokens:
    count_B, first_B = mask_BT.sum(1), mask_BT.int().argmax(1)
    steps_R = torch.arange(longest, device=mask_BT.device)
    index_BR = (first_B[:, None] + steps_R).clamp(max=mask_BT.shape[1] - 1)
    return RealTokens(mask_BT, count_B, index_BR, steps_R < count_B[:, None], padded)
