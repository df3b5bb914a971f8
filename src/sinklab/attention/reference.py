"""Attention by the papers' formulas on explicit matrices, for the `reference` of every operation.

This slow code is used only in tests, as the reference for all other attention code. Scores, softcap, mask and biases
are computed independently; only `Mask.allowed` and the `Score` of a positional embedding are shared with that code.

If a bias adds a key or a logit, S = T + 1 and column 0 is this key: it has no position and is visible to every query.
For operations with remaining attention (stick-breaking), column 0 is the rest. Otherwise S = T. A learned leading token
is an ordinary position here.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from sinklab.attention.biases import BiasParameters
from sinklab.attention.masks import Mask
from sinklab.attention.scores import Score


@dataclass(frozen=True)
class Explicit:
    """Explicit tensors of an attention layer, with separate keys and values for every query head.

    Attributes:
        q_BHTD, k_BHTD, v_BHTV: queries, keys and values of the sequence; several queries of a head are concatenated.
        allowed_BHTT: boolean mask, True where a query sees a key.
        key_HD, value_HV: key of a bias, None without one, and value of column 0 or V bias, zero without one.
        logit_H: sink logit, used instead of q.k_s; 0 for off-by-one, None for other biases.
        added_H: learned number added to the logit of a bias key; zero without one.
        offset_HV: vector added to the output by a V bias; zero without a V bias.
        softcap: softcap of the scores, in nats.
        position: relative position bias as a score function.
        fading_BHTT: term added to a score by forget gates; None without forget gates.
        has_rest: whether column 0 is the remaining attention, with value zero.
        learned: learned parameters of the operation.
        weight_BHT: logit of each query's weight; None for operations without weights.
    """

    q_BHTD: Tensor
    k_BHTD: Tensor
    v_BHTV: Tensor
    allowed_BHTT: Tensor
    key_HD: Tensor | None
    value_HV: Tensor
    logit_H: Tensor | None
    added_H: Tensor
    offset_HV: Tensor
    softcap: float | None
    position: Score | None
    fading_BHTT: Tensor | None
    has_rest: bool
    learned: nn.Module | None
    weight_BHT: Tensor | None

    @property
    def has_bias(self) -> bool:
        """True if column 0 is a bias or the remaining attention."""
        return self.key_HD is not None or self.logit_H is not None or self.has_rest

    def logits(self, part: slice = slice(None), of_key: slice | None = None) -> Tensor:
        """Compute q_t.k_s / sqrt(d) with softcap, position bias and forget gates; -inf at masked keys: (B, H, T, S).

        Column 0 is that of a bias; remaining attention has no logit, and S is then T.

        Args:
            part: slice of the width of every head's queries, for operations that split heads; d is then the width of
                the slice.
            of_key: slice of the width of its keys; None is `part`.
        """
        of_key = part if of_key is None else of_key
        q, k = self.q_BHTD[..., part], self.k_BHTD[..., of_key]
        z_BHTT = self._capped(q @ k.mT / math.sqrt(q.shape[-1]))
        if self.position is not None:
            (B, H, T, _), device = z_BHTT.shape, z_BHTT.device
            b, h, t, s = torch.meshgrid(*(torch.arange(n, device=device) for n in (B, H, T, T)), indexing="ij")
            z_BHTT = self.position(z_BHTT, b, h, t, s)
        if self.fading_BHTT is not None:
            z_BHTT = z_BHTT + self.fading_BHTT
        z_BHTT = z_BHTT.masked_fill(~self.allowed_BHTT, -math.inf)
        if self.logit_H is not None:
            extra_BHT1 = self.logit_H[:, None, None].expand(len(q), -1, q.shape[2], 1)
        elif self.key_HD is not None:
            extra_BHT1 = self._capped(q @ self.key_HD[:, of_key, None] / math.sqrt(q.shape[-1]))
            extra_BHT1 = extra_BHT1 + self.added_H[:, None, None]
        else:
            return z_BHTT
        return torch.cat([extra_BHT1, z_BHTT], dim=-1)

    def products(self, phi: Callable[[Tensor], Tensor]) -> Tensor:
        """Compute phi(q_t).phi(k_s) / sqrt(d), 0 at masked keys: (B, H, T, S)."""
        k_BHSD = self.k_BHTD
        if self.key_HD is not None:
            k_BHSD = torch.cat([self.key_HD[None, :, None].expand(len(k_BHSD), -1, -1, -1), k_BHSD], dim=2)
        return phi(self.q_BHTD) @ phi(k_BHSD).mT / math.sqrt(self.q_BHTD.shape[-1]) * self.seen()

    def seen(self) -> Tensor:
        """Return the boolean mask including column 0: (B, H, T, S)."""
        first = torch.ones_like(self.allowed_BHTT[..., :1])
        return torch.cat([first, self.allowed_BHTT], dim=-1) if self.has_bias else self.allowed_BHTT

    def values(self) -> Tensor:
        """Return the value v_s of every column: (B, H, S, V)."""
        if not self.has_bias:
            return self.v_BHTV
        value_HV = torch.zeros_like(self.value_HV) if self.has_rest else self.value_HV
        return torch.cat([value_HV[None, :, None].expand(len(self.v_BHTV), -1, -1, -1), self.v_BHTV], dim=2)

    def _capped(self, z: Tensor) -> Tensor:
        return z if self.softcap is None else self.softcap * torch.tanh(z / self.softcap)


def explicit(
    q_BHTD: Tensor,
    k_BGTD: Tensor,
    v_BGTV: Tensor,
    mask: Mask,
    bias: BiasParameters,
    softcap: float | None,
    position: Score | None,
    log_kept_BTH: Tensor | None,
    has_rest: bool,
    learned: nn.Module | None,
    weight_BTH: Tensor | None,
) -> Explicit:
    """Build the explicit tensors; KV heads and learned biases are repeated for their H / G query heads."""
    (B, H, T, _), D = q_BHTD.shape, k_BGTD.shape[3]
    b, h, t, s = torch.meshgrid(*(torch.arange(n, device=q_BHTD.device) for n in (B, H, T, T)), indexing="ij")
    key_HD, value_HV = None, torch.zeros_like(v_BGTV[0, :1, 0]).expand(H, -1)
    if bias.key is not None:
        missing = bias.key.new_zeros(len(bias.key), D - bias.key.shape[1])
        key_HD = _of_every_head(torch.cat([bias.key, missing], dim=1), H)
    if bias.value is not None:
        value_HV = _of_every_head(bias.value, H)
    if bias.fixed is not None:
        first, uniform = torch.zeros_like(value_HV), torch.full_like(value_HV, 1 / math.sqrt(value_HV.shape[1]))
        first[:, 0] = 1
        value_HV = bias.fixed.norm * (first if bias.fixed.direction == "first" else uniform)
    is_v_bias = bias.value is not None and bias.key is None
    return Explicit(
        q_BHTD=q_BHTD,
        k_BHTD=k_BGTD.repeat_interleave(H // k_BGTD.shape[1], dim=1),
        v_BHTV=v_BGTV.repeat_interleave(H // v_BGTV.shape[1], dim=1),
        allowed_BHTT=mask.allowed(b, h, t, s),
        key_HD=key_HD,
        value_HV=value_HV,
        logit_H=q_BHTD.new_zeros(H) if bias.off_by_one else bias.logit,
        added_H=q_BHTD.new_zeros(H) if bias.offset is None else bias.offset,
        offset_HV=value_HV if is_v_bias else torch.zeros_like(value_HV),
        softcap=softcap,
        position=position,
        fading_BHTT=None if log_kept_BTH is None else _fading(log_kept_BTH),
        has_rest=has_rest,
        learned=learned,
        weight_BHT=None if weight_BTH is None else weight_BTH.transpose(1, 2),
    )


def _fading(log_kept_BTH: Tensor) -> Tensor:
    log_gates_BTH = log_kept_BTH.diff(dim=1, prepend=torch.zeros_like(log_kept_BTH[:, :1]))
    t = torch.arange(log_kept_BTH.shape[1], device=log_kept_BTH.device)
    after_TTT = (t[None, :, None] < t) & (t <= t[:, None, None])  # [t, s, l]
    return torch.einsum("blh,tsl->bhts", log_gates_BTH, after_TTT.to(log_gates_BTH.dtype))


def _of_every_head(learned: Tensor, heads: int) -> Tensor:
    return learned.repeat_interleave(heads // len(learned), dim=0)


def over_norm(similarity_BHTS: Tensor, p: float) -> Tensor:
    """Compute sim_ts / (sum_s sim_ts ** p) ** (1 / p), or 0 in a row whose similarities are all 0."""
    positive = similarity_BHTS > 0  # powers of zero have no gradient
    total = (torch.where(positive, similarity_BHTS, 1) ** p * positive).sum(-1, keepdim=True)
    return similarity_BHTS / torch.where(total > 0, total, 1) ** (1 / p)
