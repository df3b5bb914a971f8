"""From the runs of an experiment's cells to a verdict on each of its claims (docs/verdicts.md)."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from statistics import fmean, stdev

from scipy.special import stdtrit

from sinklab.experiments.claims import (
    Alike,
    All,
    Check,
    Claim,
    Differs,
    Diverges,
    Equal,
    Monotone,
    SinkAbsent,
    StandsAt,
    Statement,
    Within,
    parts_of,
    quantities_of,
)
from sinklab.experiments.definition import PAPER_SCALES, Experiment, Scale
from sinklab.experiments.documents import JudgedClaim, Verdict
from sinklab.experiments.measured.definition import MeasuredExperiment
from sinklab.experiments.published import Published
from sinklab.experiments.quantities import BESIDE, quantity
from sinklab.experiments.results import CellResults
from sinklab.experiments.verdicts.counts import FEWEST, seed_by_seed
from sinklab.experiments.verdicts.effects import detectable
from sinklab.experiments.verdicts.kinds import AT_EPS, Finding, Runs, put_to
from sinklab.experiments.verdicts.wording import counted, each_seed, number, seeds, unit

GROWN = 2.0
"""Times its untrained norm ratio from which on a model has a massive activation to ask about."""

ORDER: tuple[Verdict, ...] = ("contradicted", "not run", "no verdict", "inconclusive", "direction only", "reproduced")
"""Of the parts of a claim the first of these is its verdict."""


def judge(
    experiment: Experiment,
    scale: Scale,
    results: Mapping[str, CellResults],
    own_seeds: Collection[int] | None = None,
) -> list[JudgedClaim]:
    """A verdict on each claim that the experiment makes at a scale.

    Args:
        results: by cell; cells of other experiments are left alone.
        own_seeds: those of the experiment, which alone are used; all unless given.
    """
    own = {cell: results[cell].of_seeds(own_seeds) for cell in experiment.cells_at(scale) if cell in results}
    published = experiment.published if scale in PAPER_SCALES else None
    found = []
    for claim in experiment.claims_at(scale):
        judged = _not_asked(claim, experiment.massive_cell(claim), own) or judge_claim(claim, own, published)
        found.append(stated(judged, claim, experiment).model_copy(update={"scale": scale}))
    return [claim.model_copy(update={"finds": detectable(one.check, scale) if one.check else ""})
            for claim, one in zip(found, experiment.claims_at(scale), strict=True)]  # fmt: skip


def stated(judged: JudgedClaim, claim: Statement, experiment: Experiment | MeasuredExperiment) -> JudgedClaim:
    """The judged claim with who stated it, when, and what was changed since."""
    day = claim.stated or experiment.stated
    return judged.model_copy(
        update={
            "experiment": experiment.id,
            "analysis": claim.evidence or experiment.evidence,
            "stated": day.isoformat() if day else "",
            "changed": claim.changed or "",
        }
    )


def judge_claim(claim: Claim, results: Mapping[str, CellResults], published: Published | None = None) -> JudgedClaim:
    """A verdict on one claim, by the runs of its cells.

    Args:
        published: the paper's numbers, which ours are held against at its own scale; None elsewhere.
    """
    blank = _blank(claim)
    if claim.check is None:
        return blank.model_copy(update={"evidence": f"{claim.same_as} was not asked here"})
    verdict, said, count = _judged(claim.check, Runs(results), published)
    others = {eps: _at_eps(claim.check, Runs(results, eps)) for eps in BESIDE}
    at_eps = {eps: other for eps, other in others.items() if other is not None}
    return blank.model_copy(update={"verdict": verdict, "evidence": said, "seeds": count, "at_eps": at_eps})


def _blank(claim: Claim) -> JudgedClaim:
    names = quantities_of(claim.check) if claim.check else ()
    return JudgedClaim(
        id=claim.id,
        text=claim.text,
        cells=list(claim.cells),
        quantity=names[0] if names else "",
        same_as=claim.same_as or "",
    )


def _judged(check: Check, runs: Runs, published: Published | None = None) -> tuple[Verdict, str, int]:
    """The verdict, the evidence, and the seeds that it rests on."""
    found = [_part(part, runs, published) for part in parts_of(check)]
    verdict: Verdict = next(one for one in ORDER if any(part[0] == one for part in found))
    failures = [] if isinstance(check, Diverges) else _failures(check.cells, runs)
    said = "; ".join([*(" | ".join(part[1] for part in found),), *failures])
    return verdict, said, min(part[2] for part in found)


def _part(check: Check, runs: Runs, published: Published | None) -> tuple[Verdict, str, int]:
    assert not isinstance(check, All)
    if waiting := _waits_for(check, runs):
        return "not run", waiting, 0
    found = put_to(check, runs)
    if found.holds and published and found.seeds >= FEWEST:
        found = _beside_published(found, check, published, runs)
    return _verdict(found), found.said, found.seeds


def _verdict(found: Finding) -> Verdict:
    if found.seeds < FEWEST:
        return "no verdict"
    if found.holds is None:
        return "inconclusive"
    if not found.holds:
        return "contradicted"
    return "reproduced" if found.size else "direction only"


def _at_eps(check: Check, runs: Runs) -> Verdict | None:
    """The verdict at another threshold; None where the check is about no rate that is recorded at it."""
    names = set(quantities_of(check))
    others = {name for name in names - AT_EPS if quantity(name).unit in ("%", "steps")}
    if not names & AT_EPS or others or any(isinstance(part, StandsAt) for part in parts_of(check)):
        return None
    verdict, _, count = _judged(check, runs)
    return verdict if count else None


def _waits_for(check: Check, runs: Runs) -> str:
    """Which cells have to be trained before a check can be judged; empty where none has."""
    said = []
    for cell in check.cells:
        failed = runs.results[cell].failed if cell in runs.results else 0
        if not runs.of(cell) and not (isinstance(check, Diverges) and failed):
            said.append(f"{cell} did not train at {seeds(failed)}" if failed else f"{cell} has no finished run")
    return "; ".join(said)


def _failures(cells: Sequence[str], runs: Runs) -> list[str]:
    """The seeds that did not train and are left out."""
    failed = {cell: runs.results[cell].failed for cell in cells if cell in runs.results and runs.of(cell)}
    return [f"{seeds(count)} of {cell} did not train and {'is' if count == 1 else 'are'} left out"
            for cell, count in failed.items() if count]  # fmt: skip


def _not_asked(claim: Claim, baseline: str | None, results: Mapping[str, CellResults]) -> JudgedClaim | None:
    """The claim unjudged, where it is about massive activations and its baseline has none; None where it is asked."""
    if baseline is None or claim.check is None:
        return None
    runs, blank = Runs(results), _blank(claim)
    if not runs.of(baseline):
        return blank.model_copy(update={"evidence": f"{baseline} has no finished run"})
    growth = runs.by_seed(baseline, "norm_growth")
    if not growth:
        said = f"the untrained norm ratio of {baseline} was not recorded"
        return blank.model_copy(update={"verdict": "not asked", "evidence": said})
    held = [value >= GROWN for value in growth.values()]
    if all(held) or (len(held) >= FEWEST and seed_by_seed(held)):
        return None
    shown = each_seed(f"{baseline}: norm ratio", growth.values(), quantity("norm_growth"))
    said = f"{shown} times the untrained one, {GROWN:g} times or more at {counted(held)}"
    verdict = "not asked" if len(held) >= FEWEST else "no verdict"
    return blank.model_copy(update={"verdict": verdict, "evidence": said, "seeds": len(held)})


def _beside_published(found: Finding, check: Check, published: Published, runs: Runs) -> Finding:
    """A claim that holds, and whether the paper's numbers lie where one more seed of ours would (t, 95 %).

    Of five seeds within mean +- 3.04 standard deviations. A published number is one draw, of the end of a run.
    """
    if not isinstance(check, Within | SinkAbsent | Differs | Equal | Alike | Monotone | StandsAt):
        return found
    if not isinstance(check, StandsAt) and check.at_step:
        return found
    name = quantities_of(check)[0]
    of, said, size = quantity(name), [found.said], found.size
    for cell in check.cells:
        value, ours = published.numbers_of(cell).get(name), list(runs.by_seed(cell, name).values())
        if value is None or len(ours) < FEWEST:
            continue
        rounding = 0.5 * 10.0**-of.decimals  # seeds that are all at 0 % do not exclude a printed 0.04 %
        reach = float(stdtrit(len(ours) - 1, 0.975)) * (1 + 1 / len(ours)) ** 0.5 * stdev(ours) + rounding
        low, high = fmean(ours) - reach, fmean(ours) + reach
        lies = low <= value <= high
        size = size and lies
        limits = f"[{number(low, of)}, {number(high, of)}]"
        where = "within" if lies else "outside"
        said.append(f"the paper's {value:g}{unit(of)} of {cell} lies {where} {limits}, where one more seed would lie")
    return replace(found, said="; ".join(said), size=size)
