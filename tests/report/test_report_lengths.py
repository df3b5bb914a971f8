"""The figure of the sink by threshold and length: from cells that set both, and only for several lengths."""

import pytest

from sinklab.experiments.documents import CellEstimate, CellSummary
from sinklab.report.figures import length_figure


def cell(eps: float, length: int, low: float | None = None) -> CellSummary:
    middle = 80 - length / 4
    low, high = (middle, middle) if low is None else (low, 90.0)
    sink = CellEstimate(seeds=[low, middle, high], median=middle, smallest=low, largest=high)
    return CellSummary(change={"eps": eps, "length": length}, values={"sink_1": sink})


def test_the_figure_has_a_line_per_threshold_with_the_range_of_its_draws() -> None:
    cells = {f"eps_{eps}_length_{length}": cell(eps, length, 10.0) for eps in (0.4, 0.2) for length in (64, 16)}
    figure = length_figure({**cells, "other": CellSummary(change={"inputs": "random"})})
    assert figure is not None
    (chart,) = figure.charts
    rows = chart.to_dict()["data"]["values"]
    assert [(row["cell"], row["length"], row["low"]) for row in rows] == [
        ("ε = 0.2", 16, 10.0),
        ("ε = 0.2", 64, 10.0),
        ("ε = 0.4", 16, 10.0),
        ("ε = 0.4", 64, 10.0),
    ]


@pytest.mark.parametrize("lengths", [(), (64,)])
def test_without_several_lengths_there_is_no_figure_by_length(lengths: tuple[int, ...]) -> None:
    assert length_figure({str(length): cell(0.3, length) for length in lengths}) is None


def test_a_cell_with_one_draw_has_a_point_without_a_range() -> None:
    figure = length_figure({"a": cell(0.3, 16), "b": cell(0.3, 64)})
    assert figure is not None
    rows = figure.charts[0].to_dict()["data"]["values"]
    assert all(row["low"] == row["median"] == row["high"] for row in rows)


def test_cells_of_two_directories_have_lines_of_their_own() -> None:
    cells = {f"{model}/eps_0.3_length_{length}": cell(0.3, length) for model in "ab" for length in (64, 16)}
    figure = length_figure(cells)
    assert figure is not None
    rows = figure.charts[0].to_dict()["data"]["values"]
    assert [(row["cell"], row["length"]) for row in rows] == [
        ("ε = 0.3, a", 16),
        ("ε = 0.3, a", 64),
        ("ε = 0.3, b", 16),
        ("ε = 0.3, b", 64),
    ]
