"""Initialisation of several processes: their timeout, and their card."""

import socket
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from commands import call_together

from sinklab.data.loader import TokenDataset
from sinklab.data.prepare import prepare, settings_of
from sinklab.errors import SinklabError
from sinklab.train.loop import Trainer
from sinklab.train.recipe import build_recipe
from sinklab.train.run import open_run
from sinklab.train.world import PATIENCE, STEP_PATIENCE, World, joined_world, own_card


def patience() -> str:
    return str(dist.distributed_c10d._get_default_group()._get_backend(torch.device("cpu")).options._timeout)


def train(world: World, out: Path) -> None:
    """Write the timeout at every update of a run."""
    found = [patience()]

    def watch(step: int, row: dict[str, Any] | None) -> None:
        found.append(f"{step} {patience()}")

    sizes = {"layers": 1, "width": 16, "heads": 2, "ffn_width": 16, "context": 8}
    steps = {"steps": 3, "batch_size": 4, "eval_every": 2, "eval_sequences": 2}
    recipe = build_recipe({"model": sizes, "train": steps, "metric": {"sequences": 2, "length": 8}})
    run = open_run(recipe, TokenDataset(out / "tokens"), out / "run")
    Trainer(run, watch, world=world).train()
    (out / f"rank-{world.rank}").write_text("\n".join(found))


def test_processes_wait_two_hours_until_the_first_update_and_then_ten_minutes(tmp_path: Path) -> None:
    text = "synthetic:bigram_backcopy:length=9,documents=100"
    prepare(settings_of(text, "words", valid_fraction=0.2), tmp_path / "tokens")
    assert call_together(train, 2, tmp_path) == [0, 0]
    long, short = str(PATIENCE), str(STEP_PATIENCE)
    expected = [long, f"0 {long}", f"1 {short}", f"2 {short}", f"2 {short}", f"3 {short}", f"3 {short}"]
    for rank in (0, 1):
        assert (tmp_path / f"rank-{rank}").read_text().splitlines() == expected


def test_a_port_in_use_is_reported_without_a_traceback(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        given = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        for name, value in given.items():
            monkeypatch.setenv(name, value)
        with pytest.raises(SinklabError, match=f"rank 0 of 2 failed.*{port}"), joined_world():
            pass
    assert "Traceback" not in capfd.readouterr().err


def test_running_out_of_memory_is_not_reported_as_a_lost_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr("sinklab.train.world._join", lambda world: None)
    with pytest.raises(torch.OutOfMemoryError, match="CUDA out of memory"), joined_world():
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")


@pytest.mark.parametrize(
    ("cards", "environment", "expected"),
    [
        (2, {"LOCAL_WORLD_SIZE": "2"}, torch.device("cuda", 1)),
        (2, {}, torch.device("cuda", 1)),
        (1, {"LOCAL_WORLD_SIZE": "2"}, None),  # they share cards, or train on the processor
    ],
)
def test_a_process_initialises_nccl_with_its_own_card(
    cards: int, environment: dict[str, str], expected: torch.device | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: cards)
    assert own_card(World(rank=1, size=2, local_rank=1)) == expected
