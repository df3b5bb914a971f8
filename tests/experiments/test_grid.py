"""Grids: every cell crossed with every change, and a matrix per quantity."""

from typing import Any

import pytest
from made_runs import cells_of
from pydantic import ValidationError

from sinklab.experiments.definition import Experiment
from sinklab.experiments.summary import at_scale, summarise
from sinklab.experiments.sweep.store import plan_sweep
from sinklab.report.sweeps import grid_tables

SMALL = {"optim": {"weight_decay": 0.1}}
SAID: dict[str, Any] = {
    "id": "mine",
    "title": "Mine",
    "base": "tiny",
    "cells": {"softmax": {}, "gate": "gate_head"},
    "changes": {
        "optimiser": {"adamw": {}, "muon": {"optim": {"name": "muon"}}},
        "decay": {"large": {"optim": {"weight_decay": 0.5}}, "small": SMALL},
    },
    "columns": ["sink_1"],
}
COMBINATIONS = [f"{way}+{decay}" for way in ("adamw", "muon") for decay in ("large", "small")]
NAMES = [f"{cell}+{one}" for cell in ("softmax", "gate") for one in COMBINATIONS]


def test_a_grid_trains_every_cell_with_every_combination() -> None:
    experiment = Experiment.model_validate(SAID)
    assert list(experiment.cells) == NAMES
    plan = plan_sweep([experiment], "tiny", 1, {})
    alone = Experiment.model_validate({**SAID, "cells": {"softmax": {}}, "changes": {}})
    plain = plan_sweep([alone], "tiny", 1, {}).cells["softmax"].recipe
    recipes = {name: cell.recipe for name, cell in plan.cells.items()}
    found = {
        name: (one.optim.name, one.optim.weight_decay, one.model.gate != plain.model.gate)
        for name, one in recipes.items()
    }
    assert found == {
        f"{cell}+{way}+{decay}": (way, {"large": 0.5, "small": 0.1}[decay], cell == "gate")
        for cell in ("softmax", "gate")
        for way in ("adamw", "muon")
        for decay in ("large", "small")
    }
    assert recipes["softmax+adamw+large"].content_hash("text") == plain.content_hash(
        "text"
    )  # so that its runs are shared


def test_a_saved_grid_is_loaded_unchanged() -> None:
    experiment = Experiment.model_validate(SAID)
    assert Experiment.model_validate(experiment.model_dump(mode="json")) == experiment


def test_a_matrix_has_a_row_per_cell_and_a_column_per_combination() -> None:
    experiment = Experiment.model_validate(SAID)
    numbers = {name: [float(at), float(at + 2)] for at, name in enumerate(NAMES) if name != "gate+muon+small"}
    summary = summarise([at_scale(experiment, "tiny")], cells_of("sink_1", numbers))
    (table,) = grid_tables(summary.experiments["mine"], summary.cells_of("mine"))
    assert [column.title for column in table.columns] == ["Cell", *(one.replace("+", ", ") for one in COMBINATIONS)]
    texts = [[column.text_of(value) for column, value in zip(table.columns, row, strict=True)] for row in table.rows]
    missing = table.columns[1].text_of(None)
    assert texts == [["softmax", "1.0", "2.0", "3.0", "4.0"], ["gate", "5.0", "6.0", "7.0", missing]]


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"cells": {"text": {"inputs": "natural"}}, "base": {}}, "changes apply only to trained cells"),
        ({"changes": {"decay": {}}}, "each axis needs named values"),
        ({"changes": {"decay": ["small", "large"]}}, "each axis needs named values"),
        ({"changes": {"decay": {0.5: SMALL}}}, "whose keys are text"),
        ({"cells": {1: {}}}, "whose keys are text"),
        ({"changes": {"decay": {"a/b": SMALL}}}, "contain / or begin with a dot"),
        ({"changes": {"decay": {"a+b": SMALL}}}, "is not a valid name of a value in changes"),
        ({"baseline": "softmax"}, "baseline 'softmax' is not a cell"),
    ],
)
def test_an_invalid_grid_is_refused_with_the_reason(changed: dict[str, Any], said: str) -> None:
    with pytest.raises(ValidationError, match=said):
        Experiment.model_validate({**SAID, **changed})


def test_an_experiment_that_is_no_grid_has_no_matrix() -> None:
    experiment = Experiment.model_validate({**SAID, "changes": {}})
    summary = summarise([at_scale(experiment, "tiny")], cells_of("sink_1", {"softmax": [1.0], "gate": [0.0]}))
    assert grid_tables(summary.experiments["mine"], summary.cells_of("mine")) == []


def test_two_axes_that_set_the_same_key_are_refused() -> None:
    rates = {"slow": {"optim": {"lr": 0.001}}, "fast": {"optim": {"lr": 0.01}}}
    for other in ({"small": {"optim": {"lr": 0.002}}}, {"same": [{}, {"optim": {"lr": 0.001, "weight_decay": 0.1}}]}):
        said = {**SAID, "changes": {"rate": rates, "other": other}}
        with pytest.raises(ValidationError, match=r"axes 'rate' and 'other' of `changes` both set optim\.lr, so cells"):
            Experiment.model_validate(said)
