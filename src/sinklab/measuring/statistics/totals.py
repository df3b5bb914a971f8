"""Details over batches: means over the sequences that have what is averaged, and the strongest secondary sinks."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from sinklab.measuring import metrics
from sinklab.measuring.statistics.details import (
    ALIGNED,
    FIRST_FEW,
    STANDS_OUT,
    STRONGEST,
    Details,
    SecondarySink,
    bucket_starts,
)
from sinklab.measuring.statistics.layer import LayerDetails
from sinklab.measuring.statistics.watch import BatchDetails


class _Mean:
    """A running mean over sequences, float64 on the CPU; `valid` says which sequences have the value."""

    def __init__(self, length: int | None) -> None:
        self._sum: Tensor | None = None
        self._count: Tensor | None = None
        self._length = length

    def add(self, values_XBY: Tensor, valid_BY: Tensor | None = None) -> None:
        """X any axes before the sequences (layers), Y any after; with a length, the last of Y is padded to it."""
        values = values_XBY.cpu().double()
        if valid_BY is None:
            total, count = values.sum(1), torch.tensor(float(values.shape[1]))
        else:
            total, count = torch.where(valid_BY, values, 0).sum(1), valid_BY.double().sum(0)
        if self._length is not None:
            total = _wider(total, self._length)
            count = count if valid_BY is None else _wider(count, self._length)
        self._sum = total if self._sum is None else self._sum + total
        self._count = count if self._count is None else self._count + count

    def value(self) -> np.ndarray | None:
        """None where nothing was added; 0 where no sequence had the value."""
        if self._sum is None or self._count is None:
            return None
        return (self._sum / self._count.clamp(min=1)).float().numpy()


class DetailTotals:
    """Sums of batches.

    Args:
        eps: threshold of a secondary sink.
        length: T, the positions of the longest sequence.
    """

    def __init__(self, eps: float, length: int) -> None:
        self._eps, self._length = eps, length
        self._distances, self._queries = bucket_starts(0, length - 1), bucket_starts(1, length)
        names = ("entropy", "secondary", "by_distance", "first_by_query", "rest_by_query")
        by_position = ("cosine", "norm_product", "value", "kurtosis", "alignment")
        widths = {"by_distance": len(self._distances), "first_by_query": len(self._queries)}
        widths |= {"rest_by_query": len(self._queries)} | dict.fromkeys(by_position, length)
        self._means = {name: _Mean(widths.get(name)) for name in (*names, *by_position)}
        self._kurtosis_M: Tensor | None = None
        self._tokens = self._sequences = 0
        self._strongest: list[SecondarySink] = []
        self._maps: Sequence[tuple[int, int]] = ()
        self._map_sums_PKTT: Tensor | None = None
        self._reaching_T = torch.zeros(length, dtype=torch.float64)

    def add(self, batch: BatchDetails, importance_ABHR: Tensor, hidden_MBR: Tensor | None, valid_BR: Tensor) -> None:
        """Take in one batch.

        Args:
            importance_ABHR: alpha per sequence.
            hidden_MBR: norms of the residual stream; None where blocks cannot be read.
            valid_BR: bool, False past the end of a sequence; on the CPU.
        """
        valid_BR, valid_B1R = valid_BR.cpu(), valid_BR.cpu()[:, None]
        self._attention(batch.layers, valid_B1R)
        self._means["value"].add(_over_layers(batch.values), valid_B1R)
        if batch.kurtosis_MBR is not None and batch.alignment_MBR is not None:
            self._means["kurtosis"].add(batch.kurtosis_MBR, valid_BR)
            self._means["alignment"].add(batch.alignment_MBR, valid_BR)
            kurtosis_M = torch.where(valid_BR, batch.kurtosis_MBR, 0).double().sum((1, 2))
            self._kurtosis_M = kurtosis_M if self._kurtosis_M is None else self._kurtosis_M + kurtosis_M
        self._tokens += int(valid_BR.sum())
        self._find_secondary(batch, importance_ABHR.cpu(), None if hidden_MBR is None else hidden_MBR.cpu(), valid_BR)
        self._add_maps(batch)
        self._reaching_T += _wider(valid_BR.double().sum(0), self._length)
        self._sequences += len(valid_BR)

    def _attention(self, layers: Sequence[LayerDetails], valid_B1R: Tensor) -> None:
        self._means["entropy"].add(_over_layers([one.entropy_BH for one in layers]))
        self._means["by_distance"].add(_over_layers([one.distance_BHD for one in layers]))
        for name, parts in (
            ("cosine", [one.cosine_BHR for one in layers]),
            ("norm_product", [one.product_BHR for one in layers]),
        ):
            if known := [part for part in parts if part is not None]:
                self._means[name].add(_over_layers(known), valid_B1R)
        R = valid_B1R.shape[-1]
        member_RQ = self._buckets(R)
        count_B1Q = valid_B1R.double() @ member_RQ
        for name, parts in (
            ("first_by_query", [one.first_BHR for one in layers]),
            ("rest_by_query", [one.rest_BHR for one in layers]),
        ):
            sums_ABHQ = _over_layers(parts) @ member_RQ
            self._means[name].add(sums_ABHQ / count_B1Q.clamp(min=1), count_B1Q > 0)

    def _buckets(self, positions: int) -> Tensor:
        """1 where a query (row, 1-based) belongs to a bucket (column)."""
        starts_Q = torch.tensor(self._queries)
        bucket_R = torch.searchsorted(starts_Q, torch.arange(1, positions + 1), right=True) - 1
        return torch.nn.functional.one_hot(bucket_R, len(starts_Q)).double()

    def _find_secondary(
        self, batch: BatchDetails, importance_ABHR: Tensor, hidden_MBR: Tensor | None, valid_BR: Tensor
    ) -> None:
        position_R = torch.arange(1, valid_BR.shape[1] + 1)
        count_B1 = valid_BR.sum(1, keepdim=True)
        candidate_BR = (position_R > FIRST_FEW) & (2 * position_R <= count_B1)
        above_ABHR = (importance_ABHR > self._eps) & candidate_BR[:, None]
        self._means["secondary"].add(100.0 * above_ABHR.any(-1))
        heads_BR, mean_BR = 100 * above_ABHR.double().mean((0, 2)), importance_ABHR.double().mean((0, 2))
        place_B = ratio_B = None
        alike_BR = torch.zeros_like(candidate_BR)
        if batch.alignment_MBR is not None and hidden_MBR is not None:
            others_MB = torch.where(valid_BR, hidden_MBR, 0)[..., 1:].sum(-1) / (count_B1[:, 0] - 1).clamp(min=1)
            ratio_B, place_B = (hidden_MBR[..., 0] / others_MB.clamp(min=1e-30)).max(0)
            aligned_BR = batch.alignment_MBR[place_B, torch.arange(len(place_B))]
            alike_BR = (aligned_BR > ALIGNED) & (ratio_B >= STANDS_OUT)[:, None] & candidate_BR
        for b, at in ((heads_BR > 0) | alike_BR).nonzero().tolist():
            block = None if place_B is None else int(place_B[b])
            self._strongest.append(
                SecondarySink(
                    sequence=self._sequences + b + 1,
                    position=at + 1,
                    token=int(batch.tokens_BR[b, at]),
                    heads=float(heads_BR[b, at]),
                    importance=float(mean_BR[b, at]),
                    block=block,
                    alignment=None
                    if block is None or batch.alignment_MBR is None
                    else float(batch.alignment_MBR[block, b, at]),
                )
            )
        self._strongest.sort(key=lambda one: (-one.heads, -one.importance, one.sequence, one.position))
        del self._strongest[STRONGEST:]

    def _add_maps(self, batch: BatchDetails) -> None:
        if not batch.maps:
            return
        self._maps = batch.maps
        drawn = {
            (layer, head): one.maps_PKRR[place]
            for layer, one in enumerate(batch.layers, 1)
            for place, head in enumerate(head for at, head in batch.maps if at == layer)
        }
        sums = torch.stack([drawn[wanted].cpu().double() for wanted in batch.maps])
        short = self._length - sums.shape[-1]
        sums = torch.nn.functional.pad(sums, (0, short, 0, short))
        self._map_sums_PKTT = sums if self._map_sums_PKTT is None else self._map_sums_PKTT + sums

    def details(self) -> Details:
        """The means over everything that was added."""
        found = {name: mean.value() for name, mean in self._means.items()}
        value_LHT = found.pop("value")
        cosine, product = found["cosine"], found["norm_product"]
        entropy, secondary = found["entropy"], found["secondary"]
        assert entropy is not None
        assert secondary is not None
        assert value_LHT is not None
        maps = self._finished_maps(with_angles=cosine is not None)
        ratio = None
        if self._length > 1:  # 0 where the other values are all zero
            ratio = metrics.first_to_rest(torch.from_numpy(value_LHT)).nan_to_num(0, 0).numpy()
        kurtosis_M = None if self._kurtosis_M is None else (self._kurtosis_M / self._tokens).tolist()
        return Details.model_validate(
            {
                "entropy_by_layer": entropy.mean(1).tolist(),
                "cosine_first": _first(cosine),
                "cosine_rest": _rest(cosine),
                "norm_product_first": _first(product),
                "norm_product_rest": _rest(product),
                "kurtosis_by_block": kurtosis_M,
                "secondary_rate": float(secondary.mean(dtype=np.float64)),
                "secondary_sinks": self._strongest,
                "distances": self._distances,
                "queries": self._queries,
                "maps": list(self._maps),
                "value_ratio": ratio,
                **found,
                **maps,
            }
        )

    def _finished_maps(self, with_angles: bool) -> dict[str, np.ndarray]:
        if self._map_sums_PKTT is None:
            return {}
        means_PKTT = (self._map_sums_PKTT / self._reaching_T.clamp(min=1)[:, None]).float().numpy()
        names = ("map_attention", "map_cosine", "map_norm_product")[: 3 if with_angles else 1]
        return {name: np.ascontiguousarray(means_PKTT[:, layer]) for layer, name in enumerate(names)}


def _over_layers(parts: Sequence[Tensor]) -> Tensor:
    """Stacked, float64, on the CPU: layers may lie on several devices."""
    return torch.stack([part.cpu().double() for part in parts])


def _wider(x: Tensor, length: int) -> Tensor:
    return torch.nn.functional.pad(x, (0, length - x.shape[-1]))


def _first(by_position: np.ndarray | None) -> list[float] | None:
    return None if by_position is None else by_position[..., 0].mean(1).tolist()


def _rest(by_position: np.ndarray | None) -> list[float] | None:
    if by_position is None or by_position.shape[-1] < 2:
        return None
    return by_position[..., 1:].mean((1, 2)).tolist()
