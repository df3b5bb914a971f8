"""`model.init_from`: a run that starts from a checkpoint has its outputs and is resumed bit for bit."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from closeness import assert_close
from conftest import Run, on_one_line
from same_run import assert_same_run
from tiny_gguf import as_gguf, llama, needed
from tiny_models import text_file, tiny_model
from torch import Tensor
from trained_run import trained_run
from transformers import AutoModelForCausalLM

from sinklab.data.prepare import prepared
from sinklab.errors import InputError
from sinklab.model.transformer import Transformer
from sinklab.train.loop import Trainer
from sinklab.train.recipe import Recipe, build_recipe, load_recipe
from sinklab.train.run import load_run, open_run
from sinklab.train.start import load_initial_weights, load_start, with_checkpoint_values

TRAINING: dict[str, Any] = {
    "train": {"steps": 4, "batch_size": 4, "eval_every": 2, "save_every": 2, "eval_sequences": 4, "precision": "fp32"},
    "metric": {"sequences": 4, "length": 16},
}
NEUTRAL: dict[str, dict[str, Any]] = {  # what is added
    "nothing": {},
    "a sink logit": {"attention": {"bias": "sink_logit"}},
    "a sink logit in one layer": {"pattern": {"every": 2, "bias": "sink_logit"}},
    "k biases": {"attention": {"bias": "k"}},
    "kv biases": {"attention": {"bias": "kv"}},
    "v biases": {"attention": {"bias": "v"}},
    "a gate per head": {"gate": "head"},
    "a gate per element": {"gate": "element"},
    "a gate of values": {"gate": "value"},
    "gates behind norms": {"norm": {"gate_rank": 3}},
    "projections of embeddings": {"embedding": "projected"},
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return llama(tmp_path_factory.mktemp("llama"), bos=True)


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return text_file(tmp_path_factory.mktemp("text") / "text.jsonl", documents=60)


def recipe_on(checkpoint: Path, model: dict[str, Any], text: Path | None = None) -> Recipe:
    data = {"data": {"source": str(text), "valid_fraction": 0.2}} if text else {}
    return with_checkpoint_values(
        build_recipe({"model": {"context": 32, "init_from": str(checkpoint), **model}, **TRAINING, **data})
    )


def begun(checkpoint: Path, model: dict[str, Any]) -> Transformer:
    made = Transformer(recipe_on(checkpoint, model).model).eval()
    load_initial_weights(made, load_start(str(checkpoint)), checkpoint / "tokenizer.json")
    return made


def some_tokens(length: int = 20) -> torch.Tensor:
    return torch.randint(320, (2, length), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("added", NEUTRAL)
@torch.no_grad()
def test_a_started_model_has_the_outputs_of_its_checkpoint_with_any_addition(added: str, checkpoint: Path) -> None:
    expected = AutoModelForCausalLM.from_pretrained(checkpoint)(some_tokens()).logits
    # A sink logit of -12 takes 6e-6 of a row of sum 1; everything else changes nothing but by rounding.
    tolerance = 5e-5 if added in ("a sink logit", "a sink logit in one layer", "k biases", "kv biases") else 1e-5
    assert_close(begun(checkpoint, NEUTRAL[added])(some_tokens()), expected, tolerance)


@torch.no_grad()
def test_gates_added_to_a_run_leave_its_outputs_unchanged_bit_for_bit(checkpoint: Path) -> None:
    plain, gated = (begun(checkpoint, NEUTRAL[added]) for added in ("nothing", "a gate per head"))
    assert torch.equal(plain(some_tokens()), gated(some_tokens()))


def test_an_added_gate_has_a_gradient(checkpoint: Path) -> None:
    model = begun(checkpoint, NEUTRAL["a gate per head"])
    model.loss(some_tokens()).backward()
    gradient = model.get_parameter("blocks.0.attention.output_gate.linear.weight").grad
    assert gradient is not None
    assert gradient.abs().sum() > 0


def test_sizes_and_tokenizer_that_a_recipe_leaves_open_are_the_checkpoints(checkpoint: Path) -> None:
    recipe = recipe_on(checkpoint, NEUTRAL["k biases"])
    model = recipe.model
    assert (model.layers, model.width, model.heads, model.kv_heads, model.ffn_width) == (2, 64, 4, 2, 96)
    assert model.context == 32
    assert recipe.data.tokenizer == str(checkpoint)
    assert model.attention.bias.kind == "k"
    assert model.attention.bias.start == -12
    assert with_checkpoint_values(recipe) == recipe


def test_the_start_value_of_an_added_bias_can_be_chosen(checkpoint: Path) -> None:
    model = begun(checkpoint, {"attention": {"bias": {"kind": "sink_logit", "start": -3.0}}})
    assert model.get_parameter("blocks.1.attention.core.bias.logit").tolist() == [-3.0] * 4


def test_a_started_run_is_resumed_bit_for_bit(checkpoint: Path, text: Path, tmp_path: Path) -> None:
    recipe = recipe_on(checkpoint, NEUTRAL["a sink logit"], text)
    dataset = prepared(recipe.data, tmp_path / "cache")
    Trainer(open_run(recipe, dataset, tmp_path / "whole")).train()
    seen: list[int] = []
    stopped = Trainer(
        open_run(recipe, dataset, tmp_path / "parts"),
        watch=lambda step, row: seen.append(step),
        should_stop=lambda: 3 in seen,
    )
    assert stopped.train().step == 3
    assert Trainer(open_run(recipe, dataset, tmp_path / "parts")).train().status == "done"
    assert_same_run(tmp_path / "whole", tmp_path / "parts")
    first = json.loads((tmp_path / "whole" / "metrics.jsonl").read_text().splitlines()[0])
    assert first["sink_rate_bias"] == 0


def test_a_run_can_start_from_a_run_directory(tmp_path: Path) -> None:
    there, text = trained_run(tmp_path, {})
    recipe = with_checkpoint_values(
        build_recipe(
            {
                "model": {"init_from": str(there), "gate": "element"},
                "data": {"source": str(text), "valid_fraction": 0.2},
                **TRAINING,
            }
        )
    )
    assert (recipe.model.width, recipe.model.context) == (16, 16)
    trainer = Trainer(open_run(recipe, prepared(recipe.data, tmp_path / "cache"), tmp_path / "out"))
    ours = trainer.model
    theirs = load_start(str(there))
    assert torch.equal(ours.embedding.weight, theirs.weights["embedding.weight"])
    expected = theirs.weights["blocks.0.attention.out.weight"] * 2
    assert torch.equal(ours.get_parameter("blocks.0.attention.out.weight"), expected)
    assert trainer.train().status == "done"


LEARNED_REST = {"operation": {"kind": "stick_breaking", "rest": "learned"}}


def continued(folder: Path, there: dict[str, Any], here: dict[str, Any]) -> tuple[Tensor, Tensor, list[str]]:
    """Logits of a run with large weights and of the model that starts from it, and the new tensors of the latter."""
    directory, _ = trained_run(folder, {}, there)
    before = load_run(directory).model
    with torch.no_grad():
        for parameter in before.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(len(parameter))))
    start = replace(load_start(str(directory)), weights=before.state_dict())
    recipe = with_checkpoint_values(
        build_recipe({"model": {"init_from": str(directory), **here}, "metric": {"length": 8}})
    )
    made = Transformer(recipe.model.model_copy(update={"init_sha256": start.sha256()})).eval()
    new = load_initial_weights(made, start, directory / "tokenizer.json")
    with torch.no_grad():
        return before(some_tokens(16) % 250), made(some_tokens(16) % 250), new


@pytest.mark.parametrize(
    ("there", "here"),
    [
        ({"attention": {"bias": "k"}}, {"attention": {"bias": "k"}}),
        ({"attention": {"bias": "k"}}, {"attention": {"bias": "kv"}}),
        ({"attention": {"bias": "k"}}, {"attention": {"bias": "k"}, "pattern": {"every": 2, "bias": "k"}}),
        ({"pattern": {"every": 2, "bias": "k"}}, {"pattern": {"every": 2, "bias": "k"}}),
        ({"attention": {"bias": "v"}}, {"attention": {"bias": "v"}, "gate": "value"}),
        ({"attention": {"bias": "kv"}}, {"attention": {"bias": "kv"}, "gate": "value"}),
        ({"attention": LEARNED_REST}, {"attention": LEARNED_REST, "gate": "value"}),
        ({"norm": {"eps": 0.1}}, {"norm": {"gate_rank": 3}}),
        ({"norm": {"placement": "sandwich", "head_norm": True}}, {"norm": {"gate_rank": 3}, "gate": "head"}),
        ({"position": {"kind": "rotary", "theta": 7.0}}, {"position": "rotary"}),
    ],
)
def test_a_continued_run_has_its_outputs_bit_for_bit(
    there: dict[str, Any], here: dict[str, Any], tmp_path: Path
) -> None:
    expected, found, _ = continued(tmp_path, there, here)
    assert torch.equal(found, expected)


def test_a_value_gate_before_a_norm_of_heads_changes_the_outputs_by_the_norms_eps(tmp_path: Path) -> None:
    expected, found, _ = continued(tmp_path, {"norm": {"head_norm": True, "eps": 1e-8}}, {"gate": "value"})
    assert_close(found, expected, 1e-4)


def test_norms_that_a_run_lacks_can_be_added(tmp_path: Path) -> None:
    *_, new = continued(tmp_path, {}, {"norm": {"qk_norm": True}})
    assert new == [f"blocks.{i}.attention.{part}_norm.weight" for i in (0, 1) for part in ("k", "q")]


def test_the_hash_covers_the_weights_of_a_start_and_not_their_path(checkpoint: Path, tmp_path: Path) -> None:
    shutil.copytree(checkpoint, tmp_path / "copy")
    shutil.copytree(checkpoint, tmp_path / "other")
    model = AutoModelForCausalLM.from_pretrained(checkpoint)
    with torch.no_grad():
        model.model.norm.weight[0] += 1
    model.save_pretrained(tmp_path / "other")
    here, copy, other = (
        recipe_on(path, {}).content_hash("d") for path in (checkpoint, tmp_path / "copy", tmp_path / "other")
    )
    assert here == copy
    assert other != here
    scratch = build_recipe(
        {"model": recipe_on(checkpoint, {}).model.model_dump(exclude={"init_from", "init_sha256"}), **TRAINING}
    )
    assert scratch.content_hash("d") != here


def test_the_keys_of_a_start_keep_earlier_hashes() -> None:
    before = {"k": "c84f02767c36cf2e", "kv": "7414608d881ecfa2", "sink_logit": "e9d860ebd563696f"}
    for bias, known in before.items():
        assert load_recipe("tiny-128", [f"model.attention.bias={bias}"]).content_hash("d") == known
        begun_elsewhere = load_recipe("tiny-128", [f"model.attention.bias={{kind: {bias}, start: -3}}"])
        assert begun_elsewhere.content_hash("d") != known


def test_a_gguf_file_gives_the_weights_of_its_directory_as_a_start(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    needed()
    monkeypatch.setenv("SINKLAB_CACHE", str(tmp_path / "cache"))
    path = as_gguf(checkpoint, tmp_path / "tiny.gguf")
    from_file, from_directory = (load_start(str(place)).weights for place in (path, checkpoint))
    assert from_file.keys() == from_directory.keys()
    for name, tensor in from_file.items():
        assert_close(tensor, from_directory[name], what=name)


def test_invalid_starts_are_refused_with_the_reason(checkpoint: Path, text: Path, run: Run, tmp_path: Path) -> None:
    command = on_one_line(run)
    (tmp_path / "recipe.yaml").write_text(
        f"data: {{source: {text}, valid_fraction: 0.2}}\nmetric: {{length: 16, sequences: 4}}\n"
    )
    other = tiny_model(tmp_path / "gpt2")
    for changes, said in (
        (["model.init_from=nowhere/at/all"], "nowhere/at/all is neither a directory nor"),
        ([f"model.init_from={other}"], "is a gpt2 model: use a Llama, or a sinklab run"),
        (
            [f"model.init_from={checkpoint}", "model.layers=3", "model.ffn_width=7"],
            "model.layers is 3 instead of 2, model.ffn_width is 7 instead of 96. Remove these keys",
        ),
        ([f"model.init_from={checkpoint}", "model.ffn=relu"], "the architectures differ"),
        (
            [
                f"model.init_from={checkpoint}",
                "model.attention.operation=elu_kernel",
                "model.attention.bias={kind: kv, start: 0}",
            ],
            "a kernel without logits",
        ),
        (
            [f"model.init_from={checkpoint}", "data.tokenizer=train:300"],
            "another tokenizer than that of model.init_from",
        ),
        (
            [
                f"model.init_from={checkpoint}",
                "model.init_sha256=abc",
                "model.layers=2",
                "model.width=64",
                "model.heads=4",
                "model.ffn_width=96",
            ],
            "have changed: their hash differs",
        ),
    ):
        sets = [part for change in changes for part in ("--set", change)]
        status, out, err = command("train", tmp_path / "recipe.yaml", *sets, "--out", tmp_path / "out")
        assert (status, out) == (2, "")
        assert said in err
    assert not (tmp_path / "out").exists()


def test_the_cells_of_an_experiment_start_from_the_checkpoint(
    checkpoint: Path, text: Path, run: Run, tmp_path: Path
) -> None:
    recipe = {
        "model": {"init_from": str(checkpoint), "context": 32},
        "data": {"source": str(text), "valid_fraction": 0.2},
        **TRAINING,
    }
    (tmp_path / "base.yaml").write_text(yaml.safe_dump(recipe))
    experiment = {
        "id": "continued_here",
        "title": "A sink logit in a trained model",
        "base": {"tiny": str(tmp_path / "base.yaml")},
        "cells": {"plain": {}, "logit": {"model": {"attention": {"bias": "sink_logit"}}}},
        "claims": [
            {
                "id": "harmless",
                "text": "The logit costs nothing",
                "check": {"is": "equal", "value": "valid_loss", "cell": "logit", "to": "plain", "margin": 5.0},
            }
        ],
    }
    (tmp_path / "experiment.yaml").write_text(yaml.safe_dump(experiment))
    out = tmp_path / "out"
    status, _, err = on_one_line(run)("reproduce", tmp_path / "experiment.yaml", "--seeds", "1", "--out", out)
    assert status == 0, err
    assert "Loading weights" not in err
    begun = {
        load_recipe(str(path), []).name: json.loads((path.parent / "metrics.jsonl").read_text().splitlines()[0])
        for path in out.glob("*/recipe.yaml")
    }
    assert begun["logit"]["step"] == 0
    assert begun["logit"]["valid_loss"] == pytest.approx(begun["plain"]["valid_loss"], rel=1e-4)


def test_a_recipe_without_the_hash_of_its_weights_is_refused(checkpoint: Path) -> None:
    model = Transformer(recipe_on(checkpoint, {}).model.model_copy(update={"init_sha256": None}))
    with pytest.raises(InputError, match=r"but no model\.init_sha256"):
        load_initial_weights(model, load_start(str(checkpoint)), checkpoint / "tokenizer.json")


def test_a_llama_with_scaled_frequencies_is_refused(checkpoint: Path, tmp_path: Path) -> None:
    shutil.copytree(checkpoint, tmp_path / "scaled")
    config = json.loads((tmp_path / "scaled" / "config.json").read_text())
    config["rope_parameters"] = {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}
    (tmp_path / "scaled" / "config.json").write_text(json.dumps(config))
    with pytest.raises(InputError, match="rope_type is linear"):
        load_start(str(tmp_path / "scaled"))
