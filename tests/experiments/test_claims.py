"""Claims of experiment files: references, dates, seeds, and whether they precede their runs."""

import json
from datetime import date
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import ValidationError

from sinklab.errors import InputError
from sinklab.experiments.definition import Experiment
from sinklab.experiments.shipped import experiment_ids, load_experiment
from sinklab.experiments.sweep.packed import check_dates
from sinklab.experiments.sweep.store import ManifestCell, SweepManifest, merged_manifests, plan_sweep

LESS: dict[str, Any] = {"is": "less", "value": "sink_1", "cell": "sigmoid", "than": "softmax"}
CLAIM: dict[str, Any] = {
    "id": "none", "text": "No sink", "check": {"is": "absent", "cell": "sigmoid"},
}  # fmt: skip
MINE: dict[str, Any] = {
    "id": "mine", "title": "Mine", "base": "tiny", "cells": {"softmax": {}, "sigmoid": "sigmoid"}, "claims": [CLAIM],
}  # fmt: skip


def made(**more: Any) -> Experiment:
    return Experiment.model_validate({**MINE, **more})


def written(folder: Path, **more: Any) -> Experiment:
    """The same experiment, loaded from a file of the user."""
    (folder / "mine.yaml").write_text(yaml.safe_dump({**MINE, **more}))
    return load_experiment(str(folder / "mine.yaml"))


def test_a_reference_takes_the_comparison_of_the_claim_that_it_names(tmp_path: Path) -> None:
    other = {"id": "too", "text": "Nor here", "same_as": "mine.none"}
    shipped = {"id": "table", "text": "As in table 6", "same_as": "table_6.sigmoid_has_none"}
    experiment = written(tmp_path, claims=[CLAIM, other, shipped])
    first, second, third = experiment.claims
    assert first.check == second.check
    table = load_experiment("table_6")
    assert third.check == next(one for one in table.claims if one.id == "sigmoid_has_none").check
    assert (second.same_as, second.text) == ("mine.none", "Nor here")
    again = SweepManifest.model_validate(
        json.loads(
            json.dumps(SweepManifest(experiment=experiment, scale="tiny").model_dump(mode="json", by_alias=True))
        )
    )
    assert again.experiment == experiment


@pytest.mark.parametrize(
    ("same_as", "said"),
    [
        ("nobody.none", "there is no shipped experiment 'nobody'"),
        ("table_6.nothing", "there is no such claim"),
        ("mine.too", "this is a reference to mine.none itself"),
    ],
)
def test_a_reference_to_an_unknown_claim_or_to_a_reference_is_refused(same_as: str, said: str, tmp_path: Path) -> None:
    claims = [CLAIM, {"id": "too", "text": "..", "same_as": "mine.none"}, {"id": "a", "text": "..", "same_as": same_as}]
    with pytest.raises(InputError, match=said):
        written(tmp_path, claims=claims)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"check": None}, "set check, or same_as"),
        ({"check": {"is": "absent", "cell": "sigmoid", "value": "valid_loss"}}, "absent requires a sink rate"),
        ({"check": {**LESS, "value": "kurtosis", "absent": True}}, "absent requires a sink rate"),
        ({"check": {**LESS, "value": "gate_closed", "absent": True}}, "absent requires a sink rate"),
        ({"check": {"is": "absent", "cell": "sigmoid", "value": "sink_growth"}}, "absent requires a sink rate"),
        ({"check": {**LESS, "by": 1, "times": 2}}, "not both"),
        ({"check": {"is": "all", "of": [{"is": "absent", "cell": "sigmoid"}]}}, "at least 2"),
        ({"check": {"is": "rising", "cell": "sigmoid", "value": "sink_1", "at_step": 9}}, "at_step is"),
        ({"check": {**LESS, "than_value": "sink_bias"}}, "either than, a cell, or than_value"),
        ({"check": {"is": "rising", "cell": "sigmoid", "value": "sink_1"}}, "compares domains or models, but the"),
        ({"check": {"is": "within", "cell": "sigmoid", "value": "sink_1", "at_most": 1, "after": 9}}, "after requires"),
        ({"changed": "later"}, "changed"),
        ({"stated": "soon"}, "stated"),
        ({"evidence": "strong"}, "evidence"),
        ({"requires_massive": "nobody"}, "refers to unknown cell .nobody. in its check, requires_massive or"),
        ({"scales": ["large"]}, "scales"),
    ],
)  # fmt: skip
def test_a_claim_that_says_something_impossible_is_refused(change: dict[str, Any], said: str) -> None:
    with pytest.raises(ValidationError, match=said):
        made(claims=[{**CLAIM, **change}])


def test_two_claims_of_one_id_are_refused() -> None:
    with pytest.raises(ValidationError, match="two claims have the id none: rename one of them"):
        made(claims=[CLAIM, {**CLAIM, "text": "None at all"}])


def test_the_seeds_of_a_cell_are_those_of_all_experiments_that_ask_for_it_in_their_order() -> None:
    confirmatory, exploratory = made(first_seed=100, rank=1, seeds=2), made(id="other", rank=2, seeds=1)
    plan = plan_sweep([exploratory, confirmatory], "tiny", None, {})
    assert list(plan.cells["softmax"].seeds) == [0, 100, 101]
    assert plan.order == (("softmax", 100), ("sigmoid", 100), ("softmax", 101), ("sigmoid", 101),
                          ("softmax", 0), ("sigmoid", 0))  # fmt: skip


def manifest(experiment: Experiment, *seeds: int) -> SweepManifest:
    cells = {cell: ManifestCell(hashes={seed: f"{cell}{seed}" for seed in seeds}) for cell in experiment.cells}
    return SweepManifest(experiment=experiment, scale="tiny", cells=cells)


def test_earlier_seeds_are_kept_unless_the_first_seed_changes() -> None:
    before = {"mine": manifest(made(), 0, 1)}
    assert merged_manifests(before, {"mine": manifest(made(), 2)})["mine"].seeds == [0, 1, 2]
    assert merged_manifests(before, {"mine": manifest(made(first_seed=100), 100)})["mine"].seeds == [100]


def test_claims_that_were_stated_after_their_runs_began_are_listed(tmp_path: Path) -> None:
    for name, begun in {"softmax0": "2026-11-24T09:00:00+00:00", "sigmoid0": "2026-11-22T23:59:59+00:00",
                        "sigmoid1": "2026-11-24T00:00:01+00:00", "sigmoid2": None}.items():  # fmt: skip
        (tmp_path / name).mkdir()
        said = {"hash": name} | ({"begun": begun} if begun else {})
        (tmp_path / name / "env.json").write_text(json.dumps(said))
    claims = [
        CLAIM,
        {**CLAIM, "id": "earlier", "stated": "2026-11-22"},
        {**CLAIM, "id": "of_softmax", "check": {"is": "absent", "cell": "softmax"}, "stated": "2026-11-24"},
        {**CLAIM, "id": "referring", "same_as": "mine.none"},
        {**CLAIM, "id": "changed", "stated": "2026-11-20", "changed": "2026-11-23: Another margin."},
        {**CLAIM, "id": "changed_before", "stated": "2026-11-20", "changed": "2026-11-22: Another margin."},
    ]
    runs = {path.name: path for path in tmp_path.iterdir()}
    confirmatory = made(claims=claims, stated="2026-11-23", evidence="confirmatory")
    late = "mine.none was stated on 2026-11-23, and 1 run of its cells began before, the first on 2026-11-22"
    found = check_dates([manifest(confirmatory, 0, 1, 2)], runs)
    changed = "mine.changed was changed on 2026-11-23, and the first run of its cells began on 2026-11-22"
    undated = "not checked: runs without a start time, in the cells of 4 claims"  # of sigmoid, without the reference
    assert (found.problems, found.notes, found.checked) == ([late], [changed, undated], 5)
    exploratory = made(claims=claims, stated="2026-11-23", evidence="exploratory")
    assert check_dates([manifest(exploratory, 0, 1, 2)], runs).notes == [late, changed, undated]
    assert check_dates([manifest(made(), 0)], runs).checked == 0  # a claim without a day


@pytest.mark.parametrize("name", experiment_ids())
def test_shipped_claims_have_a_date_and_confirmatory_experiments_five_seeds_of_their_own(name: str) -> None:
    experiment = load_experiment(name)
    assert {"evidence", "stated"} <= experiment.model_fields_set
    analyses = {claim.evidence or experiment.evidence for claim in experiment.claims} | {experiment.evidence}
    if experiment.base and "confirmatory" in analyses:
        assert experiment.first_seed in (100, 200, 300)
        assert experiment.seeds >= 5
    for claim in experiment.claims:
        stated = claim.stated or experiment.stated
        assert stated is not None
        if claim.changed is not None:
            assert date.fromisoformat(claim.changed.partition(":")[0]) >= stated
