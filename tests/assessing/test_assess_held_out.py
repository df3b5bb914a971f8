"""The text that a run was validated on, as what it is assessed on; and an assessment as single numbers."""

from pathlib import Path

import pytest
import torch
from conftest import Run, on_one_line
from made_assessment import assessment
from tiny_models import tiny_model
from trained_run import trained_run

from sinklab.assessing.documents import Assessment
from sinklab.assessing.loading import admit
from sinklab.assessing.numbers import assessed_numbers
from sinklab.models.huggingface.loading import AS_IT_IS
from sinklab.train.directory.run import validation_tokens


@pytest.mark.parametrize("bos", [True, False])
def test_a_run_is_read_on_its_validation_tokens(tmp_path: Path, bos: bool) -> None:
    directory, _ = trained_run(tmp_path, {"bos": bos})
    tokens_NT = admit(str(directory), AS_IT_IS).sequences(None, 3, 12)
    own = tokens_NT[:, int(bos) :].flatten()
    assert torch.equal(own, torch.tensor(validation_tokens(directory)[: len(own)]).long())


def test_a_model_that_is_no_run_needs_a_text(run: Run, tmp_path: Path) -> None:
    model = tiny_model(tmp_path / "gpt2")
    status, out, err = on_one_line(run)("assess", model, "--out", tmp_path / "a")
    assert (status, out) == (2, "")
    assert "--text is needed" in err
    assert not (tmp_path / "a").exists()


def test_a_bad_text_is_found_before_a_model_is_looked_for(run: Run) -> None:
    status, _, err = on_one_line(run)("assess", "nobody/nothing-of-this-name", "--text", "missing.txt")
    assert status == 2
    assert "no text at missing.txt" in err


def test_the_numbers_of_an_assessment_are_differences_of_its_losses() -> None:
    a = Assessment.model_validate(assessment("a model"))
    numbers = assessed_numbers(a)
    assert a.streaming is not None
    loss = {(row.cache, row.first): row.loss for row in a.streaming.caches}
    sizes, kept = sorted({cache for cache, _ in loss}), sorted({first for _, first in loss})
    for first in kept:
        assert numbers[f"streamed_loss_{first}"] == loss[sizes[-1], first]
        assert numbers[f"streamed_gap_{first}"] == loss[sizes[-1], first] - loss[sizes[-1], kept[-1]]
    assert numbers["streaming_added"] == loss[sizes[0], kept[0]] - a.streaming.unchanged.loss
    assert numbers["streaming_kept_added"] == loss[sizes[0], kept[-1]] - a.streaming.unchanged.loss
    assert a.quantisation is not None
    static = next(one for one in a.quantisation.settings if one.name == "int8 static per tensor")
    assert numbers["int8_added"] == static.everything.loss - a.quantisation.unchanged.loss
    assert numbers["int8_due_to_sink"] == static.due_to_sink


def test_parts_that_were_not_done_have_no_numbers() -> None:
    none: dict[str, None] = dict.fromkeys(("streaming", "quantisation", "eviction", "length", "carries"))
    assert assessed_numbers(Assessment.model_validate(assessment("a model")).model_copy(update=none)) == {}
