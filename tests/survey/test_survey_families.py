"""The paper's models from local directories: measured beside published, one broken model, sizes without weights."""

import json
import shutil
from pathlib import Path

import pytest
import torch
import transformers as hf
from stops import Stops
from table_texts import table_texts
from tiny_models import text_file, tiny_model

from sinklab.errors import InputError
from sinklab.measuring.options import Options, Study
from sinklab.report.cells import cells_table
from sinklab.report.collect import collect
from sinklab.report.page import write_report
from sinklab.survey.families import measure_families, published, sizes
from sinklab.survey.open_models import families, models_of
from sinklab.survey.request import Request

PAPERS = Request(sequences=100, length=64)


@pytest.fixture(scope="module")
def models_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """GPT-2s, one of them by its whole name, and one that is broken."""
    folder = tmp_path_factory.mktemp("models")
    tiny_model(folder / "gpt2")
    shutil.copytree(folder / "gpt2", folder / "openai-community" / "gpt2-xl")
    (folder / "gpt2-large").mkdir()
    (folder / "gpt2-large" / "config.json").write_text("{")
    return folder


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return text_file(tmp_path_factory.mktemp("text") / "text.jsonl", documents=100, words=80)


def test_the_list_holds_the_papers_models_with_what_it_prints_of_them() -> None:
    known = {model.id: model for model in models_of(["all"])}
    assert len(known) == 32
    assert {name: len(models) for name, models in families().items()} == {
        "gpt2": 4,
        "llama2": 4,
        "llama3": 4,
        "mistral": 2,
        "pythia": 10,
        "opt": 6,
        "jamba": 2,
    }
    assert known["openai-community/gpt2-xl"].published == {"natural": 77.0, "random": 70.29, "repeat": 62.28}
    assert known["mistralai/Mistral-7B-Instruct-v0.1"].published == {"natural": 88.34}
    assert not known["EleutherAI/pythia-12b"].published


@pytest.mark.parametrize(
    ("name", "config"),
    [
        ("openai-community/gpt2", hf.GPT2Config()),
        (
            "EleutherAI/pythia-14m",
            hf.GPTNeoXConfig(
                hidden_size=128,
                num_hidden_layers=6,
                num_attention_heads=4,
                intermediate_size=512,
                vocab_size=50304,
            ),
        ),
        (
            "facebook/opt-125m",
            hf.OPTConfig(hidden_size=768, num_hidden_layers=12, ffn_dim=3072, num_attention_heads=12),
        ),
    ],
)
def test_listed_parameters_are_those_of_the_architecture(name: str, config: hf.PretrainedConfig) -> None:
    with torch.device("meta"):
        model = hf.AutoModelForCausalLM.from_config(config)
    listed = next(one for one in models_of(["all"]) if one.id == name)
    assert sum(p.numel() for p in model.parameters()) == listed.parameters


@pytest.mark.parametrize(
    ("request_", "value"),
    [
        (PAPERS, 77.0),
        (Request(options=Options(inputs="random")), 70.29),
        (Request(options=Options(eps=(0.2, 0.3))), 77.0),
        (Request(options=Options(eps=(0.2,))), None),
        (Request(sequences=99), None),
        (Request(length=128), None),
        (Request(no_bos=True), None),
        (Request(study=Study(swap_position=(1, 5))), None),
    ],
)
def test_a_published_number_stands_beside_the_same_setting_only(request_: Request, value: float | None) -> None:
    assert published(next(m for m in models_of(["gpt2"]) if m.id.endswith("xl")), request_) == value


def test_a_broken_and_a_missing_model_do_not_stop_the_others(models_dir: Path, text: Path, tmp_path: Path) -> None:
    done = measure_families(["gpt2"], text, PAPERS, models_dir=models_dir, out=tmp_path)
    document = json.loads((tmp_path / "families.json").read_text())
    assert document == done.document()
    assert list(document["models"]) == ["openai-community/gpt2", "openai-community/gpt2-xl"]
    assert set(document["failed"]) == {"openai-community/gpt2-medium", "openai-community/gpt2-large"}
    assert "put it there as gpt2-medium" in document["failed"]["openai-community/gpt2-medium"]
    assert "no weights" in document["failed"]["openai-community/gpt2-large"]
    xl = document["models"]["openai-community/gpt2-xl"]
    assert (xl["published"], xl["source"], xl["sink_1"]) == (77.0, "table 1", xl["measurement"]["sink_rate"][0])
    assert document["models"]["openai-community/gpt2"]["published"] is None

    columns, rows = table_texts(cells_table(collect([tmp_path])))
    place = [name for name, _ in columns].index("Published")
    assert [(row[0], row[place]) for row in rows] == [
        ("openai-community/gpt2", "–"),
        ("openai-community/gpt2-xl", "77.00"),
    ]
    page = write_report([tmp_path]).read_text(encoding="utf-8")
    assert 'id="chart-families-0-0"' in page
    assert "gpt2-large</b>: not measured" in page


def test_finished_models_are_not_measured_again(models_dir: Path, text: Path, tmp_path: Path) -> None:
    small = Request(sequences=2, length=8)
    with pytest.raises(KeyboardInterrupt):
        measure_families(["gpt2"], text, small, models_dir=models_dir, out=tmp_path, observe=Stops(1))
    first = (tmp_path / "openai-community" / "gpt2" / "measurement.json").read_bytes()
    again = Stops()
    there = tmp_path / "models"  # the finished one has been deleted since
    shutil.copytree(models_dir, there, ignore=shutil.ignore_patterns("gpt2"))
    measure_families(["gpt2"], text, small, models_dir=there, out=tmp_path, observe=again)
    assert again.started == [f"openai-community/gpt2-{size}" for size in ("medium", "large", "xl")]
    assert (tmp_path / "openai-community" / "gpt2" / "measurement.json").read_bytes() == first


def test_families_can_be_added_call_by_call_with_the_same_settings_only(
    models_dir: Path, text: Path, tmp_path: Path
) -> None:
    small = Request(sequences=2, length=8)
    measure_families(["gpt2"], text, small, models_dir=models_dir, out=tmp_path)
    both = measure_families(["pythia"], text, small, models_dir=models_dir, out=tmp_path)
    assert list(both.outcome.measured) == ["openai-community/gpt2", "openai-community/gpt2-xl"]
    assert len(both.outcome.failed) == 10
    with pytest.raises(InputError, match="gpt2 contains a measurement with other settings"):
        measure_families(["pythia"], text, Request(sequences=3, length=8), models_dir=models_dir, out=tmp_path)


def test_sizes_on_disk_are_those_of_the_files_that_are_there(models_dir: Path) -> None:
    found = {size.model: size for size in sizes(["gpt2"], PAPERS, models_dir=models_dir, dtype="bfloat16")}
    here, listed = found["openai-community/gpt2"], found["openai-community/gpt2-medium"]
    assert here.disk_gb == (models_dir / "gpt2" / "model.safetensors").stat().st_size / 1e9
    assert listed.parameters == 354823168
    assert listed.float32_gb == 2 * listed.bfloat16_gb == pytest.approx(1.419, abs=1e-3)
    assert listed.peak_gb > listed.bfloat16_gb + listed.disk_gb  # read from a float32 checkpoint
    assert found["openai-community/gpt2-xl"].published == 77.0


def test_an_unknown_family_is_answered_with_those_there_are(text: Path) -> None:
    with pytest.raises(InputError, match=r"unknown family 'bert'; choose from: gpt2, llama2, .*, jamba, all"):
        measure_families(["bert"], text, PAPERS)
