"""Models that cannot be loaded or measured: the message says what to do, and pickles are never opened."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from sinklab.device import pick_device
from sinklab.errors import InputError
from sinklab.measuring.options import Options, Request
from sinklab.models.huggingface.loading import load_pretrained, pick_dtype
from sinklab.survey.measure import measure_model


@pytest.fixture
def folder(data_dir: Path, tmp_path: Path) -> Path:
    """A writable copy of a real model."""
    return Path(shutil.copytree(data_dir / "models" / "TinyStories-656K", tmp_path / "model"))


def _edit(path: Path, **changes: object) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_a_missing_directory_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="nowhere is neither a directory nor"):
        load_pretrained(str(tmp_path / "nowhere"))


@pytest.mark.parametrize("name", ["~/model", "~nobody/model"])
def test_only_the_shell_expands_a_home_directory(name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    monkeypatch.setenv("HOME", str(tmp_path))
    with pytest.raises(InputError, match=f"{name} is neither a directory nor"):
        load_pretrained(name)


def test_a_directory_without_config_is_refused(folder: Path) -> None:
    (folder / "config.json").unlink()
    with pytest.raises(InputError, match=r"no config\.json"):
        load_pretrained(str(folder))


def test_a_directory_without_weights_is_refused(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    with pytest.raises(InputError, match=r"no weights: add its \.safetensors files"):
        load_pretrained(str(folder))


def test_pickled_weights_are_never_opened(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(InputError, match="a pickle file, which can run code and is never loaded"):
        load_pretrained(str(folder))


def test_damaged_weights_are_refused(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:1000])
    with pytest.raises(InputError, match=r"the weights of .* could not be loaded"):
        load_pretrained(str(folder))


def test_incomplete_weights_are_not_filled_up_with_random_ones(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(InputError, match=r"incomplete: 1 tensors are missing, such as model\.layers\.1\.mlp\.up_proj"):
        load_pretrained(str(folder))


def test_weights_without_a_place_in_the_model_are_ignored_and_the_notes_say_so(folder: Path, data_dir: Path) -> None:
    text = data_dir / "domains" / "tinystories.jsonl"
    before = measure_model(str(folder), text, Request(sequences=3, length=16))
    assert not any("ignored" in note for note in before.notes)
    weights = load_file(folder / "model.safetensors")
    extra = {"model.layers.7.mlp.up_proj.weight": torch.ones(2, 2), "model.norm.bias": torch.ones(3)}
    save_file({**weights, **extra}, folder / "model.safetensors", metadata={"format": "pt"})
    after = measure_model(str(folder), text, Request(sequences=3, length=16))
    [note] = [note for note in after.notes if "ignored" in note]
    assert note.startswith("2 tensors of the checkpoint were ignored, such as model.layers.7.mlp.up_proj.weight:")
    assert after.sink_rate == before.sink_rate


def test_a_missing_tokenizer_is_refused(folder: Path) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"):
        (folder / name).unlink()
    with pytest.raises(InputError, match=r"has no tokenizer: put the tokenizer files"):
        load_pretrained(str(folder))


def test_a_tokenizer_without_its_vocabulary_is_refused(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()
    with pytest.raises(InputError, match=r"only special tokens: its vocabulary is missing"):
        load_pretrained(str(folder))


def test_a_tokenizer_of_another_model_is_refused(folder: Path, data_dir: Path) -> None:
    for path in (data_dir / "tokenizers" / "gptneox").iterdir():
        shutil.copy(path, folder / path.name)
    with pytest.raises(InputError, match="the model has 2048 tokens: the tokenizer belongs to another model"):
        load_pretrained(str(folder))


def test_an_encoder_decoder_is_refused(folder: Path) -> None:
    (folder / "config.json").write_text(json.dumps({"model_type": "t5", "is_encoder_decoder": True}))
    with pytest.raises(InputError, match="encoder-decoder"):
        load_pretrained(str(folder))


def test_a_name_that_cannot_be_fetched_is_explained(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import huggingface_hub.constants as hub

    monkeypatch.setattr(hub, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(hub, "HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(InputError, match="model is not a directory here; for a model on the hub, check the name"):
        load_pretrained("nobody/no-such-model")


def test_remote_code_is_refused_and_not_run_by_default(folder: Path) -> None:
    ran = folder / "ran"
    (folder / "configuration_own.py").write_text(
        f"open({str(ran)!r}, 'w').close()\nfrom transformers import LlamaConfig\nclass OwnConfig(LlamaConfig): pass\n"
    )
    _edit(folder / "config.json", model_type="own", auto_map={"AutoConfig": "configuration_own.OwnConfig"})
    with pytest.raises(InputError, match="--trust-remote-code"):
        load_pretrained(str(folder))
    assert not ran.exists()


def test_a_length_beyond_the_context_is_refused(folder: Path, data_dir: Path) -> None:
    text = data_dir / "domains" / "tinystories.jsonl"
    with pytest.raises(InputError, match="use --length 512 or less"):
        measure_model(str(folder), text, Request(length=513))


def test_text_that_is_too_short_says_how_many_documents_are_usable(folder: Path, tmp_path: Path) -> None:
    text = tmp_path / "a.jsonl"
    text.write_text(json.dumps({"text": "One day, a little girl named Lily found a needle in her room."}))
    with pytest.raises(InputError, match="1 of its 1 documents"):
        measure_model(str(folder), text, Request(length=8, sequences=2))
    with pytest.raises(InputError, match="0 of its 1 documents"):
        measure_model(str(folder), text, Request(length=64, sequences=2))


@pytest.mark.parametrize("options", [{"eps": 0.0}, {"eps": 1.5}, {"batch_size": 0}])
def test_options_out_of_range_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(InputError):
        Options(inputs="random", **options)


@pytest.mark.parametrize(("sequences", "length"), [(0, 64), (100, 0)])
def test_no_sequences_and_empty_ones_are_refused(folder: Path, sequences: int, length: int) -> None:
    with pytest.raises(InputError):
        measure_model(str(folder), None, Request(options=Options(inputs="random"), sequences=sequences, length=length))


def test_unknown_dtypes_and_devices_are_refused() -> None:
    with pytest.raises(InputError, match="use one of auto, float32"):
        pick_dtype("float7")
    with pytest.raises(InputError, match="use auto, cpu, cuda or cuda:N"):
        pick_device("toaster")


def test_the_result_is_saved_where_it_is_asked_for(folder: Path, tmp_path: Path) -> None:
    measured = measure_model(
        str(folder), None, Request(options=Options(inputs="random"), sequences=3, length=8), out=tmp_path / "out"
    )
    document = json.loads((tmp_path / "out" / "measurement.json").read_text())
    assert document == measured.document()
    assert document["model"] == str(folder)
    assert document["seconds"] > 0


def test_code_of_the_model_that_was_not_run_is_noted(folder: Path) -> None:
    assert not any("auto_map" in note for note in load_pretrained(str(folder)).notes)
    _edit(folder / "config.json", auto_map={"AutoModelForCausalLM": "modeling_own.OwnForCausalLM"})
    (note,) = (note for note in load_pretrained(str(folder)).notes if "auto_map" in note)
    assert "which was not run: the model was loaded as transformers' LlamaForCausalLM" in note
