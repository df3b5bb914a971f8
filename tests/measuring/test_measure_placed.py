"""Models whose weights are quantised or offloaded to disk."""

import copy
import json
import shutil
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from closeness import assert_same_rates
from trained_run import trained_run

import sinklab
from sinklab.errors import InputError
from sinklab.measuring.options import Options, Request
from sinklab.model.huggingface import SinklabConfig, SinklabForCausalLM
from sinklab.models.huggingface.loading import LoadIn, Loading, load_pretrained
from sinklab.opening import open_model
from sinklab.survey.measure import measure_model

TOKENS = torch.randint(3, 64, (6, 12), generator=torch.Generator().manual_seed(1))
FAMILIES: dict[str, Any] = {
    "llama": lambda: hf.LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        initializer_range=0.3,
    ),
    "gptj": lambda: hf.GPTJConfig(  # read from its own matrices
        vocab_size=64, n_embd=32, n_layer=2, n_head=4, n_positions=64, rotary_dim=4, initializer_range=0.3
    ),
}


def _model(family: str) -> Any:
    torch.manual_seed(0)
    return hf.AutoModelForCausalLM.from_config(FAMILIES[family]()).eval()


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.filterwarnings("ignore")
def test_a_model_quantised_to_int8_is_measured(family: str) -> None:
    quantise = getattr(torch.ao.quantization, "quantize_dynamic", None)
    if quantise is None:
        pytest.skip("this version of PyTorch has no dynamic quantisation")
    model = _model(family)
    quantised = quantise(copy.deepcopy(model), {torch.nn.Linear}, dtype=torch.qint8)
    assert any(type(module).__module__.startswith("torch.ao.nn.quantized") for module in quantised.modules())
    exact, rough = sinklab.measure(model, TOKENS), sinklab.measure(quantised, TOKENS)
    assert rough.loss == pytest.approx(exact.loss, abs=0.1)
    assert 0 < abs(rough.importance - exact.importance).max() < 0.1


@pytest.mark.parametrize(("bits", "most"), [("8bit", 0.05), ("4bit", 0.5)])
@pytest.mark.filterwarnings("ignore")
def test_weights_are_quantised_while_they_are_loaded(data_dir: Path, tmp_path: Path, bits: LoadIn, most: float) -> None:
    pytest.importorskip("bitsandbytes", reason="needs bitsandbytes (extra quantised)")
    folder, request = str(data_dir / "models" / "TinyStories-656K"), Request(sequences=4, length=32)
    exact = measure_model(folder, None, request)
    rough = measure_model(folder, None, request, loading=Loading(load_in=bits))
    assert rough.loss == pytest.approx(exact.loss, abs=most)
    assert rough.loss != exact.loss
    assert "the weights are quantised (bitsandbytes); dtype is that of the other weights" in rough.notes


def test_quantising_a_quantised_checkpoint_or_a_run_while_loading_is_refused(data_dir: Path, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(data_dir / "models" / "TinyStories-656K", folder)
    config = json.loads((folder / "config.json").read_text("utf-8"))
    changed = config | {"quantization_config": {"quant_method": "torchao", "quant_type": "int8_weight_only"}}
    (folder / "config.json").write_text(json.dumps(changed), "utf-8")
    with pytest.raises(InputError, match=r"needs packages|quantised already"):
        load_pretrained(str(folder), Loading(load_in="4bit"))
    with pytest.raises(InputError, match="not for runs"):
        open_model(str(trained_run(tmp_path, {})[0]), Loading(load_in="8bit"))


@pytest.mark.filterwarnings("ignore")
def test_a_quantised_checkpoint_is_measured_and_the_notes_say_so(data_dir: Path, tmp_path: Path) -> None:
    configs = pytest.importorskip("torchao.quantization", reason="needs torchao (extra quantised)")
    pytest.importorskip("accelerate", reason="needs accelerate (extra quantised)")
    folder = str(data_dir / "models" / "TinyStories-656K")
    config = hf.TorchAoConfig(configs.Int8WeightOnlyConfig())
    hf.AutoModelForCausalLM.from_pretrained(folder, quantization_config=config).save_pretrained(tmp_path)
    tokenizer: Any = hf.AutoTokenizer.from_pretrained(folder)
    tokenizer.save_pretrained(tmp_path)
    request = Request(options=Options(inputs="random"), sequences=3, length=16)
    rough = measure_model(str(tmp_path), None, request)
    exact = measure_model(folder, None, request)
    assert rough.notes == ["the weights are quantised (torchao); dtype is that of the other weights"]
    assert 0 < abs(rough.importance - exact.importance).max() < 0.05


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.filterwarnings("ignore")
def test_a_model_offloaded_to_disk_is_measured(family: str, tmp_path: Path) -> None:
    accelerate = pytest.importorskip("accelerate", reason="needs accelerate (extra quantised)")
    model = _model(family)
    expected = sinklab.measure(model, TOKENS)
    offloaded = accelerate.disk_offload(model, str(tmp_path), execution_device=torch.device("cpu"))
    assert next(offloaded.parameters()).device.type == "meta"
    found = sinklab.measure(offloaded, TOKENS)
    assert_same_rates(found, expected.sink_rate)
    assert found.loss == pytest.approx(expected.loss, rel=1e-5)


@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.filterwarnings("ignore")
def test_a_sinklab_model_must_be_on_one_device(whole: bool, tmp_path: Path) -> None:
    accelerate = pytest.importorskip("accelerate", reason="needs accelerate (extra quantised)")
    recipe = {"layers": 2, "width": 16, "heads": 2, "vocab_size": 64, "attention": {"bias": {"kind": "k"}}}
    model: Any = SinklabForCausalLM(SinklabConfig(recipe)).eval()
    if whole:
        accelerate.disk_offload(model, str(tmp_path), execution_device=torch.device("cpu"))
    else:
        places = {"": "cpu", "transformer.blocks.1": "disk"}
        accelerate.dispatch_model(model, places, main_device="cpu", offload_dir=str(tmp_path), force_hooks=True)
    for use in (model, lambda tokens: sinklab.measure(model, tokens)):
        with pytest.raises(InputError, match="meta: load all of them onto one device, without device_map"):
            use(TOKENS)


def test_a_model_without_weights_is_refused() -> None:
    with torch.device("meta"):
        model: Any = hf.AutoModelForCausalLM.from_config(FAMILIES["llama"]())
    with pytest.raises(InputError, match="no weights"):
        sinklab.measure(model, TOKENS)
    with pytest.raises(InputError, match="no weights"), sinklab.probe(model):
        pass


def test_spreading_a_model_over_devices_needs_accelerate_and_says_so(data_dir: Path) -> None:
    folder = str(data_dir / "models" / "TinyStories-656K")
    request = Request(options=Options(inputs="random"), sequences=2, length=8)
    if find_spec("accelerate") is None:
        with pytest.raises(InputError, match=r"install the missing package.*[Aa]ccelerate"):
            measure_model(folder, None, request, loading=Loading(device="map"))
    else:
        placed = measure_model(folder, None, request, loading=Loading(device="map"))
        assert placed.sink_rate == measure_model(folder, None, request).sink_rate
