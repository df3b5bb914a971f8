"""A recipe beyond the memory is refused in a sentence, before anything is built."""

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
    """Let the machine have so many bytes."""
    monkeypatch.setattr(planning, "total_bytes", lambda device: size)


@pytest.mark.parametrize(
    ("changes", "largest", "smaller"),
    [
        (["train.batch_size=256"], "activations", "train.micro_batch or model.context"),
        (["model.width=1024", "train.batch_size=1", "model.context=64"], "optimizer", "model.width, model.layers"),
    ],
)
def test_a_recipe_beyond_the_memory_is_refused_and_its_largest_part_named(
    changes: list[str], largest: str, smaller: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = recipe(*changes)
    total = memory_estimate(wanted, torch.device("cpu")).total
    has(monkeypatch, total)
    check_fits(wanted, ALONE)
    has(monkeypatch, total - 1)
    with pytest.raises(InputError, match=rf"for {largest}, but has only .* MB \(cpu\): decrease {smaller}.*--anyway"):
        check_fits(wanted, ALONE)


def test_processes_on_one_machine_share_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    wanted, pair = recipe("train.batch_size=64"), World(size=2)
    has(monkeypatch, 3 * memory_estimate(wanted, torch.device("cpu"), 2).total // 2)
    with pytest.raises(InputError, match="decrease"):
        check_fits(wanted, pair)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")  # the other is on another machine
    check_fits(wanted, pair)


@pytest.mark.parametrize("sizes", [["model.width=10000000"], ["model.width=4096", "model.layers=10000"]])
def test_a_model_beyond_the_memory_is_not_built_to_be_estimated(
    sizes: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    has(monkeypatch, 24 * 2**30)
    with pytest.raises(InputError, match=r"at least .* MB for weights and gradients, but.*decrease model\.width"):
        check_fits(recipe(*sizes), ALONE)


def test_each_kind_of_layer_of_a_hybrid_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = recipe("model.layers=8", "model.mixer={kind: gated_delta, heads: 16, key_width: 64, value_width: 128}")
    estimate = memory_estimate(wanted, torch.device("cpu"))
    has(monkeypatch, estimate.weights + estimate.gradients)
    with pytest.raises(InputError, match="an estimated"):
        check_fits(wanted, ALONE)


def test_prepared_text_is_planned_with_its_vocabulary_and_not_that_of_an_ignored_tokenizer(tmp_path: Path) -> None:
    source = "synthetic:bigram_backcopy:length=65,documents=20"
    prepare(settings_of(source, "words"), tmp_path)
    asked = load_recipe("tiny", [f"data.source={tmp_path}", "data.tokenizer=train:1024"])
    size = sized(asked, torch.device("cpu"), lambda: pytest.fail("prepared again")).model.vocab_size
    assert size == 69


def test_recomputation_is_advised_only_if_it_is_not_set(monkeypatch: pytest.MonkeyPatch) -> None:
    for kind, advised in (("none", True), ("blocks", False)):
        wanted = recipe("model.layers=64", "train.batch_size=512", f"train.recompute={kind}")
        has(monkeypatch, memory_estimate(wanted, torch.device("cpu")).total - 1)
        with pytest.raises(InputError, match="for activations") as refused:
            check_fits(wanted, ALONE)
        assert ("train.recompute" in str(refused.value)) == advised


def test_the_default_recipe_is_refused_before_its_text_is_prepared(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    has(monkeypatch, 24 * 2**30)
    Path("defaults.yaml").write_text("train: {device: cpu}")
    status, _, err = run("train", "defaults.yaml", "--out", "run")
    assert status == 2
    assert "an estimated 727,526 MB" in err
    assert [path.name for path in Path().iterdir()] == ["defaults.yaml"]


def test_with_anyway_a_failed_allocation_is_reported_in_a_sentence(run: Run) -> None:
    sets = ["model.width=10000000", "data.source=synthetic:bigram_backcopy:length=65,documents=20000"]
    sets += ["data.tokenizer=words", "data.bos=false", "train.device=cpu"]
    settings = [arg for value in sets for arg in ("--set", value)]
    status, _, err = on_one_line(run)("train", "tiny", "--anyway", *settings, "--out", "run")
    assert status == 1
    assert "out of memory: use a smaller model" in err
    assert "Traceback" not in err
    assert not Path("run").exists()
