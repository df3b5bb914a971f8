"""Comparisons with a tolerance relative to the largest value, so that they hold on any processor.

The last digits differ between processors, numbers of threads and versions of PyTorch: sums are taken in another order.
Rounding errors are relative to the largest terms, not to each result: a logit of 20 has no digits beyond 2e-6.
"""

import torch
from numpy.typing import ArrayLike
from torch import Tensor

from sinklab.measuring.measurement import Measurement


def assert_close(
    found: Tensor | ArrayLike | None, expected: Tensor | ArrayLike, tolerance: float = 1e-5, what: str = "it"
) -> None:
    """Equal within `tolerance` times the largest expected entry; a number is expected everywhere, NaN equals NaN."""
    assert found is not None, f"{what} is missing"
    ours, theirs = (torch.as_tensor(x).detach().double() for x in (found, expected))
    theirs = theirs.expand_as(ours) if theirs.ndim == 0 else theirs
    largest = theirs.nan_to_num().abs().max().item() if theirs.numel() else 0.0
    torch.testing.assert_close(
        ours,
        theirs,
        rtol=0,
        atol=tolerance * largest,
        equal_nan=True,
        msg=lambda said: f"{what}, whose largest entry is {largest:g}: {said}",
    )


def assert_same_rates(measured: Measurement, expected: list[float], eps: str | None = None) -> None:
    """The sink rates, in percent, agree except for one alpha that rounding may put on the other side of eps.

    Args:
        eps: one of `measured.sink_rates`; the first unless given.
    """
    found = measured.sink_rate if eps is None else (measured.sink_rates or {})[eps]
    counted = measured.sequences * measured.layers * measured.heads
    moved = sum(abs(a - b) for a, b in zip(found, expected, strict=True)) * counted / 100
    assert moved < 1.5, f"{moved:g} of the alphas are on the other side of eps: {found} and {expected}"
