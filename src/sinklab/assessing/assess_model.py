"""Assess a model in a resumable job, with one step per part of the assessment."""

import hashlib
import json
import time
from functools import partial
from pathlib import Path

from sinklab.assessing.assessment import ASSESSMENT, HELD_OUT, Assessment, load_assessment
from sinklab.assessing.part import AssessText
from sinklab.assessing.parts import IN_QUICK, PARTS, USUAL, known_part
from sinklab.assessing.reading import PartInput
from sinklab.assessing.settings import AssessOptions, AssessSettings, settings_for
from sinklab.data.sources.corpora import documents
from sinklab.errors import InputError
from sinklab.files import parse_json
from sinklab.jobs import JobEvent, JobStep, Ledger, Observer, StepProgress, check_request, ignore, run_steps
from sinklab.models.huggingface.loading import AS_IT_IS, Loading, check_name
from sinklab.opening import Model, is_run, open_model


def assess(
    model: str,
    text: Path | None,
    options: AssessOptions,
    *,
    loading: Loading = AS_IT_IS,
    out: Path | None = None,
    where_possible: bool = False,
    observe: Observer = ignore,
) -> Assessment:
    """Assess the cost and benefit of the sink in one model.

    Args:
        model: a run directory, a model directory, a .gguf file, or a name on the Hugging Face hub.
        text: a text file, a folder of them, or another source of `documents` such as stdlib, read as one
            stream; None for the validation text of a run.
        options: settings; without `parts`, the default parts (`USUAL`, or `IN_QUICK` with `quick`) that can be run on
            the model.
        loading: options for loading the model.
        out: directory of assessment.json, which is written after every part; None writes no file. A repeated call
            resumes the assessment and may add parts.
        where_possible: whether to skip requested parts that cannot be run on the model, instead of raising an error.
        observe: callback for progress events.

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
    check_name(model)
    parts = sorted(set(map(known_part, options.parts)), key=list(PARTS).index)
    options = options.model_copy(update={"parts": tuple(parts)})
    ledger = Ledger[Assessment](out, ASSESSMENT)
    if text is not None:
        next(documents(str(text)))
    elif not is_run(model):
        raise InputError(f"--text is required: {model} is not a run, so it has no validation text")
    skips = where_possible or not options.parts
    with ledger.locked():
        source = AssessText(open_separable(model, loading), text)
        settings = settings_for(source.model, options)
        inputs = _inputs(source, settings, options, skips)
        found = _so_far(ledger, source, text, settings, options)

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
        return found


def open_separable(name: str, loading: Loading) -> Model:
    """Load a model, and check that its attention can be edited.

    Raises:
        InputError, SinklabError: see `open_model` and `Adapter.check_causal`; InputError also if the attention cannot
            be edited.
    """
    model = open_model(name, loading)
    model.adapter.check_causal()
    if why := model.adapter.inseparable():
        raise InputError(f"{name} cannot be assessed: {why}")
    return model


def _so_far(
    ledger: Ledger[Assessment], text: AssessText, given: Path | None, settings: AssessSettings, options: AssessOptions
) -> Assessment:
    """Load the assessment saved by an earlier call, or create one without results; other settings raise InputError."""
    model, tokens_NT = text.model, text.sequences(settings.sequences, settings.length)
    asked = {
        "model": model.name,
        "files": model.files,
        "text": hashlib.sha256(tokens_NT.numpy().tobytes()).hexdigest(),
        **settings.model_dump(mode="json"),
        **({HELD_OUT: True} if given is None else {}),
        "dtype": model.loading.dtype,
    }
    new = Assessment(
        model=model.name,
        context=model.adapter.context,
        layers=len(model.adapter.blocks),
        asked=parse_json(json.dumps(asked)),
        notes=[*_notes(text, settings, options), model.fed(tokens_NT).line()],
    )
    before = ledger.earlier(load_assessment)
    if before is None or ledger.path is None:
        return new
    same_files = model.files is not None and model.files == before.asked.get("files")
    check_request(ledger.path, "an assessment", before.asked, new.asked, {"model"} if same_files else set())
    return before.model_copy(update={"notes": new.notes})


def _inputs(
    text: AssessText, settings: AssessSettings, options: AssessOptions, skips: bool
) -> dict[str, PartInput | str]:
    """Return the inputs of each part, or the reason why it cannot be run, by name; without `skips` raise InputError.

    A text that is unreadable or too short is an error, except for a part with `long_text`.
    """
    inputs: dict[str, PartInput | str] = {}
    for name in options.parts or (IN_QUICK if options.quick else USUAL):
        part, adapter = PARTS[name], text.model.adapter
        try:
            inputs[name] = part.refusal(adapter, settings) or PartInput(
                adapter, settings, *part.text_size(settings).read(text)
            )
        except InputError as error:
            if not part.long_text:
                raise
            inputs[name] = str(error)
        if not skips and isinstance(why := inputs[name], str):
            raise InputError(f"the part `{name}` cannot be run: {why}")
    return inputs


def _notes(text: AssessText, settings: AssessSettings, options: AssessOptions) -> list[str]:
    model, adapter = text.model, text.model.adapter
    notes = [*model.notes]
    if model.step != model.planned_steps:
        notes.insert(0, f"the run is at step {model.step} of {model.planned_steps}")
    if settings.quick:
        without = "" if options.parts else f", without {', '.join(part for part in USUAL if part not in IN_QUICK)}"
        notes.insert(
            0,
            f"quick: {settings.sequences} x {settings.length:,} tokens, {settings.stream_sequences} x "
            f"{settings.stream_length:,} for streaming{without}; for numbers to cite, repeat without --quick",
        )
    notes += [*text.notes(), *adapter.kinds.notes(), *adapter.kinds.notes_on_hidden_keys()]
    if settings.positions == "text" and options.positions is None:
        notes.append(f"the streaming part uses positions in the text, as {adapter.fixed_positions()}")
    return notes
