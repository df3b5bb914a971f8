"""`--subfolder`: a model in a folder of a directory or of a repository, its tokenizer there or above."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from conftest import Run, on_one_line
from test_measure_revision import NAME, OPTIONS, sinklab
from tiny_models import text_file, tiny_model

import sinklab as lab
from sinklab.errors import InputError
from sinklab.models.huggingface.loading import Loading, load_pretrained

INNER = "inner/deep"
COMMIT = "a" * 40
FEW = ("--sequences", 2, "--length", 8, "--json")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`beside/` has a model with its tokenizer in a folder below, `above/` the same with the tokenizer above it."""
    folder = tmp_path_factory.mktemp("models")
    tiny_model(folder / "beside" / INNER, "gptneox", bos=True)
    shutil.copytree(folder / "beside", folder / "above")
    for file in (folder / "above" / INNER).glob("tokenizer*"):
        shutil.move(file, folder / "above")
    return folder


@pytest.fixture(scope="module")
def hub(models: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache of the hub with both as repositories."""
    root = tmp_path_factory.mktemp("hub")
    for name, place in (("tiny", "beside"), ("other", "above")):
        shutil.copytree(models / place, root / f"models--nobody--{name}" / "snapshots" / COMMIT)
        (root / f"models--nobody--{name}" / "refs").mkdir()
        (root / f"models--nobody--{name}" / "refs" / "main").write_text(COMMIT)
    return root


@pytest.mark.parametrize("name", ["beside", "above"])
def test_a_model_in_a_folder_of_a_directory_is_the_model_of_that_folder(
    run: Run, models: Path, tmp_path: Path, name: str
) -> None:
    text = text_file(tmp_path / "text.jsonl")
    status, out, err = run("measure", models / name, "--subfolder", INNER, "--text", text, *FEW)
    assert status == 0, err
    found = json.loads(out)
    assert found["model"] == str(models / name / INNER)
    assert found["bos"] is True
    status, out, _ = run("measure", models / "beside" / INNER, "--text", text, *FEW)
    assert found["loss"] == json.loads(out)["loss"]


def test_the_tokenizer_above_a_folder_is_found(models: Path) -> None:
    found = load_pretrained(str(models / "above" / INNER), Loading(subfolder=INNER)).tokenizer
    assert found.get_vocab() == load_pretrained(str(models / "beside" / INNER)).tokenizer.get_vocab()
    assert len(found) > 2
    with pytest.raises(InputError, match="has no tokenizer: put the tokenizer files"):
        load_pretrained(str(models / "above" / INNER))


def test_models_in_folders_of_the_same_name_are_compared(run: Run, models: Path, tmp_path: Path) -> None:
    text, out = text_file(tmp_path / "text.jsonl"), tmp_path / "out"
    both = (models / "beside", models / "above")
    status, printed, err = run("compare", *both, "--subfolder", INNER, "--text", text, "--out", out, *FEW)
    assert status == 0, err
    assert set(json.loads(printed)["models"]) == {f"beside/{INNER}", f"above/{INNER}"}
    assert (out / "above" / INNER / "measurement.json").is_file()


def test_a_model_in_a_folder_of_a_repository_is_named_with_it(hub: Path, models: Path, tmp_path: Path) -> None:
    ran = sinklab(hub, "measure", NAME, "--subfolder", INNER, *OPTIONS)
    assert ran.returncode == 0, ran.stderr
    found = json.loads(ran.stdout)
    here = json.loads(sinklab(hub, "measure", str(models / "beside" / INNER), *OPTIONS).stdout)
    assert (found["model"], found["commit"]) == (f"{NAME}/{INNER}", COMMIT)
    assert found["loss"] == here["loss"]

    text = str(text_file(tmp_path / "text.jsonl"))
    ran = sinklab(hub, "compare", NAME, "nobody/other", "--subfolder", INNER, "--text", text, *map(str, FEW))
    assert ran.returncode == 0, ran.stderr
    compared = json.loads(ran.stdout)["models"]
    assert list(compared) == [f"{NAME}/{INNER}", f"nobody/other/{INNER}"]
    assert [one["bos"] for one in compared.values()] == [True, True]


@pytest.mark.parametrize(
    ("model", "subfolder", "said"),
    [
        ("beside", "outer", "beside/outer is neither a directory nor"),
        ("beside", "../above", "use a relative path inside"),
        ("beside", "/inner", "use a relative path inside"),
        ("beside", "", "an argument is empty"),
        (f"beside/{INNER}/config.json", "inner", "config.json is a file"),
    ],
)
def test_an_invalid_subfolder_is_refused(run: Run, models: Path, model: str, subfolder: str, said: str) -> None:
    status, out, err = on_one_line(run)("measure", models / model, "--subfolder", subfolder, "--inputs", "random")
    assert (status, out) == (2, "")
    assert said in err


def test_a_model_without_a_tokenizer_is_measured_on_ids_and_refused_for_a_text(run: Run, models: Path) -> None:
    """transformers makes up a tokenizer of two tokens, which must not be used silently."""
    folder = models / "above" / INNER
    status, out, err = on_one_line(run)("measure", folder, *FEW)
    assert (status, out) == (2, "")
    assert "has no tokenizer: put the tokenizer files" in err
    assert "or pass --tokenizer PATH" in err
    status, out, err = run("measure", folder, "--inputs", "random", *FEW)
    assert status == 0, err
    found = json.loads(out)
    assert any("without a tokenizer, tokens are any rows of the embedding" in note for note in found["notes"])
    status, out, _ = run("measure", models / "beside" / INNER, "--inputs", "random", *FEW)
    assert found["loss"] == json.loads(out)["loss"]  # as many rows as tokens
    assert lab.measure(str(folder), [[1, 2, 3], [4, 5, 6]]).sequences == 2
    assert lab.measure(str(folder), inputs="repeat", sequences=2, length=8, explore=True).sequences == 2


def test_the_tokenizer_option_gives_a_tokenizer_to_a_model_without_one(run: Run, models: Path, tmp_path: Path) -> None:
    folder, text = models / "above" / INNER, text_file(tmp_path / "text.jsonl")
    expected = json.loads(run("measure", models / "beside" / INNER, "--text", text, *FEW)[1])["loss"]
    for place in (models / "above", models / "above" / "tokenizer.json"):
        status, out, err = run("measure", folder, "--text", text, "--tokenizer", place, *FEW)
        assert status == 0, err
        assert json.loads(out)["loss"] == expected
    how: dict[str, Any] = {"text": text, "sequences": 2, "length": 8}
    loaded = load_pretrained(str(models / "beside" / INNER))
    for tokenizer in (str(models / "above"), models / "above", loaded.tokenizer):
        assert lab.measure(str(folder), tokenizer=tokenizer, **how).loss == expected
        assert lab.measure(loaded.model, tokenizer=tokenizer, **how).loss == expected
    status, _, err = on_one_line(run)("measure", folder, "--text", text, "--tokenizer", tmp_path / "none", *FEW)
    assert status == 2
    assert "no tokenizer at" in err


def test_the_tokenizer_of_the_folder_above_a_checkpoint_is_used_with_a_note(models: Path, tmp_path: Path) -> None:
    folder, text = tmp_path / "trained" / "checkpoint-500", text_file(tmp_path / "text.jsonl")
    shutil.copytree(models / "above" / INNER, folder)
    for file in (models / "above").glob("tokenizer*"):
        shutil.copy(file, folder.parent)
    found = lab.measure(str(folder), text=text, sequences=2, length=8)
    assert found.loss == lab.measure(str(models / "beside" / INNER), text=text, sequences=2, length=8).loss
    assert f"the tokenizer is that of the folder above, {folder.parent}" in found.notes
