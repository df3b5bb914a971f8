"""The gated delta rule as 2412.06464 writes it (equation 10), position by position."""

import torch
from torch import Tensor


def gated_delta_by_steps(
    q_BHTD: Tensor,
    k_BHTD: Tensor,
    v_BHTV: Tensor,
    log_decay: Tensor,
    rate_BHT: Tensor,
    state_BHDV: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Outputs and the state after them; arguments as those of `gated_delta`."""
    B, H, T, D = q_BHTD.shape
    state = q_BHTD.new_zeros(B, H, D, v_BHTV.shape[3]) if state_BHDV is None else state_BHDV
    out = []
    for t in range(T):
        state = state * log_decay[:, :, t].exp().reshape(B, H, -1, 1)
        held_BHV = torch.einsum("bhdv,bhd->bhv", state, k_BHTD[:, :, t])
        corrected_BHV = rate_BHT[:, :, t, None] * (v_BHTV[:, :, t] - held_BHV)
        state = state + torch.einsum("bhd,bhv->bhdv", k_BHTD[:, :, t], corrected_BHV)
        out.append(torch.einsum("bhdv,bhd->bhv", state, q_BHTD[:, :, t]))
    return torch.stack(out, dim=2), state
