"""`--revision` selects the config, tokenizer and weights of a version on the hub, and the result records it."""

import io
import json
import shutil
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from tiny_models import tiny_model

from sinklab.commands import app
from sinklab.errors import InputError
from sinklab.measuring.options import Options, Request
from sinklab.models.huggingface.loading import Loading
from sinklab.survey.measure import measure_model
from sinklab.survey.suites import compare_models

NAME = "nobody/tiny"
COMMITS = {"main": "a" * 40, "step3": "b" * 40, "stage1-step20-tokens1B": "c" * 40}
ASKED = Request(options=Options(inputs="random"), sequences=3, length=12)
OPTIONS = ["--inputs", "random", "--sequences", "3", "--length", "12", "--json"]


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache of the hub that holds two versions of a model, with other weights and another tokenizer."""
    root = tmp_path_factory.mktemp("hub")
    place = root / "models--nobody--tiny"
    for i, (branch, commit) in enumerate(COMMITS.items()):
        tiny_model(place / "snapshots" / commit, "gptneox", seed=i, bos=branch == "step3")
        (place / "refs").mkdir(exist_ok=True)
        (place / "refs" / branch).write_text(commit)
    shutil.copytree(place, root / "models--nobody--other")
    return root


def sinklab(hub: Path, *args: str) -> subprocess.CompletedProcess[str]:
    """`sinklab ARGS` within this process, on a machine without a connection, with this cache of the hub."""
    out, err = io.StringIO(), io.StringIO()
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(out), redirect_stderr(err):
        patch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(hub))
        patch.setattr(sys, "argv", ["sinklab", *args])
        with pytest.raises(SystemExit) as end:
            app.main()
    return subprocess.CompletedProcess(args, int(end.value.code or 0), out.getvalue(), err.getvalue())


def measured(hub: Path, *args: str) -> dict[str, Any]:
    ran = sinklab(hub, "measure", NAME, *args, *OPTIONS)
    assert ran.returncode == 0, ran.stderr
    return json.loads(ran.stdout)


@pytest.mark.parametrize("revision", [None, "step3", COMMITS["step3"]])
def test_the_version_that_is_named_is_measured_and_recorded(hub: Path, revision: str | None) -> None:
    found = measured(hub, *([] if revision is None else ["--revision", revision]))
    commit = COMMITS["main" if revision is None else "step3"]
    here = measure_model(str(hub / "models--nobody--tiny" / "snapshots" / commit), None, ASKED)
    assert (found["revision"], found["commit"]) == (revision, commit)
    assert found["loss"] == pytest.approx(here.loss, rel=1e-6)
    assert (here.revision, here.commit) == (None, None)


def test_the_tokenizer_is_that_of_the_version(hub: Path, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("red cat old dog big hat " * 40)
    ran = sinklab(hub, "measure", NAME, "--text", str(text), "--sequences", "1", "--revision", "step3", "--json")
    assert json.loads(ran.stdout)["bos"] is True


def test_models_are_compared_at_a_version_and_not_mixed_with_another(hub: Path, tmp_path: Path) -> None:
    models = [NAME, "nobody/other"]
    ran = sinklab(hub, "compare", *models, "--revision", "step3", *OPTIONS, "--out", str(tmp_path))
    assert ran.returncode == 0, ran.stderr
    documents = [json.loads((tmp_path / name / "measurement.json").read_text()) for name in models]
    assert [document["commit"] for document in documents] == [COMMITS["step3"]] * 2
    again = sinklab(hub, "compare", *models, *OPTIONS, "--out", str(tmp_path))
    assert again.returncode == 2
    assert "other settings (revision is step3, requested None)" in again.stderr


def test_several_versions_make_the_curve_of_a_training_run(hub: Path, tmp_path: Path) -> None:
    """The step of each is read from its name; a missing version does not stop the others."""
    named = ["--revision", "stage1-step20-tokens1B", "--revision", "step3", "--revision", "step30"]
    ran = sinklab(hub, "measure", NAME, *named, *OPTIONS, "--out", str(tmp_path))
    assert ran.returncode == 1, ran.stderr
    found = json.loads(ran.stdout)
    assert [row["step"] for row in found["checkpoints"].values()] == [3, 20]
    assert "at revision step30 could not be loaded" in found["failed"]["step_30"]
    kept = json.loads((tmp_path / "step_20" / "measurement.json").read_text())
    assert (kept["revision"], kept["commit"]) == ("stage1-step20-tokens1B", "c" * 40)
    assert kept["loss"] == found["checkpoints"]["step_20"]["loss"]


def test_a_version_that_is_not_there_is_an_error_that_names_it(hub: Path) -> None:
    ran = sinklab(hub, "measure", NAME, "--revision", "step4", *OPTIONS)
    assert ran.returncode == 2
    assert "at revision step4 could not be loaded" in ran.stderr
    assert "check the name, the revision and the connection" in ran.stderr


def test_a_local_model_has_no_revision(tmp_path: Path) -> None:
    run, file = tmp_path / "run", tmp_path / "model.gguf"
    run.mkdir()
    (run / "recipe.yaml").touch()
    file.touch()
    for place in (tmp_path, run, file):
        with pytest.raises(InputError, match=r"--revision step3 is a version on the Hugging Face hub, but .* is local"):
            measure_model(str(place), None, ASKED, loading=Loading(revision="step3"))
    with pytest.raises(InputError, match="--revision step3 is a version"):
        compare_models([NAME, str(run)], None, ASKED, loading=Loading(revision="step3"))
