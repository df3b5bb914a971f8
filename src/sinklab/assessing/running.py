"""All parts of an assessment, one after the other; what is finished is kept, and the same call goes on from it."""

import hashlib
import json
import time
from pathlib import Path

from sinklab.assessing.assessment import ASSESSMENT, HELD_OUT, Assessment, load_assessment
from sinklab.assessing.part import PartJob
from sinklab.assessing.parts import PARTS, USUAL
from sinklab.assessing.plan import AssessOptions, AssessSettings, settings_for
from sinklab.assessing.text import AssessText, open_separable
from sinklab.data.sources.corpora import documents
from sinklab.errors import InputError, SinklabError, UnsavedError
from sinklab.files import parse_json, write_json
from sinklab.models.huggingface.loading import AS_IT_IS, Loading
from sinklab.opening import is_run
from sinklab.outputs import check_results
from sinklab.train.directory.lock import one_writer


class AssessListener:
    """Is told how the work goes. This one says nothing."""

    def starts(self, part: str, passes: int) -> None:
        """A part begins, which reads sequences so often."""

    def advances(self) -> None:
        """A sequence was read once more."""

    def ends(self, part: str, seconds: float) -> None:
        """The part is done."""

    def keeps(self, part: str) -> None:
        """The part was done by an earlier call."""

    def skips(self, part: str, why: str) -> None:
        """The model cannot be given this part."""


def assess(
    model: str,
    text: Path | None,
    options: AssessOptions,
    *,
    loading: Loading = AS_IT_IS,
    out: Path | None = None,
    listener: AssessListener | None = None,
) -> Assessment:
    """What a sink costs and buys in one model; with `out`, every part is kept there as soon as it is done.

    Args:
        model: a run directory, a model directory, a .gguf file, or a name on the Hugging Face hub.
        text: a .txt or .jsonl file or a folder of them; its documents are read as one stream. What a run was validated
            on unless given.

    Raises:
        InputError: a model, text or option that cannot be used, a part that was asked for by name and that the model
            cannot be given, or an assessment with other settings in `out`; nothing has been written then.
        HeldError: another process writes an assessment to `out`.
        UnsavedError: a part could not be saved; it holds the assessment so far.
        SinklabError: a change makes the model compute NaN.
    """
    for name in options.parts:
        if name not in PARTS:
            given = ",".join(options.parts)
            raise InputError(f"--parts {given}: {name!r} is none; give some of {', '.join(PARTS)}, or all")
    options = options.model_copy(update={"parts": tuple(part for part in PARTS if part in options.parts)})
    if out is not None:
        check_results(out, (ASSESSMENT,))
    if text is not None:
        next(documents(str(text)))
    elif not is_run(model):
        raise InputError(f"--text is needed: {model} is no run, whose validation text could be read")
    with one_writer(None if out is None else out / ASSESSMENT):
        return _assessed(model, text, options, loading, out, listener or AssessListener())


def _assessed(
    model: str, text: Path | None, options: AssessOptions, loading: Loading, out: Path | None, listener: AssessListener
) -> Assessment:
    source = AssessText(open_separable(model, loading), text)
    settings, adapter = settings_for(source.model, options), source.model.adapter
    jobs, skipped = _jobs(source, settings, options)
    asked = {
        "model": model,
        "files": source.model.files,
        "text": _hash(source, settings),
        **settings.model_dump(mode="json"),
    }
    if text is None:
        asked[HELD_OUT] = True
    found = Assessment(
        model=model,
        context=adapter.context,
        layers=len(adapter.blocks),
        asked={**asked, "dtype": loading.dtype},
        notes=_notes(source, settings, options),
    )
    found = _continued(found, out)
    for part in options.parts or USUAL:
        if part in skipped:
            found = found.model_copy(update={"skipped": {**found.skipped, part: skipped[part]}})
            listener.skips(part, skipped[part])
        elif part in found.results:
            listener.keeps(part)
            continue
        else:
            listener.starts(part, jobs[part].passes)
            start = time.perf_counter()
            done = jobs[part].run(listener.advances)
            seconds = round(time.perf_counter() - start, 1)
            found = found.with_result(done, seconds)
            listener.ends(part, seconds)
        _keep(found, out)
    return found


def _jobs(
    text: AssessText, settings: AssessSettings, options: AssessOptions
) -> tuple[dict[str, PartJob], dict[str, str]]:
    """The parts that can be done, and why the others cannot; parts asked for by name must be possible."""
    jobs: dict[str, PartJob] = {}
    skipped: dict[str, str] = {}
    for name in options.parts or USUAL:
        part = PARTS[name]
        why = part.refusal(text.model.adapter, settings)
        if why is None:
            try:
                jobs[name] = part.job(text, settings)
                continue
            except InputError as error:
                if not part.long_text:
                    raise
                why = str(error)
        if options.parts and not options.where_possible:
            raise InputError(f"the part `{name}` cannot be done: {why}")
        skipped[name] = why
    return jobs, skipped


def _notes(text: AssessText, settings: AssessSettings, options: AssessOptions) -> list[str]:
    model = text.model
    kinds, step, planned = model.adapter.kinds, model.step, model.planned_steps
    notes = [*model.notes] if step == planned else [f"the run stands at step {step} of {planned}", *model.notes]
    notes += [*text.conversations.notes(), *kinds.notes(), *kinds.notes_on_hidden_keys()]
    if settings.positions == "text" and options.positions is None:
        notes.append(f"positions in the streaming part are those in the text, as {model.adapter.fixed_positions()}")
    return notes


def _hash(text: AssessText, settings: AssessSettings) -> str:
    """A SHA-256 of the first tokens that a part reads."""
    tokens_NT = text.sequences(settings.sequences, settings.length)
    return hashlib.sha256(tokens_NT.numpy().tobytes()).hexdigest()


def _continued(new: Assessment, out: Path | None) -> Assessment:
    """What an earlier call has left of the same assessment, or the new one."""
    path = None if out is None else out / ASSESSMENT
    if path is None or not path.is_file() or not path.stat().st_size:
        return new
    before = load_assessment(path)
    asked = parse_json(json.dumps(new.asked))
    same_files = asked["files"] is not None and asked["files"] == before.asked.get("files")
    compared = {*asked, *before.asked} - ({"model"} if same_files else set())
    differing = sorted(key for key in compared if asked.get(key) != before.asked.get(key))
    if differing:
        key = differing[0]
        raise InputError(
            f"{path} holds an assessment with other settings ({key} is {before.asked.get(key)} there and "
            f"{asked.get(key)} now): choose another --out, or repeat the call that made it"
        )
    return before.model_copy(update={"notes": new.notes})


def _keep(found: Assessment, out: Path | None) -> None:
    if out is not None:
        try:
            write_json(out / ASSESSMENT, found.document())
        except SinklabError as error:
            raise UnsavedError(str(error), found) from error
