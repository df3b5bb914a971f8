"""Reduce attention rows, values, gates and hidden states of every forward pass to the means in `Details`.

statistic_base.py defines the letters in the shapes; A is the number of attention layers.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sinklab.attention.importance import Rows
from sinklab.attention.masks import RealTokens
from sinklab.attention.query_blocks import accumulate_dtype
from sinklab.errors import InputError
from sinklab.measuring.statistics.details import STATISTICS, Details, OfGates
from sinklab.measuring.statistics.secondary import SecondarySearch
from sinklab.measuring.statistics.statistic_base import (
    Angles,
    Layer,
    OfAngles,
    OfRows,
    OfStates,
    OfStream,
    ScoreBlock,
    Statistic,
    bucket_starts,
    from_the_end,
)
from sinklab.models.hooks import residual_stream, token_norms

MAP_POSITIONS = 4096  # maximum length for maps: a float32 map then takes 64 MiB, and each head has three
Head = tuple[int, int]
S = TypeVar("S", bound=Statistic)


@torch.no_grad()
def layer_details(
    rows: Iterable[Rows], real: RealTokens, angles: Angles | None, mapped: Sequence[int] = ()
) -> tuple[dict[str, Tensor], dict[int, Tensor]]:
    """Compute all statistics of attention rows and the maps of one layer in a single pass over its attention rows.

    Args:
        rows: attention rows of all T queries over T keys.
        real: real tokens among the columns of the batch.
        angles: cosines and norms of these queries and keys; None if queries are not available.
        mapped: heads whose maps are requested, 0-based.

    Returns:
        Two dicts. The first contains the statistics of each sequence, by name: mean over queries (B, H), by distance
        (B, H, distances), by key (B, H, R) or by query (B, H, R). Index 0 of the R positions is the first real token.
        Statistics that need angles are missing if `angles` is None. The second dict contains the maps (3, R, R), by
        head: attention, cosine and norm product, summed over the batch; cosine and norm product are 0 if `angles` is
        None.
    """
    layer: Layer | None = None
    plain = angles is not None and angles.plain
    sums: dict[str, tuple[OfRows, Tensor]] = {}
    maps: dict[int, Tensor] = {}
    for one in rows:
        if layer is None:
            layer, R = Layer(one.weights_BHQS, real, angles), real.index_BR.shape[1]
            maps = {head: one.weights_BHQS.new_zeros(3, R, R) for head in mapped}
            sums = {
                name: (statistic, layer.sums(statistic.axes, one.weights_BHQS))
                for name, statistic in of_kind(OfRows).items()
                if not isinstance(statistic, OfAngles) or (angles is not None and not plain)
            }
        block = ScoreBlock(one, layer)
        if angles is not None and not plain:
            layer.pairs_BHT[:, :, block.keys] += block.cosine_and_seen[1].sum(-2)
        for statistic, sums_BHX in sums.values():
            statistic.read(block, sums_BHX)
        _draw(maps, block)
    assert layer is not None
    if plain:
        layer.pairs_BHT += from_the_end(layer.counted_BT)[:, None]
        sums |= {name: (statistic, statistic.causal(layer)) for name, statistic in of_kind(OfAngles).items()}
    return {name: statistic.mean(sums_BHX, layer) for name, (statistic, sums_BHX) in sums.items()}, maps


def _draw(sums: Mapping[int, Tensor], block: ScoreBlock) -> None:
    """Add a block of queries to the maps of its layer; entries of masked keys stay 0.

    Args:
        sums: maps by head, 0-based: attention, cosine and norm product (3, R, R). If queries are not available, only
            the attention is added.
    """
    part, layer = block.part, block.layer
    for head, sums_KRR in sums.items():
        drawn = [block.weights_BHQS[:, head]]
        if layer.sees_queries:
            cosine, seen = (x_BHQS[:, head] for x_BHQS in block.cosine_and_seen)
            q_norm_BQ1 = layer.angles.q_norm_BHT[:, head, block.queries, None]
            drawn += [cosine * seen, q_norm_BQ1 * layer.angles.k_norm_BHT[:, head, None, block.keys] * seen]
        firsts, counts = layer.first_B11.flatten().tolist(), layer.real.count_B.tolist()
        for drawn_KQS, first, count in zip(torch.stack(drawn, 1), firsts, counts, strict=True):
            top, bottom = max(part.start, first), min(part.stop, first + count)
            left, right = max(part.low, first), min(part.high, first + count)
            if top < bottom and left < right:  # aligned at the first real token of each sequence
                inside = drawn_KQS[:, top - part.start : bottom - part.start, left - part.low : right - part.low]
                sums_KRR[: len(inside), top - first : bottom - first, left - first : right - first] += inside


def of_kind(kind: type[S]) -> dict[str, S]:
    """Return the statistics whose class is derived from `kind`, by name."""
    return {name: one for name, one in STATISTICS.items() if isinstance(one, kind)}


@dataclass(frozen=True)
class BatchDetails:
    """Statistics of one forward pass for the accumulator; index 0 of the R positions is the first real token.

    Attributes:
        layers: tensors by statistic name, one per attention layer in call order: (B, H), (B, H, distances) or
            (B, H, R). `value_ratio` has the value norms, repeated over the query heads that share a KV head. Gate
            statistics are missing if the model has no gates.
        stream: statistics of the residual stream before the first block and after each block, by name: per token
            (M, B, R) or per sequence (M, B); empty if blocks cannot be found.
        tokens_BR: token ids.
        maps: attention, cosine and norm product, summed over the batch (3, R, R), by (layer, head), 1-based, in the
            requested order.
    """

    layers: Mapping[str, Sequence[Tensor]]
    stream: Mapping[str, Tensor]
    tokens_BR: Tensor
    maps: Mapping[Head, Tensor]


class DetailsCollector:
    """Collects the statistics of `--details` for one forward pass at a time.

    Args:
        maps: (layer, head) of the requested maps, 1-based.
        length: length of the longest sequence.

    Raises:
        InputError: if maps are requested for sequences of more than `MAP_POSITIONS` tokens.
    """

    def __init__(self, maps: Sequence[Head], length: int) -> None:
        if maps and length > MAP_POSITIONS:
            raise InputError(
                f"the maps of a head over {length} positions would take {3 * 4 * length**2 // 2**20} MiB: "
                f"use --length {MAP_POSITIONS} or less, or leave out --map"
            )
        self.maps = list(dict.fromkeys(maps))
        self._layers: list[tuple[dict[str, Tensor], dict[int, Tensor]]] = []  # see `layer_details`
        self._values: list[Tensor] = []
        self._gates: dict[int, dict[str, Tensor]] = {}
        self._hidden: list[dict[str, Tensor]] = []
        self._real: RealTokens | None = None

    @contextmanager
    def watching(self, blocks: Sequence[nn.Module]) -> Iterator[None]:
        """Record the statistics of the residual stream of every forward pass in the `with` block."""
        with residual_stream(blocks, self._stream) as self._hidden:
            yield

    def begin(self, real: RealTokens) -> None:
        """Clear the records of the previous forward pass; `real` has the real tokens of the next batch."""
        self._layers, self._values, self._gates, self._real = [], [], {}, real

    def values(self, values_BGTV: Tensor) -> None:
        """Add the norms of the value vectors of the next attention layer."""
        assert self._real is not None
        self._values.append(self._real.align(token_norms(values_BGTV.detach())))

    def gates(self, layer: int, gates_BHTX: Tensor) -> None:
        """Add the statistics of the gates of one attention layer (1-based); no effect before the first `begin`."""
        if self._real is None:
            return  # a forward pass before the first batch
        exact, align = gates_BHTX.detach().to(accumulate_dtype(gates_BHTX.dtype)), self._real.align
        self._gates[layer] = {name: align(one.read(exact)) for name, one in of_kind(OfGates).items()}

    def attention(self, rows: Iterable[Rows], heads: int, angles: Angles | None) -> None:
        """Add the attention rows of the next layer, and its query-key angles if queries are available.

        Raises:
            InputError: if a map is requested for a head that this layer does not have.
        """
        assert self._real is not None
        layer = len(self._layers) + 1
        mapped = [head - 1 for at, head in self.maps if at == layer]
        for head in mapped:
            if head >= heads:
                raise InputError(f"--map {layer}.{head + 1}: layer {layer} has heads 1 to {heads}")
        self._layers.append(layer_details(rows, self._real, angles, mapped))

    def batch(self, tokens_BT: Tensor) -> BatchDetails:
        """Return the statistics of the current pass; ids of padding and learned tokens in `tokens_BT` are not used."""
        assert self._real is not None
        align, known = self._real.align, self._hidden[0] if self._hidden else ()
        layers = {name: [means[name] for means, _ in self._layers] for name in self._layers[0][0]}
        layers["value_ratio"] = [
            value_BGR.repeat_interleave(entropy_BH.shape[1] // value_BGR.shape[1], 1)
            for value_BGR, entropy_BH in zip(self._values, layers["entropy"], strict=True)
        ]
        if self._gates:  # layers without gates have gates of 1
            ones_BHR1 = torch.ones_like(next(iter(self._gates.values()))["gate"])[..., None]
            absent = {name: one.read(ones_BHR1) for name, one in of_kind(OfGates).items()}
            found = [self._gates.get(number, absent) for number in range(1, len(self._layers) + 1)]
            layers |= {name: [layer[name] for layer in found] for name in absent}
        return BatchDetails(
            layers=layers,
            stream={name: torch.stack([place[name].cpu() for place in self._hidden]) for name in known},
            tokens_BR=align(tokens_BT).cpu(),
            maps={(layer, head): self._layers[layer - 1][1][head - 1] for layer, head in self.maps},
        )

    def _stream(self, hidden_BTC: Tensor) -> dict[str, Tensor]:
        """Compute the statistics of hidden states, by name: per token (B, R) or per sequence (B,)."""
        assert self._real is not None
        first_B = self._real.index_BR[:, 0].to(hidden_BTC.device)
        x_BTC = hidden_BTC.to(accumulate_dtype(hidden_BTC.dtype))
        first_B1C = x_BTC.gather(1, first_B.view(-1, 1, 1).expand(-1, 1, x_BTC.shape[-1]))
        x_BRC, align = self._real.align(x_BTC.mT).mT, self._real.align
        found = {name: align(one.read(x_BTC, first_B1C)) for name, one in of_kind(OfStream).items()}
        return found | {name: one.read(x_BRC, self._real.count_B) for name, one in of_kind(OfStates).items()}


class DetailTotals:
    """Running sums of the statistics of `--details` over batches.

    Args:
        eps: threshold on alpha of a secondary sink.
        length: length T of the longest sequence.
    """

    def __init__(self, eps: float, length: int) -> None:
        self._distances, self._queries = bucket_starts(0, length - 1), bucket_starts(1, length)
        widths = {"T": length, "D": len(self._distances), "Q": len(self._queries)}
        self._means = {name: _Mean(one, widths) for name, one in STATISTICS.items()}
        self._search, self._length, self._reaching_T = SecondarySearch(eps), length, torch.zeros(length).double()
        self._maps: dict[Head, Tensor] = {}  # sums of attention, cosine and norm product (3, T, T), float64

    def add(self, batch: BatchDetails, importance_ABHR: Tensor, hidden_MBR: Tensor | None, valid_BR: Tensor) -> None:
        """Add the statistics of one batch, which may be on any device.

        Args:
            importance_ABHR: alpha in each of the A attention layers, per sequence.
            hidden_MBR: l2 norms of the residual stream; None if blocks cannot be found.
            valid_BR: bool, False past the end of a sequence. These three tensors are on the CPU.
        """
        alignment_MBR = batch.stream.get("alignment")
        # Layers may be on different devices.
        seen = {name: torch.stack([part.cpu().double() for part in parts]) for name, parts in batch.layers.items()}
        seen |= batch.stream
        seen["secondary"] = self._search.find(importance_ABHR, hidden_MBR, alignment_MBR, batch.tokens_BR, valid_BR)
        left_BR = (valid_BR.sum(1, keepdim=True) - torch.arange(valid_BR.shape[1])).clamp(min=0)
        weighted_ABHR = importance_ABHR.double() * left_BR[:, None] * seen["value_ratio"]  # sums over queries
        seen["value_weighted"] = weighted_ABHR[..., 0] / weighted_ABHR.sum(-1).clamp(min=1e-30)
        for name, values in seen.items():
            mean = self._means[name]
            mean.add(*(self._by_bucket(values, valid_BR) if mean.axes == "LHQ" else (values, valid_BR)))
        short = (0, self._length - valid_BR.shape[1])
        self._reaching_T += F.pad(valid_BR.double().sum(0), short)
        for head, sums_KRR in batch.maps.items():
            sums_KTT = F.pad(sums_KRR.cpu().double(), (*short, *short))
            self._maps[head] = self._maps[head] + sums_KTT if head in self._maps else sums_KTT

    def _by_bucket(self, values_ABHR: Tensor, valid_BR: Tensor) -> tuple[Tensor, Tensor]:
        """Return the mean value in each query bucket (A, B, H, Q), and whether a sequence has queries in it (B, Q)."""
        starts_Q, positions_R = torch.tensor(self._queries), torch.arange(1, valid_BR.shape[1] + 1)
        bucket_R = torch.searchsorted(starts_Q, positions_R, right=True) - 1
        member_RQ = F.one_hot(bucket_R, len(starts_Q)).double()
        count_BQ = valid_BR.double() @ member_RQ
        return values_ABHR @ member_RQ / count_BQ[:, None].clamp(min=1), count_BQ > 0

    def details(self) -> Details:
        """Return the statistics averaged over all sequences."""
        arrays = {name: array for name, mean in self._means.items() if (array := mean.array()) is not None}
        by_layer = {
            field: numbers for name, mean in self._means.items() for field, numbers in mean.fields(arrays.get(name))
        }
        maps: dict[str, np.ndarray] = {}  # entry (t, k) is averaged over the sequences of at least t tokens
        if self._maps:
            means_KPTT = torch.stack(list(self._maps.values()), 1) / self._reaching_T.clamp(min=1)[:, None]
            names = ("map_attention", "map_cosine", "map_norm_product") if "cosine" in arrays else ("map_attention",)
            maps = dict(zip(names, means_KPTT.float().numpy(), strict=False))
        return Details.model_validate(
            {
                **by_layer,
                "secondary_rate": float(arrays["secondary"].mean(dtype=np.float64)),
                "secondary_sinks": self._search.strongest,
                "secondary_tokens": self._search.tokens(),
                "distances": self._distances,
                "queries": self._queries,
                "maps": list(self._maps),
                **arrays,
                **maps,
            }
        )


class _Mean:
    """Running mean of one statistic over sequences, float64 on the CPU.

    Args:
        widths: size to which the last axis is padded, by axis letter; other axes are not padded.
    """

    def __init__(self, statistic: Statistic, widths: Mapping[str, int]) -> None:
        self.axes = statistic.averaged or statistic.axes
        self._statistic, self._width = statistic, widths.get(self.axes[-1])
        self._sum: Tensor | None = None
        self._count: Tensor | None = None
        self._over_tokens_M, self._tokens = torch.zeros(1, dtype=torch.float64), 0

    def add(self, values_XBY: Tensor, valid_BY: Tensor) -> None:
        """Add values of X layers or blocks, B sequences and, if the statistic has them, Y positions or query buckets.

        `valid_BY` is False at positions or buckets that a sequence does not have; other statistics ignore it.
        """
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
        """Return the array of the statistic, 0 at positions that no sequence has.

        None if no values were added, or the statistic does not apply to them (`Statistic.of_mean`).
        """
        if self._sum is None or self._count is None:
            return None
        return self._statistic.of_mean((self._sum / self._count.clamp(min=1)).float().numpy())

    def fields(self, array: np.ndarray | None) -> Iterable[tuple[str, list[float] | None]]:
        """Return the values of the statistic's fields in measurement.json, by name; all None if `array` is None."""
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
        return x if self._width is None else F.pad(x, (0, self._width - x.shape[-1]))
