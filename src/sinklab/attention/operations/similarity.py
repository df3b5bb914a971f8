"""Softmax and its relatives: a similarity of each score alone, divided by its row sum, by a p-norm, or not at all."""

from abc import abstractmethod
from dataclasses import replace
from typing import ClassVar, Literal, Self

import torch
import torch.nn.functional as F
from pydantic import Field, model_validator
from torch import Tensor

from sinklab.attention.operations.base import LogSimilarity, Weighing
from sinklab.attention.operations.call import Call
from sinklab.attention.reference import Explicit, over_norm
from sinklab.attention.scores import Score, compose, log_elu_plus_one, log_relu, log_sigmoid, times
from sinklab.schema import Example, NeutralExample

NORM = "p: divide by (sum_s sim_ts ** p) ** (1 / p); 1 is the plain row sum"


def by_norm(call: Call, similarity: Score | None, p: float) -> Weighing:
    """sim_ts / Z_t with Z_t = (sum_s sim_ts ** p) ** (1 / p) (2410.10781, figure 29)."""
    if p == 1:
        return Weighing(similarity)
    return Weighing(similarity, call.normaliser(compose(similarity, times(p))) / p)


class Softmax(LogSimilarity):
    """A_ts = alpha * exp(z_ts) / (sum_s exp(z_ts) ** p) ** (1 / p) (table 14 left, figure 29)."""

    kind: Literal["softmax"] = "softmax"
    alpha: float = Field(default=1.0, gt=0, description="what the scores of a row sum to")
    p: float = Field(default=1.0, gt=0, description=NORM)
    examples: ClassVar = {
        "softmax_sums_to_2": Example({"alpha": 2.0}),
        "softmax_sums_to_a_tenth": Example({"alpha": 0.1}),
        "softmax_p_half": Example({"p": 0.5}),
        "softmax_p_2": Example({"p": 2.0}, may_diverge=True),
    }
    neutral: ClassVar = {"alpha": NeutralExample("1", {"alpha": 1.0}), "p": NeutralExample("1", {"p": 1.0})}

    @property
    def sums_to_one(self) -> bool:
        return self.plain

    @property
    def passes(self) -> int:
        return 1 if self.p == 1 else 2

    @property
    def plain(self) -> bool:
        return self.alpha == 1 and self.p == 1

    def weigh(self, call: Call) -> Weighing:
        weighing = by_norm(call, None, self.p)
        return replace(weighing, factor=self.alpha)

    def reference(self, given: Explicit) -> Tensor:
        z = given.logits()
        return self.alpha * torch.exp(z) / torch.exp(self.p * z).sum(-1, keepdim=True) ** (1 / self.p)


class Similarity(LogSimilarity):
    """A_ts = sim(z_ts), divided by its row sum or p-norm where `normalised`."""

    normalised: bool = Field(default=False, description="divide by the row sum, so that the scores sum to one")
    p: float = Field(default=1.0, gt=0, description=NORM)

    @model_validator(mode="after")
    def _norm_divides(self) -> Self:
        if self.p != 1 and not self.normalised:
            raise ValueError(f"p {self.p} is the norm that rows are divided by: set normalised to true")
        return self

    @property
    def sums_to_one(self) -> bool:
        return self.normalised and self.p == 1

    @property
    def divides(self) -> bool:
        return self.normalised

    @property
    def passes(self) -> int:
        return 1 if self.p == 1 else 2

    @abstractmethod
    def log_similarity(self) -> Score:
        """log sim(z)."""

    @abstractmethod
    def similarity(self, z: Tensor) -> Tensor:
        """sim(z) for the reference, 0 for a z of -inf."""

    def weigh(self, call: Call) -> Weighing:
        if not self.normalised:
            return Weighing(self.log_similarity(), 0.0)
        return by_norm(call, self.log_similarity(), self.p)

    def reference(self, given: Explicit) -> Tensor:
        similarity = self.similarity(given.logits())
        return over_norm(similarity, self.p) if self.normalised else similarity


class Sigmoid(Similarity):
    """sim(z) = sigmoid(z)."""

    kind: Literal["sigmoid"] = "sigmoid"
    examples: ClassVar = {
        "sigmoid": Example(),
        "sigmoid_normalised": Example({"normalised": True}),
        "sigmoid_p_2": Example({"normalised": True, "p": 2.0}),
    }

    def log_similarity(self) -> Score:
        return log_sigmoid()

    def similarity(self, z: Tensor) -> Tensor:
        return torch.sigmoid(z)


class Elu1(Similarity):
    """sim(z) = elu(z) + 1."""

    kind: Literal["elu1"] = "elu1"
    examples: ClassVar = {
        "elu1": Example(),
        "elu1_normalised": Example({"normalised": True}, may_diverge=True),
    }

    def log_similarity(self) -> Score:
        return log_elu_plus_one()

    def similarity(self, z: Tensor) -> Tensor:
        return F.elu(z) + 1


class Relu(Similarity):
    """sim(z) = relu(z) (2603.11487); a normalised row without a positive score is zero."""

    kind: Literal["relu"] = "relu"
    zero_at_zero: ClassVar[bool] = True
    examples: ClassVar = {"relu": Example(), "relu_normalised": Example({"normalised": True})}

    @property
    def sums_to_one(self) -> bool:
        return False

    def log_similarity(self) -> Score:
        return log_relu()

    def similarity(self, z: Tensor) -> Tensor:
        return F.relu(z)
