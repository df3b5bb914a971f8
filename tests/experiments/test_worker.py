"""One run of a sweep: trained and recorded once, by any process, with an event on how it ended."""

import json
import math
from pathlib import Path

import pytest
from same_run import assert_same_run
from sweeps import planned_run

from sinklab.data.prepare import prepared
from sinklab.errors import InputError
from sinklab.experiments.documents import checksums, edited, read_record
from sinklab.experiments.sweep import worker
from sinklab.experiments.sweep.engine import Event, PlannedRun
from sinklab.experiments.sweep.worker import train_cell
from sinklab.files import sha256_of
from sinklab.measuring.measurement import Measurement
from sinklab.train.lock import lock_run
from sinklab.train.loop import Trainer
from sinklab.train.run import open_run


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SINKLAB_CACHE", str(tmp_path / "cache"))


class Told:
    """Event log of a worker."""

    def __init__(self) -> None:
        self.events: list[Event] = []

    def __call__(self, event: Event) -> None:
        self.events.append(event)

    @property
    def updates(self) -> list[int]:
        return [event.step for event in self.events if event.kind == "step"]


def trained(planned: PlannedRun, told: Told | None = None) -> Event:
    return train_cell(planned, 1, told or Told(), lambda: False)


def by_train_command(planned: PlannedRun) -> None:
    """Train a run as `sinklab train` does."""
    recipe = planned.read_recipe()
    Trainer(open_run(recipe, prepared(recipe.data), planned.directory)).train()


def test_a_finished_run_has_a_record_with_time_memory_kurtosis_and_checksums(tmp_path: Path) -> None:
    planned, told = planned_run("one", tmp_path), Told()
    assert trained(planned, told) == Event("one", "done", 4)
    assert [event.kind for event in told.events] == ["ready", "row", "step", "step", "row", "step", "step", "row"]
    record = read_record(planned.directory)
    assert record is not None
    assert (record.hash, record.status, record.step, record.steps, record.triples) == (planned.hash, "done", 4, 4, 8)
    assert record.seconds is not None
    assert record.seconds > 0
    assert record.tokens_per_second is not None
    assert record.tokens_per_second * record.seconds == pytest.approx(4 * 2 * 16, rel=0.01)
    assert record.peak_memory_mb is not None
    assert record.peak_memory_mb > 50
    assert record.kurtosis is not None
    assert record.kurtosis > 1  # of any distribution
    assert record.files == {name: sha256_of(planned.directory / name) for name in record.files}
    assert set(record.files) == {"recipe.yaml", "metrics.jsonl", "measurement.json"}


def test_kurtosis_is_that_of_the_finished_model_on_the_sequences_of_its_own_measurement(tmp_path: Path) -> None:
    planned = planned_run("one", tmp_path)
    trained(planned)
    record, own = read_record(planned.directory), Measurement.load(planned.directory)
    recipe = planned.read_recipe()
    trainer = Trainer(open_run(recipe, prepared(recipe.data), planned.directory))
    measured = trainer.evaluator.measure(details=True)
    trainer.close()
    assert measured.sink_rate == own.sink_rate
    assert measured.details is not None
    kurtosis = measured.details.by_layer["kurtosis_by_block"]
    assert kurtosis is not None
    assert record is not None
    assert record.kurtosis == max(kurtosis)


def test_a_run_is_not_trained_twice(tmp_path: Path) -> None:
    planned = planned_run("one", tmp_path)
    trained(planned)
    before = (planned.directory / "metrics.jsonl").stat().st_mtime_ns
    told = Told()
    assert trained(planned, told) == Event("one", "done", 4)
    assert told.events == []
    assert (planned.directory / "metrics.jsonl").stat().st_mtime_ns == before


def test_a_run_of_sinklab_train_gets_its_record_and_is_not_trained_again(tmp_path: Path) -> None:
    planned, told = planned_run("one", tmp_path), Told()
    by_train_command(planned)
    before = sha256_of(planned.directory / "measurement.json")
    assert trained(planned, told) == Event("one", "done", 4)
    assert told.updates == []
    record = read_record(planned.directory)
    assert record is not None
    assert record.kurtosis is not None
    assert record.peak_memory_mb is None  # that of this process is not the run's
    assert record.files["measurement.json"] == before == sha256_of(planned.directory / "measurement.json")


def test_a_finished_run_without_checkpoints_is_recorded_without_kurtosis(tmp_path: Path) -> None:
    planned, told = planned_run("one", tmp_path), Told()
    by_train_command(planned)
    for path in sorted((planned.directory / "checkpoints").rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()
    assert trained(planned, told).kind == "done"
    assert told.events == []
    record = read_record(planned.directory)
    assert record is not None
    assert (record.status, record.step, record.triples, record.kurtosis) == ("done", 4, 8, None)


def test_a_run_that_another_process_holds_is_busy(tmp_path: Path) -> None:
    planned = planned_run("one", tmp_path)
    with lock_run(planned.directory):
        ended = trained(planned)
    assert ended.kind == "busy"
    assert "is being trained by process" in ended.message
    assert trained(planned).kind == "done"


def test_a_stopped_run_resumes_to_the_result_of_an_uninterrupted_one(tmp_path: Path) -> None:
    whole, pieces = planned_run("whole", tmp_path), planned_run("pieces", tmp_path)
    trained(whole)
    told = Told()
    assert train_cell(pieces, 1, told, lambda: 1 in told.updates) == Event("pieces", "stopped", 1)
    assert read_record(pieces.directory) is None
    told = Told()
    assert trained(pieces, told).kind == "done"
    assert told.updates == [2, 3, 4]
    assert_same_run(whole.directory, pieces.directory)


def test_a_diverged_run_is_not_trained_again(tmp_path: Path) -> None:
    planned = planned_run("one", tmp_path, {"optim": {"lr": 1e30, "clip": None}, "schedule": {"warmup_steps": 0}})
    ended = trained(planned)
    assert ended.kind == "failed"
    assert "diverged" in ended.message
    record = read_record(planned.directory)
    assert record is not None
    assert (record.status, record.message, record.kurtosis) == ("failed", ended.message, None)
    told = Told()
    assert trained(planned, told).kind == "failed"
    assert told.events == []


def test_a_run_that_fails_for_another_reason_is_tried_again(tmp_path: Path) -> None:
    planned = planned_run("one", tmp_path)
    planned.directory.mkdir()
    (planned.directory / "metrics.jsonl").write_text("mine")
    ended = trained(planned)
    assert ended.kind == "failed"
    assert "has metrics.jsonl but no env.json" in ended.message
    assert read_record(planned.directory) is None
    (planned.directory / "metrics.jsonl").unlink()
    assert trained(planned).kind == "done"


def test_another_text_under_the_same_name_is_refused(tmp_path: Path) -> None:
    planned = planned_run("one", tmp_path)
    text = tmp_path / "text.jsonl"
    text.write_text(text.read_text() + json.dumps({"text": "one more"}) + "\n")
    ended = trained(planned)
    assert ended.kind == "failed"
    assert f"was planned as {planned.hash}" in ended.message
    assert not planned.directory.exists()


def test_two_processes_of_torchrun_train_one_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    alone, pair = planned_run("alone", tmp_path), planned_run("pair", tmp_path)
    trained(alone)
    told = Told()
    monkeypatch.setattr(worker, "cards_for", lambda recipe: 2)
    assert train_cell(pair, 1, told, lambda: False) == Event("pair", "done", 4)
    assert {event.step for event in told.events} <= {0, 2, 4}
    record = read_record(pair.directory)
    assert record is not None
    assert record.status == "done"
    losses = [Measurement.load(run.directory).loss for run in (alone, pair)]
    assert math.isclose(losses[0] or 0, losses[1] or 1, rel_tol=1e-3)


def test_files_that_were_changed_or_removed_by_hand_are_named(tmp_path: Path) -> None:
    planned = planned_run("one", tmp_path)
    trained(planned)
    record = read_record(planned.directory)
    assert record is not None
    assert edited(planned.directory, record) == []
    recipe = planned.directory / "recipe.yaml"
    recipe.write_text(recipe.read_text().replace("lr:", "lr: 1e-3  #"))
    (planned.directory / "metrics.jsonl").unlink()
    assert edited(planned.directory, record) == ["recipe.yaml", "metrics.jsonl"]


@pytest.mark.skipif(not Path("/proc/self/mem").exists(), reason="needs /proc, for an unreadable file")
def test_a_result_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").symlink_to("/proc/self/mem")
    with pytest.raises(InputError, match=r"metrics\.jsonl cannot be read"):
        checksums(tmp_path)
