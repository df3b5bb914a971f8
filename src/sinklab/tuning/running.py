"""One tuning from its beginning, or from its newest checkpoint, to the model and its documents."""

import importlib.util
import os
import shutil
import time
from dataclasses import dataclass
from pathlib import Path

from sinklab.errors import InputError, SinklabError
from sinklab.extras import install_command
from sinklab.files import is_full, write_json
from sinklab.models.huggingface.loading import AS_IT_IS, Loading, without_bars
from sinklab.models.native import is_exported
from sinklab.outputs import check_results
from sinklab.signals import stop_on_signals
from sinklab.train.directory.lock import leave, lock_run
from sinklab.tuning.checkpoints import discard_torn, newest, write_model
from sinklab.tuning.documents import (
    METRICS,
    SFT,
    UPDATES,
    TuneEvaluation,
    TuneUpdate,
    Tuning,
    load_tuning,
    read_rows,
)
from sinklab.tuning.preparing import SftDataset, TuneSources, prepare_dataset
from sinklab.tuning.settings import TuneOptions

MODEL, CHECKPOINTS = "model", "checkpoints"


class TuneListener:
    """Is told how the work goes. This one says nothing."""

    def notes(self, notes: list[str]) -> None:
        """What a reader must know of the model and the conversations, before they are used."""

    def starts(self, steps: int, done: int) -> None:
        """Training begins, or goes on after so many of its updates."""

    def updated(self, update: TuneUpdate) -> None:
        """An update was made."""

    def evaluated(self, evaluation: TuneEvaluation) -> None:
        """The model was evaluated."""


@dataclass(frozen=True)
class TuneEnd:
    """How a tuning ended.

    Attributes:
        tuning: as far as it came; without `chat` where it was stopped.
        exit_status: 0, or that of a command which the signal has stopped.
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
    listener: TuneListener | None = None,
) -> TuneEnd:
    """Tune a model, or go on where an earlier call has stopped; what is done already is not done again.

    While it trains, SIGINT, SIGTERM and SIGUSR1 have it finish the update, save, and end.

    Args:
        model: a run directory, a model directory, a .gguf file, or a name on the Hugging Face hub.
        out: for the documents, checkpoints and, in the end, the model; not within the model's own directory.

    Raises:
        InputError: trl is not installed, a model, file or option that cannot be used, or a tuning with other settings
            in `out`; nothing has been written then.
        SinklabError: another process works there, a loss or gradient that is no finite number, or a full disk.
    """
    check_extra()
    check_results(out, (SFT,))
    before = load_tuning(out)
    _check_free(out, model, before)
    is_new = not out.exists()
    with lock_run(out):
        try:
            with without_bars():
                return _tune(model, sources, options, out, before, loading, listener or TuneListener())
        finally:
            leave(out, is_new)


def check_extra() -> None:
    """Refuse to begin without trl, or in several processes.

    Raises:
        InputError: with the command that installs it.
    """
    if os.environ.get("WORLD_SIZE", "1") != "1":
        raise InputError("a model is tuned in one process: start it without torchrun")
    if importlib.util.find_spec("trl") is None or importlib.util.find_spec("accelerate") is None:
        raise InputError(f"instruction tuning needs trl, which is not installed: {install_command('sft')}")


def _tune(
    model: str,
    sources: TuneSources,
    options: TuneOptions,
    out: Path,
    before: Tuning | None,
    loading: Loading,
    listener: TuneListener,
) -> TuneEnd:
    data = prepare_dataset(model, sources, options, loading)
    found = _continued(data.tuning, before, out)
    if found.chat is not None:
        return TuneEnd(found)
    listener.notes(found.notes)
    return _trained(found, data, out, listener)


def _trained(found: Tuning, data: SftDataset, out: Path, listener: TuneListener) -> TuneEnd:
    """Train, and write what has come of it."""
    begun, folder = time.perf_counter(), out / CHECKPOINTS
    write_json(out / SFT, found.document())
    discard_torn(folder)
    updates, evaluations, exit_status = _updated(data, out, listener)
    last = newest(folder)
    done = last is not None and last[0] == data.settings.steps
    found = found.model_copy(
        update={
            "base": evaluations[0] if evaluations else None,
            "chat": evaluations[-1] if done else None,
            "grad_norm_max": max((one.grad_norm for one in updates), default=None),
            "seconds": round(found.seconds + time.perf_counter() - begun, 1),
        }
    )
    if last is not None and done and not (out / MODEL).exists():
        write_model(last[1], out / MODEL, found, is_exported(data.model.module))
    write_json(out / SFT, found.document())
    if done:
        shutil.rmtree(folder, ignore_errors=True)
    return TuneEnd(found, 0 if done else exit_status)


def _updated(data: SftDataset, out: Path, listener: TuneListener) -> tuple[list[TuneUpdate], list[TuneEvaluation], int]:
    """Make the updates still to be made: all so far, all evaluations, and the exit status where a signal came."""
    from sinklab.measuring.huggingface.callback import SinkCallback
    from sinklab.tuning.trainer import TuneRecord, tuner

    steps, checkpoint = data.settings.steps, newest(out / CHECKPOINTS)
    step, place = checkpoint or (0, None)
    updates = [row for row in read_rows(out / UPDATES, TuneUpdate) if row.step <= step]
    evaluations = [row for row in read_rows(out / METRICS, TuneEvaluation) if row.step <= step and place]
    if step == steps:
        return updates, evaluations, 0
    sink = SinkCallback(data.tokens_NT, eps=data.settings.eps)
    with stop_on_signals() as should_stop:
        record = TuneRecord(out, updates, evaluations, sink, should_stop, listener.updated, listener.evaluated)
        listener.starts(steps, step)
        made = tuner(data, out / CHECKPOINTS, [sink, record], begins=place is None)
        try:
            made.train(resume_from_checkpoint=str(place) if place else None)
        except Exception as error:
            if not is_full(error):
                raise
            raise SinklabError(
                f"the disk of {out} is full: free some space, and run the same command again, which goes on from the "
                "last checkpoint"
            ) from error
        return record.updates, record.evaluations, should_stop.exit_status


def _continued(new: Tuning, before: Tuning | None, out: Path) -> Tuning:
    """What an earlier call has left of the same tuning, or the new one.

    Raises:
        InputError: it was another one.
    """
    if before is None:
        return new
    asked, there = ({"model": one.model, **one.asked.model_dump()} for one in (new, before))
    for key in sorted(asked):
        if asked[key] != there[key]:
            raise InputError(
                f"{out / SFT} is of a tuning with other settings ({key} is {there[key]} there and {asked[key]} now): "
                "choose another --out, or repeat the call that made it"
            )
    return before


def _check_free(out: Path, model: str, before: Tuning | None) -> None:
    """Refuse a directory that holds something else, or lies within the model's own, whose files tell what it is.

    Raises:
        InputError: with what is there.
    """
    place = Path(model).expanduser()
    if place.is_dir() and out.resolve().is_relative_to(place.resolve()):
        raise InputError(f"{out} lies in the directory of the model: choose an --out beside it")
    for name in (MODEL, CHECKPOINTS, METRICS, UPDATES):
        if before is None and (out / name).exists():
            raise InputError(f"{out / name} is there already and is no part of a tuning: choose another --out")
