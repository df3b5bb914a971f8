"""Faults of a shard that is in use: truncation, changes, deletion and a failing disk."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from commands import call_together
from safetensors.torch import load_file

from sinklab.data.loader import TokenDataset
from sinklab.data.prepare import prepare, settings_of
from sinklab.errors import SinklabError
from sinklab.train.loop import Trainer
from sinklab.train.recipe import Recipe, build_recipe
from sinklab.train.run import open_run
from sinklab.train.world import ALONE, World

VALUES: dict[str, Any] = {
    "model": {"layers": 1, "width": 16, "heads": 2, "ffn_width": 16, "context": 16},
    "optim": {"lr": 3e-3},
    "train": {"steps": 9, "batch_size": 4, "eval_every": 4, "eval_sequences": 4, "save_every": 3, "keep": 9},
    "metric": {"sequences": 4, "length": 16},
}
DAMAGE_AFTER = 4
NO_PROC = pytest.mark.skipif(not Path("/proc/self/mem").exists(), reason="Linux's /proc/self/mem cannot be read at 0")


@pytest.fixture(scope="module")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small synthetic corpus, prepared."""
    folder = tmp_path_factory.mktemp("tokens")
    prepare(settings_of("synthetic:bigram_backcopy:length=17,documents=200", "words", valid_fraction=0.1), folder)
    return folder


@pytest.fixture
def data(tokens: Path, tmp_path: Path) -> Path:
    """A copy that may be damaged."""
    return Path(shutil.copytree(tokens, tmp_path / "data"))


def recipe() -> Recipe:
    return build_recipe(VALUES)


def saved(out: Path) -> dict[str, dict[str, bytes]]:
    """Everything in the checkpoints of a run."""
    return {folder.name: contents(folder) for folder in sorted(out.glob("checkpoints/step_*"))}


def contents(checkpoint: Path) -> dict[str, bytes]:
    (shard,) = checkpoint.glob("*.safetensors")
    tensors = {name: tensor.numpy().tobytes() for name, tensor in load_file(shard).items()}
    return tensors | {"state": (checkpoint / "state.json").read_bytes()}


def cut(shard: Path) -> None:
    os.truncate(shard, 0)


def rewrite(shard: Path) -> None:
    content = shard.read_bytes()
    with shard.open("r+b") as file:
        file.write(content)


def change(shard: Path) -> None:
    content = bytearray(shard.read_bytes())
    content[100] ^= 1
    with shard.open("r+b") as file:
        file.write(content)


def train(data: Path, out: Path, damage: Callable[[Path], None], world: World = ALONE) -> str:
    """Train with the shard damaged in mid-run; return the status or the error."""
    dataset = TokenDataset(data)

    def watch(step: int, row: dict[str, Any] | None) -> None:
        if step == DAMAGE_AFTER and row is None:
            damage(data / "train.bin")

    run = open_run(recipe(), dataset, out)
    try:
        return Trainer(run, watch, world=world).train().status
    except SinklabError as error:
        return str(error)


def train_damaged(world: World, data: Path, out: Path, damage: Callable[[Path], None]) -> None:
    """Train in a separate process, because reading a truncated file may kill it."""
    (out.parent / "said.json").write_text(json.dumps(train(data, out, damage)))


@pytest.mark.parametrize(
    ("damage", "says"), [(cut, "was truncated while in use"), (change, "is corrupted: its SHA-256 differs")]
)
def test_a_run_with_damaged_text_stops_and_continues_when_it_is_restored(
    damage: Callable[[Path], None], says: str, tokens: Path, data: Path, tmp_path: Path
) -> None:
    assert train(tokens, tmp_path / "whole", lambda shard: None) == "done"
    whole, shard, run = saved(tmp_path / "whole"), data / "train.bin", tmp_path / "run"
    content = shard.read_bytes()
    assert call_together(train_damaged, 1, data, run, damage) == [0]
    said = json.loads((tmp_path / "said.json").read_text())
    assert says in said
    assert str(shard) in said
    assert "sinklab data prepare" in said
    assert saved(run) == {"step_00000003": whole["step_00000003"]}
    shard.write_bytes(content)
    assert train(data, run, lambda shard: None) == "done"
    assert saved(run) == whole


@pytest.mark.parametrize("harmless", [os.utime, os.unlink, rewrite])
def test_a_run_continues_while_the_bytes_of_its_text_are_unchanged(
    harmless: Callable[[Path], None], tokens: Path, data: Path, tmp_path: Path
) -> None:
    assert train(tokens, tmp_path / "whole", lambda shard: None) == "done"
    assert train(data, tmp_path / "run", harmless) == "done"
    assert saved(tmp_path / "run") == saved(tmp_path / "whole")


def test_training_on_a_truncated_shard_ends_with_status_1_and_one_error_message(data: Path, tmp_path: Path) -> None:
    values = VALUES | {"data": {"source": str(data)}, "train": VALUES["train"] | {"steps": 100_000, "keep": 2}}
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(values))
    command = [sys.executable, "-m", "sinklab", "train", "recipe.yaml", "--out", "run"]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "200"}
    process = subprocess.Popen(command, cwd=tmp_path, env=env, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    next(line for line in process.stderr if "step 4/" in line)
    cut(data / "train.bin")
    rest = process.stderr.read()
    assert process.wait() == 1
    assert rest.count("error:") == 1
    assert f"{data / 'train.bin'} was truncated" in rest or f"{data / 'train.bin'} has 0 bytes, expected" in rest
    assert "Traceback" not in rest


def train_with_one_bad_disk(world: World, data: Path, out: Path) -> None:
    """The second process's disk fails for good."""
    dataset = TokenDataset(data)
    run = open_run(recipe(), dataset, out)
    trainer = Trainer(run, world=world)
    if world.rank == 1:
        break_disk(dataset)
    try:
        trainer.train()
    except SinklabError as error:
        (out.parent / f"said{world.rank}.json").write_text(json.dumps(str(error)))
        raise


def break_disk(dataset: TokenDataset) -> None:
    """Reading fails with a true EIO from now on."""
    os.dup2(os.open("/proc/self/mem", os.O_RDONLY), dataset.train._file)


@NO_PROC
def test_a_failing_disk_of_one_process_stops_all(data: Path, tmp_path: Path) -> None:
    assert call_together(train_with_one_bad_disk, 2, data, tmp_path / "run") == [1, 1]
    assert "train.bin cannot be read: Input/output error" in json.loads((tmp_path / "said1.json").read_text())
    assert not saved(tmp_path / "run")


def train_on_copies(world: World, folder: Path) -> None:
    """Train each process on a separate copy, of which the second is changed; write the status or the error."""
    told = train(folder / f"data{world.rank}", folder / "run", change if world.rank == 1 else os.utime, world)
    (folder / f"said{world.rank}.json").write_text(json.dumps(told))


def test_no_process_saves_a_checkpoint_after_the_text_of_one_has_changed(tokens: Path, tmp_path: Path) -> None:
    for rank in range(2):
        shutil.copytree(tokens, tmp_path / f"data{rank}")
    assert call_together(train_on_copies, 2, tmp_path) == [0, 0]
    first, second = (json.loads((tmp_path / f"said{rank}.json").read_text()) for rank in range(2))
    assert first == second
    assert f"{tmp_path / 'data1' / 'train.bin'} is corrupted" in first
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == ["step_00000003"]


@NO_PROC
def test_a_shard_on_a_failing_disk_is_reported_with_the_reason(data: Path) -> None:
    dataset = TokenDataset(data)
    break_disk(dataset)
    with pytest.raises(SinklabError, match=r"train\.bin cannot be read: Input/output error\. .*sinklab data prepare"):
        dataset.train[:5]


@pytest.mark.parametrize("damage", [cut, change])
def test_validation_text_that_is_damaged_after_it_was_opened_is_named(
    damage: Callable[[Path], None], data: Path, tmp_path: Path
) -> None:
    run = open_run(recipe(), TokenDataset(data), tmp_path / "run")
    damage(data / "valid.bin")
    with pytest.raises(SinklabError, match=r"valid\.bin (was truncated|is corrupted)"):
        Trainer(run)


def test_ids_equal_the_bytes_of_the_file(data: Path) -> None:
    tokens, ids = TokenDataset(data).train, np.fromfile(data / "train.bin", np.uint16)
    assert len(tokens) == len(ids)
    for where in (slice(None), slice(3, 8), slice(-4, None), slice(len(ids) - 2, len(ids) + 5), slice(5, 3)):
        assert np.array_equal(tokens[where], ids[where])
