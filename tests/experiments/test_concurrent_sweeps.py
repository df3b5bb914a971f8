"""Any number of processes share the runs of a sweep, and any of them may be killed at any moment."""

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import IO, Any

import pytest
from sweeps import planned_run, write_experiment

from sinklab.experiments.documents import SUMMARY, read_record
from sinklab.experiments.sweep import engine as scheduling
from sinklab.experiments.sweep import local
from sinklab.experiments.sweep.engine import Event, PlannedRun, train_all
from sinklab.experiments.sweep.local import LocalEngine, cores_here, shares
from sinklab.experiments.sweep.worker import train_cell
from sinklab.signals import PreemptedError
from sinklab.train.lock import lock_run

UNREPEATABLE = {"seconds", "tokens_per_second", "peak_memory_mb"}


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SINKLAB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(scheduling, "EVENT_TIMEOUT_S", 0.01)
    monkeypatch.setattr(scheduling, "HELD_POLL_S", 0.0)


class OneByOne:
    """An engine that trains in this process, one run when it is asked for events.

    Args:
        before: called with the name of a run before it is trained.
    """

    def __init__(self, before: Callable[[str], None] = lambda name: None) -> None:
        self.before = before
        self.trained: list[str] = []
        self.waiting: list[PlannedRun] = []
        self.stopping = self.closed = False

    def room(self) -> int:
        return 1 - len(self.waiting)

    def submit(self, runs: Sequence[PlannedRun]) -> None:
        self.waiting += runs

    def events(self, timeout: float) -> Sequence[Event]:
        if not self.waiting:
            return []
        run = self.waiting.pop()
        self.before(run.name)
        self.trained.append(run.name)
        return [train_cell(run, 1, lambda event: None, lambda: self.stopping)]

    def stop(self) -> None:
        self.stopping = True

    def close(self) -> None:
        self.closed = True


def test_runs_are_trained_in_order_and_finished_runs_are_skipped(tmp_path: Path) -> None:
    runs = [planned_run(name, tmp_path) for name in "abc"]
    train_cell(runs[1], 1, lambda event: None, lambda: False)
    engine = OneByOne()
    ended = train_all(runs, engine, lambda event: None)
    assert engine.trained == ["a", "c"]
    assert {name: event.kind for name, event in ended.items()} == dict.fromkeys("abc", "done")
    assert engine.closed


def test_finished_runs_are_reported_before_any_run_is_trained(tmp_path: Path) -> None:
    runs = [planned_run(name, tmp_path) for name in "abc"]
    train_cell(runs[2], 1, lambda event: None, lambda: False)
    told: list[str] = []
    train_all(runs, OneByOne(lambda run: told.append(f"training {run}")), lambda event: told.append(event.run))
    assert told == ["c", "training a", "a", "training b", "b"]


def test_a_run_that_another_process_trains_is_skipped_and_awaited(tmp_path: Path) -> None:
    runs = [planned_run(name, tmp_path) for name in "abc"]
    lock = lock_run(runs[0].directory)
    told: list[Event] = []

    def other(name: str) -> None:
        """Simulate that the other process ends while the last run is trained."""
        if name == "c":
            lock.close()
            train_cell(runs[0], 1, lambda event: None, lambda: False)

    engine = OneByOne(other)
    ended = train_all(runs, engine, told.append)
    assert engine.trained == ["b", "c"]
    assert ended["a"].kind == "done"
    assert [event.kind for event in told if event.run == "a"] == ["done"]


def test_the_progress_of_a_run_in_another_process_is_reported(tmp_path: Path) -> None:
    runs = [planned_run(name, tmp_path) for name in "ab"]
    train_cell(runs[0], 1, lambda event: None, lambda: False)
    (runs[0].directory / "record.json").unlink()  # absent while the other process trains
    lock = lock_run(runs[0].directory)
    told: list[Event] = []

    def watch(event: Event) -> None:
        told.append(event)
        if event.run == "a" and event.step == 4:
            lock.close()

    train_all(runs, OneByOne(), watch)
    assert [(event.kind, event.step) for event in told if event.run == "a"][:3] == [("row", 0), ("row", 2), ("row", 4)]


def test_a_run_whose_process_has_died_is_trained_by_the_next(tmp_path: Path) -> None:
    runs = [planned_run(name, tmp_path) for name in "ab"]
    locks: list[IO[str]] = [lock_run(runs[0].directory)]
    engine = OneByOne(lambda name: locks.pop().close() if locks else None)
    ended = train_all(runs, engine, lambda event: None)
    assert engine.trained == ["b", "a"]
    assert ended["a"].kind == "done"


def test_more_runs_than_cores_divide_the_cores_of_this_process_not_of_the_machine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 64 * cores_here())
    assert {share.threads for share in shares(2 * cores_here())} == {1}


def test_a_failed_run_does_not_stop_the_others(tmp_path: Path) -> None:
    runs = [planned_run(name, tmp_path) for name in "ab"]
    runs[0].directory.mkdir()
    (runs[0].directory / "metrics.jsonl").write_text("mine")
    ended = train_all(runs, OneByOne(), lambda event: None)
    assert {name: event.kind for name, event in ended.items()} == {"a": "failed", "b": "done"}


@pytest.mark.parametrize("who", ["the parent", "a run"])
def test_parallel_runs_save_and_stop_after_a_signal_to_one_process(who: str, tmp_path: Path) -> None:
    runs = [planned_run(name, tmp_path, {"train": {"steps": 30000}}) for name in "ab"]
    engine, seen = LocalEngine(2), set[str]()

    def stop(event: Event) -> None:
        if event.kind == "row" and event.step == 2:
            seen.add(event.run)
            if len(seen) == 2:
                os.kill(os.getpid() if who == "the parent" else engine.processes()[0], signal.SIGTERM)

    with pytest.raises(PreemptedError):
        train_all(runs, engine, stop)
    assert all(list((run.directory / "checkpoints").glob("step_*")) for run in runs)


def test_a_killed_process_fails_its_run_and_the_next_call_finishes_it(tmp_path: Path) -> None:
    run = planned_run("a", tmp_path, {"train": {"steps": 60}})
    engine, killed = LocalEngine(1), []

    def kill(event: Event) -> None:
        if event.kind == "row" and event.step == 10 and not killed:
            killed.append(engine.processes()[0])
            os.kill(killed[0], signal.SIGKILL)

    ended = train_all([run], engine, kill)
    assert ended["a"].kind == "failed"
    assert "killed by SIGKILL" in ended["a"].message
    assert train_all([run], LocalEngine(1), lambda event: None)["a"].kind == "done"


def _sends_without_end(run: PlannedRun, share: object, environment: object, pipe: Connection) -> None:
    with contextlib.suppress(OSError):
        while True:
            pipe.send(Event(run.name, "step"))


def test_a_process_that_waits_for_its_events_to_be_read_ends_when_the_engine_is_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local, "_train", _sends_without_end)
    engine = LocalEngine(1)
    engine.submit([planned_run("a", tmp_path)])
    (process,) = engine.processes()
    closing = threading.Thread(target=engine.close, daemon=True)
    closing.start()
    closing.join(timeout=60)
    if still_waits := closing.is_alive():
        os.kill(process, signal.SIGKILL)
    assert not still_waits


def command(folder: Path, out: Path, log: Path) -> subprocess.Popen[bytes]:
    """`sinklab reproduce` as a process group of its own."""
    args = ["reproduce", "mine.yaml", "--text", "text.jsonl", "--jobs", "2", "--steps", "40", "--out", str(out)]
    with log.open("ab") as file:
        return subprocess.Popen(
            [sys.executable, "-m", "sinklab", *args], cwd=folder, stdout=file, stderr=file, start_new_session=True
        )


def comparable(out: Path) -> dict[str, Any]:
    """summary.json without times and memory."""

    def without(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: without(one) for key, one in value.items() if key not in UNREPEATABLE}
        return [without(one) for one in value] if isinstance(value, list) else value

    return without(json.loads((out / SUMMARY).read_text()))


def evaluations(out: Path) -> int:
    """Lines of all metrics.jsonl."""
    return sum(path.read_bytes().count(b"\n") for path in out.glob("*/metrics.jsonl"))


@pytest.mark.slow
def test_two_commands_share_the_work_and_end_with_the_same_summary(tmp_path: Path) -> None:
    write_experiment(tmp_path)
    assert command(tmp_path, tmp_path / "alone", tmp_path / "alone.log").wait() == 0
    logs = [tmp_path / "first.log", tmp_path / "second.log"]
    pair = [command(tmp_path, tmp_path / "shared", log) for log in logs]
    assert [process.wait() for process in pair] == [0, 0], "".join(log.read_text() for log in logs)
    assert comparable(tmp_path / "shared") == comparable(tmp_path / "alone")
    assert evaluations(tmp_path / "shared") == evaluations(tmp_path / "alone")
    assert len(list((tmp_path / "shared").glob("*/record.json"))) == 6


@pytest.mark.slow
def test_a_command_killed_ten_times_ends_with_the_summary_of_an_uninterrupted_one(tmp_path: Path) -> None:
    write_experiment(tmp_path)
    assert command(tmp_path, tmp_path / "whole", tmp_path / "whole.log").wait() == 0
    out, log = tmp_path / "pieces", tmp_path / "pieces.log"
    moments = random.Random(0)
    thresholds = sorted(moments.sample(range(1, evaluations(tmp_path / "whole")), 10))
    for number, threshold in enumerate(thresholds):
        process = command(tmp_path, out, log)
        while process.poll() is None and evaluations(out) < threshold:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(0.02)
        os.killpg(process.pid, signal.SIGTERM if number % 2 else signal.SIGKILL)
        assert process.wait() in (-signal.SIGKILL, 75, 0), log.read_text()
        assert "Traceback" not in log.read_text()
    assert command(tmp_path, out, log).wait() == 0, log.read_text()
    assert comparable(out) == comparable(tmp_path / "whole")
    for run in out.glob("*/record.json"):
        record = read_record(run.parent)
        assert record is not None
        assert record.status == "done"
