"""`sinklab sft` with trl: the loss falls, the sink rate equals that of `measure`, and tuning can be interrupted."""

import importlib.util
import json
import math
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from chats import MARKED, exported, sheep_chats, tuned_run, write_chats
from conftest import Run, on_one_line
from trained_run import trained_run

import sinklab
from sinklab.data.textfiles import read_conversations
from sinklab.errors import SinklabError
from sinklab.jobs import JobEvent, StepProgress
from sinklab.tuning.settings import TuneOptions
from sinklab.tuning.sft_dataset import ChatTemplate, TuneSources
from sinklab.tuning.tune import tune

if importlib.util.find_spec("trl") is None:
    pytest.skip("trl is not installed (extra sft)", allow_module_level=True)

SHORT = TuneOptions(lr=0.01, steps=6, batch_size=8, eval_every=4, save_every=2, sink_length=12)
QUICK = ("--steps", 6, "--lr", 0.01, "--batch-size", 8, "--eval-every", 3, "--save-every", 2, "--sink-length", 12)


def interrupt(event: JobEvent) -> None:
    """Sends SIGINT, as Ctrl-C does, after the third update."""
    if event.kind == "advanced" and event.done == 3:
        os.kill(os.getpid(), signal.SIGINT)


@pytest.mark.parametrize("operation", ["softmax", "sigmoid"])
def test_the_loss_falls_and_base_and_chat_are_compared(run: Run, tmp_path: Path, operation: str) -> None:
    model, chats = tuned_run(tmp_path / "base", operation)
    status, printed, err = run("sft", model, "--data", chats, "--out", "tuned", *QUICK)
    assert status == 0, err
    assert "base" in printed
    assert "chat" in printed
    found = json.loads((tmp_path / "tuned" / "sft.json").read_text())
    assert found["schema"] == 1
    assert found["chat"]["valid_loss"] < found["base"]["valid_loss"]
    updates = [json.loads(line) for line in (tmp_path / "tuned" / "updates.jsonl").read_text().splitlines()]
    assert [row["step"] for row in updates] == [1, 2, 3, 4, 5, 6]
    assert all(math.isfinite(row["grad_norm"]) and row["grad_norm"] > 0 for row in updates)
    assert found["grad_norm_max"] == max(row["grad_norm"] for row in updates)
    evaluations = [json.loads(line) for line in (tmp_path / "tuned" / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in evaluations] == [0, 3, 6]
    assert evaluations[1]["train_loss"] == pytest.approx(sum(row["loss"] for row in updates[:3]) / 3)
    assert not (tmp_path / "tuned" / "checkpoints").exists()
    status, again, _ = run("sft", model, "--data", chats, "--out", "tuned", *QUICK, "--json")
    assert status == 0
    assert json.loads(again) == found


def plain_loss(folder: Path, chats: Path, seed: int, held_out: int, length: int) -> float:
    """Mean loss of the assistant's tokens in the held-out conversations, from one plain forward pass for each."""
    model = hf.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    tokenizer: Any = hf.AutoTokenizer.from_pretrained(folder)
    if not tokenizer.chat_template:
        ChatTemplate(tokenizer)  # gives it the default
    talks = [messages for messages, _ in read_conversations(chats)]
    order = torch.randperm(len(talks), generator=torch.Generator().manual_seed(seed)).tolist()
    nats, count = 0.0, 0
    for index in order[:held_out]:
        prompt = tokenizer.apply_chat_template(talks[index][:1], add_generation_prompt=True, tokenize=False)
        whole = prompt + talks[index][1]["content"] + tokenizer.eos_token
        ids = tokenizer(whole, add_special_tokens=False)["input_ids"][:length]
        first = len(tokenizer(prompt, add_special_tokens=False)["input_ids"])
        with torch.no_grad():
            logits = model(torch.tensor([ids])).logits[0].double()
        for at in range(first, len(ids)):
            nats -= float(torch.log_softmax(logits[at - 1], -1)[ids[at]])
            count += 1
    return nats / count


@pytest.mark.parametrize("operation", ["softmax", "sigmoid"])
def test_losses_and_sink_rates_equal_those_of_the_base_and_chat_models_measured_alone(
    run: Run, tmp_path: Path, operation: str
) -> None:
    model, chats = tuned_run(tmp_path / "base", operation)
    text = tmp_path / "base" / "sheep.jsonl"
    status, out, err = run("sft", model, "--data", chats, "--out", "tuned", *QUICK, "--text", text, "--json")
    assert status == 0, err
    found = json.loads(out)
    held_out, length = found["asked"]["held_out"], found["asked"]["length"]
    base = exported(tmp_path, model)
    for name, folder in (("base", base), ("chat", tmp_path / "tuned" / "model")):
        expected = plain_loss(folder, chats, 0, held_out, length)
        assert found[name]["valid_loss"] == pytest.approx(expected, rel=1e-5)
        measured = run("measure", folder, "--text", text, "--length", 12, "--sequences", 100, "--json")
        document = json.loads(measured[1])
        assert found[name]["sink_rate"] == pytest.approx(document["sink_rate"])
        assert found[name]["hidden_norm_ratio"] == pytest.approx(document["hidden_norm_ratio"], rel=1e-5)


def test_an_interrupted_and_continued_tuning_equals_the_undisturbed_one(tmp_path: Path) -> None:
    model, chats = tuned_run(tmp_path / "base", "sigmoid")
    sources = TuneSources(chats)
    whole = tune(str(model), sources, SHORT, tmp_path / "whole").tuning
    stopped = tune(str(model), sources, SHORT, tmp_path / "two", observe=interrupt)
    assert stopped.exit_status == 130
    assert stopped.tuning.chat is None
    assert not (tmp_path / "two" / "model").exists()
    continued = tune(str(model), sources, SHORT, tmp_path / "two")
    assert continued.exit_status == 0
    assert continued.tuning.model_dump(exclude={"seconds"}) == whole.model_dump(exclude={"seconds"})
    for name in ("updates.jsonl", "metrics.jsonl", "model/model.safetensors"):
        assert (tmp_path / "two" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes(), name


def test_a_damaged_checkpoint_of_a_tuning_is_skipped(tmp_path: Path) -> None:
    model, chats = tuned_run(tmp_path / "base")
    tune(str(model), TuneSources(chats), SHORT, tmp_path / "out", observe=interrupt)
    checkpoints = tmp_path / "out" / "checkpoints"
    torn = max(checkpoints.iterdir(), key=lambda path: int(path.name.rpartition("-")[2]))
    (torn / "trainer_state.json").write_text("{")
    (torn / "model.safetensors").write_bytes(b"")
    continued = tune(str(model), TuneSources(chats), SHORT, tmp_path / "out").tuning
    assert continued.chat == tune(str(model), TuneSources(chats), SHORT, tmp_path / "whole").tuning.chat


def test_sft_ends_with_status_130_on_ctrl_c_and_the_same_call_resumes_it(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from sinklab.commands.terminal import JobProgress

    model, chats = tuned_run(tmp_path / "base")
    with monkeypatch.context() as patched:
        patched.setattr(JobProgress, "__call__", lambda self, event: interrupt(event))
        status, out, err = run("sft", model, "--data", chats, "--out", "tuned", *QUICK)
    assert (status, out) == (130, "")
    assert "finished work is saved" in err
    status, out, err = run("sft", model, "--data", chats, "--out", "tuned", *QUICK)
    assert status == 0
    assert "resumes after" in err


def test_micro_batches_change_the_result_by_rounding_only(tmp_path: Path) -> None:
    model, chats = tuned_run(tmp_path / "base", "sigmoid")
    found = [
        tune(
            str(model),
            TuneSources(chats),
            TuneOptions(lr=0.01, steps=3, batch_size=8, micro_batch=micro, sink_length=12),
            tmp_path / str(micro),
        ).tuning
        for micro in (2, 8)
    ]
    assert found[0].chat is not None
    assert found[1].chat is not None
    assert found[0].chat.valid_loss == pytest.approx(found[1].chat.valid_loss, rel=1e-4)
    assert found[0].chat.grad_norm == pytest.approx(found[1].chat.grad_norm, rel=1e-3)


def test_labels_equal_those_of_trl_with_the_same_template(tmp_path: Path) -> None:
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    run_, _ = tuned_run(tmp_path / "base")
    folder = exported(tmp_path, run_)
    tokenizer: Any = hf.AutoTokenizer.from_pretrained(folder)
    template = ChatTemplate(tokenizer, MARKED)
    talks = [messages for messages, _ in read_conversations(sheep_chats(tmp_path / "two.jsonl", 6, turns=2))]
    config = SFTConfig(
        str(tmp_path / "out"), assistant_only_loss=True, max_length=None, use_cpu=True, bf16=False, report_to=[]
    )
    theirs = SFTTrainer(
        hf.LlamaForCausalLM.from_pretrained(folder),
        config,
        train_dataset=Dataset.from_list([{"messages": talk} for talk in talks]),
        processing_class=tokenizer,
    ).train_dataset
    for talk, row in zip(talks, theirs, strict=True):
        ours = template.tokenize(talk, "here")
        assert ours.ids == row["input_ids"]
        assert [t if on else -100 for t, on in zip(ours.ids, ours.is_trained, strict=True)] == row["labels"]


VARIANTS: dict[str, dict[str, Any]] = {
    "sink logit": {"attention": {"bias": {"kind": "sink_logit"}}},
    "k biases": {"attention": {"bias": {"kind": "k"}}},
    "sink token": {"attention": {"bias": {"kind": "sink_token"}}},
    "gate": {"gate": {"kind": "head"}},
    "window": {"attention": {"mask": {"kind": "window", "width": 8}}},
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_kind_of_run_is_tuned(tmp_path: Path, variant: str) -> None:
    folder = tmp_path / "base"
    folder.mkdir()
    model, _ = trained_run(folder, {"bos": True}, {"context": 48, **VARIANTS[variant]})
    chats = sheep_chats(folder / "chats.jsonl")
    options = TuneOptions(lr=0.01, steps=3, batch_size=8, sink_length=12)
    found = tune(str(model), TuneSources(chats), options, tmp_path / "out").tuning
    assert found.base is not None
    assert found.chat is not None
    assert found.chat.valid_loss < found.base.valid_loss
    assert (found.chat.sink_rate_bias is None) == (variant in ("gate", "window"))


def test_a_hugging_face_model_is_tuned_with_a_given_chat_template(tmp_path: Path, data_dir: Path) -> None:
    chats = sheep_chats(tmp_path / "chats.jsonl")
    template = tmp_path / "template.jinja"
    template.write_text(MARKED)
    options = TuneOptions(lr=1e-3, steps=2, batch_size=8, length=128, sink_length=8)
    model = data_dir / "models" / "TinyStories-656K"
    found = tune(str(model), TuneSources(chats, template=template), options, tmp_path / "out").tuning
    assert found.chat is not None
    assert found.base is not None
    assert found.chat.valid_loss < found.base.valid_loss
    assert (tmp_path / "out" / "model" / "chat_template.jinja").read_text() == MARKED


def test_invalid_input_is_refused_and_leaves_no_directory(run: Run, tmp_path: Path) -> None:
    model, chats = tuned_run(tmp_path / "base")
    call = on_one_line(run)
    silent = write_chats(tmp_path / "silent.jsonl", [{"messages": [{"role": "user", "content": "hello"}]}])
    for given, says in (
        (("--data", silent), 'no message with role "assistant" has text'),
        (("--data", tmp_path / "none.jsonl"), "does not exist or has no rows"),
        (("--data", chats, "--length", 999), "use --length 48 or less"),
        (("--data", chats, "--chat-template", tmp_path / "none"), "cannot be read"),
        (("--data", chats, "--batch-size", 8, "--micro-batch", 3), "not a multiple of --micro-batch 3"),
        (("--data", chats, "--sink-length", 47), "none of the 4 held-out conversations has the 47 tokens"),
    ):
        status, out, err = call("sft", model, "--out", "tuned", *given)
        assert (status, out) == (2, ""), err
        assert says in err
        assert not (tmp_path / "tuned").exists()


def test_a_directory_with_another_tuning_or_other_files_is_refused_as_the_output(run: Run, tmp_path: Path) -> None:
    model, chats = tuned_run(tmp_path / "base")
    assert run("sft", model, "--data", chats, "--out", "tuned", *QUICK)[0] == 0
    status, _, err = on_one_line(run)("sft", model, "--data", chats, "--out", "tuned", *QUICK, "--seed", 1)
    assert status == 2
    assert "seed is 0, requested 1" in err
    (tmp_path / "tuned" / "sft.json").unlink()
    status, _, err = on_one_line(run)("sft", model, "--data", chats, "--out", "tuned", *QUICK)
    assert status == 2
    assert "is not part of a tuning" in err
    shutil.rmtree(tmp_path / "tuned")
    (tmp_path / "tuned").mkdir()
    (tmp_path / "tuned" / "sft.json").write_text('{"mine": 1}')
    status, _, err = on_one_line(run)("sft", model, "--data", chats, "--out", "tuned", *QUICK)
    assert status == 2
    assert "was not written by sinklab" in err
    assert (tmp_path / "tuned" / "sft.json").read_text() == '{"mine": 1}'


def test_the_directory_of_the_model_or_of_another_run_is_refused_as_the_output(run: Run, tmp_path: Path) -> None:
    model, chats = tuned_run(tmp_path / "base")
    other, _ = tuned_run(tmp_path / "other")
    before = (other / "metrics.jsonl").read_bytes()
    for out, says in ((model / "chat", "is inside the directory of the model"), (other, "is not part of a tuning")):
        status, _, err = on_one_line(run)("sft", model, "--data", chats, "--out", out, *QUICK)
        assert status == 2
        assert says in err
    assert not (model / "chat").exists()
    assert (other / "metrics.jsonl").read_bytes() == before


def test_a_diverging_tuning_ends_with_status_1_and_the_advice_to_lower_lr(run: Run, tmp_path: Path) -> None:
    model, chats = tuned_run(tmp_path / "base")
    status, _, err = on_one_line(run)(
        "sft", model, "--data", chats, "--out", "tuned", *QUICK, "--lr", 1000, "--steps", 40
    )
    assert status == 1
    assert "lower --lr" in err


@pytest.mark.parametrize(
    ("logs", "named"),
    [
        ({"loss": math.inf, "grad_norm": 1.0, "learning_rate": 0.1}, "update 3 has loss inf"),
        ({"eval_loss": math.nan}, "loss on held-out conversations is nan after update 3"),
    ],
)
def test_a_loss_that_is_not_finite_ends_the_tuning(logs: dict[str, float], named: str, tmp_path: Path) -> None:
    from sinklab.tuning.trainer import TuneRecord

    sink = sinklab.SinkCallback(torch.zeros(1, 4, dtype=torch.long))
    record = TuneRecord(tmp_path, sink, lambda: False, StepProgress("tuning", lambda event: None))
    with pytest.raises(SinklabError, match=f"{named}.*must be finite"):
        record.on_log(None, hf.TrainerState(global_step=3), None, logs)
