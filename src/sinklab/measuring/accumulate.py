"""Running sums of a measurement, which avoid an array of size sequences x layers x heads x positions.

Stored are counts of alpha > eps and sums over sequences of alpha and norms by position, sums of quantities without
positions (loss, bias, row sums), and alpha of the first position for every sequence. The threshold is applied to every
sequence before averaging.
"""

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

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

Rate = TypeVar("Rate", float, list[float])

VISIBLE = "importance values over visible queries"
BEFORE = "hidden states before their norms"
BIAS, LEADING, REGISTERS, ROW_SUMS = "bias", "leading positions", "registers", "row sums"


class Accumulator:
    """Running sums of importance values, norms, losses and the statistics of `--details` over batches.

    Args:
        thresholds: thresholds of the sink rate; the first is the main one.
        length: number of positions T of the longest sequence.
        lengths: additional lengths to which the sequences are truncated.
    """

    def __init__(self, thresholds: Sequence[float], length: int, lengths: Sequence[int] = ()) -> None:
        self.thresholds, self.length = tuple(thresholds), length
        self.eps = self.thresholds[0]
        self.sequences = self.targets = self.bias_triples = 0
        self.bias_hits_E = [0] * len(self.thresholds)
        self.loss = 0.0
        self.window_hits = self.window_triples = 0
        self.hits_ET = torch.zeros(len(self.thresholds), length, dtype=torch.int64)
        self.visible_hits_ET: Tensor | None = None
        self.views: dict[int, View] = {}
        self.sequences_T = torch.zeros(length, dtype=torch.int64)
        self.uniform_ratios_T = torch.zeros(length, dtype=torch.float64)
        self.lengths = tuple(lengths)
        self._prefix_hits = [torch.zeros(len(self.thresholds), cut, dtype=torch.int64) for cut in self.lengths]
        self.first: list[Tensor] = []
        self.details: DetailTotals | None = None
        self._sums: dict[str, Tensor] = {}  # over sequences, by position
        self._totals: dict[str, Tensor] = {}  # over sequences

    def add(self, batch: Batch) -> None:
        """Add the statistics of one batch to the running sums.

        Raises:
            SinklabError: if importance values or the norms of keys, values or hidden states are NaN or infinite; the
                message names the layer.
        """
        batch = batch.on_cpu()  # else an out-of-memory error could leave partial sums (batches.py)
        importance, valid_BT = batch.importance_ABHT, batch.valid_BT
        _, B, _, T = importance.shape
        valid_BT = torch.ones(B, T, dtype=torch.bool) if valid_BT is None else valid_BT
        self.sequences += B
        self.sequences_T[:T] += valid_BT.sum(0)
        if batch.visible_ABHT is not None and self.visible_hits_ET is None:  # equal to alpha in earlier batches
            self.visible_hits_ET = self.hits_ET.clone()
            if "importance values" in self._sums:
                self._sums[VISIBLE] = self._sums["importance values"].clone()
        self.hits_ET[:, :T] += self._hits(importance, valid_BT)
        if self.visible_hits_ET is not None:
            visible = importance if batch.visible_ABHT is None else batch.visible_ABHT
            self.visible_hits_ET[:, :T] += self._hits(visible, valid_BT)
            self._sum(VISIBLE, visible.double().sum(1))
        for layer, view in enumerate(batch.views):
            if both := joined((self.views.get(layer), view)):
                self.views[layer] = both
        for hits_EP, prefix_ABHP in zip(self._prefix_hits, batch.prefixes, strict=True):
            hits_EP += self._hits(prefix_ABHP)
        exact = importance.double()
        self._sum("importance values", exact.sum(1))
        self.uniform_ratios_T[:T] += (exact.mean((0, 2)) / metrics.uniform_importance(valid_BT.sum(1), T)).sum(0)
        self.first.append(importance[..., 0].transpose(0, 1).float())
        for name, norms in (
            ("keys", batch.key_ABT),
            ("values", batch.value_ABT),
            ("hidden states", batch.hidden_MBT),
            (BEFORE, batch.before_MBT),
        ):
            if norms is not None:
                self._sum(name, torch.where(valid_BT, norms, 0).double().sum(1))
        if batch.bias_ABH is not None:
            for i, eps in enumerate(self.thresholds):
                self.bias_hits_E[i] += int((batch.bias_ABH > eps).sum())
            self.bias_triples += batch.bias_ABH.numel()
        if batch.window_start_ABH is not None:
            self.window_hits += int((batch.window_start_ABH > self.eps).sum())
            self.window_triples += batch.window_start_ABH.numel()
        for name, part_XB in (
            (BIAS, batch.bias_ABH),
            (LEADING, batch.leading_MB),
            (REGISTERS, batch.registers_ABHN),
            (ROW_SUMS, batch.row_sums_ABH),
        ):
            if part_XB is not None:
                total_X = part_XB.double().sum(1)
                self._totals[name] = self._totals[name] + total_X if name in self._totals else total_X
        if batch.details is not None:
            self.details = self.details or DetailTotals(self.eps, self.length)
            self.details.add(batch.details, importance, batch.hidden_MBT, valid_BT)
        self.loss += batch.loss.item()
        self.targets += batch.targets

    def _hits(self, importance_ABHT: Tensor, valid_BT: Tensor | None = None) -> Tensor:
        return torch.stack([metrics.sink_hits(importance_ABHT, eps, valid_BT) for eps in self.thresholds])

    def _sum(self, name: str, part: Tensor) -> None:
        broken = ~part.isfinite().flatten(1).all(1)
        if bool(broken.any()):
            row = int(broken.nonzero()[0])
            layer = row // 2 + 1 if name == BEFORE else row + (name != "hidden states")
            where = "before the first layer" if layer == 0 else f"in layer {layer}"
            raise SinklabError(
                f"the {name} contain NaN or infinity {where}, caused by the model or its dtype: "
                "load the model in float32 (--dtype float32), or use an earlier checkpoint"
            )
        if name not in self._sums:
            self._sums[name] = part.new_zeros(*part.shape[:-1], self.length)
        self._sums[name][..., : part.shape[-1]] += part

    def sink_rate(self, threshold: int = 0) -> list[float]:
        """Return the sink rate in percent by position (T), for `thresholds[threshold]`."""
        return self._rate(self.hits_ET[threshold])

    def sink_rate_visible(self, threshold: int = 0) -> list[float] | None:
        """Return `sink_rate` of the mean over the queries that may see each key; None if it is alpha in every layer."""
        return None if self.visible_hits_ET is None else self._rate(self.visible_hits_ET[threshold])

    def _rate(self, hits_T: Tensor) -> list[float]:
        layers, heads, _ = self._sums["importance values"].shape
        return metrics.percent(hits_T, self.sequences_T * layers * heads).tolist()

    def visibility_note(self) -> str | None:
        """Return a note on layers in which alpha and the mean over visible queries differ; None if none do."""
        return visibility_note([self.views.get(layer) for layer in range(len(self._sums["importance values"]))])

    def uniform_ratio(self) -> list[float]:
        """Return alpha_k / its value under uniform attention, by position; mean over sequences, layers and heads."""
        return (self.uniform_ratios_T / self.sequences_T).tolist()

    def sink_rate_by_length(self) -> dict[str, dict[str, list[float]]]:
        """Return the sink rate in percent by position, by truncation length and threshold: {"16": {"0.3": [...]}}."""
        layers, heads, _ = self._sums["importance values"].shape
        triples = self.sequences * layers * heads
        return {
            str(cut): {
                f"{eps:g}": metrics.percent(hits_P, triples).tolist()
                for eps, hits_P in zip(self.thresholds, hits_EP, strict=True)
            }
            for cut, hits_EP in zip(self.lengths, self._prefix_hits, strict=True)
        }

    def sink_rate_bias(self, threshold: int = 0) -> float | None:
        """Return the sink rate in percent of the bias (`LayerRecord.bias_BH`), over layers with one; None without."""
        return 100 * self.bias_hits_E[threshold] / self.bias_triples if self.bias_triples else None

    def sink_rate_window_start(self) -> float | None:
        """Return the sink rate in percent of the first key of windows, at the main threshold; None if not recorded.

        See `LayerRecord.window_start_BH`.
        """
        return 100 * self.window_hits / self.window_triples if self.window_triples else None

    def leading_norm_ratio(self) -> list[float] | None:
        """Return |h| of the sink token or first register / mean |h| of the tokens, by place in the residual stream (M).

        None without learned tokens, or if blocks cannot be read; 1 where both norms are zero.
        """
        hidden_MT, leading_M = self.mean("hidden states"), self.mean_of_sequences(LEADING)
        if leading_M is None or hidden_MT is None:
            return None
        tokens_M = hidden_MT.mean(-1)
        return torch.where((leading_M == 0) & (tokens_M == 0), 1.0, leading_M / tokens_M).tolist()

    def mean_of_sequences(self, name: str) -> Tensor | None:
        """Return the mean over sequences of a quantity without positions; None if it was not recorded.

        Args:
            name: BIAS (layers with a bias, H), REGISTERS (L, H, N), ROW_SUMS (L, H) or LEADING (M).
        """
        return self._totals[name] / self.sequences if name in self._totals else None

    def mean(self, name: str) -> Tensor | None:
        """Return the mean of `name` over the sequences that have a position; None if it was not recorded.

        Args:
            name: "importance values" or VISIBLE (L, H, T), or the norms of "keys" or "values" (L, T), "hidden states"
                (M, T) or BEFORE (two per block, T).
        """
        return self._sums[name] / self.sequences_T if name in self._sums else None


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
    importance, keys, values = (totals.mean(name) for name in ("importance values", "keys", "values"))
    if importance is None or keys is None or values is None:
        raise InputError("there are no sequences to measure: pass at least one")
    hidden, bias, visibility = totals.mean("hidden states"), totals.mean_of_sequences(BIAS), totals.visibility_note()

    def array(tensor: Tensor | None) -> Any:
        return None if tensor is None else tensor.float().numpy()

    def ratio(norm_LT: Tensor | None) -> list[float] | None:
        return None if norm_LT is None or totals.length < 2 else metrics.first_to_rest(norm_LT).tolist()

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
        sink_rate=totals.sink_rate(),
        sink_rates=_every_rate(totals, totals.sink_rate),
        sink_rate_visible=totals.sink_rate_visible(),
        sink_rates_visible=_every_rate(totals, totals.sink_rate_visible),
        sink_rate_by_length=totals.sink_rate_by_length() or None,
        sink_rate_bias=totals.sink_rate_bias(),
        sink_rates_bias=_every_rate(totals, totals.sink_rate_bias),
        sink_rate_window_start=totals.sink_rate_window_start(),
        uniform_ratio=totals.uniform_ratio(),
        loss=totals.loss / totals.targets if totals.targets else None,  # loss off, one token, or all in a prefix
        hidden_norm_ratio=ratio(hidden),
        norm_ratio_before_norm=ratio(totals.mean(BEFORE)),
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
        importance_visible=array(totals.mean(VISIBLE)),
        importance_first=array(torch.cat(totals.first)),
        importance_bias=array(bias if bias is not None and len(bias) == len(importance) else None),
        importance_registers=array(totals.mean_of_sequences(REGISTERS)),
        row_sums=array(totals.mean_of_sequences(ROW_SUMS)),
        hidden_norm=array(hidden),
        key_norm=array(keys),
        value_norm=array(values),
    )


def _every_rate(totals: Accumulator, rate: Callable[[int], Rate | None]) -> dict[str, Rate] | None:
    if len(totals.thresholds) == 1:
        return None
    return {f"{eps:g}": found for i, eps in enumerate(totals.thresholds) if (found := rate(i)) is not None} or None
