"""Resumable jobs: what is kept, what is run again, and what is refused."""

from pathlib import Path

import pytest

from sinklab.errors import InputError, UnsavedError
from sinklab.jobs import JobEvent, JobStep, StepProgress, check_request, run_steps

REQUEST = {"model": "a", "dtype": "auto"}


def test_results_of_another_request_are_refused_with_the_setting_that_differs(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"contains answers with other settings \(dtype is auto, requested float32\)"):
        check_request(tmp_path / "a.json", "answers", REQUEST, {**REQUEST, "dtype": "float32"})
    check_request(tmp_path / "a.json", "answers", REQUEST, {**REQUEST, "dtype": "float32"}, {"dtype"})


def run(steps: list[JobStep], **options: object) -> list[tuple[str, str, str]]:
    seen: list[JobEvent] = []
    run_steps(steps, seen.append, **options)  # type: ignore[arg-type]
    return [(event.kind, event.step, event.text) for event in seen]


def fails(progress: StepProgress) -> str:
    raise ValueError("first line\nsecond line")


def cannot_be_saved(progress: StepProgress) -> str:
    raise UnsavedError("the disk is full", None)


def test_finished_steps_are_kept_and_a_failure_does_not_stop_the_others() -> None:
    failed: dict[str, str] = {}
    steps = [JobStep("a", fails, kept="5"), JobStep("b", fails), JobStep("c", lambda progress: "7")]
    assert run(steps, on_failure=failed.__setitem__) == [
        ("kept", "a", "5"),
        ("started", "b", ""),
        ("failed", "b", "ValueError: first line"),
        ("started", "c", ""),
        ("finished", "c", "7"),
    ]
    assert failed == {"b": "ValueError: first line"}


def test_an_unsaved_result_stops_the_job() -> None:
    with pytest.raises(UnsavedError):
        run([JobStep("a", cannot_be_saved)], on_failure=lambda name, why: None)
    with pytest.raises(ValueError, match="first line"):
        run([JobStep("a", fails)])
