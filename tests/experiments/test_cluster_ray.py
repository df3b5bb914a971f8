"""Runs of a sweep on a real Ray cluster: two nodes on this machine, and a head that trains nothing."""

# Ray is an extra that `dev` leaves out, so it is imported within functions.

import os
import signal
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from cluster_runs import Diary, six_runs, train_disturbed

from sinklab.experiments.sweep.cluster import RayEngine, RayOptions

if TYPE_CHECKING:
    from ray.cluster_utils import Cluster

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.skipif(not find_spec("ray"), reason="ray is not installed (extra cluster)"),
]
MEMORY = 80 * 2**20  # of Ray's store of objects, in bytes: nearly nothing goes through it


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator["Cluster"]:
    from ray.cluster_utils import Cluster

    monkeypatch.setenv("SINKLAB_CACHE", str(tmp_path / "cache"))
    started = Cluster(
        initialize_head=True,
        head_node_args={"num_cpus": 0, "include_dashboard": False, "object_store_memory": MEMORY},
    )
    try:
        for _ in range(2):
            started.add_node(num_cpus=2, object_store_memory=MEMORY)
        yield started
    finally:
        started.shutdown()


def lose_node_of(process: int, cluster: "Cluster") -> None:
    """Kill the node that has started a process, and all processes of that node."""
    parent = int(Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[1])
    for node in cluster.worker_nodes:
        if any(info.process.pid == parent for info in node.all_processes["raylet"]):
            return cluster.remove_node(node, allow_graceful=False)
    raise AssertionError(f"no node has started process {process}, whose parent is {parent}")


def test_six_runs_finish_once_despite_a_terminated_worker_and_a_lost_node(cluster: "Cluster", tmp_path: Path) -> None:
    sweep = tmp_path / "sweep"
    runs = six_runs(sweep)
    folder = sweep / "ray"

    def process_of(name: str) -> int:
        return next(Diary(folder, run).last_process for run in runs if run.name == name)

    deeds = {  # seed 5 begins when cores are free, after the node of seed 3 is lost
        "seed 5": lambda: os.kill(process_of("seed 5"), signal.SIGTERM),
        "seed 3": lambda: lose_node_of(process_of("seed 3"), cluster),
    }
    train_disturbed(runs, RayEngine(folder, RayOptions(address=str(cluster.address))), deeds)
    diaries = {run.name: Diary(folder, run) for run in runs}
    assert {name: diary.completions for name, diary in diaries.items()} == {run.name: 1 for run in runs}
    assert diaries["seed 5"].begun_at == [0, *diaries["seed 5"].stopped_at]
    begun_first, begun_again = diaries["seed 3"].begun_at
    assert begun_again > begun_first
    assert diaries["seed 3"].stopped_at == []
