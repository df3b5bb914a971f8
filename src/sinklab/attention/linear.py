"""Linear attention in chunks: sum over visible s of (q_t.k_s) v_s, exactly, in O(T (C + D) V) time and linear memory.

Within a chunk of C positions the scores are explicit; all keys of earlier chunks have been summed into one D x V
state. Plain autograd: what it keeps, T x C scores and T / C states, is linear in T.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from sinklab.attention.blocks import grouped_product
from sinklab.attention.visible import Mask, RunningSum

CHUNK = 64


def linear_sums(q_BHTD: Tensor, k_BGTD: Tensor, v_BGTV: Tensor, rows: RunningSum) -> Tensor:
    """sum over the visible keys s of (q_t.k_s) v_s: (B, H, T, V). `rows` says which those are; T = S."""
    if not rows.shared:
        return causal_sums(q_BHTD, k_BGTD, v_BGTV)
    leading, end = rows.leading, min(rows.shared, k_BGTD.shape[2])
    later_BGTD = torch.cat((torch.zeros_like(k_BGTD[:, :, :end]), k_BGTD[:, :, end:]), dim=2)
    own = causal_sums(q_BHTD[:, :, :leading], k_BGTD[:, :, :leading], v_BGTV[:, :, :leading])
    state_BGDV = k_BGTD[:, :, :end].mT @ v_BGTV[:, :, :end]
    seen = torch.cat((own, grouped_product(q_BHTD[:, :, leading:], state_BGDV)), dim=2)
    return seen + causal_sums(q_BHTD, later_BGTD, v_BGTV)


def last_sums(q_BHTD: Tensor, k_BGSD: Tensor, v_BGSV: Tensor, mask: Mask) -> Tensor:
    """The same for queries at the last T of S positions, few enough for explicit scores: (B, H, T, V)."""
    T, S = q_BHTD.shape[2], k_BGSD.shape[2]
    similarity_BHTS = grouped_product(q_BHTD, k_BGSD.mT) * mask.block(S - T, S, 0, S, q_BHTD.device)
    return grouped_product(similarity_BHTS, v_BGSV)


def causal_sums(q_BHTD: Tensor, k_BGTD: Tensor, v_BGTV: Tensor) -> Tensor:
    """sum over s <= t of (q_t.k_s) v_s: (B, H, T, V). T may be 0: what leads a prefix, without a sink token."""
    (B, H, T, D), G, V = q_BHTD.shape, k_BGTD.shape[1], v_BGTV.shape[3]
    R, C = H // G, min(CHUNK, max(T, 1))
    missing = -T % C
    N = (T + missing) // C
    # (B, G, chunks, heads of a group x positions, width): the heads of a group share keys and states.
    q = F.pad(q_BHTD, (0, 0, 0, missing)).reshape(B, G, R, N, C, D).transpose(2, 3).reshape(B, G, N, R * C, D)
    k, v = (F.pad(x, (0, 0, 0, missing)).reshape(B, G, N, C, x.shape[3]) for x in (k_BGTD, v_BGTV))
    out = (q @ k.mT).view(B, G, N, R, C, C).tril().view(B, G, N, R * C, C) @ v
    if N > 1:
        states = (k[:, :, :-1].mT @ v[:, :, :-1]).cumsum(2)
        out = torch.cat((out[:, :, :1], out[:, :, 1:] + q[:, :, 1:] @ states), dim=2)
    return out.view(B, G, N, R, C, V).transpose(2, 3).reshape(B, H, N * C, V)[:, :, :T]
