"""Runs logged to TensorBoard and W&B, offline, with the real packages; and the planned cost of a run."""

import importlib.util
import json
import re
import shutil
import struct
from collections.abc import Iterator
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from rich.console import Console

from sinklab.commands.results import print_plan
from sinklab.commands.train import plan_command, train_command
from sinklab.errors import InputError, install_command
from sinklab.train.evaluator import TRACKERS, numbers_of
from sinklab.train.planning import plan_of
from sinklab.train.recipe import load_recipe
from sinklab.train.run import read_metrics

RECIPE = {
    "name": "tracked",
    "model": {"layers": 1, "width": 16, "heads": 2, "ffn_width": 16, "context": 16},
    "data": {
        "source": "synthetic:bigram_backcopy:length=17,documents=200",
        "tokenizer": "words",
        "valid_fraction": 0.2,
    },
    "train": {"steps": 4, "batch_size": 4, "eval_every": 2, "eval_sequences": 8, "save_every": 2},
    "metric": {"sequences": 8, "length": 16},
}
BLOCK = 2**15  # of W&B's log files
CHARTS = {"sink-by-step", "loss-by-step", "importance-positions"}


def needs(package: str) -> pytest.MarkDecorator:
    """Skips where a tracker's package is not installed."""
    absent = importlib.util.find_spec(package) is None
    return pytest.mark.skipif(absent, reason=f"{package} is not installed (extra track)")


@pytest.fixture(autouse=True)
def _offline(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("SINKLAB_CACHE", str(tmp_path_factory.getbasetemp() / "cache"))


def train(folder: Path, tracker: Any, **train: int) -> Path:
    """A tracked run in `folder/run`; a second call continues it."""
    (folder / "recipe.yaml").write_text(yaml.safe_dump({**RECIPE, "train": RECIPE["train"] | train}))  # type: ignore[operator]
    run = folder / "run"
    train_command(str(folder / "recipe.yaml"), [], run, Console(quiet=True), [tracker] if tracker else [])
    return run


def lose_the_end(run: Path) -> None:
    """Leave the run as a kill after step 3 would: the evaluation of step 4 is written and its checkpoint is not."""
    newest = max((run / "checkpoints").glob("step_*"))
    for file in newest.iterdir():
        file.unlink()
    newest.rmdir()
    (run / "measurement.json").unlink()


def events(run: Path) -> Any:
    """Event accumulator of the run's TensorBoard log."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = EventAccumulator(str(run / "tensorboard"), size_guidance={"scalars": 0, "images": 0, "tensors": 0})
    found.Reload()
    return found


@needs("tensorboard")
def test_tensorboard_gets_the_recipe_every_number_and_the_charts(tmp_path: Path) -> None:
    run = train(tmp_path, "tensorboard")
    found, rows = events(run), read_metrics(run / "metrics.jsonl")
    assert [(e.step, e.value) for e in found.Scalars("valid_loss")] == [
        (row["step"], pytest.approx(row["valid_loss"])) for row in rows
    ]
    assert found.Scalars("sink_rate/1")[-1].value == pytest.approx(rows[-1]["sink_rate"][0])
    assert set(found.Tags()["scalars"]) == set().union(*(numbers_of(row) for row in rows))
    assert {f"charts/{name}" for name in CHARTS} <= set(found.Tags()["images"])
    assert "bigram_backcopy" in found.Tensors("recipe/text_summary")[0].tensor_proto.string_val[0].decode()


@needs("tensorboard")
def test_a_continued_run_does_not_repeat_its_evaluations_in_tensorboard(tmp_path: Path) -> None:
    lose_the_end(train(tmp_path, "tensorboard"))
    assert [event.step for event in events(train(tmp_path, "tensorboard")).Scalars("valid_loss")] == [0, 2, 4]


@needs("tensorboard")
def test_a_run_killed_before_its_first_checkpoint_repeats_no_evaluations_in_tensorboard(tmp_path: Path) -> None:
    shutil.rmtree(train(tmp_path, "tensorboard") / "checkpoints")
    assert [event.step for event in events(train(tmp_path, "tensorboard")).Scalars("valid_loss")] == [0, 2, 4]


@needs("tensorboard")
def test_a_tracker_new_to_a_finished_run_logs_all_of_it_once(tmp_path: Path) -> None:
    train(tmp_path, None)
    for _ in range(2):
        found = events(train(tmp_path, "tensorboard"))
        assert [event.step for event in found.Scalars("valid_loss")] == [0, 2, 4]
        assert [len(found.Images(f"charts/{name}")) for name in sorted(CHARTS)] == [1, 1, 1]


def log_entries(data: bytes) -> Iterator[bytes]:
    """The entries of a file in LevelDB's log format behind W&B's header, which counts for the first block."""
    place, parts = 7, []
    while place + 7 <= len(data):
        if (left := -place % BLOCK) and left < 7:  # too short for an entry's header: padding
            place += left
            continue
        _, length, kind = struct.unpack_from("<IHB", data, place)
        parts.append(data[place + 7 : place + 7 + length])
        place += 7 + length
        if kind in (1, 4):  # whole, or the last part
            yield b"".join(parts)
            parts = []


def wandb_records(run: Path) -> Iterator[tuple[str, Any]]:
    """(run id, record) of everything that W&B has written offline, session by session."""
    from wandb.proto.wandb_internal_pb2 import Record

    for path in sorted((run / "wandb").glob("offline-run-*/run-*.wandb")):
        for entry in log_entries(path.read_bytes()):
            record = Record()
            record.ParseFromString(entry)
            yield path.stem.removeprefix("run-"), record


@needs("wandb")
def test_wandb_gets_the_recipe_every_number_and_the_charts_under_one_id(tmp_path: Path) -> None:
    run = train(tmp_path, "wandb")
    lose_the_end(run)
    train(tmp_path, "wandb")
    identity = json.loads((run / "tracking.json").read_text())["wandb"]["id"]
    records = list(wandb_records(run))
    assert {found for found, _ in records} == {identity}
    config = {item.key: item.value_json for _, record in records for item in record.run.config.update}
    assert json.loads(config["model"])["width"] == 16
    logged = [
        {"/".join(item.nested_key) or item.key: json.loads(item.value_json) for item in record.history.item}
        for _, record in records
        if record.history.item
    ]
    rows = read_metrics(run / "metrics.jsonl")
    by_step = {values["_step"]: values for values in logged if "valid_loss" in values}
    assert [by_step[row["step"]]["valid_loss"] for row in rows] == [row["valid_loss"] for row in rows]
    charts = {name.split("/")[1] for values in logged for name in values if name.startswith("charts/")}
    assert charts >= CHARTS


@pytest.mark.parametrize("name", TRACKERS)
def test_a_missing_package_is_named_with_its_extra(name: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda package: None)
    said = f"--track needs the package {name}, which is not installed: {install_command('track')}"
    with pytest.raises(InputError, match=re.escape(said)):
        train(tmp_path, name)
    assert not (tmp_path / "run").exists()


def test_lists_become_a_number_per_position_without_null_values() -> None:
    row = {"step": 3, "sink_rate": [5.0, 0.5], "hidden_norm_ratio": [1.0], "bias": None, "domains": {"law": 2.5}}
    numbers = {"step": 3, "sink_rate/1": 5.0, "sink_rate/2": 0.5, "hidden_norm_ratio/0": 1.0, "domains/law": 2.5}
    assert numbers_of(row) == numbers
    assert numbers_of({"norm_ratio_sink_token": [1.5, 2.5]}) == {
        "norm_ratio_sink_token/0": 1.5,
        "norm_ratio_sink_token/1": 2.5,
    }


def test_positions_layers_and_heads_count_from_one() -> None:
    row = {"sink_rate_visible": [4.0], "sink_rate_heads": [[50.0, None], [0.0, 100.0]]}
    heads = {"sink_rate_heads/1/1": 50.0, "sink_rate_heads/2/1": 0.0, "sink_rate_heads/2/2": 100.0}
    assert numbers_of(row) == {"sink_rate_visible/1": 4.0, **heads}


@pytest.mark.parametrize(("name", "parameters"), [("60m", 136_462_080), ("1b", 1_337_026_560), ("tiny", 295_488)])
def test_a_dry_run_prints_the_cost_of_a_shipped_recipe(name: str, parameters: int) -> None:
    plan, speaks = plan_command(name, ["train.peak_flops=990e12", "train.precision=bf16"])
    assert speaks
    assert plan.parameters == parameters
    assert plan.flops_per_step / plan.tokens_per_step == pytest.approx(6 * parameters, rel=0.35)
    document = json.loads(json.dumps(plan.document()))
    assert document["memory"]["weights"] == pytest.approx(16 * parameters / 2**20, abs=0.1)
    assert plan.hours_at_peak == pytest.approx(plan.flops_per_step * plan.steps / 990e12 / 3600)
    printed = StringIO()
    print_plan(replace(plan, name="[red]"), Console(width=100, file=printed))
    assert f"{parameters:,}" in printed.getvalue()
    assert "[red] on 1 x cpu" in printed.getvalue()


def test_a_dry_run_refuses_the_same_recipes_as_training() -> None:
    with pytest.raises(InputError, match="is not a multiple of the number of processes, 3"):
        plan_of(load_recipe("60m"), torch.device("cpu"), processes=3)


def test_the_papers_recipes_fit_one_card_of_80_gb() -> None:
    for name in ("60m", "1b"):
        assert sum(plan_command(name, [])[0].memory.values()) < 75 * 2**30
