"""Gated delta rule (2412.06464, equation 10) and Kimi delta attention: linear attention with decay and delta updates.

    S_t = a_t S_{t-1} + b_t k_t (v_t - a_t S_{t-1}^T k_t)^T        o_t = S_t^T q_t        a_t = exp(g_t)

S is a D x V matrix per head that maps keys to values. It decays by a_t; then the value stored for k_t moves towards
v_t, and equals v_t if b_t is 1 and the key has length 1. Time and memory are linear in T.

The sequence is divided into chunks of C positions. Let S be the state before a chunk, and c_i the sum of g from the
first position of the chunk to its position i. Position i adds k_i W_i^T to the state. W_i is row i of the C x V matrix
W (section 3.3, the UT transform):

    W = X - Y S,   (I + L) [X, Y] = b [v, exp(c) k],   L_ij = b_i exp(c_i - c_j) k_i.k_j  for j < i

X (C x V) and Y (C x D) do not depend on S, so one triangular solve computes them for all chunks. Then

    o_i = exp(c_i) S^T q_i + sum over j <= i of exp(c_i - c_j) (q_i.k_j) W_j
    S  <- exp(c_C) S + sum over j of exp(c_C - c_j) k_j W_j^T

Only the recurrence over chunks is sequential. The differences of c are at most 0, so no exponential overflows.

Kimi delta attention (2510.26692) has a decay per key channel, Diag(a_t) S_{t-1}. Then c_i has D entries, and the
products above are sums over channels: sum_d k_id k_jd exp(c_id - c_jd), and the same with q_i. They are computed for
each pair of positions, in shorter chunks. With the factors exp(c_i) and exp(-c_j) they would be matrix products, but
exp(-c_j) overflows if a channel decays fast.

B batch, H heads, T positions, D key dimension, V value dimension, N chunks of C positions, K decays per head (1 or D).
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from sinklab.attention.query_blocks import CHUNK, accumulate_dtype

CHANNEL_CHUNK = 16  # positions per chunk with a decay per channel


def gated_delta(
    q_BHTD: Tensor,
    k_BHTD: Tensor,
    v_BHTV: Tensor,
    log_decay: Tensor,
    rate_BHT: Tensor,
    state_BHDV: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute the outputs of all positions and the state after the last position (equations in the module docstring).

    Args:
        q_BHTD, k_BHTD: queries and keys, already scaled and normalised by the caller.
        v_BHTV: values.
        log_decay: log decay g, at most 0: (B, H, T), or (B, H, T, D) for one decay per channel of the key.
        rate_BHT: update rate b (beta in the paper), from 0 to 1.
        state_BHDV: state before the first position; None means zero.

    Returns:
        out_BHTV in the dtype of the values; state_BHDV in float32 (float64 for float64).
    """
    dtype = accumulate_dtype(v_BHTV.dtype)
    (B, H, T, D), V = q_BHTD.shape, v_BHTV.shape[3]
    by_channel = log_decay.ndim == 4
    C = min(CHUNK, CHANNEL_CHUNK, T) if by_channel else min(CHUNK, T)
    missing = -T % C  # padding has rate 0 and decay 1, which does not change the state
    q, k, v = (F.pad(x.to(dtype), (0, 0, 0, missing)).view(B, H, -1, C, x.shape[3]) for x in (q_BHTD, k_BHTD, v_BHTV))
    rate = F.pad(rate_BHT.to(dtype), (0, missing)).view(B, H, -1, C)
    later = torch.ones(C, C, dtype=torch.bool, device=q.device).triu(1)
    if by_channel:
        sums_BHNCK = F.pad(log_decay.to(dtype), (0, 0, 0, missing)).view(B, H, -1, C, D).cumsum(-2)
        between = sums_BHNCK[..., :, None, :] - sums_BHNCK[..., None, :, :]
        decay = between.masked_fill(later[..., None], -torch.inf).exp()
    else:
        sums_BHNC = F.pad(log_decay.to(dtype), (0, missing)).view(B, H, -1, C).cumsum(-1)
        decay = (sums_BHNC[..., :, None] - sums_BHNC[..., None, :]).masked_fill(later, -torch.inf).exp()
        sums_BHNCK = sums_BHNC[..., None]
    since_start, till_end = sums_BHNCK.exp(), (sums_BHNCK[..., -1:, :] - sums_BHNCK).exp()
    corrections = _decayed_products(k, k, decay, rate[..., None])
    wanted = rate[..., None] * torch.cat((v, since_start * k), dim=-1)
    solved = torch.linalg.solve_triangular(corrections, wanted, upper=False, unitriangular=True)
    own_BHNCV, read_BHNCD = solved.split((V, D), dim=-1)
    scores_BHNCC = _decayed_products(q, k, decay)
    # `unbind`, because the gradient of indexing one chunk is a tensor of the size of the whole sequence.
    parts = (q * since_start, k * till_end, scores_BHNCC, own_BHNCV, read_BHNCD, since_start[..., -1, :, None])
    chunks = zip(*(part.unbind(2) for part in parts), strict=True)
    state = q.new_zeros(B, H, D, V) if state_BHDV is None else state_BHDV.to(dtype)
    out = []
    for q_BHCD, k_BHCD, scores_BHCC, own_BHCV, read_BHCD, whole_BHK1 in chunks:
        written_BHCV = own_BHCV - read_BHCD @ state
        out.append(q_BHCD @ state + scores_BHCC @ written_BHCV)
        state = whole_BHK1 * state + k_BHCD.mT @ written_BHCV
    return torch.cat(out, dim=2)[:, :, :T].to(v_BHTV.dtype), state


def _decayed_products(one_BHNCD: Tensor, other_BHNCD: Tensor, decay: Tensor, rate: Tensor | float = 1.0) -> Tensor:
    """Compute rate_i sum_d one_id other_jd decay_ij for all pairs (i, j) of positions of each chunk.

    The decay has shape (B, H, N, C, C), or (B, H, N, C, C, D) with one decay per channel.
    """
    if decay.ndim == one_BHNCD.ndim:
        products = one_BHNCD @ other_BHNCD.mT
        return (products if isinstance(rate, float) else rate * products) * decay
    return rate * (decay * one_BHNCD[..., :, None, :] * other_BHNCD[..., None, :, :]).sum(-1)
