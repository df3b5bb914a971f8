"""The attention functions that a Hugging Face model calls: find them, observe their calls, and check their outputs.

A model takes its function from an `AttentionInterface` of transformers, by the name in its config. The function of
"eager" is in the file of the model's class. While a model is observed, the function is wrapped in the place where the
model looks for it, so that the name in the config, the masks and every forward pass remain the model's own. Rejected
alternative: another name in the config, by which transformers and the model's code choose masks and code paths.

Users can register functions of their own and replace those of transformers. sinklab computes attention weights from
queries, keys and mask; `SoftmaxCheck` compares the resulting output with that of the model's function.
"""

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial, update_wrapper
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask, create_mask
from transformers import AttentionInterface, PreTrainedModel

from sinklab.attention.layer_call import LayerCall
from sinklab.attention.masks import visible_keys
from sinklab.errors import SinklabError
from sinklab.models.huggingface.anatomy import model_configs

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
