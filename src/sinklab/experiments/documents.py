"""summary.json: what came of an experiment, cell by cell and claim by claim, as it is written and read."""

from pathlib import Path

from pydantic import ConfigDict, Field

from sinklab.files import write_json
from sinklab.schema import ReadDocument


class SeedBySeed(ReadDocument):
    """What each seed of a cell gave: percent of heads, nats per token, ratio."""

    sink_1: list[float]
    sink_bias: list[float] | None
    valid_loss: list[float]
    hidden_norm_ratio_max: list[float]


class CellSummary(ReadDocument):
    """A cell: means over its seeds; what another version has not written is None or empty.

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
    by_seed: SeedBySeed | None = None


class JudgedClaim(ReadDocument):
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


class Summary(ReadDocument):
    """The whole document; empty where there is none."""

    id: str = ""
    title: str = ""
    cells: dict[str, CellSummary] = Field(default_factory=dict)
    claims: list[JudgedClaim] = Field(default_factory=list)

    def save(self, directory: Path) -> None:
        """Write summary.json."""
        write_json(directory / "summary.json", self.model_dump())
