"""summary.json from the runs of a sweep."""

import json
from pathlib import Path
from typing import Any

from made_runs import cell_of, cells_of, experiment_of, reading, run_of

from sinklab.experiments.definition import Experiment
from sinklab.experiments.documents import CellRun, CellSummary, JudgedClaim, Summary
from sinklab.experiments.shipped import load_experiment
from sinklab.experiments.summary import at_scale, summarise
from sinklab.report.sweeps import chance_of_claims, importance_of_claims, remarks_on_counts, subjects_of_claims

LESS = {"is": "less", "value": "sink_1", "cell": "k_biases", "than": "softmax"}
SINKS = {"softmax": [36.0, 30.0, 42.0], "k_biases": [0.0, 0.0, 0.0]}
FIVE = {"softmax": [36.0, 30.0, 42.0, 27.0, 22.0], "k_biases": [0.0] * 5}


def trained(name: str) -> Experiment:
    """A shipped experiment that trains its cells."""
    return load_experiment(name)


def test_a_cell_has_every_seed_with_the_median_the_smallest_and_the_largest() -> None:
    numbers = cells_of("sink_1", SINKS)
    results = {**numbers, "softmax": numbers["softmax"].model_copy(update={"change": {"optim.lr": 0.1}})}
    summary = summarise([at_scale(experiment_of(LESS, cells=list(SINKS)), "tiny")], results)
    softmax = summary.cells["softmax"]
    assert softmax.sink_rate == [36.0, 0.0]
    assert (softmax.valid_loss, softmax.hidden_norm_ratio_max, softmax.sink_rate_bias) == (3.0, 2.0, None)
    assert (softmax.seeds, softmax.change, softmax.runs) == (3, {"optim.lr": 0.1}, numbers["softmax"].runs)
    estimate = softmax.values["sink_1"]
    assert (estimate.seeds, estimate.median) == ([36.0, 30.0, 42.0], 36.0)
    assert (estimate.smallest, estimate.largest, estimate.never_reached) == (30.0, 42.0, 0)
    assert set(softmax.values) == {"sink_1", "valid_loss", "norm_ratio"}  # the sink on a bias was not measured
    assert summary.cells["k_biases"].values["sink_1"].median == 0.0


def test_a_step_that_a_seed_never_reached_is_later_than_all_others() -> None:
    sinks = [[0.0, 20.0], [0.0, 0.0], [20.0, 20.0]]
    runs = [
        run_of(seed, *(reading(500 * (at + 1), sink_1=sink) for at, sink in enumerate(two)))
        for seed, two in enumerate(sinks)
    ]
    experiment = trained("emergence")
    summary = summarise([at_scale(experiment, "tiny")], {"softmax": cell_of(*runs), "lr_half": cell_of(runs[1])})
    estimate = summary.cells["softmax"].values["emergence_step"]
    assert estimate.seeds == [1000.0, None, 500.0]
    assert (estimate.median, estimate.smallest, estimate.largest, estimate.never_reached) == (1000.0, 500.0, None, 1)
    assert summary.cells["lr_half"].values["emergence_step"].median is None
    assert summary.cells["softmax"].values["sink_1"].never_reached == 0


def test_a_cell_without_finished_runs_is_listed_with_its_failures() -> None:
    failed = CellRun(seed=0, hash="0" * 16, directory="x", status="failed", message="the loss is not finite")
    results = {"softmax": CellSummary(runs=[failed])}
    summary = summarise([at_scale(experiment_of(LESS, cells=list(SINKS)), "tiny")], results)
    assert list(summary.cells) == ["softmax"]
    assert (summary.cells["softmax"].seeds, summary.cells["softmax"].runs) == (0, [failed])
    assert [claim.verdict for claim in summary.claims] == ["not run"]


def test_several_experiments_share_their_cells_and_each_has_its_claims() -> None:
    asked = [trained("table_4"), trained("table_6")]
    results = cells_of("sink_1", {**FIVE, "sigmoid": [0.1, 0.1, 0.05, 0.0, 0.2], "of_nobody": [1.0]})
    summary = summarise([at_scale(one, "tiny") for one in asked], results)
    assert (summary.id, summary.title, summary.scale) == ("", "", "tiny")
    assert list(summary.cells) == ["softmax", "k_biases", "sigmoid"]
    assert len(summary.claims) == sum(len(one.claims_at("tiny")) for one in asked)
    verdicts = {(claim.experiment, claim.id): claim.verdict for claim in summary.claims}
    assert verdicts["table_4", "k_biases_free_the_first_token"] == "reproduced"
    assert verdicts["table_6", "sigmoid_has_none"] == "reproduced"
    assert verdicts["table_6", "elu1_has_none"] == "not run"
    described = summary.experiments["table_4"]
    assert described.published["k_biases"] == {"sink_bias": 73.34, "sink_1": 0.0, "valid_loss": 3.72}
    assert summary.experiments["table_6"].published["elu_kernel_normalised"] == {"sink_1": 53.65, "valid_loss": 4.19}
    assert described.adapted[0].startswith("Scale tiny has 0.3 M parameters")
    assert described.adapted[1:] == [one.why for one in asked[0].adapted["tiny"]]
    assert described.baseline == "softmax"
    assert set(described.cells) == set(asked[0].cells_at("tiny"))


def test_an_experiment_on_a_recipe_of_its_own_is_not_described_as_the_shipped_recipe() -> None:
    experiment = trained("table_4").model_copy(update={"base": {"tiny": "mine.yaml"}, "adapted": {}})
    experiment = experiment.model_copy(update={"cells": {"softmax": []}, "claims": (), "published": None})
    on_tiny = experiment.model_copy(update={"base": {"tiny": "tiny"}})
    assert at_scale(on_tiny, "tiny")[1].adapted
    assert not at_scale(experiment, "tiny")[1].adapted


def test_a_summary_of_one_experiment_has_its_name_and_is_loaded_as_saved(tmp_path: Path) -> None:
    summary = summarise([at_scale(trained("lab"), "lab")], cells_of("sink_1", SINKS))
    assert (summary.id, summary.title) == ("lab", trained("lab").title)
    summary.save(tmp_path)
    document = json.loads((tmp_path / "summary.json").read_text())
    assert document["schema"] == 3
    assert Summary.model_validate(document).model_dump() == summary.model_dump()


def test_chance_would_reproduce_one_of_32_claims_that_are_judged_seed_by_seed() -> None:
    def claims(number: int, **others: Any) -> list[JudgedClaim]:
        asked: dict[str, Any] = {"analysis": "confirmatory", "rule": "seed by seed", "verdict": "inconclusive"}
        return [JudgedClaim(**(asked | {"seeds": 5} | others)) for _ in range(number)]

    others = [
        *claims(9, analysis="exploratory"),
        *claims(9, rule="no overlap"),
        *claims(9, verdict="not run"),
        *claims(9, same_as="figure_4.default_has_a_sink"),
    ]
    assert "48 of the confirmatory claims" in chance_of_claims([*claims(48), *others])
    assert chance_of_claims([*claims(48), *others]).endswith("would reproduce 1.5.")
    assert chance_of_claims(others) == ""
    assert chance_of_claims(claims(512, seeds=9)).endswith("would reproduce 10.0.")  # one of nine seeds may deviate


def test_comparisons_whose_verdict_differs_by_mean_importance_are_counted() -> None:
    def claims(number: int, verdict: str, by_importance: str, **others: Any) -> list[JudgedClaim]:
        asked: dict[str, Any] = {"analysis": "confirmatory", "verdict": verdict, "by_importance": by_importance}
        return [JudgedClaim(**(asked | {"seeds": 5} | others)) for _ in range(number)]

    same = [
        *claims(2, "reproduced", "reproduced"),
        *claims(9, "reproduced", ""),
        *claims(9, "no verdict", "no verdict"),
        *claims(9, "inconclusive", "reproduced", analysis="exploratory"),
        *claims(9, "inconclusive", "reproduced", same_as="table_4.k_biases_free_the_first_token"),
    ]
    assert importance_of_claims(same[2:]) == remarks_on_counts(same[2:]) == ""
    assert importance_of_claims(same).startswith("2 confirmatory claims compare Sink_1")
    assert importance_of_claims(same).endswith("no verdict changes.")
    assert importance_of_claims(same[:1]).startswith("One confirmatory claim compares Sink_1")
    said = importance_of_claims(
        [*same, *claims(3, "inconclusive", "reproduced"), *claims(1, "reproduced", "contradicted")]
    )
    assert said.startswith("6 confirmatory claims")
    assert said.endswith(
        "the verdict changes from inconclusive to reproduced for 3 and from reproduced to contradicted for 1."
    )


def test_claims_are_counted_by_the_subject_of_their_quantity_and_the_subject_is_not_stored() -> None:
    def judged(quantity: str, verdict: str = "reproduced", **others: Any) -> JudgedClaim:
        asked: dict[str, Any] = {"analysis": "confirmatory", "rule": "seed by seed", "seeds": 5, **others}
        return JudgedClaim(quantity=quantity, verdict=verdict, **asked)

    sinks = [judged(name) for name in ("sink_1", "emergence_step", "sink_hidden_added", "streamed_gap_0")]
    norms = [judged(name, "not asked") for name in ("norm_growth_last", "norm_ratio_block_2", "norm_step", "kurtosis")]
    losses = [judged(name, "contradicted") for name in ("valid_loss", "train_loss", "loss_change", "")]
    for claims, subject in ((sinks, "sinks"), (norms, "norms"), (losses, "loss")):
        assert {claim.subject for claim in claims} == {subject}
        assert "subject" not in claims[0].model_dump()
    unknown = judged("", "not run", rule="")  # a claim on models without positional embeddings, for example
    assert unknown.subject is None
    counted = [*sinks, judged("sink_bias", "inconclusive"), *norms, *losses, unknown]
    assert subjects_of_claims([*counted, judged("sink_1", same_as="table_4.k_biases_take_the_sink")]) == (
        "Of the 13 confirmatory claims, 5 are about sinks (4 reproduced, 1 inconclusive), 4 about norms and kurtosis "
        "(4 not asked) and 4 about loss and divergence (4 contradicted)."
    )
    assert subjects_of_claims(sinks) == subjects_of_claims([unknown]) == ""
    several = subjects_of_claims([*counted, *(judged(name, analysis="exploratory") for name in ("sink_1", "kurtosis"))])
    assert several.endswith(
        "Of the 2 exploratory claims, 1 is about sinks (1 reproduced) and 1 about norms and kurtosis (1 reproduced)."
    )


def test_a_comparison_of_cells_is_counted_by_overlap_and_all_else_by_seed() -> None:
    bound = {"is": "within", "value": "sink_1", "cell": "softmax", "at_least": 1}
    for check, rule in (
        (LESS, "no overlap"),
        (bound, "seed by seed"),
        ({"is": "all", "of": [bound, LESS]}, "no overlap"),
    ):
        summary = summarise([at_scale(experiment_of(check, cells=list(SINKS)), "tiny")], cells_of("sink_1", SINKS))
        assert [claim.rule for claim in summary.claims] == [rule]
