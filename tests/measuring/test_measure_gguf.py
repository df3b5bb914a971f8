"""Models of .gguf files are measured as the models that they were made from; unusable files are refused."""

import json
import os
import shutil
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers as hf
from tiny_gguf import as_gguf, llama, needed
from tiny_models import TEMPLATE, chat_file, text_file

import sinklab
from sinklab.errors import InputError, install_command
from sinklab.measuring.options import Options, Request
from sinklab.models.huggingface import gguf as gguf_files
from sinklab.models.huggingface.loading import Loading, load_pretrained
from sinklab.survey.measure import measure_model
from sinklab.survey.suites import compare_models, measure_domains

SHAPE: dict[str, Any] = {"sequences": 4, "length": 24}
SMALL = Request(**SHAPE)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model as a directory."""
    needed()
    return llama(tmp_path_factory.mktemp("model"), bos=True, template=TEMPLATE)


@pytest.fixture(scope="module")
def exact(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model as a file of float32 numbers."""
    return as_gguf(model, tmp_path_factory.mktemp("gguf") / "tiny.gguf")


@pytest.fixture
def text(tmp_path: Path) -> Path:
    return text_file(tmp_path / "text.jsonl")


def test_a_file_is_measured_as_the_model_it_was_made_from(model: Path, exact: Path, text: Path) -> None:
    there, here = (
        measure_model(str(place), text, Request(options=Options(details=True), **SHAPE)) for place in (model, exact)
    )
    assert here.bos
    assert there.bos
    assert here.sink_rate == there.sink_rate
    assert here.loss == pytest.approx(there.loss, rel=1e-5)
    np.testing.assert_allclose(here.importance, there.importance, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(*(m.details.cosine for m in (here, there)), rtol=1e-3, atol=1e-5)  # type: ignore[union-attr]
    assert here.notes == ["the weights were read from a gguf file (F32) and dequantised to float32"]


@pytest.mark.parametrize("kind", ["Q4_1", "Q8_0"])
def test_quantised_weights_are_dequantised_and_the_notes_name_the_quantisation(
    model: Path, text: Path, tmp_path: Path, kind: str
) -> None:
    rough = measure_model(str(as_gguf(model, tmp_path / "rough.gguf", kind)), text, Request(**SHAPE))
    exact = measure_model(str(model), text, Request(**SHAPE))
    assert rough.notes == [
        f"the weights were read from a gguf file ({kind}, some tensors F32) and dequantised to float32"
    ]
    assert rough.dtype == "float32"
    assert 0 < abs(rough.importance - exact.importance).max() < (0.2 if kind == "Q4_1" else 0.02)


def test_a_directory_with_one_gguf_file_is_measured_as_that_file(exact: Path, text: Path) -> None:
    by_folder, by_file = (measure_model(str(place), text, Request(**SHAPE)) for place in (exact.parent, exact))
    assert by_folder.loss == by_file.loss


def test_weights_are_dequantised_to_the_requested_dtype(exact: Path) -> None:
    loaded = load_pretrained(str(exact), Loading("float64"))
    assert loaded.model.dtype == torch.float64
    assert loaded.notes == ["the weights were read from a gguf file (F32) and dequantised to float64"]


def test_a_path_is_not_mistaken_for_a_file_of_the_same_name_in_the_current_directory(
    model: Path, exact: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    as_gguf(model, tmp_path / exact.name, "Q4_1")
    monkeypatch.chdir(tmp_path)
    there = measure_model(os.path.relpath(exact), text, Request(**SHAPE))
    here = measure_model(exact.name, text, Request(**SHAPE))
    assert there.loss == measure_model(str(exact), text, Request(**SHAPE)).loss != here.loss


def test_conversations_go_through_the_chat_template_of_the_file(model: Path, exact: Path, tmp_path: Path) -> None:
    chat = chat_file(tmp_path / "chat.jsonl")
    there, here = (measure_model(str(place), chat, Request(**SHAPE)) for place in (model, exact))
    assert "conversations were rendered with the model's chat template" in here.notes
    assert here.loss == pytest.approx(there.loss, rel=1e-5)


def test_files_are_compared_and_measured_by_domain(model: Path, exact: Path, text: Path, tmp_path: Path) -> None:
    out = tmp_path / "both"
    comparison = compare_models([str(model), str(exact)], text, SMALL, out=out)
    first, second = comparison.outcome.measured.values()
    assert first.sink_rate == second.sink_rate
    assert json.loads((out / exact.name / "request.json").read_text())["files"]

    text_file(tmp_path / "domains" / "a.jsonl")
    text_file(tmp_path / "domains" / "b.jsonl", seed=3)
    domains = measure_domains(str(exact), tmp_path / "domains", SMALL)
    assert list(domains.outcome.measured) == ["a", "b"]


def test_results_of_a_file_are_not_reused_for_another_file_of_the_same_name(
    model: Path, exact: Path, text: Path, tmp_path: Path
) -> None:
    path = Path(shutil.copy(exact, tmp_path / "m.gguf"))
    compare_models([str(model), str(path)], text, SMALL, out=tmp_path / "out")
    as_gguf(model, path, "Q8_0")
    with pytest.raises(InputError, match=r"other settings \(files"):
        compare_models([str(model), str(path)], text, SMALL, out=tmp_path / "out")


def test_a_dequantised_model_can_be_saved_and_loaded(exact: Path, tmp_path: Path) -> None:
    loaded = load_pretrained(str(exact))
    loaded.model.save_pretrained(tmp_path / "saved")
    again = hf.AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    for name, tensor in loaded.model.state_dict().items():
        assert torch.equal(again.state_dict()[name], tensor), name


def test_a_model_that_transformers_read_from_a_file_is_measured_in_python(exact: Path) -> None:
    model: Any = hf.AutoModelForCausalLM.from_pretrained(exact.parent, gguf_file=exact.name)
    tokens = torch.randint(3, 300, (3, 16), generator=torch.Generator().manual_seed(0))
    found = sinklab.measure(model, tokens)
    assert found.sink_rate == sinklab.measure(load_pretrained(str(exact)).model, tokens).sink_rate
    assert found.notes == ["the weights come from a gguf file and are dequantised"]


def test_unpacking_is_announced(exact: Path) -> None:
    said: list[str] = []
    load_pretrained(str(exact), Loading(say=said.append))
    assert said == ["dequantising tiny.gguf (F32), which takes a while"]


def test_the_header_is_parsed_once_and_no_progress_bar_of_transformers_is_shown(
    exact: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    gguf, parsed = needed(), list[Path]()
    own, parse = gguf.GGUFReader, gguf.GGUFReader.__init__
    monkeypatch.setattr(own, "__init__", lambda self, path, mode="r": (parsed.append(path), parse(self, path, mode))[1])
    load_pretrained(str(exact))
    assert parsed == [exact]
    assert gguf.GGUFReader is own
    assert "it/s]" not in capfd.readouterr().err


def test_an_architecture_that_transformers_does_not_read_is_named(model: Path, tmp_path: Path) -> None:
    path = as_gguf(model, tmp_path / "a.gguf", architecture="rwkv7")
    with pytest.raises(InputError, match=r"cannot read this gguf file of architecture 'rwkv7'"):
        load_pretrained(str(path))


def test_rotary_factors_that_transformers_leaves_out_are_in_the_notes(model: Path, tmp_path: Path) -> None:
    path = as_gguf(model, tmp_path / "a.gguf", scaled=True)
    assert any("rope_freqs" in note for note in load_pretrained(str(path)).notes)


def test_a_directory_with_several_gguf_files_is_refused_with_their_names(model: Path, tmp_path: Path) -> None:
    for name in ("a.gguf", "b.gguf"):
        as_gguf(model, tmp_path / name)
    with pytest.raises(InputError, match=r"2 \.gguf files \(a\.gguf, b\.gguf\): pass one of them, such as .*a\.gguf"):
        load_pretrained(str(tmp_path))


def test_a_split_model_is_loaded_whole_whichever_part_is_given(model: Path, exact: Path, tmp_path: Path) -> None:
    as_gguf(model, tmp_path / "a.gguf", tensors_in_a_file=8)
    parts = sorted(tmp_path.iterdir())
    assert [part.name for part in parts] == [f"a-{number:05}-of-00003.gguf" for number in (1, 2, 3)]
    whole = load_pretrained(str(exact)).model.state_dict()
    for named in (parts[0], parts[2], tmp_path):
        found = load_pretrained(str(named)).model.state_dict()
        assert all(torch.equal(found[name], weight) for name, weight in whole.items())
    parts[1].unlink()
    with pytest.raises(InputError, match=r"one of 3 parts of a model, and a-00002-of-00003\.gguf is missing"):
        load_pretrained(str(parts[0]))
    alone = parts[0].rename(tmp_path / "alone.gguf")
    with pytest.raises(InputError, match="one of the 3 parts of a model, whose files must have the names"):
        load_pretrained(str(alone))


@pytest.mark.parametrize("keep", [0, 3, 100, 10_000, -1000])
def test_a_file_that_is_cut_off_is_refused(exact: Path, tmp_path: Path, keep: int) -> None:
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(exact.read_bytes()[:keep])
    with pytest.raises(InputError, match=r"cut\.gguf is damaged, truncated, or not a gguf file"):
        load_pretrained(str(cut))


def test_a_damaged_file_is_loaded_or_refused_without_a_traceback(exact: Path, tmp_path: Path) -> None:
    whole, damaged = exact.read_bytes(), tmp_path / "damaged.gguf"
    generator = np.random.default_rng(0)
    for _ in range(12):
        data = bytearray(whole)
        for place in generator.integers(8, 2000, 20):
            data[place] = generator.integers(256)
        damaged.write_bytes(data)
        with suppress(InputError):  # anything else is a traceback
            load_pretrained(str(damaged))


def test_a_file_that_is_not_there_is_not_looked_for_on_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError, match=r"there is no file model\.gguf"):
        load_pretrained("model.gguf")


def test_a_model_that_does_not_fit_in_memory_is_refused_before_it_is_dequantised(
    exact: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gguf_files, "free_bytes", lambda device: 100_000)
    with pytest.raises(InputError, match=r"tiny\.gguf needs 0\.\d GB in float32, and 0\.0 GB of memory are free"):
        load_pretrained(str(exact))


@pytest.mark.parametrize("package", ["gguf", "accelerate"])
def test_the_command_that_installs_an_absent_package_is_named(exact: Path, package: str) -> None:
    code = f"import sys; sys.modules[{package!r}] = None; from sinklab.commands import app as cli; cli.main()"
    ran = subprocess.run(
        [sys.executable, "-c", code, "measure", str(exact), "--inputs", "random"], capture_output=True, text=True
    )
    assert ran.returncode == 2
    assert f"needs the package {package}, which is not installed" in ran.stderr
    assert install_command("gguf") in ran.stderr
