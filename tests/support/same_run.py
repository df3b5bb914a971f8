"""Comparison of two run directories, bit for bit."""

from pathlib import Path

import torch
from safetensors.torch import load_file

from sinklab.measuring.measurement import Measurement
from sinklab.train.run import read_metrics

UNREPEATABLE = {"tokens_per_second", "mfu", "stall_share"}


def contents(out: Path) -> tuple[dict[str, torch.Tensor], list[dict[str, object]], str]:
    """Weights and optimiser, metric history and training losses, and the rest of the state."""
    checkpoint = max((out / "checkpoints").glob("step_*"))
    tensors: dict[str, torch.Tensor] = {}
    for shard in checkpoint.glob("*.safetensors"):
        tensors |= {f"{shard.name} {name}": tensor for name, tensor in load_file(shard).items()}
    rows = [{k: v for k, v in row.items() if k not in UNREPEATABLE} for row in read_metrics(out / "metrics.jsonl")]
    return tensors, rows, (checkpoint / "state.json").read_text()


def assert_same_run(one: Path, other: Path) -> None:
    (tensors, rows, state), (others, other_rows, other_state) = contents(one), contents(other)
    assert tensors.keys() == others.keys()
    assert all(torch.equal(tensor, others[name]) for name, tensor in tensors.items())
    assert rows == other_rows
    assert state == other_state
    before, after = Measurement.load(one), Measurement.load(other)
    assert before.sink_rate == after.sink_rate
    assert (before.importance == after.importance).all()
