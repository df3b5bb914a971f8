"""Optional parts of a measurement: ablations, effect of a replaced token, check of the propositions of 2410.10781."""

from pydantic import Field, FiniteFloat

from sinklab.measuring.activations import MassiveActivation
from sinklab.model.position import PositionKind
from sinklab.schema import Part


class Ablation(Part):
    """Loss and sink rate of a model without and with one ablation (ablations.py).

    Attributes:
        name: name of the ablation, such as "mask_first:4".
        what: description of the ablation.
        first_target: 1-based position, in the unablated sequences, of the first target included in both losses.
        loss_before, loss_after: loss without and with the ablation, nats per token.
        loss_change: loss_after - loss_before.
        sink_rate_before: Sink_1 without the ablation, percent.
        sink_rate_after: Sink_1 with the ablation, percent. For no_bos, position 1 is the first token of the text.
        sink_rate: sink rate by position with the ablation, percent, from position 1.
        sink_max_before, sink_max_after: highest sink rate among positions 1 to T / 2 (highest.py), percent; None if no
            rate is known.
        sink_max_position_before, sink_max_position_after: position of the highest sink rate, 1-based.
        largest_before, largest_after: for zero_massive, the activation with the largest ratio to its block's median in
            the first sequence, including learned tokens, without and with the ablation. None for other ablations.
        still_massive: for zero_massive, whether `largest_after` is massive (`MassiveActivation.is_massive`). None for
            other ablations.
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
    sink_max_before: float | None = Field(ge=0, le=100)
    sink_max_position_before: int | None = Field(ge=1)
    sink_max_after: float | None = Field(ge=0, le=100)
    sink_max_position_after: int | None = Field(ge=1)
    largest_before: MassiveActivation | None = None
    largest_after: MassiveActivation | None = None
    still_massive: bool | None = None

    @property
    def highest_after(self) -> str:
        """Highest sink rate in percent with the ablation at positions 1 to T / 2, and its position: `76.8 at 2`."""
        rate = self.sink_max_after
        return "" if rate is None else f"{rate:.1f} at {self.sink_max_position_after}"

    @property
    def sentences(self) -> list[str]:
        """Description of the ablation and, for zero_massive, a second text on the largest remaining activation."""
        before, after = self.largest_before, self.largest_after
        if before is None or after is None:
            return [self.what]
        if after.is_massive:
            verdict = "there is still a massive activation"
        elif before.is_massive:
            verdict = "no massive activation remains"
        else:
            verdict = "no activation was massive before (above 100 and 1,000 times the median)"
        where = f"position {after.position}" if after.position > 0 else "a learned token before the sequence"
        return [
            self.what,
            f"the largest remaining activation is {after.value:,.1f} (dimension {after.dimension} at {where} "
            f"after layer {after.layer}, {after.ratio_to_median:,.0f} times the median): {verdict}",
        ]


class Mixing(Part):
    """Relative change of the hidden states at later positions when one token is replaced (mixing.py).

    Attributes:
        position: position of the replaced token, 1-based.
        sequences: number of sequences in which the token could be replaced by a different one.
        spread: mean of |h' - h| / |h| over sequences and later positions, before the first block and after each block;
            h are the hidden states with the original token, h' those with the new one.
        spread_without_first: `spread` with the first key hidden from all later queries.
    """

    position: int = Field(ge=2)
    sequences: int = Field(ge=1)
    spread: list[FiniteFloat]
    spread_without_first: list[FiniteFloat]


class Propositions(Part):
    """Proposition of 2410.10781 on a repeated token, and the model's deviation from it (propositions.py).

    Attributes:
        position: kind of the model's positional embedding.
        number: number of the proposition, 1 to 4; None for absolute and learned positions, which no proposition covers.
        statement: text of the proposition, or a statement that none applies.
        tokens: number of tokens checked, each repeated.
        length: length of the repetition, in tokens.
        hidden_deviation: largest |h_t - h_1| / |h_1| of the hidden states h after a block, over tokens, positions t and
            blocks.
        attention_deviation: largest |difference| of an attention weight from the closed form (1/t if no proposition
            applies); None for rotary.
        bound_slack: for rotary, smallest value of (bound - attention weight), negative if a weight exceeds its bound;
            None for other embeddings.
        tolerance: size up to which deviations, and the excess of a weight over its bound, are attributed to rounding.
        dtype: dtype of the hidden states in the check. A model of lower precision is checked in float32 if it can be
            converted (`in_float32`).
        holds: whether the deviations are at most `tolerance` and `bound_slack` is at least -`tolerance`. None
            (inconclusive) if they are not and the dtype has less precision than float32.
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
    dtype: str
    holds: bool | None
