"""The figures of a measurement with details: their axes, their maps, and their numbers as text."""

import re
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import vl_convert as vlc
from own_models import own_model, own_tokens
from report_fixtures import make_measurement
from rich.console import Console

from sinklab.commands.results import print_measurement
from sinklab.measuring.measurement import Measurement
from sinklab.model.config import ModelConfig
from sinklab.model.transformer import Transformer
from sinklab.report import html as theme
from sinklab.report.charts import Figure, scale_over
from sinklab.report.collect import collect
from sinklab.report.data import ReportData, ReportedRun
from sinklab.report.figures import figures
from sinklab.report.measurement_figures import explorers
from sinklab.report.page import write_report
from sinklab.survey.api import measure

LENGTH = 70  # maps of more than 64 positions are thinned


@pytest.fixture(scope="module")
def measured() -> Measurement:
    config: dict[str, Any] = {"layers": 2, "width": 32, "heads": 4, "ffn_width": 48, "vocab_size": 32, "context": 80}
    config["gate"] = {"kind": "head"}
    model = Transformer(ModelConfig.model_validate(config))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(4)  # attention sharp enough for secondary sinks
    tokens = torch.randint(32, (4, LENGTH), generator=torch.Generator().manual_seed(0))
    return measure(model, tokens, eps=0.1, model_name="small", maps=[(2, 3), (1, 1)])


@pytest.fixture(scope="module")
def folder(measured: Measurement, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("details") / "model"
    measured.save(path)
    return path


@pytest.fixture(scope="module")
def drawn(folder: Path) -> dict[str, Figure]:
    return {figure.key: figure for figure in figures(collect([folder]))}


def texts(chart: Any) -> str:
    svg = vlc.vegalite_to_svg(chart.to_dict() | {"config": theme.on_paper()})
    return " | ".join(re.findall(r"<text[^>]*>([^<]*)</text>", svg))


@pytest.mark.parametrize(
    ("key", "expected"),
    [
        ("angles-cosine", ["Layer", "Position (the first token is 1)", "small"]),
        ("angles-norms", ["Layer", "Position (the first token is 1)", "Norm product"]),
        ("angles-heads", ["Layer", "Head", "Cosine"]),
        ("value-ratio", ["Layer", "Head", "Norm ratio"]),
        ("entropy", ["Layer", "Head", "Entropy"]),
        ("by-distance", ["Distance in tokens (0: the query itself)", "Share", "4..7", "64..69"]),
        ("by-query", ["Position of the query", "first token", "an average other token", "log scale", "32..63"]),
        ("compression", ["After block (0 is the embedding)", "Matrix entropy"]),
        ("kurtosis", ["After block (0 is the embedding)", "Kurtosis", "first token", "the others"]),
        ("gates", ["Layer", "Gate", "first token", "the others"]),
        ("gates-heads", ["Layer", "Head", "Gate"]),
        ("gates-closed", ["Layer", "Share", "first token", "the others"]),
        ("alignment", ["After block", "Position (the first token is 1)"]),
        ("secondary", ["Layer", "Head", "Percent of sequences"]),
        ("map-attention", ["Position of the query", "Position of the key", "small: layer 2, head 3"]),
        ("map-cosine", ["Position of the query", "small: layer 2, head 3"]),
        ("map-norms", ["Position of the query", "small: layer 2, head 3"]),
    ],
)
def test_each_figure_compiles_and_names_its_axes(drawn: dict[str, Figure], key: str, expected: list[str]) -> None:
    found = texts(drawn[key].charts[0])
    assert [text for text in expected if text not in found] == []


def test_matrix_entropy_is_drawn_beside_the_norm_of_the_first_token_and_the_sink(
    drawn: dict[str, Figure],
) -> None:
    titles = ("Matrix entropy", "Norm ratio of the first token", "Sink₁ of the layer (percent of heads)")
    found = [texts(chart) for chart in drawn["compression"].charts]
    assert all(title in text for title, text in zip(titles, found, strict=True))


def test_there_is_a_map_for_every_head_asked_for_and_none_shows_later_keys(drawn: dict[str, Figure]) -> None:
    for key in ("map-attention", "map-cosine", "map-norms"):
        assert len(drawn[key].charts) == 2
        cells = drawn[key].charts[0].to_dict()["data"]["values"]
        assert all(cell["x"] <= cell["y"] for cell in cells)
        assert max(cell["y"] for cell in cells) == LENGTH // 2
    assert "averaged over blocks" in drawn["map-attention"].caption


def test_numbers_of_the_figures_are_also_text_in_the_page(folder: Path, measured: Measurement, tmp_path: Path) -> None:
    details = measured.details
    assert details is not None
    cosine_first = details.by_layer["cosine_first"]
    assert cosine_first is not None
    page = write_report([folder], out=tmp_path / "page.html").read_text(encoding="utf-8")
    cosine_rest = details.by_layer["cosine_rest"]
    assert cosine_rest is not None
    assert f">{cosine_first[1]:.3f} / {cosine_rest[1]:.3f}<" in page
    gate_first, gate_rest = details.by_layer["gate_first"], details.by_layer["gate_rest"]
    assert gate_first is not None
    assert gate_rest is not None
    assert f">{gate_first[1]:.3f} / {gate_rest[1]:.3f}<" in page
    assert f">{details.by_distance.mean((0, 1))[2]:.4f}<" in page
    first = details.secondary_sinks[0]
    assert f"small, sequence {first.sequence}, position {first.position}" in page


def test_a_measurement_without_details_has_none_of_these_figures(tmp_path: Path, drawn: dict[str, Figure]) -> None:
    plain = figures(collect([make_measurement(tmp_path / "plain", model="plain")]))
    assert [figure.key for figure in plain] == [
        "importance-heads", "importance-layers", "importance-positions", "norms-first", "norm-ratio"
    ]  # fmt: skip
    assert {figure.key for figure in plain} < set(drawn)


def test_details_of_one_model_are_drawn_beside_a_model_that_has_none(folder: Path, tmp_path: Path) -> None:
    both = collect([folder, make_measurement(tmp_path / "plain", model="plain")])
    shown = {figure.key: figure for figure in figures(both)}
    assert len(shown["entropy"].charts) == 1
    assert len(shown["importance-heads"].charts) == 2


def test_a_diverging_scale_is_symmetric_and_covers_all_values() -> None:
    scale = scale_over("cosine", [np.array([[-0.37, np.nan], [0.2, 0.1]])], diverging=True)
    assert (scale.low, scale.high) == (-0.4, 0.4)
    assert scale_over("sum", [np.array([[-3.0, 12.0]])]).low == -3
    assert scale_over("sum", [np.zeros((1, 1))]).high == 1
    for empty in (np.zeros((1, 1)), np.full((1, 1), np.nan)):
        scale = scale_over("cosine", [empty], diverging=True)
        assert (scale.low, scale.high) == (-1, 1)


def test_visible_queries_of_other_keys_are_drawn_if_all_queries_see_the_first_key(measured: Measurement) -> None:
    assert measured.details is not None
    half = np.full_like(measured.details.rest_by_query, 0.5)
    details = measured.details.model_copy(update={"rest_visible": half})
    assert details.first_visible is None
    data = ReportData([], [ReportedRun.of(measured.model_copy(update={"details": details}))])
    (figure,) = (one for one in figures(data) if one.key == "visible-by-query")
    assert figure.table is not None
    assert [column.unit for column in figure.table.columns] == ["", "an average other token"]
    (dashes,) = (
        layer["encoding"]["strokeDash"]["scale"]["domain"]
        for layer in figure.charts[0].to_dict()["layer"]
        if "strokeDash" in layer["encoding"]
    )
    assert dashes == ["first token", "an average other token"]  # so that the second is dashed, as the caption says


def test_the_explored_importance_has_four_decimals() -> None:
    found = measure(own_model("softmax"), own_tokens(), explore=True)
    (explorer,) = explorers(ReportData([], [ReportedRun.of(found)]))
    numbers = [
        *np.ravel(explorer.data["first"]),
        *(value for one in explorer.data["kept"] for value in one["importance"]),
    ]
    assert numbers == [round(number, 4) for number in numbers]
    np.testing.assert_allclose(explorer.data["first"], found.importance[:, :, 0], atol=5.1e-5)


def test_the_terminal_shows_the_details(measured: Measurement) -> None:
    out = StringIO()
    print_measurement(measured, Console(file=out, width=120), full=True)
    details = measured.details
    assert details is not None
    first, rest = (details.by_layer[name] for name in ("cosine_first", "cosine_rest"))
    assert first is not None
    assert rest is not None
    assert f"{first[0]:.3f} / {rest[0]:.3f}" in out.getvalue()
    assert f"{details.secondary_rate:.2f} % of heads" in " ".join(out.getvalue().split())
