"""Checks of the tokens that a caller from Python hands over."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sinklab.errors import InputError
from sinklab.models.adapter import type_text


def token_matrix(tokens: Any, name: str = "tokens") -> Tensor:
    """Whole numbers in rows, as int64 on the device where they are.

    Args:
        tokens: a tensor, an array, or rows of numbers.

    Raises:
        InputError: rows of different lengths, or no whole numbers.
    """
    tensor = tokens if isinstance(tokens, Tensor) else _from_rows(tokens, name)
    if tensor.numel() and (tensor.is_floating_point() or tensor.is_complex()):
        kind = str(tensor.dtype).removeprefix("torch.")
        raise InputError(f"{name} are {kind} numbers; expected whole numbers, as a tokenizer gives them")
    return tensor.long()


def _from_rows(rows: Any, name: str) -> Tensor:
    if isinstance(rows, np.ndarray):
        if rows.dtype.kind not in "iub":
            raise InputError(f"{name} are an array of {rows.dtype}; expected whole numbers")
        return torch.from_numpy(rows.astype(np.int64))
    if isinstance(rows, str | bytes | dict) or not isinstance(rows, Sequence):
        raise InputError(f"{name} are {type_text(rows)}; expected rows of token ids, (sequences, length)")
    if not all(isinstance(row, Sequence | np.ndarray | Tensor) and not isinstance(row, str | bytes) for row in rows):
        raise InputError(f"{name} have no rows; expected a list of sequences, such as [[1, 2, 3]]")
    lengths = {len(row) for row in rows}
    if len(lengths) > 1:
        raise InputError(
            f"the sequences have {min(lengths)} to {max(lengths)} tokens: cut them to one length, or pad them and give "
            "attention_mask"
        )
    try:
        return torch.tensor([list(row) for row in rows] or [[]])
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise InputError(f"{name} are no matrix of whole numbers: {error}") from error
