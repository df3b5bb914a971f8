"""Basis of a verdict: number of seeds, their cells, threshold, and claims that do not apply."""

from collections.abc import Mapping, Sequence

import pytest
from made_runs import cell_of, cells_of, experiment_of, judged, reading, run_of, verdict

from sinklab.experiments.documents import CellSummary, JudgedClaim, Summary
from sinklab.experiments.summary import at_scale, summarise
from sinklab.experiments.verdicts import wording
from sinklab.experiments.verdicts.judging import judge
from sinklab.experiments.verdicts.wording import Committed, verdict_of_five
from sinklab.train.run import Evaluation

SINKS = {"softmax": [36.0, 30.0, 41.5, 27.0, 22.0], "k_biases": [0.0] * 5}
LESS = {"is": "less", "value": "sink_1", "cell": "k_biases", "than": "softmax", "absent": True}
HAS_ONE = {"is": "within", "value": "sink_1", "cell": "softmax", "at_least": 10.0}


def first(seeds: int) -> dict[str, CellSummary]:
    return cells_of("sink_1", {cell: values[:seeds] for cell, values in SINKS.items()})


def test_fewer_than_five_seeds_give_numbers_and_no_verdict() -> None:
    within, less = judged(HAS_ONE, LESS, results=first(3))
    assert (within.verdict, within.seeds, within.shown_verdict) == ("no verdict", 3, "no verdict")
    assert within.evidence == "Sink_1 by seed: softmax 36.0, 30.0, 41.5 %. The value is at least 10 % at 3 of 3 seeds."
    assert less.verdict == "no verdict"
    assert "In 0 of 9 pairs of seeds, k_biases is not below softmax." in less.evidence
    assert {one.verdict for one in judged(HAS_ONE, LESS, results=first(4))} == {"no verdict"}
    assert {one.verdict for one in judged(HAS_ONE, LESS, results=first(5))} == {"reproduced"}


def test_a_comparison_counts_the_seeds_of_the_cell_with_fewer() -> None:
    results = {**first(5), **cells_of("sink_1", {"k_biases": [0.0] * 4})}
    assert (verdict(LESS, results).verdict, verdict(LESS, results).seeds) == ("no verdict", 4)


def test_one_seed_is_said_to_give_no_verdict() -> None:
    found = verdict(HAS_ONE, first(1))
    assert (found.verdict, found.shown_verdict) == ("no verdict", "one seed: no verdict")
    assert found.evidence == "Sink_1 by seed: softmax 36.0 %. The value is at least 10 % at 1 of 1 seed."


def test_the_evidence_has_every_seed_the_count_and_the_median_difference_with_its_ends() -> None:
    found = verdict(LESS, first(5))
    assert found.evidence == (
        "Sink_1 by seed: k_biases 0.0, 0.0, 0.0, 0.0, 0.0 %; softmax 36.0, 30.0, 41.5, 27.0, 22.0 %. "
        "In 0 of 25 pairs of seeds, k_biases is not below softmax. "
        "The median difference at the same seed is -30.0 points [-41.5, -22.0]. "
        "The rate of k_biases is below 1 % at 5 of 5 seeds (95 % CI: 48 to 100 % of all seeds)."
    )


def test_a_cell_without_finished_runs_leaves_its_claims_not_run_and_says_whether_it_failed() -> None:
    results = cells_of("sink_1", {"softmax": SINKS["softmax"]})
    assert verdict(LESS, results).verdict == "not run"
    failed = verdict(LESS, {**results, "k_biases": cell_of(failed=3)})
    assert (failed.verdict, failed.evidence) == ("not run", "Training of k_biases diverged at 3 seeds.")
    assert verdict(LESS, {}).verdict == "not run"


def test_seeds_that_failed_to_train_are_excluded_and_reported() -> None:
    results = first(5)
    six = {**results, "softmax": cell_of(*results["softmax"].numbers, failed=1)}
    assert verdict(LESS, six).verdict == "reproduced"
    assert "Training of softmax diverged at 1 seed, which is excluded." in verdict(LESS, six).evidence
    four = {**results, "softmax": cell_of(*results["softmax"].numbers[:4], failed=1)}
    assert verdict(LESS, four).verdict == "no verdict"


def test_an_experiment_uses_its_own_seeds_only() -> None:
    both = {cell: cell_of(*(run_of(seed, reading(sink_1=rate)) for seed, rate in pairs)) for cell, pairs in {
        "softmax": [*((seed, 50.0) for seed in range(100, 105)), *((seed, 0.5) for seed in range(5))],
        "k_biases": [*((seed, 0.0) for seed in range(100, 105)), *((seed, 0.0) for seed in range(5))],
    }.items()}  # fmt: skip
    experiment = experiment_of(HAS_ONE, LESS, cells=list(both), first_seed=100)
    own = at_scale(experiment, "tiny", range(100, 105))
    assert [one.verdict for one in judge(own, both)] == ["reproduced"] * 2
    assert [one.seeds for one in judge(at_scale(experiment, "tiny", range(100, 102)), both)] == [2, 2]
    assert [one.verdict for one in judge(at_scale(experiment, "tiny", range(5)), both)] == [
        "contradicted",
        "reproduced",
    ]
    summary = summarise([own], both)
    assert summary.cells["softmax"].seeds == 10
    own = summary.cells["softmax"].of_seeds(summary.experiments["made_up"].seeds)
    assert own.values["sink_1"].seeds == [50.0] * 5
    assert (own.seeds, own.sink_rate, own.valid_loss, own.hidden_norm_ratio_max) == (5, [], None, None)


def test_a_judged_claim_has_its_kind_of_evidence_its_date_and_its_revision() -> None:
    changed = "2026-11-24: at least 10 %, was 5 %; after three seeds had been seen"
    said = [{"id": "a", "text": "A", "check": HAS_ONE},
            {"id": "b", "text": "B", "check": HAS_ONE, "evidence": "exploratory", "stated": "2026-11-24",
             "changed": changed}]  # fmt: skip
    experiment = experiment_of(cells=list(SINKS), claims=said, evidence="confirmatory", stated="2026-11-23")
    one, other = judge(at_scale(experiment, "tiny"), first(5))
    assert (one.analysis, one.stated, one.changed) == ("confirmatory", "2026-11-23", "")
    assert (other.analysis, other.stated, other.changed) == ("exploratory", "2026-11-24", changed)
    assert f"Revision of {changed}" in other.remarks


def test_confirmatory_and_exploratory_claims_are_counted_apart_and_references_not_at_all() -> None:
    claims = [
        {"id": "a", "text": "A", "check": HAS_ONE},
        {"id": "b", "text": "B", "check": {**HAS_ONE, "at_least": 50.0}},
        {"id": "c", "text": "C", "check": HAS_ONE, "evidence": "exploratory"},
        {"id": "d", "text": "D", "check": HAS_ONE, "same_as": "made_up.a"},
    ]
    experiment = experiment_of(cells=list(SINKS), claims=claims, evidence="confirmatory")
    summary = summarise([at_scale(experiment, "tiny")], first(5))
    assert summary.counts == {"confirmatory": {"reproduced": 1, "contradicted": 1}, "exploratory": {"reproduced": 1}}
    assert Summary.model_validate(summary.model_dump(by_alias=True)).counts == summary.counts


def test_a_reference_has_the_verdict_of_the_claim_that_it_refers_to() -> None:
    claim = {"id": "a", "text": "A", "check": HAS_ONE}
    table = experiment_of(cells=list(SINKS), claims=[claim], id="table", evidence="confirmatory")
    lab = experiment_of(cells=list(SINKS), claims=[{**claim, "id": "b", "same_as": "table.a"}], id="lab")
    both = summarise([at_scale(table, "tiny", range(5)), at_scale(lab, "tiny", range(1))], first(5))
    assert [(one.verdict, one.seeds, one.analysis) for one in both.claims] == [("reproduced", 5, "confirmatory")] * 2
    alone = summarise([at_scale(lab, "tiny", range(1))], first(5)).claims[0]
    assert (alone.shown_verdict, alone.seeds) == ("one seed: no verdict", 1)


PEAK = {"is": "greater", "cell": "softmax", "value": "sink_1", "than_value": "highest_rate_except_1"}


def at_thresholds(**rates: Sequence[Mapping[str, float]]) -> dict[str, CellSummary]:
    """Cells whose Sink_1 at each threshold is given, a mapping per seed."""

    def row(by_eps: Mapping[str, float]) -> Evaluation:
        return reading(sink_1=by_eps["0.3"]).model_copy(update={"sink_rate_eps": by_eps})

    return {cell: cell_of(*(run_of(seed, row(one)) for seed, one in enumerate(seeds))) for cell, seeds in rates.items()}


def test_verdicts_at_other_thresholds_are_given_where_rates_were_recorded() -> None:
    results = at_thresholds(softmax=[{"0.2": 30.0, "0.3": 12.0, "0.4": 4.0 + 2 * seed} for seed in range(5)])
    found = verdict(HAS_ONE, results)
    assert (found.verdict, found.at_eps) == ("reproduced", {"0.2": "reproduced", "0.4": "inconclusive"})
    assert found.remarks[:2] == ["The verdict is the same at eps 0.2.", "At eps 0.4, the verdict is inconclusive."]
    both = {"is": "all", "of": [HAS_ONE, {"is": "within", "value": "valid_loss", "cell": "softmax", "at_most": 4.0}]}
    assert verdict(both, results).at_eps == {"0.2": "reproduced", "0.4": "inconclusive"}
    assert verdict({**HAS_ONE, "at_least": 10.0, "before": 1500}, results).at_eps["0.4"] == "inconclusive"
    for check in ({**HAS_ONE, "value": "valid_loss"}, PEAK,
                  {**HAS_ONE, "value": "sink_first_2"}):  # fmt: skip
        assert verdict(check, results).at_eps == {}
    assert verdict(HAS_ONE, first(5)).at_eps == {}  # rows of older runs


def test_a_rate_on_the_first_token_or_the_bias_is_their_sum_at_every_threshold() -> None:
    check = {"is": "greater", "value": "sink_1_or_bias", "cell": "k_biases", "than": "softmax"}
    rates = {"0.2": 30.0, "0.3": 12.0, "0.4": 4.0}
    results = at_thresholds(softmax=[rates] * 5, k_biases=[dict.fromkeys(rates, 1.0)] * 5)

    def with_bias(by_eps: Mapping[str, float] | None) -> dict[str, CellSummary]:
        row = (
            results["k_biases"]
            .numbers[0]
            .last.model_copy(update={"sink_rate_bias": 20.0, "sink_rate_bias_eps": by_eps})
        )
        return {**results, "k_biases": cell_of(*(run_of(seed, row) for seed in range(5)))}

    found = verdict(check, with_bias({"0.2": 29.0, "0.3": 20.0, "0.4": 3.5}))
    assert (found.verdict, found.at_eps) == ("reproduced", {"0.2": "inconclusive", "0.4": "reproduced"})  # 0.2: a tie
    assert verdict(check, with_bias(None)).at_eps == {}  # recorded at the recipe's threshold only


def test_comparisons_of_sink_1_are_also_judged_by_the_mean_importance_without_bounds() -> None:
    def cell(*rates_and_importance: tuple[float, float]) -> CellSummary:
        rows = [
            reading(sink_1=rate).model_copy(update={"importance_first_heads": [[alpha, 0.0], [None, alpha]]})
            for rate, alpha in rates_and_importance
        ]
        return cell_of(*(run_of(seed, row) for seed, row in enumerate(rows)))

    weak = [(0.0, 0.03)] * 5
    results = {"softmax": cell((0.0, 0.12), *[(20.0, 0.3)] * 4), "k_biases": cell(*weak), "gate": cell(*weak)}
    less = {"is": "less", "value": "sink_1", "cell": "k_biases", "than": "softmax", "absent": True}
    found = verdict(less, results)
    assert (found.verdict, found.by_importance) == ("inconclusive", "reproduced")
    assert "By mean importance instead of Sink_1, the verdict is reproduced." in found.remarks
    bounded = {"is": "greater", "value": "sink_1", "cell": "softmax", "than": "gate", "at_least": 50.0}
    assert verdict(bounded, results).by_importance == "reproduced"
    rising = {"is": "rising", "value": "sink_1", "over": ["k_biases", "gate", "softmax"]}
    assert verdict(rising, results).by_importance == "reproduced"
    for check in (HAS_ONE, {**less, "value": "sink_2"}, {"is": "absent", "cell": "gate"}):
        assert verdict(check, results).by_importance == ""
    assert verdict(less, {cell: first(5)["softmax"] for cell in results}).by_importance == ""  # not recorded


def trained_norms(*before_and_after: tuple[float, float]) -> CellSummary:
    """A cell with these norm ratios untrained and at its last evaluations, a pair per seed."""
    return cell_of(*(
        run_of(seed, reading(0, norm_ratio=before), *(reading(step, norm_ratio=after) for step in (1300, 1400, 1500)))
        for seed, (before, after) in enumerate(before_and_after)
    ))  # fmt: skip


NORMS = {"is": "greater", "value": "norm_ratio", "cell": "softmax", "than": "k_biases"}
SMALL = trained_norms(*[(2.0, 2.0)] * 5)


@pytest.mark.parametrize(
    ("softmax", "expected"),
    [
        ([(2.0, 8.0)] * 5, "reproduced"),
        ([(4.0, 8.0)] * 5, "reproduced"),
        ([(4.1, 8.0), *[(2.0, 8.0)] * 4], "not asked"),
        ([(8.0, 8.0)] * 5, "not asked"),
        ([(4.1, 8.0)] * 3, "no verdict"),
    ],
)
def test_claims_about_massive_activations_are_asked_where_the_baseline_has_one(
    softmax: Sequence[tuple[float, float]], expected: str
) -> None:
    results = {"softmax": trained_norms(*softmax), "k_biases": SMALL}
    asked, sinks = judged(NORMS, {**NORMS, "value": "sink_1"}, results=results, requires_massive=True)
    assert asked.verdict == expected
    if expected == "not asked":
        assert "The value is at least 2 at" in asked.evidence
    assert sinks.verdict in ("inconclusive", "no verdict")  # not about a norm
    never = {"softmax": cell_of(*(run_of(seed, reading()) for seed in range(5))), "k_biases": SMALL}
    assert judged(NORMS, results=never, requires_massive=True)[0].verdict == "not asked"
    assert judged(NORMS, results={}, requires_massive=True)[0].verdict == "not run"
    assert judged(NORMS, results=results)[0].verdict in ("reproduced", "no verdict")


@pytest.mark.parametrize(
    ("softmax", "expected"),
    [
        ([10.0] * 5, "reproduced"),
        ([9.9, 30.0, 30.0, 30.0, 30.0], "not asked"),
        ([9.9, *[30.0] * 8], "reproduced"),  # with nine seeds, one may deviate
        ([9.9, 30.0, 30.0], "no verdict"),
    ],
)
def test_claims_about_sinks_are_asked_where_the_baseline_has_one(softmax: Sequence[float], expected: str) -> None:
    results = cells_of("sink_1", {"softmax": softmax, "k_biases": [0.0] * len(softmax)})
    absent = {"is": "absent", "cell": "k_biases"}
    of_softmax = {"is": "within", "value": "sink_1", "cell": "softmax", "at_least": 5.0}
    loss = {"is": "within", "value": "valid_loss", "cell": "k_biases", "at_most": 99.0}
    asked, alone, other = judged(absent, of_softmax, loss, results=results, requires_sink=True)
    assert asked.verdict == expected
    if expected == "not asked":
        assert "requires a sink in softmax" in asked.evidence
    enough = len(softmax) >= 5
    assert alone.verdict == ("reproduced" if enough else "no verdict")  # of the baseline itself, which may have none
    assert other.verdict != "not asked"  # about no sink
    assert judged(absent, results={}, requires_sink=True)[0].verdict == "not run"


def test_norm_claims_of_the_last_block_ask_for_growth_of_the_last_block() -> None:
    def of(ratios: tuple[float, float, float]) -> CellSummary:
        before, after = reading(0), reading(100)
        before = before.model_copy(update={"hidden_norm_ratio": [1.0, 3.0, 1.0]})
        return cell_of(*(run_of(seed, before, after.model_copy(update={"hidden_norm_ratio": [*ratios]}))
                         for seed in range(5)))  # fmt: skip

    results = {"softmax": of((1.0, 4.0, 3.0)), "k_biases": of((1.0, 2.0, 1.0))}
    last = {"is": "less", "value": "norm_ratio_last", "cell": "k_biases", "than": "softmax", "times": 2.0}
    largest = last | {"value": "norm_ratio", "times": None}
    assert [one.verdict for one in judged(last, largest, results=results, requires_massive=True)] == [
        "reproduced",
        "not asked",  # the largest ratio grows from 3 to 4 only
    ]


def test_a_claim_may_name_the_cell_that_must_have_a_massive_activation() -> None:
    claims = [{"id": "a", "text": "A", "check": NORMS, "requires_massive": "k_biases"},
              {"id": "b", "text": "B", "check": NORMS, "requires_massive": False}]  # fmt: skip
    results = {"softmax": trained_norms(*[(2.0, 8.0)] * 5), "k_biases": SMALL}
    experiment = experiment_of(cells=list(results), claims=claims, requires_massive=True)
    assert [one.verdict for one in judge(at_scale(experiment, "tiny"), results)] == ["not asked", "reproduced"]


def test_norms_are_shown_with_their_untrained_and_lowest_values() -> None:
    rows = [reading(step, norm_ratio=norm) for step, norm in ((0, 3.0), (100, 1.2), (200, 5.0), (300, 6.0), (400, 7.0))]
    run = run_of(0, *rows)
    assert run.value("norm_ratio") == 6.0
    assert (run.value("norm_untrained"), run.value("norm_lowest"), run.value("norm_growth")) == (3.0, 1.2, 2.0)
    summary = summarise([at_scale(experiment_of(cells=["softmax"]), "tiny")], {"softmax": cell_of(run)})
    estimate = summary.cells["softmax"].values["norm_ratio"]
    assert (estimate.untrained, estimate.lowest) == (3.0, 1.2)


def published(name: str, values: Sequence[float]) -> JudgedClaim:
    """A claim about the 60 M softmax model, of which the paper prints Sink_1 18.18 %."""
    results = cells_of(name, {"softmax": values, "k_biases": [0.0] * 5})
    return verdict(HAS_ONE, results, "60m", published={"table": "table_4"})


def test_at_the_papers_scale_its_number_must_be_in_the_prediction_interval() -> None:
    close = [16.0, 17.0, 18.0, 19.0, 20.0]  # 18 +- 3.04 times 1.58
    assert published("sink_1", close).verdict == "reproduced"
    assert (
        "The paper's value of 18.18 % for softmax is within the 95 % prediction interval of another seed, [13.1, 22.9]."
        in published("sink_1", close).evidence
    )
    far = [30.0, 31.0, 32.0, 33.0, 34.0]
    assert published("sink_1", far).verdict == "direction only"
    assert "is outside the 95 % prediction interval of another seed, [27.1, 36.9]" in published("sink_1", far).evidence
    for end, beyond in ((18.18 - 0.05, -0.01), (18.18 + 0.05, 0.01)):  # of equal seeds, rounding alone is the interval
        assert 18.18 in (end + 0.05, end - 0.05)
        assert published("sink_1", [end] * 5).verdict == "reproduced"
        assert published("sink_1", [end + beyond] * 5).verdict == "direction only"
    tiny = verdict(HAS_ONE, cells_of("sink_1", {"softmax": far}), published={"table": "table_4"})
    assert (tiny.verdict, "paper" in tiny.evidence) == ("reproduced", False)


def test_committed_verdicts_of_five_seeds_are_shown_beside_those_of_fewer_seeds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from benchmarks.committed import committed_verdicts

    experiment = experiment_of(LESS, cells=list(SINKS), id="table")
    kept = committed_verdicts(summarise([at_scale(experiment, "tiny")], first(5)))
    monkeypatch.setattr(wording, "shipped_verdicts", lambda: Committed(scales={"tiny": kept}))
    lab = experiment_of(cells=list(SINKS), claims=[{"id": "b", "text": "B", "check": LESS, "same_as": "table.claim_0"}])
    begins = "An earlier sweep with 5 seeds had the verdict reproduced. Sink_1 by seed: k_biases 0.0, 0.0"
    (few,), (enough,) = judge(at_scale(lab, "tiny"), first(1)), judge(at_scale(lab, "tiny"), first(5))
    assert few.elsewhere.startswith(begins)
    assert enough.elsewhere == judge(at_scale(lab, "tiny"), first(1), altered=True)[0].elsewhere == ""
    assert verdict_of_five("small", "table.claim_0") == ""
    assert committed_verdicts(summarise([at_scale(experiment, "tiny")], first(3))) == {}
