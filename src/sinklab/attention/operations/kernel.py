"""Kernel attention: sim_ts = phi(q_t).phi(k_s) / sqrt(d_h) with a feature map phi and the head dimension d_h.

Under causal and prefix masks it is computed as linear attention in O(T d_h^2). With a KV cache, the scores of the new
queries are computed explicitly. Under other masks, or with backend eager or flex, one call of `attend` sums over the
keys with positive similarity, and for signed kernels a second call over those with negative similarity. phi is also
applied to a bias key. Kernels have no logits, so they support no softcap, relative position bias or sink logit.
Importance is computed from the proxy scores |sim_ts| / sum_s |sim_ts|.

B batch, H query heads, G KV heads, R = H / G, T queries, S keys, D key dimension, V value dimension, N chunks of C
positions.
"""

from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from sinklab.attention.importance import Rows
from sinklab.attention.operations import fla_kernels
from sinklab.attention.operations.base import Call, OperationPart
from sinklab.attention.query_blocks import CHUNK, accumulate_dtype, default_scale, grouped_product
from sinklab.attention.scores import log_magnitude, log_relu
from sinklab.schema import Example


class Kernel(OperationPart):
    """Base class of kernel attention: A_ts = phi(q_t).phi(k_s) / sqrt(d_h), divided by Z_t if `normalised`."""

    normalised: bool = Field(
        default=False, description="divide by the row sum; for kinds identity and mlp, by max(|row sum|, 1)"
    )
    has_logits: ClassVar[bool] = False
    signed: ClassVar[bool] = True  # whether a similarity can be negative

    @property
    def divides(self) -> bool:
        return self.normalised

    @property
    def sums_to_one(self) -> bool:
        return self.normalised and not self.signed

    @abstractmethod
    def feature(self, x: Tensor, learned: Any) -> Tensor:
        """Compute the feature map phi(x): (.., D) -> (.., D).

        Args:
            x: queries, keys or a bias key.
            learned: learned parameters of phi; None if phi has none.
        """

    def output(self, call: Call, v_BGTV: Tensor) -> Tensor:
        call, by_fla = self._featured(call), fla_kernels.serves_call(call, v_BGTV)
        v = v_BGTV if by_fla else v_BGTV.to(call.q_BHTD.dtype)
        if self.normalised:
            v = torch.cat((v, torch.ones_like(v[..., :1])), -1)
        sums = fla_kernels.linear(call, v) if by_fla else _signed_sums(call, v, self.signed)
        if not self.normalised:
            return _add_bias(sums, call).to(v_BGTV.dtype)
        out = _add_bias(sums[..., :-1], call)
        return (out / self._divisor(_add_one(sums[..., -1], call))[..., None]).to(v_BGTV.dtype)

    @torch.no_grad()
    def rows(self, call: Call) -> Iterator[Rows]:
        return self._featured(call).rows(log_magnitude())

    def row_sums(self, call: Call) -> Tensor:
        call = self._featured(call)
        ones = torch.ones_like(call.k_BGTD[..., :1])
        sums = _add_one(_signed_sums(call, ones, self.signed)[..., 0], call)
        return sums / self._divisor(sums) if self.normalised else sums

    def _divisor(self, sums_BHT: Tensor) -> Tensor:
        return sums_BHT.abs().clamp(min=1) if self.signed else sums_BHT

    def _featured(self, call: Call) -> Call:
        dtype = accumulate_dtype(call.q_BHTD.dtype)
        q, k = (self.feature(x.to(dtype), call.learned) for x in (call.q_BHTD, call.k_BGTD))
        key = None if call.key_HD is None else self.feature(call.key_HD.to(dtype), call.learned)
        return replace(call, q_BHTD=q, k_BGTD=k, key_HD=key)


def _signed_sums(call: Call, v_BGTV: Tensor, signed: bool) -> Tensor:
    mask, q_BHTD, k_BGTD = call.mask, call.q_BHTD, call.k_BGTD
    if call.backend in ("auto", "chunked") and (call.first or mask.running_sum is not None):
        q_BHTD = q_BHTD * default_scale(q_BHTD)
        if mask.running_sum is not None and not call.first:
            return linear_sums(q_BHTD, k_BGTD, v_BGTV, *mask.running_sum)
        T, S = q_BHTD.shape[2], k_BGTD.shape[2]  # the T x S matrix is stored, as there are few new queries
        similarity_BHTS = grouped_product(q_BHTD, k_BGTD.mT) * mask.block(S - T, S, 0, S, q_BHTD.device)
        return grouped_product(similarity_BHTS, v_BGTV)
    total = torch.zeros(())
    for sign in (1, -1) if signed else (1,):
        out, lse = call.attend(v_BGTV, log_relu(sign))
        total = total + sign * out * lse.exp()[..., None]
    return total


def _add_bias(sums_BHTV: Tensor, call: Call) -> Tensor:
    similarity_BHT = call.bias_logits()  # for kernels, the similarity itself
    if similarity_BHT is None or call.value_HV is None:
        return sums_BHTV
    return sums_BHTV + similarity_BHT[..., None] * call.value_HV[:, None].to(sums_BHTV.dtype)


def _add_one(sums_BHT: Tensor, call: Call) -> Tensor:
    similarity_BHT = call.bias_logits()
    return sums_BHT if similarity_BHT is None else sums_BHT + similarity_BHT


class EluKernel(Kernel):
    """Kernel attention with phi(x) = elu(x) + 1 (2410.10781, table 6); Z is the row sum, which is positive."""

    kind: Literal["elu_kernel"] = "elu_kernel"
    signed: ClassVar[bool] = False
    examples: ClassVar = {
        "elu_kernel": Example(may_diverge=True),
        "elu_kernel_normalised": Example({"normalised": True}),
    }

    def feature(self, x: Tensor, learned: Any) -> Tensor:
        return F.elu(x) + 1


class IdentityKernel(Kernel):
    """Kernel attention with phi(x) = x (2410.10781, table 6); Z = max(|row sum|, 1)."""

    kind: Literal["identity"] = "identity"
    examples: ClassVar = {
        "identity": Example(may_diverge=True),
        "identity_normalised": Example({"normalised": True}, may_diverge=True),
    }

    def feature(self, x: Tensor, learned: Any) -> Tensor:
        return x


class Mlp(nn.Module):
    """MLP with ReLU and without biases, d_h -> d_h -> d_h, shared by queries, keys and all heads."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner = nn.Linear(width, width, bias=False)
        self.outer = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.outer(F.relu(self.inner(x.to(self.inner.weight.dtype)))).to(x.dtype)


class MlpKernel(Kernel):
    """Kernel attention with phi(x) = W2 relu(W1 x) for q and k (2410.10781, table 6); Z = max(|row sum|, 1)."""

    kind: Literal["mlp"] = "mlp"
    examples: ClassVar = {
        "mlp": Example(may_diverge=True),
        "mlp_normalised": Example({"normalised": True}, may_diverge=True),
    }

    def parameters(self, heads: int, head_width: int, value_width: int, layer: int, context: int | None) -> nn.Module:
        return Mlp(head_width)

    def feature(self, x: Tensor, learned: Any) -> Tensor:
        return learned(x)


def linear_sums(q_BHTD: Tensor, k_BGTD: Tensor, v_BGTV: Tensor, leading: int, shared: int) -> Tensor:
    """Compute the sum of (q_t.k_s) v_s over the keys that query t sees: (B, H, T, V). Requires T = S.

    Args:
        leading, shared: numbers that describe the mask (`Mask.running_sum`).
    """
    if not shared:
        return causal_sums(q_BHTD, k_BGTD, v_BGTV)
    end = min(shared, k_BGTD.shape[2])
    later_BGTD = torch.cat((torch.zeros_like(k_BGTD[:, :, :end]), k_BGTD[:, :, end:]), dim=2)
    own = causal_sums(q_BHTD[:, :, :leading], k_BGTD[:, :, :leading], v_BGTV[:, :, :leading])
    state_BGDV = k_BGTD[:, :, :end].mT @ v_BGTV[:, :, :end]
    seen = torch.cat((own, grouped_product(q_BHTD[:, :, leading:], state_BGDV)), dim=2)
    return seen + causal_sums(q_BHTD, later_BGTD, v_BGTV)


def causal_sums(q_BHTD: Tensor, k_BGTD: Tensor, v_BGTV: Tensor) -> Tensor:
    """Compute the sum of (q_t.k_s) v_s over s <= t: (B, H, T, V). T may be 0 (a prefix without leading tokens)."""
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
