"""The CUDA path without a card: every variant trains and is measured on fake tensors, with the expected waits only.

A step copies its tokens to the card and two numbers back, and waits for those of the step before. A measurement waits
once for each batch, and not for each layer. Kernels, their speed and their results are not tested here.
"""

import json
import os
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.cpp_extension import include_paths

from sinklab.interventions import VARIANTS

pytestmark = [
    pytest.mark.cuda_dry,
    pytest.mark.skipif(sys.platform != "linux", reason="a library is preloaded, which is Linux's way"),
    pytest.mark.skipif(shutil.which("g++") is None, reason="g++ is needed to build tests/cuda_dry/guard.cpp"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="there is a card: nothing need be pretended"),
]

HERE = Path(__file__).parent
BATCHES_OF_LOSS, BATCHES_OF_METRIC = 3, 2  # of the recipe in steps.py
IN_STEP = {
    "copy to the card, data/loader.py batch": 1,
    "copy from the card, train/update.py add": 1,
    "event, train/update.py read": 1,
}
WITHOUT_FUSED_CHECK = {  # checked before the optimiser's step
    "copy to the card, data/loader.py batch": 1,
    "tolist, train/update.py _finite": 2,
}
IN_LOSS = {"copy to the card, train/evaluator.py losses": BATCHES_OF_LOSS, "tolist, train/evaluator.py losses": 1}
IN_MEASUREMENT = {
    "copy to the card, measuring/driver.py measure": BATCHES_OF_METRIC,
    "copy to the card, attention/masks.py to": BATCHES_OF_METRIC,
    "synchronize, device.py on_host": BATCHES_OF_METRIC + 1,  # and the largest activations
    "synchronize, measuring/accumulate.py costing": 1,
}
NOT_FUSED = ("sgd", "muon", "muon_clip", "outlier_safe", "ortho_adam")  # variants whose optimiser is not fused AdamW
MASKS = {"document": BATCHES_OF_METRIC, "pattern_windows": 2, "pattern_sinks": 2}  # different masks; 1 for the others


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """By variant: the events of each phase, or an error."""
    guard, libraries = tmp_path_factory.mktemp("guard") / "guard.so", Path(torch.__file__).parent / "lib"
    includes = [f"-I{path}" for path in include_paths()]
    linked = [f"-L{libraries}", "-lc10", "-ltorch_cpu", f"-Wl,-rpath,{libraries}"]
    build = ["g++", "-shared", "-fPIC", "-O1", "-std=c++20", str(HERE / "guard.cpp"), "-o", str(guard)]
    subprocess.run([*build, *includes, *linked], check=True)
    run = [sys.executable, "-W", "ignore", str(HERE / "steps.py")]
    done = subprocess.run(
        run, env={**os.environ, "LD_PRELOAD": str(guard)}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return {row["name"]: row for row in map(json.loads, done.stdout.splitlines())}


def assert_events(events: Iterable[dict[str, Any]], expected: dict[str, int]) -> None:
    """Copies and waits are as many as expected, by the function that causes them; the message says at which lines.

    Copies from the card in `device.on_host` without a wait are not counted.
    """
    counted: Counter[str] = Counter()
    lines: dict[str, set[int]] = {}
    for event in events:
        if event["place"] == "device.py on_host" and not event["waits"]:
            continue
        key = f"{event['what']}, {event['place']}"
        counted[key] += 1
        lines.setdefault(key, set()).add(event["line"])
    wrong = [
        f"{key}, lines {sorted(lines.get(key, ()))}: {counted[key]} times, expected {expected.get(key, 0)}"
        for key in sorted(counted.keys() | expected.keys())
        if counted[key] != expected.get(key, 0)
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("name", [*VARIANTS, "recomputed", "recomputed_hybrid"])
def test_a_variant_trains_and_is_measured_with_the_expected_copies_and_waits_only(
    name: str, found: dict[str, Any]
) -> None:
    assert "error" not in found[name], found[name]["error"]
    assert_events(found[name]["step"], WITHOUT_FUSED_CHECK if name in NOT_FUSED else IN_STEP)
    assert_events(found[name]["loss"], IN_LOSS)
    counted = {"copy from the card, attention/importance.py seen_by": MASKS.get(name, 1)}
    assert_events(found[name]["measure"], {**IN_MEASUREMENT, **counted})


@pytest.mark.parametrize("name", ["mistral", "gemma2", "gpt_oss"])
def test_sliding_windows_of_transformers_are_read_without_a_wait_per_layer(name: str, found: dict[str, Any]) -> None:
    assert "error" not in found[name], found[name]["error"]
    assert not [event for event in found[name]["read"] if event["place"].startswith(("models", "attention/layer"))]
