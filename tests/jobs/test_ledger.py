"""Resumable jobs: what is kept, what is run again, and what is refused."""

from pathlib import Path

import pytest

from sinklab.errors import InputError, UnsavedError
from sinklab.jobs.ledger import JobStep, LineLedger, check_request, run_steps
from sinklab.jobs.progress import JobEvent, StepProgress

REQUEST = {"model": "a", "dtype": "auto"}


def test_a_torn_line_is_lost_alone(tmp_path: Path) -> None:
    path = tmp_path / "answers.jsonl"
    LineLedger(path, REQUEST).add({"first": [-1.5, True], "second": "text"})
    path.write_text(path.read_text() + '{"key": "third", "res')
    again = LineLedger(path, REQUEST)
    assert (again.get("first"), again.get("second"), again.get("third")) == ([-1.5, True], "text", None)
    again.add({"third": -2.0})
    assert LineLedger(path, REQUEST).get("third") == -2.0


def test_results_of_another_request_are_refused_with_the_setting_that_differs(tmp_path: Path) -> None:
    path = tmp_path / "answers.jsonl"
    LineLedger(path, REQUEST).add({"first": 1})
    with pytest.raises(InputError, match=r"contains answers with other settings \(dtype is auto, requested float32\)"):
        LineLedger(path, {**REQUEST, "dtype": "float32"})
    check_request(path, "answers", REQUEST, {**REQUEST, "dtype": "float32"}, {"dtype"})


@pytest.mark.parametrize("text", ["my notes\n", '{"mine": 1}\n', "[1]\n", '{"request": 1}\n'])
def test_a_file_that_sinklab_did_not_write_is_left_unchanged(tmp_path: Path, text: str) -> None:
    path = tmp_path / "answers.jsonl"
    path.write_text(text)
    with pytest.raises(InputError, match="not written by sinklab"):
        LineLedger(path, REQUEST)
    assert path.read_text() == text


def test_a_path_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    (tmp_path / "answers.jsonl").mkdir()
    with pytest.raises(InputError, match=r"answers\.jsonl cannot be read"):
        LineLedger(tmp_path / "answers.jsonl", REQUEST)


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
