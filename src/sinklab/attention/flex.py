"""The `flex` backend: PyTorch's FlexAttention, a fused kernel for CUDA.

Score functions and masks are those of the other backends, compiled into the kernel. Terms and factors common to all
scores of a row can be applied outside the kernel (`scores.FlexScore`). On a CPU there is only an uncompiled forward
pass, which is sufficient for tests but not for training.

B batch, H query heads, G KV heads, T queries, S keys, D key dimension, V value dimension.
"""

import functools
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import flex_attention as flex

from sinklab.attention.masks import Mask
from sinklab.attention.scores import Score, for_flex
from sinklab.compiling import compiled

NARROWEST = 16  # smallest head dimension supported by the kernel
DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def flex_serves(q_BHTD: Tensor, v_BGSV: Tensor) -> bool:
    """Return True if the kernel supports the call: CUDA, float32 or 16-bit queries, key and value dimensions >= 16.

    A value dimension of 0 is supported too (`flex_attend`).
    """
    narrow = min(q_BHTD.shape[-1], v_BGSV.shape[-1] or NARROWEST) < NARROWEST
    return q_BHTD.is_cuda and q_BHTD.dtype in DTYPES and not narrow


def flex_attend(
    q_BHTD: Tensor, k_BGSD: Tensor, v_BGSV: Tensor, score: Score | None, mask: Mask, scale: float
) -> tuple[Tensor, Tensor]:
    """Compute (out_BHTV, lse_BHT) as `primitive.attend` does. The value dimension may be 0.

    Raises:
        ValueError: if gradients are required on a CPU, where FlexAttention has no backward pass.
    """
    (_, H, T, _), S = q_BHTD.shape, k_BGSD.shape[2]
    tensors = (q_BHTD, k_BGSD, v_BGSV, *(score.tensors if score else ()))
    if not q_BHTD.is_cuda and torch.is_grad_enabled() and any(t.requires_grad for t in tensors):
        raise ValueError("the flex backend trains on CUDA only: use backend auto, chunked or eager on a CPU")
    run = _compiled_flex() if q_BHTD.is_cuda else flex.flex_attention
    kernel = for_flex(score)
    out, aux = run(
        kernel.query(q_BHTD),
        k_BGSD,
        v_BGSV if v_BGSV.shape[-1] else k_BGSD[..., :NARROWEST],  # not k itself: two inputs must not be one tensor
        score_mod=None if kernel.score is None else score_mod(kernel.score, S - T),
        block_mask=_block_mask(mask, T, S, str(q_BHTD.device)),
        scale=scale,
        enable_gqa=k_BGSD.shape[1] != H,
        return_aux=flex.AuxRequest(lse=True),
    )
    assert isinstance(aux.lse, Tensor)
    return (out if v_BGSV.shape[-1] else out[..., :0]), kernel.normaliser(aux.lse)


def score_mod(score: Score, offset: int) -> Any:
    """Return a score function as FlexAttention's `score_mod`; `offset` is the first query's position among the keys."""
    function, tensors = score.function, score.tensors

    def modified(z: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return function(z, b, h, q + offset, k, *tensors)

    return modified


@functools.lru_cache(maxsize=16)
def _block_mask(mask: Mask, queries: int, keys: int, device: str) -> Any:
    offset = keys - queries

    def mask_mod(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return mask.allowed(b, h, q + offset, k)

    rows, heads = (count if count > 1 else None for count in mask.sizes)
    return flex.create_block_mask(mask_mod, rows, heads, queries, keys, device=device)


@functools.cache
def _compiled_flex() -> Any:
    return compiled(flex.flex_attention, dynamic=False)
