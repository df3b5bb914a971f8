"""Judge the claims of an experiment on the runs of its cells (docs/verdicts.md)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean, stdev

from scipy.special import stdtrit

from sinklab.experiments.claims import (
    All,
    Check,
    Claim,
    Differs,
    Diverges,
    HighestAt,
    Monotone,
    OverSubjects,
    QuantityClaim,
    Undecidable,
    parts_of,
    quantities_of,
)
from sinklab.experiments.definition import PAPER_SCALES, Experiment, Precondition
from sinklab.experiments.documents import JUDGED, ExperimentSummary, JudgedClaim, Verdict
from sinklab.experiments.paper import Published
from sinklab.experiments.quantities import AT_EPS, EMERGED, OTHER_EPS_TEXTS, quantity
from sinklab.experiments.results import CellResults
from sinklab.experiments.verdicts.counts import FEWEST, seed_by_seed
from sinklab.experiments.verdicts.five_seeds import detectable
from sinklab.experiments.verdicts.kinds import Finding, Runs, evaluate
from sinklab.experiments.verdicts.wording import number, unit
from sinklab.tables import plural

GROWN = 2.0
"""Factor by which training must increase the norm ratio for a claim that asks for a massive activation."""

ORDER: tuple[Verdict, ...] = ("contradicted", "not run", "no verdict", "inconclusive", "direction only", "reproduced")
"""Precedence of verdicts: the verdict on an `all` check is the first of this list that one of its parts has."""


@dataclass(frozen=True)
class ExperimentToJudge:
    """An experiment at one scale or on given models, whose claims are to be judged.

    Attributes:
        entry: the experiment's entry in summary.json.
        claims: claims to judge, and claims that cannot be judged on the given models, in the order of the experiment.
    """

    experiment: Experiment
    entry: ExperimentSummary
    claims: Sequence[Claim | Undecidable]


def judge(to_judge: ExperimentToJudge, results: Mapping[str, CellResults]) -> list[JudgedClaim]:
    """Return the claims of an experiment with their verdicts; cells of other experiments are ignored."""
    experiment, entry, scale = to_judge.experiment, to_judge.entry, to_judge.entry.scale
    own = {cell: results[cell].of_seeds(entry.seeds or None) for cell in entry.cells if cell in results}
    found = []
    for one in to_judge.claims:
        if isinstance(one, Undecidable):
            claim = one.claim
            judged = JudgedClaim(id=claim.id, text=claim.text, evidence=one.why, cells=list(claim.cells))
        elif experiment.requests:
            claim, judged = one, judge_claim(one, Runs(own, noun=experiment.replicate))
        else:
            claim, published = one, experiment.published if scale in PAPER_SCALES else None
            unmet = _unmet_condition(claim, experiment.precondition(claim), own)
            judged = unmet or judge_claim(claim, Runs(own), published)
            finds = detectable(claim.check, scale) if claim.check and _piloted(claim, experiment, scale) else ""
            judged = judged.model_copy(update={"finds": finds})
        day = claim.stated or experiment.stated
        origin = {
            "experiment": experiment.id,
            "scale": scale,
            "replicate": experiment.replicate,
            "analysis": claim.evidence or experiment.evidence,
            "stated": day.isoformat() if day else "",
            "changed": claim.changed or "",
        }
        found.append(judged.model_copy(update=origin))
    return found


def _piloted(claim: Claim, experiment: Experiment, scale: str) -> bool:
    """Return True if the cells of a claim have the width, layers and steps of the scale's pilot runs."""
    for named, recipe in experiment.base.items():
        if named == recipe == scale:
            overlays = [overlay for cell in claim.cells for overlay in experiment.cells_at(named).get(cell, ())]
            changed = {key for overlay in overlays for part in ("model", "train") for key in overlay.get(part, ())}
            return not changed & {"width", "layers", "steps"}
    return False


def judge_claim(claim: Claim, runs: Runs, published: Published | None = None) -> JudgedClaim:
    """Return the claim with its verdict, from the runs of its cells; "not run" for an unresolved reference.

    Args:
        published: the paper's numbers. If one of them disagrees with the runs, a reproduced claim is "direction only"
            (`_beside_published`). None for no comparison.
    """
    blank = _blank(claim)
    if claim.check is None:
        return blank.model_copy(update={"evidence": f"{claim.same_as} is not part of these experiments."})
    verdict, said, count = _judged(claim.check, runs, published)
    if runs.noun != "seed" and verdict != "not run":
        numbers = [run for cell in claim.cells for run in runs.of(cell)]
        read = [run.sequences or 0 for run in numbers]
        each = " to ".join(map(str, dict.fromkeys((min(read), max(read)))))
        replicates = plural(len({run.seed for run in numbers}), runs.noun)
        on = "of" if runs.noun == "draw" else "on"
        said += f" The replicates are {replicates} {on} {each} sequences."
    others = {eps: _at_eps(claim.check, replace(runs, eps=eps)) for eps in OTHER_EPS_TEXTS}
    at_eps = {eps: other for eps, other in others.items() if other is not None}
    beside = {"at_eps": at_eps, "by_importance": _by_importance(claim.check, runs) or ""}
    return blank.model_copy(update={"verdict": verdict, "evidence": said, "seeds": count, **beside})


def _blank(claim: Claim) -> JudgedClaim:
    blank = JudgedClaim(id=claim.id, text=claim.text, cells=list(claim.cells), same_as=claim.same_as or "")
    if claim.check is None:
        return blank
    compares = any(isinstance(part, Differs) for part in parts_of(claim.check))
    rule = "no overlap" if compares else "seed by seed"
    return blank.model_copy(update={"quantity": next(iter(quantities_of(claim.check)), ""), "rule": rule})


def _judged(check: Check, runs: Runs, published: Published | None = None) -> tuple[Verdict, str, int]:
    """Return the verdict on a check, the evidence, and the number of seeds (for `all`, the smallest of its parts)."""
    found = [_part(part, runs, published) for part in parts_of(check)]
    verdicts, said, counts = zip(*found, strict=True)
    failed = {cell: count for cell in check.cells if (count := runs.failed(cell)) and runs.of(cell)}
    excluded = [
        f"Training of {cell} diverged at {plural(count, 'seed')}, which {'is' if count == 1 else 'are'} excluded."
        for cell, count in ({} if isinstance(check, Diverges) else failed).items()
    ]
    return next(one for one in ORDER if one in verdicts), " ".join([*said, *excluded]), min(counts)


def _part(check: Check, runs: Runs, published: Published | None) -> tuple[Verdict, str, int]:
    assert not isinstance(check, All | OverSubjects)
    if waiting := _missing_runs(check, runs):
        return "not run", waiting, 0
    found = evaluate(check, runs)
    if found.holds and published and found.seeds >= FEWEST:
        found = _beside_published(found, check, published, runs)
    decided: dict[bool | None, Verdict] = {
        None: "inconclusive",
        False: "contradicted",
        True: "reproduced" if found.size else "direction only",
    }
    return decided[found.holds] if found.seeds >= FEWEST else "no verdict", found.said, found.seeds


def _at_eps(check: Check, runs: Runs) -> Verdict | None:
    """Return the verdict at the threshold `runs.eps`; None if fewer than five seeds recorded the rates at it.

    The result is also None for `stands_at`, for a check without a rate in `AT_EPS`, and for a check that also uses a
    step, or a percentage that is not in `AT_EPS`.
    """
    names = set(quantities_of(check))
    others = {name for name in names - AT_EPS.keys() if quantity(name).unit in ("%", "steps")}
    if not names & AT_EPS.keys() or others or any(isinstance(part, HighestAt) for part in parts_of(check)):
        return None
    verdict = _judged(check, runs)[0]
    return verdict if verdict in JUDGED else None


def _by_importance(check: Check, runs: Runs) -> Verdict | None:
    """Return the verdict on a comparison of Sink_1 if the mean importance of the first token replaces Sink_1.

    The importance has no threshold. Sizes, bounds and absence, which refer to rates, are left out. The result is None
    for checks other than `greater`, `less`, `rising` and `falling` of Sink_1, for existing models, whose cells may
    differ in the threshold only, and if fewer than five seeds recorded the importance.
    """
    if runs.noun != "seed" or not isinstance(check, Differs | Monotone) or check.value != "sink_1":
        return None
    sizes = {"by": None, "times": None, "at_least": None, "at_most": None, "absent": False}
    left_out = sizes if isinstance(check, Differs) else {}
    verdict = _judged(check.model_copy(update={"value": "importance_first", **left_out}), runs)[0]
    return verdict if verdict in JUDGED else None


def _missing_runs(check: Check, runs: Runs) -> str:
    """Return a text that names the cells of a check that have no finished run; empty if every cell has one.

    For `diverges` and `trains`, a diverged run counts as finished.
    """
    said, waiting = [], []
    for cell in check.cells:
        failed = runs.failed(cell)
        if runs.of(cell) or (isinstance(check, Diverges) and failed):
            continue
        if failed:
            said.append(f"Training of {cell} diverged at {plural(failed, 'seed')}.")
        else:
            waiting.append(cell)
    if waiting:
        said.append(f"{', '.join(waiting)} {'has' if len(waiting) == 1 else 'have'} no finished run.")
    return " ".join(said)


def _unmet_condition(
    claim: Claim, condition: Precondition | None, results: Mapping[str, CellResults]
) -> JudgedClaim | None:
    """Return the claim with the reason why it is not judged, if a cell is not known to have what the claim changes.

    The result is None if the condition is met or there is none, and for an unresolved reference. A massive activation
    is a norm ratio that training at least doubles: after the last block if the claim uses that ratio, else the maximum
    over blocks. A sink is a Sink_1 of at least 10 %.
    """
    if condition is None or claim.check is None:
        return None
    cell, runs, blank = condition.cell, Runs(results), _blank(claim)
    if not runs.of(cell):
        return blank.model_copy(update={"evidence": f"{cell} has no finished run."})
    if condition.needs == "sink":
        name, bound, asked = "sink_1", EMERGED, f"requires a sink in {cell}."
    else:
        last = any(name.endswith("_last") for name in quantities_of(claim.check))
        name, bound = "norm_growth_last" if last else "norm_growth", GROWN
        asked = f"requires that training at least doubles the norm ratio of {cell}."
    found = runs.by_seed(cell, name)
    if not found:
        said = f"The norm ratio of the untrained model was not recorded for {cell}."
        return blank.model_copy(update={"verdict": "not asked", "evidence": said})
    held = [value >= bound for value in found.values()]
    if all(held) or (len(held) >= FEWEST and seed_by_seed(held)):
        return None
    said = (
        f"The claim {asked} {runs.values_text({cell: found.values()}, name)} "
        f"The value is at least {bound:g} at {runs.counted(held)}."
    )
    verdict = "not asked" if len(held) >= FEWEST else "no verdict"
    return blank.model_copy(update={"verdict": verdict, "evidence": said, "seeds": len(held)})


def _beside_published(found: Finding, check: Check, published: Published, runs: Runs) -> Finding:
    """Add to a finding whether the paper's numbers lie in the 95 % prediction interval of a new seed (t distribution).

    With five seeds, the interval is mean +- 3.04 standard deviations, widened by half a unit of the quantity's last
    decimal. The interval is for a single seed, because a published number comes from one run. `size` becomes False if
    a number is outside.
    """
    at_end = isinstance(check, QuantityClaim) and check.at_step is None
    if not at_end and not isinstance(check, HighestAt):
        return found
    name = quantities_of(check)[0]
    of, said, size = quantity(name), [found.said], found.size
    for cell in check.cells:
        value, ours = published.numbers_of(cell).get(name), list(runs.by_seed(cell, name).values())
        if value is None or len(ours) < FEWEST:
            continue
        rounding = 0.5 * 10.0**-of.decimals  # so that seeds at 0 % do not exclude a printed 0.04 %
        reach = float(stdtrit(len(ours) - 1, 0.975)) * (1 + 1 / len(ours)) ** 0.5 * stdev(ours) + rounding
        low, high = fmean(ours) - reach, fmean(ours) + reach
        lies = low <= value <= high
        size = size and lies
        limits = f"[{number(low, of)}, {number(high, of)}]"
        where = "within" if lies else "outside"
        interval = f"the 95 % prediction interval of another seed, {limits}"
        said.append(f"The paper's value of {value:g}{unit(of)} for {cell} is {where} {interval}.")
    return replace(found, said=" ".join(said), size=size)
