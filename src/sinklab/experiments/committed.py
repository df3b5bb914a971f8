"""What five seeds gave: verdicts of committed results, for those who train fewer (`committed.json`)."""

from functools import cache
from importlib import resources

from pydantic import ConfigDict, Field

from sinklab.experiments.documents import JUDGED, JudgedClaim, Summary
from sinklab.files import parse_json
from sinklab.schema import ReadDocument

COMMITTED = "committed.json"


class CommittedVerdict(ReadDocument):
    """A claim as it was judged by five seeds or more."""

    verdict: str
    seeds: int
    evidence: str


class Committed(ReadDocument):
    """committed.json: by scale and EXPERIMENT.CLAIM. Made by `benchmarks/committed.py` from packed results."""

    model_config = ConfigDict(populate_by_name=True)

    schema_version: int = Field(default=1, alias="schema")
    scales: dict[str, dict[str, CommittedVerdict]] = Field(default_factory=dict)


@cache
def shipped_verdicts() -> Committed:
    """Those that come with sinklab; empty where there are none."""
    file = resources.files("sinklab") / "experiments" / COMMITTED
    return Committed.model_validate(parse_json(file.read_text("utf-8"))) if file.is_file() else Committed()


def five_seeds(claim: JudgedClaim, committed: Committed | None = None) -> str:
    """What five seeds or more gave at the same scale, a sentence; empty where there are none.

    Args:
        committed: those that come with sinklab unless given.
    """
    known = (committed or shipped_verdicts()).scales.get(claim.scale, {})
    found = known.get(claim.same_as or f"{claim.experiment}.{claim.id}")
    return f"{found.seeds} seeds before: {found.verdict} ({found.evidence})" if found else ""


def committed_verdicts(summary: Summary) -> dict[str, CommittedVerdict]:
    """What a summary has to say to those who train fewer seeds: its verdicts by EXPERIMENT.CLAIM."""
    return {
        f"{claim.experiment}.{claim.id}": CommittedVerdict(
            verdict=claim.verdict, seeds=claim.seeds, evidence=claim.evidence
        )
        for claim in summary.claims
        if claim.verdict in JUDGED and not claim.same_as and claim.replicate == "seed"
    }
