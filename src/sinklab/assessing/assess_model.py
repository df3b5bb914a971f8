"""Assess a model in a resumable job, one step per part; the content of assessment.json. Formulas: docs/assess.md."""

import hashlib
import json
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from pydantic import Field, SerializeAsAny, SerializerFunctionWrapHandler, model_serializer, model_validator
from torch import Tensor

from sinklab import render_text
from sinklab.assessing.part import NOT_SAFE, SAFE, UNDECIDED, AssessPart, AssessText, GivenTokens, PartRow, judged
from sinklab.assessing.parts import IN_QUICK, PARTS, USUAL, PartName, known_part
from sinklab.assessing.reading import PartInput
from sinklab.assessing.settings import TOLERANCE, AssessOptions, AssessSettings, settings_for
from sinklab.data.corpora import DEFAULT_TEXT_NOTE, default_text, documents
from sinklab.errors import InputError
from sinklab.files import parse_json, read_document
from sinklab.jobs import JobEvent, JobStep, Ledger, Observer, StepProgress, check_request, ignore, run_steps
from sinklab.models.huggingface.loading import AS_IT_IS, Loading, check_name
from sinklab.opening import Model, is_run, open_model
from sinklab.schema import VersionedDocument

ASSESSMENT = "assessment.json"
HELD_OUT = "held_out"
OF_THE_MODEL = {"model", "files"}
"""Keys of `Assessment.asked` that may differ between assessments in the same table (`comparable`)."""

LOSSES = ((1.0, "A very large loss"), (0.1, "A large loss"), (0.01, "A small loss"))
"""Lower bounds of the added loss in nats per token, each with its wording in the summary (docs/assess.md)."""

OnePart = TypeVar("OnePart", bound=AssessPart)


@dataclass(frozen=True)
class JudgedSetting:
    """A setting that was assessed, such as a KV cache in 4 bits, compared with the tolerance.

    Attributes:
        kind: what it is a setting of, such as "KV cache".
        name: the setting.
        added, error: added loss in nats per token, and its standard error; None if unknown.
        size: bits per number; 0 where settings are of equal size.
        verdict: "safe" if the added loss is at most the tolerance, else "not safe"; "undecided" if the two differ by
            less than two standard errors.
    """

    kind: str
    name: str
    added: float
    error: float | None
    size: float
    verdict: str

    def __str__(self) -> str:
        return f"{self.name} ({self.kind}, {self.added:+z.3f})"


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
        tolerance: loss in nats per token that a setting may add; it does not affect the results.
    """

    model: str
    context: int
    layers: int
    asked: dict[str, object]
    notes: list[str] = Field(default_factory=list)
    skipped: dict[PartName, str] = Field(default_factory=dict)
    seconds: dict[PartName, float] = Field(default_factory=dict)
    results: dict[str, SerializeAsAny[AssessPart]] = Field(default_factory=dict)
    tolerance: float = Field(default=TOLERANCE, ge=0, exclude_if=lambda nats: nats == TOLERANCE)

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

    def __str__(self) -> str:
        return render_text(self)

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

    def settings(self) -> list[JudgedSetting]:
        """Return the settings of the finished parts, compared with the tolerance; those of the KV cache come first."""
        found = []
        for part in sorted(self.results.values(), key=lambda part: part.name != "kv_cache"):
            for row in part.rows() if part.setting else ():
                if row.answer and row.effect is not None and row.added is not None:
                    verdict = judged(row.added, row.error, self.tolerance)
                    found.append(JudgedSetting(part.setting, row.answer, row.added, row.error, row.size, verdict))
        return found

    def recommended(self) -> list[JudgedSetting]:
        """Return one setting of each kind: the smallest that is safe, or that with the smallest loss if none is."""
        found = []
        for kind in dict.fromkeys(one.kind for one in self.settings()):
            of_kind = [one for one in self.settings() if one.kind == kind]
            safe = [one for one in of_kind if one.verdict == SAFE]
            found.append(
                min(safe, key=lambda one: (one.size, one.added)) if safe else min(of_kind, key=lambda one: one.added)
            )
        return found

    def recommendation(self) -> list[str]:
        """Return the sentences of the recommendation; empty if no setting was assessed."""
        chosen, sentences = self.recommended(), []
        limit = f"at most {self.tolerance:+g} nats per token"
        if safe := [str(one) for one in chosen if one.verdict == SAFE]:
            sentences.append(f"Safe ({limit}): {'; '.join(safe)}.")
        if least := [
            f"{one.kind} (at best {one.name}, {one.added:+z.3f}{f', {UNDECIDED}' if one.verdict == UNDECIDED else ''})"
            for one in chosen
            if one.verdict != SAFE
        ]:
            sentences.append(f"No setting was safe for {'; '.join(least)}.")
        if unsafe := self.unsafe():
            sentences.append(f"Not safe: {'; '.join(unsafe)}.")
        return sentences

    def unsafe(self) -> list[str]:
        """Return the setting with the largest added loss, if it is not safe, of each kind that has a safe one."""
        found = []
        for kind in [one.kind for one in self.recommended() if one.verdict == SAFE]:
            unsafe = [one for one in self.settings() if one.kind == kind and one.verdict == NOT_SAFE]
            found += [str(max(unsafe, key=lambda one: one.added))] if unsafe else []
        return found

    def answer(self) -> list[str]:
        """Return the sentences of the summary: the loss added without the sink and, if assessed, the cost of the sink.

        If the loss without the sink was not assessed, the first sentence says how to assess it.
        """
        answers = [one for _, one in self.answers()]
        lost = [(one.added, one.error, one.lost) for one in answers if one.lost and one.added is not None]
        gained = [(one.added, one.error, one.gained) for one in answers if one.gained and one.added is not None]
        parts = ", or ".join(part.loss_without_sink for part in PARTS.values() if part.loss_without_sink)
        sentences = [f"The loss without the sink was not assessed: pass --parts {parts}."]
        if lost:
            most = max(added for added, _, _ in lost)
            size = next((words for least, words in LOSSES if most >= least), "Hardly any loss")
            sentences = [f"{size} without the sink: {_nats(lost)}."]
        return [*sentences, *([f"The sink itself costs {_nats(gained)}."] if gained else [])]

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


def _nats(found: Sequence[tuple[float, float | None, str]]) -> str:
    """Format added losses, for example `+0.095 ± 0.012 nats per token in streaming, +0.082 without the first key`."""
    return ", ".join(
        f"{added:+.3f}{'' if error is None else f' ± {error:.3f}'}{'' if place else ' nats per token'} {words}"
        for place, (added, error, words) in enumerate(found)
    )


def load_assessment(path: Path) -> Assessment:
    """Read an assessment.json.

    Raises:
        InputError: if the file is missing, cannot be read, or is not a valid assessment.
    """
    remedy = "it is damaged or from another version of sinklab; assess again in another folder"
    return read_document(Assessment, path, remedy)


def comparable(assessments: Mapping[str, Assessment]) -> dict[str, Assessment]:
    """Return the largest group of assessments with the same tokens, settings and dtype; keys as in `assessments`."""
    settings = {
        name: repr(sorted((key, repr(value)) for key, value in one.asked.items() if key not in OF_THE_MODEL))
        for name, one in assessments.items()
    }
    [(most, _)] = Counter(settings.values()).most_common(1) or [("", 0)]
    return {name: one for name, one in assessments.items() if settings[name] == most}


def assess(
    model: str | Model,
    text: Path | Tensor | None,
    options: AssessOptions,
    *,
    loading: Loading = AS_IT_IS,
    presses: Mapping[str, Any] | None = None,
    out: Path | None = None,
    where_possible: bool = False,
    observe: Observer = ignore,
    tolerance: float = TOLERANCE,
) -> Assessment:
    """Assess the cost and benefit of the sink in one model.

    Args:
        model: a run directory, a model directory, a .gguf file, or a name on the Hugging Face hub; or an open model.
        text: a text file, a folder of them, or another source of `documents` such as stdlib, read as one
            stream; None for the validation text of a run, and for the text that comes with sinklab otherwise. Or
            token ids (N, T) of an open model, whose sequences are read as they are.
        options: settings; without `parts`, the default parts (`USUAL`, or `IN_QUICK` with `quick`) that can be run on
            the model.
        loading: options for loading the model.
        presses: presses of kvpress by name, for the part `prompt_cache`.
        out: directory of assessment.json, which is written after every part; None writes no file. A repeated call
            resumes the assessment and may add parts.
        where_possible: whether to skip requested parts that cannot be run on the model, instead of raising an error.
        observe: callback for progress events.
        tolerance: loss in nats per token that a setting may add, for the recommendation.

    Returns:
        The assessment, with the results of earlier calls.

    Raises:
        InputError: before anything is written, if the model, the text or an option is invalid, a requested part cannot
            be run on the model, or `out` is not writable or contains an assessment that is invalid or has other
            settings; during the assessment, if a requested part turns out to be impossible and `where_possible` is
            False.
        HeldError: if another process is writing an assessment to `out`.
        UnsavedError: if a result cannot be saved; the error contains the assessment so far.
        SinklabError: if the model cannot be loaded (see `open_model`), `out` cannot be locked, or a loss or KL
            divergence is not finite; the results of finished parts remain saved.
    """
    if isinstance(model, str):
        check_name(model)
    text = text_or_default(model if isinstance(model, str) else model.name, text)
    parts = sorted(set(map(known_part, options.parts)), key=list(PARTS).index)
    options = options.model_copy(update={"parts": tuple(parts)})
    ledger = Ledger[Assessment](out, ASSESSMENT)
    if isinstance(text, Path):
        next(documents(str(text), column=options.column))
    skips = where_possible or not options.parts
    with ledger.locked():
        opened = open_separable(model, loading, options.length or 0)
        source = GivenTokens(opened, text) if isinstance(text, Tensor) else AssessText(opened, text, options.column)
        settings = settings_for(source.model, options)
        inputs = _inputs(source, settings, options, skips, presses or {})
        found = _so_far(ledger, source, text, settings, options, presses or {})
        found = found.model_copy(update={"tolerance": tolerance})

        def skip(part: str, why: str) -> str:
            nonlocal found
            if not skips:
                raise InputError(f"the part `{part}` cannot be run: {why}")
            found = found.model_copy(update={"skipped": {**found.skipped, part: why}})
            ledger.save(found)
            return f"skipped ({why})"

        def run(part: str, given: PartInput, progress: StepProgress) -> str:
            nonlocal found
            start, given.passes.report = time.perf_counter(), progress.reach
            progress.begin(text=f"evaluating sequences of {given.tokens_NT.shape[1]:,} tokens")
            try:
                done = PARTS[part].run(given)
            except InputError as error:
                return skip(part, str(error))
            found = found.with_result(done, round(time.perf_counter() - start, 1))
            ledger.save(found)
            return ""

        steps = []
        for part, given in inputs.items():
            if isinstance(given, PartInput):
                steps.append(JobStep(part, partial(run, part, given), "" if part in found.results else None))
            elif part not in found.results:
                skip(part, given)
                observe(JobEvent("skipped", part, text=given))
        run_steps(steps, observe)
        ledger.save(found)
        return found


def text_or_default(model: str, text: Path | Tensor | None) -> Path | Tensor | None:
    """Return the text; without one, None for a run (its validation text), else the text that comes with sinklab."""
    return default_text() if text is None and not is_run(model) else text


def open_separable(model: str | Model, loading: Loading, length: int = 0) -> Model:
    """Load a model that is not open yet (`length` as in `open_model`), and check that its attention can be edited.

    Raises:
        InputError, SinklabError: see `open_model` and `Adapter.check_causal`; InputError also if the attention cannot
            be edited.
    """
    opened = open_model(model, loading, length=length) if isinstance(model, str) else model
    opened.adapter.check_causal()
    if why := opened.adapter.inseparable():
        raise InputError(f"{opened.name} cannot be assessed: {why}")
    return opened


def _so_far(
    ledger: Ledger[Assessment],
    text: AssessText,
    given: Path | Tensor | None,
    settings: AssessSettings,
    options: AssessOptions,
    presses: Mapping[str, Any],
) -> Assessment:
    """Load the assessment saved by an earlier call, or create one without results; other settings raise InputError."""
    model, tokens_NT = text.model, text.sequences(settings.sequences, settings.length)
    inputs = {
        "model": model.name,
        "files": model.files,
        "text": hashlib.sha256(tokens_NT.numpy().tobytes()).hexdigest(),
        **settings.model_dump(mode="json"),
        **({HELD_OUT: True} if given is None else {}),
        **({"presses": {name: repr(press) for name, press in presses.items()}} if presses else {}),
        **model.loading.precision,
    }
    new = Assessment(
        model=model.name,
        context=model.adapter.context,
        layers=len(model.adapter.blocks),
        asked=parse_json(json.dumps(inputs)),
        notes=[*_notes(text, given, settings, options), model.fed(tokens_NT).line()],
    )
    before = ledger.earlier(load_assessment)
    if before is None or ledger.path is None:
        return new
    same_files = model.files is not None and model.files == before.asked.get("files")
    check_request(ledger.path, "an assessment", before.asked, new.asked, {"model"} if same_files else set())
    return before.model_copy(update={"notes": new.notes})


def _inputs(
    text: AssessText, settings: AssessSettings, options: AssessOptions, skips: bool, presses: Mapping[str, Any]
) -> dict[str, PartInput | str]:
    """Return the inputs of each part, or the reason why it cannot be run, by name; without `skips` raise InputError.

    A text that is unreadable or too short is an error, except for a part with `long_text`.
    """
    inputs: dict[str, PartInput | str] = {}
    for name in options.parts or (IN_QUICK if options.quick else USUAL):
        part, adapter = PARTS[name], text.model.adapter
        try:
            inputs[name] = part.refusal(adapter, settings) or PartInput(
                adapter, settings, *part.text_size(settings).read(text), presses=presses
            )
        except InputError as error:
            if not part.long_text:
                raise
            inputs[name] = str(error)
        if not skips and isinstance(why := inputs[name], str):
            raise InputError(f"the part `{name}` cannot be run: {why}")
    return inputs


def _notes(
    text: AssessText, given: Path | Tensor | None, settings: AssessSettings, options: AssessOptions
) -> list[str]:
    model, adapter = text.model, text.model.adapter
    notes = [*model.notes]
    if model.step != model.planned_steps:
        notes.insert(0, f"the run is at step {model.step} of {model.planned_steps}")
    if settings.quick:
        without = "" if options.parts else f", only {', '.join(IN_QUICK)}"
        notes.insert(
            0,
            f"quick: {settings.sequences} x {settings.length:,} tokens, {settings.stream_sequences} x "
            f"{settings.stream_length:,} for streaming{without}; for numbers to cite, repeat without --quick",
        )
    if isinstance(given, Path) and given == default_text():
        notes.append(DEFAULT_TEXT_NOTE)
    notes += [*text.notes(), *adapter.kinds.notes(), *adapter.kinds.notes_on_hidden_keys()]
    if settings.positions == "text" and options.positions is None:
        notes.append(f"the streaming part uses positions in the text, as {adapter.fixed_positions()}")
    return notes
