"""Differential attention (2410.05258): the difference of two softmaxes over the two halves of every head."""

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Annotated, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from sinklab.attention.biases import ExtraKey
from sinklab.attention.importance import Rows
from sinklab.attention.operations.base import OperationPart
from sinklab.attention.operations.call import Call
from sinklab.attention.query_blocks import accumulate_dtype
from sinklab.attention.reference import Explicit
from sinklab.schema import Example


class Lambda(nn.Module):
    """Parameters of a layer: lambda = exp(l_q1.l_k1) - exp(l_q2.l_k2) + lambda_init, and the head output norm.

    Attributes:
        lambda_init: constant term of lambda.
    """

    def __init__(self, head_width: int, lambda_init: float) -> None:
        super().__init__()
        self.lambda_init = lambda_init
        self.q1, self.k1, self.q2, self.k2 = (nn.Parameter(torch.randn(head_width // 2) * 0.1) for _ in range(4))
        self.initial = dict.fromkeys(("q1", "k1", "q2", "k2"), (0.0, 0.1))
        self.norm = nn.RMSNorm(head_width, eps=1e-5)

    def forward(self) -> Tensor:
        return torch.exp(self.q1 @ self.k1) - torch.exp(self.q2 @ self.k2) + self.lambda_init


class Differential(OperationPart):
    """Differential attention: A = softmax(z1) - lambda softmax(z2), out = (1 - lambda_init) RMSNorm(A v).

    z1 and z2 are the scores of the two halves of q and k: RoPE and qk_norm are applied to each half separately, and
    scores are scaled by 1 / sqrt(d_h / 2). Both halves share values, mask, softcap and position bias. The norm is over
    the head width, with eps 1e-5 and one weight vector for all heads of a layer. A bias key is split like the other
    keys and is part of both softmaxes, as is a sink logit. No setting makes it equal to softmax.
    """

    kind: Literal["differential"] = "differential"
    lambda_init: Literal["depth"] | Annotated[float, Field(gt=0, lt=1)] = Field(
        default="depth",
        description="initial weight of the second softmax; depth: 0.8 - 0.6 exp(-0.3 (layer - 1)), layer 1-based, "
        "including layers without attention",
    )
    keys_per_head: ClassVar[int] = 2
    examples: ClassVar = {"differential": Example(), "differential_constant": Example({"lambda_init": 0.8})}

    @property
    def only_values(self) -> bool:
        return False  # because of the norm's weight

    @property
    def passes(self) -> int:
        return 2

    def parameters(self, heads: int, head_width: int, value_width: int, layer: int, context: int | None) -> nn.Module:
        by_depth = 0.8 - 0.6 * math.exp(-0.3 * (layer - 1))
        return Lambda(head_width, by_depth if self.lambda_init == "depth" else self.lambda_init)

    def output(self, call: Call, v_BGTV: Tensor) -> Tensor:
        outs = []
        for half in halves(call):
            out, lse = half.attend(v_BGTV)
            logits = half.bias_logits()
            outs.append(out if logits is None else ExtraKey(logits, half.value_HV).merge(out, lse)[0])
        learned = _learned(call.learned)
        difference = outs[0].to(learned.q1.dtype) - learned() * outs[1].to(learned.q1.dtype)
        return (learned.norm(difference) * (1 - learned.lambda_init)).to(v_BGTV.dtype)

    @torch.no_grad()
    def rows(self, call: Call) -> Iterator[Rows]:
        strength = _learned(call.learned)().to(accumulate_dtype(call.q_BHTD.dtype))
        for one, other in zip(*(half.rows() for half in halves(call)), strict=True):
            weights = one.weights_BHQS.sub_(strength * other.weights_BHQS).abs_()
            total, share = weights.sum(-1), None
            if one.bias_BHQ is not None and other.bias_BHQ is not None:
                share = (one.bias_BHQ - strength * other.bias_BHQ).abs()
                total = total + share
            total = total.masked_fill_(total == 0, 1)
            yield Rows(one.block, weights.div_(total[..., None]), None if share is None else share / total)

    def row_sums(self, call: Call) -> Tensor:
        return (1 - _learned(call.learned)()).expand(call.q_BHTD.shape[:3])

    def reference(self, given: Explicit) -> Tensor:
        learned, half = _learned(given.learned), given.q_BHTD.shape[-1] // 2
        strength = torch.exp((learned.q1 * learned.k1).sum()) - torch.exp((learned.q2 * learned.k2).sum())
        first, second = (torch.softmax(given.logits(part), -1) for part in (slice(0, half), slice(half, None)))
        return first - (strength + learned.lambda_init) * second

    def reference_output(self, given: Explicit, out_BHTV: Tensor) -> Tensor:
        learned = _learned(given.learned)
        root = (out_BHTV.square().mean(-1, keepdim=True) + 1e-5).sqrt()
        return (1 - learned.lambda_init) * learned.norm.weight * out_BHTV / root


def _learned(module: nn.Module | None) -> Lambda:
    assert isinstance(module, Lambda)
    return module


def halves(call: Call) -> tuple[Call, Call]:
    """Return the calls on the first and the second half of every head, scaled by 1 / sqrt(d_h / 2)."""
    width = call.q_BHTD.shape[-1] // 2
    parts = (slice(0, width), slice(width, None))
    first, second = (
        replace(
            call,
            q_BHTD=call.q_BHTD[..., part],
            k_BGTD=call.k_BGTD[..., part],
            key_HD=None if call.key_HD is None else call.key_HD[..., part],
        )
        for part in parts
    )
    return first, second
