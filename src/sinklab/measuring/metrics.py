"""The sink metric as pure functions on tensors (2410.10781, section 3.2).

N or B sequences, L layers, H heads, T positions. Arrays are 0-based; position 1 of the paper is index 0.
"""

import torch
from torch import Tensor


def uniform_importance(queries_B: Tensor, length: int) -> Tensor:
    """Compute alpha_BT of uniform causal attention, A[t, k] = 1/t for k <= t, in float64 on the CPU.

    alpha_k = (1/k + .. + 1/n) / (n - k + 1); alpha_1 is the n-th harmonic number divided by n.

    Args:
        queries_B: number of real tokens n of each sequence; the result is 1 at later positions.
        length: number of positions T of the result.
    """
    t_T = torch.arange(1, length + 1, dtype=torch.float64)
    left_BT = queries_B.cpu()[:, None] - t_T + 1
    shares_BT = torch.where(left_BT > 0, 1 / t_T, 0)
    sums_BT = shares_BT.flip(-1).cumsum(-1).flip(-1)
    return torch.where(left_BT > 0, sums_BT / left_BT.clamp(min=1), 1)


def sink_hits(importance_LNHT: Tensor, eps: float, valid_NT: Tensor) -> Tensor:
    """Count the (sequence, layer, head) triples with alpha_k > eps at each position k: counts_T.

    Sink_k is the fraction of such triples; the counts of several batches can be added.

    Args:
        importance_LNHT: alpha per sequence.
        eps: threshold; alpha must be strictly above it.
        valid_NT: bool, False at positions past a sequence's end.
    """
    return ((importance_LNHT > eps) & valid_NT[:, None]).sum((0, 1, 2))


def first_to_rest(norm_LT: Tensor) -> Tensor:
    """Compute |h_1| / mean over t > 1 of |h_t| from norms averaged over sequences.

    Args:
        norm_LT: mean l2 norm per layer (or layer and head) and position, T >= 2.

    Returns:
        ratio_L, without the axis of positions. It is 1 if all norms are zero (for example, keys after weight decay),
        and infinite if only the norms of later positions are zero (for example, with closed value gates).
    """
    first_L, rest_L = norm_LT[..., 0], norm_LT[..., 1:].mean(-1)
    return torch.where((first_L == 0) & (rest_L == 0), 1.0, first_L / rest_L)
