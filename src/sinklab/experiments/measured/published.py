"""What the paper prints for the models it measured, beside the one that is measured here."""

from sinklab.experiments.measured.definition import MeasuredCell, MeasuredExperiment
from sinklab.experiments.published import published_tables
from sinklab.survey.compare import labels
from sinklab.survey.open_models import EVERY, OpenModel, models_of, setting

PaperRows = dict[str, dict[str, dict[str, float]]]
"""Numbers by model, cell and quantity."""


def open_model(given: str) -> OpenModel | None:
    """The model of the paper that is given: by its name on the hub, or in a folder of the last part of that name."""
    label = next(iter(labels([given]))).lower()
    return next(
        (one for one in models_of([EVERY]) if label in (one.id.lower(), one.id.rpartition("/")[2].lower())), None
    )


def published_numbers(experiment: MeasuredExperiment, name: str, cell: MeasuredCell, given: str) -> dict[str, float]:
    """What the paper prints for the model that is given, measured like this cell; empty where there is nothing.

    Args:
        name: of the cell in its experiment.
    """
    model, wanted = open_model(given), setting()
    same = (cell.sequences, cell.length, cell.eps) == (wanted.sequences, wanted.length, wanted.eps)
    if model is None or not same:
        return {}
    if experiment.published is not None and experiment.published.model is not None:
        of_this = model.id.lower().endswith(f"/{experiment.published.model.lower()}")
        row = published_tables()[experiment.published.table].rows.get(name)
        return row.numbers if of_this and row else {}
    changed = cell.swap_position or cell.replace_position
    return {"sink_1": model.published[cell.inputs]} if cell.inputs in model.published and not changed else {}


def paper_rows(experiment: MeasuredExperiment) -> PaperRows:
    """The rows of the experiment's table, by the model that they are of."""
    if experiment.published is None:
        return {}
    rows = {name: row.numbers for name, row in published_tables()[experiment.published.table].rows.items()}
    if experiment.published.model is not None:
        return {experiment.published.model: rows}
    known = {model: {cell: {"sink_1": value} for cell, value in row.items()} for model, row in rows.items()}
    return {
        model: {cell: numbers for cell, numbers in row.items() if cell in experiment.cells}
        for model, row in known.items()
    }
