"""Bits per byte: the loss over the bytes of the text, which is comparable between tokenizers.

    bits per byte = (sum over predicted tokens of -log2 p) / (sum over predicted tokens of their bytes of UTF-8)

A token that is not predicted counts in neither sum: BOS, which is no text, and without BOS the first token of every
sequence. A character that a sequence is cut in counts with the bytes that its tokens have.
"""

import math

from torch import Tensor

from sinklab.measuring.measurement import Measurement


def with_bits_per_byte(measurement: Measurement, sizes_NT: Tensor | None, first_target: int) -> Measurement:
    """The measurement with `bits_per_byte`, or with a note on why there is none.

    Args:
        sizes_NT: bytes that each token of the sequences stands for, 0 for BOS, negative where it does not spell the
            text; None where the tokens are of no text.
        first_target: position of the first token that was predicted, 1-based.
    """
    if sizes_NT is None or measurement.loss is None:
        return measurement
    predicted_NT = sizes_NT[:, first_target - 1 :]
    unknown = int((predicted_NT < 0).any(1).sum())
    if unknown:
        why = f"in {unknown} of {len(sizes_NT)} sequences the tokens do not spell the text"
        note = f"no bits per byte: {why}: the tokenizer changes or leaves out characters, or the recipe replaces tokens"
        return measurement.model_copy(update={"notes": [*measurement.notes, note]})
    size = int(predicted_NT.sum())
    bits = measurement.loss * predicted_NT.numel() / math.log(2)
    return measurement.model_copy(update={"bits_per_byte": bits / size if size else None})
