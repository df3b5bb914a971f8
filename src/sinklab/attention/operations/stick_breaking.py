"""Stick-breaking attention (2410.17980): every key takes a share of what the keys after it have left."""

from collections.abc import Iterator
from typing import ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from sinklab.attention import blocks as bl
from sinklab.attention.importance import Rows
from sinklab.attention.operations.base import OperationPart
from sinklab.attention.operations.call import Call
from sinklab.attention.reference import Explicit
from sinklab.attention.stick import OtherKeys, block_rows, break_sticks
from sinklab.schema import Example


class StickRest(nn.Module):
    """The value of the rest of every head (H, V)."""

    def __init__(self, heads: int, value_width: int) -> None:
        super().__init__()
        self.value = nn.Parameter(torch.zeros(heads, value_width))
        self.initial = {"value": (0.0, 0.0)}


class StickBreaking(OperationPart):
    """A_ts = sigmoid(z_ts) prod over s < j < t of (1 - sigmoid(z_tj)): shares of what is left (2410.17980).

    The query's own key takes no part, and whatever a mask lets a query see breaks the stick in the order of positions,
    the last one first. What no key takes is an implicit sink, 1 - sum of A, and is reported as the share of a bias;
    with it rows sum to one. What it carries: nothing, as the paper's formula has it; the query's own value, as its
    released model (`sb_remainder` in github.com/IBM/dolomite-engine, `sb_dolomite`); or a learned vector per head that
    starts at zero, as its later code (`head_bias`, followed there by a norm per head, which is not part of this).
    Biases that are keys or logits are refused: there is no row sum to join, and the rest is last in line already.
    """

    kind: Literal["stick_breaking"] = "stick_breaking"
    rest: Literal["dropped", "own", "learned"] = Field(
        default="dropped",
        description="what the rest carries: nothing, the query's own value, a learned vector per head",
    )
    sequential: ClassVar[bool] = True
    examples: ClassVar = {
        "stick_breaking": Example(),
        "stick_breaking_rest_own": Example({"rest": "own"}),
        "stick_breaking_rest_learned": Example({"rest": "learned"}),
    }

    @property
    def sums_to_one(self) -> bool:
        return True

    @property
    def only_values(self) -> bool:
        return self.rest != "learned"

    def parameters(
        self, heads: int, head_width: int, value_width: int, layer: int, context: int | None
    ) -> nn.Module | None:
        return StickRest(heads, value_width) if self.rest == "learned" else None

    def output(self, call: Call, v_BGTV: Tensor) -> Tensor:
        mask, eager = OtherKeys(call.mask), call.backend == "eager"
        out, rest_BHT = break_sticks(call.q_BHTD, call.k_BGTD, v_BGTV, call.score(), mask, eager=eager)
        if self.rest == "dropped":
            return out
        if isinstance(call.learned, StickRest):
            carried = call.learned.value[:, None].to(out.dtype)
        else:
            carried = v_BGTV[:, :, call.first :].repeat_interleave(out.shape[1] // v_BGTV.shape[1], 1)
        return out + rest_BHT[..., None].to(out.dtype) * carried

    @torch.no_grad()
    def rows(self, call: Call) -> Iterator[Rows]:
        mask = OtherKeys(call.mask)
        for block in bl.blocks(call.q_BHTD, call.k_BGTD, mask):
            yield Rows(block, *block_rows(call.q_BHTD, call.k_BGTD, block, call.score(), mask))

    def row_sums(self, call: Call) -> Tensor:
        return call.q_BHTD.new_ones(call.q_BHTD.shape[:3])

    def reference(self, given: Explicit) -> Tensor:
        z = given.logits()
        own = torch.eye(z.shape[-1], dtype=torch.bool, device=z.device)
        left, shares = torch.ones_like(z[..., 0]), []
        for s in reversed(range(z.shape[-1])):
            shares.append(torch.where(own[:, s], 0, left * torch.sigmoid(z[..., s])))
            left = torch.where(own[:, s], left, left * torch.sigmoid(-z[..., s]))
        return torch.stack([left, *reversed(shares)], dim=-1)

    def reference_output(self, given: Explicit, out_BHTV: Tensor) -> Tensor:
        rest = self.reference(given)[..., :1]
        if self.rest == "own":
            return out_BHTV + rest * given.v_BHTV
        if isinstance(given.learned, StickRest):
            return out_BHTV + rest * given.learned.value[:, None]
        return out_BHTV
