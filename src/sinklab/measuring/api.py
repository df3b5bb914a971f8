"""`sinklab.measure(model, tokens)`: one function for a model in memory, ours or Hugging Face's."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, cast

import numpy as np
from torch import Tensor

from sinklab.attention.real_tokens import real_tokens
from sinklab.errors import InputError
from sinklab.measuring.driver import check_shape
from sinklab.measuring.driver import measure as measure_tokens
from sinklab.measuring.inputs import token_matrix
from sinklab.measuring.measurement import Measurement
from sinklab.measuring.options import Inputs, Options, Study, thresholds
from sinklab.measuring.surgery.study import measure_with_study
from sinklab.model.transformer import Transformer
from sinklab.models.adapter import adapt
from sinklab.models.hooks import Progress
from sinklab.models.model_lock import measured_in_turn
from sinklab.models.native import NativeAdapter

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def measure(
    model: "PreTrainedModel | Transformer",
    tokens: Tensor | np.ndarray | Sequence[Sequence[int]],
    *,
    attention_mask: Tensor | np.ndarray | Sequence[Sequence[int]] | None = None,
    eps: float | Sequence[float] = 0.3,
    lengths: Sequence[int] = (),
    batch_size: int | None = None,
    loss: bool = True,
    details: bool = False,
    maps: Sequence[tuple[int, int]] = (),
    explore: bool = False,
    gradients: bool = False,
    ablate: Sequence[str] = (),
    perturb: int | None = None,
    model_name: str = "",
    inputs: Inputs = "natural",
    bos: bool | None = None,
    progress: Progress | None = None,
) -> Measurement:
    """Sinks, norms and loss of a causal language model on the given tokens; the model is left as it was found.

    Args:
        model: a Hugging Face causal language model, or a sinklab transformer, also an exported one.
        tokens: ids (sequences, length): a tensor on any device, an array, or rows of numbers.
        attention_mask: 1 at real tokens, 0 at padding on the left or right; Hugging Face models only.
        eps: threshold of the sink rate, a share of attention in (0, 1); of several, the first is the headline.
        lengths: increasing: the sink rate of the sequences cut at each as well; without padding.
        batch_size: sequences per forward pass; changes memory and speed, not the result. By default as many as fit the
            memory, at most 16; halved where they do not fit.
        loss: False leaves it out, and with it the logits: a third of the work of a small model with many words.
        details: also angles, entropy, distances, secondary sinks and kurtosis (details.py); costs more.
        maps: (layer, head), 1-based: keep the matrices of attention, cosine and norm product; implies details.
        explore: also keep the attention map of every head on the first 128 tokens of the first sequence, in 8 bits
            (explored.py): one more forward pass, and a byte per head, query and key; at most 1,000 heads.
        gradients: also the norm of the gradient of the loss at what attention reads, by layer and position, and R_GS
            (gradients.py): a forward and a backward pass more; without padding.
        ablate: ablations to measure as well: "mask_first:N", "no_bos", "zero_massive" (ablations.py); without padding.
        perturb: also replace the token at this position, 1-based, and follow the change (mixing.py); without padding.
        model_name: recorded with the result.
        inputs: the kind of tokens, recorded with the result.
        bos: whether position 1 is a special token. By default it is where every sequence begins with the
            `bos_token_id` of the model's config; a sinklab transformer has none, so it is False there.
        progress: called with (sequences done, sequences in all) after every batch.

    Raises:
        InputError: no model, no tokens, tokens that are not ids or outside the vocabulary, a mask that is not a
            padding mask, a threshold outside (0, 1), a value of `inputs` or `ablate` that does not exist.
        SinklabError: attention that could not be recorded, or NaN in the activations (the layer is named).
    """
    adapter = adapt(model)
    tokens_NT = token_matrix(tokens)
    check_shape(tokens_NT)
    mask_NT = None if attention_mask is None else token_matrix(attention_mask, "the entries of attention_mask")
    options = Options(
        eps=thresholds(eps),
        lengths=tuple(lengths),
        batch_size=batch_size,
        loss=loss,
        details=details,
        maps=tuple(maps),
        explore=explore,
        gradients=gradients,
        model_name=model_name,
        inputs=inputs,
        bos=_begins_with_bos(model, tokens_NT, mask_NT) if bos is None else bos,
    )
    study = Study(ablate=cast(tuple[str, ...], ablate), perturb=perturb)
    if mask_NT is not None:
        if isinstance(adapter, NativeAdapter):
            raise InputError("a sinklab transformer reads whole sequences: leave out attention_mask")
        if study.ablate or study.perturb is not None:
            raise InputError(
                "ablations and perturbations need sequences without padding: leave out the padded ones, or `ablate` "
                "and `perturb`"
            )
    with measured_in_turn(model):
        if mask_NT is not None:
            return measure_tokens(adapter, tokens_NT, options, attention_mask_NT=mask_NT, progress=progress)
        return measure_with_study(adapter, tokens_NT, options, study, bos_tokens=int(options.bos), progress=progress)


def _begins_with_bos(
    model: "PreTrainedModel | Transformer", tokens_NT: Tensor, attention_mask_NT: Tensor | None
) -> bool:
    """Whether the first real token of every sequence is the BOS that the model's config names."""
    if isinstance(model, Transformer):
        return False
    bos_id = getattr(model.config.get_text_config(decoder=True), "bos_token_id", None)
    if bos_id is None:
        return False
    first_N1 = tokens_NT[:, :1]
    if attention_mask_NT is not None and attention_mask_NT.shape == tokens_NT.shape:
        first_N1 = tokens_NT.gather(1, real_tokens(attention_mask_NT).index_BR[:, :1].to(tokens_NT.device))
    return bool((first_N1 == bos_id).all())
