"""Attention allocates nothing of size T x T: peak memory over the inputs, measured in a process of its own.

Every operation at T = 8192 against 2048 is a sweep of minutes (`slow`); one at T = 2048 is in the fast tests.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from allocator import ALLOCATOR
from attention_cases import OPERATIONS

SCRIPT = """
import json, sys
import torch
from sinklab.attention.config import AttentionConfig
from sinklab.attention.layer_call import AttentionCore

def peak_megabytes(work):
    open("/proc/self/clear_refs", "w").write("5")  # the high-water mark starts again from here
    before = status("VmRSS")
    work()
    return (status("VmHWM") - before) / 1024

def status(key):
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith(key))

torch.set_num_threads(1)
core = AttentionCore(AttentionConfig.model_validate(json.loads(sys.argv[1])), kv_heads=8, head_width=64, context=64)
for parameter in core.parameters():
    torch.nn.init.normal_(parameter)
widths = (64 * core.operation.queries_per_head, 64, 64)
small, large = ([torch.randn(1, 8, T, d, requires_grad=True) for d in widths] for T in (64, int(sys.argv[2])))

def beside(T):
    kept = torch.linspace(0, -20, T)[None, :, None].repeat(1, 1, 8).requires_grad_()
    return (None, kept) if core.operation.forgets or core.operation.weighs else ()

few, many = beside(64), beside(int(sys.argv[2]))
core(*small, *few).sum().backward()  # library start-up is not the operation's memory
core.layer_call(*small, *few).importance()
result = {}
def forward():
    result["out"] = core(*large, *many)
peaks = {"forward": peak_megabytes(forward)}
peaks["backward"] = peak_megabytes(lambda: result["out"].backward(torch.ones_like(result["out"])))
if len(sys.argv) == 3:
    peaks["importance"] = peak_megabytes(lambda: core.layer_call(*large, *many).importance())
print(json.dumps(peaks))
"""

BLOCKS: dict[str, Any] = {"operation": {"kind": "sigmoid"}, "bias": {"kind": "kv"}}
OTHERS: dict[str, dict[str, Any]] = {
    "elu1_window": {"operation": {"kind": "elu1"}, "mask": {"kind": "window", "width": 512}},
    "prefix_kv": {"mask": {"kind": "prefix", "length": 100}, "bias": {"kind": "kv"}},
    "sink_token": {"bias": {"kind": "sink_token"}},
    "kernel_window": {"operation": {"kind": "identity"}, "mask": {"kind": "window", "width": 512}},
    "softmax_chunked": {"backend": "chunked"},
    "softpick_window": {"operation": {"kind": "softpick"}, "mask": {"kind": "window", "width": 512}},
}


pytestmark = pytest.mark.skipif(
    not Path("/proc/self/clear_refs").exists(), reason="peak memory is read from Linux's /proc"
)


def peaks(config: dict[str, Any], tokens: int, *, importance: bool = True) -> dict[str, float]:
    """Peak megabytes of the forward pass, the backward pass and importance, each above those in use before it."""
    arguments = [json.dumps(config), str(tokens), *([] if importance else ["without importance"])]
    result = subprocess.run(
        [sys.executable, "-c", SCRIPT, *arguments],
        capture_output=True,
        text=True,
        check=True,
        env=ALLOCATOR | os.environ,
    )
    return json.loads(result.stdout)


def test_2048_tokens_stay_below_one_score_matrix() -> None:
    matrix = 8 * 2048 * 2048 * 4 / 2**20
    assert max(peaks(BLOCKS, 2048).values()) < matrix


@pytest.mark.slow
@pytest.mark.parametrize("name", [*OPERATIONS, *OTHERS])
def test_memory_grows_linearly_to_8192_tokens(name: str) -> None:
    config = OTHERS.get(name) or {"operation": OPERATIONS[name]}
    short, long = peaks(config, 2048), peaks(config, 8192)
    assert all(peak < 400 for peak in long.values()), long  # one score matrix alone is 2048
    for parts in (("forward", "backward"), ("importance",)):
        before, after = (sum(measured[part] for part in parts) for measured in (short, long))
        assert after <= 5 * before, (short, long)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["softmax", "sigmoid", "softpick", "differential", "identity"])
def test_blocks_take_a_tenth_of_eager_at_most(name: str) -> None:
    # At T = 4096, where eager needs 3 GB; at 8192 the two are further apart.
    eager, blocks = (
        sum(peaks({"operation": OPERATIONS[name], "backend": backend}, 4096, importance=False).values())
        for backend in ("eager", "chunked")
    )
    assert blocks <= eager / 10
