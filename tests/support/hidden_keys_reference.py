"""A reference that hides the first keys in the scores, independent of masks, hooks and the attention interface."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch


@contextmanager
def scores_without_first_keys(n: int, length: int) -> Iterator[None]:
    """Every softmax over the scores of `length` queries loses keys 1..n for the queries after the n-th."""
    softmax = torch.nn.functional.softmax

    def without(scores: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if scores.ndim == 4 and scores.shape[2] == length and scores.shape[3] in (length, length + 1):  # + sink logit
            scores = scores.clone()
            scores[:, :, n:, :n] = -torch.inf
        return softmax(scores, *args, **kwargs)

    with mock.patch("torch.nn.functional.softmax", without):
        yield
