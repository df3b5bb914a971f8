"""A model at several steps of its training: the same numbers as one by one, in order, nothing lost if interrupted."""

import json
import shutil
from pathlib import Path

import pytest
import torch
import transformers as hf
from conftest import Run
from stops import Stops
from table_texts import table_texts
from tiny_models import text_file, tiny_model
from trained_run import LENGTH, trained_run

from sinklab.errors import InputError
from sinklab.measuring.measurement import Measurement
from sinklab.measuring.options import Options, Request
from sinklab.report.cells import cells_table, headline
from sinklab.report.collect import collect
from sinklab.report.figures import figures
from sinklab.report.page import write_report
from sinklab.survey.measure import measure_model
from sinklab.survey.suites import SuiteDocument, folders_without_step, measure_checkpoints, saved_models, step_in
from sinklab.train.run import load_run

SMALL = Request(options=Options(eps=(0.15,)), sequences=4, length=12)
STEPS = (100, 20, 3000)


@pytest.fixture(scope="module")
def training(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Output folder of a Hugging Face Trainer: checkpoints with growing weights, and other files."""
    folder = tmp_path_factory.mktemp("checkpoints") / "growing"
    first = tiny_model(folder / "first", "neox")
    model = hf.AutoModelForCausalLM.from_pretrained(first)
    for step in STEPS:
        shutil.copytree(first, folder / f"checkpoint-{step}")
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1.0 + step / 1000)
        model.save_pretrained(folder / f"checkpoint-{step}")
    (folder / "checkpoint-7").mkdir()  # torn: nothing in it
    first.rename(folder / "final")  # has no step
    return folder


def test_adapters_are_checkpoints_too(training: Path, text: Path, tmp_path: Path) -> None:
    for name in ("checkpoint-10", "checkpoint-5", "best"):
        (tmp_path / "listed" / name).mkdir(parents=True)
        (tmp_path / "listed" / name / "adapter_config.json").write_text("{}")
    assert [one.step for one in saved_models(str(tmp_path / "listed"), [])] == [5, 10]
    assert folders_without_step(tmp_path / "listed") == ["best"]

    peft = pytest.importorskip("peft", reason="needs peft")
    torch.manual_seed(0)
    base = training / "checkpoint-20"
    lora = peft.LoraConfig(r=4, lora_alpha=64, target_modules=["query_key_value"], init_lora_weights=False)
    adapted = peft.get_peft_model(hf.AutoModelForCausalLM.from_pretrained(base), lora)
    for step in (1, 2):
        with torch.no_grad():
            for parameter in adapted.parameters():
                parameter.mul_(1.5 if parameter.requires_grad else 1.0)
        adapted.save_pretrained(tmp_path / "lora" / f"checkpoint-{step}")
    measured = measure_checkpoints(str(tmp_path / "lora"), [], text, SMALL).outcome.measured
    assert [*measured] == ["step_1", "step_2"]
    for step in (1, 2):
        alone = measure_model(str(tmp_path / "lora" / f"checkpoint-{step}"), text, SMALL)
        assert (measured[f"step_{step}"].importance == alone.importance).all()


@pytest.fixture
def text(tmp_path: Path) -> Path:
    return text_file(tmp_path / "text.jsonl")


@pytest.mark.parametrize(
    ("name", "step"),
    [
        ("step1000", 1000),
        ("step0", 0),
        ("stage1-step12000-tokens51B", 12000),
        ("checkpoint-500", 500),
        ("step_00000100", 100),
        ("global_step40", 40),
        ("TinyLlama-1.1B-step-50K-105b", 50000),
        ("iter_0000200", 200),
        ("2000", 2000),
        ("2k", 2000),
        ("1.4b-step1000", 1000),
        ("1.1B-intermediate-step-50k", 50000),
        ("2024-01-01-step100", 100),
        ("3-step100", 100),
        ("2024-01-01", None),
        ("main", None),
        ("v1.0", None),
        ("footsteps9", None),
        ("3dmodel", None),
    ],
)
def test_the_step_is_read_from_the_names_that_public_runs_have(name: str, step: int | None) -> None:
    assert step_in(name) == (None if step is None else (step, "step"))


@pytest.mark.parametrize(
    ("name", "tokens"),
    [
        ("chck_100M", 100_000_000),
        ("chck_1M", 1_000_000),
        ("chck-2B", 2_000_000_000),
        ("ckpt_1.5B", 1_500_000_000),
        ("tokens3T", 3_000_000_000_000),
        ("model-7B", None),
        ("chck_100Mb", None),
    ],
)
def test_the_tokens_are_read_from_names_that_say_no_step(name: str, tokens: int | None) -> None:
    assert step_in(name) == (None if tokens is None else (tokens, "tokens"))


def test_a_curve_over_tokens_is_drawn_over_tokens(training: Path, text: Path, tmp_path: Path, run: Run) -> None:
    for new, old in (("chck_1M", 20), ("chck_100M", 3000)):
        shutil.copytree(training / f"checkpoint-{old}", tmp_path / "babylm" / new)
    few = ("--sequences", 2, "--length", 8, "--out", "out")
    status, out, err = run("measure", "babylm", "--by-checkpoint", "--text", text, *few)
    assert status == 0, err
    assert "tokens" in out
    assert "100,000,000" in out
    document = json.loads((tmp_path / "out" / "checkpoints.json").read_text())["checkpoints"]
    assert [(key, row["step"], row["unit"]) for key, row in document.items()] == [
        ("tokens_1000000", 1_000_000, "tokens"),
        ("tokens_100000000", 100_000_000, "tokens"),
    ]
    page = (tmp_path / "out" / "report.html").read_text(encoding="utf-8")
    assert "Training tokens" in page
    assert "Training step" not in page

    shutil.copytree(training / "checkpoint-20", tmp_path / "babylm" / "checkpoint-20")
    status, _, err = run("measure", "babylm", "--by-checkpoint", "--text", text, *few)
    assert status == 2
    assert "cannot share an axis" in " ".join(err.split())


def test_a_curve_has_the_numbers_of_measuring_each_checkpoint_alone(training: Path, text: Path, tmp_path: Path) -> None:
    found = measure_checkpoints(str(training), [], text, SMALL, out=tmp_path / "out")
    rows = found.document()["checkpoints"]
    assert [row.step for row in (SuiteDocument.model_validate(found.document()).checkpoints or {}).values()] == sorted(
        STEPS
    )
    for step in STEPS:
        alone = measure_model(str(training / f"checkpoint-{step}"), text, SMALL)
        row = rows[f"step_{step}"]
        assert (row["checkpoint"], row["sink_1"], row["loss"]) == (f"checkpoint-{step}", alone.sink_rate[0], alone.loss)
        assert row["uniform_ratio"] == alone.uniform_ratio[0]
        assert row["norm_ratio"] == max(alone.hidden_norm_ratio or [])
        assert sum(row["by_layer"]) / len(row["by_layer"]) == pytest.approx(row["sink_1"])
        assert Measurement.load(tmp_path / "out" / f"step_{step}").loss == alone.loss
    assert len({row["loss"] for row in rows.values()}) == 3
    fields = {"step", "unit", "checkpoint", "sink_1", "sink_bias", "uniform_ratio", "loss", "norm_ratio", "by_layer"}
    assert all(set(row) == fields for row in rows.values())


def test_an_interrupted_curve_continues_and_includes_later_checkpoints(
    training: Path, text: Path, tmp_path: Path
) -> None:
    folder = shutil.copytree(training, tmp_path / "growing")
    shutil.move(folder / "checkpoint-3000", tmp_path / "later")
    with pytest.raises(KeyboardInterrupt):
        measure_checkpoints(str(folder), [], text, SMALL, out=tmp_path / "out", observe=Stops(1))
    again = Stops()
    measure_checkpoints(str(folder), [], text, SMALL, out=tmp_path / "out", observe=again)
    assert again.started == ["step_100"]
    shutil.move(tmp_path / "later", folder / "checkpoint-3000")
    more = Stops()
    continued = measure_checkpoints(str(folder), [], text, SMALL, out=tmp_path / "out", observe=more)
    assert more.started == ["step_3000"]
    whole = measure_checkpoints(str(folder), [], text, SMALL)
    assert continued.document() == whole.document()
    assert json.loads((tmp_path / "out" / "checkpoints.json").read_text()) == continued.document()


def test_a_checkpoint_that_cannot_be_loaded_does_not_stop_the_others(
    training: Path, text: Path, tmp_path: Path
) -> None:
    folder = shutil.copytree(training, tmp_path / "growing")
    (folder / "checkpoint-20" / "model.safetensors").write_bytes(b"no weights")
    found = measure_checkpoints(str(folder), [], text, SMALL)
    assert list(found.outcome.measured) == ["step_100", "step_3000"]
    assert "could not be loaded" in found.outcome.failed["step_20"]


def test_the_curve_of_a_run_has_its_kept_checkpoints(tmp_path: Path) -> None:
    run, text = trained_run(tmp_path, {})
    kept = [saved.step for saved in saved_models(str(run), [])]
    assert kept[-1] == 1
    found = measure_checkpoints(str(run), [], text, Request(sequences=4, length=LENGTH), out=tmp_path / "out")
    assert [row["step"] for row in found.document()["checkpoints"].values()] == kept
    assert found.outcome.measured["step_1"].step == 1
    with pytest.raises(InputError, match="no valid checkpoint of step 9"):
        load_run(run, 9)


@pytest.mark.parametrize(
    ("folders", "revisions", "sentence"),
    [
        ([], [], "contains no checkpoints"),
        (["step1", "checkpoint-1"], [], "have the same step, 1"),
        (["step1"], ["step1", "step2"], "--revision step1 is a version"),
    ],
)
def test_folders_that_make_no_curve_are_refused(
    tmp_path: Path, folders: list[str], revisions: list[str], sentence: str
) -> None:
    for name in folders:
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").touch()
    with pytest.raises(InputError, match=sentence):
        saved_models(str(tmp_path), revisions)


@pytest.mark.parametrize(
    ("revisions", "sentence"),
    [
        (["step1", "main"], "--revision main does not contain its step"),
        ([], "select the checkpoints of a model on the hub"),
    ],
)
def test_names_on_the_hub_that_make_no_curve_are_refused(revisions: list[str], sentence: str) -> None:
    with pytest.raises(InputError, match=sentence):
        saved_models("nobody/tiny", revisions)


def test_the_report_has_the_curve_with_the_step_on_the_axis(training: Path, text: Path, tmp_path: Path) -> None:
    measure_checkpoints(str(training), [], text, SMALL, out=tmp_path / "out")
    data = collect([tmp_path / "out"])
    assert headline(data)[0].startswith("growing at three checkpoints")
    columns, rows = table_texts(cells_table(data))
    assert columns[0] == ("Checkpoint", "step or tokens")
    assert [row[0].split()[0] for row in rows] == ["step_20", "step_100", "step_3000"]
    drawn = {figure.key: figure for figure in figures(data)}
    curve = drawn["checkpoints-0"].charts[0].to_dict()["layer"][0]
    assert curve["encoding"]["x"]["field"] == "step"
    assert curve["encoding"]["x"]["scale"]["type"] == "symlog"
    assert [row["step"] for row in drawn["checkpoints-0"].charts[0].to_dict()["data"]["values"]] == sorted(STEPS)
    assert drawn["checkpoint-layers-0"].scale is not None
    page = write_report([tmp_path / "out"]).read_text(encoding="utf-8")
    assert 'id="chart-checkpoints-0-0"' in page
    assert "Emergence of the sink" in page


def test_the_command_ends_in_a_table_a_document_and_a_report(
    run: Run, training: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    call = ("measure", training, "--by-checkpoint", "--text", text, "--sequences", "3", "--length", "8", "--out", "out")
    status, out, err = run(*call)
    assert status == 0, err
    assert all(word in out for word in ("growing at", "checkpoints", "checkpoint-3000", "3,000", "Sink₁"))
    status, out, err = run(*call, "--json")
    assert status == 0, err
    assert json.loads(out) == json.loads((tmp_path / "out" / "checkpoints.json").read_text())
    assert "step_20: Sink_1" in err
    assert "(kept)" in err
    assert "not measured, because the name has no step or token count: final" in err
    assert (tmp_path / "out" / "report.html").is_file()


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--by-domain", "--text", "texts"], "mutually exclusive"),
        (["--format", "csv", "--out", "here"], "one MODEL"),
    ],
)
def test_options_that_do_not_go_with_checkpoints_are_refused(run: Run, options: list[str], sentence: str) -> None:
    status, _, err = run("measure", "x", "--by-checkpoint", *options)
    assert status == 2
    assert sentence in err
