"""Next-token loss from the final hidden states, in chunks of logits, and auxiliary losses.

The LM head is two fifths of a 60M model's matrix FLOPs, and its logits are the largest tensor of a step: 3.3 GB in
float32 for 8 x 2048 tokens and a vocabulary of 50,432. More than `WHOLE` logits are computed in chunks of rows. Each
chunk's gradient is computed while its logits exist, so no matrix product is repeated, and only the gradients with
respect to the hidden states and the head are stored. Up to `WHOLE` logits are computed at once, which is faster; the
loss is then bitwise that of PyTorch.

Rejected alternatives: `F.linear_cross_entropy` of PyTorch 2.13 in chunks, because its loss has the dtype of the inputs
(9.125 for 9.33 nats in bfloat16), it ignores autocast, and it takes three times as long on a CPU; and
`torch.utils.checkpoint` around every chunk, because it repeats the head's forward product.

Auxiliary losses are added to the cross-entropy in training and reported separately.

N rows (positions), E hidden size, V vocabulary, B batch, L positions, including a sink token or registers.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor
from torch.autograd.function import once_differentiable

from sinklab.attention.query_blocks import accumulate_dtype
from sinklab.device import compiled
from sinklab.schema import Part

IGNORED = -100  # excluded target, `ignore_index` of `F.cross_entropy`
WHOLE = 2**22  # maximum number of logits computed at once: 16 MB in float32
CHUNK_ELEMENTS = 2**24  # logits per chunk on a CPU: 64 MB in float32
CHUNK_ELEMENTS_CUDA = 2**25  # minimum on CUDA: about 16 chunks at most, as each rewrites the head's gradient
ROWS_MULTIPLE = 128  # chunks of more rows are rounded down to a multiple of it, for efficient matrix kernels


def next_token_loss(hidden_NE: Tensor, weight_VE: Tensor, targets_N: Tensor) -> Tensor:
    """Compute the mean cross-entropy of the logits hidden @ weight.T, in nats per target (scalar).

    Under autocast, matrix products use the autocast dtype and everything else float32, with or without chunks.

    Args:
        hidden_NE: inputs of the LM head.
        weight_VE: weight of the LM head.
        targets_N: token ids; `IGNORED` targets are excluded. If all targets are ignored, the loss is NaN.
    """
    rows, words = len(hidden_NE), len(weight_VE)
    if rows * words <= WHOLE:
        logits_NV = F.linear(hidden_NE, weight_VE)
        return F.cross_entropy(logits_NV.to(accumulate_dtype(logits_NV.dtype)), targets_N)
    return chunked_loss(hidden_NE, weight_VE, targets_N, rows_per_chunk(rows, words, hidden_NE.device))


def rows_per_chunk(rows: int, words: int, device: torch.device) -> int:
    """Return the number of rows (positions) per chunk, for `rows` positions and a vocabulary of `words` tokens."""
    elements = max(CHUNK_ELEMENTS_CUDA, rows * words // 16) if device.type == "cuda" else CHUNK_ELEMENTS
    rows = elements // words
    return max(1, rows - rows % ROWS_MULTIPLE) if rows > ROWS_MULTIPLE else max(1, rows)


def chunked_loss(hidden_NE: Tensor, weight_VE: Tensor, targets_N: Tensor, rows: int) -> Tensor:
    """Compute `next_token_loss` in chunks of `rows` positions."""
    kind = hidden_NE.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else hidden_NE.dtype
    with torch.autocast(kind, enabled=False):
        return _ChunkedLoss.apply(hidden_NE, weight_VE, targets_N, rows, dtype, torch.is_grad_enabled())


class _ChunkedLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, rows: int, dtype: torch.dtype, training: bool
    ) -> Tensor:
        needs_hidden, needs_weight = (training and needed for needed in ctx.needs_input_grad[:2])
        count = (targets != IGNORED).sum()
        words = weight.to(dtype)
        accumulate = accumulate_dtype(dtype)
        total = torch.zeros((), dtype=accumulate, device=hidden.device)
        dhidden = torch.empty_like(hidden) if needs_hidden else None
        dweight = torch.zeros_like(weight, dtype=accumulate) if needs_weight else None
        for start in range(0, len(hidden), rows):
            part, wanted = hidden[start : start + rows].to(dtype), targets[start : start + rows]
            loss, slope = _of_logits(hidden.device)(part @ words.T, wanted, count, needs_hidden or needs_weight)
            total += loss
            if dhidden is not None:
                dhidden[start : start + rows] = slope @ words
            if dweight is not None and slope.dtype == accumulate:
                dweight.addmm_(slope.T, part)
            elif dweight is not None:
                dweight += slope.T @ part
        ctx.save_for_backward(dhidden, dweight)
        ctx.weight_dtype = weight.dtype
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, scale: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        dhidden, dweight = ctx.saved_tensors
        dhidden = None if dhidden is None else dhidden * scale.to(dhidden.dtype)
        dweight = None if dweight is None else (dweight * scale).to(ctx.weight_dtype)
        return dhidden, dweight, None, None, None, None


def _loss_and_slope(logits_NV: Tensor, targets_N: Tensor, count: Tensor, training: bool) -> tuple[Tensor, Tensor]:
    """Return a chunk's part of the mean loss, and its gradient with respect to the logits.

    The gradient has the dtype of the logits, and may overwrite them. Unless `training` is set, the logits are returned
    in place of the gradient.
    """
    z_NV = logits_NV.to(accumulate_dtype(logits_NV.dtype))
    kept_N1, words_N1 = (targets_N != IGNORED)[:, None], targets_N.clamp(min=0)[:, None]
    lse_N1 = z_NV.logsumexp(-1, keepdim=True)
    loss = (lse_N1 - z_NV.gather(1, words_N1)).masked_fill(~kept_N1, 0).sum() / count
    if not training:
        return loss, logits_NV
    share_NV = z_NV.sub_(lse_N1).exp_()
    if torch.compiler.is_compiling():  # can be fused; a scatter would need `share_NV` in memory
        share_NV = share_NV - (torch.arange(z_NV.shape[1], device=z_NV.device) == words_N1).to(share_NV.dtype)
    else:
        share_NV.scatter_add_(1, words_N1, share_NV.new_full((), -1.0).expand(words_N1.shape))
    return loss, share_NV.mul_(kept_N1.to(share_NV.dtype) / count).to(logits_NV.dtype)


@functools.cache
def _compiled_loss() -> Callable[..., tuple[Tensor, Tensor]]:
    return compiled(_loss_and_slope)


def _of_logits(device: torch.device) -> Callable[..., tuple[Tensor, Tensor]]:
    """Return `_loss_and_slope`, compiled on CUDA, where float32 copies of the logits would slow it down."""
    return _compiled_loss() if device.type == "cuda" else _loss_and_slope


class HiddenZ(Part):
    """Hidden z-loss: weight * mean over positions of (log sum_i exp |z_i|)^2 (2509.01322, section 3.2, equation 10).

    z is the output of the last block before the final norm.
    """

    weight: float = Field(default=1e-7, ge=0, description="weight of the hidden z-loss (lambda in arXiv:2509.01322)")

    def of(self, outputs: Sequence[Tensor]) -> Tensor:
        """Compute the weighted loss from the outputs (B, L, E) of all blocks; scalar, float32 (float64 for float64)."""
        z_BLE = outputs[-1].to(accumulate_dtype(outputs[-1].dtype))
        return self.weight * z_BLE.abs().logsumexp(-1).square().mean()


class Tweo(Part):
    """TWEO loss (2511.23225): weight * mean of (|A| / (tau + eps))^p over the entries A of all block outputs.

    The weight is constant, and eps is 1e-6. tau is an absolute magnitude, suited to a residual stream with entries of
    about 1.
    """

    weight: float = Field(default=0.01, ge=0, description="weight of the TWEO loss (lambda in arXiv:2511.23225)")
    tau: float = Field(default=3.0, gt=0, description="magnitude above which the penalty grows steeply")
    p: float = Field(default=4.0, ge=1, description="exponent")

    def of(self, outputs: Sequence[Tensor]) -> Tensor:
        """Compute the weighted loss from the outputs (B, L, E) of all blocks; scalar, float32 (float64 for float64)."""
        dtype = accumulate_dtype(outputs[0].dtype)
        terms = [(A_BLE.to(dtype).abs() / (self.tau + 1e-6)).pow(self.p).mean() for A_BLE in outputs]
        return self.weight * torch.stack(terms).mean()


class AddedLosses(Part):
    """Auxiliary losses, added to the cross-entropy in training and reported separately in validation."""

    hidden_z: HiddenZ | None = Field(default=None, description="penalty on large outputs of the last block")
    tweo: Tweo | None = Field(default=None, description="penalty on large outputs of every block")

    @property
    def terms(self) -> dict[str, HiddenZ | Tweo]:
        """Active auxiliary losses by name; a weight of 0 disables a loss."""
        given: dict[str, HiddenZ | Tweo | None] = {"hidden_z": self.hidden_z, "tweo": self.tweo}
        return {name: term for name, term in given.items() if term is not None and term.weight > 0}
