"""A recipe that needs more memory than the machine has is refused before anything is built."""

from pathlib import Path

import pytest
import torch
from conftest import Run, on_one_line

from sinklab.data.prepare import prepare, settings_of
from sinklab.errors import InputError
from sinklab.train import planning
from sinklab.train.planning import check_fits, memory_estimate, sized
from sinklab.train.recipe import Recipe, load_recipe
from sinklab.train.world import ALONE, World

CPU = ["train.device=cpu", "train.precision=fp32", "model.vocab_size=1024"]


def recipe(*changes: str) -> Recipe:
    return load_recipe("tiny", [*CPU, *changes])


def has(monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    """Make the machine report `size` bytes of memory."""
    monkeypatch.setattr(planning, "total_bytes", lambda device: size)


def total(wanted: Recipe, processes: int = 1) -> int:
    return sum(memory_estimate(wanted, processes).values())


@pytest.mark.parametrize(
    ("changes", "smaller"),
    [
        (["train.batch_size=256"], "train.micro_batch or model.context"),
        (["model.width=1024", "train.batch_size=1", "model.context=64"], "model.width, model.layers"),
    ],
)
def test_a_recipe_beyond_the_memory_is_refused_with_the_settings_to_decrease(
    changes: list[str], smaller: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = recipe(*changes)
    has(monkeypatch, total(wanted))
    check_fits(wanted, ALONE)
    has(monkeypatch, total(wanted) - 1)
    with pytest.raises(InputError, match=rf"but has only .* MB \(cpu\): decrease {smaller}.*--anyway"):
        check_fits(wanted, ALONE)


def test_processes_on_one_machine_share_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    wanted, pair = recipe("train.batch_size=64"), World(size=2)
    has(monkeypatch, 3 * total(wanted, 2) // 2)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    with pytest.raises(InputError, match="decrease"):
        check_fits(wanted, pair)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")  # the other process is on another machine
    check_fits(wanted, pair)


def test_prepared_text_is_planned_with_its_vocabulary_and_not_that_of_an_ignored_tokenizer(tmp_path: Path) -> None:
    source = "synthetic:bigram_backcopy:length=65,documents=20"
    prepare(settings_of(source, "words"), tmp_path)
    asked = load_recipe("tiny", [f"data.source={tmp_path}", "data.tokenizer=train:1024"])
    size = sized(asked, torch.device("cpu"), lambda: pytest.fail("prepared again")).model.vocab_size
    assert size == 69


def test_the_default_recipe_is_refused_before_its_text_is_prepared(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    has(monkeypatch, 24 * 2**30)
    Path("defaults.yaml").write_text("train: {device: cpu}")
    status, _, err = run("train", "defaults.yaml", "--out", "run")
    assert status == 2
    assert "a process needs roughly" in err
    assert [path.name for path in Path().iterdir()] == ["defaults.yaml"]


def test_a_failed_allocation_with_the_option_anyway_is_reported_as_out_of_memory(run: Run) -> None:
    sets = ["model.width=10000000", "data.source=synthetic:bigram_backcopy:length=65,documents=20000"]
    sets += ["data.tokenizer=words", "data.bos=false", "train.device=cpu"]
    settings = [arg for value in sets for arg in ("--set", value)]
    status, _, err = on_one_line(run)("train", "tiny", "--anyway", *settings, "--out", "run")
    assert status == 1
    assert "out of memory: use a smaller model" in err
    assert "Traceback" not in err
    assert not Path("run").exists()


def test_a_sweep_trains_as_many_runs_at_once_as_fit_and_refuses_more(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    largest = ("train.batch_size=64", "train.batch_size=256")
    needed = max(total(recipe(one)) for one in largest)
    has(monkeypatch, 3 * needed - 1)
    assert planning.most_at_once([recipe(one) for one in largest]) == 2
    assert planning.most_at_once([recipe(one) for one in largest], devices=4) == 8
    has(monkeypatch, needed // 2)
    assert planning.most_at_once([recipe(one) for one in largest]) == 1
    has(monkeypatch, 2**20)
    asked = ("reproduce", "table_6", "--scale", "tiny", "--jobs", "2", "--steps", "2", "--out", "new")
    for more in ((), ("--dry-run",)):
        status, _, err = on_one_line(run)(*asked, *more)
        assert status == 2
        assert "--jobs 2: only one run of this size fit" in err
    assert not Path("new").exists()
