"""Checkpoints: damaged ones are skipped, one format for any number of processes, full disks."""

import json
import logging
import os
import re
import shutil
import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from sinklab.errors import SinklabError
from sinklab.files import sha256_of
from sinklab.model.transformer import Transformer
from sinklab.train import checkpoint as tensor_store
from sinklab.train.checkpoint import (
    SUMS,
    TrainState,
    find_checkpoint,
    load_checkpoint,
    remove_leftovers,
    save_checkpoint,
)
from sinklab.train.optim import build_optimizer
from sinklab.train.recipe import build_recipe

RECIPE = build_recipe(
    {"model": {"layers": 1, "width": 16, "heads": 2, "ffn_width": 16, "context": 16, "vocab_size": 31}},
    {"model": {"attention": {"bias": "k"}}, "metric": {"length": 16}},
)
Model = tuple[Transformer, torch.optim.Optimizer]


def trained(seed: int = 0, steps: int = 2) -> Model:
    """A model and its optimiser after a few updates."""
    model = Transformer(RECIPE.model, seed)
    optimizer = build_optimizer(model, RECIPE.optim)
    for number in range(steps):
        model.loss(torch.randint(31, (2, 17), generator=torch.Generator().manual_seed(number))).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


@pytest.fixture
def two(tmp_path: Path) -> Path:
    """A folder with checkpoints of steps 4 and 8."""
    model, optimizer = trained()
    for step in (4, 8):
        save_checkpoint(tmp_path, model, optimizer, TrainState(step, 2.5, 3, 0.1), "run", keep=2)
    return tmp_path


def shard(checkpoint: Path) -> Path:
    (path,) = checkpoint.glob("*.safetensors")
    return path


def summed(checkpoint: Path) -> None:
    """Recompute the checksums, so that only the contents are wrong."""
    files = sorted(path for path in checkpoint.iterdir() if path.name != SUMS)
    (checkpoint / SUMS).write_text("".join(f"{sha256_of(path)}  {path.name}\n" for path in files))


def rewritten(checkpoint: Path, change: Callable[[dict[str, Tensor]], None]) -> None:
    path = shard(checkpoint)
    with safe_open(path, "pt") as file:
        metadata = file.metadata()
    tensors = load_file(path)
    change(tensors)
    places = {name: {"saved_offsets": [0] * tensor.ndim} for name, tensor in tensors.items()}
    save_file(tensors, path, metadata={**metadata, "DCP_SHARDING_INFO": json.dumps(places)})
    summed(checkpoint)


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-7] ^= 1
    path.write_bytes(data)


def restate(checkpoint: Path, key: str, value: object) -> None:
    path = checkpoint / "state.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {key: value}))
    summed(checkpoint)


def without(name: str) -> Callable[[dict[str, Tensor]], None]:
    return lambda tensors: tensors.__delitem__(name)


HEAD = "model/head.weight"
DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "weights missing": (lambda c: shard(c).unlink(), "lacks shard-"),
    "weights cut short": (lambda c: os.truncate(shard(c), 1000), "has a corrupt shard-"),
    "weights empty": (lambda c: os.truncate(shard(c), 0), "has a corrupt shard-"),
    "a bit flipped": (lambda c: flip(shard(c)), "has a corrupt shard-"),
    "a digit of the state changed": (lambda c: flip(c / "state.json"), r"has a corrupt state\.json"),
    "state missing": (lambda c: (c / "state.json").unlink(), r"lacks state\.json"),
    "state no JSON": (lambda c: ((c / "state.json").write_text("{"), summed(c)), "is not readable"),
    "state of another shape": (lambda c: restate(c, "state", {"steps": 8}), "is not readable"),
    "state of another step": (lambda c: restate(c, "state", {"step": 7}), "contains the state of step 7"),
    "another run's": (lambda c: restate(c, "run_hash", "other"), "belongs to run other, not run"),
    "checksums missing": (lambda c: (c / SUMS).unlink(), f"has no {SUMS}"),
    "checksums cut short": (lambda c: os.truncate(c / SUMS, 40), "is not readable"),
    "a stray file": (
        lambda c: shutil.copy(shard(c), c / "copy.safetensors"),
        "has copy.safetensors, which has no checksum",
    ),
    "a tensor missing": (lambda c: rewritten(c, without(HEAD)), f"lacks tensor {HEAD}"),
    "a moment missing": (
        lambda c: rewritten(c, without("optimizer/head.weight/exp_avg")),
        "lacks tensor optimizer/head.weight/exp_avg",
    ),
    "a tensor too many": (
        lambda c: rewritten(c, lambda t: t.update(x=torch.ones(2))),
        "has the unexpected tensor x",
    ),
    "a tensor of another shape": (
        lambda c: rewritten(c, lambda t: t.update({HEAD: torch.ones(31, 15)})),
        rf"shape \(31, 15\) for tensor {HEAD}, expected \(31, 16\)",
    ),
    "nothing in it": (lambda c: (shutil.rmtree(c), c.mkdir()), f"has no {SUMS}"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_checkpoint_is_named_and_the_previous_one_loaded(
    damage: str, two: Path, caplog: pytest.LogCaptureFixture
) -> None:
    spoil, says = DAMAGES[damage]
    newest = two / "step_00000008"
    spoil(newest)
    with caplog.at_level(logging.WARNING):
        found = find_checkpoint(two, trained()[0], ("run",))
    assert found == two / "step_00000004"
    (record,) = caplog.records
    assert str(newest) in record.getMessage()
    assert re.search(says, record.getMessage()), record.getMessage()


def test_a_valid_checkpoint_is_loaded_without_a_warning(two: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert find_checkpoint(two, trained()[0], ("run",)) == two / "step_00000008"
    assert find_checkpoint(two, trained()[0], ("run",), at_most=7) == two / "step_00000004"
    assert find_checkpoint(two, trained()[0], ("run",), at_most=3) is None
    assert caplog.records == []


def test_training_is_refused_if_all_checkpoints_are_damaged(two: Path) -> None:
    for checkpoint in two.iterdir():
        flip(shard(checkpoint))
    with pytest.raises(
        SinklabError, match=r"none of the checkpoints in .* is valid.*step_00000008.*step_00000004.*delete"
    ):
        find_checkpoint(two, trained()[0], ("run",))


def test_leftovers_of_a_killed_save_are_removed(two: Path) -> None:
    for name in (".step_00000012.new", ".step_00000004.old"):
        shutil.copytree(two / "step_00000008", two / name)
    assert find_checkpoint(two, trained()[0], ("run",)) == two / "step_00000008"
    remove_leftovers(two)
    assert sorted(path.name for path in two.iterdir()) == ["step_00000004", "step_00000008"]


def test_a_system_file_in_a_checkpoint_is_ignored(two: Path) -> None:
    (two / "step_00000008" / ".DS_Store").write_bytes(b"anything")
    assert find_checkpoint(two, trained()[0], ("run",)) == two / "step_00000008"


def test_a_checkpoint_without_tensors_of_other_processes_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = tensor_store.write_tensors

    def half(folder: Path, tensors: Mapping[str, Tensor], distributed: bool) -> None:
        whole(folder, dict(list(tensors.items())[::2]), distributed)  # as if other processes wrote to separate disks

    model, optimizer = trained()
    save_checkpoint(tmp_path, model, optimizer, TrainState(4), "run", keep=1)
    monkeypatch.setattr(tensor_store, "write_tensors", half)
    with pytest.raises(
        SinklabError, match="tensors of other processes are missing: the processes see different folders"
    ):
        save_checkpoint(tmp_path, model, optimizer, TrainState(8), "run", keep=1)
    assert [path.name for path in tmp_path.iterdir()] == ["step_00000004"]


def test_a_checkpoint_without_the_middle_of_a_tensor_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def outer(folder: Path, tensors: Mapping[str, Tensor], distributed: bool) -> None:
        """The parts of the first and the third of three processes."""
        for number, row in enumerate((0, 2)):
            places = json.dumps({"model/x": {"saved_offsets": [row, 0]}})
            save_file({"model/x": torch.zeros(1, 2)}, folder / f"{number}.safetensors", {"DCP_SHARDING_INFO": places})

    monkeypatch.setattr(tensor_store, "write_tensors", outer)
    with pytest.raises(SinklabError, match=r"cannot save .* do not cover its shape .*processes see different folders"):
        save_checkpoint(tmp_path, *trained(), TrainState(4), "run", keep=1)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("previous", [None, "step_00000004"])
def test_a_damaged_checkpoint_between_valid_ones_does_not_count_as_kept(two: Path, previous: str | None) -> None:
    flip(shard(two / "step_00000008"))
    model, optimizer = trained()
    known = two / previous if previous else None
    save_checkpoint(two, model, optimizer, TrainState(12), "run", keep=2, previous=known)
    kept = ["step_00000004" if previous else "step_00000008", "step_00000012"]
    assert sorted(path.name for path in two.iterdir()) == kept


def test_a_skipped_checkpoint_does_not_count_as_kept(two: Path) -> None:
    flip(shard(two / "step_00000008"))
    model, optimizer = trained()
    save_checkpoint(two, model, optimizer, TrainState(6), "run", keep=2)
    assert sorted(path.name for path in two.iterdir()) == ["step_00000004", "step_00000006"]


@pytest.mark.parametrize("updates", [0, 2])
def test_weights_optimiser_and_state_are_restored_bit_for_bit(updates: int, tmp_path: Path) -> None:
    model, optimizer = trained(steps=updates)
    state = TrainState(updates, 1 / 3, 2, 0.7)
    folder = save_checkpoint(tmp_path, model, optimizer, state, "run", keep=1)
    again, restored = trained(seed=9, steps=0)
    assert load_checkpoint(folder, again, restored) == state
    assert all(torch.equal(again.state_dict()[name], weight) for name, weight in model.state_dict().items())
    kept = zip(model.parameters(), again.parameters(), strict=True)
    for one, other in kept:
        assert optimizer.state[one].keys() == restored.state[other].keys()
        assert all(torch.equal(value, restored.state[other][key]) for key, value in optimizer.state[one].items())


def test_nothing_in_a_checkpoint_is_a_pickle_and_standard_tools_check_it(two: Path) -> None:
    checkpoint = two / "step_00000008"
    assert sorted(path.suffix for path in checkpoint.iterdir()) == ["", ".json", ".safetensors"]
    assert subprocess.run(["sha256sum", "--check", "--quiet", SUMS], cwd=checkpoint, check=False).returncode == 0


@pytest.fixture
def small_disk(tmp_path: Path) -> Path:
    """A disk of 256 kB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounting = ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(folder)]
    try:
        subprocess.run(mounting, check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("no small disk here: mounting a tmpfs needs root (a limit on file sizes is tested in any case)")
    return folder


def test_a_full_disk_leaves_the_previous_checkpoint_valid(small_disk: Path) -> None:
    try:
        model, optimizer = trained()
        valid = save_checkpoint(small_disk, model, optimizer, TrainState(1), "run", keep=2)
        filler = small_disk / "filler"
        size = shard(valid).stat().st_size // 2
        filler.write_bytes(bytes(max(0, shutil.disk_usage(small_disk).free - size)))
        with pytest.raises(SinklabError, match=r"cannot save the checkpoint of step 2.*No space left"):
            save_checkpoint(small_disk, model, optimizer, TrainState(2), "run", keep=2)
        assert [path.name for path in small_disk.glob("*step*")] == [valid.name]
        assert find_checkpoint(small_disk, model, ("run",)) == valid
        filler.unlink()
        save_checkpoint(small_disk, model, optimizer, TrainState(2), "run", keep=2)
    finally:
        subprocess.run(["umount", str(small_disk)], check=False)
