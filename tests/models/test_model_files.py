"""The hash of a model's files: the same for a copy, another for changed weights, tokenizers and configs."""

import os
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from stops import Stops
from tiny_models import text_file, tiny_model

from sinklab import opening
from sinklab.assessing.assess_model import assess
from sinklab.assessing.settings import AssessOptions
from sinklab.errors import InputError
from sinklab.measuring.options import Request
from sinklab.opening import model_files
from sinklab.survey.suites import measure_domains

HEADS = AssessOptions(parts=("heads",), sequences=2, length=16)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("files") / "gpt2")


def with_times(folder: Path, seconds: int) -> Path:
    for path in folder.iterdir():
        os.utime(path, (seconds, seconds))
    return folder


def change(path: Path, start: int, length: int) -> None:
    """Invert bytes from `start` on; the size stays the same."""
    data = bytearray(path.read_bytes())
    end = start % len(data) + length
    data[end - length : end] = bytes(255 - byte for byte in data[end - length : end])
    path.write_bytes(data)


def test_a_copy_with_other_timestamps_has_the_same_hash(model: Path, tmp_path: Path) -> None:
    copy = with_times(Path(shutil.copytree(model, tmp_path / "copy")), 1)
    assert model_files(copy) == model_files(model)
    file = Path(shutil.copyfile(model / "model.safetensors", tmp_path / "other.safetensors"))
    assert model_files(file) == model_files(model / "model.safetensors")


def test_a_changed_byte_in_any_file_changes_the_hash(model: Path, tmp_path: Path) -> None:
    place = Path(shutil.copytree(model, tmp_path / "copy"))
    save_file({"weight": torch.zeros(2**21)}, place / "large.safetensors")
    for name in ("tokenizer.json", "config.json", "model.safetensors", "large.safetensors"):
        before = model_files(place)
        change(place / name, (place / name).stat().st_size // 2, 1)
        assert model_files(place) != before


def test_a_broken_link_does_not_change_the_hash(model: Path, tmp_path: Path) -> None:
    place = Path(shutil.copytree(model, tmp_path / "copy"))
    (place / "old.safetensors").symlink_to("gone")
    assert model_files(place) == model_files(model)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read every file")
def test_a_file_that_cannot_be_read_is_named(model: Path, tmp_path: Path) -> None:
    place = Path(shutil.copytree(model, tmp_path / "copy"))
    (place / "config.json").chmod(0)
    with pytest.raises(InputError, match=r"cannot read .*config.json: Permission denied"):
        model_files(place)


def test_opening_a_model_does_not_hash_its_files(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hashed: list[Path] = []
    monkeypatch.setattr(opening, "sha256_of", lambda path: hashed.append(path) or "")
    opened = opening.open_model(str(model))
    assert not hashed
    assert opened.files
    assert hashed


def test_an_assessment_is_continued_with_a_copy_and_refused_after_a_change(model: Path, tmp_path: Path) -> None:
    text, place = text_file(tmp_path / "text.jsonl", 40), Path(shutil.copytree(model, tmp_path / "copy"))
    assess(str(model), text, HEADS, out=tmp_path / "out")
    again = Stops()
    assess(str(with_times(place, 1)), text, HEADS, out=tmp_path / "out", observe=again)
    assert again.started == []
    change(place / "model.safetensors", -3, 1)  # of the mantissa
    with pytest.raises(InputError, match=r"out.*contains an assessment with other settings \(files is \w+, requested"):
        assess(str(place), text, HEADS, out=tmp_path / "out")


def test_a_survey_is_continued_after_the_model_was_downloaded_again(model: Path, tmp_path: Path) -> None:
    text_file(tmp_path / "texts" / "a.jsonl")
    place = Path(shutil.copytree(model, tmp_path / "copy"))
    small, again = Request(sequences=4, length=16), Stops()
    measure_domains(str(place), tmp_path / "texts", small, out=tmp_path / "out")
    measure_domains(str(with_times(place, 1)), tmp_path / "texts", small, out=tmp_path / "out", observe=again)
    assert again.started == []
    change(place / "model.safetensors", -3, 1)
    with pytest.raises(InputError, match=r"contains a measurement with other settings \(files is \w+, requested"):
        measure_domains(str(place), tmp_path / "texts", small, out=tmp_path / "out")
