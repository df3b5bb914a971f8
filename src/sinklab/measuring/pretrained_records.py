"""Records of the attention of Hugging Face models and, in a `probe`, of exported sinklab models.

Calls through transformers' attention interface are intercepted (`CallRecorder`).
The attention output and the column sums of the weights are computed in one pass over the scores (`one_pass`) in two
cases: without gradients on any device but CUDA, and on every device if truncated lengths are measured. Otherwise the
column sums are computed separately, as are those of calls whose output is computed elsewhere: by sinklab's own
attention, or by another `intercept` that edits or computes the call. While a sequence is decoded with a KV cache, the
column sums are accumulated over forward passes.

Calls are counted, and a layer whose attention was not intercepted leads to an error. Models that bypass transformers'
attention interface (`Adapter.dispatches`) (Falcon, Bloom, MPT, GPT-Neo) return their attention matrices with
`output_attentions`. Hooks sum the columns of each matrix and replace it by an empty tensor, so that only one matrix is
in memory at a time. Keys and values are taken from the returned KV cache. Recording takes O(T^2) memory and the time of
eager attention; the reported backend is "eager".
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sinklab.attention.importance import ColumnSums, Rows, importance_from_sums, unpadded_importance
from sinklab.attention.layer_call import LayerCall, attend_and_sum
from sinklab.attention.masks import CAUSAL, RealTokens, Window, real_tokens, visible_queries
from sinklab.attention.primitive import flex_serves
from sinklab.attention.query_blocks import Block, accumulate_dtype
from sinklab.errors import SinklabError
from sinklab.measuring.accumulate import measurement_of_records
from sinklab.measuring.measurement import Measurement
from sinklab.measuring.records import LayerRecord, end_to_end, seen_over
from sinklab.measuring.statistics.collecting import DetailsCollector
from sinklab.measuring.statistics.statistic_base import Angles
from sinklab.models.adapter import Adapter, NativeAdapter
from sinklab.models.families import attention_implementation, attention_layers, decoder_blocks, family_of
from sinklab.models.hooks import CACHE, cache_field, forward_signature, hooked, intercept, named_arguments, token_norms

if TYPE_CHECKING:
    from transformers import PreTrainedModel

READ_AFTERWARDS = "Generate outside the probe, then call model(sequences) inside it"


class Recorder(ABC):
    """Recorder of the attention of a Hugging Face model.

    It keeps the records of completed sequences, and those of the current sequences, which later passes may continue.

    Args:
        model: model whose forward passes are recorded.
        expected: number of attention layers.
        lengths: additional lengths to which the sequences are truncated.
        details: collector that receives the attention of every layer, if any.

    Attributes:
        backends: backends that computed the attention, such as "one pass", "sdpa" or "eager" (`Interception.backends`).
    """

    def __init__(
        self, model: "PreTrainedModel", expected: int, lengths: Sequence[int], details: DetailsCollector | None
    ) -> None:
        self.backends: set[str] = set()
        self._model, self._lengths, self._details = model, tuple(lengths), details
        self._signature = forward_signature(model)
        self._expected = expected
        self._done: list[tuple[list[LayerRecord], RealTokens]] = []  # of completed sequences
        self._tokens_BT: Tensor | None = None
        self._real: RealTokens | None = None
        self._paused = self._whole = False
        self._seen = 0  # length of the current sequences, including padding
        self._ends: Sequence[int] = ()  # end-of-sequence ids within `generate`
        self._text_BT: Tensor | None = None  # tokens of the prompt and of the passes within `generate`
        self._prompt = 0  # number of tokens of the prompt

    @property
    def backend(self) -> str:
        """Backends of all passes so far, such as "one pass+sdpa"."""
        return "+".join(sorted(self.backends))

    @property
    def layers(self) -> list[LayerRecord]:
        """Records of all sequences, one per attention layer in call order; empty before the first pass.

        Values past the end of a sequence are 0. The sequences of a pass that failed are left out.
        """
        return [end_to_end(parts) for parts in zip(*(layers for layers, _ in self._batches()), strict=True)]

    def measurement(self, eps: float = 0.3, model_name: str = "") -> Measurement:
        """Return the measurement of all sequences so far: sink rates, importance, norms of keys and values.

        `seconds` is 0. See `measurement_of_records` for the arguments and errors.
        """
        dtype = str(self._model.dtype).removeprefix("torch.")
        return measurement_of_records(self._batches(), eps, model_name, seconds=0.0, backend=self.backend, dtype=dtype)

    def _batches(self) -> list[tuple[list[LayerRecord], RealTokens]]:
        """Return the records and real tokens of all sequences, by batch, without those of a pass that failed."""
        real = self._real if self._whole else None
        latest = [] if real is None else [(self._latest(), real)]
        return [(layers, real) for layers, real in (*self._done, *latest) if layers]

    def clear(self) -> None:
        """Discard all records."""
        self._done, self._tokens_BT, self._real = [], None, None
        self._drop_latest()

    def _entering_sequences(self, arguments: dict[str, Any]) -> None:
        """Begin a forward pass: a prefill of new sequences, or a decoding step of the current ones with their KV cache.

        Args:
            arguments: arguments of the model's `forward` (`named_arguments`).
        """
        cache, tokens_BT = arguments[CACHE], arguments.get("input_ids")
        if getattr(cache, "is_compileable", False):
            raise SinklabError(
                "a probe does not support a static KV cache, whose keys are not only those of tokens: use a dynamic "
                "cache (the default) or use_cache=False"
            )
        kept = 0 if cache is None else int(cache.get_seq_length())
        if not kept:
            layers = self._latest() if self._whole else []  # the last pass may have failed
            before_BT, longer = self._tokens_BT, False
            if before_BT is not None and tokens_BT is not None and len(before_BT) == len(tokens_BT):
                start = before_BT.shape[1]
                longer = start < tokens_BT.shape[1] and torch.equal(before_BT, tokens_BT[:, :start])
            if layers and not longer and self._real is not None:
                self._done.append((layers, self._real))
            self._tokens_BT, self._real, self._seen = tokens_BT, None, 0
            self._drop_latest()
        elif kept > self._seen:
            raise SinklabError(
                f"the cache contains {kept} tokens, but the probe has seen {self._seen} tokens of these sequences: "
                "start the probe before the first call on a sequence, and use a dynamic cache (the default) or "
                "use_cache=False"
            )
        elif kept < self._seen:
            raise SinklabError(
                f"the cache was cropped to {kept} of the {self._seen} tokens that the probe has seen, as in assisted "
                f"decoding, so the recorded sums include removed tokens. {READ_AFTERWARDS}"
            )
        self._whole = False
        given = arguments["inputs_embeds"] if tokens_BT is None else tokens_BT
        self._seen += given.shape[1]
        mask_BT = arguments.get("attention_mask")
        if mask_BT is None:
            mask_BT = torch.ones(len(given), self._seen, device=given.device)
        if self._ends and tokens_BT is not None:
            ended_BT = self._ended(tokens_BT, continued=bool(kept))
            # The mask also covers the tokens that were in the cache before `generate`.
            ended_BT = F.pad(ended_BT, (mask_BT.shape[-1] - ended_BT.shape[1], 0))
            mask_BT = (mask_BT != 0) & ~ended_BT.to(mask_BT.device)
        self._real = real_tokens(mask_BT)

    @contextmanager
    def generating(self, ends: Sequence[int]) -> Iterator[None]:
        """Treat tokens after an end-of-sequence id in `ends` as padding in the `with` block, which runs `generate`."""
        self._ends, self._text_BT = ends, None
        try:
            yield
        finally:
            self._ends = ()

    def _ended(self, tokens_BT: Tensor, continued: bool) -> Tensor:
        """Return a mask (B, T) of the generated tokens after the end of their sequence, which are padding.

        The attention mask of `generate` is 1 at these tokens, until the last sequence has ended.

        Args:
            tokens_BT: tokens of this pass: whole sequences, or only the new tokens if `continued`.
            continued: whether the pass continues from a KV cache.
        """
        if self._text_BT is None:
            self._prompt = tokens_BT.shape[1]
        elif continued:
            tokens_BT = torch.cat((self._text_BT, tokens_BT), dim=1)
        self._text_BT = tokens_BT
        ends_BT = torch.isin(tokens_BT, tokens_BT.new_tensor(self._ends))
        ends_BT[:, : self._prompt] = False
        return ends_BT.cumsum(1) - ends_BT.int() > 0

    def paused(self) -> AbstractContextManager[Any]:
        """Return a context manager that disables recording; code in it must not run an attention layer."""
        return patch.object(self, "_paused", True)

    @abstractmethod
    def _latest(self) -> list[LayerRecord]:
        """Return the records of the current sequences, one per attention layer."""

    @abstractmethod
    def _drop_latest(self) -> None:
        """Discard the records of the current sequences."""


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

    In sinklab's own attention, the order of positions is padding, learned leading tokens, tokens (model/block.py).
    """

    def __init__(
        self, model: "PreTrainedModel", adapter: Adapter, lengths: Sequence[int], details: DetailsCollector | None
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
            summed = layer if flex_serves(q, k) else exact  # FlexAttention accumulates in float32
            sums, cut = summed.column_sums(counted_BT), (layer.leading + length for length in self._lengths)
            totals.prefixes = tuple(summed.cut(positions).importance().positions_BHT for positions in cut)
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
                f"{self._calls} attention calls were recorded in {self._expected} layers: this "
                f"{self._model.config.model_type!r} model does not pass the attention of each layer through "
                "transformers' attention interface in one call, so sinks in it cannot be measured. If another library "
                "has replaced its attention, load it anew; else try a newer version of transformers."
            )
        self._whole = True


@contextmanager
def call_records(
    model: "PreTrainedModel",
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


class MatrixRecords(Recorder):
    """Recorder that computes importance from the attention matrices that the model returns; supports no KV cache."""

    def __init__(self, model: "PreTrainedModel", lengths: Sequence[int], details: DetailsCollector | None) -> None:
        super().__init__(model, attention_layers(model.config), lengths, details)
        self.backends = {"eager"}
        self._drops_cache = False  # whether the caller passed use_cache=False
        self._records: list[LayerRecord] = []
        self._matrices: list[dict[str, Any]] = []  # by layer, the `LayerRecord` fields that depend on the matrix

    def _latest(self) -> list[LayerRecord]:
        return self._records

    def _drop_latest(self) -> None:
        self._records, self._matrices = [], []

    def _entering(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._paused:
            return None
        arguments = named_arguments(self._signature, args, kwargs)
        if arguments[CACHE] is not None:
            raise SinklabError(
                f"a {self._model.config.model_type!r} model is measured from the attention matrices it returns, which "
                "requires whole sequences: call the model without a KV cache, and generate with use_cache=False"
            )
        self._entering_sequences(arguments)
        self._drops_cache = arguments.get("use_cache") is False
        return args, kwargs | {"output_attentions": True, "use_cache": True, "return_dict": True}

    def _matrix(self, _: nn.Module, __: tuple[Any, ...], output: Any) -> Any:
        if self._paused or self._real is None or not isinstance(output, tuple):
            return None
        T = self._real.mask_BT.shape[1]
        for place, part in enumerate(output):
            if isinstance(part, Tensor) and part.ndim == 4 and part.shape[2:] == (T, T):
                self._read(part.detach(), self._real)
                return (*output[:place], part.new_empty(0), *output[place + 1 :])
        return None

    @torch.no_grad()
    def _read(self, weights_BHTT: Tensor, real: RealTokens) -> None:
        config, local_layers = self._model.config, family_of(self._model).local_layers
        is_local = bool(local_layers) and getattr(config, local_layers)[len(self._matrices)] == "local"
        mask = Window(config.window_size) if is_local else CAUSAL
        device, T = weights_BHTT.device, weights_BHTT.shape[-1]
        lower_BHTT = weights_BHTT.to(accumulate_dtype(weights_BHTT.dtype)).tril()
        real_BT, count_B = real.mask_BT.to(device), real.count_B.to(device)
        sums_BHR = real.align(torch.einsum("bhqk,bq->bhk", lower_BHTT, real_BT.to(lower_BHTT.dtype)))
        seen_by_BGR = real.align(visible_queries(mask, T, T, device, real_BT))
        visible_BHR, view = seen_over(sums_BHR, seen_by_BGR, count_B)
        cut = ((length, weights_BHTT[:, :, :length].float().sum(2)) for length in self._lengths)
        self._matrices.append(
            {
                "importance_BHT": importance_from_sums(sums_BHR, count_B),
                "visible_BHT": visible_BHR,
                "view": view,
                "prefixes": tuple(unpadded_importance(sums_BHS, length) for length, sums_BHS in cut),
            }
        )
        if self._details is not None:
            self._details.attention([Rows(Block(0, T, 0, T), lower_BHTT, None)], lower_BHTT.shape[1], angles=None)

    def _leaving(self, _: nn.Module, __: tuple[Any, ...], output: Any) -> Any:
        if self._paused:
            return None
        field, real = cache_field(output), self._real
        stored = getattr(getattr(output, field, None), "layers", [])
        if real is None or not len(self._matrices) == len(stored) == self._expected:
            raise SinklabError(
                f"the model type {self._model.config.model_type!r} does not pass its attention through transformers' "
                f"attention interface, and it returns {len(self._matrices)} attention matrices and the keys of "
                f"{len(stored)} layers instead of {self._expected}, so sinks in it cannot be measured. Measure a "
                "model of another type, or try a newer version of transformers."
            )
        if self._details is not None:
            for kept in stored:
                self._details.values(kept.values)
        with torch.no_grad():
            for kept, matrix in zip(stored, self._matrices, strict=True):
                keys_BT, values_BT = (real.align(token_norms(x).mean(1)) for x in (kept.keys, kept.values))
                self._records.append(LayerRecord(key_norm_BT=keys_BT, value_norm_BT=values_BT, **matrix))
        self._whole = True
        return replace(output, **{field: None}) if self._drops_cache else None


@contextmanager
def matrix_records(
    model: "PreTrainedModel", lengths: Sequence[int], details: DetailsCollector | None
) -> Iterator[MatrixRecords]:
    """Record attention as `probe` does, with the same errors, for a model that bypasses the attention interface."""
    watch = MatrixRecords(model, lengths, details)
    watching = (
        model.register_forward_pre_hook(watch._entering, with_kwargs=True),
        model.register_forward_hook(watch._leaving),
        *(module.register_forward_hook(watch._matrix) for module in _inside_blocks(model)),
    )
    with hooked(watching), eager_attention(model):
        yield watch


@contextmanager
def eager_attention(model: "PreTrainedModel") -> Iterator[None]:
    """Set eager attention in the `with` block; ALiBi is added only once, also in models of `Family.alibi_twice`."""
    twice = _inside_blocks(model) if family_of(model).alibi_twice else []
    once = (module.register_forward_pre_hook(_alibi_once, with_kwargs=True) for module in twice)
    with hooked(once), attention_implementation(model, "eager"):
        yield


def _inside_blocks(model: "PreTrainedModel") -> list[nn.Module]:
    return [module for block in decoder_blocks(model) for module in block.modules() if module is not block]


def _alibi_once(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Pre-hook that zeroes the `alibi` argument if the mask already contains ALiBi: such a mask differs by head."""
    alibi, mask = kwargs.get("alibi"), kwargs.get("attention_mask")
    if isinstance(alibi, Tensor) and isinstance(mask, Tensor) and mask.ndim == 4 and mask.shape[1] > 1:
        return args, kwargs | {"alibi": torch.zeros_like(alibi)}
    return None
