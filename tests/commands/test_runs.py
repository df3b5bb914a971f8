"""`sinklab runs`: every run below a directory with its state, its results and the settings that differ."""

import json
import os
from collections.abc import Callable
from io import StringIO
from pathlib import Path

import pytest
from conftest import Run
from rich.console import Console

from sinklab.commands.results import print_runs
from sinklab.data.loader import TokenDataset
from sinklab.data.prepare import prepare, settings_of
from sinklab.errors import InputError, SinklabError
from sinklab.report.collect import collect, list_runs
from sinklab.train.loop import Trainer
from sinklab.train.recipe import Recipe, load_recipe
from sinklab.train.run import establish, open_run

SMALL = ["model.layers=1", "model.width=16", "model.heads=2", "model.ffn_width=16", "model.context=16"]
SMALL += ["metric.length=16", "metric.sequences=4", "train.batch_size=2", "train.eval_sequences=4"]
SMALL += ["train.steps=6", "train.eval_every=3", "train.save_every=3", "data.bos=false", "train.device=cpu"]


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> TokenDataset:
    """A small synthetic corpus, prepared."""
    folder = tmp_path_factory.mktemp("tokens")
    return prepare(
        settings_of("synthetic:bigram_backcopy:length=17,documents=200", "words", valid_fraction=0.1), folder
    )


def recipe(*changes: str) -> Recipe:
    return load_recipe("tiny", [*SMALL, *changes])


@pytest.fixture(scope="module")
def runs(dataset: TokenDataset, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run in every state but running and damaged."""
    top = tmp_path_factory.mktemp("runs")
    Trainer(open_run(recipe(), dataset, top / "done")).train()
    reached = [0]
    stopped = open_run(recipe("model.attention.bias=k", "seed=3"), dataset, top / "below" / "stopped")
    Trainer(stopped, lambda step, row: reached.append(step), lambda: reached[-1] >= 4).train()
    diverging = recipe("optim.name=sgd", "optim.lr=1e12", "optim.clip=null", "schedule.warmup_steps=0")
    with pytest.raises(SinklabError, match="diverged"):
        Trainer(open_run(diverging, dataset, top / "failed")).train()
    establish(open_run(recipe(), dataset, top / "new"))
    return top


def test_each_run_is_listed_with_its_state_step_and_results(runs: Path) -> None:
    found = {Path(run.directory).name: run for run in list_runs([runs])}
    assert {name: run.state for name, run in found.items()} == {
        "stopped": "stopped",
        "done": "done",
        "failed": "failed",
        "new": "not begun",
    }
    assert [(run.step, run.steps) for name, run in sorted(found.items()) if name != "failed"] == [
        (6, 6),
        (0, 6),
        (4, 6),
    ]
    assert (found["stopped"].seed, found["stopped"].sink_rate_bias) != (None, None)
    assert found["done"].valid_loss is not None
    assert "model.attention.bias=k" in found["stopped"].differs
    assert "model.attention.bias=k" not in found["done"].differs
    assert "diverged" in found["failed"].why


def test_a_run_of_an_own_recipe_is_compared_with_the_listed_runs_of_that_name(
    dataset: TokenDataset, tmp_path: Path
) -> None:
    for folder, name, changes in (("a", "mine", {}), ("b", "mine", {"lr": 5e-4}), ("c", "other", {"lr": 1e-4})):
        own = recipe().model_copy(update={"name": name})
        own = own.model_copy(update={"optim": own.optim.model_copy(update=changes)})
        own = own.model_copy(update={"train": own.train.model_copy(update={"save_every": 3 if folder == "b" else 2})})
        establish(open_run(own, dataset, tmp_path / folder))
    found = {Path(run.directory).name: run.differs for run in list_runs([tmp_path])}
    assert (found["b"], found["c"]) == (("optim.lr=0.0005",), ())
    assert [change.partition("=")[0] for change in found["a"]] == ["optim.lr"]


def test_a_run_is_listed_as_running_during_training_and_as_done_after_it(dataset: TokenDataset, tmp_path: Path) -> None:
    states = []
    run = open_run(recipe(), dataset, tmp_path / "run")
    Trainer(run, lambda step, row: states.append(list_runs([tmp_path])[0].state)).train()
    assert set(states) == {"running"}
    assert list_runs([tmp_path])[0].state == "done"


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read anything")
@pytest.mark.parametrize("read", [list_runs, collect])
def test_a_folder_that_cannot_be_read_is_named(read: Callable[[list[Path]], object], tmp_path: Path) -> None:
    (tmp_path / "theirs").mkdir(mode=0o000)
    with pytest.raises(InputError, match=r"cannot read .*theirs: Permission denied"):
        read([tmp_path])


def test_run_names_with_markup_are_printed_literally(dataset: TokenDataset, tmp_path: Path) -> None:
    establish(open_run(recipe(), dataset, tmp_path / "[red]run"))
    printed = StringIO()
    print_runs(list_runs([tmp_path]), Console(width=400, file=printed))
    assert "[red]run" in printed.getvalue()


def test_a_failed_run_is_listed_as_done_after_it_has_been_continued(dataset: TokenDataset, tmp_path: Path) -> None:
    run = open_run(recipe(), dataset, tmp_path)
    establish(run)
    run.failure.write_text('{"step": 0, "message": "a full disk"}')
    assert list_runs([tmp_path])[0].state == "failed"
    Trainer(run).train()
    assert list_runs([tmp_path])[0].state == "done"


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("recipe.yaml", b"\xff\x00\xfe"),
        ("metrics.jsonl", b"\xff\x00\xfe"),
        ("metrics.jsonl", b'{"step": 3, "sink_rate": 5, "valid_loss": "low"}\n'),
    ],
)
def test_a_damaged_run_does_not_hide_the_others(name: str, text: bytes, dataset: TokenDataset, tmp_path: Path) -> None:
    for folder in ("a", "b"):
        establish(open_run(recipe(), dataset, tmp_path / folder))
    (tmp_path / "a" / name).write_bytes(text)
    first, second = list_runs([tmp_path])
    assert (first.state, second.state) == ("damaged", "not begun")
    assert name in first.why


def test_runs_of_an_own_recipe_are_listed_with_the_settings_that_differ(dataset: TokenDataset, tmp_path: Path) -> None:
    for folder, width in (("a", 16), ("b", 32)):
        establish(open_run(recipe("name=mine", f"model.ffn_width={width}"), dataset, tmp_path / folder))
    assert [run.differs for run in list_runs([tmp_path])] == [("model.ffn_width=16",), ("model.ffn_width=32",)]


def test_settings_that_differ_are_listed_in_the_form_that_set_accepts(dataset: TokenDataset, tmp_path: Path) -> None:
    for folder, change in (("a", "optim.clip=null"), ("b", "optim.clip=0.5")):
        establish(open_run(recipe("name=mine", change), dataset, tmp_path / folder))
    assert [run.differs for run in list_runs([tmp_path])] == [("optim.clip=null",), ("optim.clip=0.5",)]


def test_a_run_in_two_of_the_folders_is_listed_once(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(runs)
    assert len(list_runs([runs, Path(), Path("below")])) == 4


def test_the_command_prints_a_table_or_json(run: Run, runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "400")
    status, out, _ = run("runs", runs, "--json")
    assert status == 0
    assert [found["state"] for found in json.loads(out)] == ["stopped", "done", "failed", "not begun"]
    status, out, _ = run("runs", runs)
    assert status == 0
    assert "6/6" in out
    assert "model.attention.bias=k" in out


def test_a_folder_without_runs_is_refused_with_the_file_that_makes_a_run(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"no run in or below .*recipe\.yaml"):
        list_runs([tmp_path])
    with pytest.raises(InputError, match="is not a directory"):
        list_runs([tmp_path / "nowhere"])
