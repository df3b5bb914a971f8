"""Tables in narrow terminals: no number is cut."""

import re
from io import StringIO
from pathlib import Path

import pytest
import torch
from made_measurement import made_measurement
from rich.console import Console

from sinklab.commands.results import print_claims, print_measurement, print_replay
from sinklab.commands.terminal import RunDisplay, print_table, print_text
from sinklab.experiments.documents import JudgedClaim
from sinklab.experiments.sweep.engine import Event
from sinklab.measuring.accumulate import Accumulator, Cost, measurement_from
from sinklab.measuring.measurement import Measurement
from sinklab.measuring.options import Options
from sinklab.measuring.records import Batch
from sinklab.report.result_tables import measurement_tables
from sinklab.tables import Table, TableCell, TableColumn, markdown, names, number_text
from sinklab.train.update import Replay

NUMBER = re.compile(r"\d+(?:\.\d+)?")


def shown(width: int, show: object) -> str:
    out = StringIO()
    show(Console(file=out, width=width))  # type: ignore[operator]
    return out.getvalue()


def large(length: int = 64) -> Measurement:
    """Three layers, with a bias, several thresholds, cut sequences and every rate 100.00."""
    totals = Accumulator((0.3, 0.2, 0.1), length, (16, 32))
    alpha = torch.ones(3, 2, 4, length)
    norms = torch.ones(4, 2, length)
    norms[..., 0] = 12345.678
    prefixes = [alpha[..., :16], alpha[..., :32]]
    recorded = {"importance_BHT": alpha, "visible_BHT": alpha, "bias_BH": alpha[..., 0], "hidden_BT": norms}
    recorded |= {"key_norm_BT": norms[1:], "value_norm_BT": norms[1:]}
    biased = (True,) * len(recorded["importance_BHT"])
    totals.add(
        Batch(recorded, torch.ones(2, length, dtype=torch.bool), torch.tensor(12.0), 99, prefixes, biased=biased)
    )
    return measurement_from(
        totals, Cost(0.5, 1.0), Options(model_name="m", bos=True), proxy=False, backend="sdpa", dtype="float32"
    )


@pytest.mark.parametrize("width", [40, 60, 80])
def test_no_number_of_a_measurement_is_cut_at_any_width(width: int) -> None:
    wide, narrow = (
        shown(columns, lambda console: print_measurement(large(), console, full=True)) for columns in (300, width)
    )
    for table in ("Sink rate and importance", "Position 1 by layer"):
        assert table in narrow
    assert set(NUMBER.findall(wide)) <= set(NUMBER.findall(narrow))
    assert "…" not in narrow
    assert max(map(len, narrow.splitlines())) <= width


def test_text_is_printed_without_interpreting_markup_and_control_sequences() -> None:
    text = "[bold]one\x1b[2J[/a] " + "and more " * 20
    assert shown(40, lambda console: print_text(f"{text}\nof two lines", console)) == (
        text.replace("\x1b", "�") + "\nof two lines\n"
    )


def test_a_replay_from_a_folder_named_like_markup_is_printed() -> None:
    replay = Replay(3, Path("runs/[/a]/step_2"), 1, 2.5, 0.5, {"head": 0.5}, None)
    assert "step 3 from runs/[/a]/step_2" in shown(80, lambda console: print_replay(replay, console))


def test_a_run_named_like_a_control_sequence_does_not_steer_the_terminal() -> None:
    out = StringIO()
    with RunDisplay(Console(file=out, width=100, force_terminal=True, color_system=None), {"a\x1b[41m": 9}) as display:
        display.watch(Event("a\x1b[41m", "failed", 3, message="\x1b[42mdiverged"))
    assert "\x1b[41m" not in out.getvalue()
    assert "\x1b[42m" not in out.getvalue()


@pytest.mark.parametrize(
    ("value", "form", "text"),
    [
        (-0.001, ",.2f", "0.00"),
        (-0.001, "+,.2f", "0.00"),
        (-0.0, ".1e", "0.0e+00"),
        (0.006, "+,.2f", "+0.01"),
        (-0.006, ",.2f", "-0.01"),
        (-1e-5, ".1e", "-1.0e-05"),
    ],
)
def test_a_number_that_is_rounded_to_zero_has_no_sign(value: float, form: str, text: str) -> None:
    assert number_text(value, form) == text


def test_columns_that_do_not_fit_are_printed_below_with_the_names_repeated() -> None:
    columns = [*names("name"), *(TableColumn(f"column {number}") for number in range(6))]
    table = Table("numbers", columns, [("first", *(f"{number}23456.789" for number in range(6)))])
    narrow = shown(40, lambda console: print_table(table, console))
    assert narrow.count("numbers") == 1
    assert narrow.count("first") == narrow.count("name") == 3
    assert all(f"{number}23456.789" in narrow for number in range(6))
    assert shown(200, lambda console: print_table(table, console)).count("first") == 1


def test_a_long_name_wraps_and_numbers_do_not() -> None:
    rows = [("a-very-long-name-of-a-model-that-nobody-could-print", 92.47)]
    table = Table("", [*names("name"), TableColumn("value", form=".2f")], rows)
    narrow = shown(30, lambda console: print_table(table, console))
    assert "92.47" in narrow
    assert max(map(len, narrow.splitlines())) <= 30


@pytest.mark.parametrize("width", [60, 80, 120])
def test_a_long_word_is_broken_behind_its_punctuation(width: int) -> None:
    key = "model.attention.operation.kind=scalable_softmax"
    rows = [("A CELL OF A SWEEP WITH A LONG NAME", f"{key} and more", 92.47)]
    table = Table("", [*names("cell", "changes"), TableColumn("value", form=".2f")], rows)
    drawn = shown(width, lambda console: print_table(table, console))
    pieces = [piece for line in drawn.splitlines()[3:] for piece in re.findall(r"\S+", line) if piece in key]
    assert "".join(pieces) == key
    assert all(piece[-1] in "._=" for piece in pieces[:-1])
    assert max(map(len, drawn.splitlines())) <= width


@pytest.mark.parametrize("width", [80, 120])
def test_a_claim_is_beside_its_verdict_with_the_evidence_below(width: int) -> None:
    text = (
        "K biases: the sink rate of bias and first token together is above that of softmax's first token at all seeds"
    )
    evidence = "The check is that of table_4.k_biases_take_the_sink, where the claim is counted. " * 3
    claim = JudgedClaim(id="b", experiment="a", text=text, verdict="inconclusive", evidence=evidence)
    lines = shown(width, lambda console: print_claims([claim], console)).splitlines()[1:]
    assert lines[0].startswith("inconclusive  K biases: the sink rate of bias")
    below = [line for line in lines if not line[: len("inconclusive")].strip()]
    assert " ".join(" ".join(below).split()).endswith(evidence.strip())
    assert sum(line.count("table_4.k_biases_take_the_sink") for line in lines) == 3
    assert max(map(len, lines)) <= width


def test_visible_rates_have_columns_only_if_they_were_measured() -> None:
    assert "visible rate" not in shown(100, lambda console: print_measurement(made_measurement(), console, full=True))
    assert "visible rate" in shown(100, lambda console: print_measurement(large(), console, full=True))


def test_every_column_of_the_positions_is_labelled() -> None:
    table = measurement_tables(large())[0]
    assert [f"{column.title}, {column.unit}" for column in table.columns] == [
        "position, ",
        *(f"sink rate, %, eps {eps}" for eps in ("0.3", "0.2", "0.1")),
        *(f"visible rate, %, eps {eps}" for eps in ("0.3", "0.2", "0.1")),
        "importance, times uniform",
    ]
    assert [row[0] for row in table.rows] == [*"123456", "highest of 7 to 32", "bias"]


def test_markdown_escapes_the_markup_of_its_cells() -> None:
    columns = [*names("a_b"), TableColumn("value", form=",.1f")]
    table = Table("title", columns, [("<b>|", TableCell(1234.5, "[1, 2]")), ("x\ny", None)])
    assert markdown(table).splitlines() == [
        "| a\\_b | value |",
        "| --- | --- |",
        "| &lt;b&gt;\\| | 1,234.5 \\[1, 2\\] |",
        "| x<br>y | – |",
    ]


def test_columns_without_values_are_left_out_and_infinity_is_printed() -> None:
    columns = [*names("name"), TableColumn("nothing"), TableColumn("ratio", form=".2f")]
    table = Table("", columns, [("a", None, float("inf")), ("b", TableCell(None), 0.5)]).without_empty_columns()
    assert [[text for text, _ in row] for row in table.cells()] == [["a", "∞"], ["b", "0.50"]]
