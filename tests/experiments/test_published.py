"""The paper's numbers: rows of cells, comparison with ours at the paper's scale, and refusals."""

from pathlib import Path

import pytest
from made_runs import cells_of, experiment_of, verdict

from sinklab.errors import InputError
from sinklab.experiments.paper import Published, published_tables
from sinklab.experiments.quantities import quantity
from sinklab.experiments.shipped import load_experiment

LESS = {"is": "less", "value": "sink_1", "cell": "k_biases", "than": "softmax"}
TABLE_4 = {"table": "table_4"}  # there: softmax 18.18 %, k_biases 0.00 %


def test_every_published_row_has_numbers_or_failed() -> None:
    rows = [row for table in published_tables().values() for row in table.values()]
    assert len(rows) > 90
    assert all(row == {"trains": 0.0} or (row and "trains" not in row) for row in rows)


def test_every_published_number_is_of_a_quantity_or_of_a_column_about_models() -> None:
    named = {name for table in published_tables().values() for row in table.values() for name in row}
    for name in named - {"natural", "random", "repeat", "base", "chat", "sink_t", "trains"}:
        quantity(name)


def test_a_cell_has_the_published_row_of_its_name_an_assigned_row_or_none() -> None:
    said = Published(table="table_4", rows={"without_bos": "sink_token"})
    assert said.numbers_of("softmax") == {"sink_1": 18.18, "valid_loss": 3.73}
    assert said.numbers_of("without_bos") == said.numbers_of("sink_token")
    assert said.numbers_of("gate_head") == {}
    assert Published(table="table_6").numbers_of("elu_kernel") == {"trains": 0.0}


@pytest.mark.parametrize(
    ("published", "complaint"),
    [
        ("{table: table_44}", "unknown published table 'table_44'; choose from: table_1"),
        ("{table: table_4, rows: {softmax: hardmax}}", "has no row 'hardmax' for cell 'softmax'; it has: softmax"),
        ("{table: table_4, rows: {hardmax: softmax}}", "'hardmax' is not a cell"),
    ],
)
def test_an_experiment_with_an_unknown_table_or_row_is_refused(published: str, complaint: str, tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(f"id: mine\ntitle: Mine\nbase: tiny\ncells: {{softmax: {{}}}}\npublished: {published}\n")
    with pytest.raises(InputError, match=complaint):
        load_experiment(str(file))


OURS = {"softmax": [17.0, 19.0, 18.5, 17.5, 18.0], "k_biases": [0.0] * 5}
ELSEWHERE = {"softmax": [36.0, 37.0, 35.0, 36.5, 35.5], "k_biases": [0.0] * 5}


def test_a_published_number_within_the_prediction_interval_is_reproduced() -> None:
    found = verdict(LESS, cells_of("sink_1", OURS), "60m", published=TABLE_4)
    assert found.verdict == "reproduced"
    assert (
        "The paper's value of 18.18 % for softmax is within the 95 % prediction interval of another seed, [15.5, 20.5]."
        in found.evidence
    )


def test_a_published_number_outside_the_prediction_interval_gives_direction_only() -> None:
    found = verdict(LESS, cells_of("sink_1", ELSEWHERE), "60m", published=TABLE_4)
    assert found.verdict == "direction only"
    assert "The paper's value of 18.18 % for softmax is outside" in found.evidence


def test_published_numbers_are_not_used_at_other_scales_than_the_papers() -> None:
    for scale in ("tiny", "small"):
        found = verdict(LESS, cells_of("sink_1", ELSEWHERE), scale, published=TABLE_4)
        assert found.verdict == "reproduced"
        assert "paper" not in found.evidence


def test_published_numbers_do_not_support_a_claim_that_our_seeds_do_not_establish() -> None:
    other_way = {"is": "greater", "value": "sink_1", "cell": "k_biases", "than": "softmax"}
    assert verdict(other_way, cells_of("sink_1", OURS), "60m", published=TABLE_4).verdict == "contradicted"
    one = {cell: values[:1] for cell, values in OURS.items()}
    assert verdict(LESS, cells_of("sink_1", one), "60m", published=TABLE_4).verdict == "no verdict"


def test_a_number_before_the_last_step_is_not_compared_with_a_published_one() -> None:
    found = verdict({**LESS, "at_step": 1500}, cells_of("sink_1", ELSEWHERE), "60m", published=TABLE_4)
    assert found.verdict == "reproduced"
    assert "paper" not in found.evidence


def test_an_experiment_without_published_numbers_is_judged_by_its_own() -> None:
    assert verdict(LESS, cells_of("sink_1", ELSEWHERE), "60m").verdict == "reproduced"
    assert experiment_of(LESS, cells=["softmax", "k_biases"]).published is None
