"""`sinklab.SinkCallback` in the Trainer of transformers."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from chats import exported, tuned_run
from tiny_models import tiny_model

import sinklab
from sinklab.errors import InputError

pytest.importorskip("accelerate", reason="the Trainer needs accelerate (extra sft)")

TOKENS = torch.randint(3, 300, (6, 20), generator=torch.Generator().manual_seed(1))


class Listening(hf.TrainerCallback):
    """Records the logs of evaluations."""

    def __init__(self) -> None:
        self.heard: list[dict[str, Any]] = []

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        if "eval_loss" in logs:
            self.heard.append(dict(logs))


def trainer_of(model: Any, folder: Path, callbacks: list[hf.TrainerCallback]) -> hf.Trainer:
    rows = [{"input_ids": row, "labels": row} for row in TOKENS]
    arguments = hf.TrainingArguments(
        str(folder),
        max_steps=2,
        learning_rate=1e-2,
        per_device_train_batch_size=2,
        eval_strategy="steps",
        eval_steps=1,
        eval_on_start=True,
        logging_steps=1,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
    )
    return hf.Trainer(model, arguments, train_dataset=rows, eval_dataset=rows, callbacks=callbacks)  # type: ignore[arg-type]


def test_every_evaluation_logs_the_sink_rate_and_norm_ratio_of_measure(tmp_path: Path) -> None:
    model = hf.AutoModelForCausalLM.from_pretrained(tiny_model(tmp_path / "model"))
    before = sinklab.measure(model, TOKENS, eps=0.07)
    callback = sinklab.SinkCallback(TOKENS, eps=0.07)
    trainer = trainer_of(model, tmp_path / "out", [callback])
    trainer.train()
    logged = [row for row in trainer.state.log_history if "eval_loss" in row]
    assert [row["step"] for row in logged] == [0, 1, 2]
    assert logged[0]["eval_sink_1"] == before.sink_rate[0]
    after = sinklab.measure(model, TOKENS, eps=0.07)
    assert callback.measurement is not None
    assert callback.measurement.sink_rate == after.sink_rate
    assert before.hidden_norm_ratio is not None
    assert logged[0]["eval_norm_ratio"] == max(before.hidden_norm_ratio)
    assert logged[2]["eval_norm_ratio"] != logged[0]["eval_norm_ratio"]
    assert "eval_sink_bias" not in logged[0]
    assert all("eval_sink_1" not in row for row in trainer.state.log_history if "eval_loss" not in row)
    assert trainer.evaluate()["eval_sink_1"] == after.sink_rate[0]
    assert not any("_hooks" in name and hooks for module in model.modules() for name, hooks in vars(module).items())


def test_earlier_callbacks_receive_the_sink_rate_only_after_goes_first(tmp_path: Path) -> None:
    model = hf.AutoModelForCausalLM.from_pretrained(tiny_model(tmp_path / "model"))
    padding = torch.ones_like(TOKENS)
    padding[0, :3] = 0
    listening, callback = Listening(), sinklab.SinkCallback({"input_ids": TOKENS, "attention_mask": padding}, eps=0.07)
    trainer = trainer_of(model, tmp_path / "out", [listening, callback])
    trainer.evaluate()
    assert "eval_sink_1" not in listening.heard[0]
    callback.goes_first(trainer)
    trainer.evaluate()
    padded = sinklab.measure(model, TOKENS, attention_mask=padding, eps=0.07)
    assert listening.heard[1]["eval_sink_1"] == padded.sink_rate[0]
    with pytest.raises(InputError, match="does not have this SinkCallback"):
        sinklab.SinkCallback(TOKENS).goes_first(trainer)


def test_the_callback_does_not_change_the_training_losses_of_an_exported_run(tmp_path: Path) -> None:
    run, _ = tuned_run(tmp_path / "plain", "sigmoid")
    model = hf.AutoModelForCausalLM.from_pretrained(exported(tmp_path, run))
    trainer = trainer_of(model, tmp_path / "out", [sinklab.SinkCallback(TOKENS.clamp(max=250))])
    trainer.train()
    with_it = [row["loss"] for row in trainer.state.log_history if "loss" in row]
    model = hf.AutoModelForCausalLM.from_pretrained(tmp_path / "exported")
    trainer = trainer_of(model, tmp_path / "other", [])
    trainer.train()
    assert with_it
    assert [row["loss"] for row in trainer.state.log_history if "loss" in row] == with_it


def test_tokens_that_are_not_integers_are_refused() -> None:
    with pytest.raises(InputError, match="expected integers"):
        sinklab.SinkCallback(torch.rand(2, 4))
