"""Runs are assessed on their validation text; the numbers of an assessment."""

import re
from pathlib import Path

import pytest
import torch
from conftest import Run, on_one_line
from made_assessment import assessment
from trained_run import trained_run

from sinklab.assessing.assess_model import Assessment
from sinklab.assessing.part import AssessText
from sinklab.assessing.parts import NUMBERS, PARTS
from sinklab.assessing.parts.quantisation import Quantisation
from sinklab.assessing.parts.streaming import Streaming
from sinklab.opening import open_model
from sinklab.train.run import recipe_and_data


@pytest.mark.parametrize("bos", [True, False])
def test_a_run_is_assessed_on_its_validation_tokens(tmp_path: Path, bos: bool) -> None:
    directory, _ = trained_run(tmp_path, {"bos": bos})
    tokens_NT = AssessText(open_model(str(directory)), None).sequences(3, 12)
    own = tokens_NT[:, int(bos) :].flatten()
    assert torch.equal(own, torch.tensor(recipe_and_data(directory)[1].valid[: len(own)]).long())


def test_the_error_names_a_mistyped_run(run: Run) -> None:
    status, _, err = on_one_line(run)("assess", "./runs/mistyped")
    assert (status, "./runs/mistyped is neither a directory nor" in err) == (2, True)


def test_a_bad_text_is_found_before_a_model_is_looked_for(run: Run) -> None:
    status, _, err = on_one_line(run)("assess", "nobody/nothing-of-this-name", "--text", "missing.txt")
    assert status == 2
    assert "no text at missing.txt" in err


def test_the_numbers_of_an_assessment_are_differences_of_its_losses() -> None:
    a = Assessment.model_validate(assessment("a model"))
    numbers, streaming, quantisation = a.numbers(), a.result(Streaming), a.result(Quantisation)
    loss = {(row.cache, row.first): row.loss for row in streaming.caches}
    sizes, kept = sorted({cache for cache, _ in loss}), sorted({first for _, first in loss})
    for first in kept:
        assert numbers[f"streamed_loss_{first}"] == loss[sizes[-1], first]
        assert numbers[f"streamed_gap_{first}"] == loss[sizes[-1], first] - loss[sizes[-1], kept[-1]]
    assert numbers["streaming_added"] == loss[sizes[0], kept[0]] - streaming.unchanged.loss
    assert numbers["streaming_kept_added"] == loss[sizes[0], kept[-1]] - streaming.unchanged.loss
    static = next(one for one in quantisation.settings if one.name == "int8 static per tensor")
    assert numbers["int8_added"] == static.everything.loss - quantisation.unchanged.loss
    assert numbers["int8_due_to_sink"] == static.due_to_sink


def test_parts_that_were_not_done_have_no_numbers() -> None:
    none: dict[str, None] = dict.fromkeys(PARTS)
    assert Assessment.model_validate({**assessment("a model"), **none}).numbers() == {}


def test_every_number_that_a_part_declares_is_computed() -> None:
    found = Assessment.model_validate(assessment("a model")).numbers()
    assert {re.sub(r"(?<!q4)_\d+(?=_|$)", "_N", name) for name in found} == {one.name for one in NUMBERS}
