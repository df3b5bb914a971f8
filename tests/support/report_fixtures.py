"""Made-up directories of runs and measurements with numbers of realistic size, for the tests of the report."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from sinklab.measuring.measurement import Measurement

LAYERS, HEADS, LENGTH, SEQUENCES = 4, 4, 64, 8
HOSTILE = "<script>alert(1)</script>"

# final Sink_1, final sink on the bias (percent), highest norm ratio, validation loss
LAB = {"softmax": (8.6, None, 4.7, 2.84), "K biases": (0.0, 21.9, 3.8, 2.84), "sigmoid": (0.4, None, 1.7, 2.93)}


def make_run(
    path: Path,
    name: str = "softmax",
    seed: int = 0,
    final: tuple[float, float | None, float, float] = LAB["softmax"],
    steps: int = 2000,
    reached: int | None = None,
) -> Path:
    """A run directory; with `reached` below `steps` it is still in progress and not measured."""
    path.mkdir(parents=True)
    generator = np.random.default_rng(seed)
    recipe = {
        "name": name,
        "seed": seed,
        "model": {"layers": LAYERS, "heads": HEADS, "width": 128},
        "data": {"corpus": "stdlib", "bos": True},
        "optim": {"name": "adamw", "lr": 3e-3, "weight_decay": 0.1},
        "train": {"steps": steps, "eval_every": 100},
    }
    (path / "recipe.yaml").write_text(yaml.safe_dump(recipe), encoding="utf-8")
    write(
        path / "env.json",
        {"hash": "a1b2c3d4", "sinklab": "0.1.0", "torch": "2.13.0", "device": "cpu", "date": "2026-05-04"},
    )
    last = steps if reached is None else reached
    records = [evaluation(step, steps, final, generator) for step in range(0, last + 1, 100)]
    text = "".join(json.dumps(record) + "\n" for record in records)
    (path / "metrics.jsonl").write_text(text, encoding="utf-8")
    if reached is None:
        make_measurement(path, model=str(path), final=final, seed=seed)
    return path


def evaluation(
    step: int, steps: int, final: tuple[float, float | None, float, float], generator: np.random.Generator
) -> dict[str, Any]:
    """One line of metrics.jsonl: the sink grows in the second half of the training."""
    grown = 1 / (1 + np.exp(-12 * (step / steps - 0.55)))
    noise = float(generator.normal(1, 0.05))
    first, bias, ratio, loss = final
    valid = float(loss + 3.9 * np.exp(-7 * step / steps))
    return {
        "step": step,
        "tokens": step * 2048,
        "train_loss": valid - 0.05 * noise,
        "valid_loss": valid,
        "sink_rate": [float(first * grown * noise), *([0.0] * (LENGTH - 1))],
        "sink_rate_bias": None if bias is None else float(bias * grown * noise),
        "hidden_norm_ratio": norm_ratios(1 + (ratio - 1) * float(grown) * noise),
        "lr": 3e-3,
        "grad_norm": 0.4 * noise,
        "tokens_per_second": 9800.0,
    }


def make_measurement(
    path: Path,
    model: str = "tiny",
    final: tuple[float, float | None, float, float] = LAB["softmax"],
    seed: int = 0,
    layers: int = LAYERS,
    heads: int = HEADS,
) -> Path:
    """measurement.json and measurement.npz."""
    first, bias, ratio, loss = final
    generator = np.random.default_rng([seed, int(first * 10)])
    importance = 1.6 / (np.arange(LENGTH) + 8) * generator.gamma(6, 1 / 6, (layers, heads, LENGTH))
    importance[:, :, -6:] *= 1.5
    uniform = np.array([(1 / np.arange(k, LENGTH + 1)).sum() / (LENGTH - k + 1) for k in range(1, LENGTH + 1)])
    importance[:, :, 0] = np.minimum(0.95, generator.gamma(1.5, 0.005 + first / 100, (layers, heads)))
    Measurement(
        model=model,
        inputs="natural",
        sequences=SEQUENCES,
        length=LENGTH,
        eps=0.3,
        bos=True,
        proxy=first == LAB["sigmoid"][0],
        layers=layers,
        heads=heads,
        sink_rate=[first * (1 + seed / 20), *([0.0] * (LENGTH - 1))],
        sink_rate_bias=bias,
        uniform_ratio=(importance.mean((0, 1)) / uniform).tolist(),
        loss=loss,
        hidden_norm_ratio=norm_ratios(ratio, layers),
        key_norm_ratio=[1.0] * layers,
        value_norm_ratio=[1.0] * layers,
        backend="sdpa",
        dtype="float32",
        seconds=1.7,
        peak_memory_mb=None,
        importance=importance,
        importance_first=np.tile(importance[:, :, 0], (SEQUENCES, 1, 1)),
        hidden_norm=np.ones((layers + 1, LENGTH)),
        key_norm=np.ones((layers, LENGTH)),
        value_norm=np.ones((layers, LENGTH)),
    ).save(path)
    return path


def make_lab(path: Path, seeds: int = 1, hostile: bool = False) -> Path:
    """A lab directory: three cells, its summary."""
    names = dict(zip(LAB, [HOSTILE if hostile else "softmax", "K biases", "sigmoid"], strict=True))
    for cell, final in LAB.items():
        for seed in range(seeds):
            folder = path / cell / f"seed_{seed}" if seeds > 1 else path / cell
            make_run(folder, name=names[cell], seed=seed, final=final)
    cells = {
        cell: {"sink_rate": [final[0]], "sink_rate_bias": final[1], "valid_loss": final[3], "seeds": seeds}
        for cell, final in LAB.items()
    }
    write(path / "summary.json", {"cells": cells})
    return path


def norm_ratios(highest: float, layers: int = LAYERS) -> list[float]:
    """layers + 1 ratios that rise to `highest` and fall in the last block."""
    rise: Callable[[int], float] = lambda layer: 1 + (highest - 1) * min(1.0, layer / max(1, layers - 1))  # noqa: E731
    return [0.9, *(rise(layer) for layer in range(1, layers)), 1 + (highest - 1) * 0.4]


def write(path: Path, document: Any) -> None:
    """Plain JSON."""
    path.write_text(json.dumps(document), encoding="utf-8")
