"""The masks, as small closures in FlexAttention's signature; positions are absolute key positions, 0-based."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from sinklab.attention.scores import broadcast_index
from sinklab.attention.visible import Mask, RunningSum


@dataclass(frozen=True)
class Causal(Mask):
    """Query t sees keys s <= t."""

    @property
    def plain(self) -> bool:
        return True

    @property
    def running_sum(self) -> RunningSum:
        return RunningSum()

    def allowed(self, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return k <= q

    def full_range(self, first: int, end: int, keys: int) -> tuple[int, int]:
        return 0, min(first + 1, keys)


@dataclass(frozen=True)
class Window(Mask):
    """Query t sees keys t - width + 1 .. t (2410.10781, figure 6)."""

    width: int

    def allowed(self, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return (k <= q) & (k > q - self.width)

    def key_range(self, first: int, end: int, keys: int) -> tuple[int, int]:
        return max(0, first - self.width + 1), min(end, keys)

    def full_range(self, first: int, end: int, keys: int) -> tuple[int, int]:
        start = max(0, end - self.width)
        return start, max(start, min(first + 1, keys))


@dataclass(frozen=True)
class Prefix(Mask):
    """Causal, and every query also sees the first `length` keys (2410.10781, figure 5)."""

    length: int

    @property
    def causal(self) -> bool:
        return False

    @property
    def running_sum(self) -> RunningSum:
        return RunningSum(shared=self.length)

    def allowed(self, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return (k <= q) | (k < self.length)

    def key_range(self, first: int, end: int, keys: int) -> tuple[int, int]:
        return 0, min(max(end, self.length), keys)

    def full_range(self, first: int, end: int, keys: int) -> tuple[int, int]:
        return 0, min(max(first + 1, self.length), keys)


@dataclass(frozen=True)
class Around(Mask):
    """A mask put around another, which changes what queries see of some keys and tells apart what `rest` does."""

    rest: Mask

    @property
    def causal(self) -> bool:
        return self.rest.causal

    @property
    def rows(self) -> int:
        return self.rest.rows

    @property
    def heads(self) -> int:
        return self.rest.heads

    @property
    def may_be_empty(self) -> bool:
        return self.rest.may_be_empty

    def of(self, row: int, heads: slice) -> Mask:
        return replace(self, rest=self.rest.of(row, heads))


@dataclass(frozen=True)
class Leading(Around):
    """Another mask behind `count` learned tokens: every query sees them, they see only themselves causally."""

    count: int = 1

    @property
    def running_sum(self) -> RunningSum | None:
        inner = self.rest.running_sum
        if inner is None or not inner.shared:
            return inner
        return RunningSum(self.count + inner.leading, self.count + inner.shared)

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


@dataclass(frozen=True)
class HiddenFirst(Around):
    """Another mask from which the first `count` keys are taken away for every query after them.

    Queries among the first `count` keep what they saw, so that no row is empty.
    """

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
class Padded(Around):
    """Another mask behind padding, of which every row has its own number: the rest begins after it.

    No query sees padding, and a query at padding sees itself alone, so that no row is empty.

    Args:
        padding_B: how many positions at the start of each row are padding.
    """

    padding_B: Tensor

    @property
    def rows(self) -> int:
        return len(self.padding_B)

    def of(self, row: int, heads: slice) -> Mask:
        return Padded(self.rest.of(row, heads), self.padding_B[row : row + 1])

    def allowed(self, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        before = self.padding_B[b]
        seen = (k >= before) & (q >= before) & self.rest.allowed(b, h, q - before, k - before)
        return seen | ((k == q) & (q < before))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Padded) and other.padding_B is self.padding_B and other.rest == self.rest

    def __hash__(self) -> int:
        return hash((id(self.padding_B), self.rest))


@dataclass(frozen=True, eq=False)
class Document(Mask):
    """Causal within documents: query t sees those keys s <= t that carry its own document number.

    Args:
        documents_BS: integer document numbers per position.
    """

    documents_BS: Tensor

    @property
    def rows(self) -> int:
        return len(self.documents_BS)

    def of(self, row: int, heads: slice) -> Mask:
        return Document(self.documents_BS[row : row + 1])

    def allowed(self, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        # A mask behind leading tokens is asked about positions before its first, and the answer is not used.
        return (k <= q) & (self.documents_BS[b, q.clamp(min=0)] == self.documents_BS[b, k.clamp(min=0)])

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Document) and other.documents_BS is self.documents_BS

    def __hash__(self) -> int:
        return id(self.documents_BS)


@dataclass(frozen=True)
class Dense(Mask):
    """An explicit mask, as model libraries hand it over; a query may see nothing, as padding does.

    Args:
        allowed_BHTS: bool, True = attend; batch and head may be 1. T queries stand at the last T key positions.
        later: whether some query is allowed a later key.
    """

    allowed_BHTS: Tensor
    later: bool = False

    @property
    def causal(self) -> bool:
        return not self.later

    @property
    def rows(self) -> int:
        return self.allowed_BHTS.shape[0]

    @property
    def heads(self) -> int:
        return self.allowed_BHTS.shape[1]

    @property
    def may_be_empty(self) -> bool:
        return True

    @property
    def _offset(self) -> int:
        """The position of the first query."""
        return self.allowed_BHTS.shape[3] - self.allowed_BHTS.shape[2]

    def of(self, row: int, heads: slice) -> Mask:
        mine = slice(row, row + 1) if self.rows > 1 else slice(None)
        return replace(self, allowed_BHTS=self.allowed_BHTS[mine, heads if self.heads > 1 else slice(None)])

    def allowed(self, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        b, h = broadcast_index(b, self.rows), broadcast_index(h, self.heads)
        return self.allowed_BHTS[b, h, q - self._offset, k]

    def block(self, first: int, end: int, low: int, high: int, device: torch.device) -> Tensor:
        return self.allowed_BHTS[:, :, first - self._offset : end - self._offset, low:high]


@dataclass(frozen=True)
class Both(Mask):
    """What two masks allow."""

    one: Mask
    other: Mask

    @property
    def causal(self) -> bool:
        return self.one.causal or self.other.causal

    @property
    def rows(self) -> int:
        return max(self.one.rows, self.other.rows)

    @property
    def heads(self) -> int:
        return max(self.one.heads, self.other.heads)

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
        ranges = (self.one.key_range(first, end, keys), self.other.key_range(first, end, keys))
        low = max(low for low, _ in ranges)
        return low, max(low, min(high for _, high in ranges))

    def full_range(self, first: int, end: int, keys: int) -> tuple[int, int]:
        ranges = (self.one.full_range(first, end, keys), self.other.full_range(first, end, keys))
        low = max(low for low, _ in ranges)
        return low, max(low, min(high for _, high in ranges))


def both(one: Mask, other: Mask) -> Mask:
    """What two masks allow."""
    return other if one.plain and other.causal else Both(one, other)


CAUSAL = Causal()
