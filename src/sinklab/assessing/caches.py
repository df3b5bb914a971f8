"""A rolling cache as a mask and a move of positions: exact streaming in one pass over the text.

A key that is kept was computed from what its own token saw when it was read. Layer by layer, that is what a mask gives
in which query t sees the keys that the cache held at t, so that nothing need be read token by token. The cache holds C
keys when a query reads it, the query's own included: the first n, and the C - n latest (StreamingLLM, 2309.17453; its
public code counts the cache before the query's own key joins it, and so has one more).

Positions in the cache: the i-th key stands at i, the query at C - 1 once the cache is full. Among the latest keys the
distances are those of the text. Of a first key s the distance is min(t, C - 1) - s: queries are moved there for these
keys alone, by wider queries and keys, [q_t, q_min(t, C-1)] . [k_s, 0] for a late and . [0, k_s] for a first key.
"""

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from sinklab.attention.layer_call import LayerCall
from sinklab.attention.masks import Mask
from sinklab.attention.scores import Score
from sinklab.errors import InputError


@dataclass(frozen=True)
class Kept(Mask):
    """Query t sees the first `first` keys and the latest, `size` in all, its own included."""

    size: int
    first: int

    def allowed(self, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return (k <= q) & ((k < self.first) | (k > q - (self.size - self.first)))

    def key_range(self, first: int, end: int, keys: int) -> tuple[int, int]:
        return 0 if self.first else max(0, first - self.size + 1), min(end, keys)

    def full_range(self, first: int, end: int, keys: int) -> tuple[int, int]:
        start = max(0, end - (self.size - self.first))
        return start, max(start, min(first + 1, keys))


@dataclass(frozen=True)
class RollingCache:
    """An edit: every layer reads from a rolling cache of so many keys; a bias key is not one of them.

    Attributes:
        size: C.
        first: n, the first keys that stay; a learned sink token is the first of them.
        in_cache: positions are those in the cache, not those in the text.
    """

    size: int
    first: int
    in_cache: bool = True

    def __post_init__(self) -> None:
        if not 0 <= self.first < self.size:
            raise InputError(f"a cache of {self.size} keys that keeps the first {self.first}: keep fewer than it holds")

    def __call__(self, layer: LayerCall) -> LayerCall:
        """The call that reads from the cache."""
        layer = layer.under(Kept(self.size, self.first))
        if self.in_cache and layer.length > self.size and (self.first or layer.call.key_HD is not None):
            return self._placed(layer)
        return layer

    def _placed(self, layer: LayerCall) -> LayerCall:
        """Queries nearer to the first keys, as they are in the cache."""
        call = layer.call
        if call.position is not None:
            call = replace(call, position=self._nearer(call.position))
        if layer.shift_rope is not None:
            if not layer.operation.has_logits:
                raise InputError(
                    f"{layer.operation.kind!r} attention is no function of the product of query and key, so its "
                    "rotary positions cannot be those in a cache: give --positions text"
                )
            places_L = torch.arange(layer.length, device=call.q_BHTD.device)
            moved_BHLD = layer.shift_rope(call.q_BHTD, places_L.clamp(max=self.size - 1) - places_L)
            early_L1 = (places_L < self.first)[:, None]
            parts = layer.operation.keys_per_head
            q = _side_by_side(call.q_BHTD, moved_BHLD, parts) * math.sqrt(2)  # scores are over the root of the width
            k = _side_by_side(call.k_BGTD * ~early_L1, call.k_BGTD * early_L1, parts)
            key_HD = call.key_HD
            if key_HD is not None:
                key_HD = _side_by_side(torch.zeros_like(key_HD), key_HD, parts)  # it meets the query where that stands
            call = replace(call, q_BHTD=q, k_BGTD=k, key_HD=key_HD)
        return replace(layer, call=call)

    def _nearer(self, position: Score) -> Score:
        last = self.size - 1

        def function(z: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor, *tensors: Tensor) -> Tensor:
            return position.function(z, b, h, torch.where(k < self.first, q.clamp(max=last), q), k, *tensors)

        return Score(function, position.tensors)


def _side_by_side(one: Tensor, other: Tensor, parts: int) -> Tensor:
    """Two queries or keys in one, for each of the `parts` of a head by itself."""
    return torch.cat((one.unflatten(-1, (parts, -1)), other.unflatten(-1, (parts, -1))), -1).flatten(-2)
