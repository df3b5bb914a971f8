"""Judge the claims of an experiment on the runs of its cells (docs/verdicts.md)."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import fmean, stdev
from typing import Any

from scipy.special import stdtrit

from sinklab.experiments.claims import (
    All,
    Check,
    Claim,
    Differs,
    Diverges,
    Monotone,
    OverSubjects,
    PeakAt,
    QuantityClaim,
    SingleCheck,
    Undecidable,
    parts_of,
)
from sinklab.experiments.definition import PAPER_SCALES, Experiment, Precondition
from sinklab.experiments.documents import JUDGED, ExperimentSummary, JudgedClaim, Verdict
from sinklab.experiments.paper import Published
from sinklab.experiments.quantities import AT_EPS, EMERGED, OTHER_EPS_TEXTS, quantity
from sinklab.experiments.results import CellResults
from sinklab.experiments.verdicts.counts import FEWEST, seed_by_seed
from sinklab.experiments.verdicts.five_seeds import detectable, verdict_of_five
from sinklab.experiments.verdicts.kinds import Runs, UnmeasuredError, decide
from sinklab.experiments.verdicts.wording import counted, evidence, number, unit, unmeasured, values_text
from sinklab.tables import plural

GROWN = 2.0
"""Factor by which training must increase the norm ratio for a claim that requires a massive activation."""

ORDER: tuple[Verdict, ...] = ("contradicted", "not run", "no verdict", "inconclusive", "direction only", "reproduced")
"""Precedence of verdicts: the verdict on an `all` check is the first of this list that one of its parts has."""

ToJudge = tuple[Experiment, ExperimentSummary, Sequence[Claim | Undecidable]]
"""An experiment at one scale or on given models, its entry in summary.json, and the claims to judge."""


def judge(to_judge: ToJudge, results: Mapping[str, CellResults], altered: bool = False) -> list[JudgedClaim]:
    """Return the claims of an experiment with their verdicts; cells of other experiments are ignored.

    Args:
        altered: True if --steps or --text override the recipes; earlier verdicts and the power of pilot runs are then
            left out.
    """
    experiment, entry, claims = to_judge
    own = {cell: results[cell].of_seeds(entry.seeds or None) for cell in entry.cells if cell in results}
    runs, judged = Runs(own, noun=experiment.replicate), []
    for one in claims:
        claim = one.claim if isinstance(one, Undecidable) else one
        day = claim.stated or experiment.stated
        found: dict[str, Any] = {
            "id": claim.id,
            "text": claim.text,
            "cells": list(claim.cells),
            "same_as": claim.same_as or "",
            "experiment": experiment.id,
            "scale": entry.scale,
            "replicate": experiment.replicate,
            "analysis": claim.evidence or experiment.evidence,
            "stated": day.isoformat() if day else "",
            "changed": claim.changed or "",
        }
        if isinstance(one, Undecidable):
            found["evidence"] = one.why
        elif claim.check is None:
            found["evidence"] = f"{claim.same_as} is not part of these experiments."
        else:
            published = experiment.published if entry.scale in PAPER_SCALES else None
            compares = any(isinstance(part, Differs) for part in parts_of(claim.check))
            found["rule"] = "no overlap" if compares else "seed by seed"
            found["quantity"] = next(iter(claim.check.quantities), "")
            condition = experiment.precondition(claim)
            found |= _unmet(claim.check, condition, runs) or _judged_claim(claim.check, runs, published)
            if _piloted(claim, experiment, entry.scale) and not altered:
                found["finds"] = detectable(claim.check, entry.scale)
        if found.get("verdict") == "no verdict" and not experiment.requests and not altered:
            found["elsewhere"] = verdict_of_five(entry.scale, claim.same_as or f"{experiment.id}.{claim.id}")
        judged.append(JudgedClaim(**found))
    return judged


def _piloted(claim: Claim, experiment: Experiment, scale: str) -> bool:
    """Return True if the cells of a claim have the width, layers and steps of the scale's pilot runs."""
    for named, recipe in experiment.base.items():
        if named == recipe == scale:
            overlays = [overlay for cell in claim.cells for overlay in experiment.cells_at(named).get(cell, ())]
            changed = {key for overlay in overlays for part in ("model", "train") for key in overlay.get(part, ())}
            return not changed & {"width", "layers", "steps"}
    return False


def _judged_claim(check: Check, runs: Runs, published: Published | None) -> dict[str, Any]:
    """Return verdict, evidence, number of seeds, and the verdicts by other thresholds and by importance.

    Args:
        published: the paper's numbers. If one of them disagrees with the runs, a reproduced claim is "direction only"
            (`_beside_published`). None for no comparison.
    """
    verdict, text, seeds = _judged(check, runs, published)
    if runs.noun != "seed" and verdict != "not run":
        numbers = [run for cell in check.cells for run in runs.of(cell)]
        read = [run.sequences or 0 for run in numbers]
        each = " to ".join(map(str, dict.fromkeys((min(read), max(read)))))
        replicates = plural(len({run.seed for run in numbers}), runs.noun)
        text += f" The replicates are {replicates} {'of' if runs.noun == 'draw' else 'on'} {each} sequences."
    others = {eps: _at_eps(check, replace(runs, eps=eps)) for eps in OTHER_EPS_TEXTS}
    return {
        "verdict": verdict,
        "evidence": text,
        "seeds": seeds,
        "at_eps": {eps: other for eps, other in others.items() if other is not None},
        "by_importance": _by_importance(check, runs) or "",
    }


def _judged(check: Check, runs: Runs, published: Published | None = None) -> tuple[Verdict, str, int]:
    """Return the verdict on a check, the evidence, and the number of seeds (for `all`, the smallest of its parts)."""
    found = [_part(part, runs, published) for part in parts_of(check)]
    verdicts, texts, counts = zip(*found, strict=True)
    failed = {cell: count for cell in check.cells if (count := runs.failed(cell)) and runs.of(cell)}
    excluded = [
        f"Training of {cell} diverged at {plural(count, 'seed')}, which {'is' if count == 1 else 'are'} excluded."
        for cell, count in ({} if isinstance(check, Diverges) else failed).items()
    ]
    return next(one for one in ORDER if one in verdicts), " ".join([*texts, *excluded]), min(counts)


def _part(check: Check, runs: Runs, published: Published | None) -> tuple[Verdict, str, int]:
    assert not isinstance(check, All | OverSubjects)
    if waiting := _missing_runs(check, runs):
        return "not run", waiting, 0
    try:
        found = decide(check, runs)
    except UnmeasuredError as error:
        return "no verdict", unmeasured(error, runs.noun), 0
    text = evidence(check, found, runs.noun)
    if found.seeds < FEWEST:
        return "no verdict", text, found.seeds
    agrees, beside = _beside_published(check, published, runs) if found.holds and published else (True, [])
    holds: Verdict = "reproduced" if found.size and agrees else "direction only"
    decided: dict[bool | None, Verdict] = {None: "inconclusive", False: "contradicted", True: holds}
    return decided[found.holds], " ".join([text, *beside]), found.seeds


def _at_eps(check: Check, runs: Runs) -> Verdict | None:
    """Return the verdict at the threshold `runs.eps`; None if fewer than five seeds recorded the rates at it.

    The result is also None for `peak_at`, for a check without a rate in `AT_EPS`, and for a check that also uses a
    step, or a percentage that is not in `AT_EPS`.
    """
    names = set(check.quantities)
    others = {name for name in names - AT_EPS.keys() if quantity(name).unit in ("%", "steps")}
    if not names & AT_EPS.keys() or others or any(isinstance(part, PeakAt) for part in parts_of(check)):
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
    texts, waiting = [], []
    for cell in check.cells:
        failed = runs.failed(cell)
        if runs.of(cell) or (isinstance(check, Diverges) and failed):
            continue
        if failed:
            texts.append(f"Training of {cell} diverged at {plural(failed, 'seed')}.")
        else:
            waiting.append(cell)
    if waiting:
        texts.append(f"{', '.join(waiting)} {'has' if len(waiting) == 1 else 'have'} no finished run.")
    return " ".join(texts)


def _unmet(check: Check, condition: Precondition | None, runs: Runs) -> dict[str, Any] | None:
    """Return why a claim is not judged, if a cell is not known to have what the claim changes; None if it is.

    A massive activation is a norm ratio that training at least doubles: after the last block if the claim uses that
    ratio, else the maximum over blocks. A sink is a Sink_1 of at least 10 %.
    """
    if condition is None:
        return None
    cell = condition.cell
    if not runs.of(cell):
        return {"evidence": f"{cell} has no finished run."}
    if condition.needs == "sink":
        name, bound, required = "sink_1", EMERGED, f"requires a sink in {cell}."
    else:
        last = any(name.endswith("_last") for name in check.quantities)
        name, bound = "norm_growth_last" if last else "norm_growth", GROWN
        required = f"requires that training at least doubles the norm ratio of {cell}."
    found = runs.by_seed(cell, name)
    if not found:
        text = f"The norm ratio of the untrained model was not recorded for {cell}."
        return {"verdict": "not asked", "evidence": text}
    held = [value >= bound for value in found.values()]
    if all(held) or (len(held) >= FEWEST and seed_by_seed(held)):
        return None
    text = f"The claim {required} {values_text({cell: found}, name, runs.noun)} "
    text += f"The value is at least {bound:g} at {counted(held, runs.noun)}."
    return {"verdict": "not asked" if len(held) >= FEWEST else "no verdict", "evidence": text, "seeds": len(held)}


def _beside_published(check: SingleCheck, published: Published, runs: Runs) -> tuple[bool, list[str]]:
    """Return whether the paper's numbers lie in the 95 % prediction interval of a new seed (t distribution).

    With five seeds, the interval is mean +- 3.04 standard deviations, widened by half a unit of the quantity's last
    decimal. The interval is for a single seed, because a published number comes from one run. The second value has a
    sentence for each number.
    """
    at_end = isinstance(check, QuantityClaim) and check.at_step is None
    if not at_end and not isinstance(check, PeakAt):
        return True, []
    name = check.quantities[0]
    of, texts, agrees = quantity(name), [], True
    for cell in check.cells:
        value, ours = published.numbers_of(cell).get(name), list(runs.by_seed(cell, name).values())
        if value is None or len(ours) < FEWEST:
            continue
        rounding = 0.5 * 10.0**-of.decimals  # so that seeds at 0 % do not exclude a printed 0.04 %
        reach = float(stdtrit(len(ours) - 1, 0.975)) * (1 + 1 / len(ours)) ** 0.5 * stdev(ours) + rounding
        low, high = fmean(ours) - reach, fmean(ours) + reach
        lies = low <= value <= high
        agrees = agrees and lies
        limits = f"[{number(low, of)}, {number(high, of)}]"
        where = "within" if lies else "outside"
        interval = f"the 95 % prediction interval of another seed, {limits}"
        texts.append(f"The paper's value of {value:g}{unit(of)} for {cell} is {where} {interval}.")
    return agrees, texts
