"""Many measurements for one answer, each kept in a folder of its own: an interruption loses none that is finished.

Beside every measurement stands `request.json`, everything that decides its result. The same call again keeps what is
finished; a call that asks for something else is refused, so that no table mixes settings.
"""

import gc
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch

from sinklab.errors import InputError, SinklabError, UnsavedError
from sinklab.files import parse_json, write_json
from sinklab.measuring.measurement import Measurement
from sinklab.models.hooks import Progress
from sinklab.models.huggingface.loading import Loading, name_in_results
from sinklab.opening import model_files
from sinklab.outputs import MEASUREMENT, REPORT, check_results
from sinklab.survey.request import Request

REQUEST = "request.json"
FILES = "files"


class Listener:
    """Is told how the work goes. This one says nothing."""

    def starts(self, name: str) -> None:
        """`name` is measured now."""

    def advances(self, done: float, total: int) -> None:
        """Sequences done, of the measurement that started last."""

    def ends(self, name: str, measurement: Measurement) -> None:
        """`name` is measured."""

    def fails(self, name: str, why: str) -> None:
        """`name` could not be measured."""

    def keeps(self, name: str, measurement: Measurement) -> None:
        """`name` was measured by an earlier call."""


@dataclass(frozen=True)
class Item:
    """One of the measurements.

    Attributes:
        name: its name in the result, and of the folder where it is kept.
        request: everything that decides its result, as plain JSON.
        measure: does it.
    """

    name: str
    request: Mapping[str, Any]
    measure: Callable[[Progress], Measurement]

    def finished(self, folder: Path) -> Measurement | None:
        """The measurement that an earlier call left; None where there is none.

        Raises:
            InputError: what is there was made with other settings, or is damaged.
        """
        if not (folder / "measurement.json").is_file():
            return None
        try:
            asked = parse_json((folder / REQUEST).read_text("utf-8")) if (folder / REQUEST).is_file() else {}
        except ValueError as error:
            raise InputError(f"{folder / REQUEST} is damaged: delete {folder} to measure it again") from error
        differing = sorted(
            key for key in {*asked, *self.request} if _differ(key, asked.get(key), self.request.get(key))
        )
        if differing:
            key = differing[0]
            raise InputError(
                f"{folder} holds a measurement with other settings ({key} is {asked.get(key)} there and "
                f"{self.request.get(key)} now): choose another --out, or repeat the call that made it"
            )
        return Measurement.load(folder)

    def keep(self, folder: Path, measurement: Measurement) -> None:
        """Save the measurement with its request."""
        write_json(folder / REQUEST, self.request)
        measurement.save(folder)


@dataclass
class Outcome:
    """What came of the items, in their order: measurements, and for the others a sentence."""

    measured: dict[str, Measurement] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)


class Result(Protocol):
    """What is made of an outcome: domains, a comparison, families."""

    def document(self) -> dict[str, Any]:
        """As JSON has it."""
        ...


AnyResult = TypeVar("AnyResult", bound=Result)


def measure_all(
    items: Sequence[Item],
    result_of: Callable[[Outcome], AnyResult],
    out: Path | None,
    document: str,
    listener: Listener | None = None,
    *,
    prepare: Callable[[Sequence[str]], None] = lambda unfinished: None,
    others_go_on: bool = True,
) -> AnyResult:
    """Measure what is not finished yet.

    Args:
        result_of: the result, of everything so far.
        out: keeps each measurement in a folder of its name, and the result; None keeps them nowhere.
        document: the file of the result, written whenever there is more.
        prepare: is called before the first is measured, with the names of those that are; not where all are finished.
        others_go_on: one that fails does not stop the others; else the document is written when there are all.

    Raises:
        InputError: a folder that cannot be written, a file in it that is not one of ours, or a measurement with other
            settings; nothing has been measured then.
        UnsavedError: a result could not be saved; it holds the result so far, with what could not be.
        Exception: whatever an item raised, where the others do not go on.
    """
    if out is not None:
        _check_places(items, out, document)
    finished = {item.name: None if out is None else item.finished(out / item.name) for item in items}
    if unfinished := [name for name, found in finished.items() if found is None]:
        prepare(unfinished)
    listener, outcome = listener or Listener(), Outcome()

    @contextmanager
    def saving() -> Iterator[None]:
        try:
            yield
        except SinklabError as error:
            raise UnsavedError(str(error), result_of(outcome)) from error

    def save_document() -> None:
        if out is not None and (others_go_on or len(outcome.measured) == len(items)):
            with saving():
                write_json(out / document, result_of(outcome).document())

    for item in items:
        if before := finished[item.name]:
            outcome.measured[item.name] = before
            listener.keeps(item.name, before)
            continue
        listener.starts(item.name)
        _release_memory()
        found = _attempt(item, listener, others_go_on)
        if isinstance(found, str):
            outcome.failed[item.name] = found
            listener.fails(item.name, found)
        else:
            outcome.measured[item.name] = found
            if out is not None:
                with saving():
                    item.keep(out / item.name, found)
            listener.ends(item.name, found)
        save_document()
    save_document()
    return result_of(outcome)


def _check_places(items: Sequence[Item], out: Path, document: str) -> None:
    check_results(out, (document, REPORT))
    for item in items:
        check_results(out / item.name, (*MEASUREMENT, REQUEST))


def _attempt(item: Item, listener: Listener, others_go_on: bool) -> Measurement | str:
    """The measurement, or a sentence on why there is none: the error itself would keep its model in memory."""
    try:
        return item.measure(listener.advances)
    except Exception as error:  # the code of a foreign model can raise anything
        if not others_go_on:
            raise
        return _sentence(error)


def what_decides(
    model: str, place: Path | None, text: str | None, loading: Loading, request: Request
) -> dict[str, Any]:
    """Everything that decides a measurement's result, as plain JSON.

    Args:
        model: its name.
        place: where it lies, a directory or a file; None for a model of the hub.
        text: what tells the text from another one; None where there is none.
    """
    files = None if place is None else model_files(place)
    loaded = {"revision": loading.revision, "dtype": loading.dtype}
    named = name_in_results(model, loading.subfolder)
    return json.loads(json.dumps({"model": named, FILES: files, "text": text, **loaded, **request.document()}))


def _differ(key: str, before: Any, now: Any) -> bool:
    """A model that is no longer here, or was not then, cannot be told from itself."""
    return before != now and not (key == FILES and None in (before, now))


def _sentence(error: Exception) -> str:
    if isinstance(error, SinklabError):
        return str(error)
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def _release_memory() -> None:
    """A model needs the memory of the one before it."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
