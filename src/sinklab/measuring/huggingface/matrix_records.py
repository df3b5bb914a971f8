"""Records of models that bypass transformers' attention interface (Falcon, Bloom, MPT, GPT-Neo).

These models return their attention matrices with `output_attentions`. Hooks sum the columns of each matrix and replace
it by an empty tensor, so that only one matrix is in memory at a time. Keys and values are taken from the returned KV
cache. Recording takes O(T^2) memory and the time of eager attention; the reported backend is "eager".
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from sinklab.attention.importance import Rows, importance_from_sums, unpadded_importance
from sinklab.attention.masks import CAUSAL, RealTokens, Window, visible_queries
from sinklab.attention.query_blocks import Block, accumulate_dtype
from sinklab.errors import SinklabError
from sinklab.measuring.huggingface.recorder import Recorder
from sinklab.measuring.records import LayerRecord, seen_over
from sinklab.measuring.statistics.collecting import DetailsCollector
from sinklab.models.families import attention_implementation, attention_layers, decoder_blocks, family_of
from sinklab.models.hooks import hooked, token_norms
from sinklab.models.huggingface.forward_call import CACHE, cache_field, named_arguments


class MatrixRecords(Recorder):
    """Recorder that computes importance from the attention matrices that the model returns; supports no KV cache."""

    def __init__(self, model: PreTrainedModel, lengths: Sequence[int], details: DetailsCollector | None) -> None:
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
    model: PreTrainedModel, lengths: Sequence[int], details: DetailsCollector | None
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
def eager_attention(model: PreTrainedModel) -> Iterator[None]:
    """Set eager attention in the `with` block; ALiBi is added only once, also in models of `Family.alibi_twice`."""
    twice = _inside_blocks(model) if family_of(model).alibi_twice else []
    once = (module.register_forward_pre_hook(_alibi_once, with_kwargs=True) for module in twice)
    with hooked(once), attention_implementation(model, "eager"):
        yield


def _inside_blocks(model: PreTrainedModel) -> list[nn.Module]:
    return [module for block in decoder_blocks(model) for module in block.modules() if module is not block]


def _alibi_once(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Pre-hook that zeroes the `alibi` argument if the mask already contains ALiBi: such a mask differs by head."""
    alibi, mask = kwargs.get("alibi"), kwargs.get("attention_mask")
    if isinstance(alibi, Tensor) and isinstance(mask, Tensor) and mask.ndim == 4 and mask.shape[1] > 1:
        return args, kwargs | {"alibi": torch.zeros_like(alibi)}
    return None
