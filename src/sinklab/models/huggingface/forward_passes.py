"""Forward passes of Hugging Face models: gates that are read, first keys that are hidden, and the loss in pieces.

Gates on the attention output: the input of o_proj is out * sigmoid(logits).

The gate logits, one per head or per channel, are outputs of the query projection, after the queries of each head
(Qwen3-Next, Qwen3.5) or of each KV head (the models of 2505.06708), or outputs of a separate projection (AFMoE, Step
3.7). The layout is not derived from the architecture name: each layout is tried on a few tokens, and used if out *
sigmoid(logits) equals the input of o_proj. Other kinds of gates are not detected.

Hide the first keys in a Hugging Face model through the attention mask.

Attention modules of transformers accept `attention_mask`, which is None (causal), boolean or additive. One hook that
changes it therefore covers all model families, also those that do not use transformers' attention interface. The
model's own code still computes the attention. Calls of the hook are counted in every forward pass: a number other than
that of the attention layers is an error.

Find the attention modules in a trial forward pass, to compute gradients at their inputs.

Loss of a forward pass without storing all logits (4 GB in float32 for 32,768 tokens and a vocabulary of 32,768).

The first call of the model computes the final hidden states and the logits of one position. Then the model is called
once for each chunk of positions, and its body returns the stored hidden states. Thus the model's own code computes
everything after the body, such as scaling and softcap of the logits.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel

from sinklab.attention.layer_call import LayerCall
from sinklab.attention.query_blocks import accumulate_dtype
from sinklab.errors import InputError, SinklabError
from sinklab.model.loss import IGNORED
from sinklab.models import families
from sinklab.models.families import GATES, OUTPUT, QUERIES, bodies, family_of, vocabulary_size, weights_quantised
from sinklab.models.hooks import (
    HIDDEN,
    Compute,
    FirstColumns,
    evaluating,
    forward_pass_hooks,
    forward_signature,
    hidden_states,
    hooked,
)
from sinklab.models.huggingface.interface import attention_computed_by
from sinklab.models.memory_budget import LOGITS_AT_ONCE, LOGITS_AT_ONCE_CUDA


@dataclass(frozen=True)
class GateLayout:
    """Layout of the gate logits among the outputs of a projection.

    Attributes:
        linear: projection whose output contains the gate logits.
        heads: number of query heads H.
        groups: number of groups of outputs; the last outputs of each group are gate logits.
        gates: number of gate logits per group.
    """

    linear: nn.Linear
    heads: int
    groups: int
    gates: int

    def read(self, output_BTC: Tensor) -> Tensor:
        """Compute the gates, shape (B, H, T, X), from the output of the projection (B, T, outputs).

        Gates are between 0 and 1. X is the number of gates per head: one, or one per channel.
        """
        logits_BTGX = output_BTC.unflatten(-1, (self.groups, -1))[..., -self.gates :]
        exact = logits_BTGX.flatten(-2).to(accumulate_dtype(output_BTC.dtype))
        return torch.sigmoid(exact.unflatten(-1, (self.heads, -1))).transpose(1, 2)


def find_gates(
    model: nn.Module, intercepted: Callable[[Compute], AbstractContextManager[None]], run: Callable[[], None]
) -> tuple[dict[int, GateLayout], list[str]]:
    """Find the gate layout of each attention layer in one forward pass.

    Gate logits may be outputs of g_proj, gate_proj, and q_proj if its output is wider than the input of o_proj.

    Args:
        intercepted: `HuggingFaceAdapter.intercepted`.
        run: function that runs the model on a few tokens.

    Returns:
        The gate layout by attention layer, 1-based, of the layers with a matching layout. A list with a note if no
        layout matches in any layer although a projection is named after a gate.
    """
    pairs = (
        (name, getattr(module, name, None), getattr(module, OUTPUT, None))
        for module in model.modules()
        for name in GATES
    )
    places = [
        (name, linear, output)
        for name, linear, output in pairs
        if isinstance(linear, nn.Linear) and isinstance(output, nn.Linear)
        if name != QUERIES or linear.out_features > output.in_features
    ]
    found: dict[int, GateLayout] = {}
    latest: tuple[LayerCall, Tensor] | None = None  # attention call and its output
    logits: dict[nn.Module, Tensor] = {}

    def attention(layer: LayerCall) -> Tensor:
        nonlocal latest
        latest = layer, layer.own_output()
        return latest[1]

    def projected(linear: nn.Module, _: Any, output_BTC: Tensor) -> None:
        logits[linear] = output_BTC

    def entering(linear: nn.Linear, _: Any, args: Any) -> None:
        """Store the layout whose gated output equals the input of an output projection, if there is one."""
        logits_BTC, x_BTC = logits.pop(linear, None), args[0]
        if latest is None or logits_BTC is None:
            return
        layer, out_BHTV = latest
        out_BHTV, x_BTC = out_BHTV.to(x_BTC.device, x_BTC.dtype), x_BTC.reshape(*logits_BTC.shape[:2], -1)
        if x_BTC.shape[-1] != out_BHTV.shape[1] * out_BHTV.shape[3]:
            return
        x_BHTV = x_BTC.unflatten(-1, (out_BHTV.shape[1], -1)).transpose(1, 2)
        best = torch.finfo(x_BTC.dtype).eps ** 0.5
        for layout in _layouts(linear, layer, logits_BTC.shape[-1]):
            error = float((x_BHTV - out_BHTV * layout.read(logits_BTC)).norm() / x_BHTV.norm())
            if error < best:
                best, found[layer.index] = error, layout

    if places:
        hooks = [linear.register_forward_hook(projected) for _, linear, _ in places]
        hooks += [output.register_forward_pre_hook(partial(entering, linear)) for _, linear, output in places]
        with evaluating(model), hooked(hooks), intercepted(attention):
            run()
    names = " and ".join(sorted({name for name, *_ in places} - {QUERIES}))
    if found or not names:
        return found, []
    note = f"no gates: the attention output is not multiplied by the sigmoid of {names}; other gates are not read"
    return found, [note]


def _layouts(linear: nn.Linear, layer: LayerCall, width: int) -> Iterator[GateLayout]:
    _, H, _, D = layer.call.q_BHTD.shape
    value_width = layer.value_BGSV.shape[-1]
    for gates in dict.fromkeys((value_width, 1)):
        if width == H * gates:
            yield GateLayout(linear, H, H, gates)
        if width == H * (D + gates):
            for groups in dict.fromkeys((H, layer.call.k_BGTD.shape[1])):
                yield GateLayout(linear, H, groups, gates * H // groups)


MASKLESS = ("flash", "flex", "paged")
"""Substrings of the names of attention implementations that accept no explicit mask."""


class HiddenKeys:
    """Hooks that hide the first n keys from later queries, and count the attention layers in which they do.

    Args:
        blocks: decoder blocks of the model.
        columns: function yielded by `HuggingFaceAdapter.first_columns`.

    Raises:
        SinklabError: if no layer has softmax attention; in a forward pass, if the attention implementation accepts no
            explicit mask, or the keys cannot be hidden in every attention layer.
    """

    def __init__(self, model: PreTrainedModel, blocks: Sequence[nn.Module], n: int, columns: FirstColumns) -> None:
        kinds = families.layer_kinds(model.config)
        self._model, self._n, self._columns = model, n, columns
        self._blocks, self._true_hides = blocks, family_of(model).true_hides
        self._hybrid = bool(kinds.linear) or len(kinds.attention) < kinds.total
        self._expected, self._reached, self._running = families.attention_layers(model.config), 0, False

    def register(self) -> Iterator[RemovableHandle]:
        """Register the hooks and yield their handles."""
        yield self._blocks[0].register_forward_pre_hook(self._beginning)
        yield from forward_pass_hooks({self._model, *families.bodies(self._model)}, self._entering, self._ending)
        for block in self._blocks:
            parts = [part for part in block.modules() if part is not block]
            takers = [part for part in parts if "attention_mask" in forward_signature(part).parameters]
            attention = [part for part in takers if hasattr(part, "is_causal")]
            inside = {inner for part in attention for inner in part.modules() if inner is not part}  # such as indexers
            takers = [part for part in takers if part not in inside]
            for part in takers:
                if not any(inner is not part and inner in takers for inner in part.modules()):
                    yield part.register_forward_pre_hook(self._attending, with_kwargs=True)

    def _entering(self, *_: Any) -> None:
        self._running = False

    def _beginning(self, _: nn.Module, __: tuple[Any, ...]) -> None:
        self._reached, self._running = 0, True

    def _ending(self, output: Any) -> None:
        if output is not None and self._running and self._reached != self._expected:
            raise SinklabError(
                f"the first keys were hidden in {self._reached} of {self._expected} attention layers of a "
                f"{self._model.config.model_type!r} model: it does not pass `attention_mask` to each of them once, as "
                "other Hugging Face models do"
            )

    def _attending(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        names = list(forward_signature(module).parameters)
        arguments = dict(zip(names, args, strict=False)) | kwargs
        states_BTC = next(value for value in arguments.values() if isinstance(value, Tensor))
        mask = arguments.get("attention_mask")
        if self._hybrid and not getattr(module, "is_causal", False):
            return None  # a recurrent layer
        if mask is not None and not isinstance(mask, Tensor):
            raise SinklabError(f"{type(module).__name__} uses a {type(mask).__name__} as mask: no key can be hidden")
        implementation = str(self._model.config._attn_implementation)  # sinklab's own while calls are intercepted
        if any(name in implementation for name in MASKLESS):
            raise SinklabError(
                f"the attention implementation {implementation!r} accepts no explicit mask, so no keys can be hidden: "
                'load the model with attn_implementation="sdpa"'
            )
        self._reached += 1
        place_T = torch.arange(states_BTC.shape[1], device=states_BTC.device)
        if mask is not None and mask.shape[-1] != len(place_T):
            raise SinklabError(
                f"{type(module).__name__} has a mask of {mask.shape[-1]} keys for {len(place_T)} tokens: no key can be "
                "hidden"
            )
        first_B1 = self._columns(states_BTC)[:, None]
        late_BT = place_T >= first_B1 + self._n
        hidden_B1TT = (late_BT[:, :, None] & ((place_T >= first_B1) & ~late_BT)[:, None, :])[:, None]
        if mask is None:
            mask = (place_T <= place_T[:, None]) & ~hidden_B1TT
        elif mask.dtype != torch.bool:
            mask = mask.masked_fill(hidden_B1TT, torch.finfo(mask.dtype).min)
        else:
            mask = mask | hidden_B1TT if self._true_hides else mask & ~hidden_B1TT
        place = names.index("attention_mask")
        if place < len(args):
            return (*args[:place], mask, *args[place + 1 :]), kwargs
        return args, kwargs | {"attention_mask": mask}


LOGITS_IN_CACHE = 2**20  # logits per chunk of log-probabilities: 4 MB in float32


def forward_loss(
    model: PreTrainedModel,
    tokens_BT: Tensor,
    real_BT: Tensor,
    *,
    arguments: dict[str, Any],
    paused: AbstractContextManager[None],
) -> tuple[float, int]:
    """Run one forward pass; return the cross-entropy summed over targets, in nats, and the number of targets.

    Args:
        tokens_BT: token ids (B, T).
        real_BT: bool, True at real tokens; a target counts if it and the token before it are real.
        arguments: keyword arguments passed to the model in addition to the tokens.
        paused: context manager that is entered while only the LM head runs, if the logits are computed in chunks.
    """
    both_BT = real_BT & F.pad(real_BT[:, 1:], (0, 1))  # the position and its target are real
    wanted_BT = F.pad(tokens_BT[:, 1:], (0, 1)).masked_fill(~both_BT, IGNORED)
    number = int((wanted_BT != IGNORED).sum())
    at_once = LOGITS_AT_ONCE_CUDA if tokens_BT.is_cuda else LOGITS_AT_ONCE
    pieces = math.ceil(vocabulary_size(model) * tokens_BT.numel() / at_once)
    if pieces == 1 or not has_piecewise_logits(model):
        return cross_entropy_sum(model(tokens_BT, **arguments).logits, wanted_BT), number
    total = 0.0
    with ExitStack() as stack:
        parts = [stack.enter_context(fixed_output(part)) for part in bodies(model)]
        model(tokens_BT, **arguments, logits_to_keep=1)
        for part in parts:
            part.frozen = True
        stack.enter_context(paused)
        few = math.ceil(tokens_BT.shape[1] / pieces)
        for start in range(0, tokens_BT.shape[1] - 1, few):
            stop = min(start + few, tokens_BT.shape[1] - 1)
            keep = torch.arange(start, stop, device=tokens_BT.device)
            total += cross_entropy_sum(
                model(tokens_BT, **arguments, logits_to_keep=keep).logits, wanted_BT[:, start:stop]
            )
    return total, number


def cross_entropy_sum(logits_BTV: Tensor, wanted_BT: Tensor) -> float:
    """Return the cross-entropy in nats, summed over all targets `wanted_BT` that are not IGNORED.

    It is computed in float32 (float64 for float64 logits) and in chunks of positions. This avoids a float32 copy of all
    logits, and on a CPU a chunk fits into the cache.
    """
    logits_NV, wanted_N = logits_BTV.flatten(0, 1), wanted_BT.to(logits_BTV.device).flatten()
    rows = max(1, (LOGITS_AT_ONCE_CUDA if logits_NV.is_cuda else LOGITS_IN_CACHE) // logits_NV.shape[1])
    total = 0.0
    for some_NV, wanted_n in zip(logits_NV.split(rows), wanted_N.split(rows), strict=True):
        exact_NV = some_NV.to(accumulate_dtype(some_NV.dtype))
        total += float(F.cross_entropy(exact_NV, wanted_n, ignore_index=IGNORED, reduction="sum"))
    return total


def has_piecewise_logits(model: PreTrainedModel) -> bool:
    """Return True if the model has a separate body and can compute the logits of selected positions."""
    return "logits_to_keep" in forward_signature(model).parameters and model.base_model is not model


class _Body:
    """Replacement for a module's `forward`; while it is `frozen`, it returns the latest output without running."""

    def __init__(self, forward: Any, output: Any) -> None:
        self.frozen = output is not None
        self._forward, self._output = forward, output

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not self.frozen:
            self._output = self._forward(*args, **kwargs)
        return self._output


@contextmanager
def fixed_output(part: nn.Module, output: Any = None) -> Iterator[_Body]:
    """Make a module return `output` without running, in the `with` block.

    If `output` is None, the module runs until the yielded object is `frozen`, and then returns its latest output.
    """
    body = _Body(part.forward, output)
    with patch.object(part, "forward", body):
        yield body


NORM = "norm"  # substring of a norm's class name in lower case


def attention_modules(model: PreTrainedModel, tokens_1T: Tensor) -> list[nn.Module]:
    """Return the attention modules in call order, and check that gradients can be computed at their inputs.

    Args:
        tokens_1T: token ids on which the model is run once.

    Raises:
        InputError: if weights are quantised (dequantised GGUF weights are allowed) or offloaded, or the input of an
            attention module is not the output of a norm (in OLMo 2, the input is the residual stream), or a module is
            used several times in a forward pass.
        SinklabError: if an attention call cannot be interpreted (`read_call`).
    """
    if method := weights_quantised(model):
        raise InputError(
            f"the weights are quantised ({method}) and do not support gradients: load the model without quantisation"
        )
    if any(parameter.is_meta for parameter in model.parameters()):
        raise InputError("some weights are offloaded and do not support gradients: load the whole model into memory")
    inputs: dict[nn.Module, Tensor | None] = {}
    norms: list[Tensor] = []
    found: list[nn.Module] = []

    def entering(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        inputs[module] = args[0] if args else kwargs.get(HIDDEN)

    def normed(module: nn.Module, _: Any, output: Any) -> None:
        if NORM in type(module).__name__.lower():
            norms.append(hidden_states(output))

    def attention(module: nn.Module, layer: LayerCall) -> Tensor:
        found.append(module)
        return layer.own_output()

    handles = (
        handle
        for module in model.modules()
        for handle in (
            module.register_forward_pre_hook(entering, with_kwargs=True),
            module.register_forward_hook(normed),
        )
    )
    with evaluating(model), hooked(handles), attention_computed_by(model, attention):
        model(tokens_1T, use_cache=False)
    if len(set(found)) < len(found):
        raise InputError(
            f"a {model.config.model_type!r} model uses layers several times in a forward pass: leave out the gradients"
        )
    for number, module in enumerate(found, 1):
        if not any(inputs.get(module) is output for output in norms):
            raise InputError(
                "gradients are defined at the output of the norm before attention, and the input of attention layer "
                f"{number} of this {model.config.model_type!r} model is not a norm's output: leave out the gradients"
            )
    return found
