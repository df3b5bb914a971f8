"""All parts of an assessment, one after the other; what is finished is kept, and the same call goes on from it."""

import hashlib
import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from pydantic import BaseModel
from torch import Tensor

from sinklab.assessing.caches import RollingCache
from sinklab.assessing.carries import SHIFTS, assess_carries, has_bias
from sinklab.assessing.documents import ASSESSMENT, HELD_OUT, Assessment, AssessPart, load_assessment
from sinklab.assessing.eviction import POLICIES, HeavyHitters, assess_eviction
from sinklab.assessing.heads import assess_heads
from sinklab.assessing.layers import Change, LayerAttention, Patient
from sinklab.assessing.length import assess_length
from sinklab.assessing.loading import Admitted, admit
from sinklab.assessing.plan import KEPT, PARTS, STREAMED, AssessOptions, AssessSettings, settings_for
from sinklab.assessing.quantisation import SETTINGS, assess_quantisation
from sinklab.assessing.reading import Step
from sinklab.assessing.streaming import assess_streaming
from sinklab.data.sources.corpora import documents
from sinklab.errors import InputError, SinklabError, UnsavedError
from sinklab.files import parse_json, write_json
from sinklab.models.hooks import evaluating
from sinklab.models.huggingface.loading import AS_IT_IS, Loading
from sinklab.outputs import check_results
from sinklab.survey.loaded import is_run
from sinklab.train.directory.lock import one_writer

CALIBRATED = 4  # sequences at most


class AssessListener:
    """Is told how the work goes. This one says nothing."""

    def starts(self, part: AssessPart, passes: int) -> None:
        """A part begins, which reads sequences so often."""

    def advances(self) -> None:
        """A sequence was read once more."""

    def ends(self, part: AssessPart, seconds: float) -> None:
        """The part is done."""

    def keeps(self, part: AssessPart) -> None:
        """The part was done by an earlier call."""

    def skips(self, part: AssessPart, why: str) -> None:
        """The model cannot be given this part."""


@dataclass(frozen=True)
class Job:
    """One part, ready to be done.

    Attributes:
        passes: how often a sequence is read.
        run: does it.
    """

    passes: int
    run: Callable[[Step], BaseModel]


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
    admitted = admit(model, loading)
    settings = settings_for(admitted.patient, options)
    jobs, skipped = _jobs(admitted, text, settings, options)
    asked = {
        "model": model,
        "files": admitted.files,
        "text": _hash(admitted, text, settings),
        **settings.model_dump(mode="json"),
    }
    if text is None:
        asked[HELD_OUT] = True
    found = Assessment(
        model=model,
        context=admitted.patient.context,
        layers=len(admitted.patient.blocks),
        asked={**asked, "dtype": loading.dtype},
        notes=_notes(admitted, settings, options),
    )
    found = _continued(found, out)
    for part in options.parts or PARTS:
        if part in skipped:
            found = found.model_copy(update={"skipped": {**found.skipped, part: skipped[part]}})
            listener.skips(part, skipped[part])
        elif getattr(found, part) is not None:
            listener.keeps(part)
            continue
        else:
            listener.starts(part, jobs[part].passes)
            start = time.perf_counter()
            done = jobs[part].run(listener.advances)
            seconds = {**found.seconds, part: round(time.perf_counter() - start, 1)}
            found = found.model_copy(update={part: done, "seconds": seconds})
            listener.ends(part, seconds[part])
        _keep(found, out)
    return found


def document(assessment: Assessment) -> dict[str, object]:
    """What assessment.json holds."""
    return assessment.model_dump(mode="json", by_alias=True)


def _jobs(
    admitted: Admitted, text: Path | None, settings: AssessSettings, options: AssessOptions
) -> tuple[dict[AssessPart, Job], dict[AssessPart, str]]:
    """The parts that can be done, and why the others cannot; of those asked for by name, every one can be."""
    jobs: dict[AssessPart, Job] = {}
    skipped: dict[AssessPart, str] = {}
    for part in options.parts or PARTS:
        why = _why_not(part, admitted.patient, settings)
        if why is None and part == "length":
            try:
                jobs[part] = _job(part, admitted, text, settings)
            except InputError as error:
                why = str(error)
        elif why is None:
            jobs[part] = _job(part, admitted, text, settings)
        if why is not None:
            if part in options.parts and not options.where_possible:
                raise InputError(f"the part `{part}` cannot be done: {why}")
            skipped[part] = why
    return jobs, skipped


def _job(part: AssessPart, admitted: Admitted, text: Path | None, settings: AssessSettings) -> Job:
    patient, s = admitted.patient, settings
    if part == "streaming":
        tokens_NT = admitted.sequences(text, s.stream_sequences, s.stream_length)
        readings = sum(first < size for size in s.caches for first in s.kept)
        run = partial(assess_streaming, patient, tokens_NT, s.caches, s.kept, s.positions)
        return Job((1 + readings) * len(tokens_NT), run)
    if part == "length":
        assert s.long_length is not None
        tokens_NT = admitted.sequences(text, max(1, STREAMED // s.long_length), s.long_length)
        return Job(2 * len(tokens_NT), partial(assess_length, patient, tokens_NT))
    if part == "quantisation":
        both_NT = admitted.sequences(text, s.sequences + min(s.sequences, CALIBRATED), s.length, fewest=2)
        N = max(1, len(both_NT) - min(s.sequences, CALIBRATED))
        run = partial(assess_quantisation, patient, both_NT[:N], both_NT[N:], s.sink_tokens)
        return Job((1 + 2 * len(SETTINGS)) * N + 2 * (len(both_NT) - N), run)
    tokens_NT = admitted.sequences(text, s.sequences, s.length)
    if part == "eviction":
        run = partial(assess_eviction, patient, tokens_NT, s.budgets, max(s.kept) or max(KEPT), s.seed)
        return Job((1 + POLICIES * len(s.budgets)) * len(tokens_NT), run)
    if part == "heads":
        return Job(2 * len(tokens_NT), partial(assess_heads, patient, tokens_NT))
    kinds = 4 if has_bias(patient, tokens_NT) else 3
    run = partial(assess_carries, patient, tokens_NT, s.sink_tokens, SHIFTS, s.seed)
    return Job((1 + kinds * (4 + len(SHIFTS))) * len(tokens_NT), run)


def _why_not(part: AssessPart, patient: Patient, settings: AssessSettings) -> str | None:
    """Why the model cannot be given a part, as a few tokens tell."""
    if part == "length":
        return patient.ends
    trials: dict[AssessPart, Change] = {
        "streaming": RollingCache(2, 1, in_cache=settings.positions == "cache"),
        "eviction": HeavyHitters(2),
        "carries": _told_apart,
        "heads": _told_apart,
    }
    if part not in trials:
        return None
    try:
        with evaluating(patient.module), patient.changed(trials[part]):
            patient.hidden(torch.tensor([[1, 0, 1, 0]], device=patient.device))
    except InputError as error:
        return str(error)
    return None


def _told_apart(layer: LayerAttention) -> Tensor:
    return layer.weighted(*layer.scores())


def _notes(admitted: Admitted, settings: AssessSettings, options: AssessOptions) -> list[str]:
    kinds = admitted.patient.kinds
    notes = [*admitted.notes, *admitted.conversations.notes(), *kinds.notes(), *kinds.notes_on_hidden_keys()]
    if settings.positions == "text" and options.positions is None:
        notes.append(f"positions in the streaming part are those in the text, as {admitted.patient.fixed_positions}")
    return notes


def _hash(admitted: Admitted, text: Path | None, settings: AssessSettings) -> str:
    """A SHA-256 of the first tokens that a part reads."""
    tokens_NT = admitted.sequences(text, settings.sequences, settings.length)
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
            write_json(out / ASSESSMENT, document(found))
        except SinklabError as error:
            raise UnsavedError(str(error), found) from error
