"""`sinklab.probe`: record the attention that each token receives in a model's forward passes.

Key and value norms are recorded too. Forward passes inside `model.generate` are included.

`sinklab.watch_attention`: record the attention of any PyTorch module, such as a model that its user has written.

Calls of `torch.nn.functional.scaled_dot_product_attention` in a forward pass are recorded without a change of the
module. Code that computes attention otherwise passes its attention weights, or queries, keys and mask, to
`sinklab.record_attention`, which does nothing outside `watch_attention`.

B batch, H query heads, G KV heads, T positions, D key dimension, V value dimension.
"""

import inspect
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace
from functools import partial, update_wrapper, wraps
from typing import Any, cast
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask
from transformers import GenerationConfig, PreTrainedModel
from transformers.generation.configuration_utils import GenerationMode

from sinklab.attention.importance import unpadded_importance
from sinklab.attention.masks import Dense, real_tokens
from sinklab.attention.query_blocks import accumulate_dtype
from sinklab.attention.scores import Score, compose
from sinklab.errors import InputError, SinklabError
from sinklab.measuring.accumulate import measurement_of_records
from sinklab.measuring.measurement import Measurement
from sinklab.measuring.pretrained_records import READ_AFTERWARDS, Recorder, call_records, matrix_records
from sinklab.measuring.records import LayerRecord, end_to_end, record_of
from sinklab.measuring.statistics.collecting import DetailsCollector
from sinklab.model.transformer import Transformer
from sinklab.models.adapter import Adapter, NativeAdapter, adapt, check_causal_lm, type_text, unwrapped
from sinklab.models.families import family_of
from sinklab.models.hooks import probed_alone, token_norms, uncompiled
from sinklab.models.huggingface.interface import as_for_sdpa, read_call

ONCE = (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE)
"""Generation modes that run the model exactly once on every output token except the last."""


@contextmanager
def generating(model: PreTrainedModel, watch: Recorder) -> Iterator[None]:
    """Make `model.generate` raise an error in unsupported modes, and pass its end-of-sequence ids to the recorder.

    Beam search is unsupported, because a probe cannot detect that it reorders sequences after the last pass, and so is
    guidance, because it runs the model on other sequences too.

    Raises:
        SinklabError: in `generate`, if the mode is not one of `ONCE`, or `guidance_scale` is set.
    """
    generate: Any = getattr(model, "generate", None)
    if generate is None:
        yield
        return

    def watched(*args: Any, **kwargs: Any) -> Any:
        given = inspect.signature(generate).bind_partial(*args, **kwargs).arguments
        config = GenerationConfig()  # keyword arguments override the passed config, which overrides the model's
        passed = given.get("generation_config")
        for source in (vars(model.generation_config), vars(passed) if passed else {}, given.get("kwargs", {})):
            for name, value in source.items():
                if value is not None and hasattr(config, name):
                    setattr(config, name, value)  # not `update`, whose warnings `generate` would repeat
        mode = config.get_generation_mode(given.get("assistant_model"))
        if mode not in ONCE:
            raise SinklabError(
                f"{mode.value.replace('_', ' ')} discards tokens or reorders sequences, so that the records of a probe "
                f"would not match the output. {READ_AFTERWARDS}"
            )
        if config.guidance_scale not in (None, 1):
            raise SinklabError(
                f"guidance_scale={config.guidance_scale} (classifier-free guidance) also runs the model on the "
                "sequences without their prompt, so that the records of a probe would not match the output. "
                f"Leave guidance_scale out. {READ_AFTERWARDS}"
            )
        ends = config.eos_token_id
        ends = ends.flatten().tolist() if isinstance(ends, Tensor) else [ends] if isinstance(ends, int) else ends or ()
        with watch.generating(tuple(ends)):
            return generate(*args, **kwargs)

    with patch.object(model, "generate", watched):
        yield


@contextmanager
def probe(model: PreTrainedModel) -> Iterator[Recorder]:
    """Record the attention that each token receives in every forward pass of `model` in the `with` block.

    The attribute `layers` of the yielded recorder has a `LayerRecord` per attention layer, with importance and key and
    value norms: a few numbers per head and token, which are kept until `clear()` is called. The sequences of several
    passes are concatenated as in one batch; `measurement()` returns their `Measurement`. A pass that continues from a
    KV cache, or repeats the sequences of the last pass with tokens appended, extends their records. A model that
    bypasses transformers' attention interface (`MatrixRecords`) supports no KV cache: call `generate` with
    `use_cache=False`.

    Forward passes remain the same bit for bit, in training too: the model's own attention functions are called. The
    attention weights are computed from their queries, keys and mask, and their outputs are compared with those of
    softmax attention. Only a model that bypasses the interface computes eager attention instead of its own.

    The model, its configs and its hooks are restored afterwards, also after an exception. Padding, which is passed as
    an `attention_mask` of shape (sequences, positions), is excluded. So are the tokens that `model.generate` appends
    after the end of a sequence.

    Args:
        model: Hugging Face causal language model, or an exported sinklab model. Compiled code, of the model or around
            it, runs uncompiled in the `with` block.

    Raises:
        SinklabError: if another thread probes the model. In a forward pass, if an attention function does not compute
            softmax attention (then use `watch_attention`), the attention of some layer cannot be recorded, only a
            submodule was called, or the KV cache was started before the probe, was cropped or reordered, or is not
            supported (static; `MatrixRecords`). In `generate`, if the generation mode is not supported.
        InputError: if the model is not a Hugging Face model or its weights are on the meta device. In a forward pass,
            if the attention mask is not a padding mask.
    """
    model = unwrapped(model)
    check_causal_lm(model)
    adapter = NativeAdapter(cast("Transformer", model.transformer)) if family_of(model).exported else adapt(model)
    recording = adapter_records(model, adapter, (), None, unchanged=True)
    with uncompiled(), recording as watch, generating(model, watch):
        yield watch


@contextmanager
def adapter_records(
    model: PreTrainedModel,
    adapter: Adapter,
    lengths: Sequence[int],
    details: DetailsCollector | None,
    unchanged: bool = False,
) -> Iterator[Recorder]:
    """Record attention as `probe` does, with the same errors; `model.generate` is not changed.

    Args:
        model: model whose forward passes are recorded.
        adapter: adapter of the model, or of the inner transformer of an exported model.
        lengths: increasing lengths. The importance of the sequences truncated to each of them is recorded too. Forward
            passes must then have whole sequences of at least the last length, without padding and without gradients.
        details: collector that also receives every layer, in forward passes of whole sequences.
        unchanged: whether the model's own attention functions are called, so that forward passes remain the same bit
            for bit. Models that bypass transformers' attention interface compute eager attention in any case.
    """
    with probed_alone(model):
        recording = call_records(model, adapter, lengths, details, unchanged) if adapter.dispatches else None
        with recording or matrix_records(model, lengths, details) as watch:
            yield watch


ROUNDING = 0.01  # difference of a row sum from one that is attributed to rounding, in bfloat16 too
ADVICE = (
    "if the module does not call torch.nn.functional.scaled_dot_product_attention, call sinklab.record_attention where "
    "it computes attention; nn.MultiheadAttention calls it with need_weights=False"
)
_sdpa: Any = F.scaled_dot_product_attention  # as it was before the first active block
_lock = threading.Lock()
_active = 0  # number of `watch_attention` blocks in all threads


class AttentionWatch:
    """Records of the forward passes in a block of `watch_attention`."""

    def __init__(self) -> None:
        self._passes: list[list[LayerRecord]] = []
        self._calls: list[tuple[bool, LayerRecord]] = []  # of this pass, and whether `record_attention` made it
        self._running = False
        self._seconds = 0.0
        self._dtype = ""

    @property
    def layers(self) -> list[LayerRecord]:
        """Records of all sequences, one per attention layer in call order; empty before the first forward pass.

        The sequences of several forward passes are concatenated; values past the end of a sequence are 0.
        """
        return [end_to_end(parts) for parts in zip(*self._passes, strict=True)]

    def measurement(self, eps: float = 0.3, model_name: str = "") -> Measurement:
        """Return the measurement of all sequences so far: sink rates, importance, norms of keys and values.

        See `measurement_of_records` for the arguments and errors.
        """
        ones = (torch.ones_like(layers[0].importance_BHT[:, 0]) for layers in self._passes)
        passes = list(zip(self._passes, map(real_tokens, ones), strict=True))
        return measurement_of_records(
            passes, eps, model_name, seconds=self._seconds, backend="watched", dtype=self._dtype
        )

    def run(self, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call the module's `forward` and record its attention."""
        self._calls, self._running, start = [], True, time.perf_counter()
        fused = torch.backends.mha.get_fastpath_enabled()  # of nn.TransformerEncoderLayer, in one operation
        torch.backends.mha.set_fastpath_enabled(False)
        try:
            output = forward(*args, **kwargs)
        finally:
            torch.backends.mha.set_fastpath_enabled(fused)
        self._running = False
        self._seconds += time.perf_counter() - start
        explicit = [record for given, record in self._calls if given]
        layers = explicit or [record for _, record in self._calls]
        self._calls = []
        if not layers:
            raise SinklabError(f"no attention was recorded in the forward pass: {ADVICE}")
        if self._passes and len(layers) != len(self._passes[0]):
            raise SinklabError(
                f"{len(layers)} attention calls were recorded in this forward pass and {len(self._passes[0])} in the "
                "first one: every pass must have the same layers"
            )
        self._passes.append(layers)
        return output

    def add(self, given: bool, record: Callable[[], LayerRecord], dtype: torch.dtype) -> None:
        """Add the record of an attention call in a forward pass of the module; other calls are ignored."""
        if self._running:
            self._calls.append((given, record()))
            self._dtype = str(dtype).removeprefix("torch.")


_watches: ContextVar[tuple[AttentionWatch, ...]] = ContextVar("watches", default=())


@contextmanager
def watch_attention(model: nn.Module) -> Iterator[AttentionWatch]:
    """Record the attention in every forward pass of a module in the `with` block.

        with sinklab.watch_attention(model) as watch:
            model(tokens)
        watch.layers[0].importance_BHT        # alpha of the first attention layer, (batch, head, position)
        watch.measurement().sink_rate[0]      # Sink_1 in percent

    Every call of `torch.nn.functional.scaled_dot_product_attention` in the forward pass is a layer. If the module calls
    `sinklab.record_attention`, only those calls are layers. Forward passes must have whole sequences, without padding
    or a KV cache, and the module must not be compiled. Its output is not changed, except by rounding in an
    `nn.TransformerEncoderLayer`, whose fused path is not taken.

    Args:
        model: any module; for models of transformers, `sinklab.probe` and `sinklab.measure` record more.

    Raises:
        InputError: if `model` is not a module.
        SinklabError: in a forward pass, if no attention was recorded, the number of layers changes between passes,
            queries attend to later tokens, or there are more keys than queries.
    """
    global _active, _sdpa
    if not isinstance(model, nn.Module):
        raise InputError(f"the model is {type_text(model)}: expected a torch.nn.Module")
    watch = AttentionWatch()
    with _lock:
        if not _active:
            _sdpa = F.scaled_dot_product_attention
            F.scaled_dot_product_attention = _watched_sdpa  # pyrefly: ignore[bad-assignment]
        _active += 1
    token = _watches.set((*_watches.get(), watch))
    try:
        # TransformerLens calls `forward` without the module's hooks; `update_wrapper` keeps the signature.
        with patch.object(model, "forward", update_wrapper(partial(watch.run, model.forward), model.forward)):
            yield watch
    finally:
        _watches.reset(token)
        with _lock:
            _active -= 1
            if not _active and F.scaled_dot_product_attention is _watched_sdpa:
                F.scaled_dot_product_attention = _sdpa


def record_attention(
    weights: Tensor | None = None,
    *,
    q: Tensor | None = None,
    k: Tensor | None = None,
    v: Tensor | None = None,
    mask: Any = None,
    scale: float | None = None,
    score: Callable[..., Tensor] | None = None,
) -> None:
    """Record one attention layer in `watch_attention`; does nothing outside it.

    Call it in the module that computes attention, once per layer, with the weights or with queries and keys:

        sinklab.record_attention(att, v=v)                    # att: weights after the softmax, before dropout
        sinklab.record_attention(q=q, k=k, v=v)               # causal softmax attention, without the T x T matrix

    If the weights of a query do not sum to one, as in sigmoid attention, its importance is computed from the shares
    |A_tk| / sum_s |A_ts|, as in the paper, and their mean sum is in `row_sums_BH`.

    Args:
        weights: attention weights (B, H, T, T) of each query over the keys.
        q: queries (B, H, T, D), after RoPE and norms.
        k: keys (B, G, T, D), with H a multiple of G, after RoPE and norms; with `weights`, for their norms alone.
        v: values (B, G, T, V), for their norms; None leaves these out.
        mask: None (causal), a mask of (T, T) or (B, 1 or H, T, T) that is boolean (True: visible) or added to the
            scores, or a `BlockMask` of FlexAttention.
        scale: factor of q.k; None means 1 / sqrt(D).
        score: further function (z, b, h, q_index, k_index) -> z of the scores z, as `score_mod` of FlexAttention.

    Raises:
        InputError: if types or shapes do not match, the weights contain NaN, or neither the weights nor both of q and k
            are given.
        SinklabError: if queries attend to later tokens, or there are more keys than queries (a KV cache).
    """
    watches = _watches.get()
    if not watches:
        return
    for name, given in {"weights": weights, "q": q, "k": k, "v": v}.items():
        if given is not None and not isinstance(given, Tensor):
            raise InputError(f"record_attention: {name} is {type_text(given)}: expected a torch.Tensor")
    if score is not None and not callable(score):
        raise InputError(f"record_attention: score is {type_text(score)}: expected a function (z, b, h, q, k) -> z")
    if weights is not None:
        given = matrix_BHTT = weights

        def record() -> LayerRecord:
            return _of_weights(matrix_BHTT, k, v)
    elif q is not None and k is not None:
        given, key = q, k

        def record() -> LayerRecord:
            return _of_queries(given, key, v, mask, True, scale, score)
    else:
        raise InputError("record_attention needs the attention weights, or both q and k")
    _add(watches, True, record, given)


@wraps(_sdpa)
def _watched_sdpa(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    **options: Any,
) -> Tensor:
    out = _sdpa(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, **options)
    if watches := _watches.get():
        _add(watches, False, lambda: _of_queries(query, key, value, attn_mask, is_causal, scale, None), query)
    return out


def _add(watches: tuple[AttentionWatch, ...], given: bool, record: Callable[[], LayerRecord], like: Tensor) -> None:
    with torch.no_grad(), torch.autocast(like.device.type, enabled=False):
        for watch in watches:
            watch.add(given, record, like.dtype)


def _of_queries(
    q_BHTD: Tensor,
    k_BGTD: Tensor,
    v_BGTV: Tensor | None,
    mask: Any,
    causal: bool,
    scale: float | None,
    score: Callable[..., Tensor] | None,
) -> LayerRecord:
    """Return the record of softmax attention; without a mask, it must be causal."""
    q, k = (x.detach() if x.ndim == 4 else x.detach().unsqueeze(1) for x in (q_BHTD, k_BGTD))
    if q.ndim != 4 or k.ndim != 4 or len(q) != len(k) or q.shape[-1] != k.shape[-1] or q.shape[1] % k.shape[1]:
        raise InputError(
            f"q has shape {tuple(q_BHTD.shape)} and k {tuple(k_BGTD.shape)}: expected (batch, heads, positions, "
            "width), equal except for the number of heads, of which q has a multiple"
        )
    T, S = q.shape[2], k.shape[2]
    if T != S:
        raise SinklabError(
            f"an attention layer has {T} queries and {S} keys, by shapes (batch, heads, positions, width): "
            "watch_attention needs whole sequences, so call the module without a KV cache and without cross-attention"
        )
    if isinstance(mask, Tensor):
        mask = _of_four_dimensions(mask, (len(q), q.shape[1], T, S))
    elif mask is not None and not isinstance(mask, BlockMask):
        raise InputError(f"the mask is {type_text(mask)}: expected None, a torch.Tensor or a BlockMask")
    shown = as_for_sdpa(mask, T, S, None, q.device)
    later = mask is None and not causal and T > 1
    if shown is not None:
        visible = shown if shown.dtype == torch.bool else shown > torch.finfo(shown.dtype).min / 2
        later = bool(visible.triu(1).any())
    if later:
        raise SinklabError(
            "queries of an attention layer attend to later tokens: sinks are measured only in causal attention (pass "
            "is_causal=True or a causal mask)"
        )
    value = k if v_BGTV is None else v_BGTV.detach()
    value = value if value.ndim == k_BGTD.ndim == 4 or v_BGTV is None else value.unsqueeze(1)
    if value.shape[:3] != k.shape[:3]:
        raise InputError(
            f"v has shape {tuple(value.shape)} and k {tuple(k.shape)}: expected the same batch, heads and positions"
        )
    layer = read_call(nn.Module(), q, k, value, shown, scale)
    if not layer.call.mask.causal:  # an additive mask may show later tokens, but this one does not
        layer = layer.changed(mask=replace(cast(Dense, layer.call.mask), later=False))
    if score is not None:
        layer = layer.changed(position=compose(layer.call.position, Score(score)))
    record = record_of(layer.exact())
    return record if v_BGTV is not None else replace(record, value_norm_BT=None)


def _of_four_dimensions(mask: Tensor, shape: tuple[int, int, int, int]) -> Tensor:
    """Return a mask that is broadcast to (batch, heads, queries, keys), with these four dimensions."""
    whole = mask[(None,) * (4 - mask.ndim)] if mask.ndim < 4 else mask
    wrong_size = any(size not in (1, full) for size, full in zip(whole.shape, shape, strict=False))
    if whole.ndim != 4 or wrong_size or not (mask.dtype == torch.bool or mask.is_floating_point()):
        raise InputError(
            f"the mask has shape {tuple(mask.shape)} and dtype {str(mask.dtype).removeprefix('torch.')}: expected one "
            f"that is broadcast to {shape} (batch, heads, queries, keys), and is boolean (True: visible) or added to "
            "the scores"
        )
    return whole


def _of_weights(weights_BHTT: Tensor, k: Tensor | None, v: Tensor | None) -> LayerRecord:
    """Return the record of attention weights."""
    weights_BHTT = weights_BHTT.detach()
    T = weights_BHTT.shape[-1]
    if weights_BHTT.ndim != 4 or weights_BHTT.shape[2] != T:
        raise InputError(
            f"the attention weights have shape {tuple(weights_BHTT.shape)}: expected (batch, heads, positions, "
            "positions), of whole sequences without a KV cache"
        )
    if bool(weights_BHTT.isnan().any()):
        raise InputError("the attention weights contain NaN")
    for name, x in {"k": k, "v": v}.items():
        if x is not None and (x.ndim != 4 or (len(x), x.shape[2]) != (len(weights_BHTT), T)):
            raise InputError(
                f"{name} has shape {tuple(x.shape)} and the attention weights {tuple(weights_BHTT.shape)}: expected "
                "(batch, heads, positions, width), with the same batch and positions"
            )
    if bool(weights_BHTT.triu(1).any()):
        raise SinklabError(
            "the attention weights of queries on later tokens are not 0: sinks are measured only in causal attention"
        )
    exact = weights_BHTT.to(accumulate_dtype(weights_BHTT.dtype))
    rows_BHT, row_sums_BH = exact.sum(-1), None
    if float((rows_BHT - 1).abs().max()) > ROUNDING:
        row_sums_BH = rows_BHT.mean(-1)
        exact = exact.abs() / exact.abs().sum(-1, keepdim=True).clamp(min=torch.finfo(exact.dtype).tiny)
    norms = [None if x is None else token_norms(x.detach()).mean(1) for x in (k, v)]
    return LayerRecord(unpadded_importance(exact.sum(2), T), norms[0], norms[1], row_sums_BH=row_sums_BH)
