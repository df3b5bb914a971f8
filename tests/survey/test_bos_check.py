"""The note on a model that reads no BOS or two, although it was trained with one, and what that adds to the loss."""

import json
import random
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from conftest import Run, on_one_line
from tiny_models import tiny_model

from sinklab.measuring.options import Options, Request
from sinklab.survey.measure import measure_model

ASKED = Request(sequences=8, length=16)
NEEDS = "the model needs its BOS"


def doubled_digits(seed: int) -> str:
    """Random digits, each written twice: which one is a copy depends on the position alone."""
    draw = random.Random(seed)
    return "".join(2 * draw.choice("0123456789") for _ in range(12))


def trained(folder: Path, bos: bool) -> Path:
    """A model trained a little on doubled digits, with <s> in front or without; its tokenizer adds none."""
    tiny_model(folder)
    tokenizer: Any = hf.AutoTokenizer.from_pretrained(folder)
    model = hf.AutoModelForCausalLM.from_pretrained(folder).train()
    rows = [[*[1] * bos, *tokenizer(doubled_digits(seed))["input_ids"]][:20] for seed in range(1000, 3000)]
    tokens_NT = torch.tensor(rows)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(60):
        tokens_BT = tokens_NT[step * 32 % 1984 :][:32]
        model(tokens_BT, labels=tokens_BT).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bos")
    torch.manual_seed(0)
    trained(folder / "with", True)
    trained(folder / "without", False)
    rows = [doubled_digits(seed) for seed in range(8)]
    (folder / "text.jsonl").write_text("".join(json.dumps({"text": row}) + "\n" for row in rows))
    talks = [[{"role": "user", "content": row}] for row in rows]
    (folder / "chats.jsonl").write_text("".join(json.dumps({"messages": talk}) + "\n" for talk in talks))
    return folder


def notes_of(model: Path, text: Path, request: Request = ASKED) -> list[str]:
    return [note for note in measure_model(str(model), text, request).notes if NEEDS in note]


def test_a_note_has_losses_and_sink_rates_with_and_without_a_missing_bos(folder: Path) -> None:
    (note,) = notes_of(folder / "with", folder / "text.jsonl")
    found = re.search(
        r"BOS <s>: with no BOS the loss is ([\d.]+) nats .* \(([\d.]+) and ([\d.]+), 8 sequences of 15 tokens\), and "
        r"Sink_1 is ([\d.]+) % instead of ([\d.]+) %; .* to add it: --bos",
        note,
    )
    assert found is not None, note
    higher, fed, with_bos, _, sink = map(float, found.groups())
    assert higher == pytest.approx(fed - with_bos, abs=0.02)
    assert higher > 1
    forced = measure_model(str(folder / "with"), folder / "text.jsonl", ASKED.model_copy(update={"bos": True}))
    assert forced.bos
    assert not any(NEEDS in note for note in forced.notes)
    assert forced.loss is not None
    assert forced.fed is not None
    assert forced.fed.tokens is not None
    assert forced.fed.tokens[0] == "<s>"
    assert forced.sink_rate[0] == pytest.approx(sink, abs=0.06)
    assert forced.loss == pytest.approx(with_bos, abs=0.5)  # also has the first digit, which cannot be known


def test_there_is_no_note_on_a_model_trained_without_bos(folder: Path) -> None:
    assert notes_of(folder / "without", folder / "text.jsonl") == []


@pytest.mark.parametrize(
    "asked",
    [{"no_bos": True}, {"options": Options(loss=False)}, {"options": Options(inputs="random")}],
    ids=["left out on purpose", "no loss", "no text"],
)
def test_nothing_is_compared_where_bos_was_left_out_on_purpose_or_there_is_no_loss_or_text(
    folder: Path, asked: dict[str, object]
) -> None:
    assert notes_of(folder / "with", folder / "text.jsonl", ASKED.model_copy(update=asked)) == []


@pytest.mark.parametrize(("times", "named"), [(0, "no BOS"), (1, None), (2, "<s><s>")])
def test_a_note_says_that_a_template_writes_bos_twice_or_not_at_all(
    folder: Path, times: int, named: str | None
) -> None:
    template = "{{ bos_token }}" * times + "{% for m in messages %}{{ m.content }}{% endfor %}"
    (folder / "with" / "chat_template.jinja").write_text(template)
    notes = notes_of(folder / "with", folder / "chats.jsonl")
    assert len(notes) == (named is not None)
    assert all(f"with {named} the loss is" in note for note in notes)


def test_bos_on_the_command_line_is_forced_or_refused(run: Run, folder: Path) -> None:
    asked = ("measure", folder / "with", "--text", folder / "text.jsonl", "--sequences", 8, "--length", 16)
    status, out, err = on_one_line(run)(*asked)
    assert status == 0, err
    assert NEEDS in out
    assert re.search(r"fed: \d \| \d", out)
    status, out, err = on_one_line(run)(*asked, "--bos")
    assert status == 0, err
    assert NEEDS not in out
    assert re.search(r"fed: <s> \| \d", out)
    status, out, err = on_one_line(run)(*asked, "--bos", "--no-bos")
    assert (status, out) == (2, "")
    assert "--bos and --no-bos contradict each other" in err


def test_bos_is_refused_for_a_model_that_has_none(run: Run, folder: Path, tmp_path: Path) -> None:
    model = tiny_model(tmp_path / "model")
    for file, key in (("config.json", "bos_token_id"), ("tokenizer_config.json", "bos_token")):
        document = json.loads((model / file).read_text())
        (model / file).write_text(json.dumps(document | {key: None}))
    status, out, err = on_one_line(run)("measure", model, "--text", folder / "text.jsonl", "--length", 16, "--bos")
    assert (status, out) == (2, "")
    assert "has no BOS, neither in its tokenizer nor in its config: leave it out" in err
