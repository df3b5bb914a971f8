"""A measurement as tables, charts and in a notebook, and the public names as a notebook user sees them."""

import csv
import inspect
import pydoc
import subprocess
import sys
from pathlib import Path

import numpy as np
import polars
import pytest
from made_measurement import H, L, T, made_measurement

import sinklab
from sinklab.errors import InputError
from sinklab.measuring.measurement import Measurement, remove_tables


def rows_of(path: Path) -> tuple[list[str], list[list[str]]]:
    with path.open(newline="") as file:
        head, *rows = csv.reader(file)
    return head, rows


def test_a_table_has_a_row_for_every_layer_head_and_position(tmp_path: Path) -> None:
    measured = made_measurement()
    measured.to_csv(tmp_path / "importance.csv")
    head, rows = rows_of(tmp_path / "importance.csv")
    assert head == ["layer", "head", "position", "importance"]
    assert len(rows) == L * H * T
    for layer, attention_head, position, value in rows:
        found = measured.importance[int(layer) - 1, int(attention_head) - 1, int(position) - 1]
        assert float(value) == found


def test_positions_and_layers_are_tables_too(tmp_path: Path) -> None:
    measured = made_measurement(bias=True)
    measured.to_csv(tmp_path / "positions.csv", "positions")
    head, rows = rows_of(tmp_path / "positions.csv")
    assert head == ["position", "sink_rate", "uniform_ratio"]
    assert [float(rate) for _, rate, _ in rows] == measured.sink_rate
    assert [float(ratio) for _, _, ratio in rows] == measured.uniform_ratio
    layers = measured.columns("layers")
    assert list(layers) == [
        *("layer", "importance_first", "importance_bias"),
        *("hidden_norm_ratio", "key_norm_ratio", "value_norm_ratio"),
    ]
    np.testing.assert_array_equal(layers["importance_first"], measured.importance[:, :, 0].mean(1))
    assert {len(values) for values in layers.values()} == {L}


def test_heads_are_a_table(tmp_path: Path) -> None:
    rates = made_measurement().sink_rate
    measured = made_measurement(bias=True).model_copy(update={"sink_rates": {"0.3": rates, "0.1": rates}})
    measured.to_csv(tmp_path / "heads.csv", "heads")
    measured.to_csv(tmp_path / "heads.csv", "heads")
    head, rows = rows_of(tmp_path / "heads.csv")
    assert head == ["layer", "head", "sink_rate", "sink_rate_eps_0.1", "importance_first", "importance_bias"]
    assert [row[:2] for row in rows] == [[str(layer), str(one)] for layer in range(1, L + 1) for one in range(1, H + 1)]
    for layer, one, rate, other, share, _ in rows:
        first_N = measured.importance_first[:, int(layer) - 1, int(one) - 1]
        assert float(rate) == 100 * (first_N > measured.eps).mean()
        assert float(other) == 100 * (first_N > 0.1).mean()
        assert float(share) == pytest.approx(first_N.mean(), rel=1e-5)


def test_tables_have_columns_for_importance_over_visible_queries_if_it_differs() -> None:
    plain = made_measurement()
    other = plain.model_copy(update={"importance_visible": plain.importance / 2, "sink_rate_visible": [0.0] * T})
    assert list(other.columns()) == ["layer", "head", "position", "importance", "importance_visible"]
    assert list(other.columns("positions")) == ["position", "sink_rate", "sink_rate_visible", "uniform_ratio"]
    assert "importance_first_visible" in other.columns("layers")


def test_an_unknown_table_or_chart_is_refused_with_the_valid_names() -> None:
    with pytest.raises(InputError, match="choose from importance, positions, layers, heads"):
        made_measurement().to_dataframe("head")  # type: ignore[arg-type]
    with pytest.raises(InputError, match="choose from heads, layers, positions, norms"):
        made_measurement().plot("importance")  # type: ignore[arg-type]


@pytest.mark.parametrize("library", ["pandas", "polars"])
def test_a_data_frame_has_the_columns(library: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if library == "pandas":
        pytest.importorskip("pandas")
    else:
        monkeypatch.setattr("sinklab.measuring.measurement.find_spec", lambda name: None)
    frame = made_measurement().to_dataframe()
    assert type(frame).__module__.startswith(library)
    assert list(frame.columns) == ["layer", "head", "position", "importance"]
    assert len(frame) == L * H * T


def test_a_parquet_file_has_the_importance_of_the_measurement(tmp_path: Path) -> None:
    measured = made_measurement()
    measured.to_parquet(tmp_path / "importance.parquet")
    table = polars.read_parquet(tmp_path / "importance.parquet")
    np.testing.assert_array_equal(table["importance"].to_numpy(), measured.importance.ravel())


@pytest.mark.parametrize("kind", ["csv", "parquet"])
@pytest.mark.parametrize("theirs", [b"layer,loss\n1,2.5\n", b"PAR1 of others PAR1", b"\xff\xfe no text"])
def test_a_table_replaces_a_table_and_no_other_file(kind: str, theirs: bytes, tmp_path: Path) -> None:
    measured, path, notes = made_measurement(), tmp_path / "mine", tmp_path / "notes"
    write = {"csv": measured.to_csv, "parquet": measured.to_parquet}[kind]
    for table in ("importance", "positions", "layers", "layers"):
        write(path, table)
    notes.write_bytes(theirs)
    with pytest.raises(InputError, match=r"notes exists and was not written by sinklab"):
        write(notes)
    assert notes.read_bytes() == theirs


def test_tables_of_an_earlier_measurement_are_removed_and_no_other_file(tmp_path: Path) -> None:
    made_measurement().to_csv(tmp_path / "importance.csv")
    (tmp_path / "layers.csv").write_text("layer,loss\n1,2.5\n")
    (tmp_path / "notes.csv").write_text("mine")
    remove_tables(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["layers.csv", "notes.csv"]


@pytest.mark.parametrize("name", ["measurement.json", "measurement.npz"])
def test_a_measurement_is_saved_over_a_measurement_and_no_other_file(name: str, tmp_path: Path) -> None:
    measured = made_measurement()
    for _ in range(2):
        measured.save(tmp_path / "m")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / name).write_text('{"schema": "mine"}')
    with pytest.raises(InputError, match=rf"{name} exists and was not written by sinklab"):
        measured.save(tmp_path / "other")
    assert (tmp_path / "other" / name).read_text() == '{"schema": "mine"}'
    assert [path.name for path in (tmp_path / "other").iterdir()] == [name]


@pytest.mark.parametrize("what", ["heads", "layers", "positions", "norms"])
def test_every_chart_of_a_measurement_is_rendered_with_the_name_of_its_model(what: str) -> None:
    import vl_convert as vlc

    measured = made_measurement(name="org/model")
    svg = vlc.vegalite_to_svg(measured.plot(what).to_dict())  # type: ignore[arg-type]
    assert svg.count("<path") > L
    assert "model" in svg


def test_a_notebook_shows_the_tables_with_the_model_name_escaped() -> None:
    shown = made_measurement(name="<script>alert(1)</script>")._repr_html_()
    assert "Position 1 by layer" in shown
    assert "&lt;script&gt;" in shown
    assert "<script" not in shown


def test_the_public_names_are_listed_and_have_signatures() -> None:
    assert {"measure", "probe", "Measurement"} <= set(dir(sinklab))
    parameters = inspect.signature(sinklab.measure).parameters
    assert list(parameters)[:2] == ["model", "tokens"]
    assert "attention_mask" in parameters
    assert sinklab.Measurement is Measurement


def test_help_says_what_measure_takes() -> None:
    page = pydoc.plain(pydoc.render_doc(sinklab.measure))
    assert "measure(model:" in page
    assert "tokens: token ids (sequences, length)" in page
    assert "Raises:" in page


def test_dir_of_the_package_imports_no_heavy_library() -> None:
    code = "import sys, sinklab; dir(sinklab); print([m for m in ('torch', 'altair', 'pydantic') if m in sys.modules])"
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "[]"
