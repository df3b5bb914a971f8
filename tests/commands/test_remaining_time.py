"""Remaining time of training, with and without a terminal, over all runs and their evaluations."""

import io
import re
from typing import Any

import pytest
from rich.console import Console

from sinklab.commands.results import busy_line
from sinklab.commands.terminal import RunDisplay, duration
from sinklab.experiments.sweep.engine import Event

STEPS, EVAL_EVERY = 100, 10
ROW = {"valid_loss": 3.0, "sink_rate": [1.0], "sink_rate_bias": None, "tokens_per_second": 100.0}
UPDATE, EVALUATION = 2.0, 7.0


class Clock:
    """A clock that is set by the test."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


def events(name: str, until: int, clock: Clock) -> list[tuple[float, Event]]:
    """(time, event) pairs of a run up to step `until`."""
    found, now = [(clock.now, Event(name, "ready"))], clock.now
    for step in range(until + 1):
        now += UPDATE if step else 0.0
        found += [(now, Event(name, "step", step))] if step else []
        if step % EVAL_EVERY == 0:
            now += EVALUATION
            found.append((now, Event(name, "row", step, ROW)))
    clock.now = now
    return found


@pytest.mark.parametrize(("other", "updates"), [("ready", 145), ("failed", 45)])
def test_the_time_left_is_that_of_all_runs_with_their_evaluations(other: Any, updates: int) -> None:
    clock = Clock()
    with RunDisplay(Console(file=io.StringIO()), dict.fromkeys("ab", STEPS), clock) as display:
        display.watch(Event("b", other, 0, message="no more memory"))
        for now, event in events("a", 55, clock):
            clock.now = now
            display.watch(event)
        assert display.seconds_left() == pytest.approx(updates * (UPDATE + EVALUATION / EVAL_EVERY), rel=0.05)


def test_a_run_that_is_continued_is_not_timed_from_its_beginning() -> None:
    clock = Clock()
    with RunDisplay(Console(file=io.StringIO()), {"one": STEPS}, clock) as display:
        clock.now = 1000.0
        display.watch(Event("one", "ready", 70))
        assert display.seconds_left() is None
        for step in range(71, 81):
            clock.now += UPDATE
            display.watch(Event("one", "step", step))
        assert display.seconds_left() == 20 * UPDATE


def test_updates_from_before_this_call_do_not_raise_the_estimated_speed() -> None:
    clock, kept = Clock(), [f"kept {number}" for number in range(63)]
    new = [f"new {number}" for number in range(82)]
    with RunDisplay(Console(file=io.StringIO()), dict.fromkeys([*kept, "held", *new], STEPS), clock) as display:
        for name in kept:
            display.watch(Event(name, "done", STEPS))
        for step in range(STEPS):  # evaluated by another process before
            display.watch(Event("held", "row", step, ROW))
        assert display.seconds_left() is None
        for now, event in events(new[0], STEPS, clock):
            clock.now = now
            display.watch(event)
        assert display.seconds_left() == pytest.approx(81 * STEPS * (UPDATE + EVALUATION / EVAL_EVERY), rel=0.05)


def test_a_failed_run_does_not_discard_the_observed_speed() -> None:
    clock = Clock()
    with RunDisplay(Console(file=io.StringIO()), dict.fromkeys("abc", STEPS), clock) as display:
        for now, event in events("a", 55, clock):
            clock.now = now
            display.watch(event)
        display.watch(Event("b", "failed", 0, message="no more memory"))
        assert display.seconds_left() == pytest.approx(145 * (UPDATE + EVALUATION / EVAL_EVERY), rel=0.05)


@pytest.mark.parametrize("terminal", [False, True])
def test_the_display_shows_the_time_left_for_all_runs_from_the_first_steps_to_the_last(terminal: bool) -> None:
    printed, clock = io.StringIO(), Clock()
    console = Console(file=printed, width=200, force_terminal=terminal)
    with RunDisplay(console, {"a": 1000, "b": 1000}, clock) as display:
        for step in range(300):
            for name in "ab":
                display.watch(Event(name, "step" if step else "ready", step))
            clock.now += 1.0
            if terminal:
                display.progress.refresh()
    said = re.findall(r"about (\d+) min left", printed.getvalue())
    assert said[0] in ("16", "17")
    assert said[-1] in ("11", "12")
    if not terminal:
        lines = printed.getvalue().splitlines()
        assert len(lines) == 29  # every 10 s
        assert re.fullmatch(r"[ab]: step \d+/1000  about \d+ min left for all", lines[-1])


def lines_of_a_run(width: int) -> list[str]:
    """Lines printed for a run of 100 steps without a terminal."""
    printed, clock = io.StringIO(), Clock()
    with RunDisplay(Console(file=printed, width=width), {"one": STEPS}, clock) as display:
        for now, event in events("one", 100, Clock()):
            clock.now = now
            display.watch(event)
    return printed.getvalue().splitlines()


def test_the_line_of_an_evaluation_gives_its_results_and_the_time_left() -> None:
    lines = lines_of_a_run(200)
    assert lines[0] == "one: step 0/100  loss 3.000  Sink_1 1.0 %  100 tokens/s"
    assert any(line.startswith("one: step 90/100  loss 3.000  Sink_1 1.0 %") for line in lines)
    assert all("left" in line for line in lines[1:-2])


def test_a_line_that_is_piped_is_not_broken_at_the_width_of_a_terminal() -> None:
    assert all(line.startswith("one: step") for line in lines_of_a_run(40))


@pytest.mark.parametrize(
    ("seconds", "said"),
    [
        (0.2, "1 s"),
        (59, "59 s"),
        (60, "1 min"),
        (3570, "1 h"),
        (3600 * 3.34, "3 h 20 min"),
        (200000, "2 d 8 h"),
        (86400 * 135.8, "136 d"),
        (86400 * 511, "1.4 years"),
        (86400 * 9875, "27 years"),
        (86400 * 475529, "1,302 years"),
    ],
)
def test_durations_are_rounded_to_readable_units(seconds: float, said: str) -> None:
    assert duration(seconds) == said


def test_a_busy_machine_is_reported_from_a_load_of_half_its_cores() -> None:
    assert busy_line(0.4, 2) == ""
    assert "about 3.0 processes already want its two cores" in busy_line(3.0, 2)
    assert "up to 2.5 times as long" in busy_line(3.0, 2)
