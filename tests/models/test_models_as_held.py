"""Models that are compiled, wrapped, without an LM head, with adapters or quantised."""

import json
import shutil
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from tiny_gguf import llama
from torch import Tensor, nn

import sinklab
from sinklab.errors import InputError
from sinklab.models.adapter import adapt
from sinklab.models.hooks import intercept
from sinklab.models.huggingface.loading import Loading, load_pretrained, pick_dtype
from sinklab.opening import open_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return llama(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def model(folder: Path) -> Any:
    return load_pretrained(str(folder)).model


@pytest.fixture(scope="module")
def tokens(model: Any) -> Tensor:
    return torch.randint(model.config.vocab_size, (4, 24), generator=torch.Generator().manual_seed(0))


def refused(graph: Any, inputs: Any) -> Any:
    raise AssertionError("a measurement compiled code, which takes long and warns")


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("forward", [False, True])
def test_a_model_compiled_in_place_is_measured_and_recorded_like_the_uncompiled_one(
    forward: bool, whole: bool, model: Any, folder: Path, tokens: Tensor
) -> None:
    compiled = load_pretrained(str(folder)).model
    for part in [compiled] if whole else compiled.model.layers:
        if forward:
            part.forward = torch.compile(part.forward, backend=refused, fullgraph=True)
        else:
            part.compile(backend=refused)
    assert_same(compiled, model, tokens)
    with sinklab.probe(compiled) as watch:
        logits = compiled(tokens).logits
    assert torch.equal(logits, model(tokens).logits)
    expected = torch.from_numpy(sinklab.measure(model, tokens).importance[0])
    torch.testing.assert_close(watch.layers[0].importance_BHT.mean(0), expected, rtol=1e-5, atol=1e-6)


def test_compiled_code_that_calls_a_model_runs_uncompiled_only_while_it_is_recorded(model: Any, tokens: Tensor) -> None:
    graphs, kernels = [], []

    def counted(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    def kernel(graph: Any, inputs: Any) -> Any:
        kernels.append(graph)
        return graph.forward

    step = torch.compile(lambda: model(tokens, use_cache=False).logits, backend=counted, fullgraph=True)
    doubled = torch.compile(lambda x: 2 * x, backend=kernel)
    monitors = [sinklab.monitor(model, every=2) for _ in range(2)]
    one, other = (monitor(0) for monitor in monitors)
    one.__enter__(), other.__enter__()
    expected = step()
    one.__exit__(None, None, None)  # callbacks of a Trainer end in the order in which they began
    step()
    other.__exit__(None, None, None)
    with sinklab.probe(model) as watch:
        step()
    assert not graphs
    assert monitors[0].numbers
    assert watch.layers
    with monitors[0](1):
        torch.testing.assert_close(step(), expected)
    assert len(graphs) == 1
    with sinklab.probe(model), intercept(adapt(model), compute=lambda layer: doubled(layer.output())):
        step()
    assert (len(graphs), len(kernels)) == (1, 1)
    step()
    assert len(graphs) == 1


def test_a_wrapped_model_is_measured_and_recorded_like_the_model_inside(model: Any, tokens: Tensor) -> None:
    compiled: Any = torch.compile(model, backend="eager")
    for form in (compiled, nn.DataParallel(model)):
        assert_same(form, model, tokens)
    with sinklab.probe(compiled) as watch:
        logits = compiled(tokens).logits
    assert torch.equal(logits, model(tokens).logits)
    assert len(watch.layers) == model.config.num_hidden_layers


def assert_same(form: Any, model: Any, tokens: Tensor) -> None:
    found, expected = sinklab.measure(form, tokens), sinklab.measure(model, tokens)
    assert (found.loss, found.sink_rate) == (expected.loss, expected.sink_rate)


def test_a_base_model_is_measured_without_a_loss(model: Any, tokens: Tensor) -> None:
    found, whole = sinklab.measure(model.base_model, tokens), sinklab.measure(model, tokens)
    assert found.loss is None
    assert any("no LM head" in note for note in found.notes)
    assert found.sink_rate == whole.sink_rate
    assert (found.importance == whole.importance).all()
    with pytest.raises(InputError, match="no LM head"):
        sinklab.measure(model.base_model, tokens, gradients=True)


def test_a_directory_of_a_base_model_is_measured_without_a_loss(model: Any, folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder, tmp_path / "base", ignore=shutil.ignore_patterns("*.safetensors", "config.json"))
    model.base_model.save_pretrained(tmp_path / "base")
    opened: Any = open_model(str(tmp_path / "base"))
    assert not opened.adapter.has_head
    assert torch.equal(opened.module.embed_tokens.weight, model.model.embed_tokens.weight)


def test_a_model_with_another_head_is_refused_by_name(model: Any, folder: Path, tokens: Tensor, tmp_path: Path) -> None:
    classifier: Any = hf.LlamaForSequenceClassification(model.config)
    with pytest.raises(InputError, match=r"LlamaForSequenceClassification, which has another head .*base_model"):
        sinklab.measure(classifier, tokens)
    assert sinklab.measure(classifier.base_model, tokens).loss is None
    shutil.copytree(folder, tmp_path / "other", ignore=shutil.ignore_patterns("*.safetensors", "config.json"))
    classifier.save_pretrained(tmp_path / "other")
    with pytest.raises(InputError, match="LlamaForSequenceClassification, which has another head"):
        load_pretrained(str(tmp_path / "other"))


def test_return_dict_and_attn_implementation_in_a_config_do_not_change_a_measurement(folder: Path, tokens: Tensor,
                                                                         tmp_path: Path) -> None:  # fmt: skip
    expected = sinklab.measure(load_pretrained(str(folder)).model, tokens)
    for name, settings in (("tuple", {"return_dict": False}), ("flash", {"attn_implementation": "flash_attention_2"})):
        shutil.copytree(folder, tmp_path / name)
        config = tmp_path / name / "config.json"
        config.write_text(json.dumps(json.loads(config.read_text()) | settings))
        found = sinklab.measure(load_pretrained(str(tmp_path / name)).model, tokens)
        assert (found.loss, found.sink_rate) == (expected.loss, expected.sink_rate)


def test_common_names_of_dtypes_are_accepted() -> None:
    names = {"fp16": torch.float16, "torch.float16": torch.float16, "half": torch.float16, "BF16": torch.bfloat16,
             "torch.bfloat16": torch.bfloat16, "fp32": torch.float32, "float": torch.float32}  # fmt: skip
    assert {name: pick_dtype(name) for name in names} == names
    with pytest.raises(InputError, match="int8 is unknown; use one of auto, float32"):
        pick_dtype("int8")


@pytest.mark.parametrize(
    ("method", "packages"), [("gptq", "optimum gptqmodel"), ("awq", "gptqmodel"), ("bitsandbytes", "bitsandbytes")]
)
def test_packages_that_quantised_weights_need_are_all_named(
    folder: Path, tmp_path: Path, method: str, packages: str
) -> None:
    if all(find_spec(package) for package in packages.split()):
        pytest.skip(f"{packages} is installed")
    shutil.copytree(folder, tmp_path / method)
    config = tmp_path / method / "config.json"
    more = {"quantization_config": {"quant_method": method, "bits": 4, "load_in_4bit": True}}
    config.write_text(json.dumps(json.loads(config.read_text()) | more))
    with pytest.raises(InputError, match=rf"quantised \({method}\).* pip install {packages}"):
        load_pretrained(str(tmp_path / method))


def test_an_adapter_is_refused_without_peft_and_applied_with_it(
    model: Any, folder: Path, tokens: Tensor, tmp_path: Path
) -> None:
    (tmp_path / "bare").mkdir()
    (tmp_path / "bare" / "adapter_config.json").write_text('{"base_model_name_or_path": null, "peft_type": "LORA"}')
    with pytest.raises(InputError, match=r"has no adapter_config\.json: pass the directory of a PEFT adapter"):
        load_pretrained(str(folder), Loading(adapters=(str(folder),)))
    try:
        import peft
    except ImportError:
        with pytest.raises(InputError, match="needs the package peft"):
            load_pretrained(str(tmp_path / "bare"))
        with pytest.raises(InputError, match="needs the package peft"):
            load_pretrained(str(folder), Loading(adapters=("mine",)))
        return
    with pytest.raises(InputError, match="names no base model"):
        load_pretrained(str(tmp_path / "bare"))
    torch.manual_seed(0)
    lora = peft.LoraConfig(r=4, lora_alpha=64, target_modules=["q_proj", "k_proj"], init_lora_weights=False)
    adapted: Any = peft.get_peft_model(load_pretrained(str(folder)).model, lora)
    expected = sinklab.measure(adapted, tokens)
    assert expected.loss != sinklab.measure(model, tokens).loss
    shutil.copytree(folder, tmp_path / "both")
    adapted.save_pretrained(tmp_path / "both")
    adapted.peft_config["default"].base_model_name_or_path = str(folder)
    adapted.save_pretrained(tmp_path / "alone")
    alone = str(tmp_path / "alone")
    for name, loading in ((alone, Loading()), (str(tmp_path / "both"), Loading()),
                          (str(folder), Loading(adapters=(alone,)))):  # fmt: skip
        opened: Any = open_model(name, loading)
        found = sinklab.measure(opened.module, tokens)
        assert found.loss == pytest.approx(expected.loss, rel=1e-6)
        assert any("is applied (lora, rank 4, on k_proj, q_proj)" in note for note in opened.notes)
    twice: Any = open_model(str(folder), Loading(adapters=(alone, alone)))
    merged: Any = adapted.merge_and_unload()
    once = load_pretrained(str(folder)).model.state_dict()
    with torch.no_grad():  # two adapters add their changes
        for name, weight in merged.named_parameters():
            weight.add_(weight - once[name])
    assert sinklab.measure(twice.module, tokens).loss == pytest.approx(sinklab.measure(merged, tokens).loss, rel=1e-5)
