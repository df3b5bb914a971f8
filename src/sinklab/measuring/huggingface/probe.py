"""`sinklab.probe`: the right way of watching, whatever the model."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from transformers import PreTrainedModel

from sinklab.measuring.huggingface.cores import core_probe, cores_of
from sinklab.measuring.huggingface.eager import eager_probe
from sinklab.measuring.huggingface.generating import generating
from sinklab.measuring.huggingface.interface import UnrecordedError, interface_probe
from sinklab.measuring.huggingface.recorder import Recorder
from sinklab.measuring.input_checks import check_causal_lm
from sinklab.measuring.statistics.watch import DetailsWatch
from sinklab.models.hooks import evaluating
from sinklab.models.huggingface.anatomy import input_device
from sinklab.models.model_lock import probed_alone


@contextmanager
def probe(
    model: PreTrainedModel, lengths: Sequence[int] = (), details: DetailsWatch | None = None
) -> Iterator[Recorder]:
    """Record the attention of every forward pass of `model` inside the block.

    The sequences of several passes stand one after the other in the records, as if they had been one batch; passes
    that continue from a cache, or read a sequence once more with tokens added, go on with their sequences. Records
    are kept until `clear()`, one number per layer, head and token.

    The model, its configs and its hooks are left as they were found, also after an exception. Padding given as
    `attention_mask` of shape (sequences, positions) never counts.

    Inside `model.generate` what follows the end of a sequence is padding.

    Args:
        lengths: increasing; the records also hold the importance that the sequences cut at each would have. For
            forward passes of whole sequences of at least the last length, without padding and gradients.
        details: is shown every layer of forward passes of whole sequences as well.

    Raises:
        SinklabError: in a forward pass, where the attention of some layer could not be recorded; never a zero; or a
            cache that was cut, or whose sequences were exchanged. In `generate`, a way of generating that does so.
            Another thread has a probe on the model.
        InputError: no Hugging Face model; in a forward pass, where the attention mask is not a padding mask.
    """
    check_causal_lm(model)
    with probed_alone(model):
        watching = core_probe if cores_of(model) else interface_probe if dispatches(model) else eager_probe
        with watching(model, lengths, details) as watch, generating(model, watch):
            yield watch


def dispatches(model: PreTrainedModel) -> bool:
    """Whether the model passes its attention through the interface; tried on two tokens where it does not say."""
    if getattr(model, "_supports_attention_backend", False):
        return True
    tokens_BT = torch.zeros(1, 2, dtype=torch.long, device=input_device(model))
    try:
        with evaluating(model), interface_probe(model):
            model(tokens_BT, use_cache=False)
    except UnrecordedError:
        return False
    return True
