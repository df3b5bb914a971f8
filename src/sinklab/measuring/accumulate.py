"""Batches of a measurement, and running sums over them.

The size of a batch is halved on out-of-memory errors. Running sums avoid an array of size sequences x layers x heads x
positions.

The importance alpha, the norms and the counts of alpha > eps are summed over sequences by position. The loss, the row
sums and the attention to a bias have no positions. Alpha of position 1 is also stored for every sequence. The counts
compare the alpha of each sequence with eps, not the mean alpha.

A attention layers, B sequences of a batch, H heads, T positions, M places of the residual stream.
"""

import math
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from sinklab.attention import importance as metrics
from sinklab.attention.masks import RealTokens
from sinklab.errors import SinklabError, is_out_of_memory
from sinklab.measuring.findings import MassiveActivation
from sinklab.measuring.measurement import Measurement
from sinklab.measuring.options import Options
from sinklab.measuring.records import Batch, LayerRecord, View, batch_of, joined, visibility_note
from sinklab.measuring.statistics.collecting import DetailTotals
from sinklab.models.hooks import Progress


class Batches:
    """Iterator over batches, as ranges [start, stop) of sequence indices.

        for start, stop in batches:
            with batches.attempt():  # on out-of-memory, the batch size is halved and the batch repeated
                ...

    Args:
        sequences: total number of sequences.
        size: initial number of sequences per batch; at most `sequences` are used.
        progress: called with (finished sequences, possibly fractional; total sequences) after every batch, and after
            every block that has the hook `block_ran`; None disables reports.
        blocks: number of blocks of the model; the LM head counts as one more progress step.
    """

    def __init__(self, sequences: int, size: int, progress: Progress | None, blocks: int) -> None:
        self.sequences, self._progress, self._blocks = sequences, progress, blocks
        self._first_size = self._size = min(size, sequences)
        self._start = self._stop = self._ran = 0

    def __iter__(self) -> Iterator[tuple[int, int]]:
        while self._start < self.sequences:
            self._stop, self._ran = min(self._start + self._size, self.sequences), 0
            yield self._start, self._stop

    @contextmanager
    def attempt(self) -> Iterator[None]:
        """Process one batch in the `with` block.

        An out-of-memory error inside the block is suppressed: the batch size is halved, and the iterator yields a
        smaller batch that starts at the same sequence. A block that runs out of memory must therefore leave no side
        effects.

        Raises:
            SinklabError: if a batch of one sequence runs out of memory.
        """
        try:
            yield
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            if self._stop - self._start == 1:
                raise SinklabError(
                    "out of memory with one sequence at a time: use shorter sequences (--length; --sink-length of sft; "
                    "metric.length of a recipe), or bfloat16 (--dtype bfloat16; train.precision: bf16 of a recipe)"
                ) from error
            self._size = (self._stop - self._start) // 2
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
            return
        self._start = self._stop
        if self._progress:
            self._progress(self._stop, self.sequences)

    def block_ran(self, *_: Any) -> None:
        """Forward hook of every block, which reports progress (a long sequence may take minutes)."""
        self._ran += 1
        if self._progress:
            done = (self._stop - self._start) * self._ran / (self._blocks + 1)
            self._progress(self._start + done, self.sequences)

    def notes(self) -> list[str]:
        """Return a list with a note if the batch size was reduced; otherwise an empty list."""
        if self._size == self._first_size:
            return []
        return [f"out of memory: the batch size was reduced from {self._first_size} to {self._size} sequences"]


@dataclass
class Cost:
    """Wall-clock time in seconds and peak memory in MiB of a `with` block; `costing` sets them when the block ends."""

    seconds: float = 0.0
    peak_memory_mb: float | None = None


@contextmanager
def costing(device: torch.device) -> Iterator[Cost]:
    """Record the wall-clock time and peak memory of the `with` block in the yielded `Cost`.

    On a CUDA device, peak memory is the maximum of the memory of PyTorch's tensors inside the block; PyTorch's peak
    memory statistics are reset for this. On other devices, it is the peak memory of the whole process so far, or None
    if unavailable.
    """
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    cost, start = Cost(), time.perf_counter()
    yield cost
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        cost.peak_memory_mb = torch.cuda.max_memory_allocated(device) / 2**20
    else:
        cost.peak_memory_mb = process_peak_mb()
    cost.seconds = time.perf_counter() - start


def process_peak_mb() -> float | None:
    """Return the peak memory of this process so far in MiB; None if unavailable."""
    try:
        import resource
    except ImportError:  # not a Unix system
        return None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / (2**20 if sys.platform == "darwin" else 2**10)


COUNTED = ("importance_BHT", "visible_BHT", "bias_BH", "first_or_bias_BH", "window_start_BH")
"""Quantities of `Batch.recorded` for which a sink rate is computed.

`first_or_bias_BH` is the sum of alpha of position 1 and of `bias_BH`, if all layers have a bias.
"""
WORDS = {
    "importance_BHT": "importance values",
    "visible_BHT": "importance values over the queries that see a key",
    "key_norm_BT": "keys",
    "value_norm_BT": "values",
    "hidden_BT": "hidden states",
    "before_BT": "inputs of the norms",
}
"""Names of the quantities in error messages."""
CAUSE = "caused by the model or its dtype: load the model in float32 (--dtype float32), or use an earlier checkpoint"


class Accumulator:
    """Running sums of importance values, norms, losses and the statistics of `--details` over batches.

    Args:
        thresholds: thresholds of the sink rate on alpha; the first is `Measurement.eps`.
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
        self.biased: Sequence[bool] = ()  # by layer: whether it has a `bias_BH`
        self._sums: dict[str, Tensor] = {}  # over sequences, by name
        self._hits: dict[str, Tensor] = {}  # counts of alpha > eps (thresholds, positions or 1), by name or length
        self._triples: dict[str, Tensor] = {}  # number of (sequence, layer, head) triples, by the same keys

    def add(self, batch: Batch) -> None:
        """Add the statistics of one batch, which is on the CPU (`Batch.on_cpu`), to the running sums.

        Raises:
            SinklabError: if importance values or the norms of keys, values or hidden states are NaN or infinite (the
                message names the layer), or the loss is NaN or infinite.
        """
        recorded, valid_BT = dict(batch.recorded), batch.valid_BT
        importance_ABHT, (B, T) = recorded["importance_BHT"], valid_BT.shape
        self.sequences += B
        self.sequences_T[:T] += valid_BT.sum(0)
        if "visible_BHT" in recorded or "visible_BHT" in self._sums:  # in a batch without it, it equals alpha
            recorded.setdefault("visible_BHT", importance_ABHT)
            for sums in (self._sums, self._hits, self._triples):
                if "importance_BHT" in sums and "visible_BHT" not in sums:
                    sums["visible_BHT"] = sums["importance_BHT"].clone()
        bias_ABH = recorded.get("bias_BH")
        if bias_ABH is not None and len(bias_ABH) == len(importance_ABHT):
            recorded["first_or_bias_BH"] = importance_ABHT[..., 0] + bias_ABH
        for name, part in recorded.items():
            total = part.double().sum(1)
            if name.endswith("T") and len(broken := (~total.isfinite().flatten(1).all(1)).nonzero()):
                row = int(broken[0])
                where = f"in attention layer {row + 1}"
                if name in ("hidden_BT", "before_BT"):
                    layer = row if name == "hidden_BT" else row // 2 + 1
                    where = f"in layer {layer}" if layer else "before the first layer"
                raise SinklabError(f"the {WORDS.get(name, name)} contain NaN or infinity {where}, {CAUSE}")
            self._add(self._sums, name, total)
        for name in COUNTED:
            if name in recorded:
                self._count(name, recorded[name] if name.endswith("T") else recorded[name][..., None], valid_BT)
        for length, prefix_ABHP in zip(self.lengths, batch.prefixes, strict=True):
            self._count(str(length), prefix_ABHP, valid_BT)
        self.biased = batch.biased
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
            name: a quantity in `COUNTED`, or a truncation length as text. For a quantity without positions, the list
                has one entry.
            threshold: index of the threshold.
        """
        if name not in self._hits:
            return None
        return (100 * self._hits[name][threshold].double() / self._triples[name]).tolist()

    def sink_rates(self, name: str) -> dict[str, list[float]]:
        """Return the sink rates of `name` keyed by threshold (see `sink_rate`); empty if it was not recorded."""
        return {f"{eps:g}": rate for i, eps in enumerate(self.thresholds) if (rate := self.sink_rate(name, i))}

    def uniform_ratio(self) -> list[float]:
        """Return alpha_k / (alpha_k of uniform attention) by position: mean over sequences, layers and heads."""
        return (self.uniform_ratios_T / self.sequences_T).tolist()

    def mean(self, name: str) -> Tensor | None:
        """Return the mean over sequences of a tensor of `Batch.recorded`; None if it was not recorded.

        The result has the tensor's shape without axis B. If the tensor has positions, the mean at each position is over
        the sequences that reach it.
        """
        count = self.sequences_T if name.endswith("T") else self.sequences
        return self._sums[name] / count if name in self._sums else None


ARRAYS = {
    "importance": "importance_BHT",
    "importance_visible": "visible_BHT",
    "importance_registers": "registers_BHN",
    "row_sums": "row_sums_BH",
    "dormant": "dormant_BH",
    "hidden_norm": "hidden_BT",
    "key_norm": "key_norm_BT",
    "value_norm": "value_norm_BT",
}
"""Arrays of `Measurement`, each with the quantity of `Batch.recorded` whose mean over sequences it contains."""
RATIOS = {
    "hidden_norm_ratio": "hidden_BT",
    "norm_ratio_before_norm": "before_BT",
    "key_norm_ratio": "key_norm_BT",
    "value_norm_ratio": "value_norm_BT",
}
"""Fields of `Measurement`, each with the quantity of `Batch.recorded` to whose mean `first_to_rest` is applied."""


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
    """Build the measurement from the running sums; at least one batch must have been added.

    The keyword arguments are stored in the fields of `Measurement` with the same names. If the mask of a layer differs
    from the full causal mask, a note on it (`visibility_note`) is added to `notes`.
    """
    visibility, bias, several = visibility_note(totals.views), totals.mean("bias_BH"), len(totals.thresholds) > 1
    means = {name: totals.mean(of) for name, of in ARRAYS.items()}
    arrays: dict[str, Any] = {name: None if x is None else x.float().numpy() for name, x in means.items()}
    layers, heads = arrays["importance"].shape[:2]
    ratios = {name: totals.mean(of) if totals.length > 1 else None for name, of in RATIOS.items()}
    hidden_MT, leading_M = means["hidden_norm"], totals.mean("leading_B")
    if leading_M is not None and hidden_MT is not None:
        ratios["norm_ratio_sink_token"] = torch.stack((leading_M, hidden_MT.mean(-1)), -1)
    arrays |= {name: None if x is None else metrics.first_to_rest(x).tolist() for name, x in ratios.items()}
    return Measurement(
        model=options.model_name,
        inputs=options.inputs,
        sequences=totals.sequences,
        length=totals.length,
        eps=totals.eps,
        bos=options.bos,
        proxy=proxy,
        layers=layers,
        heads=heads,
        sink_rate=totals.sink_rate() or [],
        sink_rates=totals.sink_rates("importance_BHT") if several else None,
        sink_rate_visible=totals.sink_rate("visible_BHT"),
        sink_rates_visible=(totals.sink_rates("visible_BHT") if several else {}) or None,
        sink_rate_by_length={str(length): totals.sink_rates(str(length)) for length in totals.lengths} or None,
        sink_rate_bias=next(iter(totals.sink_rate("bias_BH") or ()), None),
        sink_rates_bias={eps: rate for eps, [rate] in totals.sink_rates("bias_BH").items() if several} or None,
        sink_rate_first_or_bias=next(iter(totals.sink_rate("first_or_bias_BH") or ()), None),
        sink_rates_first_or_bias={eps: rate for eps, [rate] in totals.sink_rates("first_or_bias_BH").items() if several}
        or None,
        sink_rate_window_start=next(iter(totals.sink_rate("window_start_BH") or ()), None),
        uniform_ratio=totals.uniform_ratio(),
        loss=totals.loss / totals.targets if totals.targets else None,  # None without targets (`Measurement.loss`)
        backend=backend,
        dtype=dtype,
        seconds=cost.seconds,
        peak_memory_mb=cost.peak_memory_mb,
        massive_activations=massive_activations,
        details=None if totals.details is None else totals.details.details(),
        notes=[*notes, *([visibility] if visibility else [])],
        importance_first=torch.cat(totals.first).numpy(),
        importance_bias=None if bias is None else _with_gaps(bias.float().numpy(), totals.biased),
        **arrays,
    )


def measurement_of_records(
    passes: Sequence[tuple[Sequence[LayerRecord], RealTokens]],
    eps: float,
    model_name: str,
    *,
    seconds: float,
    backend: str,
    dtype: str,
) -> Measurement:
    """Return the measurement of recorded forward passes; the loss, hidden states and `bos` are not known.

    Args:
        passes: records of the attention layers and real tokens of each forward pass.
        eps: threshold of the sink rate on the importance alpha, in (0, 1).
        model_name: model name, stored with the result.

    Raises:
        InputError: if `eps` is invalid.
        SinklabError: if there are no passes, values are NaN or infinite, or the layers differ in their number of heads.
    """
    if not passes:
        raise SinklabError("no forward pass was recorded: call the model inside the `with` block")
    options = Options(eps=cast(tuple[float, ...], eps), model_name=model_name)
    totals = Accumulator(options.eps, max(layers[0].importance_BHT.shape[-1] for layers, _ in passes))
    nothing = torch.zeros((), dtype=torch.float64)
    for layers, real in passes:
        totals.add(batch_of(layers, [], real, (nothing, 0), None).on_cpu())
    proxy = any(layer.row_sums_BH is not None for layers, _ in passes for layer in layers)
    found = measurement_from(totals, Cost(seconds), options, proxy=proxy, backend=backend, dtype=dtype)
    lengths = [length for _, real in passes for length in real.count_B.tolist()]
    return found.model_copy(update={"sequence_lengths": lengths}) if min(lengths) < max(lengths) else found


def _with_gaps(bias_AH: np.ndarray, biased: Sequence[bool]) -> np.ndarray:
    """Return rows for all layers, NaN in those without a bias."""
    found_LH = np.full((len(biased), bias_AH.shape[1]), np.nan, bias_AH.dtype)
    found_LH[np.array(biased)] = bias_AH
    return found_LH
