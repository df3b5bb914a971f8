"""The benchmarks for GPUs run to their end at tiny sizes on a CPU."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["attention", "measure", "sources", "train"])
def test_a_gpu_benchmark_runs_dry(name: str, tmp_path: Path) -> None:
    command = [sys.executable, "-m", f"benchmarks.gpu.{name}", "--dry-run"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path]), "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
