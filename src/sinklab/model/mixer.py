"""Hybrid models: some layers have linear attention (the gated delta rule) instead of the attention of the recipe.

Gated DeltaNet layer (2412.06464, figure 1; numerically equal to flash-linear-attention's fla/layers/gated_deltanet.py
and transformers' Qwen3-Next): one matrix and a short causal convolution compute q, k and v. A norm and a gate follow
the delta rule. There is no positional embedding.

    q, k, v = silu(conv(x W_qkv))         q <- q / (|q| sqrt(D))     k <- k / |k|
    g_t = -exp(A) softplus(x_t w_a + s)    b_t = sigmoid(x_t w_b)     A, s, w_a, w_b per head
    y_t = [w o_t / rms(o_t) * silu(x_t W_z)] W_out,   o_t from the delta rule

Kimi delta attention (2510.26692; numerically equal to fla/layers/kda.py and transformers' Kimi Linear) has a decay per
key channel, computed from x through a bottleneck of width V, and a low-rank output gate:

    g_t = -exp(A) softplus(x_t W_f1 W_f2 + s),   A per head, s per head and channel
    y_t = [w o_t / rms(o_t) * sigmoid(x_t W_z1 W_z2)] W_out

B batch, L positions, E hidden size, H value heads, G query and key heads, D key dimension, V value dimension,
C = 2 G D + H V channels, W kernel size of the convolution.

Gated delta rule (2412.06464, equation 10) and Kimi delta attention: linear attention with decay and delta updates.

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

import functools
import math
from typing import Annotated, Literal, NamedTuple

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from sinklab.attention.operations import fla_kernels
from sinklab.attention.query_blocks import CHUNK, accumulate_dtype
from sinklab.model.norm import HeadNorm
from sinklab.model.values import Width
from sinklab.schema import Part

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


UNDER_ROOT = 1e-6  # eps in the norm of queries and keys, as in the published code
RATES = {"gated_delta": (0.01, 16.0), "kimi_delta": (1.0, 16.0)}
"""Range of the initial exp(A), uniform; the published Gated DeltaNet code starts at 0, whose logarithm is -inf."""
STEPS = (1e-3, 1e-1)  # range of the initial softplus(s), log-uniform


class AttentionOnly(Part):
    """Attention, with the operation of the recipe, in every layer."""

    kind: Literal["attention"] = "attention"


class DeltaMixer(Part):
    """Hybrid: every `every`-th layer, counted from the last, has attention; the other layers have linear attention.

    A recipe's attention operation, bias, mask, projection, gates and norms of heads apply only to the attention layers.
    The same holds for positions other than absolute and learnable. The linear layers are causal over the whole
    sequence, including learned leading tokens.
    """

    kind: Literal["gated_delta", "kimi_delta"]
    every: int = Field(default=4, ge=1, description="every n-th layer, counted from the last, has attention")
    heads: int | None = Field(
        default=None, ge=1, description="number of value heads of a linear layer; null: model.heads"
    )
    key_heads: int | None = Field(
        default=None,
        ge=1,
        description="number of query and key heads, each shared by heads / key_heads value heads; null: heads",
    )
    key_width: Width = Field(default=None, description="width of a query and a key; null: model.width / model.heads")
    value_width: Width = Field(default=None, description="width of a value; null: key_width")
    conv: int = Field(default=4, ge=1, description="kernel size of the short convolution, in positions")


class GatedDelta(DeltaMixer):
    """Hybrid with the gated delta rule (2412.06464) in the linear layers."""

    kind: Literal["gated_delta"] = "gated_delta"  # type: ignore[assignment]  # parts are immutable


class KimiDelta(DeltaMixer):
    """Hybrid with Kimi delta attention (2510.26692): the gated delta rule with a decay per key channel."""

    kind: Literal["kimi_delta"] = "kimi_delta"  # type: ignore[assignment]


Mixer = Annotated[AttentionOnly | GatedDelta | KimiDelta, Field(discriminator="kind")]


class RuleInputs(NamedTuple):
    """Arguments of `gated_delta`, except the state; queries and keys are repeated for the value heads."""

    q_BHLD: Tensor
    k_BHLD: Tensor
    v_BHLV: Tensor
    log_decay: Tensor  # g_t, (B, H, L), or (B, H, L, D) per channel
    rate_BHL: Tensor  # b_t in (0, 1); 0 at padding


class LinearAttention(nn.Module):
    """The gated delta rule with its projections, convolution, norm and gates.

    Attributes:
        rates: projection to the logits x_t w_b of b_t, and with one decay per head also to x_t w_a.
        log_rate: A, the logarithm of the decay rate, (H,).
        step: offset s in the argument of softplus, (H,), or (H D,) with one decay per channel.
        decay: low-rank projection W_f1 W_f2 for one decay per channel; None with one decay per head.
        opened: activation of the output gate.
    """

    def __init__(self, mixer: DeltaMixer, width: int, heads: int, eps: float) -> None:
        super().__init__()
        self.heads = mixer.heads or heads
        self.key_heads = mixer.key_heads or self.heads
        self.key_width = mixer.key_width or width // heads
        self.value_width = mixer.value_width or self.key_width
        self.rows = (*[self.key_heads * self.key_width] * 2, self.heads * self.value_width)
        self.qkv = nn.Linear(width, sum(self.rows), bias=False)
        self.conv = nn.Conv1d(sum(self.rows), sum(self.rows), mixer.conv, groups=sum(self.rows), bias=False)
        by_channel, steps = mixer.kind == "kimi_delta", self.heads
        self.decay, self.opened = None, F.silu
        if by_channel:
            steps, self.opened = self.heads * self.key_width, torch.sigmoid
            self.decay = bottleneck(width, self.value_width, steps)
            self.gate = bottleneck(width, self.value_width, self.rows[2])
        else:
            self.gate = nn.Linear(width, self.rows[2], bias=False)
        self.rates = nn.Linear(width, (1 if by_channel else 2) * self.heads, bias=False)
        self.log_rate = nn.Parameter(torch.empty(self.heads))
        self.step = nn.Parameter(torch.empty(steps))
        self.norm = HeadNorm(self.value_width, eps=eps)
        self.out = nn.Linear(self.rows[2], width, bias=False)
        self.starts = {"log_rate": functools.partial(log_uniform_rate, RATES[mixer.kind]), "step": step_of_log_uniform}

    def inputs(
        self, x_BLE: Tensor, recent_BCW: Tensor | None, padded_BL: Tensor | None = None
    ) -> tuple[RuleInputs, Tensor]:
        """Compute the arguments of the delta rule, and the convolution inputs that later positions need.

        The latter are the convolution inputs at the last W - 1 positions, (B, C, W - 1).

        Args:
            x_BLE: input of the token mixer.
            recent_BCW: convolution inputs at the previous W - 1 positions; None means zero, at the start of a sequence.
            padded_BL: bool, True at padding before a sequence, where the convolution inputs are set to 0 and the state
                does not change; None without padding.
        """
        channels_BCL, before = self.qkv(x_BLE).transpose(1, 2), self.conv.kernel_size[0] - 1
        if padded_BL is not None:
            channels_BCL = channels_BCL.masked_fill(padded_BL[:, None], 0)
        if recent_BCW is None:
            channels_BCL = F.pad(channels_BCL, (before, 0))
        else:
            channels_BCL = torch.cat((recent_BCW, channels_BCL), dim=2)
        q, k, v = F.silu(self.conv(channels_BCL)).transpose(1, 2).split(self.rows, dim=-1)
        dtype = accumulate_dtype(x_BLE.dtype)
        q_BHLD, k_BHLD = (self._normed(part.to(dtype)) for part in (q, k))
        v_BHLV = v.unflatten(-1, (self.heads, -1)).transpose(1, 2)
        rate_BHL, size_H1 = self.rates(x_BLE).transpose(1, 2).to(dtype), -self.log_rate.to(dtype).exp()[:, None]
        if self.decay is None:
            rate_BHL, step_BHL = rate_BHL.chunk(2, dim=1)
            log_decay = size_H1 * F.softplus(step_BHL + self.step.to(dtype)[:, None])
        else:
            # Softplus precedes the transpose: for mixed strides, PyTorch's meta kernel of its backward pass is wrong.
            step_BLC = F.softplus(self.decay(x_BLE).to(dtype) + self.step.to(dtype))
            log_decay = size_H1[..., None] * step_BLC.unflatten(-1, (self.heads, -1)).transpose(1, 2)
        rate_BHL = rate_BHL.sigmoid()
        if padded_BL is not None:
            rate_BHL = rate_BHL.masked_fill(padded_BL[:, None], 0)
        inputs = RuleInputs(q_BHLD / math.sqrt(self.key_width), k_BHLD, v_BHLV, log_decay, rate_BHL)
        return inputs, channels_BCL[:, :, channels_BCL.shape[2] - before :]

    def rule(self, inputs: RuleInputs, state_BHDV: Tensor | None) -> tuple[Tensor, Tensor]:
        """Compute the delta rule's output (B, H, L, V), and its state (B, H, D, V) after the last position.

        Args:
            state_BHDV: state before the first position; None means zero.
        """
        with torch.autocast(inputs.q_BHLD.device.type, enabled=False):
            by_fla = fla_kernels.serves(inputs.q_BHLD, inputs.v_BHLV)
            return (fla_kernels.gated_delta_by_fla if by_fla else gated_delta)(*inputs, state_BHDV)

    def output(self, out_BHLV: Tensor, x_BLE: Tensor) -> Tensor:
        """Compute the update of the residual stream from the delta rule's output and the token mixer's input."""
        gate_BHLV = self.gate(x_BLE).unflatten(-1, (self.heads, -1)).transpose(1, 2)
        return self.out((self.norm(out_BHLV) * self.opened(gate_BHLV)).transpose(1, 2).flatten(2))

    def _normed(self, x_BLC: Tensor) -> Tensor:
        """Return queries or keys normalised to length 1, repeated for the value heads: (B, H, L, D)."""
        x_BGLD = x_BLC.unflatten(-1, (self.key_heads, -1)).transpose(1, 2)
        x_BGLD = x_BGLD * torch.rsqrt(x_BGLD.square().sum(-1, keepdim=True) + UNDER_ROOT)
        return x_BGLD.repeat_interleave(self.heads // self.key_heads, dim=1)


def bottleneck(width: int, rank: int, rows: int) -> nn.Sequential:
    """Build a low-rank projection: two linear layers without bias."""
    return nn.Sequential(nn.Linear(width, rank, bias=False), nn.Linear(rank, rows, bias=False))


def log_uniform_rate(rates: tuple[float, float], tensor: Tensor, stream: torch.Generator) -> None:
    """Initialise A, in place, with logarithms of numbers drawn uniformly from the range `rates`."""
    tensor.uniform_(*rates, generator=stream).log_()


def step_of_log_uniform(tensor: Tensor, stream: torch.Generator) -> None:
    """Initialise s, in place, such that softplus(s) is log-uniform in the range STEPS."""
    low, high = (math.log(step) for step in STEPS)
    tensor.uniform_(low, high, generator=stream).exp_().expm1_().log_()
