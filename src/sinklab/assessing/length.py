"""Length: loss by position, beyond the context that the model was trained with."""

from torch import Tensor

from sinklab.assessing.documents import Bucket, Length
from sinklab.assessing.layers import Patient, as_it_is
from sinklab.assessing.reading import Step, Text

EDGES = (1 / 8, 1 / 4, 1 / 2, 3 / 4, 1, 9 / 8, 5 / 4, 3 / 2, 7 / 4, 2, 3, 4)
"""Of the buckets, in contexts."""


def assess_length(patient: Patient, tokens_NT: Tensor, step: Step) -> Length:
    """Loss of the text read at once, and of the same targets read within the context, by position."""
    N, T = tokens_NT.shape
    text = Text(patient, tokens_NT, step)
    whole, within = text.under(as_it_is), text.unchanged
    inner = {int(edge * patient.context) + 1 for edge in EDGES}
    edges = [whole.first, *sorted(edge for edge in inner if whole.first < edge <= T), T + 1]
    buckets = [
        Bucket(start=start, stop=stop, whole=whole.effect(start, stop), within=within.effect(start, stop))
        for start, stop in zip(edges, edges[1:], strict=False)
    ]
    return Length(sequences=N, length=T, unchanged=within.effect(), context=patient.context, buckets=buckets)
