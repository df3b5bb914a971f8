"""The summary of an experiment on existing models: cells over draws, verdicts that speak of these models alone."""

import re
from collections.abc import Mapping, Sequence

from sinklab.experiments.claims import Claim
from sinklab.experiments.documents import ExperimentSummary, JudgedClaim, Summary, verdict_counts
from sinklab.experiments.measured.claims import Undecidable, claims_about
from sinklab.experiments.measured.definition import MeasuredExperiment
from sinklab.experiments.measured.planning import Subject, cell_name
from sinklab.experiments.measured.published import open_model, paper_rows, published_numbers
from sinklab.experiments.results import CellResults
from sinklab.experiments.summary import cell_summary
from sinklab.experiments.verdicts.judging import judge_claim, stated
from sinklab.measuring.findings import Propositions
from sinklab.survey.compare import labels


def summarise_measured(
    experiment: MeasuredExperiment,
    subjects: Sequence[Subject],
    results: Mapping[str, CellResults],
    found: Propositions | None,
    sequences: Mapping[str, Sequence[int]],
) -> Summary:
    """The cells with the numbers of every draw, and a verdict on each claim that is made of these models.

    Args:
        results: by cell, those that wait for their measurements included.
        found: what repeated tokens have shown of the model; None where that is not known (yet).
        sequences: that the measurements of each cell have read.
    """
    whose = _whose(subjects)
    claims = [
        stated(_judged(one, results, sequences), one.claim if isinstance(one, Undecidable) else one, experiment)
        for one in claims_about(experiment, subjects, found)
    ]
    claims = [claim.model_copy(update={"scale": whose, "replicate": "draw"}) for claim in claims]
    return Summary(
        id=experiment.id,
        title=experiment.title,
        scale=whose,
        experiments={experiment.id: _described(experiment, subjects, list(results), whose)},
        cells={cell: cell_summary(of, experiment.columns) for cell, of in results.items()},
        claims=claims,
        counts=verdict_counts(claims),
    )


def _whose(subjects: Sequence[Subject]) -> str:
    """The models by their names; what a verdict speaks of, in the place of a scale."""
    models = dict.fromkeys(model for subject in subjects for model in subject.models.values())
    return ", ".join(labels(list(models)))


def _described(
    experiment: MeasuredExperiment, subjects: Sequence[Subject], cells: list[str], whose: str
) -> ExperimentSummary:
    published = {
        cell_name(subject.name, name): published_numbers(experiment, name, cell, subject.models[cell.model])
        for subject in subjects
        for name, cell in experiment.cells.items()
        if cell.model in subject.models
    }
    known = {subject.name: open_model(subject.models["base"]) for subject in subjects} if experiment.against else {}
    return ExperimentSummary(
        title=experiment.title,
        question=experiment.question,
        source=experiment.source,
        scale=whose,
        cells=cells,
        columns=list(experiment.columns),
        published={cell: numbers for cell, numbers in published.items() if numbers},
        elsewhere=paper_rows(experiment),
        against=list(experiment.against or ()),
        families={
            cell_name(name, cell): model.family for name, model in known.items() if model for cell in experiment.cells
        },
    )


def _judged(
    one: Claim | Undecidable, results: Mapping[str, CellResults], sequences: Mapping[str, Sequence[int]]
) -> JudgedClaim:
    """The claim with its evidence in the words of draws: each is a set of sequences that the model reads."""
    if isinstance(one, Undecidable):
        return JudgedClaim(id=one.claim.id, text=one.claim.text, evidence=one.why, cells=list(one.claim.check.cells))
    claim = judge_claim(one, results)
    if claim.verdict == "not run":
        return claim
    draws = len({run.seed for cell in claim.cells for run in results[cell].numbers})
    read = [count for cell in claim.cells for count in sequences[cell]]
    each = str(max(read)) if min(read) == max(read) else f"{min(read)} to {max(read)}"
    said = re.sub(r"\bseed(s?)\b", r"draw\1", claim.evidence)
    several = f"{draws} draw{'' if draws == 1 else 's'} of {each} sequences"
    return claim.model_copy(update={"evidence": f"{said}; {several}"})
