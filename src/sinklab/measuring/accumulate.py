"""Running sums of a measurement, which avoid an array of size sequences x layers x heads x positions.

Stored are counts of alpha > eps and sums over sequences of alpha and norms by position, sums of quantities without
positions (loss, bias, row sums), and alpha of the first position for every sequence. The threshold is applied to every
sequence before averaging.
"""

import math
from collections.abc import Sequence
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor

from sinklab.errors import InputError, SinklabError
from sinklab.measuring import metrics
from sinklab.measuring.activations import MassiveActivation
from sinklab.measuring.batches import Cost
from sinklab.measuring.mask_coverage import View, joined, visibility_note
from sinklab.measuring.measurement import Measurement
from sinklab.measuring.options import Options
from sinklab.measuring.records import Batch
from sinklab.measuring.statistics.collecting import DetailTotals

COUNTED = ("importance_BHT", "visible_BHT", "bias_BH", "window_start_BH")
"""Quantities of `Batch.recorded` with a sink rate."""
WORDS = {
    "importance_BHT": "importance values",
    "visible_BHT": "importance values over visible queries",
    "key_norm_BT": "keys",
    "value_norm_BT": "values",
    "hidden_BT": "hidden states",
    "before_BT": "hidden states before their norms",
}
"""Names of the quantities in error messages."""
CAUSE = "caused by the model or its dtype: load the model in float32 (--dtype float32), or use an earlier checkpoint"


class Accumulator:
    """Running sums of importance values, norms, losses and the statistics of `--details` over batches.

    Args:
        thresholds: thresholds of the sink rate; the first is the main one.
        length: number of positions T of the longest sequence.
        lengths: additional lengths to which the sequences are truncated.
    """

    def __init__(self, thresholds: Sequence[float], length: int, lengths: Sequence[int] = ()) -> None:
        self.thresholds, self.length, self.lengths = tuple(thresholds), length, tuple(lengths)
        self.eps = self.thresholds[0]
        self.sequences = self.targets = 0
        self.loss = 0.0
        self.views: list[View | None] = []  # by layer
        self.sequences_T = torch.zeros(length, dtype=torch.int64)
        self.uniform_ratios_T = torch.zeros(length, dtype=torch.float64)
        self.first: list[Tensor] = []
        self.details: DetailTotals | None = None
        self._sums: dict[str, Tensor] = {}  # over sequences, by name
        self._hits: dict[str, Tensor] = {}  # counts above each threshold (E, positions or 1), by name or length
        self._triples: dict[str, Tensor] = {}  # (sequence, layer, head) triples of these counts

    def add(self, batch: Batch) -> None:
        """Add the statistics of one batch to the running sums.

        Raises:
            SinklabError: if the loss, importance values or the norms of keys, values or hidden states are NaN or
                infinite; the message names the layer.
        """
        batch = batch.on_cpu()  # else an out-of-memory error could leave partial sums (batches.py)
        recorded, valid_BT = dict(batch.recorded), batch.valid_BT
        importance_ABHT, (B, T) = recorded["importance_BHT"], valid_BT.shape
        self.sequences += B
        self.sequences_T[:T] += valid_BT.sum(0)
        if "visible_BHT" in recorded or "visible_BHT" in self._sums:  # equal to alpha in the other batches
            recorded.setdefault("visible_BHT", importance_ABHT)
            for sums in (self._sums, self._hits, self._triples):
                if "importance_BHT" in sums and "visible_BHT" not in sums:
                    sums["visible_BHT"] = sums["importance_BHT"].clone()
        for name, part in recorded.items():
            total = part.double().sum(1)
            if name.endswith("T"):
                _check_finite(name, total)
            self._add(self._sums, name, total)
        for name in COUNTED:
            if name in recorded:
                self._count(name, recorded[name] if name.endswith("T") else recorded[name][..., None], valid_BT)
        for length, prefix_ABHP in zip(self.lengths, batch.prefixes, strict=True):
            self._count(str(length), prefix_ABHP, valid_BT)
        self.views = [joined(both) for both in zip_longest(self.views, batch.views)]
        uniform_BT = metrics.uniform_importance(valid_BT.sum(1), T)
        self.uniform_ratios_T[:T] += (importance_ABHT.double().mean((0, 2)) / uniform_BT).sum(0)
        self.first.append(importance_ABHT[..., 0].transpose(0, 1).float())
        if batch.details is not None:
            self.details = self.details or DetailTotals(self.eps, self.length)
            self.details.add(batch.details, importance_ABHT, recorded.get("hidden_BT"), valid_BT)
        if not math.isfinite(loss := batch.loss.item()):
            raise SinklabError(f"the loss is NaN or infinite, {CAUSE}")
        self.loss += loss
        self.targets += batch.targets

    def _count(self, name: str, importance_ABHX: Tensor, valid_BT: Tensor) -> None:
        A, _, H, X = importance_ABHX.shape
        valid_BX = valid_BT[:, :X]
        hits = [metrics.sink_hits(importance_ABHX, eps, valid_BX) for eps in self.thresholds]
        self._add(self._hits, name, torch.stack(hits))
        self._add(self._triples, name, valid_BX.sum(0) * A * H)

    def _add(self, sums: dict[str, Tensor], name: str, part: Tensor) -> None:
        size = part.shape[-1]
        if name not in sums:
            sums[name] = part.new_zeros(*part.shape[:-1], self.length if name.endswith("T") else size)
        sums[name][..., :size] += part

    def sink_rate(self, name: str = "importance_BHT", threshold: int = 0) -> list[float] | None:
        """Return the sink rate in percent for `thresholds[threshold]`, by position; None if `name` was not recorded.

        Args:
            name: one of `COUNTED` (a single entry for quantities without positions), or a truncation length.
        """
        if name not in self._hits:
            return None
        return (100 * self._hits[name][threshold].double() / self._triples[name]).tolist()

    def sink_rates(self, name: str) -> dict[str, list[float]]:
        """Return `sink_rate` by threshold; empty if `name` was not recorded."""
        return {f"{eps:g}": rate for i, eps in enumerate(self.thresholds) if (rate := self.sink_rate(name, i))}

    def uniform_ratio(self) -> list[float]:
        """Return alpha_k / its value under uniform attention, by position; mean over sequences, layers and heads."""
        return (self.uniform_ratios_T / self.sequences_T).tolist()

    def leading_norm_ratio(self) -> list[float] | None:
        """Return |h| of the sink token or first register / mean |h| of the tokens, by place in the residual stream (M).

        None without learned tokens, or if blocks cannot be read; 1 where both norms are zero.
        """
        hidden_MT, leading_M = self.mean("hidden_BT"), self.mean("leading_B")
        if leading_M is None or hidden_MT is None:
            return None
        tokens_M = hidden_MT.mean(-1)
        return torch.where((leading_M == 0) & (tokens_M == 0), 1.0, leading_M / tokens_M).tolist()

    def mean(self, name: str) -> Tensor | None:
        """Return the mean of a tensor of `Batch.recorded` over sequences; None if it was not recorded.

        With positions, the mean is over the sequences that have the position.
        """
        count = self.sequences_T if name.endswith("T") else self.sequences
        return self._sums[name] / count if name in self._sums else None


def _check_finite(name: str, total: Tensor) -> None:
    broken = ~total.isfinite().flatten(1).all(1)
    if bool(broken.any()):
        row = int(broken.nonzero()[0])
        if name in ("hidden_BT", "before_BT"):
            layer = row if name == "hidden_BT" else row // 2 + 1
            where = f"in layer {layer}" if layer else "before the first layer"
        else:
            where = f"in attention layer {row + 1}"
        raise SinklabError(f"the {WORDS.get(name, name)} contain NaN or infinity {where}, {CAUSE}")


def measurement_from(
    totals: Accumulator,
    cost: Cost,
    options: Options,
    *,
    proxy: bool,
    backend: str,
    dtype: str,
    massive_activations: list[MassiveActivation] | None = None,
    notes: Sequence[str] = (),
) -> Measurement:
    """Build the measurement from the running sums; keyword arguments are the fields of `Measurement` of these names.

    The note on visible queries (mask_coverage.py) is added to `notes`.

    Raises:
        InputError: if no sequence was added.
    """
    importance, keys, values = (totals.mean(name) for name in ("importance_BHT", "key_norm_BT", "value_norm_BT"))
    sink_rate = totals.sink_rate()
    if importance is None or keys is None or values is None or sink_rate is None:
        raise InputError("there are no sequences to measure: pass at least one")
    hidden, bias, visibility = totals.mean("hidden_BT"), totals.mean("bias_BH"), visibility_note(totals.views)

    def array(tensor: Tensor | None) -> Any:
        return None if tensor is None else tensor.float().numpy()

    def ratio(norm_LT: Tensor | None) -> list[float] | None:
        return None if norm_LT is None or totals.length < 2 else metrics.first_to_rest(norm_LT).tolist()

    def single(name: str) -> float | None:
        rates = totals.sink_rate(name)
        return None if rates is None else rates[0]

    def several(name: str) -> dict[str, list[float]]:
        return totals.sink_rates(name) if len(totals.thresholds) > 1 else {}

    return Measurement(
        model=options.model_name,
        inputs=options.inputs,
        sequences=totals.sequences,
        length=totals.length,
        eps=totals.eps,
        bos=options.bos,
        proxy=proxy,
        layers=importance.shape[0],
        heads=importance.shape[1],
        sink_rate=sink_rate,
        sink_rates=several("importance_BHT") or None,
        sink_rate_visible=totals.sink_rate("visible_BHT"),
        sink_rates_visible=several("visible_BHT") or None,
        sink_rate_by_length={str(length): totals.sink_rates(str(length)) for length in totals.lengths} or None,
        sink_rate_bias=single("bias_BH"),
        sink_rates_bias={eps: rate for eps, [rate] in several("bias_BH").items()} or None,
        sink_rate_window_start=single("window_start_BH"),
        uniform_ratio=totals.uniform_ratio(),
        loss=totals.loss / totals.targets if totals.targets else None,  # loss off, one token, or all in a prefix
        hidden_norm_ratio=ratio(hidden),
        norm_ratio_before_norm=ratio(totals.mean("before_BT")),
        norm_ratio_sink_token=totals.leading_norm_ratio(),
        key_norm_ratio=ratio(keys),
        value_norm_ratio=ratio(values),
        backend=backend,
        dtype=dtype,
        seconds=cost.seconds,
        peak_memory_mb=cost.peak_memory_mb,
        massive_activations=massive_activations,
        details=None if totals.details is None else totals.details.details(),
        notes=[*notes, *([visibility] if visibility else [])],
        importance=array(importance),
        importance_visible=array(totals.mean("visible_BHT")),
        importance_first=array(torch.cat(totals.first)),
        importance_bias=array(bias if bias is not None and len(bias) == len(importance) else None),
        importance_registers=array(totals.mean("registers_BHN")),
        row_sums=array(totals.mean("row_sums_BH")),
        hidden_norm=array(hidden),
        key_norm=array(keys),
        value_norm=array(values),
    )
