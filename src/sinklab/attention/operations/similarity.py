"""Softmax, scalable softmax, forgetting attention, and operations with another elementwise similarity.

B batch, H query heads, T queries, L positions, E hidden size.
"""

import math
from abc import abstractmethod
from dataclasses import replace
from typing import ClassVar, Literal, Self

import torch
import torch.nn.functional as F
from pydantic import Field, model_validator
from torch import Tensor, nn

from sinklab.attention.operations import fla_kernels
from sinklab.attention.operations.base import Call, LogSimilarity, Normalisation
from sinklab.attention.query_blocks import accumulate_dtype
from sinklab.attention.scores import (
    FlexScore,
    Score,
    compose,
    log_elu_plus_one,
    log_relu,
    log_sigmoid,
    per_query,
    plus_of_head,
    times,
)
from sinklab.schema import Example

NORM = "exponent of the divisor (sum_s sim_ts ** p) ** (1 / p) with the similarity sim, exp for softmax; 1: the row sum"


def by_norm(call: Call, similarity: Score | None, p: float) -> Normalisation:
    """Return the normalisation sim_ts / Z_t with Z_t = (sum_s sim_ts ** p) ** (1 / p) (2410.10781, figure 29)."""
    if p == 1:
        return Normalisation(similarity)
    return Normalisation(similarity, call.normaliser(compose(similarity, times(p))) / p)


class Softmax(LogSimilarity):
    """Softmax: alpha * exp(z_ts) / (sum_j exp(z_tj) ** p) ** (1 / p) (2410.10781, table 14 left, figure 29)."""

    kind: Literal["softmax"] = "softmax"
    alpha: float = Field(default=1.0, gt=0, description="factor of the attention weights; for p = 1, it is the row sum")
    p: float = Field(default=1.0, gt=0, description=NORM)
    examples: ClassVar = {
        "softmax_sums_to_2": Example({"alpha": 2.0}),
        "softmax_sums_to_a_tenth": Example({"alpha": 0.1}),
        "softmax_p_half": Example({"p": 0.5}),
        "softmax_p_2": Example({"p": 2.0}, may_diverge=True),
    }

    @property
    def plain(self) -> bool:
        return self.alpha == 1 and self.p == 1

    def normalisation(self, call: Call) -> Normalisation:
        normalisation = by_norm(call, None, self.p)
        return replace(normalisation, factor=self.alpha)


class Temperature(nn.Module):
    """Module that computes the factor s log n + b of a query's scores, with s and b per head, n the number of its keys.

    Attributes:
        scale: learned s, (H,).
        offset: learned b, (H,), or None.
    """

    def __init__(self, heads: int, start: float, offset: float | None) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.full((heads,), start))
        self.offset = None if offset is None else nn.Parameter(torch.full((heads,), offset))
        self.initial = {"scale": (start, 0.0)} | ({} if offset is None else {"offset": (offset, 0.0)})

    def forward(self, keys_BHT: Tensor) -> Tensor:
        """Compute the factor, (B, H, T), in the dtype of `keys_BHT`.

        Args:
            keys_BHT: number n of keys that each query sees; its head axis may have size 1.
        """
        factor_BHT = self.scale.to(keys_BHT.dtype)[:, None] * keys_BHT.log()
        return factor_BHT if self.offset is None else factor_BHT + self.offset.to(keys_BHT.dtype)[:, None]


class ScalableSoftmax(LogSimilarity):
    """Scalable softmax: softmax((s_h log n_t) z_ts), s learned per head, n_t the number of visible keys (2501.19399).

    n_t also counts a bias key or sink logit. The factor is applied after softcap and position bias. `offset` enables
    the paper's variant softmax((s_h log n_t + b_h) z_ts), which according to the paper generalises less well to long
    contexts. The default start is 1 / (mean of log n over n = 1 .. 1024), so that the initial scale is about that of
    softmax. Only the abstract and the formulas of the paper were available; its initial b is unknown.
    """

    kind: Literal["scalable_softmax"] = "scalable_softmax"
    start: float = Field(default=0.168, description="initial scale s; default: 1 / mean of log n, n = 1 .. 1024")
    offset: float | None = Field(default=None, description="initial b in the factor s log n + b; null: no b")
    normal: ClassVar[bool] = True
    examples: ClassVar = {"scalable_softmax": Example(), "scalable_softmax_offset": Example({"offset": 0.5})}

    def parameters(self, heads: int, head_width: int, value_width: int, layer: int, context: int | None) -> nn.Module:
        return Temperature(heads, self.start, self.offset)

    def normalisation(self, call: Call) -> Normalisation:
        factor_BHT = call.learned(call.keys_per_row())
        return Normalisation(
            Score(per_query(torch.mul, call.first), (factor_BHT,), for_flex=FlexScore(None, factor_BHT))
        )


class ForgetGate(nn.Linear):
    """Module that computes cumulative log forget gates log f_1 + .. + log f_t per query head, f_t = sigmoid(w.x_t + b).

    Args:
        width: hidden size, the dimension of x.
        heads: number of query heads.
        start: initial b.
    """

    def __init__(self, width: int, heads: int, start: float) -> None:
        super().__init__(width, heads)
        self.initial = {"bias": (start, 0.0)}

    def forward(self, input: Tensor) -> Tensor:
        """Compute the cumulative log gates, (B, L, H), from x, (B, L, E), in float32 (float64 for float64)."""
        gate_BLH = super().forward(input)
        return F.logsigmoid(gate_BLH.to(accumulate_dtype(gate_BLH.dtype))).cumsum(1)


class Forgetting(LogSimilarity):
    """Forgetting attention: softmax(z_ts + sum over s < l <= t of log f_l), f_l = sigmoid(w_h.x_l + b_h) (2503.02130).

    x is the attention input after the norm; there is one gate per query head (`ForgetGate`). The sum is added after
    softcap and position bias. It does not apply to a bias key, a sink logit, or keys later than the query (prefix
    mask). w is initialised like other linear weights, b with `start`. The default is the authors' initial b of 0, so
    that f = 1/2 (github.com/zhixuan-lin/forgetting-transformer, `ForgettingAttentionLayer` with `fgate_type="full"`).
    The authors use no RoPE; here `model.position` decides. Their "pro" block (output gate and norm, shifted keys and
    values, qk_norm) is not implemented.
    """

    kind: Literal["forgetting"] = "forgetting"
    start: float = Field(
        default=0.0, description="initial bias b of the gate f = sigmoid(w.x + b); with a large b, f is almost 1"
    )
    forgets: ClassVar[bool] = True
    normal: ClassVar[bool] = True
    examples: ClassVar = {"forgetting": Example()}

    def forget_gate(self, width: int, heads: int) -> nn.Module:
        return ForgetGate(width, heads, self.start)

    def output(self, call: Call, v_BGTV: Tensor) -> Tensor:
        if fla_kernels.serves_call(call, v_BGTV):
            return fla_kernels.forgetting(call, v_BGTV)
        return super().output(call, v_BGTV)

    def normalisation(self, call: Call) -> Normalisation:
        return Normalisation()


class Similarity(LogSimilarity):
    """Base class of operations with A_ts = sim(z_ts), divided by the p-norm of the row if `normalised`."""

    normalised: bool = Field(
        default=False, description="divide by the p-norm of the row; for p = 1, attention weights then sum to one"
    )
    p: float = Field(default=1.0, gt=0, description=NORM)

    @model_validator(mode="after")
    def _norm_divides(self) -> Self:
        if self.p != 1 and not self.normalised:
            raise ValueError(f"p {self.p} is set, but rows are not divided by a norm: set normalised to true")
        return self

    @property
    def sums_to_one(self) -> bool:
        return self.normalised and self.p == 1

    @property
    def divides(self) -> bool:
        return self.normalised

    @abstractmethod
    def log_similarity(self, call: Call) -> Score:
        """Return the score function z -> log sim(z) for this call."""

    def normalisation(self, call: Call) -> Normalisation:
        if not self.normalised:
            return Normalisation(self.log_similarity(call), 0.0)
        return by_norm(call, self.log_similarity(call), self.p)


class SigmoidShift(nn.Module):
    """Number b that sigmoid attention adds to every score.

    Attributes:
        start: initial b.
        shift: learned addition to `start` per head, (H,), initially 0; None if b is fixed. Weight decay thus pulls b
            towards `start` and not towards 0.
    """

    def __init__(self, start: float, learned_heads: int | None) -> None:
        super().__init__()
        self.start = start
        self.shift = None if learned_heads is None else nn.Parameter(torch.zeros(learned_heads))
        self.initial = {"shift": (0.0, 0.0)}

    def score(self, first: int, queries: int) -> Score:
        """Return the score function z -> z + b for `queries` queries from position `first` on."""
        start = self.start
        if self.shift is None:
            return Score(lambda z, b, h, q, k: z + start)
        shift_H = start + self.shift

        def by_query(z: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor, shift_HT: Tensor) -> Tensor:
            return z + shift_HT[h, q - first].to(z.dtype)

        # One copy per query, because FlexAttention adds up the gradients of all scores of a head atomically.
        spread = Score(by_query, (shift_H[:, None].repeat(1, queries),))
        return Score(plus_of_head, (shift_H,), for_flex=FlexScore(spread))


class Sigmoid(Similarity):
    """Sigmoid attention: sim(z) = sigmoid(z + b), b = 0 unless `shift` is set (2409.04431).

    Values of `shift`: `context` is the authors' setting, b = -log n with n the training sequence length
    (`subtract_seq_len_bias` in github.com/apple/axlearn, gala_sigmoid.py; `attn_bias` or `sigmoid_bias`, after ALiBi,
    in github.com/apple/ml-sigmoid-attention). `learned` is -log n plus a learned number per head, initially 0. `row` is
    not from the paper: n is the number of keys that the query sees, including a bias key or sink logit, so that initial
    rows sum to about one. b also applies to a bias key and a sink logit.

    For the authors' hybrid norm, x + norm(attention(norm(x))), set `model.norm.placement` to sandwich.
    """

    kind: Literal["sigmoid"] = "sigmoid"
    shift: Literal["none", "context", "row", "learned"] = Field(
        default="none",
        description="b in sigmoid(z + b). none: 0; context: -log(model.context); row: -log(number of visible keys); "
        "learned: per head, initialised like context",
    )
    examples: ClassVar = {
        "sigmoid": Example(),
        "sigmoid_normalised": Example({"normalised": True}),
        "sigmoid_p_2": Example({"normalised": True, "p": 2.0}),
        "sigmoid_shifted": Example({"shift": "context"}),
        "sigmoid_shifted_by_row": Example({"shift": "row"}),
        "sigmoid_shift_learned": Example({"shift": "learned"}),
    }

    def parameters(
        self, heads: int, head_width: int, value_width: int, layer: int, context: int | None
    ) -> nn.Module | None:
        if self.shift in ("none", "row"):
            return None
        assert context is not None, f"sigmoid attention with shift {self.shift} needs the context"
        return SigmoidShift(-math.log(context), heads if self.shift == "learned" else None)

    def log_similarity(self, call: Call) -> Score:
        if self.shift == "none":
            return log_sigmoid()
        if self.shift == "row":
            shift = Score(per_query(torch.sub, call.first), (call.keys_per_row().log(),))
        else:
            shift = call.learned.score(call.first, call.q_BHTD.shape[2])
        return shift.then(log_sigmoid())


class Elu1(Similarity):
    """ELU attention: sim(z) = elu(z) + 1 (2410.10781, table 6)."""

    kind: Literal["elu1"] = "elu1"
    examples: ClassVar = {"elu1": Example(), "elu1_normalised": Example({"normalised": True}, may_diverge=True)}

    def log_similarity(self, call: Call) -> Score:
        return log_elu_plus_one()


class Relu(Similarity):
    """ReLU attention: sim(z) = relu(z) (2603.11487). A normalised row without a positive score is zero."""

    kind: Literal["relu"] = "relu"
    zero_at_zero: ClassVar[bool] = True
    examples: ClassVar = {"relu": Example(), "relu_normalised": Example({"normalised": True})}

    @property
    def sums_to_one(self) -> bool:
        return False

    def log_similarity(self, call: Call) -> Score:
        return log_relu()
