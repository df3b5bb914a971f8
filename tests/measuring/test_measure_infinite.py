"""Norm ratios where the norms of all later tokens are zero: infinite, null in JSON, and shown as ∞."""

import json
import math
from functools import partial
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from own_models import own_model, own_tokens
from pydantic import ValidationError
from rich.console import Console
from tiny_models import text_file

from sinklab.commands.results import print_comparison, print_end, print_measurement
from sinklab.data.prepare import prepared
from sinklab.experiments.summary import read_numbers
from sinklab.files import write_json
from sinklab.measuring.measurement import Measurement
from sinklab.model.config import ModelConfig
from sinklab.model.transformer import Transformer
from sinklab.report.page import write_report
from sinklab.survey.api import measure, sink_numbers
from sinklab.survey.measure import Outcome
from sinklab.survey.suites import Survey
from sinklab.train.loop import Trainer
from sinklab.train.recipe import build_recipe
from sinklab.train.run import open_run, read_history


@pytest.fixture(scope="module")
def measured() -> Measurement:
    """Measurement of a model whose embeddings are zero, except that of the first token of every sequence."""
    model, tokens = own_model("softmax"), own_tokens()
    tokens[:, 0], tokens[:, 1:] = 0, tokens[:, 1:].clamp(min=1)
    with torch.no_grad():
        model.embedding.weight[1:] = 0
    return measure(model, tokens, eps=0.3, details=True, model_name="zeros")


@pytest.fixture(scope="module")
def plain() -> Measurement:
    return measure(own_model("softmax"), own_tokens(), eps=0.3, details=True, model_name="plain")


def strict(path: Path) -> Any:
    """The content of a JSON file in which Infinity and NaN are errors."""

    def refuse(word: str) -> Any:
        raise AssertionError(f"{path} has {word}")

    return json.loads(path.read_text(), parse_constant=refuse)


def text_of(show: Any, *given: Any) -> str:
    printed = StringIO()
    show(*given, Console(file=printed, width=200))
    return printed.getvalue()


def test_a_ratio_over_zero_is_infinite_and_null_in_the_file(measured: Measurement, tmp_path: Path) -> None:
    hidden, keys, values = measured.hidden_norm_ratio, measured.key_norm_ratio, measured.value_norm_ratio
    assert hidden is not None and keys is not None and values is not None  # noqa: PT018
    assert hidden[0] == keys[0] == values[0] == math.inf
    assert all(map(math.isfinite, (*hidden[1:], keys[1], values[1])))
    measured.save(tmp_path)
    document = strict(tmp_path / "measurement.json")
    assert document["hidden_norm_ratio"] == [None, *hidden[1:]]
    assert document["value_norm_ratio"] == [None, values[1]]
    loaded = Measurement.load(tmp_path)
    assert loaded.hidden_norm_ratio == hidden
    assert loaded.document() == measured.document()
    assert loaded.details is not None
    assert np.isposinf(loaded.details.value_ratio[0]).all()  # type: ignore[index]


def test_closed_value_gates_give_a_measurement() -> None:
    """The gate of the first token's value is open, those of all others are closed in float32."""
    config, tokens = own_model("softmax").config, own_tokens()
    closed = Transformer(ModelConfig.model_validate(config.model_dump() | {"gate": {"kind": "value"}}))
    tokens[:, 0], tokens[:, 1:] = 0, tokens[:, 1:].clamp(min=1)
    with torch.no_grad():
        closed.embedding.weight.zero_()
        closed.embedding.weight[:, 1] = 1.0
        closed.embedding.weight[0] = torch.nn.functional.one_hot(torch.tensor(0), 32).float()
        for block in closed.blocks:
            attention: Any = block.attention
            attention.qkv.weight.zero_()
            attention.qkv.weight[-32:, :2] = torch.tensor([1.0, -1.0])
            attention.value_gate.weight.fill_(100.0)
            attention.value_gate.bias.zero_()
    found = measure(closed, tokens, eps=0.3)
    assert found.value_norm_ratio is not None
    assert found.value_norm_ratio[0] == math.inf


def test_only_norm_ratios_may_be_infinite_and_none_may_be_nan_or_negative(measured: Measurement) -> None:
    document = measured.document() | measured.arrays()
    for name, value in (("loss", math.inf), ("hidden_norm_ratio", [math.nan]), ("key_norm_ratio", [-1.0, 1.0])):
        with pytest.raises(ValidationError):
            Measurement.model_validate(document | {name: value})


def test_the_terminal_the_tables_and_the_report_show_an_infinite_ratio(
    measured: Measurement, plain: Measurement, tmp_path: Path
) -> None:
    assert "∞" in text_of(partial(print_measurement, full=True), measured)
    assert measured.columns("layers")["key_norm_ratio"][0] == math.inf
    assert "eval_norm_ratio" not in sink_numbers(measured)
    measured.save(tmp_path / "zeros")
    measured.to_csv(tmp_path / "layers.csv", "layers")
    assert "inf" in (tmp_path / "layers.csv").read_text()
    write_report([tmp_path / "zeros"], tmp_path / "report.html")
    page = (tmp_path / "report.html").read_text()
    assert "∞" in page
    assert "Infinite ratios (all other norms are zero) are omitted" in page
    assert "Infinity" not in page.split("<body")[1].split("<script")[0]


def test_a_comparison_names_the_models_with_an_infinite_ratio(
    measured: Measurement, plain: Measurement, tmp_path: Path
) -> None:
    for first, second in (("plain", "zeros"), ("zeros", "plain")):
        found = {"plain": plain, "zeros": measured}
        comparison = Survey("models", {"text": "text"}, Outcome({first: found[first], second: found[second]}))
        for name, one in comparison.outcome.measured.items():
            one.save(tmp_path / first / name)
        write_json(tmp_path / first / "comparison.json", comparison.document())
        rows = {row["quantity"]: row for row in strict(tmp_path / first / "comparison.json")["rows"]}
        row = rows["|h_1| over the rest"]
        assert plain.hidden_norm_ratio is not None
        assert row["values"] == {"plain": max(plain.hidden_norm_ratio), "zeros": None}
        assert (row["infinite"], row["differences"]) == (["zeros"], {second: None})
        assert rows["loss"]["infinite"] == []
        assert "∞" in text_of(print_comparison, comparison)
        write_report([tmp_path / first], tmp_path / first / "report.html")
        assert "∞" in (tmp_path / first / "report.html").read_text()


def test_a_run_records_an_infinite_ratio_of_its_evaluations(tmp_path: Path) -> None:
    recipe = build_recipe(
        {
            "model": {"layers": 2, "width": 16, "heads": 2, "ffn_width": 16, "context": 16},
            "data": {
                "source": str(text_file(tmp_path / "text.jsonl", documents=60)),
                "tokenizer": "train:300",
                "valid_fraction": 0.2,
                "bos": True,
            },
            "train": {"steps": 1, "batch_size": 4, "eval_sequences": 4},
            "metric": {"sequences": 4, "length": 8},
        }
    )
    out = tmp_path / "run"
    trainer = Trainer(open_run(recipe, prepared(recipe.data, tmp_path / "cache"), out))
    with torch.no_grad():
        bos = int(trainer.evaluator.batches[0][0, 0])
        trainer.model.embedding.weight[torch.arange(300) != bos] = 0  # type: ignore[union-attr,index,operator]
    trainer.train()
    before, after = (json.loads(line, parse_constant=pytest.fail) for line in (out / "metrics.jsonl").open())
    assert before["hidden_norm_ratio"][0] is None
    assert None not in after["hidden_norm_ratio"]
    first, last = read_history(out / "metrics.jsonl")
    assert first.largest_norm_ratio == math.inf
    assert last.largest_norm_ratio == max(after["hidden_norm_ratio"])
    numbers = read_numbers(out)
    assert (numbers.value("norm_untrained"), numbers.value("norm_lowest")) == (None, last.largest_norm_ratio)
    assert "largest norm" in text_of(print_end, out, recipe)
    write_report([out], tmp_path / "report.html")
