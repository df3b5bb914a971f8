"""When training will be done: said with and without a terminal, over all runs and their evaluations."""

import io
import re

import pytest
from rich.console import Console

from sinklab.commands.console import Forecast, RunBoard, RunLength, duration, short_duration
from sinklab.experiments.sweep.engine import Event

LENGTH = RunLength(steps=100, eval_every=10)
ROW = {"valid_loss": 3.0, "sink_rate": [1.0], "sink_rate_bias": None, "tokens_per_second": 100.0}
UPDATE, EVALUATION = 2.0, 7.0


class Clock:
    """Seconds that pass when they are told to."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


def whole(length: RunLength = LENGTH) -> float:
    """Seconds of a run at the pace of these tests: every update, every evaluation, the measurement at the end."""
    return length.steps * UPDATE + (length.steps // length.eval_every + 2) * EVALUATION


def events(name: str, until: int, clock: Clock, length: RunLength = LENGTH) -> list[tuple[float, Event]]:
    """What a run reports up to a step, and when."""
    found, now = [(clock.now, Event(name, "ready"))], clock.now
    for step in range(until + 1):
        now += UPDATE if step else 0.0
        found += [(now, Event(name, "step", step))] if step else []
        if step % length.eval_every == 0:
            now += EVALUATION
            found.append((now, Event(name, "row", step, ROW)))
    clock.now = now
    return found


@pytest.mark.parametrize("until", [11, 15, 50, 99])
def test_the_time_left_counts_updates_and_evaluations(until: int) -> None:
    clock, forecast = Clock(), Forecast({"one": LENGTH}, 1)
    for now, event in events("one", until, clock):
        forecast.reached("one", event.step, now, event.kind == "row")
    assert forecast.seconds_left(clock.now) == pytest.approx(whole() - clock.now, rel=1e-9)
    assert forecast.seconds_left(clock.now + 1) == pytest.approx(whole() - clock.now - 1, rel=1e-9)


def test_the_time_left_counts_runs_that_wait_for_others() -> None:
    clock, forecast = Clock(), Forecast(dict.fromkeys("abc", LENGTH), 2)
    for name in "ab":
        clock.now = 0.0
        for now, event in events(name, 55, clock):
            forecast.reached(name, event.step, now, event.kind == "row")
        assert (forecast.seconds_left(clock.now) is not None) == (name in "ab")
    assert forecast.seconds_left(clock.now) == pytest.approx(2 * whole() - clock.now, rel=1e-9)
    forecast.ended("c")
    assert forecast.seconds_left(clock.now) == pytest.approx(whole() - clock.now, rel=1e-9)
    forecast.ended("a")
    forecast.ended("b")
    assert forecast.seconds_left(clock.now) == 0


def test_a_run_that_is_continued_is_not_timed_from_its_beginning() -> None:
    forecast = Forecast({"one": LENGTH}, 1)
    forecast.reached("one", 90, 1000.0)
    assert forecast.seconds_left(1000.0) is None
    for step in range(91, 96):
        forecast.reached("one", step, 1000.0 + UPDATE * (step - 90))
    assert forecast.seconds_left(1010.0) == pytest.approx(5 * UPDATE, rel=1e-9)


@pytest.mark.parametrize("terminal", [False, True])
def test_the_board_says_after_some_steps_when_all_will_be_done_and_keeps_saying_it(terminal: bool) -> None:
    printed, clock = io.StringIO(), Clock()
    console = Console(file=printed, width=200, force_terminal=terminal)
    lengths = {"a": RunLength(1000, 500), "b": RunLength(1000, 500)}
    with RunBoard(console, lengths, 2, clock) as board:
        for step in range(300):
            for name in "ab":
                board.watch(Event(name, "step" if step else "ready", step))
            clock.now += 1.0
            if terminal:
                board.progress.refresh()
    said = re.findall(r"about (\d+) min left", printed.getvalue())
    assert said[0] in ("16", "17")
    assert said[-1] in ("11", "12")
    if not terminal:
        lines = printed.getvalue().splitlines()
        assert len(lines) == 29  # every 10 s
        assert re.fullmatch(r"[ab]: step \d+/1000  about \d+ min left for all", lines[-1])


def lines_of_a_run(width: int) -> list[str]:
    """What the board prints of a run of 100 steps where there is no terminal."""
    printed, clock = io.StringIO(), Clock()
    with RunBoard(Console(file=printed, width=width), {"one": LENGTH}, 1, clock) as board:
        for now, event in events("one", 100, Clock()):
            clock.now = now
            board.watch(event)
    return printed.getvalue().splitlines()


def test_a_line_per_evaluation_says_what_came_out_and_what_is_left() -> None:
    lines = lines_of_a_run(200)
    assert lines[0] == "one: step 0/100  loss 3.000  Sink_1 1.0 %  100 tokens/s"
    assert any(line.startswith("one: step 90/100  loss 3.000  Sink_1 1.0 %") for line in lines)
    assert all("left" in line for line in lines[1:])


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
def test_durations_are_said_as_people_say_them(seconds: float, said: str) -> None:
    assert duration(seconds) == said


@pytest.mark.parametrize(
    ("seconds", "said"),
    [
        (59, "59 s"),
        (43 * 60, "43 min"),
        (3570, "1.0 h"),
        (3600 * 3.28, "3.3 h"),
        (3600 * 23.9, "24 h"),
        (200000, "2.3 d"),
        (86400 * 136, "136 d"),
        (86400 * 511, "1.4 y"),
        (86400 * 475529, "1,302 y"),
    ],
)
def test_durations_of_a_table_have_one_unit(seconds: float, said: str) -> None:
    assert short_duration(seconds) == said
