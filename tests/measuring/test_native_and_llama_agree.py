"""One model, three ways of measuring it: as it trains, from its directory, and as a plain Hugging Face Llama."""

import json
from pathlib import Path

import pytest
import torch
from closeness import assert_close, assert_same_rates
from own_models import llama_of

from sinklab.data.prepare import prepare, settings_of
from sinklab.measuring.measurement import Measurement
from sinklab.survey.api import measure
from sinklab.train.loop import Trainer
from sinklab.train.recipe import build_recipe
from sinklab.train.run import load_run, open_run

RECIPE = {
    "model": {"layers": 2, "width": 32, "heads": 4, "kv_heads": 2, "ffn_width": 48, "context": 48},
    "data": {"bos": True},
    "optim": {"lr": 1e-2},
    "schedule": {"warmup_steps": 4},
    "train": {"steps": 60, "batch_size": 8, "eval_sequences": 32},
    "metric": {"sequences": 30, "length": 48, "eps": 0.05},
}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, torch.Tensor]:
    """A finished run and the tokens it was measured on."""
    folder = tmp_path_factory.mktemp("same")
    text = folder / "text.jsonl"
    rows = ({"text": " ".join(f"w{(i * j) % 37} and {(i + j) % 11}" for j in range(40))} for i in range(400))
    text.write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = prepare(settings_of(str(text), "train:300", valid_fraction=0.2), folder / "tokens")
    trainer = Trainer(open_run(build_recipe(RECIPE), data, folder / "run"))
    trainer.train()
    return folder / "run", torch.cat(trainer.evaluator.batches)[:30, :48]


def assert_same(first: Measurement, second: Measurement) -> None:
    assert_close(first.importance, second.importance)
    assert_close(first.importance_first, second.importance_first)
    assert_same_rates(first, second.sink_rate)
    for name in ("hidden_norm", "key_norm", "value_norm"):
        assert_close(getattr(first, name), getattr(second, name))
    assert first.loss == pytest.approx(second.loss, rel=1e-5)
    assert first.hidden_norm_ratio == pytest.approx(second.hidden_norm_ratio, rel=1e-5)


def test_a_trained_model_and_its_llama_measure_the_same(trained: tuple[Path, torch.Tensor]) -> None:
    directory, tokens = trained
    model = load_run(directory).model
    ours = measure(model, tokens, eps=0.05)
    llama = measure(llama_of(model), tokens, eps=0.05)
    assert max(ours.sink_rate) > 0  # at this eps there is something to agree on
    assert_same(ours, llama)


def test_the_runs_own_measurement_is_that_of_its_directory(trained: tuple[Path, torch.Tensor]) -> None:
    directory, tokens = trained
    assert_same(Measurement.load(directory), measure(load_run(directory).model, tokens, eps=0.05))
