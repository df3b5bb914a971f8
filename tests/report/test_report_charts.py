"""Charts: each compiles, names its axes and cells, and keeps its colours; export to files."""

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import vl_convert as vlc
from report_fixtures import HEADS, HOSTILE, LAB, LAYERS, LENGTH, make_lab, make_measurement, make_run, write
from table_texts import table_texts

from sinklab.errors import InputError
from sinklab.report import charts
from sinklab.report import html as theme
from sinklab.report.cells import cells_table
from sinklab.report.charts import OUTLINE, ColourScale, Figure, heatmap, pooled
from sinklab.report.collect import collect
from sinklab.report.data import ReportData, ReportedRun
from sinklab.report.figures import figures
from sinklab.report.measurement_figures import uniform_importance
from sinklab.report.page import export_charts
from sinklab.tables import PlotAxis


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> ReportData:
    return collect([make_lab(tmp_path_factory.mktemp("report") / "lab", seeds=2)])


@pytest.fixture(scope="module")
def drawn(data: ReportData) -> dict[str, Figure]:
    return {figure.key: figure for figure in figures(data)}


def with_array(run: ReportedRun, name: str, value: float) -> ReportedRun:
    """The run, measured with the same value for every head."""
    assert run.measurement is not None
    array = np.full((LAYERS, HEADS), value)
    return replace(run, measurement=run.measurement.model_copy(update={name: array}))


def texts(chart: charts.Drawing) -> str:
    svg = vlc.vegalite_to_svg(chart.to_dict() | {"config": theme.on_paper()})
    return " | ".join(re.findall(r"<text[^>]*>([^<]*)</text>", svg))


@pytest.mark.parametrize(
    ("key", "expected"),
    [
        (
            "sink-by-step",
            ["Sink rate (percent of heads, ε = 0.3)", "Training step", "added sink", *LAB],
        ),
        ("importance-heads", ["Layer", "Head", "softmax, seed 0: first token"]),
        ("importance-layers", ["Layer", "Position (the first token is 1)", "softmax, seed 0"]),
        ("norms-first", ["Hidden states", "first token", "the others", *LAB]),
        ("importance-positions", ["Position of the key (the first token is 1)", "log scale", *LAB]),
        ("norm-ratio", ["After block (0 is the embedding)", "Norm ratio", *LAB]),
        ("loss-by-step", ["Loss (nats per token)", "validation", "training", *LAB]),
    ],
)
def test_each_chart_compiles_and_names_its_axes_and_cells(
    drawn: dict[str, Figure], key: str, expected: list[str]
) -> None:
    found = texts(drawn[key].charts[0])
    assert [text for text in expected if text not in found] == []


def test_there_is_one_heatmap_for_each_run(drawn: dict[str, Figure]) -> None:
    assert len(drawn["importance-heads"].charts) == len(LAB) * 2


def test_the_share_on_the_bias_is_a_heatmap_beside_that_of_the_first_token(data: ReportData) -> None:
    biased = with_array(data.runs[2], "importance_bias", 0.4)
    shown = {figure.key: figure for figure in figures(ReportData([], [biased]))}["importance-heads"]
    assert ["first token" in texts(shown.charts[0]), "bias" in texts(shown.charts[1])] == [True, True]


def test_a_cell_has_one_colour_in_all_charts(data: ReportData, drawn: dict[str, Figure]) -> None:
    expected = (data.cells, list(theme.colours(data.cells).values()))
    for key in ("sink-by-step", "importance-positions", "norm-ratio", "loss-by-step"):
        scales = list(colour_scales(drawn[key].charts[0].to_dict()))
        assert scales
        assert all(scale == expected for scale in scales)


def colour_scales(spec: object) -> Iterator[tuple[list[str], list[str]]]:
    """Domain and range of every colour scale over cells, anywhere in the specification."""
    if isinstance(spec, dict):
        colour = spec.get("color")
        if isinstance(colour, dict) and colour.get("field") == "cell":
            yield colour["scale"]["domain"], colour["scale"]["range"]
        for part in spec.values():
            yield from colour_scales(part)
    elif isinstance(spec, list):
        for part in spec:
            yield from colour_scales(part)


@pytest.mark.parametrize("replicate", ["seed", "draw", "model"])
def test_the_replicates_at_which_an_event_did_not_occur_are_named_in_the_tooltip(replicate: str) -> None:
    middles = [{"cell": "softmax", "never_reached": 2, "beyond": 9.0}]
    axis = PlotAxis("Step", "value")
    drawn = charts.dots({"softmax": "softmax"}, [], middles, [], axis, 0, replicate=replicate)
    assert f"{replicate}s without the event" in json.dumps(drawn.to_dict())


def test_positions_and_layers_are_counted_from_one(drawn: dict[str, Figure]) -> None:
    heatmap = drawn["importance-heads"].charts[0].to_dict()
    rows = heatmap["data"]["values"]
    assert {row["y"] for row in rows} == {1, 2, 3, 4}
    positions = drawn["importance-positions"].charts[0].to_dict()["layer"][-1]["data"]["values"]
    assert (min(row["position"] for row in positions), max(row["position"] for row in positions)) == (1, 64)


def test_uniform_attention_is_the_mean_of_a_uniform_matrix() -> None:
    T = 9
    attention_TT = np.tril(np.ones((T, T))) / np.arange(1, T + 1)[:, None]
    expected = [attention_TT[k:, k].mean() for k in range(T)]
    np.testing.assert_allclose(uniform_importance(T), expected, rtol=1e-12)
    assert uniform_importance(64)[0] == pytest.approx(sum(1 / t for t in range(1, 65)) / 64)


def test_a_model_without_a_sink_is_dark_and_uniform_attention_is_marked(tmp_path: Path) -> None:
    path = make_measurement(tmp_path / "m")
    with np.load(path / "measurement.npz") as file:
        arrays = dict(file)
    arrays["importance"] = np.broadcast_to(uniform_importance(LENGTH), (LAYERS, HEADS, LENGTH))
    np.savez(path / "measurement.npz", **arrays)
    shown = {figure.key: figure for figure in figures(collect([path]))}
    for key in ("importance-heads", "importance-layers"):
        scale = shown[key].scale
        assert scale is not None
        assert (scale.low, scale.high) == (0, 0.3)
    heads = shown["importance-heads"]
    assert heads.scale is not None
    assert heads.scale.references == pytest.approx([0.0741], abs=1e-4)
    assert "0.074 at T = 64" in heads.caption
    layers = shown["importance-layers"].charts[0].to_dict()
    cells = {(row["x"], row["y"]): row["value"] for row in layers["data"]["values"]}
    assert all(cells[k, "uniform"] == pytest.approx(cells[k, "1"]) for k in range(1, LENGTH + 1))
    assert "uniform" in texts(shown["importance-layers"].charts[0])
    lines = shown["importance-positions"].charts[0].to_dict()["layer"]
    assert [row["value"] for row in lines[0]["data"]["values"]] == pytest.approx(uniform_importance(LENGTH).tolist())


def test_the_row_of_uniform_attention_is_labelled_apart_from_those_of_thirty_layers() -> None:
    values_YX, lowest = np.zeros((30, 8)), np.zeros(8)
    drawn = heatmap(values_YX, ColourScale("importance", 0, 1), "", lowest=lowest).to_dict()
    assert drawn["layer"][0]["encoding"]["y"]["axis"]["values"] == [*map(str, range(3, 31, 3)), "uniform"]


def test_importance_over_visible_queries_is_drawn_beside_that_over_all_queries(tmp_path: Path) -> None:
    path = make_measurement(tmp_path / "m")
    before = figures(collect([path]))
    with np.load(path / "measurement.npz") as file:
        np.savez(path / "measurement.npz", **{**file, "importance_visible": file["importance"]})
    document = json.loads((path / "measurement.json").read_text())
    write(path / "measurement.json", document | {"sink_rate_visible": [21.2] * LENGTH})
    data = collect([path])
    shown = {figure.key: figure for figure in figures(data)}
    assert [len(figure.charts) for figure in before if figure.key.startswith("importance")] == [1, 1, 1]
    assert len(shown["importance-heads"].charts) == len(shown["importance-layers"].charts) == 2
    assert "first token, visible queries" in texts(shown["importance-heads"].charts[1])
    over_all, over_visible = shown["importance-layers"].charts
    assert "uniform" in texts(over_all)
    assert "uniform" not in texts(over_visible)  # a window gives uniform attention more than that over all tokens
    assert "(1 + 1/2 + .. + 1/w) / w" in shown["importance-layers"].caption
    columns, rows = table_texts(cells_table(data))
    assert rows[0][[name for name, _ in columns].index("Sink₁ visible")] == "21.20"


def test_the_heatmap_shows_the_value_of_each_head_on_hover() -> None:
    importance = np.array([[0.1, 0.8]])
    spec = heatmap(importance, ColourScale("importance", 0, 1, outlined=0.3), "title").to_dict()
    assert [row["value"] for row in spec["data"]["values"]] == [0.1, 0.8]
    assert spec["layer"][0]["encoding"]["tooltip"][2]["title"] == "importance"


def test_a_heatmap_outlines_the_heads_above_the_threshold_only() -> None:
    above = ColourScale("importance", 0, 1, outlined=0.3)
    outlines = [
        vlc.vegalite_to_svg(heatmap(np.array([[0.1, high]]), above, "title").to_dict()).count(OUTLINE)
        for high in (0.2, 0.8)
    ]
    assert outlines == [0, 1]


def test_row_sums_have_a_figure_where_scores_do_not_sum_to_one(data: ReportData) -> None:
    sigmoid = with_array(data.runs[-1], "row_sums", 23.0)
    shown = {figure.key: figure for figure in figures(ReportData([], [data.runs[0], sigmoid]))}
    assert len(shown["row-sums"].charts) == 1
    scale = shown["row-sums"].scale
    assert scale is not None
    assert (scale.low, scale.high) == (0, 30)


def test_no_measurement_of_a_softmax_has_row_sums(drawn: dict[str, Figure]) -> None:
    assert "row-sums" not in drawn


def test_a_large_matrix_is_thinned_by_means_that_ignore_unknown_values() -> None:
    matrix = np.array([[1.0, np.nan, np.nan], [3.0, 5.0, np.nan], [7.0, 9.0, 11.0]])
    np.testing.assert_allclose(pooled(matrix, 2), [[3.0, np.nan], [8.0, 11.0]])
    assert pooled(matrix, 3) is matrix


def test_importance_that_reaches_zero_is_drawn_on_a_linear_scale() -> None:
    rows = [{"cell": "a", "position": k + 1, "value": value} for k, value in enumerate([0.5, 0.0, 0.1])]
    position, importance = PlotAxis("Position", "position"), PlotAxis("Importance", "value", scale="auto")
    assert "log" not in texts(charts.lines(rows, position, importance, order=["a"]))


def test_a_sink_rate_of_zero_is_drawn_on_an_axis_up_to_one_percent() -> None:
    rows = [{"cell": "a", "step": step, "mean": 0.0, "low": 0.0, "high": 0.0} for step in (0, 10)]
    rate = PlotAxis("Sink rate", "mean", at_least=1.0)
    assert re.search(
        r"\b1 \|", texts(charts.lines(rows, PlotAxis("Step", "step"), rate, order=["a"], band=("low", "high")))
    )


def test_large_norm_ratios_are_drawn_on_a_logarithmic_scale() -> None:
    rows = [{"cell": "a", "layer": k, "mean": value} for k, value in enumerate([1.0, 3000.0])]
    ratio = PlotAxis("Norm ratio", "mean", scale="auto")
    assert "log scale" in texts(charts.lines(rows, charts.layer_axis(rows, "Layer"), ratio, order=["a"]))


def test_a_hostile_name_is_drawn_as_text(tmp_path: Path) -> None:
    shown = figures(collect([make_run(tmp_path / "run", name=HOSTILE)]))
    svg = vlc.vegalite_to_svg(shown[0].charts[0].to_dict())
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in svg
    assert "<script" not in svg


def test_a_run_without_measurement_has_curves_but_no_heatmap(tmp_path: Path) -> None:
    keys = [figure.key for figure in figures(collect([make_run(tmp_path / "run", reached=300)]))]
    assert keys == ["sink-by-step", "norm-ratio", "loss-by-step"]


def test_charts_are_exported_as_files_of_the_formats_asked_for(tmp_path: Path) -> None:
    data = collect([make_run(tmp_path / "run")])
    written = export_charts(data, tmp_path / "charts", ("svg", "pdf", "png"))
    assert len(written) == 9 * 3
    beginnings = {".svg": b"<svg", ".pdf": b"%PDF", ".png": b"\x89PNG"}
    for path in written:
        assert path.read_bytes().startswith(beginnings[path.suffix])
        assert path.stat().st_size > 2000


def test_an_unknown_format_is_refused_with_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="svg, pdf, png"):
        export_charts(collect([make_run(tmp_path / "run")]), tmp_path / "charts", ("gif",))
    assert not (tmp_path / "charts").exists()
