"""Models side by side: each as measured by itself, conversations through each one's own chat template."""

import json
import re
import shutil
from pathlib import Path

import pytest
from tiny_models import REFUSING, TEMPLATE, chat_file, text_file, tiny_model

from sinklab.errors import InputError
from sinklab.measuring.inputs import natural_text, token_rows
from sinklab.measuring.measurement import Measurement
from sinklab.measuring.options import Options, Request
from sinklab.opening import open_model
from sinklab.report.page import write_report
from sinklab.survey.measure import labels, measure_model
from sinklab.survey.suites import compare_models, named_models

SMALL = Request(options=Options(eps=(0.3, 0.2)), sequences=4, length=16)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A base model, and a chat model whose tokenizer writes BOS and has a template."""
    folder = tmp_path_factory.mktemp("compare")
    tiny_model(folder / "base")
    tiny_model(folder / "chat", "neox", seed=1, bos=True, template=TEMPLATE)
    return folder


def without_cost(measurement: Measurement) -> dict[str, object]:
    return {k: v for k, v in measurement.document().items() if k not in ("seconds", "peak_memory_mb")}


def test_a_comparison_has_the_numbers_of_measuring_each_model_alone(
    data_dir: Path, folder: Path, tmp_path: Path
) -> None:
    real, chat, text = str(data_dir / "models" / "TinyStories-656K"), str(folder / "chat"), data_dir / "chat"
    comparison = compare_models([real, chat], text, SMALL, out=tmp_path / "out")
    for name, model in (("TinyStories-656K", real), ("chat", chat)):
        alone = measure_model(model, text, Request(options=Options(eps=(0.3, 0.2)), sequences=4, length=16))
        assert without_cost(comparison.outcome.measured[name]) == without_cost(alone)
        assert Measurement.load(tmp_path / "out" / name).document() == comparison.outcome.measured[name].document()
    assert comparison.outcome.measured["chat"].notes == ["conversations were rendered with the model's chat template"]
    assert any("has no chat template" in note for note in comparison.outcome.measured["TinyStories-656K"].notes)

    document = json.loads((tmp_path / "out" / "comparison.json").read_text())
    assert document == comparison.document()
    rows = {(row["quantity"], row["unit"]): row for row in document["rows"]}
    for quantity, value in (
        (("Sink_1", "% of heads"), lambda m: m["sink_rate"][0]),
        (("Sink_1 at eps 0.2", "% of heads"), lambda m: m["sink_rates"]["0.2"][0]),
        (("loss", "nats/token"), lambda m: m["loss"]),
        (("bits per byte", "bits/byte"), lambda m: m["bits_per_byte"]),
        (("|h_1| over the rest", "largest block"), lambda m: max(m["hidden_norm_ratio"])),
    ):
        values = {name: value(measured) for name, measured in document["models"].items()}
        assert rows[quantity]["values"] == values
        difference = None if quantity[0] == "loss" else values["chat"] - values["TinyStories-656K"]
        assert rows[quantity]["differences"] == {"chat": difference}  # losses are per token of other tokens
    assert ("sink on the bias", "% of heads") not in rows


def test_the_report_has_the_comparison_and_its_layers(folder: Path, tmp_path: Path) -> None:
    text = text_file(tmp_path / "text.jsonl")
    compare_models([str(folder / "chat"), str(folder / "base")], text, SMALL, out=tmp_path / "out")
    page = write_report([tmp_path / "out"]).read_text(encoding="utf-8")
    assert "Comparison of models" in page
    assert "from chat" in page
    assert 'id="chart-comparison-layers-0-0"' in page
    assert "Two models side by side" in page


def test_a_comparison_continues_where_it_was_interrupted(folder: Path, tmp_path: Path) -> None:
    text, (base, chat) = text_file(tmp_path / "text.jsonl"), (str(folder / "base"), str(folder / "chat"))
    broken = shutil.copytree(chat, tmp_path / "broken")
    (broken / "model.safetensors").write_bytes(b"no weights")
    with pytest.raises(InputError, match=r"the weights of .*broken could not be loaded"):
        compare_models([base, str(broken)], text, SMALL, out=tmp_path / "out")
    first = (tmp_path / "out" / "base" / "measurement.json").read_bytes()
    compare_models([base, chat], text, SMALL, out=tmp_path / "out")
    assert (tmp_path / "out" / "base" / "measurement.json").read_bytes() == first


def test_a_model_that_is_not_there_is_refused_before_the_others_are_measured(folder: Path, tmp_path: Path) -> None:
    text, base, empty = text_file(tmp_path / "text.jsonl"), str(folder / "base"), tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(InputError, match="empty has no config"):
        compare_models([base, str(empty)], text, SMALL, out=tmp_path / "out")
    assert not (tmp_path / "out" / "base").exists()


def test_models_are_named_by_the_fewest_last_parts_of_paths_that_differ(tmp_path: Path) -> None:
    for path in ("a/m", "b/m"):
        (tmp_path / path).mkdir(parents=True)
    a, b = str(tmp_path / "a" / "m"), str(tmp_path / "b" / "m")
    assert list(labels([a, "org/name"])) == ["m", "org/name"]
    assert list(labels([a, b])) == ["a/m", "b/m"]
    assert list(labels(["../../etc/x", a])) == ["etc/x", "m"]
    with pytest.raises(InputError, match="is repeated"):
        labels([a, f"{b}/../../a/m"])
    with pytest.raises(InputError, match="two models or more"):
        compare_models([a], None, SMALL)


def rows_of(folder: Path, text: Path, **bos: bool) -> list[str]:
    model = open_model(str(folder))
    rows = natural_text(text, model.encoder(**bos), sequences=2, length=12, render=model.conversations().render)
    return [model.decode(row) for row in token_rows(rows).tolist()]


def test_a_chat_template_is_applied_and_its_bos_is_there_once(folder: Path, tmp_path: Path) -> None:
    text = chat_file(tmp_path / "chat.jsonl")
    for more in ({}, {"forced": True}):
        assert all(row.startswith("<s><user>") for row in rows_of(folder / "chat", text, **more))
    assert all(row.startswith("<user>") for row in rows_of(folder / "chat", text, bare=True))
    assert all(row.startswith("user: ") for row in rows_of(folder / "base", text))


@pytest.mark.parametrize(("no_bos", "bos"), [(False, True), (True, False)])
def test_the_result_says_whether_a_template_put_bos_first(tmp_path: Path, no_bos: bool, bos: bool) -> None:
    model, text = tiny_model(tmp_path / "m", template=TEMPLATE), chat_file(tmp_path / "chat.jsonl")
    assert measure_model(str(model), text, Request(sequences=2, length=12, no_bos=no_bos)).bos is bos


def test_a_conversation_that_the_template_refuses_is_named(tmp_path: Path) -> None:
    model, text = tiny_model(tmp_path / "m", template=REFUSING), chat_file(tmp_path / "chat.jsonl")
    with pytest.raises(InputError, match=r"chat\.jsonl, line 1: the chat template cannot render .*no system role"):
        measure_model(str(model), text, Request(sequences=2, length=12))


def test_models_have_the_names_that_are_given_and_runs_have_no_hash(folder: Path, tmp_path: Path) -> None:
    text, run = text_file(tmp_path / "text.jsonl"), tmp_path / "gate-0123456789abcdef"
    shutil.copytree(folder / "base", run)
    found = compare_models([str(run), f"tuned={folder / 'chat'}"], text, SMALL, out=tmp_path / "out")
    assert list(found.outcome.measured) == ["gate", "tuned"]
    page = write_report([tmp_path / "out"]).read_text(encoding="utf-8")
    assert "<h1>Attention sinks: gate and tuned</h1>" in page
    assert re.search(r'<p class="lead">In gate the first token is a sink in [\d.]+ % of the heads, in tuned in', page)
    assert page.index('id="importance-heads"') < page.index('id="comparison-layers-0"')
    with pytest.raises(InputError, match="same name"):
        compare_models([f"a={folder / 'chat'}", f"a={run}"], text, SMALL)
    twins = [tmp_path / f"gate-{digit * 16}" for digit in "ab"]
    assert list(named_models([str(shutil.copytree(run, one)) for one in twins])) == [one.name for one in twins]
