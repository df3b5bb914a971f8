"""Shared fixtures. Real text and a real model come from SINKLAB_DATA (default ../shared/data)."""

import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # read on import; without it, a missing model is asked for many times

from sinklab.commands import app

Run = Callable[..., tuple[int, str, str]]
"""`sinklab ARGS`: its exit status, stdout and stderr."""

DATA = Path(os.environ.get("SINKLAB_DATA", Path(__file__).parents[2] / "shared" / "data"))


@pytest.fixture(scope="session")
def data_dir() -> Path:
    """The folder of real data; tests that need it are skipped where it is absent."""
    if not DATA.is_dir():
        pytest.skip(f"no real data at {DATA}: set SINKLAB_DATA to the folder that holds domains/ and models/")
    return DATA


@pytest.fixture(scope="session", autouse=True)
def _one_thread_per_worker() -> None:
    if "PYTEST_XDIST_WORKER" in os.environ:
        torch.set_num_threads(1)


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path) -> Run:
    """Calls `sinklab ARGS` within this process, in an empty folder, with a cache of its own, 200 characters wide."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SINKLAB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("COLUMNS", "200")
    for limit in ("MATRICES_S", "TIMED_S"):  # estimates of time from one call each
        monkeypatch.setattr(f"sinklab.experiments.sweep.preview.{limit}", 0.0)

    def call(*args: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["sinklab", *map(str, args)])
        with pytest.raises(SystemExit) as end:
            app.main()
        out, err = capfd.readouterr()
        assert isinstance(end.value.code, int)
        return end.value.code, out, err

    return call


def on_one_line(run: Run) -> Run:
    """The same command, with stderr joined into one line."""

    def call(*args: object) -> tuple[int, str, str]:
        status, out, err = run(*args)
        return status, out, " ".join(err.split())

    return call
