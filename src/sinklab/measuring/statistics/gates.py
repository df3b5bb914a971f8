"""Statistics of gates, which scale the attention output of a head or its values (2505.06708).

Published by hand for the models of that paper: github.com/rajo69, Gate-Sparsity-and-Functional-Sensitivity (mean, share
below 0.1, the first token against the others, by layer and head). Forget gates, whose product biases the scores, are
no such gates.
"""

from abc import ABC, abstractmethod

from torch import Tensor

from sinklab.measuring.statistics.plot_specs import BlockLines, Column, HeadMap
from sinklab.measuring.statistics.statistic_base import Statistic

CLOSED = 0.1
"""Below it a gate is nearly closed."""


class OfGates(Statistic, ABC):
    """A statistic of the gates of every token."""

    axes = "LHT"

    @abstractmethod
    def read(self, gates_BHTX: Tensor, /) -> Tensor:
        """The value of every head and token (B, H, T), of gates in (0, 1): X channels, or one."""


class GateMean(OfGates):
    """Of token t the mean over channels of the gate g_t, after its sigmoid; 1 in a layer without gates."""

    fields = ("gate_first", "gate_rest")
    column = Column("gate", 3)
    figures = (
        BlockLines(
            "gates",
            "Gates of the attention",
            "Gate on the attention output (or on the values) of a head, after its sigmoid, at the first token (solid) "
            "and as a mean over the others (dashed), mean over channels, heads, sequences and seeds. A head with a "
            "small gate adds little to the residual stream, and needs no sink for that.",
            "Gate",
        ),
        HeadMap(
            "gates-heads",
            "Gates of the first token by head",
            "Mean over channels and sequences of the gate at the first token.",
            "gate",
        ),
    )

    def read(self, gates_BHTX: Tensor) -> Tensor:
        return gates_BHTX.mean(-1)


class ClosedGates(OfGates):
    """Of token t the share of channels (of one gate per head: 0 or 1) with g_t < 0.1; 0 in a layer without gates."""

    fields = ("gate_closed_first", "gate_closed_rest")
    column = Column("gate < 0.1", 2)
    figures = (
        BlockLines(
            "gates-closed",
            "Closed gates",
            f"Share of the gates below {CLOSED:g}, at the first token (solid) and of the others (dashed), mean over "
            "heads, sequences and seeds.",
            "Share",
        ),
    )

    def read(self, gates_BHTX: Tensor) -> Tensor:
        return (gates_BHTX < CLOSED).to(gates_BHTX.dtype).mean(-1)
