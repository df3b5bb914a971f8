"""The benchmarks for GPUs run to their end at tiny sizes on a CPU."""

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["attention", "measure", "sources", "train", "variants"])
def test_a_gpu_benchmark_runs_dry(name: str, tmp_path: Path) -> None:
    command = [sys.executable, "-m", f"benchmarks.gpu.{name}", "--dry-run"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path]), "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]


def test_the_documented_table_of_large_models_is_that_of_the_formulae(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT)
    from benchmarks.gpu.costs import large_models

    assert "\n".join(large_models()) in (ROOT / "docs" / "measuring.md").read_text("utf-8")


def test_a_failed_benchmark_case_is_recorded_and_does_not_stop_the_others(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(ROOT)
    from benchmarks.gpu.cases import run_cases

    def fails() -> dict[str, float]:
        raise RuntimeError("no kernel for this head")

    given = argparse.Namespace(only=["softmax", "relu"], out=tmp_path / "found.jsonl")
    cases = [
        ("softmax 60m", lambda: {"ms": 1.5}),
        ("relu 60m", fails),
        ("gate", fails),
        ("softmax 1b", lambda: {"ms": 2}),
    ]
    assert run_cases(cases, given) == 1
    rows = [json.loads(line) for line in given.out.read_text("utf-8").splitlines()]
    assert rows == [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert "torch" in rows.pop(0)["environment"]
    assert [row["case"] for row in rows] == ["softmax 60m", "relu 60m", "softmax 1b"]
    assert rows[1]["error"] == "RuntimeError: no kernel for this head"
    assert rows[2]["ms"] == 2
