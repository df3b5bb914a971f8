"""Content of assessment.json: cost and benefit of the sink in one model, by part; formulas in docs/assess.md."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from pydantic import Field, SerializeAsAny, SerializerFunctionWrapHandler, model_serializer, model_validator

from sinklab.assessing.part import AssessPart, PartRow
from sinklab.assessing.parts import PARTS, PartName
from sinklab.files import read_document
from sinklab.schema import VersionedDocument

ASSESSMENT = "assessment.json"
HELD_OUT = "held_out"
OF_THE_MODEL = {"model", "files"}
"""Keys of `Assessment.asked` that may differ between assessments in the same table (`comparable`)."""

LOSSES = ((1.0, "A very large loss"), (0.1, "A large loss"), (0.01, "A small loss"))
"""Lower bounds of the added loss in nats per token, each with its wording in the summary (docs/assess.md)."""

OnePart = TypeVar("OnePart", bound=AssessPart)


class Assessment(VersionedDocument):
    """Content of assessment.json, where each part has its own key; the value is null until the part is finished.

    Attributes:
        model: name or path of the model.
        context, layers: context length in tokens and number of blocks of the model.
        asked: inputs that determine the results: model, hashes of its files and of the tokens, settings, dtype and, if
            the text is the validation text of a run, `held_out`.
        notes: notes on the model, the text and the settings.
        skipped: reason for skipping each skipped part, by name of the part.
        seconds: run time in seconds, by name of the part.
        results: results of the finished parts, by name.
    """

    model: str
    context: int
    layers: int
    asked: dict[str, object]
    notes: list[str] = Field(default_factory=list)
    skipped: dict[PartName, str] = Field(default_factory=dict)
    seconds: dict[PartName, float] = Field(default_factory=dict)
    results: dict[str, SerializeAsAny[AssessPart]] = Field(default_factory=dict)

    @model_validator(mode="before")
    @classmethod
    def _results_from_their_keys(cls, document: Any) -> Any:
        found = {
            name: part.model_validate(document[name]) for name, part in PARTS.items() if document.get(name) is not None
        }
        return {"results": found, **document}

    @model_serializer(mode="wrap")
    def _a_key_for_each_part(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        document = handler(self)
        results = document.pop("results")
        return {**document, **{name: results.get(name) for name in PARTS}}

    def result(self, part: type[OnePart]) -> OnePart:
        """Return the result of a part.

        Raises:
            KeyError: if the part is not finished.
        """
        done = self.results[part.name]
        assert isinstance(done, part)
        return done

    def with_result(self, done: AssessPart, seconds: float) -> "Assessment":
        """Return a copy with the result and run time of a part added, and the part removed from `skipped`."""
        results = {**self.results, done.name: done}
        results = {name: results[name] for name in PARTS if name in results}
        skipped = {name: why for name, why in self.skipped.items() if name != done.name}
        took = {**self.seconds, done.name: seconds}
        return self.model_copy(update={"results": results, "skipped": skipped, "seconds": took})

    def answers(self) -> Iterator[tuple[str, PartRow]]:
        """Iterate over the answers of all finished parts, as pairs of the part's question and the row of an answer."""
        return ((part.question, row) for part in self.results.values() for row in part.rows() if row.answer)

    def answer(self) -> list[str]:
        """Return the sentences of the summary: the loss added without the sink and, if assessed, the cost of the sink.

        If the loss without the sink was not assessed, the first sentence says how to assess it.
        """
        answers = [one for _, one in self.answers()]
        lost = [(one.added, one.lost) for one in answers if one.lost and one.added is not None]
        gained = [(one.added, one.gained) for one in answers if one.gained and one.added is not None]
        parts = ", or ".join(part.loss_without_sink for part in PARTS.values() if part.loss_without_sink)
        said = [f"The loss without the sink was not assessed: pass --parts {parts}."]
        if lost:
            most = max(added for added, _ in lost)
            size = next((words for least, words in LOSSES if most >= least), "Hardly any loss")
            said = [f"{size} without the sink: {_nats(lost)}."]
        return [*said, *([f"The sink itself costs {_nats(gained)}."] if gained else [])]

    def remarks(self) -> list[str]:
        """Return the remarks of the finished parts that have one; they are printed below the result table."""
        return [remark for part in self.results.values() if (remark := part.remark())]

    def errors(self) -> list[str]:
        """Return a list with one note, the range of the standard errors of each part; empty without standard errors."""
        ranges = []
        for name, part in self.results.items():
            errors = [row.effect.error for row in part.rows() if row.what and row.effect]
            if known := [error for error in errors if error is not None]:
                bounds = dict.fromkeys(f"{bound:.2g}" for bound in (min(known), max(known)))
                ranges.append(f"{name} {' to '.join(bounds)}")
        return [f"Standard errors of the added losses (nats): {', '.join(ranges)}."] if ranges else []

    def numbers(self) -> dict[str, float]:
        """Collect the scalar results of the finished parts by name, in nats per token."""
        return {name: value for part in self.results.values() for name, value in part.values()}

    @property
    def on_held_out(self) -> bool:
        """Whether a run was assessed on its validation text."""
        return self.asked.get(HELD_OUT) is True


def _nats(found: Sequence[tuple[float, str]]) -> str:
    """Format added losses, for example `+0.095 nats per token with the first key hidden, +0.082 in streaming`."""
    first, *others = (f"{added:+.3f}{{}} {words}" for added, words in found)
    return ", ".join([first.format(" nats per token"), *(one.format("") for one in others)])


def load_assessment(path: Path) -> Assessment:
    """Read an assessment.json.

    Raises:
        InputError: if the file is missing, cannot be read, or is not a valid assessment.
    """
    remedy = "it is damaged or from another version of sinklab; assess again in another folder"
    return read_document(Assessment, path, remedy)


def comparable(assessments: Mapping[str, Assessment]) -> dict[str, Assessment]:
    """Return the largest group of assessments with the same tokens, settings and dtype; keys as in `assessments`."""
    asked = {
        name: repr(sorted((key, repr(value)) for key, value in one.asked.items() if key not in OF_THE_MODEL))
        for name, one in assessments.items()
    }
    counts = Counter(asked.values())
    return {name: one for name, one in assessments.items() if asked[name] == max(counts, key=lambda key: counts[key])}
