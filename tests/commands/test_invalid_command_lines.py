"""Mistakes in command lines are refused with the reason and before any work."""

import json
import shutil
from pathlib import Path

import pytest
from conftest import Run, on_one_line
from tiny_models import tiny_model
from trained_run import trained_run

FEW = ("--sequences", 2, "--length", 8)
LONG = "x" * 5000


@pytest.mark.parametrize("command", [[], ["data"]])
def test_a_command_without_arguments_shows_its_help_without_an_error_message(run: Run, command: list[str]) -> None:
    status, out, err = run(*command)
    assert "Usage" in out
    assert (status, err) == (2, "")


@pytest.mark.parametrize(
    "command",
    [
        ["measure", LONG, "--inputs", "random"],
        ["measure", "model", "--text", LONG],
        ["compare", LONG, "model", "--inputs", "random"],
        ["train", LONG],
        ["runs", LONG],
        ["report", LONG],
        ["export", LONG, "out"],
        ["assess", LONG],
        ["reproduce", f"{LONG}.yaml"],
    ],
)
def test_a_name_that_is_too_long_is_refused(run: Run, tmp_path: Path, command: list[str]) -> None:
    tiny_model(tmp_path / "model")
    status, out, err = run(*command)
    assert (status, out) == (2, "")
    assert "error: " in err
    assert len(err) < 1000


def test_a_recipe_file_without_keys_is_refused(run: Run, tmp_path: Path) -> None:
    (tmp_path / "empty.yaml").write_text("\n# nothing\n")
    status, _, err = on_one_line(run)("train", "empty.yaml", "--dry-run")
    assert status == 2
    assert "empty.yaml must contain a mapping of recipe keys, not nothing" in err


@pytest.mark.parametrize(
    ("command", "says"),
    [
        (("assess", "model", "--text", "blank.txt"), "blank.txt contains no text"),
        *(
            ((*command, "--length", 65), "use --length 64 or less")
            for command in (("measure", "model"), ("assess", "model"), ("advise", "model"), ("compare", "model", "b"))
        ),
    ],
)
def test_an_empty_text_or_a_length_above_the_context_is_refused_before_the_model_is_loaded(
    run: Run, tmp_path: Path, command: tuple[object, ...], says: str
) -> None:
    for name in ("model", "b"):
        (tiny_model(tmp_path / name) / "model.safetensors").write_bytes(b"no weights")
    (tmp_path / "blank.txt").write_text("\n\n")
    status, out, err = on_one_line(run)(*command)
    assert (status, out) == (2, "")
    assert says in err
    assert "weights" not in err


def test_a_dry_run_refuses_a_missing_text(run: Run, tmp_path: Path) -> None:
    status, out, err = run("reproduce", "table_1", "--model", tmp_path, "--text", "nowhere.txt", "--dry-run")
    assert (status, out) == (2, "")
    assert "no text at nowhere.txt" in err


def test_an_unknown_model_type_is_not_reported_as_a_missing_package(run: Run, tmp_path: Path) -> None:
    model = tiny_model(tmp_path / "model")
    (model / "config.json").write_text('{"model_type": "martian"}')
    status, _, err = on_one_line(run)("measure", model, "--inputs", "random")
    assert status == 2
    assert "does not support this model type; try a newer version" in err
    assert "install" not in err


def test_weights_whose_shapes_do_not_match_the_config_are_refused_with_that_reason(run: Run, tmp_path: Path) -> None:
    model = tiny_model(tmp_path / "model")
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "n_embd": 32}))
    status, _, err = on_one_line(run)("measure", model, "--inputs", "random", *FEW)
    assert status == 2
    assert "their shapes do not match config.json" in err
    assert "report above" not in err


def test_a_folder_with_a_recipe_is_not_taken_for_a_run(run: Run, tmp_path: Path) -> None:
    shutil.copy(Path(__file__).parents[2] / "recipes" / "tiny.yaml", tmp_path / "recipe.yaml")
    for command in (("measure", tmp_path, "--inputs", "random"), ("export", tmp_path, tmp_path / "out")):
        status, out, err = on_one_line(run)(*command)
        assert (status, out) == (2, "")
        assert "is not a run directory: its recipe.yaml has no model.vocab_size" in err


def test_a_malformed_env_json_is_named_in_the_error(run: Run, tmp_path: Path) -> None:
    trained, text = trained_run(tmp_path, {})
    for content in ("[1]", '{"hash": 1}', '{"hash": "0", "continues": [1]}'):
        (trained / "env.json").write_text(content)
        _, _, err = on_one_line(run)("measure", trained, "--text", text, *FEW)
        assert "env.json cannot be read (it does not contain a run hash)" in err
