"""Differential attention: the difference of two softmaxes, over halves of a head (2410.05258) or two queries (V2)."""

import math
from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import replace
from typing import Annotated, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from sinklab.attention.biases import with_extra_key
from sinklab.attention.importance import Rows
from sinklab.attention.operations.base import Call, OperationPart
from sinklab.attention.query_blocks import accumulate_dtype
from sinklab.attention.scores import Score
from sinklab.schema import Example


class Lambda(nn.Module):
    """Weight of the second softmax, lambda = exp(l_q1.l_k1) - exp(l_q2.l_k2) + lambda_init, and RMSNorm of the output.

    Calling the module returns lambda, a scalar.

    Attributes:
        q1, k1, q2, k2: learned vectors l_q1, l_k1, l_q2, l_k2, each of half the head width.
        lambda_init: constant term of lambda.
        norm: RMSNorm over the width of each head's output.
    """

    def __init__(self, head_width: int, lambda_init: float) -> None:
        super().__init__()
        self.lambda_init = lambda_init
        self.q1, self.k1, self.q2, self.k2 = (nn.Parameter(torch.randn(head_width // 2) * 0.1) for _ in range(4))
        self.initial = dict.fromkeys(("q1", "k1", "q2", "k2"), (0.0, 0.1))
        self.norm = nn.RMSNorm(head_width, eps=1e-5)

    def forward(self) -> Tensor:
        return torch.exp(self.q1 @ self.k1) - torch.exp(self.q2 @ self.k2) + self.lambda_init


class Difference(OperationPart):
    """Base class of operations A = A1 - w A2; the proxy scores are |A_ts| / sum_j |A_tj|.

    A1 and A2 are the softmaxes of two parts of the queries and keys, or similarities that are not divided by their sum.
    """

    @abstractmethod
    def strength(self, call: Call) -> Tensor:
        """Compute the weight w of the second part, broadcastable to (B, H, T)."""

    def parts(self, call: Call) -> tuple[Call, Call]:
        """Split queries and keys into the calls of the two attention maps."""
        return halves(call)

    def similarity(self, part: Call) -> Score | None:
        """Return the log-similarity of a part, which is not divided by its row sum; None for softmax."""
        return None

    def difference(self, call: Call, v_BGTV: Tensor) -> Tensor:
        """Compute the output A v before any norm, in the dtype of w: (B, H, T, V)."""
        strength, outs = self.strength(call), []
        for part in self.parts(call):
            similarity = self.similarity(part)
            out, lse = part.attend(v_BGTV, similarity)
            logits = part.bias_logits(similarity)
            if logits is not None:
                out, lse = with_extra_key(out, lse, logits, part.value_HV)
            outs.append(out if similarity is None else out * lse.exp()[..., None].to(out.dtype))
        of_value = strength if strength.ndim == 0 else strength[..., None]
        return outs[0].to(strength.dtype) - of_value * outs[1].to(strength.dtype)

    @torch.no_grad()
    def rows(self, call: Call) -> Iterator[Rows]:
        parts = self.parts(call)
        factors = self._factors(call, parts)
        rows = (part.rows(self.similarity(part)) for part in parts)
        for one, other in zip(*rows, strict=True):
            first, second = (factor[..., one.block.rows] for factor in factors)
            weights = one.weights_BHQS.mul_(first[..., None]).sub_(second[..., None] * other.weights_BHQS).abs_()
            total, share = weights.sum(-1), None
            if one.bias_BHQ is not None and other.bias_BHQ is not None:
                share = (first * one.bias_BHQ - second * other.bias_BHQ).abs()
                total = total + share
            total = total.masked_fill_(total == 0, 1)
            yield Rows(one.block, weights.div_(total[..., None]), None if share is None else share / total)

    def row_sums(self, call: Call) -> Tensor:
        first, second = self._factors(call, self.parts(call))
        return first - second

    def _factors(self, call: Call, parts: tuple[Call, Call]) -> tuple[Tensor, Tensor]:
        """Return the row sums of A1 and of w A2, each (B, H, T)."""
        strength = self.strength(call).to(accumulate_dtype(call.q_BHTD.dtype))
        strength_BHT = strength.expand(call.q_BHTD.shape[:3])
        similarities = [self.similarity(part) for part in parts]
        one, other = (
            torch.ones_like(strength_BHT) if similarity is None else part.normaliser(similarity).exp()
            for part, similarity in zip(parts, similarities, strict=True)
        )
        return one, strength_BHT * other


class Differential(Difference):
    """Differential attention: A = softmax(z1) - lambda softmax(z2), out = (1 - lambda_init) RMSNorm(A v).

    z1 and z2 are the scores of the two halves of q and k. RoPE and qk_norm are applied to each half separately, and
    scores are scaled by 1 / sqrt(d_h / 2). Both halves share values, mask, softcap and position bias. The norm is over
    the head width, with eps 1e-5 and one weight vector for all heads of a layer. A bias key is split like the other
    keys. Both softmaxes include the bias key or sink logit. No setting makes the operation equal to softmax.
    """

    kind: Literal["differential"] = "differential"
    lambda_init: Literal["depth"] | Annotated[float, Field(gt=0, lt=1)] = Field(
        default="depth",
        description="constant term of the second softmax's weight, which is near this value initially; "
        "depth: 0.8 - 0.6 exp(-0.3 (layer - 1)), layer 1-based, including layers without attention",
    )
    keys_per_head: ClassVar[int] = 2
    examples: ClassVar = {"differential": Example(), "differential_constant": Example({"lambda_init": 0.8})}

    @property
    def only_values(self) -> bool:
        return False  # because of the norm's weight

    def parameters(self, heads: int, head_width: int, value_width: int, layer: int, context: int | None) -> nn.Module:
        by_depth = 0.8 - 0.6 * math.exp(-0.3 * (layer - 1))
        return Lambda(head_width, by_depth if self.lambda_init == "depth" else self.lambda_init)

    def strength(self, call: Call) -> Tensor:
        return call.learned()

    def output(self, call: Call, v_BGTV: Tensor) -> Tensor:
        learned = call.learned
        return (learned.norm(self.difference(call, v_BGTV)) * (1 - learned.lambda_init)).to(v_BGTV.dtype)


class DifferentialV2(Difference):
    """Differential attention V2: A = softmax(z1) - sigmoid(w_h.x_t) softmax(z2), from two queries per head and one key.

    Source: github.com/microsoft/unilm, Diff-Transformer/Diff-Transformer-V2, and its authors' post of 2026-01-20; there
    is no paper. Head h has two queries of full width, which are query heads 2h and 2h + 1 of the published code. The
    query projection is therefore twice as large. x is the attention input; w is a linear projection to one logit per
    head, without bias. There is no norm and no lambda_init. qk_norm and RoPE are applied to each query separately. Both
    queries share mask, softcap, position bias and attention bias, so both softmaxes include a bias key or sink logit.
    No setting makes the operation equal to softmax.
    """

    kind: Literal["differential_v2"] = "differential_v2"
    queries_per_head: ClassVar[int] = 2
    weighs: ClassVar[bool] = True
    examples: ClassVar = {"differential_v2": Example()}

    def weight_gate(self, width: int, heads: int) -> nn.Module:
        return nn.Linear(width, heads, bias=False)

    def strength(self, call: Call) -> Tensor:
        assert call.weight_BTH is not None
        return call.weight_BTH.to(accumulate_dtype(call.weight_BTH.dtype)).sigmoid().transpose(1, 2)

    def output(self, call: Call, v_BGTV: Tensor) -> Tensor:
        return self.difference(call, v_BGTV).to(v_BGTV.dtype)


def halves(call: Call) -> tuple[Call, Call]:
    """Return two calls: one with the first and one with the second half of every head's query.

    Each half is the query of one softmax. Keys and a bias key are also split in halves, unless they already have the
    width of half a query (V2).
    """
    width = call.q_BHTD.shape[-1] // 2

    def half(part: slice) -> Call:
        of_key = part if call.k_BGTD.shape[-1] > width else slice(None)
        key_HD = None if call.key_HD is None else call.key_HD[..., of_key]
        return replace(call, q_BHTD=call.q_BHTD[..., part], k_BGTD=call.k_BGTD[..., of_key], key_HD=key_HD)

    return half(slice(0, width)), half(slice(width, None))
