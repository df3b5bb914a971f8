"""A measurement that the accumulator computes from random numbers."""

import torch

from sinklab.measuring.accumulate import Accumulator, Cost, measurement_from
from sinklab.measuring.measurement import Measurement
from sinklab.measuring.options import Options
from sinklab.measuring.records import Batch

L, H, T, N = 2, 3, 16, 4


def made_measurement(bias: bool = False, name: str = "a model", length: int = T) -> Measurement:
    generator = torch.Generator().manual_seed(0)
    totals = Accumulator((0.3,), length)
    alpha = torch.rand(L, N, H, length, generator=generator)
    norms = torch.rand(L + 1, N, length, generator=generator) + 1
    recorded = {"importance_BHT": alpha, "key_norm_BT": norms[1:], "value_norm_BT": norms[1:], "hidden_BT": norms}
    recorded |= {"bias_BH": alpha[..., 0]} if bias else {}
    biased = (True,) * len(recorded["importance_BHT"])
    totals.add(
        Batch(recorded, torch.ones(N, length, dtype=torch.bool), torch.tensor(12.0), N * (length - 1), biased=biased)
    )
    return measurement_from(
        totals, Cost(0.5, 100.0), Options(model_name=name, bos=True), proxy=False, backend="sdpa", dtype="float32"
    )
