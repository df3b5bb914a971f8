"""Details over batches: means over the sequences that have what is averaged, and the strongest secondary sinks."""

from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from sinklab.measuring.statistics.block import bucket_starts
from sinklab.measuring.statistics.declared import Statistic
from sinklab.measuring.statistics.details import STATISTICS, Details
from sinklab.measuring.statistics.maps import MapTotals
from sinklab.measuring.statistics.secondary import SecondarySearch
from sinklab.measuring.statistics.watch import BatchDetails


class DetailTotals:
    """Sums of batches.

    Args:
        eps: threshold of a secondary sink.
        length: T, the positions of the longest sequence.
    """

    def __init__(self, eps: float, length: int) -> None:
        self._distances, self._queries = bucket_starts(0, length - 1), bucket_starts(1, length)
        widths = {"T": length, "D": len(self._distances), "Q": len(self._queries)}
        self._means = {name: _Mean(one, widths) for name, one in STATISTICS.items()}
        self._search, self._maps = SecondarySearch(eps), MapTotals(length)

    def add(self, batch: BatchDetails, importance_ABHR: Tensor, hidden_MBR: Tensor | None, valid_BR: Tensor) -> None:
        """Take in one batch, these tensors on the CPU.

        Args:
            importance_ABHR: alpha per sequence.
            hidden_MBR: norms of the residual stream; None where blocks cannot be read.
            valid_BR: bool, False past the end of a sequence.
        """
        alignment_MBR = batch.stream.get("alignment")
        seen = {name: _over_layers(parts) for name, parts in batch.layers.items()} | dict(batch.stream)
        seen["secondary"] = self._search.find(importance_ABHR, hidden_MBR, alignment_MBR, batch.tokens_BR, valid_BR)
        for name, values in seen.items():
            mean = self._means[name]
            mean.add(*(self._by_bucket(values, valid_BR) if mean.axes == "LHQ" else (values, valid_BR)))
        self._maps.add(batch.maps, valid_BR)

    def _by_bucket(self, values_ABHR: Tensor, valid_BR: Tensor) -> tuple[Tensor, Tensor]:
        """Means over the queries of each bucket (A, B, H, Q), and which sequences have such queries (B, Q)."""
        member_RQ = self._buckets(valid_BR.shape[1])
        count_BQ = valid_BR.double() @ member_RQ
        return values_ABHR @ member_RQ / count_BQ[:, None].clamp(min=1), count_BQ > 0

    def _buckets(self, positions: int) -> Tensor:
        """1 where a query (row, 1-based) belongs to a bucket (column)."""
        starts_Q = torch.tensor(self._queries)
        bucket_R = torch.searchsorted(starts_Q, torch.arange(1, positions + 1), right=True) - 1
        return torch.nn.functional.one_hot(bucket_R, len(starts_Q)).double()

    def details(self) -> Details:
        """The means over everything that was added."""
        arrays = {name: array for name, mean in self._means.items() if (array := mean.array()) is not None}
        by_layer = {
            field: numbers for name, mean in self._means.items() for field, numbers in mean.fields(arrays.get(name))
        }
        maps = {
            name: array
            for name, array in self._maps.means().items()
            if "cosine" in arrays or not STATISTICS[name].angles
        }
        return Details.model_validate(
            {
                **by_layer,
                "secondary_rate": float(arrays["secondary"].mean(dtype=np.float64)),
                "secondary_sinks": self._search.strongest,
                "secondary_tokens": self._search.tokens(),
                "distances": self._distances,
                "queries": self._queries,
                "maps": list(self._maps.sums),
                **arrays,
                **maps,
            }
        )


class _Mean:
    """The running mean of one statistic over the sequences that have it, float64 on the CPU.

    Args:
        statistic: what is averaged.
        widths: to which the last axis is padded, by axis.
    """

    def __init__(self, statistic: Statistic, widths: Mapping[str, int]) -> None:
        self.axes = statistic.averaged or statistic.axes
        self._statistic, self._width = statistic, widths.get(self.axes[-1])
        self._sum: Tensor | None = None
        self._count: Tensor | None = None
        self._over_tokens_M, self._tokens = torch.zeros(1, dtype=torch.float64), 0

    def add(self, values_XBY: Tensor, valid_BY: Tensor) -> None:
        """X layers or places, Y what there is of each sequence; `valid_BY` says which sequences have positions."""
        values, count = values_XBY.cpu().double(), torch.tensor(float(values_XBY.shape[1]))
        if self.axes[-1] in "TQ":
            valid = valid_BY[:, None] if "H" in self.axes else valid_BY
            values, count = torch.where(valid, values, 0), self._wide(valid.double().sum(0))
        total = self._wide(values.sum(1))
        if self.axes == "MT":
            self._over_tokens_M = self._over_tokens_M + values.sum((1, 2))
            self._tokens += int(valid_BY.sum())
        self._sum = total if self._sum is None else self._sum + total
        self._count = count if self._count is None else self._count + count

    def array(self) -> np.ndarray | None:
        """None where nothing was added; 0 where no sequence had the value."""
        if self._sum is None or self._count is None:
            return None
        return self._statistic.of_mean((self._sum / self._count.clamp(min=1)).float().numpy())

    def fields(self, array: np.ndarray | None) -> Iterable[tuple[str, list[float] | None]]:
        """What measurement.json holds of the statistic, by name."""
        if not self._statistic.fields:
            return ()
        if array is None:
            numbers = [None] * len(self._statistic.fields)
        elif self.axes == "MT":
            numbers = [(self._over_tokens_M / self._tokens).tolist()]
        else:
            numbers = self._statistic.by_layer(array)
        return zip(self._statistic.fields, numbers, strict=True)

    def _wide(self, x: Tensor) -> Tensor:
        return x if self._width is None else torch.nn.functional.pad(x, (0, self._width - x.shape[-1]))


def _over_layers(parts: Sequence[Tensor]) -> Tensor:
    """Stacked, float64, on the CPU: layers may lie on several devices."""
    return torch.stack([part.cpu().double() for part in parts])
