"""The paper as data: every published number has its row, every row a cell or a reason, and every cell is a recipe."""

from collections.abc import Mapping
from functools import cache
from importlib import resources
from typing import Any

import pytest
import yaml
from conftest import DATA

from sinklab.experiments.definition import SCALES, Experiment, Scale
from sinklab.experiments.shipped import experiment_ids, load_experiment
from sinklab.train.recipe import Recipe, build_recipe, recipe_values

RESULTS = DATA.parent / "paper" / "results.yaml"
needs_the_paper = pytest.mark.skipif(not RESULTS.is_file(), reason=f"the paper's numbers are not at {RESULTS}")

PAPER = [
    *(f"table_{number}" for number in (1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15)),
    *(f"figure_{number}" for number in (2, 3, 4, 5, 6, 7, 8, 9, 10, 28, 29)),
    "table_10_left",
    "table_14_right",
    "section_5_random_tokens",
    "section_5_data_amount",
    "section_7_2_post_norm",
    "scale_1b",
]

# Names of results.yaml that differ from those of published.yaml: columns, tables, and the rows of a table.
COLUMNS = {"sink1": "sink_1", "sink2": "sink_2", "star": "sink_bias"}
LISTS = {
    "table_2_weight_decay": ("table_2", None),
    "table_5_fixed_value_bias": ("table_5", None),
    "table_9_learning_rate": ("table_9", None),
    "table_13_learnable_dims_of_k_bias": ("table_13", None),
    "table_14_left_normalisation_scale": ("table_14", None),
    "table_14_right_sigmoid_optimisation": ("table_14_right", None),
}
MAPPINGS = {
    "table_3_positional_embedding": ("table_3", {}),
    "table_4_attention_biases": ("table_4", {"none": "softmax"}),
    "table_6_15_attention_operation": (
        "table_6",
        {
            "sigmoid_unnormalised": "sigmoid",
            "elu1_unnormalised": "elu1",
            "elu1_kernel_normalised": "elu_kernel_normalised",
            "elu1_kernel_unnormalised": "elu_kernel",
            "identity_unnormalised": "identity",
            "mlp_unnormalised": "mlp",
        },
    ),
    "section_5_random_tokens": ("section_5_random_tokens", {"x1": "random_1", "x1_x2": "random_1_2", "x2": "random_2"}),
    "table_11_ffn": ("table_11", {}),
    "table_12_left_heads": (
        "table_12",
        {"8": "heads_8", "4": "heads_4", "2": "heads_2", "1": "heads_1", "addition": "heads_summed"},
    ),
    "table_12_right_head_sharing": (
        "table_12",
        {
            "kv_per_head": "kv_biases",
            "kv_shared": "kv_biases_shared",
            "k_per_head": "k_biases",
            "k_shared": "k_biases_shared",
        },
    ),
    "scale_1b": ("scale_1b", {"sigmoid_unnormalised": "sigmoid"}),
}


@cache
def published() -> Mapping[str, Mapping[str, Mapping[str, float]]]:
    """`published.yaml`, by table and row."""
    text = (resources.files("sinklab") / "experiments" / "published.yaml").read_text(encoding="utf-8")
    return {name: table["rows"] for name, table in yaml.safe_load(text).items()}


@cache
def results() -> Mapping[str, Any]:
    return yaml.safe_load(RESULTS.read_text(encoding="utf-8"))


def numbers_of(row: Mapping[str, object]) -> dict[str, float]:
    """The numbers of a row under our names."""
    return {
        COLUMNS.get(name, name): float(value)
        for name, value in row.items()
        if isinstance(value, int | float) and not isinstance(value, bool)
    }


@needs_the_paper
@pytest.mark.parametrize("table", LISTS)
def test_the_columns_of_a_table_are_its_published_rows(table: str) -> None:
    ours = list(published()[LISTS[table][0]].values())
    theirs = results()[table]
    names = {"sink1": "sink_1", "star": "sink_bias", "valid_loss": "valid_loss"}
    assert names.keys() & theirs.keys()
    for column in names.keys() & theirs.keys():
        assert [row[names[column]] for row in ours] == theirs[column]


@needs_the_paper
@pytest.mark.parametrize("table", MAPPINGS)
def test_the_rows_of_a_table_are_its_published_rows(table: str) -> None:
    name, renamed = MAPPINGS[table]
    for row, values in results()[table].items():
        ours = published()[name][renamed.get(str(row), str(row))]
        expected = numbers_of(values)
        assert ours == (expected or {"trains": False})


@needs_the_paper
def test_tables_of_other_shapes_equal_their_published_rows() -> None:
    ours, theirs = published(), results()
    fixed = [list(row.values()) for row in ours["table_10"].values()]
    assert fixed == list(theirs["table_10_right_fixed_token"].values())
    left = theirs["table_10_left_batch_size"]
    assert [row["sink_1"] for row in ours["table_10_left"].values()] == left["sink1"]
    assert [row["valid_loss"] for row in ours["table_10_left"].values()] == left["valid_loss"]
    assert ours["section_7_2_post_norm"]["post_norm"]["sink_1"] == theirs["section_7_2_post_norm"]["sink1"]
    swap = theirs["table_7_gpt2_xl_positional_swap"]
    for how in ("replaced", "swapped"):
        rows = {t: ours["table_7"][f"{how}_{t}"] for t in swap["t"]}
        assert [row["sink_1"] for row in rows.values()] == swap[f"{how}_sink1"]
        assert [row[f"sink_{t}"] for t, row in rows.items()] == swap[f"{how}_sink_t"]
    one = {name: list(row.values()) for name, row in ours["table_1"].items()}
    for model, values in theirs["table_1_left"].items():
        assert model == "columns" or one[model] == values
    for model, values in theirs["table_1_right"].items():
        assert model == "columns" or one[f"{model} pair"] == values
    assert {name: one[name][0] for name in theirs["jamba"]} == theirs["jamba"]


def rows_in_use() -> set[tuple[str, str]]:
    """Table and row of every cell that has one."""
    used: set[tuple[str, str]] = set()
    for name in experiment_ids():
        experiment = load_experiment(name)
        if experiment.base and experiment.published:
            said = experiment.published
            cells = {cell for scale in experiment.base for cell in experiment.cells_at(scale)}
            used |= {(said.table, said.rows.get(cell, cell)) for cell in cells}
    return used


OF_EXISTING_MODELS = {"table_1", "table_7"}


def test_every_published_row_has_a_cell() -> None:
    rows = {(table, row) for table, rows in published().items() for row in rows if table not in OF_EXISTING_MODELS}
    assert rows - rows_in_use() == set()


def test_every_table_and_figure_of_the_paper_is_an_experiment() -> None:
    assert set(PAPER) <= set(experiment_ids())


def recipes_at(experiment: Experiment, scale: Scale) -> dict[str, Recipe]:
    base = recipe_values(experiment.base[scale])
    origin = f"of {experiment.id} at scale {scale}"
    return {
        name: build_recipe(base, *overlays, origin=f"cell {name} {origin}")
        for name, overlays in experiment.cells_at(scale).items()
    }


def trained_experiments() -> list[Experiment]:
    found = [load_experiment(name) for name in experiment_ids()]
    return [one for one in found if one.base]


def test_every_cell_is_a_recipe_and_no_two_of_an_experiment_are_the_same() -> None:
    for experiment in trained_experiments():
        for scale in experiment.base:
            recipes = {one.model_dump_json(exclude={"name"}) for one in recipes_at(experiment, scale).values()}
            assert len(recipes) == len(experiment.cells_at(scale)), f"{experiment.id} at {scale}"


@pytest.mark.parametrize("scale", SCALES)
def test_a_name_of_a_cell_means_one_recipe_whatever_the_experiment(scale: Scale) -> None:
    meaning: dict[str, str] = {}
    for experiment in trained_experiments():
        if scale in experiment.base:
            for name, recipe in recipes_at(experiment, scale).items():
                assert meaning.setdefault(name, recipe.model_dump_json(exclude={"name"})) == recipe.model_dump_json(
                    exclude={"name"}
                ), f"{name} of {experiment.id}"


def test_every_experiment_asks_a_question_and_says_why_it_is_adapted() -> None:
    for experiment in trained_experiments():
        assert experiment.question.endswith("?"), experiment.id
        assert all(one.why for several in experiment.adapted.values() for one in several)
