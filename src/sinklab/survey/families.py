"""The paper's open models, one after the other, each beside the sink rate that the paper prints for it.

A model that cannot be loaded or measured does not stop the others. Finished ones are kept, so that a long call can be
interrupted and repeated.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from sinklab.data.sources.corpora import identity
from sinklab.errors import InputError
from sinklab.measuring.measurement import Measurement
from sinklab.models.hooks import Progress
from sinklab.models.huggingface.loading import AS_IT_IS, Loading
from sinklab.survey.items import Item, Listener, Outcome, measure_all, what_decides
from sinklab.survey.loaded import load_model
from sinklab.survey.open_models import EVERY, OpenModel, models_of, setting
from sinklab.survey.request import Request

DOCUMENT = "families.json"


@dataclass(frozen=True)
class Families:
    """The result: a measurement by the hub name of each model, and why the others failed."""

    models: list[OpenModel]
    request: Request
    outcome: Outcome

    def published(self, model: OpenModel) -> float | None:
        """The printed Sink_1 in percent; None where there is none for what was asked, or the setting is another."""
        return published(model, self.request)

    def document(self) -> dict[str, Any]:
        """What `families.json` holds."""
        return {
            "schema": 1,
            "models": {model.id: self._entry(model) for model in self.models if model.id in self.outcome.measured},
            "failed": self.outcome.failed,
        }

    def _entry(self, model: OpenModel) -> dict[str, Any]:
        measurement, printed = self.outcome.measured[model.id], self.published(model)
        return {
            "family": model.family,
            "parameters": model.parameters,
            "sink_1": sink_1(measurement),
            "published": printed,
            "source": None if printed is None else model.source,
            "measurement": measurement.document(),
        }


def measure_families(
    names: Sequence[str],
    text: Path | None,
    request: Request,
    *,
    models_dir: Path | None = None,
    loading: Loading = AS_IT_IS,
    out: Path | None = None,
    listener: Listener | None = None,
) -> Families:
    """Measure every model of the families.

    Args:
        names: of families, as in open_models.yaml, or `all`.
        models_dir: where the models lie, in directories named by their hub names or the last part of them; with it
            nothing is looked up on the hub.
        out: keeps each model's measurement in a folder of its name, and `families.json`; continues what it finds, so
            that families can be added call by call.

    Raises:
        InputError: no such family or directory, no text, or results of other settings in `out`. A model that cannot
            be measured is among the failed ones instead.
        UnsavedError: a result could not be saved; it holds the families so far.
    """
    asked = models_of(names)
    models = [model for model in models_of([EVERY]) if model in asked or (out and _is_measured(out / model.id))]
    check_models_dir(models_dir)
    request.check(text)
    source = None if text is None else identity(str(text))

    def measure(model: OpenModel, progress: Progress) -> Measurement:
        return load_model(place_of(model, models_dir), loading, request=request, text=text).measure(
            text, request, progress
        )

    items = [
        Item(
            model.id,
            what_decides(model.id, directory_of(model, models_dir), source, loading, request),
            partial(measure, model),
        )
        for model in models
    ]
    return measure_all(items, partial(Families, models, request), out, DOCUMENT, listener)


def published(model: OpenModel, request: Request) -> float | None:
    """The printed Sink_1 in percent for what is asked of a model; None where there is none at that setting."""
    wanted = setting()
    same = (request.sequences, request.length) == (wanted.sequences, wanted.length)
    same = same and wanted.eps in request.options.eps
    changed = request.no_bos or request.study.swap_position or request.study.replace_position
    return model.published.get(request.options.inputs) if same and not changed else None


def sink_1(measurement: Measurement) -> float:
    """Sink_1 in percent, at the paper's threshold where it was asked for, else at the headline's."""
    rates = (measurement.sink_rates or {}).get(f"{setting().eps:g}", measurement.sink_rate)
    return rates[0]


def check_models_dir(models_dir: Path | None) -> None:
    """Refuse what is not a directory.

    Raises:
        InputError: it is not one.
    """
    if models_dir is not None and not models_dir.is_dir():
        raise InputError(f"--models-dir {models_dir} is not a directory: give the one that holds the models")


def directory_of(model: OpenModel, models_dir: Path | None) -> Path | None:
    """The model's directory in `models_dir`; None where it has none."""
    if models_dir is None:
        return None
    candidates = (models_dir / model.id, models_dir / model.id.rpartition("/")[2])
    return next((path for path in candidates if path.is_dir()), None)


def place_of(model: OpenModel, models_dir: Path | None) -> str:
    """What to load: the model's directory, or its name on the hub where no `models_dir` is given.

    Raises:
        InputError: `models_dir` does not have it.
    """
    if models_dir is None:
        return model.id
    directory = directory_of(model, models_dir)
    if directory is None:
        *_, last = model.id.split("/")
        raise InputError(f"not in {models_dir}: put it there as {last} or {model.id}, or leave out --models-dir")
    return str(directory)


def _is_measured(folder: Path) -> bool:
    return (folder / "measurement.json").is_file()
