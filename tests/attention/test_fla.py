"""Kernels of flash-linear-attention give the results of our own code, and are used only for supported calls."""

import itertools
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import fla_agreement
import pytest
import torch
from attention_cases import arguments, config_of, core_of, legal, qkv
from fla_agreement import KERNELS
from torch._subclasses.fake_tensor import FakeTensorMode

from sinklab.attention.layer_call import AttentionCore
from sinklab.attention.operations import fla_kernels

needs_fla = pytest.mark.skipif(
    not all(map(find_spec, ("fla", "triton"))), reason="flash-linear-attention is not installed (extra fla)"
)
WORSE = 4  # factor by which a kernel's 16-bit error may exceed that of our own code on the same rounded inputs


@pytest.fixture(scope="module")
def interpreted() -> list[dict[str, Any]]:
    """Errors of all cases in Triton's interpreter, in a process that imports Triton anew."""
    script = Path(fla_agreement.__file__)
    path = os.pathsep.join([str(script.parent), *filter(None, sys.path)])
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": path}
    run = [sys.executable, "-W", "ignore", str(script)]
    done = subprocess.run(run, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


@needs_fla
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a card, on which the kernels are tested")
@pytest.mark.parametrize("name", KERNELS)
def test_kernels_in_the_interpreter_equal_our_own_code(name: str, interpreted: list[dict[str, Any]]) -> None:
    single, half = (row for row in interpreted if row["name"] == name)
    assert single["called"] == half["called"] == [KERNELS[name]]
    assert single["error"] < 1e-5
    assert half["error"] < WORSE * half["own"]


@needs_fla
@pytest.mark.skipif(not torch.cuda.is_available(), reason="compiled kernels need CUDA")
@pytest.mark.parametrize("name", KERNELS)
def test_kernels_on_cuda_equal_our_own_code(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    called = fla_agreement.noted_calls(monkeypatch.setattr)
    found = fla_agreement.error(name, "cuda", torch.bfloat16)
    assert called == [KERNELS[name]]
    assert found < WORSE * fla_agreement.error(name, "cuda", torch.bfloat16, by_fla=False)


class KernelCalledError(Exception):
    pass


def _call(*_: Any) -> None:
    raise KernelCalledError


OPERATIONS = ("elu_kernel", "identity_normalised", "forgetting", "stick_breaking")
PLAIN: dict[str, dict[str, Any]] = {"none": {}, "v bias": {"bias": "v_biases"}, "sink token": {"bias": "sink_token"}}
OTHER: dict[str, dict[str, Any]] = {
    "window": {"mask": "window"},
    "prefix": {"mask": "prefix"},
    "documents": {"mask": "document"},
    "chunked": {"backend": "chunked"},
    "eager": {"backend": "eager"},
    "softcap": {"softcap": 3.0},
    "sink logit": {"bias": "sink_logit"},
    "bias key": {"bias": "kv_biases"},
    "position": {"position": "slopes"},
}


def cores(changes: dict[str, dict[str, Any]]) -> Iterator[Any]:
    """Cores of all operations with each change that the config accepts."""
    for operation, (name, change) in itertools.product(OPERATIONS, changes.items()):
        settings: dict[str, Any] = {"bias": "none", "mask": "causal", "softcap": None, **change}
        backend, position = settings.pop("backend", "auto"), settings.pop("position", "none")
        if legal(operation, position=position, **settings):
            core = core_of(config_of(operation, backend=backend, **settings), position)
            yield pytest.param(operation, core, id=f"{operation}, {name}")


@pytest.mark.parametrize(("operation", "core"), cores(PLAIN))
def test_a_plain_causal_call_uses_the_kernel(
    operation: str, core: AttentionCore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fla_kernels, "serves", lambda q, v: True)
    monkeypatch.setattr(fla_kernels, KERNELS[operation], _call)
    with pytest.raises(KernelCalledError):
        core(*qkv(core=core), *arguments(core))
    q, k, v = qkv(core=core)
    core(q[:, :, -3:], k, v, *arguments(core))  # with a KV cache, our own code


@pytest.mark.parametrize(("operation", "core"), cores(OTHER))
def test_any_other_call_uses_our_own_code(operation: str, core: AttentionCore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fla_kernels, "serves", lambda q, v: True)
    monkeypatch.setattr(fla_kernels, KERNELS[operation], _call)
    assert core(*qkv(core=core), *arguments(core)).isfinite().all()


def test_the_delta_rule_uses_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    given, rule, own = fla_agreement.delta_case("gated_delta")
    assert torch.equal(rule(*given)[0], own(*given)[0])  # float64 on a CPU
    monkeypatch.setattr(fla_kernels, "serves", lambda q, v: True)
    monkeypatch.setattr(fla_kernels, "gated_delta_by_fla", _call)
    with pytest.raises(KernelCalledError):
        rule(*given)


def test_fake_tensors_and_the_cpu_are_not_served(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fla_kernels, "installed", lambda: True)
    on_cpu = torch.zeros(1, 1, 4, 16, dtype=torch.bfloat16)
    assert not fla_kernels.serves(on_cpu, on_cpu)
    with FakeTensorMode():
        fake = torch.empty(1, 1, 4, 16, dtype=torch.bfloat16, device="cuda")
        assert fake.is_cuda
        assert not fla_kernels.serves(fake, fake)
