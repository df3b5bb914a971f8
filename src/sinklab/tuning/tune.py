"""Instruction tuning as a resumable job."""

import os
import shutil
import time
from dataclasses import dataclass
from pathlib import Path

from sinklab.errors import InputError, SinklabError, require_extra
from sinklab.files import is_full, sha256_of
from sinklab.jobs import JobEvent, Ledger, Observer, StepProgress, check_request, ignore
from sinklab.models.families import family_of
from sinklab.models.hooks import without_bars
from sinklab.models.huggingface.loading import AS_IT_IS, Loading
from sinklab.signals import stop_on_signals
from sinklab.tuning import tuned_directory
from sinklab.tuning.settings import TuneOptions, settings_for
from sinklab.tuning.sft_dataset import SftDataset, TuneSources, prepare_dataset
from sinklab.tuning.tuned_directory import CHECKPOINTS, METRICS, MODEL, SFT, UPDATES, Tuning


@dataclass(frozen=True)
class TuneEnd:
    """Result of a call to `tune`.

    Attributes:
        tuning: content of sft.json; `chat` is None if training was stopped before the last update.
        exit_status: 0 if all updates are done; 130 (SIGINT) or 75 (SIGTERM, SIGUSR1) if training was stopped.
    """

    tuning: Tuning
    exit_status: int = 0


def tune(
    model: str,
    sources: TuneSources,
    options: TuneOptions,
    out: Path,
    *,
    loading: Loading = AS_IT_IS,
    observe: Observer = ignore,
) -> TuneEnd:
    """Fine-tune a model on conversations, or resume an earlier call.

    On SIGINT, SIGTERM or SIGUSR1 training finishes the current update, saves a checkpoint and stops. If the tuning run
    in `out` is already complete, its result is returned.

    Args:
        model: a run directory, a model directory, a .gguf file, or a name on the Hugging Face hub.
        sources: files of conversations, text and chat template.
        options: settings; None values are derived.
        out: output directory; it must not be inside the model's directory.
        loading: device and other options for loading the model; weights are float32.
        observe: callback for progress events.

    Raises:
        InputError: before training, if trl or accelerate is not installed, WORLD_SIZE is not 1, the model, a file or an
            option is unusable, or `out` contains other files, damaged ones, or a tuning run with other settings.
        HeldError: if another process is tuning a model in `out`.
        SinklabError: if a loss or gradient norm is not finite, no checkpoint of a run is valid, or `out` cannot be
            written.
    """
    check_extra()
    ledger = Ledger[Tuning](out, SFT)
    _check_free(out, model)
    with ledger.locked(), without_bars():
        data = prepare_dataset(model, sources, options, loading)
        found = data.tuning
        if (before := ledger.earlier(tuned_directory.load_tuning)) is not None:
            there, now = ({"model": one.model, **one.asked.model_dump()} for one in (before, found))
            check_request(out / SFT, "a tuning run", there, now)
            found = before
        if found.chat is not None:
            return TuneEnd(found)
        for note in found.notes:
            observe(JobEvent("noted", text=note))
        return _train(found, data, out, ledger, observe)


def check_tuned(path: Path, options: TuneOptions, chats: Path) -> None:
    """Check that an earlier tuning run used the requested options and conversations.

    Args:
        path: sft.json of the earlier tuning run.
        options: requested options; `length` and `held_out` default to those of the earlier run.
        chats: requested .jsonl file of conversations.

    Raises:
        InputError: if a setting or the conversations differ (the message names the first difference), sft.json is
            damaged, or the options are invalid (`settings_for`).
    """
    found = tuned_directory.load_tuning(path)
    before = found.asked
    length, held_out = options.length or before.length, options.held_out or before.held_out
    settings = settings_for(options, length, held_out, found.conversations)
    there = before.model_dump()
    check_request(path, "a tuning run", there, {**there, **settings.model_dump(), "data": sha256_of(chats)})


def check_extra() -> None:
    """Check that trl and accelerate are installed, and that tuning runs in a single process.

    Raises:
        InputError: if a package is missing, or torchrun has set WORLD_SIZE to a value other than 1.
    """
    if os.environ.get("WORLD_SIZE", "1") != "1":
        raise InputError("tuning runs in a single process, but WORLD_SIZE is not 1: start it without torchrun")
    require_extra("sft", ("trl", "accelerate"), "instruction tuning")


def _train(found: Tuning, data: SftDataset, out: Path, ledger: Ledger[Tuning], observe: Observer) -> TuneEnd:
    """Run the remaining updates and write sft.json. After the last update, write the model and delete checkpoints."""
    from sinklab.survey.api import SinkCallback
    from sinklab.tuning.trainer import TuneRecord, tuner

    begun, folder, steps, exit_status = time.perf_counter(), out / CHECKPOINTS, data.tuning.asked.steps, 0
    ledger.save(found)
    place, updates, evaluations = tuned_directory.newest(folder)
    if len(updates) < steps:
        sink, progress = SinkCallback(data.tokens_NT, eps=data.tuning.asked.eps), StepProgress("updates", observe)
        with stop_on_signals() as should_stop:
            done = len(updates)
            progress.note(f"resumes after {done} of {steps} updates" if done else f"{steps} updates")
            progress.begin(steps, done=done)
            made = tuner(data, folder, [sink, TuneRecord(out, sink, should_stop, progress)], begins=place is None)
            try:
                made.train(resume_from_checkpoint=str(place) if place else None)
            except Exception as error:
                if not is_full(error):
                    raise
                raise SinklabError(
                    f"the disk of {out} is full: free some space, and rerun the same command to resume from the last "
                    "checkpoint"
                ) from error
            exit_status = should_stop.exit_status
        place, updates, evaluations = tuned_directory.newest(folder)
    done = len(updates) == steps
    found = found.model_copy(
        update={
            "base": evaluations[0] if evaluations else None,
            "chat": evaluations[-1] if done else None,
            "grad_norm_max": max((one.grad_norm for one in updates), default=None),
            "seconds": round(found.seconds + time.perf_counter() - begun, 1),
        }
    )
    if done and place is not None and not (out / MODEL).exists():
        tuned_directory.write_model(place, out / MODEL, found, family_of(data.model.module).exported)
    ledger.save(found)
    if done:
        shutil.rmtree(folder, ignore_errors=True)
    return TuneEnd(found, 0 if done else exit_status)


def _check_free(out: Path, model: str) -> None:
    """Check that `out` is outside the model's directory, whose files are hashed, and that no file is overwritten.

    Raises:
        InputError: if `out` is inside that directory, or contains an output of a tuning run but no sft.json.
    """
    place = Path(model)
    if place.is_dir() and out.resolve().is_relative_to(place.resolve()):
        raise InputError(f"{out} is inside the directory of the model: choose an --out outside it")
    is_tuning = (out / SFT).is_file() and (out / SFT).stat().st_size
    for name in (MODEL, CHECKPOINTS, METRICS, UPDATES):
        if not is_tuning and (out / name).exists():
            raise InputError(f"{out / name} exists and is not part of a tuning run: choose another --out")
