"""summary.json as a report reads it: what came of an experiment, cell by cell and claim by claim."""

from pydantic import ConfigDict, Field

from sinklab.schema import Document


class CellSummary(Document):
    """A cell: means over its seeds; what was not written is None or empty.

    Attributes:
        sink_rate: percent of (sequence, layer, head) triples, position 1 first.
        sink_rate_bias: percent, of a bias, sink logit or sink token.
        valid_loss: nats per token.
        hidden_norm_ratio_max: |h_1| over the mean of the others, in the block where it is largest.
        seeds: runs of the cell.
        seconds: of training, per run.
    """

    sink_rate: list[float | None] = Field(default_factory=list)
    sink_rate_bias: float | None = None
    valid_loss: float | None = None
    hidden_norm_ratio_max: float | None = None
    seeds: int = 1
    seconds: float | None = None


class JudgedClaim(Document):
    """A claim of the experiment (`definition.Claim`) with what the runs say of it.

    Attributes:
        verdict: "reproduced", "not reproduced" or "inconclusive".
        evidence: the numbers that decided it.
    """

    model_config = ConfigDict(coerce_numbers_to_str=True)

    id: str = ""
    text: str = ""
    verdict: str = "inconclusive"
    evidence: str = ""

    @property
    def said(self) -> str:
        """What is claimed."""
        return self.text or self.id


class Summary(Document):
    """The whole document; empty where there is none."""

    cells: dict[str, CellSummary] = Field(default_factory=dict)
    claims: list[JudgedClaim] = Field(default_factory=list)
