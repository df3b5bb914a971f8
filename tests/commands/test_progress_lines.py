"""Without a terminal, all commands print the progress of long work every ten seconds."""

import io
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import Run
from rich.console import Console
from tiny_models import text_file, tiny_model

from sinklab.commands.terminal import DataDisplay, JobProgress, RunDisplay, elapsed
from sinklab.experiments.sweep.engine import Event
from sinklab.jobs import JobEvent, StepProgress
from sinklab.measuring.options import Request, Study
from sinklab.survey.measure import measure_model


class Clock:
    """A clock that is set by the test."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


def steps(console: Console, clock: Clock) -> Callable[[int], Any]:
    step = StepProgress("measuring", JobProgress(console, clock=clock))
    step.begin(100)
    return lambda second: step.reach(second, 100)


def requests(console: Console, clock: Clock) -> Callable[[int], Any]:
    step = StepProgress("arc_easy", JobProgress(console, clock=clock))
    step.begin(100)
    return lambda second: step.advance()


def survey(console: Console, clock: Clock) -> Callable[[int], Any]:
    step = StepProgress("gpt2", JobProgress(console, "models", 2, clock=clock))
    step.begin()
    return lambda second: step.reach(second, 100)


def data(console: Console, clock: Clock) -> Callable[[int], Any]:
    display = DataDisplay(console, clock)
    display("tokens", 0, 100 * 10**6)
    display.counted(0)

    def move(second: int) -> None:
        display.counted(second * 500)
        display("tokens", second * 10**6, 100 * 10**6)

    return move


def run(console: Console, clock: Clock) -> Callable[[int], Any]:
    display = RunDisplay(console, {"tiny-0": 100}, clock)
    return lambda second: display.watch(Event("tiny-0", "step", second))


@pytest.mark.parametrize(
    ("made", "said"),
    [
        (steps, "measuring: 10 of 100"),
        (requests, "arc_easy: 10 of 100"),
        (survey, "gpt2: 10 of 100"),
        (data, "preparing tokens: 10 of 100 MB, 500 tokens/s"),
        (run, "tiny-0: step 10/100"),
    ],
)
def test_a_line_is_printed_every_ten_seconds_and_no_more(
    made: Callable[[Console, Clock], Callable[[int], Any]], said: str
) -> None:
    printed, clock = io.StringIO(), Clock()
    move = made(Console(file=printed, width=200), clock)
    for second in range(1, 36):
        clock.now = float(second)
        move(second)
    lines = [line for line in printed.getvalue().splitlines() if not line.endswith("...")]
    assert len(lines) == 3
    assert lines[0].startswith(said)


def silent_job(console: Console, clock: Clock) -> Any:
    return JobProgress(console, phase="reading gpt2 and the text", clock=clock)


def silent_step(console: Console, clock: Clock) -> Any:
    progress = JobProgress(console, clock=clock)
    progress(JobEvent("started", "gpt2"))
    return progress


def silent_data(console: Console, clock: Clock) -> Any:
    return DataDisplay(console, clock)


def silent_runs(console: Console, clock: Clock) -> Any:
    display = RunDisplay(console, {"tiny-0": 100}, clock)
    display.watch(Event("tiny-0", "ready", 40))
    return display


@pytest.mark.parametrize(
    ("made", "said"),
    [
        (silent_job, "reading gpt2 and the text"),
        (silent_step, "gpt2"),
        (silent_data, "reading the text"),
        (silent_runs, "tiny-0: step 40/100"),
    ],
)
def test_a_phase_without_events_is_named_every_ten_seconds(made: Callable[[Console, Clock], Any], said: str) -> None:
    printed, clock = io.StringIO(), Clock()
    lines = made(Console(file=printed, width=200), clock)
    for second in range(35):
        clock.now = float(second)
        lines.beat()
    assert printed.getvalue().splitlines() == [f"{said}, {seconds} s so far" for seconds in (10, 20, 30)]


def test_lines_of_a_long_phase_differ() -> None:
    assert [elapsed(seconds) for seconds in (50, 60, 71, 119.6, 599, 600, 700)] == [
        "50 s", "1 min", "1 min 11 s", "2 min", "9 min 59 s", "10 min", "12 min",
    ]  # fmt: skip


def test_after_its_first_event_a_step_is_printed_with_its_progress() -> None:
    printed, clock = io.StringIO(), Clock()
    progress = JobProgress(Console(file=printed, width=200), phase="reading gpt2", clock=clock)
    clock.now = 8.0
    StepProgress("measuring", progress).reach(3, 100)
    clock.now = 20.0
    progress.beat()
    assert printed.getvalue() == "measuring: 3 of 100, 12 s so far\n"


class Written(io.StringIO):
    """Sets an event with every line."""

    def __init__(self) -> None:
        super().__init__()
        self.event = threading.Event()

    def write(self, text: str) -> int:
        written = super().write(text)
        self.event.set()
        return written


def test_the_phase_is_printed_while_the_work_itself_prints_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sinklab.commands.terminal.BEATS_EVERY", 0.001)
    printed, clock = Written(), Clock()
    threads = threading.active_count()
    with JobProgress(Console(file=printed, width=200), phase="reading gpt2", clock=clock):
        clock.now = 10.0
        assert printed.event.wait(60)
    assert printed.getvalue() == "reading gpt2, 10 s so far\n"
    assert threading.active_count() == threads


@pytest.mark.parametrize("command", ["measure", "assess"])
def test_a_command_prints_that_it_is_reading_the_model_and_the_text(
    command: str, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sinklab.commands.terminal.PROGRESS_INTERVAL", 0.0)
    monkeypatch.setattr("sinklab.commands.terminal.BEATS_EVERY", 0.001)
    model, text = tiny_model(tmp_path / "gpt2", "gpt_neox"), text_file(tmp_path / "text.jsonl")
    parts = ("--parts", "heads") if command == "assess" else ()
    status, _, err = run(command, model, "--text", text, "--sequences", 2, "--length", 16, *parts)
    assert status == 0, err
    assert f"reading {model} and the text, 1 s so far\n" in err


def test_no_progress_lines_are_printed_in_a_terminal() -> None:
    printed, clock = io.StringIO(), Clock()
    move = steps(Console(file=printed, width=200, force_terminal=True), clock)
    clock.now = 60.0
    move(50)
    assert printed.getvalue() == ""


def test_ablations_are_a_part_of_the_progress(tmp_path: Path) -> None:
    seen: list[tuple[float, int]] = []
    measure_model(
        str(tiny_model(tmp_path / "gpt2")),
        text_file(tmp_path / "text.jsonl"),
        Request(sequences=4, length=16, study=Study(ablate=("mask_first:1", "zero_massive", "mask_first:2"))),
        progress=lambda done, total: seen.append((done, total)),
    )
    assert {total for _, total in seen} == {4 * 6}  # no ablation, three ablations, two losses over later targets
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)
    assert seen[-1][0] == 24
