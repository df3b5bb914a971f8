"""Scalable softmax (2501.19399): scores are multiplied by s log n, so that attention stays sharp in long sequences."""

from typing import ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from sinklab.attention.operations.base import LogSimilarity, Normalisation
from sinklab.attention.operations.call import Call
from sinklab.attention.reference import Explicit
from sinklab.attention.scores import Apart, Score
from sinklab.schema import Example


class Temperature(nn.Module):
    """Factor s log n + b of the scores, learned per head.

    Attributes:
        scale: learned s, (H,).
        offset: learned b, (H,), or None.
    """

    def __init__(self, heads: int, start: float, offset: float | None) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.full((heads,), start))
        self.offset = None if offset is None else nn.Parameter(torch.full((heads,), offset))
        self.initial = {"scale": (start, 0.0)} | ({} if offset is None else {"offset": (offset, 0.0)})

    def forward(self, keys_BT: Tensor) -> Tensor:
        """Compute the factor (B, H, T) from the number of visible keys of each query, in the dtype of `keys_BT`."""
        factor_BHT = self.scale.to(keys_BT.dtype)[:, None] * keys_BT.log()[:, None]
        return factor_BHT if self.offset is None else factor_BHT + self.offset.to(keys_BT.dtype)[:, None]


class ScalableSoftmax(LogSimilarity):
    """Scalable softmax: softmax((s_h log n_t) z_ts), s learned per head, n_t the number of visible keys (2501.19399).

    n includes every visible key, a bias key and a sink logit. z includes softcap and position bias. `offset` enables
    the paper's variant softmax((s_h log n_t + b_h) z_ts), which according to the paper generalises less well to long
    contexts. The default start is the inverse of the mean of log n for n = 1 .. 1024, so that the initial scale is
    about that of softmax. Only the abstract and the formulas of the paper were available; its initial b is unknown.
    """

    kind: Literal["scalable_softmax"] = "scalable_softmax"
    start: float = Field(default=0.168, description="initial s; default: 1 / mean of log n, n = 1 .. 1024")
    offset: float | None = Field(default=None, description="initial b, learned per head; null: no b")
    examples: ClassVar = {"scalable_softmax": Example(), "scalable_softmax_offset": Example({"offset": 0.5})}

    @property
    def sums_to_one(self) -> bool:
        return True

    def parameters(self, heads: int, head_width: int, value_width: int, layer: int, context: int | None) -> nn.Module:
        return Temperature(heads, self.start, self.offset)

    def normalisation(self, call: Call) -> Normalisation:
        assert isinstance(call.learned, Temperature)
        first = call.first

        def scaled(z: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor, factor_BHT: Tensor) -> Tensor:
            return z * factor_BHT[b, h, q - first]

        factor_BHT = call.learned(call.keys_per_row())
        return Normalisation(Score(scaled, (factor_BHT,), apart=Apart(None, factor_BHT)))

    def reference(self, given: Explicit) -> Tensor:
        assert isinstance(given.learned, Temperature)
        seen = given.seen()
        factor = given.learned.scale[:, None, None] * torch.log(seen.sum(-1, keepdim=True).double())
        if given.learned.offset is not None:
            factor = factor + given.learned.offset[:, None, None]
        scaled = given.logits().masked_fill(~seen, 0) * factor
        return torch.softmax(scaled.masked_fill(~seen, -torch.inf), -1)
