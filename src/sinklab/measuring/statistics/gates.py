"""Statistics of gates on the attention output or the values of a head (2505.06708).

github.com/rajo69/Gate-Sparsity-and-Functional-Sensitivity published the same statistics for the models of that paper
(mean gate and share of gates below 0.1, for the first token and the others, by layer and head). Forget gates, which
bias the attention logits, are not included.
"""

from abc import ABC, abstractmethod

from torch import Tensor

from sinklab.measuring.statistics.plot_specs import BlockLines, Column, HeadMap
from sinklab.measuring.statistics.statistic_base import Statistic

CLOSED = 0.1
"""A gate below this value is nearly closed."""


class OfGates(Statistic, ABC):
    """Base class of the statistics of attention gates, with one value per head and token."""

    axes = "LHT"

    @abstractmethod
    def read(self, gates_BHTX: Tensor, /) -> Tensor:
        """Compute the statistic of every head and token (B, H, T) from gates in [0, 1] with X channels (or one)."""


class GateMean(OfGates):
    """Gate g_t of token t, a factor in [0, 1] (sigmoid or V-scale), mean over channels; 1 in a layer without gates."""

    fields = ("gate_first", "gate_rest")
    column = Column("gate", 3)
    figures = (
        BlockLines(
            "gates",
            "Attention gates",
            "Gate, a factor in [0, 1] on the attention output (or on the values) of a head, at the first token (solid) "
            "and at the other tokens (dashed), mean over channels, heads, sequences and seeds. With a small gate, a "
            "head adds little to the residual stream even without a sink.",
            "Gate",
        ),
        HeadMap(
            "gates-heads",
            "Gates of the first token by head",
            "Gate at the first token, mean over channels and sequences.",
            "gate",
        ),
    )

    def read(self, gates_BHTX: Tensor) -> Tensor:
        return gates_BHTX.mean(-1)


class ClosedGates(OfGates):
    """Share of channels of token t with g_t < 0.1 (0 or 1 with one gate per head); 0 in a layer without gates."""

    fields = ("gate_closed_first", "gate_closed_rest")
    column = Column("gate < 0.1", 2)
    figures = (
        BlockLines(
            "gates-closed",
            "Closed gates",
            f"Share of gates below {CLOSED:g}, at the first token (solid) and at the other tokens (dashed), mean over "
            "heads, sequences and seeds.",
            "Share",
        ),
    )

    def read(self, gates_BHTX: Tensor) -> Tensor:
        return (gates_BHTX < CLOSED).to(gates_BHTX.dtype).mean(-1)
