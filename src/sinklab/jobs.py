"""Resumable jobs: results are saved after each step, and a repeated call computes the missing results.

The request of a job contains all settings that affect its results. It is saved with the results, in one JSON document
(`Ledger`). If saved results have other settings, the job raises InputError (`check_request`), so that a document never
mixes settings. An observer, such as the terminal display, receives the progress as events.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, Literal, Protocol, TypeVar

from sinklab.errors import InputError, SinklabError, UnsavedError, cause
from sinklab.files import check_results, write_json
from sinklab.train.lock import one_writer

EventKind = Literal["started", "advanced", "finished", "kept", "failed", "skipped", "noted"]


@dataclass(frozen=True)
class JobEvent:
    """Progress event of a job.

    Attributes:
        kind: "started" at the start of a step, and again when its total is known; "advanced" after completed units;
            "finished" or "failed" at its end; "kept" for a step finished by an earlier call; "skipped" for a step that
            is not applicable; "noted" for a note.
        step: name of the step; empty for a note on the job.
        done, total: numbers of completed and of all units of the step; `total` is None if unknown.
        text: current activity, short result, reason for a failure or skip, or note.
        seconds: duration of the step in seconds, for "finished".
    """

    kind: EventKind
    step: str = ""
    done: float = 0.0
    total: int | None = None
    text: str = ""
    seconds: float = 0.0


Observer = Callable[[JobEvent], None]


def ignore(event: JobEvent) -> None:
    """Observer that ignores events."""


class StepProgress:
    """Reports the progress of one step of a job to an observer."""

    def __init__(self, step: str, observe: Observer) -> None:
        self._step, self._observe = step, observe
        self._done = 0.0
        self._total: int | None = None

    def begin(self, total: int | None = None, text: str = "", done: float = 0.0) -> None:
        """Report the start of the step with `done` completed units; call again when the total is known."""
        self._done, self._total = done, total
        self._observe(JobEvent("started", self._step, done, total, text))

    def advance(self, units: float = 1, text: str = "") -> None:
        """Report further completed units of the step."""
        self.reach(self._done + units, self._total, text)

    def note(self, text: str) -> None:
        """Report a note on the step."""
        self._observe(JobEvent("noted", self._step, self._done, self._total, text))

    def reach(self, done: float, total: int | None, text: str = "") -> None:
        """Report the number of completed units so far, and the total (None if unknown)."""
        self._done, self._total = done, total
        self._observe(JobEvent("advanced", self._step, done, total, text))


class JobDocument(Protocol):
    """Results of all finished steps of a job."""

    def document(self) -> dict[str, Any]:
        """Return the results as a JSON-serializable dict."""
        ...


AnyDocument = TypeVar("AnyDocument", bound=JobDocument)


class Ledger(Generic[AnyDocument]):
    """Results of a job, saved as the JSON document `name` in `out`; None: results are not saved.

    Raises:
        InputError: if the directory cannot be written, or an existing file was not written by sinklab.
    """

    def __init__(self, out: Path | None, name: str) -> None:
        self.path = None if out is None else out / name
        if out is not None:
            check_results(out, (name,))

    def locked(self) -> AbstractContextManager[None]:
        """Return a context manager that locks the document against other writers; without `out`, it does nothing.

        Raises:
            HeldError: on entering, if another process is writing the document.
            SinklabError: on entering, if the directory cannot be written or locked.
        """
        return one_writer(self.path)

    def earlier(self, load: Callable[[Path], AnyDocument]) -> AnyDocument | None:
        """Return the results of an earlier call, read with `load`; None if there are none. `load` may raise errors."""
        if self.path is None or not self.path.is_file() or not self.path.stat().st_size:
            return None
        return load(self.path)

    def save(self, found: AnyDocument) -> None:
        """Write the results to the file atomically; without `out`, do nothing.

        Raises:
            UnsavedError: if the file cannot be written; the exception contains the results.
        """
        with unsaved(lambda: found):
            if self.path is not None:
                write_json(self.path, found.document())


@contextmanager
def unsaved(result: Callable[[], object]) -> Iterator[None]:
    """Context manager that converts a SinklabError to an UnsavedError that contains `result()`."""
    try:
        yield
    except SinklabError as error:
        raise UnsavedError(str(error), result()) from error


def check_request(
    path: Path, what: str, before: Mapping[str, Any], now: Mapping[str, Any], ignored: Set[str] = frozenset()
) -> None:
    """Check that earlier results were computed with the current settings.

    Args:
        what: description of the results, such as "an assessment".
        before, now: earlier and current settings, JSON-serializable; the settings named in `ignored` may differ.

    Raises:
        InputError: if a setting differs; the message has the first such setting in alphabetical order.
    """
    for key in sorted({*before, *now} - ignored):
        if before.get(key) != now.get(key):
            raise InputError(
                f"{path} contains {what} with other settings ({key} is {before.get(key)}, requested {now.get(key)}): "
                "choose another --out, or use the earlier settings"
            )


@dataclass(frozen=True)
class JobStep:
    """Step of a job.

    Attributes:
        run: function (progress reporter) that computes and saves the result, and returns a short summary of it.
        kept: such a summary of a result that an earlier call has saved; None if the step must be run.
    """

    name: str
    run: Callable[[StepProgress], str]
    kept: str | None = None


def run_steps(
    steps: Iterable[JobStep], observe: Observer, on_failure: Callable[[str, str], None] | None = None
) -> None:
    """Run the unfinished steps of a job in order, and report the progress of all steps.

    Args:
        on_failure: callback (name, reason) for a failed step; later steps are still run. Default: raise the error.

    Raises:
        UnsavedError: if a result cannot be saved, also with `on_failure`.
        Exception: the error of a step, if `on_failure` is None.
    """
    for step in steps:
        if step.kept is not None:
            observe(JobEvent("kept", step.name, text=step.kept))
            continue
        observe(JobEvent("started", step.name))
        start = time.perf_counter()
        try:
            text = step.run(StepProgress(step.name, observe))
        except Exception as error:  # code of a model repository can raise anything
            if on_failure is None or isinstance(error, UnsavedError):
                raise
            reason = str(error) if isinstance(error, SinklabError) else f"{type(error).__name__}: {cause(error)}"
            on_failure(step.name, reason)
            observe(JobEvent("failed", step.name, text=reason))
        else:
            observe(JobEvent("finished", step.name, text=text, seconds=time.perf_counter() - start))
