"""State of a checkpoint: what state.json holds, and how a checkpoint on the disk can be damaged."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from torch import nn

from sinklab.files import sha256_of
from sinklab.train.directory import tensor_store

STATE, SUMS = "state.json", "SHA256SUMS"
Hashes = str | tuple[str, ...]


@dataclass
class TrainState:
    """What a run has reached besides weights and optimiser.

    Attributes:
        step: updates done; also the index of the next batch.
        loss_sum, loss_count: training loss since the last evaluation, nats per token.
        grad_norm: of the last update, before clipping.
    """

    step: int = 0
    loss_sum: float = 0.0
    loss_count: int = 0
    grad_norm: float = 0.0


def defect(checkpoint: Path, model: nn.Module, run_hash: Hashes | None) -> str | None:
    """What is wrong with a checkpoint, None where nothing is."""
    checks: tuple[Callable[[], str | None], ...] = (
        lambda: _wrong_file(checkpoint),
        lambda: _wrong_state(checkpoint, run_hash),
        lambda: _wrong_tensor(checkpoint, model),
    )
    try:
        return next((found for check in checks if (found := check())), None)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, SafetensorError) as error:
        return f"is not readable ({error or type(error).__name__})"


def _wrong_file(checkpoint: Path) -> str | None:
    if not (checkpoint / SUMS).is_file():
        return f"has no {SUMS}"
    lines = (checkpoint / SUMS).read_text(encoding="utf-8").splitlines()
    sums = {name: digest for digest, name in (line.split("  ", 1) for line in lines)}
    present = {path.name for path in checkpoint.iterdir()} - {SUMS}
    if STATE not in sums:
        return f"has no {STATE} among its checksums"
    if missing := sorted(sums.keys() - present):
        return f"has lost {missing[0]}"
    if strange := sorted(name for name in present - sums.keys() if name.endswith(tensor_store.SUFFIX)):
        return f"has {strange[0]}, which is not part of it"
    changed = [name for name, digest in sums.items() if sha256_of(checkpoint / name) != digest]
    return f"has a damaged {changed[0]} (its checksum is not the one recorded)" if changed else None


def _wrong_state(checkpoint: Path, run_hash: Hashes | None) -> str | None:
    document = read_state(checkpoint)
    TrainState(**document["state"])
    wanted = (run_hash,) if isinstance(run_hash, str) else run_hash
    if wanted is not None and document["run_hash"] not in wanted:
        return f"belongs to run {document['run_hash']}, not {wanted[0]}"
    if document["state"]["step"] != step_of(checkpoint):
        return f"holds step {document['state']['step']}"
    return None


def _wrong_tensor(checkpoint: Path, model: nn.Module) -> str | None:
    found = tensor_store.stored_shapes(checkpoint)
    recorded = {name: tuple(shape) for name, shape in read_state(checkpoint)["tensors"].items()}
    weights = {name: shape for name, shape in found.items() if name.startswith(tensor_store.MODEL)}
    wanted = {name: tuple(tensor.shape) for name, tensor in tensor_store.model_tensors(model).items()}
    for have, expected in ((found, recorded), (weights, wanted)):
        if missing := sorted(expected.keys() - have.keys()):
            return f"lacks the tensor {missing[0]}"
        if strange := sorted(have.keys() - expected.keys()):
            return f"has the tensor {strange[0]} too many"
        if wrong := sorted(name for name in have if have[name] != expected[name]):
            return f"has the tensor {wrong[0]} of shape {have[wrong[0]]} instead of {expected[wrong[0]]}"
    return None


def read_state(checkpoint: Path) -> dict[str, Any]:
    """What state.json holds."""
    return json.loads((checkpoint / STATE).read_text(encoding="utf-8"))


def step_of(checkpoint: Path) -> int:
    """The step in a checkpoint's name."""
    return int(checkpoint.name.removeprefix("step_"))
