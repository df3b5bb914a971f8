"""Whether claims were stated before the runs that judge them began."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import date, datetime
from pathlib import Path

from sinklab.errors import SinklabError
from sinklab.experiments.sweep.asked import AskedExperiment
from sinklab.experiments.sweep.store import found_runs
from sinklab.files import parse_json
from sinklab.train.directory.environment import ENVIRONMENT

BEGUN = "begun"


@dataclass(frozen=True)
class LateClaim:
    """A claim that was stated after a run that judges it had begun.

    Attributes:
        claim: EXPERIMENT.CLAIM.
        runs: by hash, the day on which each of those earlier runs began.
    """

    claim: str
    stated: date
    runs: Mapping[str, date]

    @property
    def said(self) -> str:
        """The same, a sentence."""
        first = min(self.runs.values())
        runs = "one run began" if len(self.runs) == 1 else f"{len(self.runs)} runs began"
        return f"{self.claim} was stated on {self.stated}, and {runs} before, the first on {first}"


def late_claims(asked: Iterable[AskedExperiment], begun: Mapping[str, date]) -> list[LateClaim]:
    """The claims that do not precede their runs; a claim on the day of its runs does, and so does one without a date.

    References are left out: they are checked where the comparison is stated.

    Args:
        begun: the day on which runs began, by hash; runs that are not among them are not looked at.
    """
    return [late for one in asked for late in _late(one, begun)]


def _late(one: AskedExperiment, begun: Mapping[str, date]) -> Iterator[LateClaim]:
    for claim in one.experiment.claims_at(one.scale):
        stated = claim.stated or one.experiment.stated
        if stated is None or claim.same_as:
            continue
        judging = {run for cell in claim.cells if cell in one.cells for run in one.cells[cell].hashes.values()}
        earlier = {run: begun[run] for run in sorted(judging) if run in begun and begun[run] < stated}
        if earlier:
            yield LateClaim(f"{one.experiment.id}.{claim.id}", stated, earlier)


def begun_on(out: Path) -> dict[str, date]:
    """The day (UTC) on which each run in and below a folder began, by hash, where its env.json says so.

    Raises:
        SinklabError: an env.json is damaged.
    """
    found: dict[str, date] = {}
    for run_hash, directory in found_runs(out).items():
        path = directory / ENVIRONMENT
        try:
            said = parse_json(path.read_text(encoding="utf-8")).get(BEGUN)
            if said is not None:
                found[run_hash] = datetime.fromisoformat(said).date()
        except (OSError, ValueError, TypeError) as error:
            raise SinklabError(f"{path} cannot be read: {error}") from error
    return found
