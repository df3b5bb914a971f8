"""Faults of a run: a loss that is not finite, a second trainer, damaged data, a changed clock."""

import errno
import fcntl
import itertools
import json
import random
import shutil
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from sinklab.data.loader import TokenDataset
from sinklab.data.prepare import prepare, settings_of
from sinklab.device import can_compile
from sinklab.errors import InputError, SinklabError
from sinklab.train.checkpoint import save_checkpoint
from sinklab.train.lock import lock_run
from sinklab.train.loop import Trainer
from sinklab.train.recipe import Recipe, build_recipe
from sinklab.train.run import existing_run, load_run, open_run, read_history, read_metrics
from sinklab.train.update import DivergedError, replay

BASE = {
    "model": {"layers": 1, "width": 16, "heads": 2, "ffn_width": 16, "context": 16},
    "optim": {"lr": 3e-3},
    "train": {"steps": 7, "batch_size": 2, "eval_every": 1, "eval_sequences": 4, "save_every": 3, "keep": 9},
    "metric": {"sequences": 4, "length": 16},
}
DIVERGING = {"optim": {"name": "sgd", "lr": 1e12, "clip": None}, "schedule": {"warmup_steps": 0}}


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> TokenDataset:
    """A small synthetic corpus, prepared."""
    folder = tmp_path_factory.mktemp("tokens")
    return prepare(
        settings_of("synthetic:bigram_backcopy:length=17,documents=200", "words", valid_fraction=0.1), folder
    )


def recipe(**changes: object) -> Recipe:
    return build_recipe(BASE, changes)


def files(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("step", [1, 4, 6])
def test_a_replayed_step_has_the_same_loss_and_changes_no_file(
    step: int, dataset: TokenDataset, tmp_path: Path
) -> None:
    Trainer(open_run(recipe(), dataset, tmp_path)).train()
    row, before = read_metrics(tmp_path / "metrics.jsonl")[step], files(tmp_path)
    found = replay(existing_run(recipe(), dataset, tmp_path), step)
    assert (found.loss, found.grad_norm) == (row["train_loss"], row["grad_norm"])
    assert (found.checkpoint and found.checkpoint.name) == {1: None, 4: "step_00000003", 6: "step_00000003"}[step]
    assert found.repeated == {1: 0, 4: 0, 6: 2}[step]
    assert found.first_not_finite is None
    assert sum(norm**2 for norm in found.grad_norms.values()) == pytest.approx(found.grad_norm**2, rel=1e-5)
    assert files(tmp_path) == before


def test_the_replay_of_a_diverged_step_names_the_first_tensor_that_is_not_finite(
    dataset: TokenDataset, tmp_path: Path
) -> None:
    wanted = recipe(**DIVERGING, train={"eval_every": 100})
    with pytest.raises(SinklabError, match=r"diverged at step (\d).*--replay \1") as error:
        Trainer(open_run(wanted, dataset, tmp_path)).train()
    step = int(str(error.value).removeprefix("training diverged at step ").split(":")[0])
    found = replay(existing_run(wanted, dataset, tmp_path), step)
    assert found.first_not_finite is not None
    assert found.first_not_finite.startswith(("output of", "gradient of", "the loss"))
    json.dumps(found.document(), allow_nan=False)


@pytest.mark.slow
def test_the_replay_of_a_compiled_loss_names_the_same_tensor(
    dataset: TokenDataset, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    if not can_compile():
        pytest.skip("torch.compile needs a C++ compiler and Python's headers on a CPU")
    named = []
    for name in ("off", "loss"):
        wanted = recipe(**DIVERGING, train={"eval_every": 100, "compile": name})
        with pytest.raises(SinklabError, match="diverged at step 2"):
            Trainer(open_run(wanted, dataset, tmp_path / name)).train()
        named.append(replay(existing_run(wanted, dataset, tmp_path / name), 2).first_not_finite)
    assert named[0] == named[1]
    assert "torch/_dynamo" not in capfd.readouterr().err  # warnings of Dynamo do not help the user


def test_a_replay_finds_a_damaged_weight(dataset: TokenDataset, tmp_path: Path) -> None:
    trainer = Trainer(open_run(recipe(), dataset, tmp_path))
    trainer._update()
    with torch.no_grad():
        trainer.model.head.weight[3, 5] = torch.nan
    with pytest.raises(SinklabError, match="diverged at step 1: the update produced non-finite weights"):
        trainer._save()
    save_checkpoint(trainer.run.checkpoints, trainer.model, trainer.optimizer, trainer.state, trainer.run.hash, keep=1)
    assert replay(trainer.run, 2).first_not_finite == "weight head.weight"


@pytest.mark.parametrize("step", [0, 8])
def test_the_replay_of_a_step_or_run_that_does_not_exist_is_refused(
    step: int, dataset: TokenDataset, tmp_path: Path
) -> None:
    with pytest.raises(InputError, match=f"--replay {step}: the run has steps 1..7"):
        replay(open_run(recipe(), dataset, tmp_path), step)
    with pytest.raises(InputError, match="contains no run: train it first"):
        existing_run(recipe(), dataset, tmp_path / "nowhere")


def test_a_second_trainer_of_a_run_is_refused_but_the_run_can_be_loaded(dataset: TokenDataset, tmp_path: Path) -> None:
    run = open_run(recipe(), dataset, tmp_path)
    first = Trainer(run)
    first._update()
    first._save()
    with pytest.raises(SinklabError, match=r"is being trained by process \d+ on .*choose another --out"):
        Trainer(run)
    assert load_run(tmp_path).step == 1
    first.train()
    assert Trainer(run).train().status == "done"


def test_a_removed_run_directory_does_not_hide_the_error(dataset: TokenDataset, tmp_path: Path) -> None:
    trainer = Trainer(open_run(recipe(), dataset, tmp_path / "run"))
    shutil.rmtree(tmp_path / "run")
    with pytest.raises(SinklabError, match=r"cannot write .*metrics\.jsonl"):
        trainer.train()


def test_a_file_system_without_locks_is_not_reported_as_a_second_trainer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(file: object, how: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    with pytest.raises(SinklabError, match=r"cannot lock .*No locks available"):
        lock_run(tmp_path)


@pytest.mark.parametrize("rate", [1e30, 1e38])
def test_an_update_that_overflows_is_reported_as_diverged(rate: float, dataset: TokenDataset, tmp_path: Path) -> None:
    trainer = Trainer(
        open_run(recipe(optim={"name": "sgd", "lr": rate}, schedule={"warmup_steps": 0}), dataset, tmp_path)
    )
    with pytest.raises(SinklabError, match=r"diverged at step \d+.*Last checkpoint: .*Try a smaller optim\.lr"):
        trainer.train()


def test_a_run_that_diverges_while_it_is_stopped_is_recorded_as_failed(dataset: TokenDataset, tmp_path: Path) -> None:
    overflowing = {
        "optim": {"name": "sgd", "lr": 1e38, "weight_decay": 10, "clip": None},
        "schedule": {"warmup_steps": 0},
    }
    run = open_run(recipe(**overflowing, train={"eval_every": 100}), dataset, tmp_path)
    ended: list[SinklabError | None] = []
    trainer = Trainer(run, at_end=lambda trainer, error: ended.append(error))
    trainer.should_stop = lambda: trainer.state.step == 1
    with pytest.raises(DivergedError, match="non-finite weights") as raised:
        trainer.train()
    assert json.loads((tmp_path / "failed.json").read_text())["message"] == str(raised.value)
    assert ended == [raised.value]


def test_lost_evaluations_are_reported(dataset: TokenDataset, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    Trainer(open_run(recipe(), dataset, tmp_path)).train()
    assert "lacks evaluations" not in caplog.text
    (tmp_path / "metrics.jsonl").unlink()
    Trainer(open_run(recipe(), dataset, tmp_path))
    assert "lacks evaluations that cannot be repeated, the first at step 0" in caplog.text


@pytest.mark.parametrize(
    "garbage",
    [b"\xff\xfe\x00\x93garbage", b'{"step": 0}\n[3]\n{"step": 3}\n', b'{"stop": 0}\n{}\n', b"[" * 10**5 + b"\n\n"],
    ids=["binary", "a list", "no step", "deep"],
)
def test_damaged_metrics_are_refused_with_the_line_and_left_unchanged(
    garbage: bytes, dataset: TokenDataset, tmp_path: Path
) -> None:
    Trainer(open_run(recipe(), dataset, tmp_path)).train()
    (tmp_path / "metrics.jsonl").write_bytes(garbage)
    with pytest.raises(SinklabError, match=r"metrics\.jsonl, line \d, is invalid .*restore the file, or delete it"):
        Trainer(open_run(recipe(), dataset, tmp_path))
    assert (tmp_path / "metrics.jsonl").read_bytes() == garbage


def test_a_metric_of_the_wrong_type_is_refused_with_its_name(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 0, "valid_loss": "low"}\n')
    with pytest.raises(InputError, match=r"line 1, is invalid \(valid_loss: Input should be a valid number"):
        read_history(tmp_path / "metrics.jsonl")


def test_a_run_in_progress_can_be_read_at_any_time(dataset: TokenDataset, tmp_path: Path) -> None:
    trainer = Trainer(open_run(recipe(train={"steps": 60, "save_every": 1, "keep": 1}), dataset, tmp_path))
    training = threading.Thread(target=trainer.train)
    training.start()
    steps = []
    while training.is_alive():
        if list((tmp_path / "checkpoints").glob("step_*")):
            steps.append(load_run(tmp_path).step)
    training.join()
    assert steps == sorted(steps)
    assert len(set(steps)) > 1
    assert load_run(tmp_path).step == 60


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="a disk that is always full is Linux's /dev/full")
def test_a_full_disk_does_not_prevent_the_lock(tmp_path: Path) -> None:
    (tmp_path / "lock").symlink_to("/dev/full")
    lock_run(tmp_path).close()


def test_training_does_not_write_into_its_data_directory(dataset: TokenDataset, tmp_path: Path) -> None:
    folder = tmp_path / "data"
    shutil.copytree(dataset.directory, folder)
    for path in folder.iterdir():
        path.chmod(0o444)
    folder.chmod(0o555)
    before = files(folder)
    assert Trainer(open_run(recipe(), TokenDataset(folder), tmp_path / "run")).train().status == "done"
    assert files(folder) == before


def test_speeds_are_positive_although_the_clock_is_set_back(
    dataset: TokenDataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = itertools.count(time.time(), -3600)
    monkeypatch.setattr(time, "time", lambda: next(clock))
    Trainer(open_run(recipe(), dataset, tmp_path)).train()
    assert all(row["tokens_per_second"] > 0 for row in read_metrics(tmp_path / "metrics.jsonl")[1:])


def test_training_does_not_use_the_global_random_generators(dataset: TokenDataset, tmp_path: Path) -> None:
    histories = []
    for seed in (1, 2):
        trainer = Trainer(open_run(recipe(), dataset, tmp_path / str(seed)))
        torch.manual_seed(seed)
        np.random.seed(seed)
        random.seed(seed)
        before = torch.get_rng_state(), str(np.random.get_state()), random.getstate()
        trainer.train()
        after = torch.get_rng_state(), str(np.random.get_state()), random.getstate()
        assert torch.equal(before[0], after[0])
        assert before[1:] == after[1:]
        histories.append([row["train_loss"] for row in read_metrics(tmp_path / str(seed) / "metrics.jsonl")])
    assert histories[0] == histories[1]
