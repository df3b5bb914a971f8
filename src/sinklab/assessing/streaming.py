"""Streaming: long text through a rolling cache, with and without the first tokens (2309.17453, table 3)."""

import math
from collections.abc import Sequence

from torch import Tensor

from sinklab.assessing.caches import RollingCache
from sinklab.assessing.documents import CachedReading, Placed, Streaming
from sinklab.assessing.layers import Patient
from sinklab.assessing.reading import PairedReader, Step


def assess_streaming(
    patient: Patient, tokens_NT: Tensor, sizes: Sequence[int], kept: Sequence[int], positions: Placed, step: Step
) -> Streaming:
    """Perplexity of the text for every size of the cache and every number of first tokens kept.

    Raises:
        InputError: a cache that holds no more keys than it keeps.
    """
    reader = PairedReader(patient, tokens_NT, step)
    caches = []
    for size in sizes:
        for first in kept:
            if first >= size:
                continue
            effect = reader.under(RollingCache(size, first, in_cache=positions == "cache")).effect()
            perplexity = math.exp(effect.loss) if effect.loss < 700 else None
            caches.append(CachedReading(cache=size, first=first, perplexity=perplexity, **effect.model_dump()))
    return Streaming(
        sequences=len(tokens_NT),
        length=tokens_NT.shape[1],
        unchanged=reader.unchanged.effect(),
        positions=positions,
        caches=caches,
    )
