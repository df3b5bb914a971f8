"""Initialisation of several processes: their timeout, and their card."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from commands import call_together

from sinklab.train.world import PATIENCE, World, own_card


def patience(world: World, out: Path) -> None:
    backend = dist.distributed_c10d._get_default_group()._get_backend(torch.device("cpu"))
    (out / str(world.rank)).write_text(str(backend.options._timeout))


def test_processes_wait_longer_than_pytorchs_half_hour_for_prepared_text(tmp_path: Path) -> None:
    assert call_together(patience, 2, tmp_path) == [0, 0]
    assert {path.read_text() for path in tmp_path.iterdir()} == {str(PATIENCE)}
    assert dist.distributed_c10d.default_pg_timeout < PATIENCE


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
