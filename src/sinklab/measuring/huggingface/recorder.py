"""What a probe keeps, however it watches: the records of all sequences, and one layer's sums while it is decoding."""

import inspect
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from sinklab.attention.importance import ColumnSums
from sinklab.errors import SinklabError
from sinklab.measuring import metrics
from sinklab.measuring.huggingface.anatomy import attention_layers
from sinklab.measuring.padding import RealTokens, real_tokens
from sinklab.measuring.records import LayerRecord
from sinklab.measuring.statistics.watch import DetailsWatch
from sinklab.measuring.visible import View, seen_over

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class Recorder(ABC):
    """The part that all probes have: the records of the sequences read, those watched now being the last.

    Args:
        lengths: at which the sequences are cut as well.
        details: is shown every layer.

    Attributes:
        backends: what computed the attention outputs ("one pass", "sdpa", "chunked", "eager").
    """

    def __init__(self, model: "PreTrainedModel", lengths: Sequence[int], details: DetailsWatch | None) -> None:
        self.backends: set[str] = set()
        self._model, self._lengths, self._details = model, tuple(lengths), details
        self._signature = inspect.signature(model.forward)
        self._expected = attention_layers(model.config)
        self._done: list[tuple[RealTokens, list[LayerRecord]]] = []  # of sequences before those watched now
        self._tokens_BT: Tensor | None = None
        self._real: RealTokens | None = None
        self._paused = False

    @property
    def layers(self) -> list[LayerRecord]:
        """Importance and norms, one record per attention layer in the order of their calls; 0 past a sequence's end."""
        batches = [layers for layers in (*(layers for _, layers in self._done), self._latest()) if layers]
        if len(batches) < 2:
            return batches[0] if batches else []
        return [_joined(parts) for parts in zip(*batches, strict=True)]

    @property
    def real(self) -> RealTokens | None:
        """Where the real tokens of all sequences stand; None before the first pass."""
        batches = [real for real in (*(real for real, _ in self._done), self._real) if real is not None]
        if len(batches) < 2:
            return batches[0] if batches else None
        longest = max(real.mask_BT.shape[1] for real in batches)
        padded = [F.pad(real.mask_BT, (0, longest - real.mask_BT.shape[1])) for real in batches]
        return real_tokens(torch.cat([mask_BT.to(padded[0].device) for mask_BT in padded]))

    def clear(self) -> None:
        """Forget what was recorded."""
        self._done, self._tokens_BT, self._real = [], None, None
        self._forget_latest()

    def _begin(self, tokens_BT: Tensor | None, layers: list[LayerRecord]) -> None:
        """Other sequences begin, after those that `layers` are of; or the same, once more and longer.

        Args:
            tokens_BT: their ids, where they are known.
            layers: empty where there were none, or their last pass failed.
        """
        if self._real is not None and layers and not _goes_on(self._tokens_BT, tokens_BT):
            self._done.append((self._real, layers))
        self._tokens_BT, self._real = tokens_BT, None
        self._forget_latest()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Calls of the model inside the block record nothing; none of them may reach an attention layer."""
        self._paused = True
        try:
            yield
        finally:
            self._paused = False

    @abstractmethod
    def _latest(self) -> list[LayerRecord]:
        """The records of the sequences watched now."""

    @abstractmethod
    def _forget_latest(self) -> None:
        """Leave nothing of them."""


def _goes_on(before_BT: Tensor | None, now_BT: Tensor | None) -> bool:
    if before_BT is None or now_BT is None or len(before_BT) != len(now_BT) or before_BT.shape[1] >= now_BT.shape[1]:
        return False
    return torch.equal(before_BT, now_BT[:, : before_BT.shape[1]])


def _joined(parts: Sequence[LayerRecord]) -> LayerRecord:
    longest = max(part.importance_BHT.shape[-1] for part in parts)

    def lengthened(x: Tensor) -> Tensor:
        return F.pad(x, (0, longest - x.shape[-1]))

    bias = [part.bias_BH for part in parts if part.bias_BH is not None]
    visible = [(part, part.visible_BHT) for part in parts]  # short sequences may fit into a window
    view = next((part.view for part in parts if part.view is not None), None)
    return LayerRecord(
        torch.cat([lengthened(part.importance_BHT) for part in parts]),
        torch.cat(bias) if bias else None,
        torch.cat([lengthened(part.key_norm_BT) for part in parts]),
        torch.cat([lengthened(part.value_norm_BT) for part in parts]),
        tuple(torch.cat(prefixes) for prefixes in zip(*(part.prefixes for part in parts), strict=True)),
        torch.cat([lengthened(part.importance_BHT if x is None else x) for part, x in visible]) if view else None,
        view,
    )


class LayerTotals:
    """Column sums and norms of one layer, over the passes of one sequence. T new queries meet S keys in each."""

    def __init__(self, lengths: Sequence[int] = ()) -> None:
        self._lengths = lengths
        self._prefixes_BHES: Tensor | None = None
        self._sums_BHT: Tensor | None = None
        self._earlier_BHT: Tensor | None = None
        self._seen_by_BGT: Tensor | None = None
        self._bias_BH: Tensor | None = None
        self._key_norms: list[Tensor] = []
        self._value_norms: list[Tensor] = []

    @torch.no_grad()
    def add(self, sums: ColumnSums, seen_by_BGS: Tensor, key_BGSD: Tensor, value_BGSV: Tensor, queries: int) -> None:
        """Take in a pass. A cache that drops keys behind a sliding window hands over the last S of them.

        Args:
            seen_by_BGS: how many of the pass's counted queries may see each key; batch and head may be 1.

        Raises:
            SinklabError: more keys than tokens have been seen: a cache filled outside of the probe, or a static one.
        """
        before = 0 if self._sums_BHT is None else self._sums_BHT.shape[-1]
        seen, keys = before + queries, key_BGSD.shape[2]
        if keys > seen:
            raise SinklabError(
                f"{keys} keys met {seen} tokens that the probe has seen: put the probe around the whole sequence, the "
                "first call included, with a dynamic cache (the default) or use_cache=False"
            )
        self._sums_BHT = _grown(self._sums_BHT, sums.keys_BHS, seen)
        self._seen_by_BGT = _grown(self._seen_by_BGT, seen_by_BGS, seen)
        if sums.earlier_BHS is not None:
            self._earlier_BHT = _grown(self._earlier_BHT, sums.earlier_BHS, seen)
        if sums.bias_BH is not None:
            self._bias_BH = sums.bias_BH if self._bias_BH is None else self._bias_BH + sums.bias_BH
        self._key_norms.append(metrics.token_norms(key_BGSD[:, :, -queries:]).mean(1))
        self._value_norms.append(metrics.token_norms(value_BGSV[:, :, -queries:]).mean(1))

    def add_prefixes(self, prefixes_BHES: Tensor) -> None:
        """Take in the sums over the queries before each length."""
        self._prefixes_BHES = prefixes_BHES

    @torch.no_grad()
    def record(self, real: RealTokens) -> LayerRecord:
        """Means over the real tokens so far."""
        assert self._sums_BHT is not None
        assert self._seen_by_BGT is not None
        count_B = real.count_B.to(self._sums_BHT.device)
        importance_BHT = metrics.importance_from_sums(real.align(self._sums_BHT), count_B)
        visible_BHT, view = self._visible(real, count_B)
        return LayerRecord(
            importance_BHT,
            None if self._bias_BH is None else self._bias_BH / count_B[:, None],
            real.align(torch.cat(self._key_norms, -1)),
            real.align(torch.cat(self._value_norms, -1)),
            self._cut(),
            visible_BHT,
            view,
        )

    def _visible(self, real: RealTokens, count_B: Tensor) -> tuple[Tensor | None, View | None]:
        assert self._sums_BHT is not None
        assert self._seen_by_BGT is not None
        sums_BHT = self._sums_BHT
        if self._earlier_BHT is not None:
            sums_BHT = sums_BHT + F.pad(self._earlier_BHT, (0, sums_BHT.shape[-1] - self._earlier_BHT.shape[-1]))
        seen_by_BGT = real.align(self._seen_by_BGT.expand(len(sums_BHT), -1, -1))
        return seen_over(real.align(sums_BHT), seen_by_BGT, count_B)

    def _cut(self) -> tuple[Tensor, ...]:
        if self._prefixes_BHES is None:
            return ()
        sums = zip(self._lengths, self._prefixes_BHES.unbind(2), strict=True)
        return tuple(prefix_importance(sums_BHS, length) for length, sums_BHS in sums)


def _grown(total_BHT: Tensor | None, part_BHS: Tensor, positions: int) -> Tensor:
    """Sums over the passes so far, at all positions, with those of another pass added to the last S of them."""
    part_BHT = F.pad(part_BHS, (positions - part_BHS.shape[-1], 0))
    return part_BHT if total_BHT is None else F.pad(total_BHT, (0, positions - total_BHT.shape[-1])) + part_BHT


def prefix_importance(sums_BHS: Tensor, length: int) -> Tensor:
    """alpha (B, H, length) from sums over the first `length` queries, of sequences without padding."""
    return metrics.importance_from_sums(sums_BHS[..., :length], torch.full((len(sums_BHS),), length))
