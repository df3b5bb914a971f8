"""Compare several models on the same text, or on random or repeated tokens.

Each model uses its own tokenizer and chat template. Losses per token are not subtracted if the vocabularies differ or
are unknown; bits per byte are comparable.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

from sinklab.errors import InputError
from sinklab.jobs import Observer, ignore
from sinklab.measuring.measurement import Measurement
from sinklab.models.hooks import Progress
from sinklab.models.huggingface.loading import AS_IT_IS, Loading, check_name, check_revision, name_in_results
from sinklab.opening import open_model
from sinklab.schema import finite_or_none
from sinklab.survey.measure_many import Item, Outcome, deciding_request, measure_all, text_hash
from sinklab.survey.measure_one import check_loadable, measure_loaded
from sinklab.survey.request import Request
from sinklab.survey.suites import ComparedQuantity, ComparisonDocument

POSITIONS = 4
PER_TOKEN = "nats/token"

ComparedNumber = tuple[str, str, Callable[[Measurement], float | None]]


@dataclass(frozen=True)
class Comparison:
    """Measurements of several models; the first model is the reference.

    Attributes:
        text: path or name of the text; None if no text was used.
        outcome: measurement of each model, by label (`labels`; with the subfolder for a model on the hub, if any); no
            failures, because a failure ends the comparison.
    """

    text: str | None
    outcome: Outcome

    @property
    def measured(self) -> dict[str, Measurement]:
        """The measurements of `outcome`."""
        return self.outcome.measured

    def rows(self) -> list[ComparedQuantity]:
        """Return the rows of the comparison: one for each quantity that at least one model has."""
        rows = []
        first, *others = self.measured
        for quantity, unit, value_of in _quantities(self.measured[first]):
            found = {model: value_of(measurement) for model, measurement in self.measured.items()}
            values = {model: finite_or_none(number) for model, number in found.items()}
            infinite = [model for model, number in found.items() if number == math.inf]
            if not infinite and all(value is None for value in values.values()):
                continue
            differences: dict[str, float | None] = dict.fromkeys(others)
            for other in others:
                same_tokens = self.measured[other].vocabulary == self.measured[first].vocabulary is not None
                value, reference = values[other], values[first]
                if value is not None and reference is not None and (unit != PER_TOKEN or same_tokens):
                    differences[other] = value - reference
            row = {"values": values, "differences": differences, "infinite": infinite}
            rows.append(ComparedQuantity(quantity=quantity, unit=unit, **row))
        return rows

    def document(self) -> dict[str, Any]:
        """Return the content of comparison.json."""
        return {
            "schema": 1,
            "text": self.text,
            "rows": [row.model_dump() for row in self.rows()],
            "models": {name: measurement.document() for name, measurement in self.measured.items()},
        }


def compare_models(
    models: Sequence[str],
    text: Path | None,
    request: Request,
    *,
    loading: Loading = AS_IT_IS,
    out: Path | None = None,
    observe: Observer = ignore,
) -> Comparison:
    """Measure two or more models on the same text, or on random or repeated tokens, and save comparison.json.

    Differences are relative to the first model.

    Raises:
        InputError: before any measurement, if there are fewer than two models, a model is repeated or its config cannot
            be loaded, or see `Request.check` and `measure_all`. Later, if a model cannot be loaded or measured on this
            text, for example because the text is too short.
        HeldError, UnsavedError: see `measure_all`.
        SinklabError: see `measure_all`, `open_model` and `measure_loaded`. Finished measurements are kept in `out`.
    """
    if len(models) < 2:
        raise InputError("a comparison needs two models or more: sinklab compare A B --text FILE")
    for model in models:
        check_name(model)
    request.check(text)
    for model in models:
        check_revision(model, loading.revision)
    source = text_hash(text)
    named = {
        label if label != model else name_in_results(model, loading.subfolder): model
        for label, model in labels(models).items()
    }

    def measure(model: str, progress: Progress) -> Measurement:
        try:
            return measure_loaded(open_model(model, loading), text, request, progress)
        except InputError as error:
            raise InputError(f"{model}: {error}") from error

    items = []
    for name, model in named.items():
        decides = deciding_request(model, Path(model), source, loading, request)
        items.append(Item(name, decides, partial(measure, model)))

    def prepare(unfinished: Sequence[str]) -> None:
        for name in unfinished:
            check_loadable(named[name], loading)

    result_of = partial(Comparison, None if text is None else str(text))
    document = ComparisonDocument.file
    return measure_all(items, result_of, out, document, observe, prepare=prepare, stop_at_failure=True)


def labels(models: Sequence[str]) -> dict[str, str]:
    """Return the models by label: the id on the hub, or the last parts of a local path, as few as make labels distinct.

    Raises:
        InputError: if a model is listed twice, by the same path or by different ones.
    """
    parts = {model: _parts(model) for model in models}
    for count in range(1, 2 + max(map(len, parts.values()))):
        named = {"/".join(own[-count:]): model for model, own in parts.items()}
        if len(named) == len(models):
            return named
    twice = next(model for model in models if [*map(_parts, models)].count(_parts(model)) > 1)
    raise InputError(f"{twice} is repeated: pass different models")


def _parts(model: str) -> tuple[str, ...]:
    """Return the parts of a local model's resolved path, without the root; for a Hugging Face id, one part: the id."""
    path = Path(model)
    if path.exists():
        return path.resolve().parts[1:]
    return ("/".join(part for part in path.parts if part not in (path.anchor, "..")),)


def _quantities(first: Measurement) -> list[ComparedNumber]:
    """Return name, unit and a function from a measurement to the value, for each quantity to compare."""
    quantities: list[ComparedNumber] = [
        (f"Sink_{k + 1}", "% of heads", lambda m, k=k: m.sink_rate[k]) for k in range(min(POSITIONS, first.length))
    ]
    quantities += [
        (f"Sink_1 at eps {eps}", "% of heads", lambda m, eps=eps: (m.sink_rates or {})[eps][0])
        for eps in first.sink_rates or {}
        if float(eps) != first.eps
    ]
    return [
        *quantities,
        ("Sink_1, visible queries", "% of heads", lambda m: (m.sink_rate_visible or [None])[0]),
        ("sink on the bias", "% of heads", lambda m: m.sink_rate_bias),
        ("importance of position 1", "mean", lambda m: float(m.importance[:, :, 0].mean())),
        ("importance of position 1", "times uniform", lambda m: m.uniform_ratio[0]),
        ("loss", PER_TOKEN, lambda m: m.loss),
        ("bits per byte", "bits/byte", lambda m: m.bits_per_byte),
        ("|h_1| over the rest", "largest block", lambda m: max(m.hidden_norm_ratio or [], default=None)),
        ("|k_1| over the rest", "mean layer", lambda m: fmean(m.key_norm_ratio) if m.key_norm_ratio else None),
        ("|v_1| over the rest", "mean layer", lambda m: fmean(m.value_norm_ratio) if m.value_norm_ratio else None),
        ("largest activation", "absolute", lambda m: _massive(m, "value")),
        ("largest activation", "over median", lambda m: _massive(m, "ratio_to_median")),
    ]


def _massive(measurement: Measurement, attribute: str) -> float | None:
    found = [abs(getattr(one, attribute)) for one in measurement.massive_activations or []]
    return max(found, default=None)
