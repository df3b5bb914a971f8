"""Records of attention layers, their collection in sinklab transformers, and the batch passed to the accumulator.

Number of queries that can see each key under sliding windows, prefixes and other masks.

alpha_k is the mean attention to key k over all T - k + 1 queries t >= k. Under a sliding window of w < T - k + 1
tokens, only w of these queries see key k. The others contribute zeros, so that alpha of a sink is smaller by the factor
(T - k + 1) / w. The mean over the queries that may see the key is therefore reported in addition to alpha.

B sequences, H query heads, G heads of the mask, T positions.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, fields, replace
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from sinklab.attention.layer_call import LayerCall
from sinklab.attention.masks import RealTokens, Window, WrappedMask
from sinklab.device import on_host
from sinklab.errors import SinklabError
from sinklab.measuring.statistics.collecting import BatchDetails, DetailsCollector
from sinklab.measuring.statistics.statistic_base import Angles
from sinklab.models.adapter import NativeAdapter
from sinklab.models.families import layers_text
from sinklab.models.hooks import intercept, token_norms


@dataclass(frozen=True)
class View:
    """Difference between a layer's mask and the full causal mask.

    Attributes:
        kind: "window": a query sees the last `tokens` tokens, including its own. "prefix": keys among the first
            `tokens` are also seen by earlier queries. "part": any other mask; at most `tokens` queries see a key.
        tokens: number of tokens, keys or queries, depending on `kind`.
    """

    kind: Literal["window", "prefix", "part"]
    tokens: int


def seen_over(sums_BHT: Tensor, seen_by_BGT: Tensor, queries_B: Tensor) -> tuple[Tensor | None, View | None]:
    """Return the mean attention (B, H, T) to each key over the queries that may see it, and the view of the layer.

    Both are None if every key is seen by as many queries as under the full causal mask; the mean is then alpha. The
    mean of a key that no query sees is 0.

    Args:
        sums_BHT: attention to each key, summed over the queries that may see it; index 0 is the first real token.
        seen_by_BGT: number of queries that may see each key; batch axis B and head axis G may have size 1.
        queries_B: number of real tokens of each sequence.
    """
    later_B1T = (queries_B[:, None, None] - torch.arange(sums_BHT.shape[-1], device=sums_BHT.device)).clamp(min=0)
    if bool((seen_by_BGT == later_B1T).all()):
        return None, None
    return sums_BHT / seen_by_BGT.clamp(min=1), view_of(seen_by_BGT, later_B1T)


def view_of(seen_by_BGT: Tensor, later_BGT: Tensor) -> View:
    """Infer, from the number of queries that see each key, how a mask differs from the full causal mask.

    Args:
        seen_by_BGT: number of queries that may see each key; index 0 is the first token.
        later_BGT: number of queries t >= k for each key k; broadcastable to `seen_by_BGT`.
    """
    most = int(seen_by_BGT.max())
    if bool((seen_by_BGT == later_BGT.clamp(max=most)).all()):
        return View("window", most)
    beyond = (seen_by_BGT > later_BGT).flatten(0, -2).any(0)
    if bool(beyond.any()):
        return View("prefix", int(beyond.nonzero().max()) + 1)
    return View("part", most)


def joined(views: Iterable[View | None]) -> View | None:
    """Combine the views of one layer over batches; None if all are None.

    The result has the common kind, or "part" if the kinds differ, and the largest `tokens`.
    """
    found = [view for view in views if view is not None]
    if not found:
        return None
    kinds, most = {view.kind for view in found}, max(view.tokens for view in found)
    return View(found[0].kind if len(kinds) == 1 else "part", most)


def visibility_note(views: Sequence[View | None]) -> str | None:
    """Build the note on the layers whose mask differs from the full causal mask; None if there are none.

    Args:
        views: view of each layer, in order; None for the full causal mask.
    """
    layers: dict[View, list[int]] = {}
    for number, view in enumerate(views, start=1):
        if view is not None:
            layers.setdefault(view, []).append(number)
    if not layers:
        return None
    sentences = {
        "window": "a sliding window of {} tokens in {}",
        "prefix": "the first {} keys are visible to earlier queries in {}",
        "part": "no key is visible to more than {} queries in {}",
    }
    parts = (sentences[view.kind].format(view.tokens, layers_text(at, len(views))) for view, at in layers.items())
    return (
        "; ".join(parts) + ": sink_rate and importance are means over all queries t >= k of key k, sink_rate_visible "
        "and importance_visible over the queries that may see it"
    )


@dataclass(frozen=True)
class LayerRecord:
    """Importance and norms of one attention layer, for B sequences, H heads and T positions.

    Index 0 of axis T is the first real token of each sequence. To record another quantity, add a tensor field;
    `combined` and `Accumulator` then include it. If the name of a field ends in T, its last axis is the position, and
    values past the end of a sequence must be 0.

    Attributes:
        importance_BHT: importance alpha of each key, float32 (float64 for a float64 model); 0 past the sequence end.
        key_norm_BT, value_norm_BT: l2 norms of keys and values, mean over KV heads; None if `record_attention` was not
            given them.
        bias_BH: attention to everything outside the sequence, mean over queries and summed over an added bias, a sink
            logit, the remainder of stick-breaking, and a sink token or registers. None if the layer has none of these.
        visible_BHT: mean attention to each key over the queries that may see it; None if these are the queries t >= k
            for every key k, so that it equals alpha.
        row_sums_BH: sum of the raw scores of a query, mean over real queries; None if it is always one.
        registers_BHN: alpha of each of N registers; None if there are fewer than two.
        dormant_BH: share of the queries t > 1 whose largest attention weight is on the first token or on what `bias_BH`
            includes (learned tokens one by one); None unless requested, and for Hugging Face models.
        window_start_BH: attention of a query to the first key of its sliding window, mean over the queries whose window
            no longer contains position 1. None if there are no such queries, if learned tokens precede the sequence,
            and for Hugging Face models.
        view: how the mask differs from the full causal mask; None if `visible_BHT` is None.
        prefixes: alpha (B, H, length) of the sequences truncated to each requested length, in the order of the lengths.
    """

    importance_BHT: Tensor
    key_norm_BT: Tensor | None = None
    value_norm_BT: Tensor | None = None
    bias_BH: Tensor | None = None
    visible_BHT: Tensor | None = None
    row_sums_BH: Tensor | None = None
    registers_BHN: Tensor | None = None
    dormant_BH: Tensor | None = None
    window_start_BH: Tensor | None = None
    view: View | None = None
    prefixes: tuple[Tensor, ...] = ()


def combined(records: Sequence[LayerRecord], combine: Callable[[list[Tensor]], Tensor]) -> dict[str, Any]:
    """Combine each tensor field of `LayerRecord` over the records in which it is not None; return the results by name.

    A field that is None in all records is left out. If only some records have `visible_BHT`, the others contribute
    their `importance_BHT`, which is equal. The entry `prefixes` is a tuple of combined tensors, one per length.

    Args:
        combine: function that stacks or concatenates the tensors of a field.
    """
    names = [one.name for one in fields(LayerRecord)]
    found = {name: [x for one in records if isinstance(x := getattr(one, name), Tensor)] for name in names}
    if found["visible_BHT"]:
        found["visible_BHT"] = [one.importance_BHT if one.visible_BHT is None else one.visible_BHT for one in records]
    prefixes = tuple(combine(list(parts)) for parts in zip(*(one.prefixes for one in records), strict=True))
    return {name: combine(parts) for name, parts in found.items() if parts} | {"prefixes": prefixes}


def end_to_end(records: Sequence[LayerRecord]) -> LayerRecord:
    """Concatenate records of one layer along the axis of sequences; shorter sequences are padded with 0."""

    def padded(tensors: Sequence[Tensor]) -> Tensor:
        longest = max(x.shape[-1] for x in tensors)
        return torch.cat([F.pad(x, (0, longest - x.shape[-1])) for x in tensors])

    return LayerRecord(**combined(records, padded), view=joined(record.view for record in records))


@dataclass(frozen=True)
class Batch:
    """Records and loss of one forward pass; index 0 is the first real token of each sequence.

    Attributes:
        recorded: tensors by name, with a first axis before B. The tensors of `LayerRecord` have one entry for each
            attention layer in which they are not None. hidden_BT is the l2 norm of the residual stream before the first
            block and after every block; it is missing if blocks cannot be found. leading_B is the same norm at the sink
            token or first register, if there is one. before_BT, in a post-norm sinklab transformer, is the l2 norm of
            the input of each norm, two per block.
        valid_BT: bool, False past the end of a sequence.
        loss: loss summed over the batch's targets, in nats (float64 scalar).
        targets: number of targets; 0 if the loss was skipped.
        prefixes: alpha (layers, B, H, length) of the sequences truncated to each of the accumulator's lengths.
        views: how the mask differs from the full causal mask, by layer; None if it does not.
        details: statistics of `--details`; None if neither details nor maps are requested.
        biased: whether each attention layer has a `bias_BH`.
    """

    recorded: Mapping[str, Tensor]
    valid_BT: Tensor
    loss: Tensor
    targets: int
    prefixes: Sequence[Tensor] = ()
    views: Sequence[View | None] = ()
    details: BatchDetails | None = None
    biased: Sequence[bool] = ()

    def on_cpu(self) -> "Batch":
        """Return a copy on the CPU, with one synchronisation per GPU; `details` stays on its device."""
        valid_BT, loss, *rest = on_host([self.valid_BT, self.loss, *self.recorded.values(), *self.prefixes])
        recorded, prefixes = dict(zip(self.recorded, rest, strict=False)), rest[len(self.recorded) :]
        return replace(self, recorded=recorded, valid_BT=valid_BT, loss=loss, prefixes=prefixes)


def batch_of(
    layers: Sequence[LayerRecord],
    hidden: Sequence[Tensor],
    real: RealTokens,
    loss: tuple[Tensor, int],
    details: BatchDetails | None,
    leading: int = 0,
    before: Sequence[Tensor] = (),
) -> Batch:
    """Build the batch of one forward pass for the accumulator.

    Args:
        layers: records of the attention layers, in order.
        hidden: l2 norms (B, T) of the residual stream before the first block and after each block, including padding
            and learned tokens; empty if blocks cannot be found.
        real: columns of the real tokens in `hidden` and `before`.
        loss: loss summed over the targets, and number of targets.
        details: statistics of `--details`, if requested.
        leading: number of learned tokens before the sequence.
        before: for a post-norm model, l2 norms (B, T) of the input of each norm, including padding and learned tokens;
            empty for other models.
    """
    heads = {layer.importance_BHT.shape[1] for layer in layers}
    if len(heads) > 1:
        raise SinklabError(
            f"the layers have {min(heads)} to {max(heads)} heads, and a measurement needs the same number in every "
            "layer: use sinklab.probe, whose records are by layer"
        )
    recorded = combined(layers, _stacked)
    prefixes = recorded.pop("prefixes")
    places = {
        "hidden_BT": [real.align(norm_BT) for norm_BT in hidden],
        "leading_B": [norm_BT[:, 0] for norm_BT in hidden if leading],
        "before_BT": [real.align(norm_BT) for norm_BT in before],
    }
    recorded |= {name: _stacked(parts) for name, parts in places.items() if parts}
    views, biased = [layer.view for layer in layers], [layer.bias_BH is not None for layer in layers]
    return Batch(recorded, real.valid_BR, *loss, prefixes, views, details, biased)


def _stacked(parts: Sequence[Tensor]) -> Tensor:
    """Stack tensors, which may be on different devices, on the device of the first."""
    return torch.stack([part.to(parts[0].device) for part in parts])


class NativeRecords:
    """Recorder of the attention layers of a sinklab transformer.

    Args:
        lengths: additional lengths to which the sequences are truncated.
        details: collector that receives the attention of every layer, if any.
        dormant: also record `LayerRecord.dormant_BH`.

    Attributes:
        backend: attention backend.
        layers: records of the attention layers since the last `clear`.
    """

    def __init__(
        self, backend: str, lengths: Sequence[int], details: DetailsCollector | None, dormant: bool = False
    ) -> None:
        self.backend, self.layers = backend, list[LayerRecord]()
        self._lengths, self._details, self._dormant = lengths, details, dormant

    def clear(self) -> None:
        """Discard all records."""
        self.layers.clear()

    def paused(self) -> AbstractContextManager[None]:
        """Return a no-op context manager: the LM head of a sinklab transformer runs no attention layers."""
        return nullcontext()

    def observe(self, layer: LayerCall) -> None:
        """Append the record of one attention call to `layers`, and pass the call to the details collector, if any."""
        layer = layer.exact()
        q_BHTD, k_BGSD = layer.call.q_BHTD, layer.call.k_BGTD
        cut = (layer.cut(layer.leading + length).importance().positions_BHT for length in self._lengths)
        found = replace(record_of(layer), window_start_BH=_window_start(layer), prefixes=tuple(cut))
        self.layers.append(replace(found, dormant_BH=_dormant(layer)) if self._dormant else found)
        if self._details is not None:
            self._details.values(layer.value_BGSV)
            self._details.attention(layer.rows(), q_BHTD.shape[1], Angles(q_BHTD, k_BGSD, layer.call.mask))


def record_of(layer: LayerCall) -> LayerRecord:
    """Return the record of an attention call of whole sequences without padding, in float32 (`LayerCall.exact`)."""
    alpha = layer.importance()
    key_BT, value_BT = (token_norms(x[:, :, layer.leading :]).mean(1) for x in (layer.call.k_BGTD, layer.value_BGSV))
    later_T = torch.arange(alpha.positions_BHT.shape[-1], 0, -1)
    return LayerRecord(
        importance_BHT=alpha.positions_BHT,
        key_norm_BT=key_BT,
        value_norm_BT=value_BT,
        bias_BH=alpha.bias_BH,
        visible_BHT=alpha.visible_BHT,
        row_sums_BH=alpha.row_sums_BH,
        registers_BHN=alpha.registers_BHN,
        view=None if alpha.visible_BHT is None else view_of(alpha.seen_by_BGT, later_T),
    )


@contextmanager
def native_records(
    adapter: NativeAdapter, lengths: Sequence[int], details: DetailsCollector | None, dormant: bool = False
) -> Iterator[NativeRecords]:
    """Record the attention layers in every forward pass inside the `with` block.

    Passes must have whole sequences, without padding or a KV cache. Records accumulate until `clear` is called.
    """
    records = NativeRecords(str(adapter.cores[0].backend), lengths, details, dormant)
    with intercept(adapter, observe=records.observe):
        yield records


def _dormant(layer: LayerCall) -> Tensor:
    """Return the share (B, H) of the queries t > 1 whose largest weight is on the first token, a learned token or bias.

    Such a query has a dormant head (2410.13835). Ties count; rows of zeros, as with ReLU scores, do not.
    """
    first = layer.leading  # column of the first token
    hits_BH = layer.call.q_BHTD.new_zeros(layer.call.q_BHTD.shape[:2])
    for rows in layer.rows():
        largest_BHQ = rows.weights_BHQS.amax(-1)
        sink_BHQ = torch.zeros_like(largest_BHQ)
        if rows.block.low <= first:
            sink_BHQ = rows.weights_BHQS[..., : first + 1 - rows.block.low].amax(-1)
        if rows.bias_BHQ is not None:
            largest_BHQ, sink_BHQ = (torch.maximum(x, rows.bias_BHQ) for x in (largest_BHQ, sink_BHQ))
        later_Q = torch.arange(rows.block.start, rows.block.stop, device=hits_BH.device) > first
        hits_BH += ((sink_BHQ >= largest_BHQ) & (largest_BHQ > 0) & later_Q).sum(-1)
    return hits_BH / max(layer.length - first - 1, 1)


def _window_start(layer: LayerCall) -> Tensor | None:
    """Return the attention (B, H) of a query to the first key of its sliding window.

    The mean is over the queries whose window no longer contains position 1. None if there are no such queries, or if
    learned tokens precede the sequence.
    """
    mask, T = layer.call.mask, layer.length
    while isinstance(mask, WrappedMask):
        mask = mask.rest
    width = mask.width if isinstance(mask, Window) else T
    if width >= T or layer.leading:
        return None
    sums_BH = layer.call.q_BHTD.new_zeros(layer.call.q_BHTD.shape[:2])
    for rows in layer.rows():
        query_Q = torch.arange(rows.block.start, rows.block.stop, device=sums_BH.device)
        key_Q = query_Q - width + 1 - rows.block.low  # negative if the key is hidden, for example by `mask_first`
        score_BHQ = rows.weights_BHQS.gather(-1, key_Q.clamp(min=0)[:, None].expand(*rows.weights_BHQS.shape[:3], 1))[
            ..., 0
        ]
        sums_BH += (score_BHQ * ((query_Q >= width) & (key_Q >= 0))).sum(-1)
    return sums_BH / (T - width)
