"""`sinklab.probe`: record the attention that each token receives in a model's forward passes.

Key and value norms are recorded too. Forward passes inside `model.generate` are included.
"""

import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast
from unittest.mock import patch

from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel
from transformers.generation.configuration_utils import GenerationMode

from sinklab.errors import SinklabError
from sinklab.measuring.pretrained_records import READ_AFTERWARDS, Recorder, call_records, matrix_records
from sinklab.measuring.statistics.collecting import DetailsCollector
from sinklab.model.transformer import Transformer
from sinklab.models.adapter import Adapter, NativeAdapter, adapt, check_causal_lm, unwrapped
from sinklab.models.families import family_of
from sinklab.models.hooks import probed_alone, uncompiled

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
    passes are concatenated as in one batch. A pass that continues from a KV cache, or repeats the sequences of the last
    pass with tokens appended, extends their records. A model that bypasses transformers' attention interface
    (`MatrixRecords`) supports no KV cache: call `generate` with `use_cache=False`.

    Forward passes remain the same bit for bit, in training too: the model's own attention functions are called. The
    attention weights are computed from their queries, keys and mask, and their outputs are compared with those of
    softmax attention. Only a model that bypasses the interface computes eager attention instead of its own.

    The model, its configs and its hooks are restored afterwards, also after an exception. Padding, which is passed as
    an `attention_mask` of shape (sequences, positions), is excluded. So are the tokens that `model.generate` appends
    after the end of a sequence.

    Args:
        model: Hugging Face causal language model, or an exported sinklab model. A compiled model runs uncompiled in the
            `with` block.

    Raises:
        SinklabError: if another thread probes the model. In a forward pass, if an attention function does not compute
            softmax attention (then use `watch_attention`), the attention of some layer cannot be recorded, only a
            submodule was called, or the KV cache was started before the probe, was cropped or reordered, or is not
            supported (static; `MatrixRecords`). In `generate`, if the generation mode is not supported.
        InputError: if the model is not a Hugging Face model or its weights are on the meta device. In a forward pass,
            if the attention mask is not a padding mask.
    """
    given, model = model, unwrapped(model)
    check_causal_lm(model)
    adapter = NativeAdapter(cast("Transformer", model.transformer)) if family_of(model).exported else adapt(model)
    recording = adapter_records(model, adapter, (), None, unchanged=True)
    with uncompiled(given), recording as watch, generating(model, watch):
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
