"""Every variant of the catalogue as a model of transformers: the same logits, saved again, with a cache and without."""

from pathlib import Path
from typing import Any

import pytest
import torch
from closeness import assert_close
from exported_models import CONTEXT, shaken_run, some_tokens, tokenizer_in
from sampling import one_in
from transformers import AutoModelForCausalLM

from sinklab.errors import InputError
from sinklab.export.directory import write_directory
from sinklab.interventions import VARIANTS
from sinklab.model.transformer import Transformer
from sinklab.survey.api import measure

ALONE = {  # variants that transformers has: the default, also with settings outside the model, sink logits, patterns
    **dict.fromkeys(
        ["softmax", "bos", "fixed_token", "random_tokens", "init_torch", "multi_query"], "LlamaForCausalLM"
    ),
    **dict.fromkeys(["weight_decay_half", "sgd", "muon", "schedule_flat", "schedule_wsd"], "LlamaForCausalLM"),
    **dict.fromkeys(
        ["hidden_z", "tweo", "norm_single", "embedding_projected", "outlier_safe", "ortho_adam"], "LlamaForCausalLM"
    ),
    "heads_1": "LlamaForCausalLM",
    "sink_logit": "GraniteSWAForCausalLM",
    "off_by_one": "GraniteSWAForCausalLM",
    "pattern_windows": "SmolLM3ForCausalLM",
    "pattern_nope": "SmolLM3ForCausalLM",
}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    tokenizer_in(folder)
    return folder / "tokenizer.json"


def exported(variant: str, tokenizer: Path, folder: Path, **sizes: Any) -> tuple[Transformer, Any]:
    """Our model and transformers'."""
    run = shaken_run(variant, tokenizer, **sizes)
    write_directory(run, [], folder)
    return run.model, AutoModelForCausalLM.from_pretrained(folder)


@pytest.mark.parametrize("variant", one_in(5, VARIANTS))
@torch.no_grad()
def test_every_variant_has_the_same_logits_in_transformers(variant: str, tokenizer: Path, tmp_path: Path) -> None:
    ours, theirs = exported(variant, tokenizer, tmp_path / "one")
    assert type(theirs).__name__ == ALONE.get(variant, "SinklabForCausalLM")
    tokens_BT = some_tokens(length=20)
    logits_BTV = theirs(tokens_BT).logits
    assert_close(logits_BTV, ours(tokens_BT))

    theirs.save_pretrained(tmp_path / "two")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "two")
    assert torch.equal(again(tokens_BT).logits, logits_BTV)

    with_cache, without = (
        theirs.generate(some_tokens(length=3), max_new_tokens=14, do_sample=False, use_cache=cache, eos_token_id=None)
        for cache in (True, False)
    )
    assert with_cache.shape == (2, 17)
    assert torch.equal(with_cache, without)


@torch.no_grad()
def test_a_sink_logit_in_a_window_loads_as_an_architecture_of_transformers(tokenizer: Path, tmp_path: Path) -> None:
    run = shaken_run("sink_logit", tokenizer, attention={"mask": {"kind": "window", "width": 5}}, kv_heads=2)
    assert write_directory(run, [], tmp_path / "one").architecture == "GraniteSWAForCausalLM"
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "one")
    assert_close(theirs(some_tokens(length=20)).logits, run.model(some_tokens(length=20)))


WINDOW = {"kind": "window", "width": 5}
GEMMA = {"norm": {"placement": "sandwich", "qk_norm": True}, "ffn": "geglu"}
PATTERNS: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt-oss' attention": (
        "GraniteSWAForCausalLM",
        {"attention": {"mask": WINDOW, "bias": "sink_logit"}, "pattern": {"every": 2, "mask": "causal"}},
    ),
    "sink logits with no positions and another base": (
        "GraniteSWAForCausalLM",
        {
            "attention": {"mask": WINDOW, "bias": "off_by_one"},
            "position": "none",
            "pattern": {"every": 2, "bias": "sink_logit", "position": {"kind": "rotary", "theta": 100.0}},
        },
    ),
    "SmolLM3 with windows": (
        "SmolLM3ForCausalLM",
        {"attention": {"mask": WINDOW}, "pattern": {"every": 3, "first": 1, "mask": "causal", "position": "none"}},
    ),
    "Gemma 3": (
        "Gemma3ForCausalLM",
        {
            **GEMMA,
            "attention": {"mask": WINDOW},
            "pattern": {"every": 3, "mask": "causal", "position": {"kind": "rotary", "theta": 1e6}},
        },
    ),
    "Gemma 3 without a window": ("Gemma3ForCausalLM", GEMMA),
    "Gemma 3 with a base that is not that of the windows": (
        "SinklabForCausalLM",
        {**GEMMA, "pattern": {"every": 3, "position": {"kind": "rotary", "theta": 1e6}}},
    ),
    "a pattern of every layer": (
        "LlamaForCausalLM",
        {"attention": {"mask": WINDOW}, "pattern": {"every": 1, "mask": "causal"}},
    ),
    "windows of two widths": (
        "SinklabForCausalLM",
        {"attention": {"mask": WINDOW}, "pattern": {"every": 2, "mask": {"kind": "window", "width": 9}}},
    ),
    "two bases without a window": (
        "SinklabForCausalLM",
        {"pattern": {"every": 2, "position": {"kind": "rotary", "theta": 1e6}}},
    ),
    "sink logits in windows alone": (
        "SinklabForCausalLM",
        {
            "attention": {"mask": WINDOW, "bias": "sink_logit"},
            "pattern": {"every": 2, "mask": "causal", "bias": "none"},
        },
    ),
}


@pytest.mark.parametrize("name", PATTERNS)
@torch.no_grad()
def test_a_pattern_loads_as_the_architecture_that_has_it(name: str, tokenizer: Path, tmp_path: Path) -> None:
    architecture, changed = PATTERNS[name]
    run = shaken_run("softmax", tokenizer, layers=3, kv_heads=2, **changed)
    for norm in (part for part_name, part in run.model.named_parameters() if part_name.endswith("norm.weight")):
        norm.copy_(torch.linspace(0.5, 1.5, len(norm)))
    assert write_directory(run, [], tmp_path / "one").architecture == architecture
    theirs: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "one")
    assert_close(theirs(some_tokens(length=20)).logits, run.model(some_tokens(length=20)))
    ours, measured = (measure(model, some_tokens(length=20)) for model in (run.model, theirs))
    assert_close(torch.tensor(measured.importance), torch.tensor(ours.importance))
    assert measured.sink_rate_bias == ours.sink_rate_bias
    prompt = some_tokens(length=3)
    generated = [
        theirs.generate(prompt, max_new_tokens=14, do_sample=False, use_cache=cache, eos_token_id=None)
        for cache in (True, False)
    ]
    assert torch.equal(*generated)


@pytest.mark.parametrize("variant", ["prefix", "document", "sink_token"])
@torch.no_grad()
def test_beams_are_the_same_with_a_cache_as_without(variant: str, tokenizer: Path, tmp_path: Path) -> None:
    _, theirs = exported(variant, tokenizer, tmp_path / "one")
    with_cache, without = (
        theirs.generate(some_tokens(), max_new_tokens=10, do_sample=False, num_beams=3, use_cache=cache)
        for cache in (True, False)
    )
    assert torch.equal(with_cache, without)


def test_the_loss_counts_the_same_targets_as_a_run(tokenizer: Path, tmp_path: Path) -> None:
    ours, theirs = exported("prefix", tokenizer, tmp_path / "one")
    tokens_BT = some_tokens(length=20)
    assert_close(theirs(tokens_BT, labels=tokens_BT).loss, ours.loss(tokens_BT))


def test_unsupported_arguments_are_refused(tokenizer: Path, tmp_path: Path) -> None:
    _, theirs = exported("k_biases", tokenizer, tmp_path / "one")
    tokens_BT = some_tokens()
    with pytest.raises(InputError, match="output_attentions"):
        theirs(tokens_BT, output_attentions=True)
    with pytest.raises(InputError, match="pass input_ids"):
        theirs(tokens_BT, inputs_embeds=torch.zeros(2, 6, 32))


@torch.no_grad()
def test_a_cache_of_another_model_is_refused(tokenizer: Path, tmp_path: Path) -> None:
    _, ours = exported("k_biases", tokenizer, tmp_path / "one")
    _, llama = exported("softmax", tokenizer, tmp_path / "two")
    cache = llama(some_tokens(), use_cache=True).past_key_values
    with pytest.raises(InputError, match="the KV cache is a DynamicCache filled by another model"):
        ours(some_tokens(), past_key_values=cache)


@torch.no_grad()
def test_learned_positions_limit_the_length_of_exported_models(tokenizer: Path, tmp_path: Path) -> None:
    _, theirs = exported("position_learnable", tokenizer, tmp_path / "one")
    with pytest.raises(InputError, match=f"learned positional embeddings end at model.context {CONTEXT}"):
        theirs.generate(some_tokens(), max_new_tokens=CONTEXT, do_sample=False, eos_token_id=None)


def test_a_model_of_sinklab_is_trained_with_gradient_checkpointing_and_loads_as_sdpa(
    tokenizer: Path, tmp_path: Path
) -> None:
    _, model = exported("value_residual", tokenizer, tmp_path)
    tokens, gradients = some_tokens(), []
    for again in (False, True):
        if again:
            model.gradient_checkpointing_enable()
        model.train().zero_grad()
        model(tokens, labels=tokens).loss.backward()
        gradients.append([one.grad.clone() for one in model.parameters() if one.grad is not None])
    assert model.transformer.gradient_checkpointing
    for one, other in zip(*gradients, strict=True):
        assert_close(one, other)
    sdpa = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="sdpa").eval()
    torch.testing.assert_close(sdpa(tokens).logits, model.eval()(tokens).logits)
