"""The committed results of figure 30 at scale tiny agree with the statements of their README."""

import math
from pathlib import Path

import pytest

from sinklab.tuning.tuned_directory import (
    METRICS,
    SFT,
    UPDATES,
    TuneEvaluation,
    TuneUpdate,
    load_tuning,
    write_model,
)

FOLDER = Path(__file__).parents[2] / "results" / "sft"
TUNED = sorted(path.parent for path in FOLDER.glob("*/sft.json"))


def test_there_are_softmax_and_sigmoid_runs() -> None:
    assert {path.name.partition("-")[0] for path in TUNED} == {"softmax", "sigmoid"}


@pytest.mark.parametrize("folder", TUNED, ids=lambda path: path.name)
def test_the_loss_fell_and_every_gradient_was_finite(folder: Path) -> None:
    tuning = load_tuning(folder / SFT)
    assert tuning.base is not None
    assert tuning.chat is not None
    assert tuning.chat.valid_loss < tuning.base.valid_loss
    updates = [TuneUpdate.model_validate_json(row) for row in (folder / UPDATES).read_text("utf-8").splitlines()]
    evaluations = [
        TuneEvaluation.model_validate_json(row) for row in (folder / METRICS).read_text("utf-8").splitlines()
    ]
    assert [row.step for row in updates] == list(range(1, tuning.chat.step + 1))
    assert all(math.isfinite(row.grad_norm) for row in updates)
    assert tuning.grad_norm_max == max(row.grad_norm for row in updates)
    assert (evaluations[0], evaluations[-1]) == (tuning.base, tuning.chat)


def test_a_chat_template_with_bars_is_one_cell_of_the_model_card(tmp_path: Path) -> None:
    tuning = load_tuning(TUNED[0] / SFT)
    asked = tuning.asked.model_copy(update={"chat_template": "{{ messages | length }}"})
    (tmp_path / "checkpoint").mkdir()
    write_model(tmp_path / "checkpoint", tmp_path / "model", tuning.model_copy(update={"asked": asked}), is_ours=False)
    card = (tmp_path / "model" / "README.md").read_text(encoding="utf-8")
    assert r"| chat\_template | {{ messages \| length }} |" in card
    assert tuning.chat is not None
    assert f"| chat | {tuning.chat.valid_loss:.4f} | {tuning.chat.sink_rate[0]:.2f} |" in card
