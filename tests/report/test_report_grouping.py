"""Runs that differ in their seed alone are one cell, which is named by what was changed."""

from pathlib import Path

import pytest
from report_fixtures import make_measurement, make_run
from table_texts import table_texts

from sinklab.report.cells import cells_table, headline, spread_over_seeds
from sinklab.report.collect import collect
from sinklab.report.data import recipe_changes
from sinklab.train.recipe import Recipe, load_recipe

RESOLVED = ["model.vocab_size=1024"]
"""Keys that a run sets."""

CHANGED = ["model.layers=2", "model.width=32", "model.heads=2", "model.ffn_width=32"]
"""The maximum number of changes in the name of a cell."""


def changes(recipe: Recipe, base: str) -> list[str] | None:
    return recipe_changes(recipe.model_dump(mode="json") | {"name": base})


def trained(path: Path, seed: int = 0, *overrides: str, base: str = "tiny") -> Path:
    """A run of a shipped recipe, resolved, with the numbers of the fixtures."""
    make_run(path, seed=seed)
    recipe = load_recipe(base, [*overrides, f"seed={seed}", *(RESOLVED if base == "tiny" else [])])
    (path / "recipe.yaml").write_text(recipe.to_yaml(), encoding="utf-8")
    return path


@pytest.mark.parametrize("given", ["each run", "their folder"])
def test_three_runs_that_differ_in_their_seed_are_one_cell_with_its_spread(given: str, tmp_path: Path) -> None:
    runs = [trained(tmp_path / f"tiny-{seed:016x}", seed, "model.attention.bias=k") for seed in range(3)]
    runs.append(trained(tmp_path / "plain", 7, "train.device=cpu", "train.save_every=9"))
    data = collect(runs if given == "each run" else [tmp_path])
    assert sorted(data.cells) == ["model.attention.bias=k", "tiny"]
    biased = spread_over_seeds(data, "sink_1")["model.attention.bias=k"]
    assert biased["runs"] == 3
    shown = f"{biased['value']:.1f} ± {biased['deviation']:.1f}"
    assert any(shown in row for row in table_texts(cells_table(data))[1])
    assert "Two models were trained" in headline(data)[0]


def test_a_cell_says_which_recipe_it_changes_where_there_are_several(tmp_path: Path) -> None:
    data = collect([trained(tmp_path / "a", 0, "optim.lr=0.001"), trained(tmp_path / "b", base="60m")])
    assert data.cells == ["tiny, optim.lr=0.001", "60m"]


def test_two_runs_with_the_same_seed_are_two_cells(tmp_path: Path) -> None:
    assert len(collect([trained(tmp_path / "a"), trained(tmp_path / "b")]).cells) == 2


def test_a_cell_that_gets_a_name_does_not_get_that_of_another(tmp_path: Path) -> None:
    runs = [trained(tmp_path / "first"), trained(tmp_path / "tiny", 1, "name=mine", "optim.lr=0.5")]
    data = collect([tmp_path])
    assert len(data.cells) == len(runs)
    assert {run.path.name: run.cell for run in data.runs}["tiny"] == "tiny"
    assert all(len(data.runs_of(cell)) == 1 for cell in data.cells)


def test_a_name_without_room_for_all_changes_begins_with_those_that_differ(tmp_path: Path) -> None:
    for rate in ("0.001", "0.002"):
        trained(tmp_path / rate, 0, *CHANGED, f"optim.lr={rate}")
    assert [cell.split(", ")[0] for cell in collect([tmp_path]).cells] == ["optim.lr=0.001", "optim.lr=0.002"]


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        ([], []),
        (["model.attention.bias=k"], ["model.attention.bias=k"]),
        (
            ["model.attention.bias={kind: k, shared: true}"],
            ["model.attention.bias=k", "model.attention.bias.shared=true"],
        ),
        (["optim.name=sgd", "optim.lr=0.5"], ["optim=sgd", "optim.lr=0.5"]),
        (["model.attention.mask=document"], ["model.attention.mask=document"]),
        (["data.random_tokens={start: 1, end: 3}"], ["data.random_tokens.start=1", "data.random_tokens.end=3"]),
        (["seed=4", "name=other", "train.keep=9"], []),
        (["train.steps=12", "data.bos=false"], ["data.bos=false", "train.steps=12"]),
    ],
)
def test_changes_are_written_as_the_option_set_accepts_them(overrides: list[str], said: list[str]) -> None:
    recipe = load_recipe("tiny", [*overrides, *RESOLVED])
    assert changes(recipe, "tiny") == said
    repeated = load_recipe("tiny", [*said, *RESOLVED, f"seed={recipe.seed}"])
    assert repeated.content_hash("") == recipe.content_hash("")


def test_a_setting_resolved_from_auto_is_not_listed_as_a_change() -> None:
    recipe = load_recipe("tiny-128", ["train.precision=bf16", *RESOLVED])
    assert changes(recipe, "tiny-128") == []


def test_a_recipe_of_another_name_has_no_base() -> None:
    assert changes(load_recipe("tiny"), "mine") is None


def test_runs_in_folders_named_by_their_hash_are_called_by_their_name(tmp_path: Path) -> None:
    for seed in range(2):
        make_run(tmp_path / f"k_biases-{seed:016x}", name="k_biases", seed=seed)
    make_run(tmp_path / f"k_biases-{2:016x}", name="k_biases", seed=2, steps=500)
    data = collect([tmp_path])
    assert data.cells == ["k_biases", f"k_biases-{2:016x}"]
    assert len(data.runs_of("k_biases")) == 2


def test_one_model_measured_twice_is_one_model(tmp_path: Path) -> None:
    measured = [make_measurement(tmp_path / name, model="tiny") for name in ("natural", "random")]
    assert "Two measurements of one model" in headline(collect(measured))[0]


def test_a_file_in_the_working_directory_does_not_replace_a_shipped_recipe(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for text in ("optim: {lr: 0.5}", "notes on the tiny models"):
        Path("tiny").write_text(text, encoding="utf-8")
        assert changes(load_recipe("tiny.yaml", ["model.attention.bias=k", *RESOLVED]), "tiny") == [
            "model.attention.bias=k"
        ]
