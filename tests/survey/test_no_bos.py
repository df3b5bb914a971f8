"""The ablation of BOS is refused, with an alternative, if no sequence has one."""

from pathlib import Path

import pytest
from conftest import Run, on_one_line
from tiny_models import TEMPLATE, chat_file, text_file, tiny_model
from trained_run import trained_run

ABLATE = ("--ablate", "no_bos", "--sequences", 2, "--length", 8)
TO_DO = "--ablate mask_first:1 to hide the first token"


@pytest.mark.parametrize("by_domain", [False, True])
def test_a_model_without_bos_is_refused(run: Run, tmp_path: Path, by_domain: bool) -> None:
    model, text = tiny_model(tmp_path / "model"), text_file(tmp_path / "texts" / "text.jsonl")
    given = (text.parent, "--by-domain") if by_domain else (text,)
    status, out, err = on_one_line(run)("measure", model, *ABLATE, "--text", *given)
    assert (status, out) == (2, "")
    assert f"the tokenizer of {model} does not add BOS" in err
    assert TO_DO in err


def test_a_run_that_was_trained_without_bos_is_refused(run: Run, tmp_path: Path) -> None:
    trained, text = trained_run(tmp_path, {"bos": False})
    status, out, err = on_one_line(run)("measure", trained, *ABLATE, "--text", text)
    assert (status, out) == (2, "")
    assert "was trained without BOS (data.bos: false)" in err
    assert TO_DO in err


@pytest.mark.parametrize(
    ("more", "said"),
    [(["--no-bos"], "--no-bos leaves it out already"), (["--inputs", "random"], "--inputs random has no BOS")],
)
def test_sequences_without_bos_are_refused_whatever_the_model(
    run: Run, tmp_path: Path, more: list[str], said: str
) -> None:
    model, text = tiny_model(tmp_path / "model", bos=True), text_file(tmp_path / "text.jsonl")
    (model / "model.safetensors").write_bytes(b"no weights")
    status, _, err = on_one_line(run)("measure", model, *ABLATE, "--text", text, *more)
    assert status == 2
    assert said in err


def test_the_bos_of_a_chat_template_is_left_out(run: Run, tmp_path: Path) -> None:
    model, chats = tiny_model(tmp_path / "model", template=TEMPLATE), chat_file(tmp_path / "chats.jsonl")
    status, out, err = run("measure", model, *ABLATE, "--text", chats)
    assert status == 0, err
    assert "no_bos" in out
