"""Real tokens of padded batches (B, T). Position 1 is the first token of each sequence that is not padding."""

from dataclasses import dataclass

import torch
from torch import Tensor

from sinklab.errors import InputError


@dataclass(frozen=True)
class RealTokens:
    """Positions of the real tokens of a batch.

    Attributes:
        mask_BT: bool, True at real tokens; they are contiguous in every row.
        count_B: number of real tokens of each row.
        index_BR: column of the r-th real token (from 0) of each row, r < R = max(count_B); arbitrary where `valid_BR`
            is False.
        valid_BR: bool, False past the last real token of a row.
        padded: True if any position is padding.
    """

    mask_BT: Tensor
    count_B: Tensor
    index_BR: Tensor
    valid_BR: Tensor
    padded: bool

    def to(self, device: torch.device) -> "RealTokens":
        """Return a copy with all tensors on `device`, without synchronising it; self if they are already on it."""
        if self.mask_BT.device == device:
            return self
        return _aligned(self.mask_BT.to(device, non_blocking=True), self.index_BR.shape[1], self.padded)

    def from_position(self, position: int) -> Tensor:
        """Return a boolean mask (B, T) of the real tokens from the `position`-th of each row (1-based) on."""
        return self.mask_BT & (self.mask_BT.cumsum(1) >= position)

    def align(self, x: Tensor) -> Tensor:
        """Shift x (B, ..., T) to (B, ..., R), with each row's first real token at index 0 and zeros past its last."""
        shape = (x.shape[0],) + (1,) * (x.ndim - 2) + (-1,)
        index, valid = (part.to(x.device).view(shape) for part in (self.index_BR, self.valid_BR))
        return torch.where(valid, x.gather(-1, index.expand(*x.shape[:-1], -1)), 0)


def real_tokens(mask_BT: Tensor) -> RealTokens:
    """Build `RealTokens` from a padding mask (non-zero = real token) with padding on the left, the right or both.

    Raises:
        InputError: if the mask does not have the shape (sequences, positions), or if a row has no real token or has
            padding between its tokens.
    """
    if mask_BT.ndim != 2:
        raise InputError(
            f"attention mask of shape {tuple(mask_BT.shape)}: expected (sequences, positions), 0 at padding"
        )
    mask_BT = mask_BT != 0
    count_B, first_B = mask_BT.sum(1), mask_BT.int().argmax(1)
    if not bool(count_B.all()):
        row = int((count_B == 0).nonzero()[0])
        raise InputError(f"sequence {row} (from 0) of the batch is all padding: remove it or check the attention mask")
    columns_T = torch.arange(mask_BT.shape[1], device=mask_BT.device)
    block_BT = (columns_T >= first_B[:, None]) & (columns_T < (first_B + count_B)[:, None])
    if not torch.equal(block_BT, mask_BT):
        row = int((block_BT != mask_BT).any(1).nonzero()[0])
        raise InputError(
            f"sequence {row} (from 0) of the batch has padding between its tokens: pad on the left or the right"
        )
    return _aligned(mask_BT, int(count_B.max()), not bool(mask_BT.all()))


def _aligned(mask_BT: Tensor, longest: int, padded: bool) -> RealTokens:
    count_B, first_B = mask_BT.sum(1), mask_BT.int().argmax(1)
    steps_R = torch.arange(longest, device=mask_BT.device)
    index_BR = (first_B[:, None] + steps_R).clamp(max=mask_BT.shape[1] - 1)
    return RealTokens(mask_BT, count_B, index_BR, steps_R < count_B[:, None], padded)
