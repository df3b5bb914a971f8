"""Compare logits and sinks of one model under the attention backends of the installed transformers.

A backend is called in every layer with the values, and again with unit vectors as values, so that its outputs are the
columns of its attention matrix. The importance is computed from these columns; one minus the row sums is the attention
to the sink logit. The reference is the model's eager attention. Dividing the eager output by its row sums removes the
sink logits, which reproduces a backend that ignores them.

A backend that transformers does not support for a model (`_supports_sdpa = False`), that is not installed or that fails
is reported as unavailable, with the reason. The attention with which sinklab measures (pretrained_records.py;
`one_pass` on a CPU) is also compared; it shows which of two differing backends follows the formula.
"""

import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Literal
from unittest.mock import patch

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel

from sinklab.attention.importance import importance_from_sums
from sinklab.errors import InputError, cause
from sinklab.measuring.pretrained_records import call_records
from sinklab.models.families import attention_implementation, text_config
from sinklab.models.hooks import evaluating
from sinklab.models.huggingface.pretrained_adapter import HuggingFaceAdapter
from sinklab.schema import Part

EAGER, OWN = "eager", "sinklab"
BACKENDS = (EAGER, "sdpa", "flex_attention", "flash_attention_2", "flash_attention_3", "flash_attention_4")

EXPERTS = (
    "its importance agrees with eager attention: rounding may have routed tokens to other experts; try --dtype float32"
)

ParityVerdict = Literal["reference", "agrees", "differs", "drops the sink", "unavailable"]
AttentionFunction = Callable[..., tuple[Tensor, Tensor | None]]


class BackendParity(Part):
    """Differences of logits and attention between one backend and eager attention.

    All numbers are None if the backend is unavailable or its logits contain NaN or infinity. The differences are also
    None for eager attention itself.

    Attributes:
        backend: name of the backend in transformers; "sinklab" for the attention with which sinklab measures.
        verdict: "reference" for eager attention; "unavailable" if the backend could not be run; "drops the sink" if
            `sink_share` is less than half of the reference's and the logits are closer to the reference without sink
            logits than to the reference; "agrees" if `logits_difference` is within `tolerance`; else "differs".
        why: reason why the backend is unavailable, or a remark; None if there is neither.
        logits_difference: largest |difference| from the reference logits, divided by the largest |reference logit|.
        without_sink_difference: the same difference from the reference without its sink logits; None if the model has
            no sink logits.
        importance_difference: largest |difference| from the reference's alpha, over sequences, layers, heads and
            positions; None if the model bypasses transformers' attention interface.
        importance_first: alpha of position 1, mean over sequences, layers and heads; None if the model bypasses
            transformers' attention interface.
        sink_share: attention to the sink logit (one minus the row sum), mean over queries, heads and the layers with
            sink logits; None if there are no such layers.
    """

    backend: str
    verdict: ParityVerdict
    why: str | None = None
    logits_difference: float | None = None
    without_sink_difference: float | None = None
    importance_difference: float | None = None
    importance_first: float | None = None
    sink_share: float | None = None


@dataclass
class _BackendReading:
    """Logits, importance and sink shares of the model with one backend.

    Attributes:
        importance: alpha (B, H, T) of every layer that uses transformers' attention interface.
        shares: attention to the sink logit, mean over queries (B, H), for each layer with a sink logit.
        computed_by: backend that transformers actually used; empty for sinklab's attention.
    """

    logits_BTV: Tensor = field(default_factory=lambda: torch.empty(0))
    importance: list[Tensor] = field(default_factory=list)
    shares: list[Tensor] = field(default_factory=list)
    computed_by: str = ""

    def means(self) -> dict[str, Any]:
        """Return the mean alpha of position 1 and the mean attention to the sink logit, as in `BackendParity`."""
        found = {"importance_first": [alpha_BHT[..., 0] for alpha_BHT in self.importance], "sink_share": self.shares}
        return {name: float(torch.stack([x.mean() for x in xs]).mean()) if xs else None for name, xs in found.items()}

    def difference(self, other: "_BackendReading") -> float:
        """Return the largest |difference| of the logits from other logits, divided by the largest |other logit|."""
        first, second = self.logits_BTV.double(), other.logits_BTV.double()
        return float((first - second).abs().max() / second.abs().max().clamp(min=1e-30))


def backend_parity(
    model: PreTrainedModel,
    tokens_BT: Tensor,
    backends: Sequence[str] = BACKENDS,
    starts: Callable[[str], None] = lambda backend: None,
) -> list[BackendParity]:
    """Compare logits and attention of every backend with eager attention, whose entry is the first of the result.

    The model is restored afterwards.

    Args:
        tokens_BT: token ids, on the input device of the model.
        backends: backends to compare, from `BACKENDS`; eager and sinklab's attention are always included.
        starts: called with the name of each backend before it runs; compilation may take minutes.

    Raises:
        InputError: if the model does not run with eager attention.
    """
    starts(EAGER)
    reference = _read(model, tokens_BT, EAGER)
    if isinstance(reference, str):
        raise InputError(f"backends are compared with eager attention, but the model does not run with it: {reference}")
    without = _read(model, tokens_BT, EAGER, without_sinks=True) if reference.shares else None
    assert not isinstance(without, str)
    text = text_config(model.config)
    has_experts = any(
        (getattr(text, name, None) or 0) > 1 for name in ("num_local_experts", "num_experts", "n_routed_experts")
    )
    found = [BackendParity(backend=EAGER, verdict="reference", **reference.means())]
    for backend in (*(name for name in backends if name != EAGER), OWN):
        starts(backend)
        read = _read_own(model, tokens_BT) if backend == OWN else _read(model, tokens_BT, backend)
        if isinstance(read, str):
            found.append(BackendParity(backend=backend, verdict="unavailable", why=read))
        else:
            found.append(_compared(backend, read, reference, without, has_experts))
    return found


def tolerance(dtype: torch.dtype) -> float:
    """Return the relative logit difference attributed to rounding: the square root of the dtype's epsilon."""
    return torch.finfo(dtype).eps ** 0.5


def _compared(
    backend: str,
    read: _BackendReading,
    reference: _BackendReading,
    without: _BackendReading | None,
    has_experts: bool,
) -> BackendParity:
    if not bool(read.logits_BTV.isfinite().all()):
        return BackendParity(backend=backend, verdict="differs", why="its logits contain NaN or infinity")
    difference, means, dtype = read.difference(reference), read.means(), reference.logits_BTV.dtype
    from_none = None if without is None else read.difference(without)
    share, whole = means["sink_share"], reference.means()["sink_share"]
    gone = share is not None and whole is not None and share < whole / 2 and whole > torch.finfo(dtype).eps
    if gone and from_none is not None and from_none < difference:
        verdict = "drops the sink"
    else:
        verdict = "agrees" if difference <= tolerance(dtype) else "differs"
    pairs = zip(read.importance, reference.importance, strict=False)  # empty if the model bypasses the interface
    apart = max((float((one - other).abs().max()) for one, other in pairs), default=None)
    why = [] if read.computed_by in ("", backend) else [f"transformers uses {read.computed_by} instead"]
    if verdict == "differs" and has_experts and apart is not None and apart <= tolerance(dtype):
        why.append(EXPERTS)
    return BackendParity(
        backend=backend,
        verdict=verdict,
        why="; ".join(why) or None,
        logits_difference=difference,
        without_sink_difference=from_none,
        importance_difference=apart,
        **means,
    )


def _read(
    model: PreTrainedModel, tokens_BT: Tensor, backend: str, without_sinks: bool = False
) -> _BackendReading | str:
    """Run the model with a backend and return its logits and attention, or why the backend is unavailable."""
    reading, before = _BackendReading(), str(model.config._attn_implementation)
    with attention_implementation(model, before):  # restored at the end
        try:
            model.set_attn_implementation(backend)
            reading.computed_by = taken = str(model.config._attn_implementation)  # may be a fallback kernel
            if taken != backend and taken in (before, EAGER):
                return f"transformers keeps {taken} attention in a {model.config.model_type!r} model"
            with evaluating(model), _watched(taken, reading, without_sinks):
                reading.logits_BTV = model(tokens_BT, use_cache=False).logits
        except Exception as error:  # packages and kernels raise various exceptions
            return cause(error).split(". ")[0]
    return reading


def _read_own(model: PreTrainedModel, tokens_BT: Tensor) -> _BackendReading | str:
    adapter = HuggingFaceAdapter(model)
    if not adapter.dispatches:
        return f"a {model.config.model_type!r} model does not call transformers' attention interface"
    try:
        with evaluating(model), call_records(model, adapter) as watch:
            logits_BTV = model(tokens_BT, use_cache=False).logits
    except Exception as error:  # also of an attention function that is not transformers' own, which is then called
        return cause(error).split(". ")[0]
    shares = [layer.bias_BH.cpu() for layer in watch.layers if layer.bias_BH is not None]
    return _BackendReading(logits_BTV, [layer.importance_BHT.cpu() for layer in watch.layers], shares)


def _watched(backend: str, reading: _BackendReading, without_sinks: bool) -> AbstractContextManager[Any]:
    """Return a context manager that records alpha and the attention to a sink logit at every call of the backend.

    They are appended to `reading`. With `without_sinks`, outputs are also divided by the row sums, which removes the
    sink logits. At the end of the `with` block, transformers' function is restored.
    """
    functions = AttentionInterface._global_mapping
    own = functions.get(backend)

    def attention(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Any, *args: Any, **options: Any
    ) -> tuple[Tensor, Tensor | None]:
        function: AttentionFunction = own or sys.modules[type(module).__module__].eager_attention_forward

        def of_values(value_BGSV: Tensor) -> tuple[Tensor, Tensor | None]:
            return function(module, query, key, value_BGSV, mask, *args, **options)

        attention_BHTS = _matrix(lambda unit_BGSV: of_values(unit_BGSV)[0], value)
        T, rows_BHT = attention_BHTS.shape[2], attention_BHTS.sum(-1)
        lengths_B = torch.full((len(query),), T)
        reading.importance.append(importance_from_sums(attention_BHTS.sum(2)[..., -T:], lengths_B).cpu())
        out_BTHV, weights = of_values(value)
        if any(options.get(name) is not None for name in ("s_aux", "sinks")):
            reading.shares.append((1 - rows_BHT).mean(-1).cpu())
            if without_sinks:
                out_BTHV = out_BTHV / rows_BHT.mT[..., None].clamp(min=torch.finfo(torch.float32).tiny).to(out_BTHV)
        return out_BTHV, weights

    return patch.dict(functions, {backend: attention})


def _matrix(output: Callable[[Tensor], Tensor], value_BGSV: Tensor) -> Tensor:
    """Compute the attention matrix (B, H, T, S), float32, from the outputs for unit vectors as values, in chunks."""
    S, V = value_BGSV.shape[2:]
    columns = []
    for start in range(0, S, V):
        unit_BGSV = torch.zeros_like(value_BGSV)
        width = min(V, S - start)
        unit_BGSV[:, :, range(start, start + width), range(width)] = 1
        columns.append(output(unit_BGSV)[..., :width].float().transpose(1, 2))
    return torch.cat(columns, -1)
