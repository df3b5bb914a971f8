"""Secondary sinks: later tokens that have a large importance, or a hidden state aligned with the first token's.

2512.22213 calls a sink secondary if it appears in middle layers, persists over some layers, and its hidden state is
aligned with the first token's. Its code (JeffreyWong20/Secondary-Attention-Sinks, `src/hidden_state_base.py`) requires
a |cosine| above 0.9 in more than 4 but fewer than L - 15 of L layers; layers in which the norm of the first token is
not large are not counted. Here a token is a secondary sink for one of two reasons. Either alpha > eps in some head, or
the cosine is above 0.9 at the block output at which the norm ratio of the first token is largest, and this ratio is at
least 3. All blocks after which the token is aligned are reported.

Positions 2 .. T / 2 are examined, and later positions that at least 16 queries can see. `Details.secondary_rate`, the
percentage with which models are compared, covers positions 5 .. T / 2.
"""

from collections import Counter
from collections.abc import Sequence
from typing import Annotated

import torch
from pydantic import Field, FiniteFloat
from torch import Tensor

from sinklab.measuring.statistics.statistic_base import Statistic
from sinklab.schema import Part

FIRST_FEW = 4  # positions excluded from rates and token counts: a sink on token 1 often includes its neighbours
ALIGNED = 0.9  # cosine above which a hidden state is aligned with the first token's, as in the code of 2512.22213
STANDS_OUT = 3.0  # minimum ratio of the first token's norm to the mean norm of the other tokens
STRONGEST = 8  # maximum length of each list: sinks at the first few positions, later sinks, frequent tokens
ENOUGH = 16
"""Minimum number of queries in alpha: 0.3 over 16 queries is a column sum of 4.8, and the mean column sum is 1."""

Percent = Annotated[float, Field(ge=0, le=100, allow_inf_nan=False)]


class SecondarySink(Part):
    """A later token with a large importance, or a hidden state aligned with the first token's.

    Attributes:
        sequence, position: sequence and position of the token, 1-based; the module docstring has the positions
            that are examined.
        token: token id.
        heads: percentage of (layer, head) pairs with alpha > eps.
        importance: alpha, mean over layers and heads.
        block: block after which the ratio of the first token's norm to the mean norm of the other tokens is largest; 0
            is the embedding. None if blocks cannot be found.
        alignment: cosine between the hidden states of the token and of the first token after `block`; None if blocks
            cannot be found.
        layers: attention layers in which a head has alpha > eps, 1-based.
        alike: blocks after which the cosine of `alignment` is above 0.9; 0 is the embedding. None if blocks cannot be
            found.
    """

    sequence: int = Field(ge=1)
    position: int = Field(ge=1)
    token: int = Field(ge=0)
    heads: Percent
    importance: FiniteFloat
    block: int | None = Field(ge=0)
    alignment: FiniteFloat | None
    layers: list[int]
    alike: list[int] | None


class SecondaryToken(Part):
    """Counts of a token at the examined positions from 5 on (see the module docstring).

    Attributes:
        token: token id.
        sinks: number of occurrences with alpha > eps in some head.
        occurrences: number of all occurrences of the token at these positions, sinks or not.
    """

    token: int = Field(ge=0)
    sinks: int = Field(ge=1)
    occurrences: int = Field(ge=1)


class Secondary(Statistic):
    """Percentage of sequences in which a head has alpha_k > eps at some position k in 5 .. T / 2."""

    axes = "LH"


class SecondarySearch:
    """Search for secondary sinks, batch by batch.

    Args:
        eps: threshold of the importance alpha.

    Attributes:
        strongest: sinks found so far, strongest first: at most 8 at positions 2 .. 4 and 8 at later positions.
    """

    def __init__(self, eps: float) -> None:
        self._eps, self._sequences = eps, 0
        self.strongest: list[SecondarySink] = []
        self._sinks: Counter[int] = Counter()
        self._occurrences: Counter[int] = Counter()

    def tokens(self) -> list[SecondaryToken]:
        """Return the at most 8 tokens that are secondary sinks most often, in descending order."""
        ordered = sorted(self._sinks.items(), key=lambda one: (-one[1], one[0]))[:STRONGEST]
        return [SecondaryToken(token=id, sinks=n, occurrences=self._occurrences[id]) for id, n in ordered]

    def find(
        self,
        importance_ABHR: Tensor,
        hidden_MBR: Tensor | None,
        alignment_MBR: Tensor | None,
        tokens_BR: Tensor,
        valid_BR: Tensor,
    ) -> Tensor:
        """Search one batch, whose tensors are on the CPU; add its sinks to `strongest` and count their tokens.

        Args:
            importance_ABHR: alpha in each of the A attention layers, per sequence; index 0 of axis R is the first real
                token.
            hidden_MBR, alignment_MBR: norms of the hidden states, and cosines with the first token's, at the M places
                of the residual stream: before the first block and after each. None if blocks cannot be found.
            tokens_BR: token ids.
            valid_BR: bool, False past the end of a sequence.

        Returns:
            (A, B, H): 100 if alpha > eps at some position 5 .. T / 2, else 0, by attention layer, sequence and head.
        """
        position_R = torch.arange(1, valid_BR.shape[1] + 1)
        count_B1 = valid_BR.sum(1, keepdim=True)
        past_R, half_BR = position_R > FIRST_FEW, 2 * position_R <= count_B1  # seen by at least half of the queries
        listed_BR = (position_R > 1) & (half_BR | (count_B1 - position_R + 1 >= ENOUGH))
        above_ABHR = (importance_ABHR > self._eps) & listed_BR[:, None]
        heads_BR, mean_BR = 100 * above_ABHR.double().mean((0, 2)), importance_ABHR.double().mean((0, 2))
        self._occurrences.update(tokens_BR[listed_BR & past_R].tolist())
        self._sinks.update(tokens_BR[(heads_BR > 0) & past_R].tolist())
        place_B, aligned_MBR = None, None if alignment_MBR is None else alignment_MBR > ALIGNED
        alike_BR = torch.zeros_like(listed_BR)
        if alignment_MBR is not None and hidden_MBR is not None:
            others_MB = torch.where(valid_BR, hidden_MBR, 0)[..., 1:].sum(-1) / (count_B1[:, 0] - 1).clamp(min=1)
            ratio_B, place_B = (hidden_MBR[..., 0] / others_MB.clamp(min=1e-30)).max(0)
            aligned_BR = (alignment_MBR > ALIGNED)[place_B, torch.arange(len(place_B))]
            alike_BR = aligned_BR & (ratio_B >= STANDS_OUT)[:, None] & listed_BR
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
                    layers=(above_ABHR[:, b, :, at].any(1).nonzero()[:, 0] + 1).tolist(),
                    alike=None if aligned_MBR is None else aligned_MBR[:, b, at].nonzero()[:, 0].tolist(),
                )
            )
        self.strongest.sort(key=lambda one: (-one.heads, -one.importance, one.sequence, one.position))
        self.strongest = first_of_each(self.strongest, STRONGEST)
        self._sequences += len(valid_BR)
        return 100.0 * (above_ABHR & (past_R & half_BR)[:, None]).any(-1)


def first_of_each(sinks: Sequence[SecondarySink], number: int) -> list[SecondarySink]:
    """Return, in order, the first `number` sinks at positions up to 4 and the first `number` at later positions."""
    seen: Counter[bool] = Counter()
    kept = []
    for one in sinks:
        near = one.position <= FIRST_FEW
        seen[near] += 1
        if seen[near] <= number:
            kept.append(one)
    return kept
