"""transformers' attention interface: register a function as a model's attention, and parse its calls.

The function is selected by name in the model's configs. The same name is registered for masks with `ruled_mask`;
otherwise transformers silently drops padding and sliding windows. Causal masks and sliding windows over whole
sequences, padded or not, are rules instead of T x T entries (`MaskTensor`); others, such as those of packed sequences,
caches and chunked attention, are the entries of `sdpa_mask`. Rejected alternatives: `output_attentions` (forces
eager attention, stores every T x T matrix), and patching modules by class name (one patch per architecture).

Models that dispatch through `AttentionInterface` call f(module, q, k, v, mask, scaling=..., **extras). Keys and values
have G KV heads and are not repeated for the H query heads. These extras concern the scores:

    softcap         z -> softcap * tanh(z / softcap)                        (Gemma 2)
    s_aux           sink logit per head, part of the softmax                (gpt-oss)
    sinks           (B, H, T, 1) sink logit per query, part of the softmax  (Inkling2)
    position_bias   added to the scores                                     (relative positions)
    sliding_window  ignored, because the mask contains it
    indices         (B, T, K) keys selected by an indexer for each query (DeepSeek-V3.2); the attention function has to
                    apply the selection
    block_indices   (B, I, T, K) blocks of keys selected for each query by I indexer heads, each for H / I query heads;
                    -1 is none (MiniMax M3). The module's indexer has the block size.

The attention functions that a Hugging Face model calls: find them, observe their calls, and check their outputs.

A model takes its function from an `AttentionInterface` of transformers, by the name in its config. The function of
"eager" is in the file of the model's class. While a model is observed, the function is wrapped in the place where the
model looks for it, so that the name in the config, the masks and every forward pass remain the model's own. Rejected
alternative: another name in the config, by which transformers and the model's code choose masks and code paths.

Users can register functions of their own and replace those of transformers. sinklab computes attention weights from
queries, keys and mask; `SoftmaxCheck` compares the resulting output with that of the model's function.
"""

import inspect
import itertools
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from functools import cache, partial, update_wrapper
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask, create_mask
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.masking_utils import (
    causal_mask_function,
    find_packed_sequence_indices,
    flash_attention_mask,
    sdpa_mask,
    sliding_window_overlay,
)

from sinklab.attention import masks
from sinklab.attention.layer_call import LayerCall, LibraryKernel
from sinklab.attention.masks import Mask, MaskTensor, visible_keys
from sinklab.attention.operations.base import Call
from sinklab.attention.operations.similarity import Softmax
from sinklab.attention.primitive import flex_serves
from sinklab.attention.scores import Score, broadcast_index, compose, softcap
from sinklab.errors import SinklabError
from sinklab.models.families import (
    DEPTH_ATTENTION,
    SELECTED,
    SELECTED_BLOCKS,
    attention_implementation,
    model_configs,
)

EAGER = "eager"
EAGER_FUNCTION = "eager_attention_forward"  # suffix of the function's name in the file of a model's class
ROWS = 4  # last queries whose outputs are compared in every forward pass
FLOOR = 1e-3  # of the root mean square of the values: outputs of a head below it count as this size

OwnFunction = Callable[..., tuple[Tensor, Any]]
CallObserver = Callable[..., tuple[Tensor, Any]]  # (function, module, *args, **options) -> result of the call
Functions = dict[str, Any]  # attention functions by name: a registry, or the globals of a file

_lock = threading.Lock()


class _Observed:
    """An attention function with observers, each for the modules of one model."""

    def __init__(self, original: OwnFunction) -> None:
        update_wrapper(self, original)
        self.original = original
        self.observers: list[tuple[set[nn.Module], CallObserver]] = []

    def __call__(self, module: nn.Module, *args: Any, **options: Any) -> tuple[Tensor, Any]:
        function = self.original
        for modules, observe in self.observers:
            if module in modules:
                function = partial(observe, function)
        return function(module, *args, **options)


@contextmanager
def attention_observed(model: PreTrainedModel, observe: CallObserver) -> Iterator[None]:
    """Call `observe` instead of the model's attention function, which it receives, in the `with` block."""
    mine = (set(model.modules()), observe)
    observed: list[tuple[Functions, str, _Observed]] = []
    with _lock:
        for functions, name in _places(model):
            if not isinstance(functions[name], _Observed):
                functions[name] = _Observed(functions[name])
            functions[name].observers.append(mine)
            observed.append((functions, name, functions[name]))
    try:
        yield
    finally:
        with _lock:
            for functions, name, function in observed:
                function.observers = [one for one in function.observers if one is not mine]
                if not function.observers and functions.get(name) is function:
                    functions[name] = function.original


def foreign_attention(model: PreTrainedModel) -> str | None:
    """Return the name of an attention function of the model that is not transformers' own; None if all are."""
    return next((name for functions, name in _places(model) if not _is_of_transformers(functions[name])), None)


def implementation_of(module: nn.Module) -> str:
    """Return the name of the attention implementation of an attention module."""
    return str(getattr(getattr(module, "config", None), "_attn_implementation", None) or EAGER)


def _places(model: PreTrainedModel) -> list[tuple[Functions, str]]:
    """Return the (functions, name) where the model looks for its attention functions."""
    given = {config._attn_implementation or EAGER for config in model_configs(model)}
    names = {name if name == f"paged|{EAGER}" else name.removeprefix("paged|") for name in given}
    files = {kind.__module__ for module in model.modules() for kind in type(module).__mro__}
    found: dict[tuple[int, str], tuple[Functions, str]] = {}
    for file in sorted(files & sys.modules.keys()):
        for name, value in list(vars(sys.modules[file]).items()):
            if isinstance(value, AttentionInterface):
                places: list[tuple[Functions, str]] = [(value._local_mapping, one) for one in names]
            elif EAGER in names and name.endswith(EAGER_FUNCTION):
                places = [(vars(sys.modules[file]), name)]
            else:
                continue
            found |= {(id(functions), one): (functions, one) for functions, one in places if one in functions}
    shared: Functions = AttentionInterface._global_mapping
    return [*found.values(), *((shared, name) for name in sorted(names) if name in shared)]


def _is_of_transformers(function: Any) -> bool:
    """Return True if the code of the function is that of transformers, or of sinklab, whatever its name is."""
    while isinstance(function, _Observed | partial):
        function = function.original if isinstance(function, _Observed) else function.func
    return str(getattr(function, "__globals__", {}).get("__name__", "")).startswith(("transformers.", "sinklab."))


class OwnMasks:
    """Masks of the attention implementations of transformers, converted to those of its SDPA implementation.

    These are None for the plain causal mask, else boolean (True: visible), or floating-point if numbers are added to
    the scores of visible keys. The masks of one forward pass are converted once for all layers.
    """

    def __init__(self) -> None:
        self._converted: dict[tuple[Any, ...], tuple[Any, Tensor | None]] = {}

    def clear(self) -> None:
        """Forget the masks of the last forward pass."""
        self._converted.clear()

    def convert(self, mask: Any, query: Tensor, key: Tensor, window: int | None) -> Tensor | None:
        """Convert a mask.

        Args:
            mask: None; a padding mask (B, S), as flash attention has it; a mask (B, 1 or H, T, S), boolean or added to
                the scores; or a `BlockMask`.
            query, key: queries (B, H, T, D) and keys (B, G, S, D), for their sizes and device.
            window: width of the sliding window that the function applies if the mask has no axis of queries.
        """
        at = (id(mask), query.shape[2], key.shape[2], window)
        if at not in self._converted:  # with the mask itself, so that its id remains unique
            self._converted[at] = (mask, as_for_sdpa(mask, query.shape[2], key.shape[2], window, query.device))
        return self._converted[at][1]


def as_for_sdpa(mask: Any, T: int, S: int, window: int | None, device: torch.device) -> Tensor | None:
    """Convert a mask for T queries and S keys; see `OwnMasks`."""
    if mask is None and (not window or window >= S):
        return None
    causal_TS = torch.ones(T, S, dtype=torch.bool, device=device).tril(S - T)
    if isinstance(mask, BlockMask):
        rows, heads = mask.shape[:2]
        visible = create_mask(mask.mask_mod, rows, heads, T, S, str(device))
    elif mask is None or mask.ndim == 2:
        visible = causal_TS[None, None]
        if window and window < S:
            visible = visible.triu(S - T - window + 1)
        if mask is not None:
            real_BS = mask[:, -S:].to(device) != 0
            visible = visible & real_BS[:, None, None] & real_BS[:, None, -T:, None]
    elif mask.dtype == torch.bool:
        return mask
    else:
        visible = mask > torch.finfo(mask.dtype).min / 2
        if bool(mask.where(visible, 0).any()):
            return mask
    return None if bool((visible == causal_TS).all()) else visible


def packed_sequences(position_ids: Any = None, cu_seq_lens_q: Any = None, **_: Any) -> Tensor | None:
    """Return the number of the packed sequence of each token, (B or 1, T); None if every row is one sequence.

    Args:
        position_ids: positions (B or 1, T); a sequence begins where they do not increase by one, as in transformers.
        cu_seq_lens_q: cumulative lengths of the sequences of a single row, from 0, which take precedence.
    """
    if isinstance(cu_seq_lens_q, Tensor):
        at_T = torch.arange(int(cu_seq_lens_q[-1]), device=cu_seq_lens_q.device)
        return torch.bucketize(at_T, cu_seq_lens_q[1:], right=True)[None]
    of_tokens = isinstance(position_ids, Tensor) and position_ids.ndim == 2
    return find_packed_sequence_indices(position_ids) if of_tokens else None


class SoftmaxCheck:
    """Comparison of the outputs of a model's attention function with softmax attention.

    All queries of a layer are compared in its first call, and again when the keys have doubled in number, because a
    sliding window that the mask does not contain shows only in longer sequences. The last queries (`ROWS`) are compared
    in every call without dropout: parameters of the function may change in training.
    """

    def __init__(self) -> None:
        self._layer = 0
        self._compared: dict[tuple[int, bool], int] = {}  # number of keys, by layer and whether all are new
        self._errors: list[tuple[int, nn.Module, Tensor, float]] = []  # of this pass

    def begin(self) -> None:
        """Begin a forward pass."""
        self._layer = 0
        self._errors.clear()

    def compare(
        self, module: nn.Module, layer: LayerCall, output: Callable[[], Tensor], without_dropout: Callable[[], Tensor]
    ) -> None:
        """Compare the call of the next layer.

        Args:
            module: attention module.
            layer: the call, as sinklab reads it.
            output: returns the output of the model's attention function, (B, H, T, V).
            without_dropout: the same without dropout, in an additional call; the same function if there is no dropout.

        Raises:
            SinklabError: if the outputs of all queries are compared and differ.
        """
        self._layer += 1
        at, keys = (self._layer, layer.length == layer.call.k_BGTD.shape[2]), layer.call.k_BGTD.shape[2]
        if whole := keys >= 2 * self._compared.get(at, 0):
            self._compared[at] = keys
        elif without_dropout is not output:
            return
        given_BHTV = without_dropout()
        error, limit = _relative_error(layer, given_BHTV, None if whole else ROWS), _tolerance(layer, given_BHTV)
        self._errors.append((self._layer, module, error, limit))
        if whole:
            self.end()

    def end(self) -> None:
        """End a forward pass.

        Raises:
            SinklabError: if the output of a layer differed.
        """
        compared, self._errors = self._errors, []
        if not compared:
            return
        errors = torch.stack([error.to(compared[0][2].device) for *_, error, _ in compared]).tolist()
        for (number, module, _, limit), error in zip(compared, errors, strict=True):
            if error > limit:
                raise SinklabError(
                    f"attention implementation {implementation_of(module)!r} does not compute softmax attention in "
                    f"layer {number} (its output differs by {100 * error:.3g} %): the attention weights cannot be "
                    "computed from its queries, keys and mask. Pass them from your attention function: use "
                    "sinklab.watch_attention and sinklab.record_attention"
                )


@torch.no_grad()
def _relative_error(layer: LayerCall, given_BHTV: Tensor, rows: int | None) -> Tensor:
    """Return the difference of the outputs, relative to the larger one: the maximum over heads.

    Args:
        rows: number of last queries to compare; None compares all. Queries without visible keys are left out.
    """
    exact = layer.exact()
    call, T, S = exact.call, layer.length, layer.call.k_BGTD.shape[2]
    first = 0 if rows is None else max(T - rows, 0)
    logit_BHT = call.logit_BHT
    if logit_BHT is not None and logit_BHT.shape[-1] > 1:
        logit_BHT = logit_BHT[..., first:]
    call = replace(call, q_BHTD=call.q_BHTD[:, :, first:], logit_BHT=logit_BHT)
    expected = replace(exact, call=call).output()
    given = given_BHTV[:, :, first:].to(expected.dtype)
    if call.mask.may_be_empty:
        seen = (visible_keys(call.mask, T - first, given.device, S) > 0)[..., None]
        expected, given = (x.where(seen, 0) for x in (expected, given))
    size = FLOOR * exact.value_BGSV.norm() * (expected[:, 0].numel() / exact.value_BGSV.numel()) ** 0.5
    difference_H, *sizes = (x.transpose(0, 1).flatten(1).norm(dim=1) for x in (expected - given, expected, given))
    return (difference_H / torch.maximum(*sizes).maximum(size).clamp(min=1e-30)).max()


def _tolerance(layer: LayerCall, given_BHTV: Tensor) -> float:
    """Return the relative difference attributed to rounding: the square root of the coarsest epsilon."""
    tensors = (layer.call.q_BHTD, layer.call.k_BGTD, layer.value_BGSV, given_BHTV)
    eps, device = max(torch.finfo(x.dtype).eps for x in tensors), given_BHTV.device.type
    eps = max(eps, torch.finfo(torch.float32).eps)  # eager attention computes the softmax in float32
    if torch.is_autocast_enabled(device):
        eps = max(eps, torch.finfo(torch.get_autocast_dtype(device)).eps)
    if torch.get_float32_matmul_precision() != "highest":
        eps = max(eps, torch.finfo(torch.float16).eps)  # TF32 has as many digits
    return eps**0.5


def ruled_mask(**given: Any) -> Tensor | None:
    """Return `sdpa_mask(**given)`, as a `MaskTensor` where the mask is a rule; None for the plain causal mask."""
    if (rule := _rule(**given)) is None:
        return sdpa_mask(**given)
    shape = (given["batch_size"], 1, given["q_length"], given["kv_length"])
    return None if rule.plain else MaskTensor(rule, partial(sdpa_mask, **given), shape, torch.device(given["device"]))


def _rule(
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor,
    kv_offset: int,
    mask_function: Callable[..., Tensor],
    attention_mask: Tensor | None,
    allow_is_causal_skip: bool,
    **_: Any,
) -> Mask | None:
    """Return the rule of a mask from the arguments with which transformers builds it; None if it is not a known one.

    `allow_is_causal_skip` is False if the mask is more than its `mask_function`. Padding is a document of its own: real
    tokens see what `sdpa_mask` shows them, and padding, which sees no key there, sees padding.
    """
    whole = isinstance(q_offset, int) and q_offset == kv_offset == 0 and q_length == kv_length
    fits = attention_mask is None or attention_mask.shape[1] == kv_length
    if not (whole and fits and allow_is_causal_skip):
        return None
    rule: Mask = masks.CAUSAL
    if mask_function is not causal_mask_function:
        parts = inspect.getclosurevars(mask_function).nonlocals.get("mask_functions", ())
        if len(parts) != 2 or parts[1] is not causal_mask_function or parts[0].__code__ is not WINDOW_CODE:
            return None
        width: int = inspect.getclosurevars(parts[0]).nonlocals["sliding_window"]
        rule = masks.Window(width) if width < kv_length else rule
    if attention_mask is None or bool(attention_mask.all()):
        return rule
    return masks.both(rule, masks.Document(attention_mask.long()))


WINDOW_CODE = sliding_window_overlay(1).__code__
SOFTMAX = Softmax()
ARGUMENTS = ("query", "key", "value", "attention_mask")  # of an attention function, after the module
_numbers = itertools.count()


def read_call(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    **extras: Any,
) -> LayerCall:
    """Convert the arguments of a call of transformers' attention interface to a `LayerCall`.

    Args:
        query: queries (B, H, T, D), at the last T of the S positions.
        key, value: keys (B, G, S, D) and values (B, G, S, V).
        attention_mask: (B, 1 or H, T, S), boolean (True: visible) or added to the scores; None means causal.
        scaling: factor of q.k; None means 1 / sqrt(D).
        extras: see the module docstring.

    Raises:
        SinklabError: if there is no mask and the attention is not causal.
    """
    H, S = query.shape[1], key.shape[2]
    if (chosen_BTK := extras.pop(SELECTED, None)) is not None:
        attention_mask = _restricted(attention_mask, _listed(chosen_BTK, S)[:, None])
    if (blocks_BITK := extras.pop(SELECTED_BLOCKS, None)) is not None:
        indexer: Any = module.indexer
        size: int = indexer.block_size
        chosen_BITN = _listed(blocks_BITK.where(blocks_BITK >= 0, S), S + 1)[..., : -(-S // size)]
        keys_BITS = chosen_BITN.repeat_interleave(size, -1)[..., :S]
        attention_mask = _restricted(attention_mask, keys_BITS.repeat_interleave(H // keys_BITS.shape[1], 1))
    cap, sink_H, sink_BHT1, bias = (extras.get(name) for name in ("softcap", "s_aux", "sinks", "position_bias"))
    logit_BHT = sink_H[None, :, None] if sink_H is not None else None if sink_BHT1 is None else sink_BHT1[..., 0]
    score = _additive(bias)
    if attention_mask is None:
        is_causal = extras.get("is_causal")
        if not (getattr(module, "is_causal", True) if is_causal is None else is_causal):
            raise SinklabError(
                f"{type(module).__name__} attends to later tokens: sinks are measured only in causal language models"
            )
        allowed = masks.CAUSAL
    elif isinstance(attention_mask, MaskTensor):
        allowed = attention_mask.rule
    elif attention_mask.dtype == torch.bool:
        cached = key.shape[2] - query.shape[2]
        allowed = masks.Dense(attention_mask, later=bool(attention_mask.triu(1 + cached).any()))
    else:  # additive mask: about the dtype's minimum at hidden keys
        score = compose(score, _additive(attention_mask))
        allowed = masks.Dense(attention_mask > torch.finfo(attention_mask.dtype).min / 2, later=True)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    capped = None if cap is None else softcap(cap)
    call = Call(query, key, allowed, cap=capped, position=score, logit_BHT=logit_BHT, scale=scale)

    def fused() -> Tensor:
        kernel = AttentionInterface._global_mapping["sdpa"]
        mask = attention_mask.compute() if isinstance(attention_mask, MaskTensor) else attention_mask
        return kernel(module, query, key, value, mask, scaling=scaling, **extras)[0].transpose(1, 2)

    def by_sinklab() -> Tensor:
        out_BHTV, lse_BHT = call.attend(value)
        if logit_BHT is not None:
            out_BHTV = out_BHTV * torch.sigmoid(lse_BHT - logit_BHT)[..., None].to(out_BHTV.dtype)
        return out_BHTV

    flex = flex_serves(query, value)
    if cap is None and logit_BHT is None and not (flex and isinstance(attention_mask, MaskTensor)):
        library = LibraryKernel("sdpa", fused)
    else:
        library = LibraryKernel("flex" if flex else "chunked", by_sinklab)
    return LayerCall(SOFTMAX, call, value, library=library)


def _listed(places: Tensor, width: int) -> Tensor:
    """Return a boolean tensor (.., width) that is True at the listed places (.., K)."""
    return torch.zeros(*places.shape[:-1], width, dtype=torch.bool, device=places.device).scatter(
        -1, places.long(), True
    )


def _restricted(mask: Tensor | None, chosen_BHTS: Tensor) -> Tensor:
    """Restrict a boolean or additive mask (B, 1, T, S) to the chosen keys, whose axis H may be 1.

    If the mask is None, the causal mask is applied, because a query with few visible keys also selects later ones.
    """
    if mask is None:
        return chosen_BHTS.tril(chosen_BHTS.shape[-1] - chosen_BHTS.shape[-2])
    if mask.dtype == torch.bool:
        return mask & chosen_BHTS
    return mask.masked_fill(~chosen_BHTS, torch.finfo(mask.dtype).min)


def _additive(bias: Tensor | None) -> Score | None:
    """Return the score function z + bias[b, h, q, k]; None if there is no bias.

    Batch and head axes of the bias are broadcast; the queries are at the last positions of the keys.
    """
    if bias is None:
        return None
    rows, heads, queries, keys = bias.shape

    def add(z: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor, bias_BHTS: Tensor) -> Tensor:
        return z + bias_BHTS[broadcast_index(b, rows), broadcast_index(h, heads), q - (keys - queries), k]

    return Score(add, (bias,))


@contextmanager
def attention_computed_by(model: PreTrainedModel, compute: Callable[[nn.Module, LayerCall], Tensor]) -> Iterator[None]:
    """Compute attention calls by `compute` in the `with` block, with the masks of `ruled_mask`.

    Forward passes raise the errors of `read_call`.

    Calls that attend to layers instead of tokens (`DEPTH_ATTENTION`) are left to transformers.

    Args:
        compute: function (attention module, call) -> output (B, H, T, V).
    """

    def function(module: nn.Module, *args: Any, **options: Any) -> tuple[Tensor, None]:
        if type(module).__name__.endswith(DEPTH_ATTENTION):
            return AttentionInterface._global_mapping["sdpa"](module, *args, **options)
        layer = read_call(module, *args, **options)
        return compute(module, layer).to(layer.value_BGSV.dtype).transpose(1, 2).contiguous(), None

    name = f"sinklab-{next(_numbers)}"
    AttentionInterface.register(name, function)
    AttentionMaskInterface.register(name, ruled_mask)
    try:
        with attention_implementation(model, name):
            yield
    finally:
        AttentionInterface._global_mapping.pop(name, None)
        AttentionMaskInterface._global_mapping.pop(name, None)


class OwnAttention:
    """Attention computed by a model's own functions, whose calls are read and compared with softmax attention.

    `begin` and `end` are called before and after every forward pass.

    Args:
        model: the model.
        compute: function (attention module, call) -> output (B, H, T, V). If it returns that of the call's `library`,
            the result of the model's function is returned as it is.
    """

    def __init__(self, model: PreTrainedModel, compute: Callable[[nn.Module, LayerCall], Tensor]) -> None:
        self._model, self._compute = model, compute
        self._masks, self._check = OwnMasks(), SoftmaxCheck()

    def begin(self) -> None:
        """Begin a forward pass."""
        self._masks.clear()
        self._check.begin()

    def end(self) -> None:
        """End a forward pass; raises SinklabError if an output differs from that of softmax attention."""
        self._masks.clear()
        self._check.end()

    def installed(self) -> AbstractContextManager[None]:
        """Return a context manager in which the attention calls of the model are read.

        In a forward pass, SinklabError is raised as in `read_call`, and if an output differs from softmax attention.
        """
        return attention_observed(self._model, self._called)

    def _called(self, function: OwnFunction, module: nn.Module, *args: Any, **options: Any) -> tuple[Tensor, Any]:
        """Return the result of a call of the model's attention function.

        The calls of activation checkpointing, which repeats the forward pass in the backward pass, are not read.
        """
        if type(module).__name__.endswith(DEPTH_ATTENTION) or torch._C._current_graph_task_id() != -1:
            return function(module, *args, **options)
        given = dict(zip(ARGUMENTS, args, strict=False)) | options
        query, key, value, mask = (given.pop(name, None) for name in ARGUMENTS)
        (B, H, T, _), V = query.shape, value.shape[-1]

        def by_head(result: tuple[Tensor, Any]) -> Tensor:
            return result[0].reshape(B, T, H, V).transpose(1, 2)

        @cache
        def own() -> tuple[tuple[Tensor, Any], Tensor]:
            result = function(module, *args, **options)
            return result, by_head(result)

        def output() -> Tensor:
            return own()[1]

        @torch.no_grad()
        def without_dropout() -> Tensor:
            with torch.random.fork_rng([query.device] if query.is_cuda else []):
                return by_head(function(module, *args, **{**options, "dropout": 0.0}))

        window = given.get("sliding_window")
        converted = self._masks.convert(mask, query, key, window)
        masked_by = AttentionMaskInterface._global_mapping.get(implementation_of(module))
        flash = masked_by is flash_attention_mask and mask is None and B == 1 and key.shape[2] == T
        if flash and (packed_BT := packed_sequences(**given)) is not None:  # no mask shows them
            rule = masks.both(masks.Window(window) if window else masks.CAUSAL, masks.Document(packed_BT))
            converted = MaskTensor(rule, partial(create_mask, rule.allowed, 1, 1, T, T), (1, 1, T, T), query.device)
        layer = read_call(module, query, key, value, converted, **given)
        layer = replace(layer, library=LibraryKernel(implementation_of(module), output, fixed=True))
        self._check.compare(module, layer, output, without_dropout if options.get("dropout") else output)
        out_BHTV = self._compute(module, layer)
        if out_BHTV is output():
            return own()[0]
        return out_BHTV.to(value.dtype).transpose(1, 2).contiguous(), None
