"""A server of another project, llama-cpp-python with llama.cpp, which serves a .gguf file. `pip install
llama-cpp-python[server]` compiles it, some 15 minutes on two cores; without it, these tests are skipped."""

import sys
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
from served_models import saved_model, started
from tiny_gguf import as_gguf, llama, needed, windowed_as_gguf
from tiny_models import text_file

from sinklab.assessing.parity import AS_CONFIGURED, DIFFERS, Parity, compare_server


def llama_server(file: Path) -> AbstractContextManager[str]:
    """Serve a .gguf file on the loopback."""

    def command(port: int) -> list[str]:
        options = {"model": file, "host": "127.0.0.1", "port": port, "logits_all": "true", "n_ctx": 128, "n_threads": 1}
        words = (word for name, value in options.items() for word in (f"--{name}", str(value)))
        return [sys.executable, "-m", "llama_cpp.server", *words]

    return started(command, "running on")


@pytest.fixture(autouse=True)
def _needed() -> None:
    needed()
    pytest.importorskip("llama_cpp.server.app", reason="needs llama-cpp-python[server]")


def compared(served: Path, model: Path, folder: Path) -> Parity:
    with llama_server(served) as url:
        return compare_server(url, str(model), text_file(folder / "text.jsonl"), length=90)


def test_a_file_is_served_as_configured(tmp_path: Path) -> None:
    model = llama(tmp_path / "model", bos=True)
    found = compared(as_gguf(model, tmp_path / "tiny.gguf"), model, tmp_path)
    assert found.as_configured
    assert found.prompts[0].nearest.mean < 0.01
    assert any("returns no log-probabilities of a prompt of token ids" in note for note in found.notes)


def test_the_verdict_names_a_missing_bos_if_the_file_does_not_ask_for_it(tmp_path: Path) -> None:
    served = as_gguf(llama(tmp_path / "served"), tmp_path / "tiny.gguf")
    assert compared(served, llama(tmp_path / "model", bos=True), tmp_path).verdict == "no BOS"


def test_a_shifted_echo_without_bos_is_aligned_with_a_note(tmp_path: Path) -> None:
    model = llama(tmp_path / "model")
    found = compared(as_gguf(model, tmp_path / "tiny.gguf"), model, tmp_path)
    assert found.as_configured
    assert any("follows itself" in note for note in found.notes)


def test_a_file_in_four_bits_differs_from_the_model_that_it_was_made_from(tmp_path: Path) -> None:
    model = llama(tmp_path / "model", bos=True)
    served = as_gguf(model, tmp_path / "tiny.gguf", "Q4_1")
    assert compared(served, model, tmp_path).verdict == DIFFERS
    assert compared(served, served, tmp_path).verdict == AS_CONFIGURED


@pytest.mark.parametrize(
    ("family", "altered", "named"),
    [
        ("gemma2", {}, AS_CONFIGURED),
        ("gemma2", {"attn_logit_softcapping": 1e4}, "no softcap"),
        ("gemma2", {"sliding_window": 10**6}, "no window"),
        ("gemma2", {"attn_logit_softcapping": 1e4, "sliding_window": 10**6}, "no window, no softcap"),
        ("gpt-oss", {}, AS_CONFIGURED),
        ("gpt-oss", {"sinks": False}, "no sink logits"),
        ("gpt-oss", {"sinks": False, "sliding_window": 10**6}, "no sink logits, no window"),
    ],
)
def test_a_model_without_its_window_softcap_or_sinks_is_named(
    tmp_path: Path, family: str, altered: dict[str, Any], named: str
) -> None:
    model = saved_model(tmp_path / "model", family)
    found = compared(windowed_as_gguf(model, tmp_path / "tiny.gguf", **altered), model, tmp_path)
    assert found.verdict == named
    assert found.prompts[0].nearest.mean < 0.02
