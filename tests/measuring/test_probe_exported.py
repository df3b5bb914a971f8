"""`sinklab.probe` on exported models, compared with the formulas on explicit matrices, one sequence at a time."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from closeness import assert_close
from exported_models import shaken_run, some_tokens, tokenizer_in
from independent_core import formula
from own_models import own_model, own_tokens
from sampling import one_in
from torch import Tensor

import sinklab
from sinklab.errors import SinklabError
from sinklab.export.directory import write_directory
from sinklab.interventions import VARIANTS
from sinklab.measuring.records import View
from sinklab.model.huggingface import SinklabConfig, SinklabForCausalLM

HOW: dict[str, Any] = {"max_new_tokens": 7, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
TOGETHER = {
    "a sink token behind a prefix": {"attention": {"bias": "sink_token", "mask": {"kind": "prefix", "length": 5}}},
    "documents behind registers": {
        "attention": {"bias": {"kind": "sink_token", "count": 2}, "mask": "document"},
    },
    "stick-breaking with a rest behind a sink token": {
        "attention": {"operation": "stick_breaking", "bias": "sink_token"},
        "position": "none",
    },
    "linear layers under alibi in a window": {
        "mixer": {"kind": "gated_delta", "every": 2},
        "position": "alibi",
        "attention": {"mask": {"kind": "window", "width": 4}},
    },
}
ATTENTION = [name for name, variant in VARIANTS.items() if "attention" in str(variant.overlay)]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    tokenizer_in(folder)
    return folder / "tokenizer.json"


def exported(name: str, tokenizer: Path) -> Any:
    run = shaken_run(name, tokenizer) if name in VARIANTS else shaken_run("softmax", tokenizer, **TOGETHER[name])
    model = SinklabForCausalLM(SinklabConfig(run.model.config.model_dump(mode="json"), bos_token_id=299)).eval()
    model.transformer.load_state_dict(run.model.state_dict())
    return model


@torch.no_grad()
def expected(model: Any, row: Tensor) -> list[tuple[Tensor, Tensor | None]]:
    """alpha (H, T) of every core and the share of its biases (H,), from the matrices that the papers' formulas give."""
    exact = copy.deepcopy(model.transformer).double()
    cores, seen = [block.attention.core for block in exact.blocks if hasattr(block.attention, "core")], []
    for core in cores:
        core.register_forward_hook(lambda _, args, __: seen.append(args))
    exact(row[None])
    found = []
    for core, args in zip(cores, seen, strict=True):
        matrix = formula(core, *args[:5])[1][0].abs()
        matrix = (matrix / matrix.sum(-1, keepdim=True)).nan_to_num()
        T = len(row)
        beside, tokens = matrix[:, -T:, :-T], matrix[:, -T:, -T:]  # rows of leading tokens do not count
        alpha = torch.stack([tokens[:, k:, k].mean(1) for k in range(T)], 1)
        found.append((alpha, beside.sum(-1).mean(1) if beside.shape[-1] else None))
    return found


def check(model: Any, watch: Any, rows: list[Tensor]) -> None:
    """The records are those of each row alone, and 0 past its end."""
    for number, row in enumerate(rows):
        layers = expected(model, row)
        assert len(watch.layers) == len(layers)
        for layer, (alpha, bias) in zip(watch.layers, layers, strict=True):
            assert_close(layer.importance_BHT[number, :, : len(row)], alpha, 1e-4, f"importance of {number}")
            assert not layer.importance_BHT[number, :, len(row) :].any()
            assert (layer.bias_BH is None) == (bias is None)
            if bias is not None:
                assert_close(layer.bias_BH[number], bias, 1e-4, f"share of the bias of {number}")


@pytest.mark.parametrize("name", one_in(4, [*ATTENTION, *TOGETHER]))
@torch.no_grad()
def test_the_records_of_a_forward_pass_equal_the_formulas(name: str, tokenizer: Path) -> None:
    model, rows = exported(name, tokenizer), list(some_tokens(3, 9))
    rows[1][3] = 0
    with sinklab.probe(model) as watch:
        logits = model(torch.stack(rows)).logits
    assert torch.equal(logits, model(torch.stack(rows)).logits)
    check(model, watch, rows)


@pytest.mark.parametrize("name", one_in(4, [*ATTENTION, *TOGETHER]))
@torch.no_grad()
def test_a_padded_batch_is_recorded_while_it_is_generated(name: str, tokenizer: Path) -> None:
    model, tokens_BT = exported(name, tokenizer), some_tokens(3, 6)
    mask_BT = torch.tensor([[1] * 6, [0] * 4 + [1] * 2, [0] * 1 + [1] * 5])
    with sinklab.probe(model) as watch:
        text_BT = model.generate(tokens_BT, attention_mask=mask_BT, **HOW)
    check(model, watch, [row[start:-1] for row, start in zip(text_BT, (0, 4, 1), strict=True)])


@pytest.mark.parametrize("name", ["registers", "prefix", "sink_logit", "a sink token behind a prefix"])
@torch.no_grad()
def test_padding_on_either_side_is_in_no_record(name: str, tokenizer: Path) -> None:
    model, tokens_BT = exported(name, tokenizer), some_tokens(3, 9)
    mask_BT = torch.tensor([[1] * 4 + [0] * 5, [0] * 2 + [1] * 6 + [0], [0] * 3 + [1] * 6])
    with sinklab.probe(model) as watch:
        model(tokens_BT, attention_mask=mask_BT)
    check(model, watch, [row[keep.bool()] for row, keep in zip(tokens_BT, mask_BT, strict=True)])


@torch.no_grad()
def test_batches_add_up_and_each_register_is_recorded_separately(tokenizer: Path) -> None:
    model, tokens_BT = exported("registers", tokenizer), some_tokens(4, 9)
    with sinklab.probe(model) as watch:
        model(tokens_BT[:2])
        model(tokens_BT[2:])
    check(model, watch, list(tokens_BT))
    measured = sinklab.measure(model, tokens_BT)
    assert measured.importance_registers is not None
    for number, layer in enumerate(watch.layers):
        assert layer.registers_BHN is not None
        assert layer.bias_BH is not None
        assert_close(layer.registers_BHN.mean(0), measured.importance_registers[number])
        assert_close(layer.importance_BHT.mean(0), measured.importance[number])
        assert_close(layer.registers_BHN.sum(-1), layer.bias_BH)


@torch.no_grad()
def test_raw_row_sums_are_recorded_where_they_are_not_one(tokenizer: Path) -> None:
    model, tokens_BT = exported("sigmoid", tokenizer), some_tokens(2, 9)
    with sinklab.probe(model) as watch:
        model(tokens_BT[:, :5], use_cache=False)
        model(tokens_BT, use_cache=False)  # the same sequences, once more and longer
    core = model.double().transformer.blocks[0].attention.core
    seen: list[Any] = []
    core.register_forward_hook(lambda _, args, __: seen.append(args))
    model(tokens_BT)
    assert_close(watch.layers[0].row_sums_BH, formula(core, *seen[0][:5])[1].sum(-1).mean(-1))


def test_a_model_trains_under_a_probe_as_without(tokenizer: Path) -> None:
    model, tokens_BT = exported("k_biases", tokenizer), some_tokens(2, 9)
    model(tokens_BT, labels=tokens_BT).loss.backward()
    gradients = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    model.zero_grad()
    with sinklab.probe(model) as watch:
        model(tokens_BT, labels=tokens_BT).loss.backward()
        assert not watch.layers[0].importance_BHT.requires_grad
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter.grad, gradients[name]), name
    assert not any("_hooks" in name and hooks for module in model.modules() for name, hooks in vars(module).items())
    assert "generate" not in vars(model)


def test_measuring_inside_a_probe_is_not_recorded(tokenizer: Path) -> None:
    model, tokens_BT = exported("k_biases", tokenizer), some_tokens(2, 9)
    with torch.no_grad(), sinklab.probe(model) as watch:
        model(tokens_BT)
        before = watch.layers[0].importance_BHT
        sinklab.measure(model, some_tokens(3, 8))
    assert torch.equal(watch.layers[0].importance_BHT, before)


@torch.no_grad()
def test_the_records_of_an_exported_llama_are_those_of_a_measurement_of_its_run(
    tokenizer: Path, tmp_path: Path
) -> None:
    run, tokens_BT = shaken_run("softmax", tokenizer), some_tokens(2, 9)
    write_directory(run, [], tmp_path / "llama")
    model = hf.AutoModelForCausalLM.from_pretrained(tmp_path / "llama")
    with sinklab.probe(model) as watch:
        model(tokens_BT)
    assert_close(watch.layers[0].importance_BHT.mean(0), sinklab.measure(run.model, tokens_BT).importance[0])


@torch.no_grad()
def test_a_cache_of_an_exported_model_that_was_changed_or_not_recorded_is_refused(tokenizer: Path) -> None:
    model, tokens_BT = exported("sink_token", tokenizer), some_tokens(3, 9)
    for change, says in (
        (lambda past: past.reorder_cache(torch.tensor([1, 0, 2])), "cached sequences were replaced or reordered"),
        (lambda past: past.batch_select_indices(torch.tensor([0, 1])), "cached sequences were replaced or reordered"),
        (lambda past: past.crop(5), "cropped to 5 of the 6 tokens"),
    ):
        with sinklab.probe(model):
            past = model(tokens_BT[:, :6], use_cache=True).past_key_values
            change(past)
            with pytest.raises(SinklabError, match=says):
                model(tokens_BT[: len(past.tokens_BT), 6:], past_key_values=past)
    past = model(tokens_BT[:, :6], use_cache=True).past_key_values
    with sinklab.probe(model), pytest.raises(SinklabError, match="before the first call"):
        model(tokens_BT[:, 6:], past_key_values=past)


@torch.no_grad()
def test_the_view_of_several_passes_is_the_widest_of_them() -> None:
    config = own_model("prefix").config  # a prefix of three tokens
    model = SinklabForCausalLM(SinklabConfig(config.model_dump(mode="json"))).eval()
    with sinklab.probe(model) as watch:
        for length in (2, 9, 1):
            model(own_tokens()[:, -length:])
    assert [layer.view for layer in watch.layers] == [View("prefix", 3)] * 2
