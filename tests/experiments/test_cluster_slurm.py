"""Runs of a sweep on a real Slurm cluster: two nodes on this machine, set up by tests/cluster/slurm.sh."""

import os
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
from cluster_runs import Diary, six_runs, train_disturbed

from sinklab.errors import InputError
from sinklab.experiments.sweep.cluster import SlurmEngine, SlurmOptions
from sinklab.experiments.sweep.engine import Event, PlannedRun

SCRIPT = Path(__file__).parents[1] / "cluster" / "slurm.sh"
OPTIONS = SlurmOptions(poll_seconds=1)

pytestmark = pytest.mark.cluster


def missing() -> str:
    """Return the reason why Slurm cannot run on this machine; empty if it can."""
    commands = [name for name in ("slurmctld", "munged", "sbatch") if not shutil.which(name, path=PATH)]
    if commands:
        return f"{commands[0]} is not installed: apt-get install slurm-wlm munge"
    if not find_spec("submitit"):
        return "submitit is not installed (extra cluster)"
    return "" if os.geteuid() == 0 else "Slurm's daemons want to be started by root"


PATH = f"{os.environ['PATH']}:/usr/sbin"
needs_slurm = pytest.mark.skipif(bool(missing()), reason=missing())


def scontrol(*arguments: str) -> str:
    return subprocess.run(["scontrol", *arguments], check=True, capture_output=True, text=True).stdout


def queued(state: str = "PENDING,RUNNING") -> set[str]:
    return set(
        subprocess.run(
            ["squeue", "-h", "-r", "-o", "%i", "-t", state], check=True, capture_output=True, text=True
        ).stdout.split()
    )


def wait_until_ended(jobs: list[str]) -> None:
    """Wait for a job that depends on these; they end some moments after they have saved their results."""
    after = ["sbatch", "--wait", "--output=/dev/null", f"--dependency=afterany:{':'.join(jobs)}", "--wrap=true"]
    subprocess.run(after, check=True, timeout=60)
    assert not queued()


def job_of(folder: Path, run: PlannedRun) -> str:
    return (folder / f"{run.hash}.job").read_text()


def hear(engine: SlurmEngine, is_enough: Callable[[list[Event]], bool]) -> list[Event]:
    """The events of an engine until they fulfil a condition."""
    heard: list[Event] = []
    end = time.monotonic() + 300
    while not is_enough(heard):
        assert time.monotonic() < end, heard
        heard += engine.events(0.5)
    return heard


def node_of(job: str) -> str:
    fields = scontrol("show", "job", job).split()
    return next(field.removeprefix("NodeList=") for field in fields if field.startswith("NodeList="))


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with slurm.conf; afterwards no daemon is left."""
    folder = tmp_path_factory.mktemp("slurm")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SLURM_CONF", str(folder / "slurm.conf"))
        patch.setenv("SINKLAB_CACHE", str(folder / "cache"))
        try:
            subprocess.run([SCRIPT, "start", folder], check=True)
            subprocess.run([SCRIPT, "wait", folder, "one,two"], check=True)
            yield folder
        finally:
            subprocess.run([SCRIPT, "stop", folder], check=True)


@needs_slurm
def test_six_runs_finish_once_though_two_are_requeued_and_a_node_is_lost(cluster: Path, tmp_path: Path) -> None:
    sweep = tmp_path / "sweep"
    runs = six_runs(sweep)
    folder = sweep / "slurm"

    def job(name: str) -> str:
        return next(job_of(folder, run) for run in runs if run.name == name)

    lost: list[str] = []

    def requeue() -> None:  # as Slurm does to make room for another job
        scontrol("requeue", job("seed 0"))

    def warn() -> None:  # as Slurm does before the time limit
        # scancel repeats the signal for a minute if Slurm is slow to confirm it, even after the job was restarted
        subprocess.run(["timeout", "2", "scancel", "--signal=USR1", job("seed 1")], check=False)

    def lose_node() -> None:
        lost.append(node_of(job("seed 3")))
        subprocess.run([SCRIPT, "lose-node", cluster, lost[0]], check=True)

    train_disturbed(runs, SlurmEngine(folder, OPTIONS), {"seed 0": requeue, "seed 1": warn, "seed 3": lose_node})
    diaries = {run.name: Diary(folder, run) for run in runs}
    assert {name: diary.completions for name, diary in diaries.items()} == {run.name: 1 for run in runs}
    for name in ("seed 0", "seed 1"):
        (saved_at,) = diaries[name].stopped_at
        assert diaries[name].begun_at == [0, saved_at]
    begun_first, begun_again = diaries["seed 3"].begun_at
    assert begun_again > begun_first
    assert diaries["seed 3"].stopped_at == []
    subprocess.run([SCRIPT, "start-node", cluster, lost[0]], check=True)
    subprocess.run([SCRIPT, "wait", cluster, "one,two"], check=True)


@needs_slurm
def test_later_calls_find_stop_and_continue_the_jobs_of_an_earlier_call(cluster: Path, tmp_path: Path) -> None:
    sweep = tmp_path / "sweep"
    runs = six_runs(sweep)
    folder = sweep / "slurm"
    SlurmEngine(folder, OPTIONS).submit(runs)  # this engine is not used again
    jobs = [job_of(folder, run) for run in runs]

    second = SlurmEngine(folder, OPTIONS)
    second.submit(runs)
    assert [job_of(folder, run) for run in runs] == jobs
    assert queued() == set(jobs)

    hear(second, lambda heard: any(event.step > 0 for event in heard))
    second.stop()
    ended = hear(second, lambda heard: sum(event.is_last for event in heard) == len(runs))
    assert {event.kind for event in ended if event.is_last} == {"stopped"}
    wait_until_ended(jobs)

    logged = [run for run in runs if (folder / f"{run.hash}.log").exists()]
    begun = [run for run in logged if Diary(folder, run).begun_at and Diary(folder, run).stopped_at]
    train_disturbed(begun[:2], SlurmEngine(folder, OPTIONS), {})
    for diary in (Diary(folder, run) for run in begun[:2]):
        assert diary.begun_at == [0, *diary.stopped_at]
        assert diary.completions == 1


@needs_slurm
def test_a_cancelled_job_fails_and_is_not_restarted(cluster: Path, tmp_path: Path) -> None:
    sweep = tmp_path / "sweep"
    run = six_runs(sweep)[0]
    folder = sweep / "slurm"
    engine = SlurmEngine(folder, OPTIONS)
    engine.submit([run])
    hear(engine, lambda heard: any(event.step > 0 for event in heard))
    subprocess.run(["scancel", job_of(folder, run)], check=True)
    ended = hear(engine, lambda heard: any(event.is_last for event in heard))[-1]
    assert ended.kind == "failed"
    assert f"job {job_of(folder, run)} ended without a result" in ended.message
    wait_until_ended([job_of(folder, run)])
    assert len(Diary(folder, run).stopped_at) == 1


@needs_slurm
def test_a_cluster_without_its_controller_is_refused_as_not_answering(
    cluster: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nobody = tmp_path / "slurm.conf"
    nobody.write_text((cluster / "slurm.conf").read_text().replace("SlurmctldPort=16817", "SlurmctldPort=16816"))
    monkeypatch.setenv("SLURM_CONF", str(nobody))
    with pytest.raises(InputError, match=r"--engine slurm: no cluster answers squeue; SLURM_CONF is .*slurm\.conf"):
        SlurmEngine(tmp_path / "sweep", OPTIONS)
    assert not (tmp_path / "sweep").exists()
