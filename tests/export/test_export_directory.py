"""`sinklab export`: the files, their measurement, and errors."""

import json
import os
import resource
import shutil
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import Run, on_one_line
from safetensors.torch import load_file
from trained_run import trained_run
from transformers import AutoModelForCausalLM, AutoTokenizer

import sinklab
from sinklab.errors import InputError, SinklabError
from sinklab.export.directory import export_run

FILES = {
    "README.md",
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
}


@pytest.fixture(scope="module")
def with_bos(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A run of the default variant whose sequences begin with BOS, and a text."""
    return trained_run(tmp_path_factory.mktemp("bos"), {"bos": True})


@pytest.fixture(scope="module")
def natural(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A run with key biases, without BOS, and a text."""
    return trained_run(tmp_path_factory.mktemp("natural"), {}, {"attention": {"bias": "k"}})


@pytest.mark.parametrize("which", ["with_bos", "natural"])
def test_an_exported_run_measures_as_the_run(
    which: str, run: Run, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    there, text = request.getfixturevalue(which)
    status, out, _ = run("export", there, "hf", "--json")
    assert status == 0
    document = json.loads(out)
    assert document["directory"] == "hf"
    assert document["step"] == 1
    own_code = {"modeling_sinklab.py"} if document["code"] else set()
    assert {path.name for path in (tmp_path / "hf").iterdir()} == FILES | own_code
    ours, theirs = (
        json.loads(run("measure", place, "--text", text, "--sequences", 8, "--length", 16, "--json")[1])
        for place in (there, "hf")
    )
    assert theirs["sink_rate"] == ours["sink_rate"]
    assert theirs["sink_rate_bias"] == ours["sink_rate_bias"]
    assert theirs["loss"] == pytest.approx(ours["loss"], rel=1e-5)
    assert theirs["bos"] == ours["bos"] == (which == "with_bos")


def test_the_tokenizer_prepends_bos_as_the_run_did(
    with_bos: tuple[Path, Path], natural: tuple[Path, Path], tmp_path: Path
) -> None:
    for there, starts in ((with_bos[0], True), (natural[0], False)):
        tokenizer: Any = AutoTokenizer.from_pretrained(export_run(there, tmp_path / there.parent.name).directory)
        assert (tokenizer("sheep jumps").input_ids[0] == tokenizer.bos_token_id) == starts
        assert tokenizer.decode(tokenizer("sheep jumps", add_special_tokens=False).input_ids) == "sheep jumps"
        assert tokenizer.eos_token == "<|endoftext|>"


def test_the_model_card_has_the_evaluation_and_the_way_to_load(
    with_bos: tuple[Path, Path], natural: tuple[Path, Path], tmp_path: Path
) -> None:
    card = (export_run(with_bos[0], tmp_path / "llama").directory / "README.md").read_text()
    last = json.loads((with_bos[0] / "metrics.jsonl").read_text().splitlines()[-1])
    assert f"| {last['valid_loss']:.4f} |" in card
    assert r"| Sink\_1, percent of heads (eps 0.3, 4 sequences of 8 tokens) |" in card
    assert "LlamaForCausalLM" in card
    assert "trust_remote_code" not in card
    assert "kind: softmax" in card
    own = (export_run(natural[0], tmp_path / "own").directory / "README.md").read_text()
    assert "sinklab.register()  # or, without sinklab, pass trust_remote_code=True to both calls" in own


def test_a_run_in_progress_is_exported_at_its_newest_checkpoint(with_bos: tuple[Path, Path], tmp_path: Path) -> None:
    shutil.copytree(with_bos[0], tmp_path / "run")
    (tmp_path / "run" / "measurement.json").unlink()
    (tmp_path / "run" / "metrics.jsonl").unlink()
    done = export_run(tmp_path / "run", tmp_path / "hf")
    assert done.step == 1
    assert (
        sum(tensor.numel() for tensor in load_file(tmp_path / "hf" / "model.safetensors").values()) == done.parameters
    )
    assert "At step" not in (tmp_path / "hf" / "README.md").read_text()


def test_every_kept_checkpoint_can_be_exported(with_bos: tuple[Path, Path], run: Run, tmp_path: Path) -> None:
    small = ("model.layers=1", "model.width=16", "model.heads=2", "model.ffn_width=16", "model.context=16")
    data = (f"data.source={with_bos[1]}", "data.tokenizer=train:300", "data.valid_fraction=0.2")
    steps = ("train.steps=4", "train.save_every=2", "train.eval_every=2", "train.keep=5", "train.eval_sequences=4")
    sets = [part for key in (*small, *data, *steps, "metric.sequences=4", "metric.length=8") for part in ("--set", key)]
    assert run("train", "tiny", *sets, "--out", tmp_path / "run")[0] == 0
    weights = {}
    for step in (2, 4):
        status, out, _ = run("export", tmp_path / "run", tmp_path / f"hf/step{step}", "--step", str(step), "--json")
        assert (status, json.loads(out)["step"]) == (0, step)
        weights[step] = (tmp_path / f"hf/step{step}/model.safetensors").read_bytes()
        assert f"## At step {step}" in (tmp_path / f"hf/step{step}/README.md").read_text()
    export_run(tmp_path / "run", tmp_path / "newest")
    assert (tmp_path / "newest/model.safetensors").read_bytes() == weights[4] != weights[2]
    status, _, err = on_one_line(run)("export", tmp_path / "run", tmp_path / "none", "--step", "3")
    assert status == 2
    assert "run has no valid checkpoint of step 3 (saved: 2, 4): choose another step" in err
    assert not (tmp_path / "none").exists()


def test_runs_that_cannot_be_exported_are_refused_in_a_sentence(
    with_bos: tuple[Path, Path], run: Run, tmp_path: Path
) -> None:
    command = on_one_line(run)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "notes.txt").write_text("mine")
    (tmp_path / "file").write_text("mine")
    (tmp_path / "empty").mkdir()
    shutil.copytree(with_bos[0], tmp_path / "begun")
    shutil.rmtree(tmp_path / "begun" / "checkpoints")
    for there, target, said in (
        (with_bos[0], "full", "full is not empty: choose a new directory, or move its files away"),
        (with_bos[0], "file", "cannot write into file: it, or a folder above it, is a file"),
        (with_bos[0], "file/below", "cannot write into file/below: it, or a folder above it, is a file"),
        ("nowhere", "new", "nowhere is not a run directory: it has no recipe.yaml"),
        ("begun", "new", "begun has no checkpoint"),
    ):
        status, out, err = command("export", there, target)
        assert (status, out) == (2, "")
        assert said in err
    assert not (tmp_path / "new").exists()
    assert [path.name for path in (tmp_path / "full").iterdir()] == ["notes.txt"]
    assert command("export", with_bos[0], "empty")[0] == 0


@pytest.fixture
def largest_file() -> Iterator[Callable[[int], None]]:
    """Limits the size of files that this process writes, in bytes, as a full disk does; 0 removes the limit."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    yield lambda size: resource.setrlimit(resource.RLIMIT_FSIZE, (size if size else before[0], before[1]))
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_disk_that_is_full_at_any_file_leaves_nothing_behind(
    natural: tuple[Path, Path], tmp_path: Path, largest_file: Callable[[int], None]
) -> None:
    sizes = {path.stat().st_size for path in export_run(natural[0], tmp_path / "whole").directory.iterdir()}
    for size in sizes:
        largest_file(size - 1)
        with pytest.raises(SinklabError) as error:
            export_run(natural[0], tmp_path / "hf")
        largest_file(0)
        assert f"cannot write {tmp_path / 'hf'}: " in str(error.value)
        assert "File too large" in str(error.value)
        assert str(error.value).endswith("; free some space, or choose another directory")
        assert [path.name for path in tmp_path.iterdir()] == ["whole"]


def test_the_umask_decides_who_may_read_an_exported_model(natural: tuple[Path, Path], tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        directory = export_run(natural[0], tmp_path / "hf").directory
    finally:
        os.umask(before)
    assert stat.S_IMODE(directory.stat().st_mode) == 0o750
    assert {stat.S_IMODE(path.stat().st_mode) for path in directory.iterdir()} == {0o640}


def test_padding_cannot_be_measured_of_an_exported_model(natural: tuple[Path, Path], tmp_path: Path) -> None:
    sinklab.register()
    model = AutoModelForCausalLM.from_pretrained(export_run(natural[0], tmp_path / "hf").directory)
    with pytest.raises(InputError, match="leave out attention_mask"):
        sinklab.measure(model, torch.ones(2, 8, dtype=torch.long), attention_mask=torch.ones(2, 8).long().tril(6))
