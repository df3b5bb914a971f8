"""Length: loss by position, beyond the context that the model was trained with."""

from itertools import pairwise

from torch import Tensor

from sinklab.assessing.documents import Bucket, LossByLength
from sinklab.assessing.layers import Patient, as_it_is
from sinklab.assessing.reading import PairedReader, Step

EDGES = (1 / 8, 1 / 4, 1 / 2, 3 / 4, 1, 9 / 8, 5 / 4, 3 / 2, 7 / 4, 2, 3, 4)
"""Of the buckets, in contexts."""


def assess_length(patient: Patient, tokens_NT: Tensor, step: Step) -> LossByLength:
    """Loss of the text read at once, and of the same targets read within the context, by position."""
    N, T = tokens_NT.shape
    reader = PairedReader(patient, tokens_NT, step)
    whole, within = reader.under(as_it_is), reader.unchanged
    inner = {int(edge * patient.context) + 1 for edge in EDGES}
    edges = [whole.first, *sorted(edge for edge in inner if whole.first < edge <= T), T + 1]
    buckets = [
        Bucket(start=start, stop=stop, whole=whole.effect(start, stop), within=within.effect(start, stop))
        for start, stop in pairwise(edges)
    ]
    return LossByLength(sequences=N, length=T, unchanged=within.effect(), context=patient.context, buckets=buckets)
