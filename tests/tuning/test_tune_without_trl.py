"""`sinklab sft` where trl is not installed."""

import importlib.util
from pathlib import Path

import pytest
from chats import sheep_chats
from conftest import Run

from sinklab.errors import install_command


def test_the_command_that_installs_trl_is_named(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *more: None if name == "trl" else find(name, *more))
    chats = sheep_chats(tmp_path / "chats.jsonl")
    status, out, err = run("sft", tmp_path, "--data", chats, "--out", "tuned")
    assert (status, out) == (2, "")
    assert f"instruction tuning needs the package trl, which is not installed: {install_command('sft')}\n" in err
    assert not (tmp_path / "tuned").exists()
