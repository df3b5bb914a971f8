"""What is different about experiments on existing models: draws in place of seeds, and the paper's models as rows."""

from typing import Literal

from sinklab.experiments.definition import SCALES
from sinklab.experiments.documents import ExperimentSummary
from sinklab.report.experiments.numbers import number_text, quantity_of
from sinklab.report.figure import DataTable

Replicate = Literal["seed", "draw"]
"""What numbers are repeated over: seeds of training, or draws of the sequences that a model is measured on."""


def replicate_of(experiment: ExperimentSummary) -> Replicate:
    """Models are trained at a scale; one that was given to be measured stands under its own name."""
    return "seed" if experiment.scale in SCALES or not experiment.scale else "draw"


def paper_models(experiment: ExperimentSummary) -> DataTable | None:
    """What the paper prints of other models than the one that is measured, a row for each; None where nothing."""
    found = {model: row for model, row in experiment.elsewhere.items() if row}
    names = list(dict.fromkeys((cell, name) for row in found.values() for cell in row for name in row[cell]))
    if not names:
        return None
    rows = [
        [model, *(number_text(row.get(cell, {}).get(name), 2) for cell, name in names)] for model, row in found.items()
    ]
    return DataTable(["Model", *(f"{cell}, {quantity_of(name).label}" for cell, name in names)], rows)
