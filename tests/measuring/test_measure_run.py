"""A run directory is measured as it was trained: its tokenizer, its BOS, its data interventions."""

import io
from pathlib import Path
from typing import Any

import pytest
import torch
from closeness import assert_close, assert_same_rates
from rich.console import Console
from trained_run import LENGTH, trained_run

from sinklab.commands.results import print_measurement
from sinklab.data.corpora import documents
from sinklab.data.tokenizers import load_tokenizer
from sinklab.errors import InputError
from sinklab.measuring.inputs import random_tokens, repeated_tokens
from sinklab.measuring.measurement import Measurement
from sinklab.measuring.options import Inputs, Options, Request
from sinklab.opening import open_model
from sinklab.report.cells import progress_of
from sinklab.report.collect import collect
from sinklab.survey.api import measure
from sinklab.survey.measure import measure_model, read_tokens
from sinklab.train.run import load_run


def _by_hand(run: Path, text: Path, bos: bool, fixed: dict[int, int]) -> Measurement:
    """The expected measurement, with rows made one by one by the tokenizer that the data was prepared with."""
    prepared_data = next((run.parent / "cache").rglob("tokenizer_config.json")).parent
    tokenizer = load_tokenizer(str(prepared_data))
    rows = []
    for document in documents(str(text)):
        row = [*([tokenizer.bos_id] if bos else []), *tokenizer.encode_batch([document])[0]][:LENGTH]
        for position, token in fixed.items():
            row[position] = token
        if len(row) == LENGTH and len(rows) < 5:
            rows.append(row)
    return measure(load_run(run).model, torch.tensor(rows))


@pytest.mark.parametrize(
    ("data", "no_bos", "bos", "fixed"),
    [
        ({"bos": True}, False, True, {}),
        ({"bos": True}, True, False, {}),
        ({"bos": False}, False, False, {}),
        ({"fixed_token": {"token_id": 9, "positions": [1]}}, False, False, {1: 9}),
    ],
    ids=["bos", "bos left out", "no bos", "fixed token"],
)
def test_text_reaches_the_model_as_in_training(
    tmp_path: Path, data: dict[str, Any], no_bos: bool, bos: bool, fixed: dict[int, int]
) -> None:
    run, text = trained_run(tmp_path, data)
    measured = measure_model(str(run), text, Request(sequences=5, length=LENGTH, no_bos=no_bos))
    expected = _by_hand(run, text, bos, fixed)
    assert measured.bos is bos
    assert measured.loss == pytest.approx(expected.loss, rel=1e-5)
    assert_same_rates(measured, expected.sink_rate)
    assert_close(measured.importance, expected.importance)


@pytest.mark.parametrize("inputs", ["random", "repeat"])
def test_random_and_repeated_tokens_begin_with_bos_if_requested(tmp_path: Path, inputs: Inputs) -> None:
    run, _ = trained_run(tmp_path, {"bos": True})
    request = Request(options=Options(inputs=inputs), sequences=5, length=LENGTH, bos=True, seed=3)
    measured = measure_model(str(run), None, request)
    loaded = open_model(str(run))
    draw = random_tokens if inputs == "random" else repeated_tokens
    bare_NS = draw(loaded.vocabulary, sequences=5, length=LENGTH - 1, seed=3)
    tokens_NT = torch.nn.functional.pad(bare_NS, (1, 0), value=loaded.special[0])
    expected = measure(load_run(run).model, tokens_NT)
    assert measured.bos
    assert measured.loss == pytest.approx(expected.loss, rel=1e-5)
    assert_close(measured.importance, expected.importance)
    plain = request.model_copy(update={"bos": False})
    assert request.document() == {**plain.document(), "bos": True}
    assert not measure_model(str(run), None, plain).bos


@pytest.mark.parametrize("trained_with", [True, False])
def test_bos_can_be_forced_and_left_out_whatever_the_recipe_but_not_both(tmp_path: Path, trained_with: bool) -> None:
    run, text = trained_run(tmp_path, {"bos": trained_with})
    loaded = open_model(str(run))
    asked = Request(sequences=2, length=LENGTH)
    forced, bare = (asked.model_copy(update={name: True}) for name in ("bos", "no_bos"))
    for request, bos in ((asked, trained_with), (forced, True), (bare, False)):
        tokens_NT = read_tokens(loaded, text, request).tokens_NT
        assert (tokens_NT[:, 0] == loaded.bos_ids[0]).all() == bos
        assert measure_model(str(run), text, request).bos is bos
    with pytest.raises(InputError, match="--bos and --no-bos contradict each other"):
        measure_model(str(run), None, Request(options=Options(inputs="random"), bos=True, no_bos=True))


def test_lengths_of_a_run_are_measured_in_one_pass(tmp_path: Path) -> None:
    run, text = trained_run(tmp_path, {})
    measured = measure_model(
        str(run), text, Request(options=Options(lengths=(8, 4, LENGTH)), sequences=5, length=LENGTH)
    )
    cut = measure_model(str(run), text, Request(options=Options(lengths=(4,)), sequences=5, length=LENGTH))
    assert measured.sink_rate_by_length is not None
    assert list(measured.sink_rate_by_length) == ["4", "8"]
    assert cut.sink_rate_by_length == {"4": measured.sink_rate_by_length["4"]}


def test_a_length_beyond_the_runs_context_is_refused(tmp_path: Path) -> None:
    run, text = trained_run(tmp_path, {})
    with pytest.raises(InputError, match=f"use --length {LENGTH} or less"):
        measure_model(str(run), text, Request(length=LENGTH + 1))


def test_the_step_of_an_unfinished_run_is_recorded_and_shown(tmp_path: Path) -> None:
    run, text = trained_run(tmp_path, {})
    whole = measure_model(str(run), text, Request(sequences=4, length=8))
    assert (whole.step, whole.planned_steps, whole.notes) == (1, 1, [])
    assert Measurement.load(run).step == 1
    recipe = (run / "recipe.yaml").read_text()
    (run / "recipe.yaml").write_text(recipe.replace("  steps: 1\n", "  steps: 2200\n"))
    early = measure_model(str(run), text, Request(sequences=4, length=8))
    assert (early.step, early.planned_steps) == (1, 2200)
    assert early.notes == ["measured at step 1 of 2,200, before the end of training"]
    early.save(tmp_path / "early")
    assert Measurement.load(tmp_path / "early").document() == early.document()
    assert early.document()["step"] == 1
    console = io.StringIO()
    print_measurement(early, Console(file=console, width=400), full=True)
    assert "step 1 of 2,200, no BOS" in console.getvalue()
    data = collect([tmp_path / "early"])
    assert progress_of(data.runs) == "(step 1 of 2,200)"
    assert early.fed is not None
    assert [note for _, note in data.notes] == [early.fed.line(), *early.notes]


def test_a_model_that_is_no_run_has_no_step(data_dir: Path) -> None:
    model, text = data_dir / "models" / "TinyStories-656K", data_dir / "domains" / "tinystories.jsonl"
    measured = measure_model(str(model), text, Request(sequences=2, length=8))
    assert measured.step is None
    assert "step" not in measured.document()
