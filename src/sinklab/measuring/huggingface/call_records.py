"""Records of intercepted attention calls, of Hugging Face models and, in a `probe`, of exported sinklab models.

The attention output and the column sums of the weights are computed in one pass over the scores (one_pass.py) in two
cases: without gradients on any device but CUDA, and on every device if truncated lengths are measured. Otherwise the
column sums are computed separately, as are those of calls whose output is computed elsewhere: by sinklab's own
attention, or by another `intercept` that edits or computes the call. While a sequence is decoded with a KV cache, the
column sums are accumulated over forward passes.

Calls are counted, and a layer whose attention was not intercepted leads to an error. Models that bypass transformers'
attention interface (`Adapter.dispatches`) are measured by matrix_records.py, from the matrices that they return.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from sinklab.attention.importance import ColumnSums, importance_from_sums, unpadded_importance
from sinklab.attention.layer_call import LayerCall
from sinklab.attention.masks import RealTokens, real_tokens
from sinklab.attention.one_pass import attend_and_sum
from sinklab.errors import SinklabError
from sinklab.measuring.huggingface.recorder import READ_AFTERWARDS, Recorder
from sinklab.measuring.records import LayerRecord, seen_over
from sinklab.measuring.statistics.collecting import DetailsCollector
from sinklab.measuring.statistics.statistic_base import Angles
from sinklab.models.adapter import Adapter
from sinklab.models.hooks import hooked, intercept, token_norms
from sinklab.models.huggingface.forward_call import CACHE, named_arguments
from sinklab.models.native import NativeAdapter

FINGERPRINT = 4  # number of leading channels of a key that identify it in a later pass
FINGERPRINT_TOLERANCE = 0.05  # relative; keys recomputed from an MLA latent differ by rounding


class LayerTotals:
    """Attention column sums and key and value norms of one layer over the forward passes of one batch.

    Each pass has T new queries and S keys.

    Args:
        leading: number of learned tokens before the sequence.

    Attributes:
        prefixes: alpha (B, H, length) of the sequences truncated to each requested length.
    """

    def __init__(self, leading: int) -> None:
        self.prefixes: tuple[Tensor, ...] = ()
        self._leading = leading
        self._sums: dict[str, Tensor] = {}  # over the queries of all passes, by name
        self._keys_BTN: Tensor | None = None  # fingerprint of each key
        self._key_norms: list[Tensor] = []
        self._value_norms: list[Tensor] = []

    @torch.no_grad()
    def add(self, sums: ColumnSums, seen_by_BGS: Tensor, row_sums_BH: Tensor | None, layer: LayerCall) -> None:
        """Add a forward pass: the column sums over its S keys, and the norms of its T new keys and values.

        The S keys belong to the last S positions: a sliding-window cache drops older ones.

        Args:
            sums: column sums over the real queries of this pass.
            seen_by_BGS: number of real queries of this pass that may see each key; axes B, G (heads) may be 1.
            row_sums_BH: raw row sums, summed over the real queries of this pass; None if rows sum to one.
            layer: attention call of this pass; its T queries, keys and values include padding.

        Raises:
            SinklabError: if there are more keys than tokens seen (a static cache, or a probe that was started after the
                beginning of the sequence), or the keys of earlier tokens have changed.
        """
        key_BGSD, value_BGSV, queries = layer.call.k_BGTD.detach(), layer.value_BGSV.detach(), layer.length
        before = self._sums["keys_BHT"].shape[-1] if self._sums else 0
        seen, keys = before + queries, key_BGSD.shape[2]
        if keys > seen:
            raise SinklabError(
                f"the attention has {keys} keys, but the probe has seen {seen} tokens: start the probe before the "
                "first call on a sequence, and use a dynamic cache (the default) or use_cache=False"
            )
        self._check_keys(key_BGSD[:, 0, :, :FINGERPRINT], keys - queries)
        parts = {"keys_BHT": sums.keys_BHS, "seen_by_BGT": seen_by_BGS, "earlier_BHT": sums.earlier_BHS}
        for name, part in (parts | {"bias_BH": sums.bias_BH, "rows_BH": row_sums_BH}).items():
            if part is not None:
                grown = F.pad(part, (seen - part.shape[-1], 0)) if name in parts else part  # the last S positions
                if (total := self._sums.get(name)) is not None:
                    grown = F.pad(total, (0, grown.shape[-1] - total.shape[-1])) + grown
                self._sums[name] = grown
        self._key_norms.append(token_norms(key_BGSD[:, :, -queries:]).mean(1))
        self._value_norms.append(token_norms(value_BGSV[:, :, -queries:]).mean(1))

    def _check_keys(self, key_BSN: Tensor, earlier: int) -> None:
        new_BTN, before_BTN = key_BSN[:, earlier:].clone(), self._keys_BTN  # a view would hold the whole key tensor
        same = before_BTN is None or len(before_BTN) == len(key_BSN)
        if before_BTN is not None and same:
            before_BSN = before_BTN[:, before_BTN.shape[1] - earlier :]
            moved_BS, size_BS = (x.float().norm(dim=-1) for x in (key_BSN[:, :earlier] - before_BSN, before_BSN))
            same = not bool((moved_BS > FINGERPRINT_TOLERANCE * size_BS).any())
        if not same:
            raise SinklabError(
                "the cached sequences were replaced or reordered since the previous pass, as in beam search, so the "
                f"recorded sums no longer match. {READ_AFTERWARDS}"
            )
        self._keys_BTN = new_BTN if before_BTN is None else torch.cat((before_BTN, new_BTN), dim=1)

    @torch.no_grad()
    def record(self, real: RealTokens) -> LayerRecord:
        """Return importance and norms of the real tokens processed so far; `real` contains their columns."""
        sums_BHT = all_BHT = self._sums["keys_BHT"]
        count_B = real.count_B.to(sums_BHT.device)
        if (earlier_BHT := self._sums.get("earlier_BHT")) is not None:  # of queries before the key (prefix masks)
            all_BHT = sums_BHT + F.pad(earlier_BHT, (0, sums_BHT.shape[-1] - earlier_BHT.shape[-1]))
        seen_by_BGT = real.align(self._sums["seen_by_BGT"].expand(len(all_BHT), -1, -1))
        visible_BHT, view = seen_over(real.align(all_BHT), seen_by_BGT, count_B)
        mean = {name: self._sums[name] / count_B[:, None] for name in ("bias_BH", "rows_BH") if name in self._sums}
        bias_BH, registers_BHN = mean.get("bias_BH"), None
        if self._leading:
            at_BN = real.index_BR[:, :1] - self._leading + torch.arange(self._leading, device=real.index_BR.device)
            at_BHN = at_BN[:, None].expand(-1, sums_BHT.shape[1], -1)
            registers_BHN = sums_BHT.gather(-1, at_BHN) / count_B[:, None, None]
            bias_BH = registers_BHN.sum(-1) if bias_BH is None else registers_BHN.sum(-1) + bias_BH
        return LayerRecord(
            importance_from_sums(real.align(sums_BHT), count_B),
            real.align(torch.cat(self._key_norms, -1)),
            real.align(torch.cat(self._value_norms, -1)),
            bias_BH=bias_BH,
            visible_BHT=visible_BHT,
            row_sums_BH=mean.get("rows_BH"),
            registers_BHN=registers_BHN if self._leading > 1 else None,
            view=view,
            prefixes=self.prefixes,
        )


class CallRecords(Recorder):
    """Recorder for models whose attention calls can be intercepted; a KV cache is supported.

    In sinklab's own attention, the order of positions is padding, learned leading tokens, tokens (model/past.py).
    """

    def __init__(
        self, model: PreTrainedModel, adapter: Adapter, lengths: Sequence[int], details: DetailsCollector | None
    ) -> None:
        super().__init__(model, adapter.attention_layers, lengths, details)
        self._native = isinstance(adapter, NativeAdapter)
        self._totals: list[LayerTotals] = []
        self._calls = 0
        self._running = self._cached = False
        self._placed: RealTokens | None = None  # the real tokens among the positions of a layer

    def _latest(self) -> list[LayerRecord]:
        placed = self._placed
        return [] if placed is None else [totals.record(placed) for totals in self._totals]

    def _drop_latest(self) -> None:
        self._totals, self._placed = [], None

    def observe(self, layer: LayerCall) -> Tensor | None:
        """Record an attention call; return its output if it was computed together with the column sums, else None.

        A call of the inner transformer of an exported model, outside a forward pass of the model, is not recorded.
        """
        if not self._running:
            if self._native:
                return None  # the inner transformer was called directly
            raise SinklabError("only a submodule of the probed model was called: call model(...)")
        apart = not self._lengths and (torch.is_grad_enabled() or layer.call.q_BHTD.is_cuda)
        one_pass = layer.library is not None and not apart
        with torch.no_grad(), torch.autocast(layer.call.q_BHTD.device.type, enabled=False):
            out = self._record(layer.exact() if self._native else layer, one_pass)
        self._calls += 1
        return out

    def _record(self, layer: LayerCall, one_pass: bool) -> Tensor | None:
        q, k, T = layer.call.q_BHTD, layer.call.k_BGTD, layer.length
        if not self._calls:
            self._placed = self._behind_leading(layer) if self._native else self._real
        assert self._placed is not None
        if k.shape[2] > self._placed.mask_BT.shape[1] and not self._cached:
            raise SinklabError(
                f"attention layer {self._calls + 1} of this {self._model.config.model_type!r} model has {k.shape[2]} "
                f"keys for {self._seen} tokens: some keys are not those of single tokens (compressed attention, as in "
                "DeepSeek-V4), so the attention to single tokens cannot be measured"
            )
        counted_BT = self._placed.mask_BT[:, -T:].to(q.device) if self._placed.padded else None
        if self._calls == len(self._totals):
            self._totals.append(LayerTotals(layer.leading))
        elif self._native and k.shape[2] == T:  # the sequence is recomputed from its beginning, as with a prefix mask
            self._totals[self._calls] = LayerTotals(layer.leading)
        totals, out = self._totals[self._calls], None
        exact = layer if self._native else layer.exact()
        if one_pass:
            out, sums, prefixes_BHES = attend_and_sum(layer.call, layer.value_BGSV, counted_BT, self._lengths)
            cut = zip(self._lengths, prefixes_BHES.unbind(2), strict=True)
            totals.prefixes = tuple(unpadded_importance(sums_BHS, length) for length, sums_BHS in cut)
        else:
            sums, cut = exact.column_sums(counted_BT), (layer.leading + length for length in self._lengths)
            totals.prefixes = tuple(exact.cut(positions).importance().positions_BHT for positions in cut)
        row_sums_BH = None
        if not exact.operation.sums_to_one:
            row_sums_BHT = exact.operation.row_sums(exact.call)
            row_sums_BH = (row_sums_BHT if counted_BT is None else row_sums_BHT.where(counted_BT[:, None], 0)).sum(-1)
        totals.add(sums, layer.visible_queries(counted_BT), row_sums_BH, layer)
        if self._details is not None:
            self._details.values(layer.value_BGSV)
            self._details.attention(exact.rows(), q.shape[1], Angles(q, k, layer.call.mask))
        return out

    def _behind_leading(self, layer: LayerCall) -> RealTokens:
        assert self._real is not None
        count_B = self._real.count_B.to(layer.call.q_BHTD.device)
        start_B = torch.zeros_like(count_B) if layer.padding_B is None else layer.padding_B
        at_S = torch.arange(layer.call.k_BGTD.shape[2], device=count_B.device)
        first_B1 = (start_B + layer.leading)[:, None]
        return real_tokens((at_S >= first_B1) & (at_S < first_B1 + count_B[:, None]))

    def entering(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Forward pre-hook of the model: start the records of a pass."""
        if self._paused:
            return
        arguments = named_arguments(self._signature, args, kwargs)
        self._entering_sequences(arguments)
        self._calls, self._running, self._cached = 0, True, arguments[CACHE] is not None

    def leaving(self, _: nn.Module, __: tuple[Any, ...], ___: Any) -> None:
        """Forward hook of the model: check that every layer was recorded."""
        if self._paused:
            return
        self._running = False
        if self._calls > self._expected:
            raise SinklabError(
                f"{self._calls} attention calls were recorded in {self._expected} layers of a "
                f"{self._model.config.model_type!r} model: models with several attention calls per layer "
                "(differential attention), or that use layers several times in a forward pass (looped models; but Dory "
                "and Inkling2 are supported), cannot be measured"
            )
        if self._calls != self._expected:
            raise SinklabError(
                f"{self._calls} attention calls were recorded in {self._expected} layers: the model type "
                f"{self._model.config.model_type!r} does not pass the attention of each layer through transformers' "
                "attention interface in one call, so sinks in it cannot be measured. Measure a model of another type, "
                "or try a newer version of transformers."
            )
        self._whole = True


@contextmanager
def call_records(
    model: PreTrainedModel,
    adapter: Adapter,
    lengths: Sequence[int] = (),
    details: DetailsCollector | None = None,
    unchanged: bool = False,
) -> Iterator[CallRecords]:
    """Record attention as `probe` does, with the same errors, for a model whose attention calls can be intercepted.

    Only with `unchanged`, forward passes remain the same bit for bit.
    """
    records = CallRecords(model, adapter, lengths, details)
    with intercept(adapter, observe=records.observe, unchanged=unchanged) as use:  # its hook may refuse the pass first
        records.backends = {str(adapter.cores[0].backend)} if isinstance(adapter, NativeAdapter) else use.backends
        watching = (
            model.register_forward_pre_hook(records.entering, with_kwargs=True),
            model.register_forward_hook(records.leaving),
        )
        with hooked(watching):
            yield records
