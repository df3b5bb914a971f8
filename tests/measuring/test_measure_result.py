"""A measurement on disk: the documented fields, complete files, and errors for damaged ones."""

import json
import re
from io import StringIO
from pathlib import Path

import numpy as np
import pytest
from made_measurement import H, L, N, T, made_measurement
from rich.console import Console

from sinklab.commands.results import print_measurement
from sinklab.errors import InputError
from sinklab.measuring.measurement import Measurement
from sinklab.report.html import html


def test_the_files_hold_the_documented_fields(tmp_path: Path) -> None:
    made_measurement().save(tmp_path)
    document = json.loads((tmp_path / "measurement.json").read_text())
    assert " ".join(document) == (
        "schema model revision commit inputs sequences length eps bos proxy layers heads sink_rate sink_rates "
        "sink_rate_visible sink_rates_visible sink_rate_by_length sink_rate_bias uniform_ratio loss "
        "bits_per_byte hidden_norm_ratio key_norm_ratio value_norm_ratio backend dtype seconds peak_memory_mb "
        "massive_activations notes"
    )
    assert document["schema"] == 1
    assert document["sink_rate_bias"] is None
    assert len(document["sink_rate"]) == T
    assert len(document["hidden_norm_ratio"]) == L + 1
    with np.load(tmp_path / "measurement.npz") as arrays:
        shapes = {name: arrays[name].shape for name in arrays}
    assert shapes == {
        "importance": (L, H, T),
        "importance_first": (N, L, H),
        "hidden_norm": (L + 1, T),
        "key_norm": (L, T),
        "value_norm": (L, T),
    }
    assert sorted(path.name for path in tmp_path.iterdir()) == ["measurement.json", "measurement.npz"]


def test_a_loaded_measurement_equals_the_saved_one(tmp_path: Path) -> None:
    saved = made_measurement(bias=True)
    saved.save(tmp_path)
    loaded = Measurement.load(tmp_path)
    assert loaded.document() == saved.document()
    for name in ("importance", "importance_first", "hidden_norm", "key_norm", "value_norm"):
        np.testing.assert_array_equal(getattr(loaded, name), getattr(saved, name))


def test_one_token_has_neither_loss_nor_ratios() -> None:
    single = made_measurement(length=1)
    assert single.loss is None
    assert single.hidden_norm_ratio is None
    assert single.key_norm_ratio is None


@pytest.mark.parametrize("name", ["measurement.json", "measurement.npz"])
@pytest.mark.parametrize("damage", ["missing", "empty", "half"])
def test_a_damaged_measurement_says_to_measure_again(tmp_path: Path, name: str, damage: str) -> None:
    made_measurement().save(tmp_path)
    path = tmp_path / name
    if damage == "missing":
        path.unlink()
    else:
        path.write_bytes(path.read_bytes()[: 0 if damage == "empty" else 200])
    with pytest.raises(InputError, match=r"delete measurement\.json and measurement\.npz there"):
        Measurement.load(tmp_path)


@pytest.mark.parametrize(
    ("field", "value", "sentence"),
    [
        ("schema", 2, "schema"),
        ("eps", "much", "eps"),
        ("unknown", 1, "unknown"),
        ("length", 17, "importance has shape"),
        ("sink_rate", [101.0] * T, "sink_rate"),
        ("loss", float("nan"), "loss"),
    ],
)
def test_a_wrong_field_is_named(tmp_path: Path, field: str, value: object, sentence: str) -> None:
    made_measurement().save(tmp_path)
    path = tmp_path / "measurement.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {field: value}))
    with pytest.raises(InputError, match=sentence):
        Measurement.load(tmp_path)


def test_pickles_in_the_array_file_are_not_loaded(tmp_path: Path) -> None:
    made_measurement().save(tmp_path)
    np.savez(tmp_path / "measurement.npz", importance=np.array([object()]))
    with pytest.raises(InputError, match="allow_pickle"):
        Measurement.load(tmp_path)


def test_a_single_sequence_is_counted_in_the_singular() -> None:
    out, one = StringIO(), made_measurement().model_copy(update={"sequences": 1})
    print_measurement(one, Console(file=out, width=110), full=True)
    assert f"1 sequence of {T} tokens" in out.getvalue()
    assert f"1 sequence of {T} tokens" in html(one)


def test_the_title_names_the_revision_in_the_terminal_and_the_notebook() -> None:
    out, one = StringIO(), made_measurement().model_copy(update={"model": "tiny", "revision": "step3"})
    print_measurement(one, Console(file=out, width=110), full=True)
    assert "tiny at step3: " in out.getvalue()
    assert "tiny at step3: " in html(one)


def test_the_terminal_shows_the_first_positions_the_bias_and_every_layer() -> None:
    out = StringIO()
    print_measurement(made_measurement(bias=True, name="[red]odd[/red]"), Console(file=out, width=110), full=True)
    shown = out.getvalue()
    assert "[red]odd[/red]" in shown
    assert "bias" in shown
    assert f"{made_measurement().sink_rate[0]:.2f}" in shown
    assert "times uniform" in shown
    assert f"{made_measurement().uniform_ratio[0]:.2f}" in shown
    assert all(re.search(rf"^ +{layer + 1} +0\.\d{{3}} ", shown, re.MULTILINE) for layer in range(L))


def test_print_shows_the_conclusion_and_six_numbers_of_the_first_token() -> None:
    lines = str(made_measurement(bias=True)).splitlines()
    assert len(lines) <= 20
    assert max(map(len, lines)) <= 100
    assert any(line.split()[:3] == ["Sink₁", f"{made_measurement(bias=True).sink_rate[0]:.1f}", "%"] for line in lines)
