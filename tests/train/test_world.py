"""Initialisation of several processes: their timeout, and their card."""

import socket
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from commands import call_together

from sinklab.errors import SinklabError
from sinklab.train.world import PATIENCE, World, joined_world, own_card


def patience(world: World, out: Path) -> None:
    backend = dist.distributed_c10d._get_default_group()._get_backend(torch.device("cpu"))
    (out / str(world.rank)).write_text(str(backend.options._timeout))


def test_processes_wait_longer_than_pytorchs_half_hour_for_prepared_text(tmp_path: Path) -> None:
    assert call_together(patience, 2, tmp_path) == [0, 0]
    assert {path.read_text() for path in tmp_path.iterdir()} == {str(PATIENCE)}
    assert dist.distributed_c10d.default_pg_timeout < PATIENCE


def test_a_port_in_use_ends_the_process_in_a_sentence(
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
