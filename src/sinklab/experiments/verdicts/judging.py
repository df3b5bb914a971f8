"""From the runs of an experiment's cells to a verdict on each of its claims (docs/verdicts.md)."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from sinklab.experiments.claims import (
    Alike,
    Appears,
    Check,
    Claim,
    Differs,
    Diverges,
    Equal,
    Monotone,
    Precedes,
    SameOrder,
    StandsAt,
    Within,
)
from sinklab.experiments.definition import PAPER_SCALES, Experiment, Scale
from sinklab.experiments.documents import JudgedClaim, Verdict
from sinklab.experiments.published import Published
from sinklab.experiments.results import CellResults
from sinklab.experiments.verdicts.bounded import judge_appears, judge_stands_at, judge_within
from sinklab.experiments.verdicts.comparing import (
    Adjusted,
    judge_alike,
    judge_differs,
    judge_equal,
    judge_monotone,
    judge_precedes,
)
from sinklab.experiments.verdicts.evidence import Evidence, Finding
from sinklab.experiments.verdicts.families import adjusted_p
from sinklab.experiments.verdicts.ordering import judge_same_order
from sinklab.experiments.verdicts.recorded import RecordedSpreads, shipped_spreads, spreads_for
from sinklab.experiments.verdicts.wording import number, seeds, unit


def judge(
    experiment: Experiment,
    scale: Scale,
    results: Mapping[str, CellResults],
    spreads: RecordedSpreads | None = None,
) -> list[JudgedClaim]:
    """A verdict on each claim that the experiment makes at a scale.

    Args:
        results: by cell; cells of other experiments are left alone.
        spreads: recorded earlier, for experiments without replicates; those that come with sinklab unless given.
    """
    evidence = evidence_of(experiment, scale, results, spreads)
    published = experiment.published if scale in PAPER_SCALES else None
    return judge_claims(experiment.claims_at(scale), evidence, experiment.id, scale, published)


def judge_claims(
    claims: Sequence[Claim], evidence: Evidence, experiment: str, scale: str, published: Published | None = None
) -> list[JudgedClaim]:
    """A verdict on each of these claims.

    Args:
        experiment: id of the one that makes them.
        scale: that the verdicts carry, and say nothing beyond.
        published: what our numbers are held against; None away from the paper's own scale.
    """
    ready = [claim for claim in claims if not _waits_for(claim.check, evidence)]
    adjusted = adjusted_p(ready, evidence)
    return [
        _judged(claim, evidence, adjusted, published).model_copy(update={"experiment": experiment, "scale": scale})
        for claim in claims
    ]


def evidence_of(
    experiment: Experiment, scale: Scale, results: Mapping[str, CellResults], spreads: RecordedSpreads | None = None
) -> Evidence:
    """The runs of an experiment's cells at a scale, and the spreads that may be used where these have none."""
    own = {cell: results[cell] for cell in experiment.cells_at(scale) if cell in results}
    runs = [run for cell in own.values() for run in cell.numbers]
    return Evidence(own, spreads_for(experiment, scale, runs, spreads or shipped_spreads()))


def _judged(claim: Claim, evidence: Evidence, adjusted: Adjusted, published: Published | None) -> JudgedClaim:
    name = quantity_of(claim.check)
    judged = JudgedClaim(id=claim.id, text=claim.text, cells=list(claim.check.cells), quantity=name)
    if waiting := _waits_for(claim.check, evidence):
        return judged.model_copy(update={"verdict": "not run", "evidence": waiting})
    found = _found(claim.check, evidence, adjusted)
    if found.holds and published and name and not _is_of_a_step(claim.check):
        found = _with_published(found, published, name, claim.check.cells, evidence)
    said = "; ".join(filter(None, [found.said, found.note, *_failures(claim.check, evidence)]))
    verdict = _verdict(found)
    return judged.model_copy(update={"verdict": verdict, "evidence": said, "seeds_needed": found.seeds_needed})


def _verdict(found: Finding) -> Verdict:
    if found.holds is None:
        return "inconclusive"
    if not found.holds:
        return "contradicted"
    return "reproduced" if found.size else "direction only"


def _found(check: Check, evidence: Evidence, adjusted: Adjusted) -> Finding:
    match check:
        case Within():
            return judge_within(check, evidence)
        case Differs():
            return judge_differs(check, evidence, adjusted)
        case Equal():
            return judge_equal(check, evidence)
        case Alike():
            return judge_alike(check, evidence)
        case Monotone():
            return judge_monotone(check, evidence)
        case SameOrder():
            return judge_same_order(check, evidence)
        case StandsAt():
            return judge_stands_at(check, evidence)
        case Appears():
            return judge_appears(check, evidence)
        case Precedes():
            return judge_precedes(check, evidence, adjusted)
        case Diverges():
            return _judge_diverges(check, evidence)


def _judge_diverges(check: Diverges, evidence: Evidence) -> Finding:
    """Every seed failed, every seed trained, or some of both."""
    trained, failed = len(evidence.runs(check.cell)), evidence.results[check.cell].failed
    said = f"{check.cell}: {failed} of {seeds(trained + failed)} did not train"
    if trained and failed:
        return Finding(None, said)
    return Finding(bool(failed) == (check.kind == "diverges"), said)


def quantity_of(check: Check) -> str:
    """The name of the number that a claim is about; empty where it is about none."""
    match check:
        case Within() | Differs() | Equal() | Alike() | Monotone() | SameOrder():
            return check.value
        case StandsAt():
            return f"sink_{check.position}"
        case Appears():
            return "sink_1"
        case Precedes():
            return check.then
        case Diverges():
            return ""


def _is_of_a_step(check: Check) -> bool:
    """Whether it is about numbers before the end, of which none are published."""
    return isinstance(check, Appears | Precedes) or (not isinstance(check, StandsAt | Diverges) and bool(check.at_step))


def _waits_for(check: Check, evidence: Evidence) -> str:
    """What has to be run before a claim can be judged, in words; empty where nothing has."""
    said = []
    for cell in check.cells:
        failed = evidence.results[cell].failed if cell in evidence.results else 0
        if not evidence.runs(cell) and not (isinstance(check, Diverges) and failed):
            said.append(f"{cell} did not train at {seeds(failed)}" if failed else f"{cell} has no finished run")
    return "; ".join(said)


def _failures(check: Check, evidence: Evidence) -> list[str]:
    """The seeds of its cells that did not train and are left out."""
    if isinstance(check, Diverges):
        return []
    failed = {cell: evidence.results[cell].failed for cell in check.cells}
    return [f"{seeds(count)} of {cell} did not train and {'is' if count == 1 else 'are'} left out"
            for cell, count in failed.items() if count]  # fmt: skip


def _with_published(
    found: Finding, published: Published, name: str, cells: Sequence[str], evidence: Evidence
) -> Finding:
    """An established claim, and whether the paper's own numbers lie where one more seed of ours would."""
    seen, said, size = evidence.of(name), [found.said], found.size
    for cell in cells:
        value = published.numbers_of(cell).get(name)
        if value is None or cell not in seen.by_cell:
            continue
        low, high = seen.mean_of(cell).prediction()
        lies = low <= seen.compared(value, cell) <= high
        size = size and lies
        limits = ", ".join(number(seen.turned_back(y, cell), seen.quantity) for y in (low, high))
        where = "within" if lies else "outside"
        said.append(
            f"the paper's {value:g}{unit(seen.quantity)} of {cell} lies {where} the prediction interval [{limits}]"
        )
    return replace(found, said="; ".join(said), size=size)
