"""Softmax, and operations with an elementwise similarity that is unnormalised or divided by the row sum or a p-norm."""

import math
from abc import abstractmethod
from dataclasses import replace
from typing import ClassVar, Literal, Self

import torch
import torch.nn.functional as F
from pydantic import Field, model_validator
from torch import Tensor, nn

from sinklab.attention.operations.base import LogSimilarity, Normalisation
from sinklab.attention.operations.call import Call
from sinklab.attention.reference import Explicit, over_norm
from sinklab.attention.scores import Apart, Score, compose, log_elu_plus_one, log_relu, log_sigmoid, plus_of_head, times
from sinklab.schema import Example

NORM = "p: divide by (sum_s sim_ts ** p) ** (1 / p); 1 is the plain row sum"


def by_norm(call: Call, similarity: Score | None, p: float) -> Normalisation:
    """Return the normalisation sim_ts / Z_t with Z_t = (sum_s sim_ts ** p) ** (1 / p) (2410.10781, figure 29)."""
    if p == 1:
        return Normalisation(similarity)
    return Normalisation(similarity, call.normaliser(compose(similarity, times(p))) / p)


class Softmax(LogSimilarity):
    """Softmax: A_ts = alpha * exp(z_ts) / (sum_s exp(z_ts) ** p) ** (1 / p) (table 14 left, figure 29)."""

    kind: Literal["softmax"] = "softmax"
    alpha: float = Field(default=1.0, gt=0, description="sum of the scores of a row, for p = 1")
    p: float = Field(default=1.0, gt=0, description=NORM)
    examples: ClassVar = {
        "softmax_sums_to_2": Example({"alpha": 2.0}),
        "softmax_sums_to_a_tenth": Example({"alpha": 0.1}),
        "softmax_p_half": Example({"p": 0.5}),
        "softmax_p_2": Example({"p": 2.0}, may_diverge=True),
    }

    @property
    def sums_to_one(self) -> bool:
        return self.plain

    @property
    def plain(self) -> bool:
        return self.alpha == 1 and self.p == 1

    def normalisation(self, call: Call) -> Normalisation:
        normalisation = by_norm(call, None, self.p)
        return replace(normalisation, factor=self.alpha)

    def reference(self, given: Explicit) -> Tensor:
        z = given.logits()
        return self.alpha * torch.exp(z) / torch.exp(self.p * z).sum(-1, keepdim=True) ** (1 / self.p)


class Similarity(LogSimilarity):
    """Base class of operations with A_ts = sim(z_ts), divided by the row sum or p-norm if `normalised`."""

    normalised: bool = Field(default=False, description="divide by the p-norm of the row; for p 1, scores sum to one")
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

    @abstractmethod
    def similarity(self, given: Explicit) -> Tensor:
        """Compute sim(z) on explicit matrices for `reference`, with sim(-inf) = 0: (B, H, T, S)."""

    def normalisation(self, call: Call) -> Normalisation:
        if not self.normalised:
            return Normalisation(self.log_similarity(call), 0.0)
        return by_norm(call, self.log_similarity(call), self.p)

    def reference(self, given: Explicit) -> Tensor:
        similarity = self.similarity(given)
        return over_norm(similarity, self.p) if self.normalised else similarity


class SigmoidShift(nn.Module):
    """Bias b of the sigmoid, added to every score.

    Attributes:
        start: initial b.
        shift: learned addition to `start` per head (H,), initially 0, so that weight decay pulls b to `start` instead
            of 0; None if b is fixed.
    """

    def __init__(self, start: float, learned_heads: int | None) -> None:
        super().__init__()
        self.start = start
        self.shift = None if learned_heads is None else nn.Parameter(torch.zeros(learned_heads))
        self.initial = {"shift": (0.0, 0.0)}

    def score(self, first: int, queries: int) -> Score:
        """Return the score function z -> z + b, for the given number of queries from position `first` on."""
        start = self.start
        if self.shift is None:
            return Score(lambda z, b, h, q, k: z + start)
        shift_H = start + self.shift

        def by_query(z: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor, shift_HT: Tensor) -> Tensor:
            return z + shift_HT[h, q - first].to(z.dtype)

        # One copy per query, because FlexAttention accumulates gradients of all scores of a head atomically.
        spread = Score(by_query, (shift_H[:, None].repeat(1, queries),))
        return Score(plus_of_head, (shift_H,), apart=Apart(spread))


class Sigmoid(Similarity):
    """Sigmoid attention: sim(z) = sigmoid(z + b), b = 0 unless `shift` is set (2409.04431).

    `context` is the authors' setting, b = -log n with n the training sequence length: `subtract_seq_len_bias` in
    github.com/apple/axlearn, gala_sigmoid.py; `attn_bias` or `sigmoid_bias`, after ALiBi, in
    github.com/apple/ml-sigmoid-attention. `learned` adds a learned number per head, initially 0. `row` is not from the
    paper: n is the number of keys that each query sees, including a bias key, so that initial rows sum to about one. b
    also applies to a bias key and a sink logit. For the authors' hybrid norm, x + norm(attention(norm(x))), set
    `model.norm.placement` to sandwich.
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
        if context is None:
            raise ValueError(
                f"sigmoid attention with shift {self.shift} needs the context: pass context, the training sequence "
                "length, or use shift row"
            )
        return SigmoidShift(-math.log(context), heads if self.shift == "learned" else None)

    def log_similarity(self, call: Call) -> Score:
        shift = None
        if self.shift == "row":
            first = call.first

            def shifted(z: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor, log_keys_BT: Tensor) -> Tensor:
                return z - log_keys_BT[b, q - first]

            shift = Score(shifted, (call.keys_per_row().log(),))
        elif self.shift != "none":
            assert isinstance(call.learned, SigmoidShift)
            shift = call.learned.score(call.first, call.q_BHTD.shape[2])
        return log_sigmoid() if shift is None else shift.then(log_sigmoid())

    def similarity(self, given: Explicit) -> Tensor:
        z = given.logits()
        if self.shift == "none":
            return torch.sigmoid(z)
        if self.shift == "row":
            return 1 / (1 + given.seen().sum(-1, keepdim=True) * torch.exp(-z))
        assert isinstance(given.learned, SigmoidShift)
        learned = given.learned.shift
        return torch.sigmoid(z + given.learned.start + (0.0 if learned is None else learned[:, None, None]))


class Elu1(Similarity):
    """ELU attention: sim(z) = elu(z) + 1 (table 6)."""

    kind: Literal["elu1"] = "elu1"
    examples: ClassVar = {
        "elu1": Example(),
        "elu1_normalised": Example({"normalised": True}, may_diverge=True),
    }

    def log_similarity(self, call: Call) -> Score:
        return log_elu_plus_one()

    def similarity(self, given: Explicit) -> Tensor:
        return F.elu(given.logits()) + 1


class Relu(Similarity):
    """ReLU attention: sim(z) = relu(z) (2603.11487); a normalised row with no positive score is zero."""

    kind: Literal["relu"] = "relu"
    zero_at_zero: ClassVar[bool] = True
    examples: ClassVar = {"relu": Example(), "relu_normalised": Example({"normalised": True})}

    @property
    def sums_to_one(self) -> bool:
        return False

    def log_similarity(self, call: Call) -> Score:
        return log_relu()

    def similarity(self, given: Explicit) -> Tensor:
        return F.relu(given.logits())
