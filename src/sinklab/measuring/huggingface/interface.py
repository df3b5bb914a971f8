"""Watching any Hugging Face causal language model that dispatches its attention through `AttentionInterface`.

While a probe is on, the model's configs name an attention function of our own. It computes the output and the column
sums of the attention matrix from the same scores (one_pass.py). Where gradients are wanted, on CUDA, and under another
probe it passes the call on to PyTorch's fused attention (or computes it with our primitive where that cannot: softcap,
sink logits) and takes the sums beside it. The same name is registered for masks with `sdpa_mask`: without that,
transformers silently drops padding and sliding windows. Rejected: `output_attentions` (forces eager, keeps every
T x T matrix); patching modules by class name (one patch per architecture).

A model that ignores the interface is not measured as zero: the recorded calls are counted, and where there were none
the probe reads the attention matrices that the model itself gives (eager.py).
"""

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.masking_utils import sdpa_mask

from sinklab.errors import SinklabError
from sinklab.measuring.huggingface.recorder import Recorder
from sinklab.measuring.huggingface.totals import LayerTotals
from sinklab.measuring.records import LayerRecord
from sinklab.measuring.statistics.block import Angles
from sinklab.measuring.statistics.watch import DetailsWatch
from sinklab.models.hooks import hooked
from sinklab.models.huggingface.anatomy import attention_implementation
from sinklab.models.huggingface.call import read_call

_PREFIX = "sinklab-"
_numbers = itertools.count()


class UnrecordedError(SinklabError):
    """The attention of some layer did not pass through the interface."""


class InterfaceProbe(Recorder):
    """What was recorded of the sequences that the model has read, while it decodes from a cache as well."""

    def __init__(
        self, model: PreTrainedModel, lengths: Sequence[int] = (), details: DetailsWatch | None = None
    ) -> None:
        super().__init__(model, lengths, details)
        self._totals: list[LayerTotals] = []
        self._calls = 0
        self._running = self._cached = False
        self._mask_BT: Tensor | None = None
        self._pass_on = "sdpa"

    def _latest(self) -> list[LayerRecord]:
        return [] if self._real is None else [totals.record(self._real) for totals in self._totals]

    def _forget_latest(self) -> None:
        self._totals = []

    def attention(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        scaling: float | None = None,
        **extras: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """The attention function that transformers calls."""
        if not self._running:
            raise SinklabError("a probed model was not called itself, only a part of it: call model(...)")
        call = read_call(module, query, key, value, attention_mask, scaling, extras)
        T = query.shape[2]
        if not self._calls:
            self._seen += T
            mask_BT = self._mask_BT
            self._real = self._real_tokens(query.new_ones(len(query), self._seen) if mask_BT is None else mask_BT)
        assert self._real is not None
        if key.shape[2] > self._seen and not self._cached:
            raise SinklabError(
                f"attention layer {self._calls + 1} of this {self._model.config.model_type!r} model has {key.shape[2]} "
                f"keys for {self._seen} tokens: it appends keys that each stand for several tokens (compressed "
                "attention, as in DeepSeek-V4), so how much single tokens are attended to cannot be measured"
            )
        counted_BT = self._real.mask_BT[:, -T:].to(query.device) if self._real.padded else None
        if self._calls == len(self._totals):
            self._totals.append(LayerTotals(self._lengths))
        passing_on = self._pass_on.startswith(_PREFIX) or torch.is_grad_enabled() or query.is_cuda
        if passing_on and not self._lengths:
            out, sums = None, call.column_sums(counted_BT)
        else:
            out, sums, prefixes_BHES = call.one_pass(counted_BT, self._lengths)
            if self._lengths:
                self._totals[self._calls].add_prefixes(prefixes_BHES)
        self._totals[self._calls].add(sums, call.visible_queries(counted_BT), key.detach(), value.detach(), T)
        if self._details is not None:
            self._details.values(value)
            self._details.attention(call.rows(), query.shape[1], Angles(query, key, call.mask))
        self._calls += 1
        if out is not None:
            self.backends.add("one pass")
            return out, None
        if self._pass_on.startswith(_PREFIX) or call.plain:
            self.backends.add("sdpa")
            passed_on = AttentionInterface._global_mapping[self._pass_on]
            return passed_on(module, query, key, value, attention_mask, scaling=scaling, **extras)
        self.backends.add("chunked")
        return call.output(), None

    def _entering(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._paused:
            return
        given = self._signature.bind_partial(*args, **kwargs).arguments
        self._entering_sequences(given)
        self._calls, self._running, self._cached = 0, True, given.get("past_key_values") is not None
        self._mask_BT = given.get("attention_mask")

    def _leaving(self, _: nn.Module, __: tuple[Any, ...], ___: Any) -> None:
        if self._paused:
            return
        self._running = False
        if self._calls != self._expected:
            raise self._unrecorded()
        self._whole = True

    def _unrecorded(self) -> UnrecordedError:
        return UnrecordedError(
            f"the attention of {self._calls} of {self._expected} layers could be recorded: the model type "
            f"{self._model.config.model_type!r} does not pass all of its attention through transformers' attention "
            "interface, so sinks in it cannot be measured. Measure a model of another type, or try a newer version "
            "of transformers."
        )


@contextmanager
def interface_probe(
    model: PreTrainedModel, lengths: Sequence[int] = (), details: DetailsWatch | None = None
) -> Iterator[InterfaceProbe]:
    """`probe` for a model that passes its attention through the interface.

    Raises:
        UnrecordedError: in a forward pass, where some layer's attention did not.
    """
    watch = InterfaceProbe(model, lengths, details)
    current = str(model.config._attn_implementation)
    watch._pass_on = current if current.startswith(_PREFIX) else "sdpa"
    watching = (
        model.register_forward_pre_hook(watch._entering, with_kwargs=True),
        model.register_forward_hook(watch._leaving),
    )
    try:
        with hooked(watching), attention_function(model, watch.attention):
            yield watch
    except (AttributeError, KeyError, TypeError) as error:
        if watch._running and not watch._calls:  # a model that ignores the interface and trips over its masks (MPT)
            raise watch._unrecorded() from error
        raise


@contextmanager
def attention_function(model: PreTrainedModel, function: Callable[..., tuple[Tensor, Tensor | None]]) -> Iterator[None]:
    """All attention that the model passes through the interface is computed by `function`, with boolean masks."""
    name = f"{_PREFIX}{next(_numbers)}"
    AttentionInterface.register(name, function)
    AttentionMaskInterface.register(name, sdpa_mask)
    try:
        with attention_implementation(model, name):
            yield
    finally:
        AttentionInterface._global_mapping.pop(name, None)
        AttentionMaskInterface._global_mapping.pop(name, None)
