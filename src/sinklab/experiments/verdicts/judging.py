"""Judge the claims of an experiment on the runs of its cells (docs/verdicts.md)."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from statistics import fmean, stdev
from typing import Any

from scipy.special import stdtrit

from sinklab.experiments.claims import (
    Check,
    Claim,
    Differs,
    Diverges,
    Monotone,
    QuantityClaim,
    SingleCheck,
    Undecidable,
    Within,
    parts_of,
)
from sinklab.experiments.definition import PAPER_SCALES, Experiment, Precondition
from sinklab.experiments.documents import JUDGED, CellSummary, ExperimentSummary, JudgedClaim, ReplicateKind, Verdict
from sinklab.experiments.paper import Published
from sinklab.experiments.quantities import AT_EPS, EMERGED, OTHER_EPS_TEXTS, quantity
from sinklab.experiments.verdicts.kinds import FEWEST, UnmeasuredError, by_seed, decide, seed_by_seed
from sinklab.experiments.verdicts.wording import (
    counted,
    evidence,
    number,
    unit,
    unmeasured,
    values_text,
    verdict_of_five,
)
from sinklab.tables import plural

GROWN = 2.0
"""Factor by which training must increase the norm ratio for a claim that requires a massive activation."""

ORDER: tuple[Verdict, ...] = ("contradicted", "not run", "no verdict", "inconclusive", "direction only", "reproduced")
"""Precedence of verdicts: the verdict on an `all` check is the first of this list that one of its parts has."""

Cells = defaultdict[str, CellSummary]
"""The cells of an experiment with their runs, by name; a cell without any run is an empty summary."""

ToJudge = tuple[Experiment, ExperimentSummary, Sequence[Claim | Undecidable]]
"""An experiment at one scale or on given models, its entry in summary.json, and the claims to judge."""


def judge(to_judge: ToJudge, results: Mapping[str, CellSummary], altered: bool = False) -> list[JudgedClaim]:
    """Return the claims of an experiment with their verdicts; cells of other experiments are ignored.

    Args:
        altered: True if --steps or --text override the recipes; earlier verdicts are then left out.
    """
    experiment, entry, claims = to_judge
    own = {name: results[name] for name in entry.cells if name in results}
    cells: Cells = defaultdict(CellSummary)
    cells |= {name: cell.of_seeds(entry.seeds) if entry.seeds else cell for name, cell in own.items()}
    judged = []
    for one in claims:
        claim = one.claim if isinstance(one, Undecidable) else one
        day = claim.stated or experiment.stated
        fields: dict[str, Any] = {
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
            fields["evidence"] = one.why
        elif claim.check is None:
            fields["evidence"] = f"{claim.same_as} is not part of these experiments."
        else:
            published = experiment.published if entry.scale in PAPER_SCALES else None
            compares = any(isinstance(part, Differs) and part.than for part in parts_of(claim.check))
            fields["rule"] = "no overlap" if compares else "seed by seed"
            fields["quantity"] = next(iter(claim.check.quantities), "")
            condition = experiment.precondition(claim)
            noun = experiment.replicate
            unmet = condition and _unmet(claim.check, condition, cells, noun)
            fields |= unmet or _judged_claim(claim.check, cells, noun, published)
        if fields.get("verdict") == "no verdict" and not experiment.requests and not altered:
            fields["elsewhere"] = verdict_of_five(entry.scale, claim.same_as or f"{experiment.id}.{claim.id}")
        judged.append(JudgedClaim(**fields))
    return judged


def _judged_claim(check: Check, cells: Cells, noun: ReplicateKind, published: Published | None) -> dict[str, Any]:
    """Return verdict, evidence, number of seeds, and the verdicts by other thresholds and by importance.

    Args:
        published: the paper's numbers. If one of them disagrees with the runs, a reproduced claim is "direction only"
            (`_beside_published`). None for no comparison.
    """
    verdict, text, seeds = _judged(check, cells, noun, published)
    if noun != "seed" and verdict != "not run":
        numbers = [run for cell in check.cells for run in cells[cell].numbers]
        read = [run.sequences or 0 for run in numbers]
        each = " to ".join(map(str, dict.fromkeys((min(read), max(read)))))
        replicates = plural(len({run.seed for run in numbers}), noun)
        text += f" The replicates are {replicates} {'of' if noun == 'draw' else 'on'} {each} sequences."
    # With a step, or a percentage that has one threshold only, a check has no verdict at another threshold.
    rates = set(check.quantities) & AT_EPS.keys()
    others = [quantity(name).unit in ("%", "steps") for name in check.quantities if name not in AT_EPS]
    at_eps: dict[str, str] = {}
    if rates and not any(others):
        by_eps = {eps: _judged(check, cells, noun, eps=eps)[0] for eps in OTHER_EPS_TEXTS}
        at_eps = {eps: other for eps, other in by_eps.items() if other in JUDGED}
    # Importance has no threshold, and no sizes, bounds or absence. Cells of existing models may differ in eps only.
    by_importance = ""
    if noun == "seed" and isinstance(check, Differs | Monotone) and check.quantities == ("sink_1",):
        sizes = {"by": None, "times": None, "at_least": None, "at_most": None, "absent": False}
        update = {"value": "importance_first", **(sizes if isinstance(check, Differs) else {})}
        other = _judged(check.model_copy(update=update), cells, noun)[0]
        by_importance = other if other in JUDGED else ""
    return {"verdict": verdict, "evidence": text, "seeds": seeds, "at_eps": at_eps, "by_importance": by_importance}


def _judged(
    check: Check, cells: Cells, noun: ReplicateKind, published: Published | None = None, eps: str | None = None
) -> tuple[Verdict, str, int]:
    """Return the verdict on a check, the evidence, and the number of seeds (for `all`, the smallest of its parts)."""
    parts = [_part(part, cells, noun, published, eps) for part in parts_of(check)]
    verdicts, texts, counts = zip(*parts, strict=True)
    excluded = [
        f"Training of {cell} diverged at {plural(failed, 'seed')}, which {'is' if failed == 1 else 'are'} excluded."
        for cell in (() if isinstance(check, Diverges) else check.cells)
        if (failed := _failed(cells[cell], noun)) and cells[cell].numbers
    ]
    return next(one for one in ORDER if one in verdicts), " ".join([*texts, *excluded]), min(counts)


def _failed(cell: CellSummary, noun: ReplicateKind) -> int:
    """Return the number of runs that diverged; 0 for existing models, whose measurements fail for other reasons."""
    return cell.count("failed") if noun == "seed" else 0


def _part(
    check: SingleCheck, cells: Cells, noun: ReplicateKind, published: Published | None, eps: str | None
) -> tuple[Verdict, str, int]:
    missing = [cell for cell in check.cells if not cells[cell].numbers]
    diverged = {cell: failed for cell in missing if (failed := _failed(cells[cell], noun))}
    if missing and not (isinstance(check, Diverges) and diverged):
        texts = [f"Training of {cell} diverged at {plural(failed, 'seed')}." for cell, failed in diverged.items()]
        waiting = [cell for cell in missing if cell not in diverged]
        has = "has" if len(waiting) == 1 else "have"
        texts += [f"{', '.join(waiting)} {has} no finished run."] if waiting else []
        return "not run", " ".join(texts), 0
    try:
        finding = decide(check, cells, eps)
    except UnmeasuredError as error:
        return "no verdict", unmeasured(error, noun), 0
    text = evidence(check, finding, noun)
    if finding.seeds < FEWEST:
        return "no verdict", text, finding.seeds
    agrees, beside = _beside_published(check, published, cells, eps) if finding.holds and published else (True, [])
    holds: Verdict = "reproduced" if finding.size and agrees else "direction only"
    decided: dict[bool | None, Verdict] = {None: "inconclusive", False: "contradicted", True: holds}
    return decided[finding.holds], " ".join([text, *beside]), finding.seeds


def _unmet(check: Check, condition: Precondition, cells: Cells, noun: ReplicateKind) -> dict[str, Any] | None:
    """Return why a claim is not judged, if a cell is not known to have what the claim changes; None if it is.

    A massive activation is a norm ratio that training at least doubles: after the last block if the claim uses that
    ratio, else the maximum over blocks. A sink is a Sink_1 of at least 10 %.
    """
    cell = condition.cell
    if not cells[cell].numbers:
        return {"evidence": f"{cell} has no finished run."}
    if condition.needs == "sink":
        name, bound, required = "sink_1", EMERGED, f"requires a sink in {cell}."
    else:
        last = any(name.endswith("_last") for name in check.quantities)
        name, bound = "norm_growth_last" if last else "norm_growth", GROWN
        required = f"requires that training at least doubles the norm ratio of {cell}."
    values = by_seed(cells[cell], name)
    if not values:
        text = f"The norm ratio of the untrained model was not recorded for {cell}."
        return {"verdict": "not asked", "evidence": text}
    held = [value >= bound for value in values.values()]
    if all(held) or (len(held) >= FEWEST and seed_by_seed(held)):
        return None
    text = f"The claim {required} {values_text({cell: values}, name, noun)} "
    text += f"The value is at least {bound:g} at {counted(held, noun)}."
    return {"verdict": "not asked" if len(held) >= FEWEST else "no verdict", "evidence": text, "seeds": len(held)}


def _beside_published(
    check: SingleCheck, published: Published, cells: Cells, eps: str | None
) -> tuple[bool, list[str]]:
    """Return whether the paper's numbers lie in the 95 % prediction interval of a new seed (t distribution).

    With five seeds, the interval is mean +- 3.04 standard deviations, widened by half a unit of the quantity's last
    decimal. The interval is for a single seed, because a published number comes from one run. The second value has a
    sentence for each number.
    """
    if not isinstance(check, QuantityClaim) or check.at_step or (isinstance(check, Within) and check.before):
        return True, []
    name = check.quantities[0]
    of, texts, agrees = quantity(name), [], True
    for cell in check.cells:
        value, ours = published.numbers_of(cell).get(name), list(by_seed(cells[cell], name, eps=eps).values())
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
