"""`sinklab.probe`: the right way of watching, whatever the model."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from transformers import PreTrainedModel

from sinklab.measuring.huggingface.call_records import call_records
from sinklab.measuring.huggingface.generating import generating
from sinklab.measuring.huggingface.matrix_records import matrix_records
from sinklab.measuring.huggingface.recorder import Recorder
from sinklab.measuring.statistics.watch import DetailsWatch
from sinklab.models.adapter import check_causal_lm
from sinklab.models.huggingface.adapter import HuggingFaceAdapter
from sinklab.models.model_lock import probed_alone
from sinklab.models.native import NativeAdapter


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
    native = getattr(model.config, "model_type", "") == "sinklab"  # also of the code that came with an exported model
    adapter = NativeAdapter(model.transformer) if native else HuggingFaceAdapter(model)
    with probed_alone(model):
        recording = call_records(model, adapter, lengths, details) if adapter.dispatches else None
        with recording or matrix_records(model, lengths, details) as watch, generating(model, watch):
            yield watch
