"""Tokens past the first few that heads attend to, or that are like the first token."""

from typing import Annotated

import torch
from pydantic import Field, FiniteFloat
from torch import Tensor

from sinklab.measuring.statistics.declared import Statistic
from sinklab.schema import Part

FIRST_FEW = 4  # positions that are not secondary: sinks of a first token often cover its neighbours
ALIGNED = 0.9  # a hidden state this close to the first token's is like it
STANDS_OUT = 3.0  # and that says something where the first token's norm is so many times that of the others
STRONGEST = 8  # secondary sinks listed

Percent = Annotated[float, Field(ge=0, le=100, allow_inf_nan=False)]


class SecondarySink(Part):
    """A token past the first few that heads attend to, or that is like the first token.

    Attributes:
        sequence, position: of the token, 1-based.
        token: its id.
        heads: percent of (layer, head) pairs with alpha > eps.
        importance: alpha, mean over layers and heads.
        block: after which the first token of the sequence stands out most; None where blocks could not be read.
        alignment: cosine of the token's hidden state and the first token's after that block.
    """

    sequence: int = Field(ge=1)
    position: int = Field(ge=1)
    token: int = Field(ge=0)
    heads: Percent
    importance: FiniteFloat
    block: int | None = Field(ge=0)
    alignment: FiniteFloat | None


class Secondary(Statistic):
    """Percent of sequences with alpha_k > eps at a position k past the first few that half of the queries can see.

    That is at some k of 5 .. T / 2. The strongest such tokens are listed beside it.
    """

    axes = "LH"


class SecondarySearch:
    """Looks for secondary sinks, batch by batch.

    Args:
        eps: threshold of the importance.

    Attributes:
        strongest: those found so far, strongest first.
    """

    def __init__(self, eps: float) -> None:
        self._eps, self._sequences = eps, 0
        self.strongest: list[SecondarySink] = []

    def find(
        self,
        importance_ABHR: Tensor,
        hidden_MBR: Tensor | None,
        alignment_MBR: Tensor | None,
        tokens_BR: Tensor,
        valid_BR: Tensor,
    ) -> Tensor:
        """Take in one batch, on the CPU.

        Args:
            importance_ABHR: alpha per sequence.
            hidden_MBR, alignment_MBR: norms of the residual stream and cosines with the first token; None if unknown.
            tokens_BR: ids.
            valid_BR: bool, False past the end of a sequence.

        Returns:
            100 where a head has a secondary sink in a sequence, else 0 (A, B, H).
        """
        position_R = torch.arange(1, valid_BR.shape[1] + 1)
        count_B1 = valid_BR.sum(1, keepdim=True)
        candidate_BR = (position_R > FIRST_FEW) & (2 * position_R <= count_B1)
        above_ABHR = (importance_ABHR > self._eps) & candidate_BR[:, None]
        heads_BR, mean_BR = 100 * above_ABHR.double().mean((0, 2)), importance_ABHR.double().mean((0, 2))
        place_B = None
        alike_BR = torch.zeros_like(candidate_BR)
        if alignment_MBR is not None and hidden_MBR is not None:
            others_MB = torch.where(valid_BR, hidden_MBR, 0)[..., 1:].sum(-1) / (count_B1[:, 0] - 1).clamp(min=1)
            ratio_B, place_B = (hidden_MBR[..., 0] / others_MB.clamp(min=1e-30)).max(0)
            aligned_BR = alignment_MBR[place_B, torch.arange(len(place_B))]
            alike_BR = (aligned_BR > ALIGNED) & (ratio_B >= STANDS_OUT)[:, None] & candidate_BR
        for b, at in ((heads_BR > 0) | alike_BR).nonzero().tolist():
            block = None if place_B is None else int(place_B[b])
            self.strongest.append(
                SecondarySink(
                    sequence=self._sequences + b + 1,
                    position=at + 1,
                    token=int(tokens_BR[b, at]),
                    heads=float(heads_BR[b, at]),
                    importance=float(mean_BR[b, at]),
                    block=block,
                    alignment=None if block is None or alignment_MBR is None else float(alignment_MBR[block, b, at]),
                )
            )
        self.strongest.sort(key=lambda one: (-one.heads, -one.importance, one.sequence, one.position))
        del self.strongest[STRONGEST:]
        self._sequences += len(valid_BR)
        return 100.0 * above_ABHR.any(-1)
