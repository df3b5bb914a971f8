"""Optional parts of a measurement: ablations, mixing, and checks of the paper's propositions."""

from typing import Literal

from pydantic import Field, FiniteFloat

from sinklab.measuring.activations import MassiveActivation
from sinklab.measuring.statistics.highest import highest_rate
from sinklab.schema import Part

PositionKind = Literal["none", "relative", "t5", "alibi", "rotary", "absolute", "learnable"]


class Ablation(Part):
    """The effect of one ablation (ablations.py).

    Attributes:
        name: as requested, such as "mask_first:4".
        what: a sentence that describes it.
        first_target: both losses are over the targets from this position of the whole sequences on, 1-based.
        loss_before, loss_after, loss_change: nats per token.
        sink_rate_before: Sink_1 without the ablation, percent.
        sink_rate_after: Sink_1 with it. Without BOS, position 1 is the first token of the text.
        sink_rate: of every position with it, percent, position 1 first.
        sink_max_before, sink_max_after: the highest sink rate of positions 1 to T / 2 (highest.py), percent; None in
            older files, as the others from here on.
        sink_max_position_before, sink_max_position_after: of that rate, 1-based.
        largest_before, largest_after: of zero_massive, the activation of the first sequence that is the largest
            multiple of the median of its block; positions count learned tokens in front of the sequence.
        still_massive: of zero_massive, whether `largest_after` is massive (above 100, and 1,000 times the median).
    """

    name: str
    what: str
    first_target: int = Field(ge=2)
    loss_before: FiniteFloat
    loss_after: FiniteFloat
    loss_change: FiniteFloat
    sink_rate_before: float = Field(ge=0, le=100)
    sink_rate_after: float = Field(ge=0, le=100)
    sink_rate: list[float]
    sink_max_before: float | None = Field(default=None, ge=0, le=100)
    sink_max_position_before: int | None = Field(default=None, ge=1)
    sink_max_after: float | None = Field(default=None, ge=0, le=100)
    sink_max_position_after: int | None = Field(default=None, ge=1)
    largest_before: MassiveActivation | None = None
    largest_after: MassiveActivation | None = None
    still_massive: bool | None = None

    @property
    def highest_after(self) -> str:
        """The highest sink rate with the ablation and its position: `76.8 at 2`; empty if unknown."""
        found = highest_rate(self.sink_rate)
        return "" if found is None else f"{found[1]:.1f} at {found[0]}"

    @property
    def sentences(self) -> list[str]:
        """Description of the ablation and, after `zero_massive`, the largest remaining activation."""
        before, after = self.largest_before, self.largest_after
        if before is None or after is None:
            return [self.what]
        if after.is_massive:
            verdict = "there is still a massive activation"
        elif before.is_massive:
            verdict = "no activation is massive any more"
        else:
            verdict = "no activation was massive before (above 100 and 1,000 times the median)"
        return [
            self.what,
            f"the largest activation is then {after.value:,.1f} (dimension {after.dimension} at position "
            f"{after.position} after layer {after.layer}, {after.ratio_to_median:,.0f} times the median): {verdict}",
        ]


class Mixing(Part):
    """How far a change of one token spreads (mixing.py).

    Attributes:
        position: of the token that was replaced, 1-based.
        sequences: in which it could be replaced by another.
        spread: before the first block and after each: mean of |h' - h| / |h| over sequences and later positions.
        spread_without_first: the same with the first key hidden from all later queries.
    """

    position: int = Field(ge=2)
    sequences: int = Field(ge=1)
    spread: list[FiniteFloat]
    spread_without_first: list[FiniteFloat]


class Propositions(Part):
    """The paper's proposition on a repeated token, and the model's deviation from it (propositions.py).

    Attributes:
        position: the model's positional embedding.
        number: of the proposition, 1 to 4; None for positions that are added to the embedding.
        statement: of the proposition.
        tokens: how many tokens were checked, each repeated.
        length: of the repetition.
        hidden_deviation: the largest |h_t - h_1| over the largest |h_1|, over all blocks.
        attention_deviation: the largest difference from the closed form; None if there is none (rotary).
        bound_slack: the least distance of a score below its bound, negative where one is above; None but for rotary.
        tolerance: for rounding, of the deviations and of a negative slack.
        dtype: of the check: float32 for models that are coarser, if the memory sufficed; None in older files.
        holds: whether they are within it; None if they are not and the dtype is coarser than float32, which is no
            evidence.
    """

    position: PositionKind
    number: int | None
    statement: str
    tokens: int = Field(ge=1)
    length: int = Field(ge=2)
    hidden_deviation: FiniteFloat
    attention_deviation: FiniteFloat | None
    bound_slack: FiniteFloat | None
    tolerance: FiniteFloat
    dtype: str | None = None
    holds: bool | None
