"""Every kind of claim and every verdict, on made-up runs whose answer is known."""

import random
from collections.abc import Mapping, Sequence
from dataclasses import replace

import pytest
from made_runs import STEPS, cell_of, cells_of, judged, reading, run_of, verdict

from sinklab.experiments.documents import JudgedClaim
from sinklab.experiments.quantities import RunNumbers
from sinklab.experiments.results import CellResults
from sinklab.experiments.verdicts.observations import observe

SINKS = {"softmax": [36.0, 30.0, 41.5], "k_biases": [0.0, 0.0, 0.0], "v_biases": [33.0, 29.0, 39.0]}
LOSSES = {"low": [3.000, 3.011, 2.989], "same": [3.001, 3.010, 2.991], "high": [3.300, 3.308, 3.292]}

LESS = {"is": "less", "value": "sink_1", "cell": "k_biases", "than": "softmax"}
GREATER = {"is": "greater", "value": "sink_1", "cell": "softmax", "than": "k_biases"}

Check = Mapping[str, object]


def at_losses(check: Check, losses: Mapping[str, Sequence[float]] = LOSSES) -> JudgedClaim:
    return verdict({"value": "valid_loss", **check}, cells_of("valid_loss", losses))


def at_sinks(check: Check, sinks: Mapping[str, Sequence[float]] = SINKS) -> JudgedClaim:
    return verdict({"value": "sink_1", **check}, cells_of("sink_1", sinks))


@pytest.mark.parametrize(
    ("check", "expected"),
    [
        ({"is": "within", "cell": "softmax", "at_least": 10.0}, "reproduced"),
        ({"is": "within", "cell": "softmax", "at_least": 10.0, "at_most": 60.0}, "reproduced"),
        ({"is": "within", "cell": "softmax", "at_least": 35.0}, "inconclusive"),
        ({"is": "within", "cell": "softmax", "at_most": 10.0}, "contradicted"),
        ({"is": "within", "cell": "k_biases", "at_most": 1.0}, "reproduced"),
        ({"is": "within", "cell": "k_biases", "at_least": 10.0}, "contradicted"),
        ({"is": "less", "cell": "k_biases", "than": "softmax"}, "reproduced"),
        ({"is": "less", "cell": "k_biases", "than": "softmax", "at_most": 1.0}, "reproduced"),
        ({"is": "less", "cell": "k_biases", "than": "softmax", "by": 20.0}, "reproduced"),
        ({"is": "less", "cell": "k_biases", "than": "softmax", "by": 34.0}, "direction only"),
        ({"is": "less", "cell": "k_biases", "than": "softmax", "by": 40.0}, "direction only"),
        ({"is": "less", "cell": "k_biases", "than": "softmax", "times": 2.0}, "reproduced"),
        ({"is": "greater", "cell": "softmax", "than": "k_biases", "at_least": 50.0}, "direction only"),
        ({"is": "greater", "cell": "k_biases", "than": "softmax"}, "contradicted"),
        ({"is": "greater", "cell": "k_biases", "than": "softmax", "by": 5.0}, "contradicted"),
        ({"is": "greater", "cell": "v_biases", "than": "softmax"}, "inconclusive"),
        ({"is": "equal", "cell": "v_biases", "to": "softmax", "margin": 15.0}, "reproduced"),
        ({"is": "equal", "cell": "v_biases", "to": "softmax", "margin": 3.0}, "inconclusive"),
        ({"is": "equal", "cell": "k_biases", "to": "softmax", "margin": 15.0}, "contradicted"),
        ({"is": "alike", "of": ["v_biases", "softmax"], "margin": 15.0}, "reproduced"),
        ({"is": "alike", "of": ["v_biases", "softmax", "k_biases"], "margin": 15.0}, "contradicted"),
        ({"is": "alike", "of": ["v_biases", "softmax"], "margin": 3.0}, "inconclusive"),
    ],
)
def test_rates(check: Check, expected: str) -> None:
    assert at_sinks(check).verdict == expected


@pytest.mark.parametrize(
    ("check", "expected"),
    [
        ({"is": "within", "cell": "low", "at_most": 3.1}, "reproduced"),
        ({"is": "greater", "cell": "high", "than": "low"}, "reproduced"),
        ({"is": "greater", "cell": "high", "than": "low", "by": 0.25}, "reproduced"),
        ({"is": "greater", "cell": "high", "than": "low", "by": 0.35}, "direction only"),
        ({"is": "greater", "cell": "high", "than": "low", "times": 1.05}, "reproduced"),
        ({"is": "greater", "cell": "high", "than": "low", "times": 1.2}, "direction only"),
        ({"is": "greater", "cell": "high", "than": "low", "by": 0.1, "at_most": 3.1}, "direction only"),
        ({"is": "less", "cell": "high", "than": "low"}, "contradicted"),
        ({"is": "less", "cell": "same", "than": "low"}, "inconclusive"),
        ({"is": "equal", "cell": "same", "to": "low", "margin": 0.05}, "reproduced"),
        ({"is": "equal", "cell": "high", "to": "low", "margin": 0.05}, "contradicted"),
        ({"is": "equal", "cell": "high", "to": "low", "margin": 0.3}, "inconclusive"),
        ({"is": "alike", "of": ["low", "same"], "margin": 0.05}, "reproduced"),
        ({"is": "alike", "of": ["low", "same", "high"], "margin": 0.05}, "contradicted"),
        ({"is": "rising", "over": ["low", "same", "high"]}, "reproduced"),
        ({"is": "falling", "over": ["high", "same", "low"]}, "reproduced"),
        ({"is": "falling", "over": ["low", "same", "high"]}, "contradicted"),
    ],
)
def test_losses(check: Check, expected: str) -> None:
    assert at_losses(check).verdict == expected


def test_a_trend_with_neighbours_that_clearly_go_the_other_way_is_not_monotone() -> None:
    bent = {"a": [3.0, 3.01, 2.99], "b": [3.5, 3.505, 3.495], "c": [3.4, 3.408, 3.392], "d": [4.0, 4.01, 3.99]}
    found = at_losses({"is": "rising", "over": ["a", "b", "c", "d"]}, bent)
    assert found.verdict == "inconclusive"
    assert "b to c" in found.evidence
    straight = {**bent, "c": [3.499, 3.509, 3.491]}
    assert at_losses({"is": "rising", "over": ["a", "b", "c", "d"]}, straight).verdict == "reproduced"
    level = {"a": [3.0, 3.01, 2.99], "b": [3.002, 3.008, 2.992], "c": [2.999, 3.011, 2.99]}
    assert at_losses({"is": "rising", "over": ["a", "b", "c"]}, level).verdict == "inconclusive"


def standing(*sinks: Sequence[float]) -> dict[str, CellResults]:
    return {"fixed": cell_of(*(run_of(seed, reading(sink=rates)) for seed, rates in enumerate(sinks)))}


AT_2 = {"is": "stands_at", "cell": "fixed", "position": 2, "at_least": 10.0}


@pytest.mark.parametrize(
    ("sinks", "expected"),
    [
        ([(0.1, 30.0, 1.0), (0.2, 36.0, 0.5), (0.0, 28.0, 1.5)], "reproduced"),
        ([(0.1, 6.0, 1.0), (0.2, 5.0, 0.8), (0.0, 7.0, 1.1)], "direction only"),
        ([(30.0, 0.2, 1.0), (36.0, 0.1, 1.0), (28.0, 0.0, 1.0)], "contradicted"),
        ([(30.0, 0.2, 1.0), (0.1, 36.0, 1.0), (28.0, 0.0, 1.0)], "inconclusive"),
        ([(9.0, 12.0, 1.0), (2.0, 12.0, 1.0), (11.9, 12.0, 1.0)], "inconclusive"),
        ([(0.0, 0.0, 0.0), (0.0, 0.0, 0.0), (0.0, 0.0, 0.0)], "inconclusive"),
    ],
)
def test_where_the_sink_stands(sinks: list[Sequence[float]], expected: str) -> None:
    found = verdict(AT_2, standing(*sinks))
    assert (found.verdict, found.quantity) == (expected, "sink_2")


def test_a_position_that_was_not_measured_is_said() -> None:
    found = verdict({**AT_2, "position": 9}, standing((0.1, 30.0), (0.1, 31.0)))
    assert found.verdict == "inconclusive"
    assert "not measured" in found.evidence


def emerging(*rates_at: Mapping[int, float]) -> dict[str, CellResults]:
    """Cells `softmax` whose Sink_1 at each step is given, a mapping per seed."""
    runs = [
        run_of(seed, *(reading(step, sink_1=rate) for step, rate in rates.items()))
        for seed, rates in enumerate(rates_at)
    ]
    return {"softmax": cell_of(*runs)}


EARLY = [
    {0: 0.0, 500: 0.3, 1000: 30.0, 1500: 36.0},
    {0: 0.0, 500: 0.2, 1000: 33.0, 1500: 31.0},
    {0: 0.0, 500: 0.25, 1000: 31.0, 1500: 33.0},
]


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        ({"before": 1000}, "reproduced"),
        ({"before": 1499}, "reproduced"),
        ({"before": 500}, "contradicted"),
        ({"before": 1000, "after": 500}, "reproduced"),
        ({"before": 1500, "after": 1000}, "contradicted"),
        ({"before": 1000, "rate": 32.0}, "inconclusive"),
        ({"before": 3000}, "inconclusive"),
    ],
)
def test_when_the_sink_appears(said: Check, expected: str) -> None:
    assert verdict({"is": "appears", "cell": "softmax", **said}, emerging(*EARLY)).verdict == expected


def test_a_number_at_a_step_is_that_of_the_last_evaluation_up_to_it() -> None:
    check = {"is": "within", "value": "sink_1", "cell": "softmax", "at_most": 1.0}
    assert verdict(check, emerging(*EARLY)).verdict == "contradicted"
    assert verdict({**check, "at_step": 999}, emerging(*EARLY)).verdict == "reproduced"
    beyond = verdict({**check, "at_step": 2000}, emerging(*EARLY))
    assert beyond.verdict == "inconclusive"  # no run went so far
    assert "at step 2,000" in beyond.evidence


def test_whether_a_cell_trains() -> None:
    run = run_of(0, reading())
    for trained, failed, diverges, trains in (
        (0, 3, "reproduced", "contradicted"),
        (3, 0, "contradicted", "reproduced"),
        (1, 2, "inconclusive", "inconclusive"),
        (0, 0, "not run", "not run"),
    ):
        results = {"elu": cell_of(*[replace(run, seed=seed) for seed in range(trained)], failed=failed)}
        assert verdict({"is": "diverges", "cell": "elu"}, results).verdict == diverges
        assert verdict({"is": "trains", "cell": "elu"}, results).verdict == trains
    assert verdict({"is": "diverges", "cell": "elu"}, {}).verdict == "not run"


def test_a_cell_without_finished_runs_leaves_its_claims_not_run_and_says_whether_it_failed() -> None:
    results = cells_of("sink_1", {"softmax": SINKS["softmax"]})
    assert verdict(LESS, results).verdict == "not run"
    failed = verdict(LESS, {**results, "k_biases": cell_of(failed=3)})
    assert failed.verdict == "not run"
    assert "did not train" in failed.evidence
    assert verdict(LESS, {}).verdict == "not run"


def test_seeds_that_failed_are_left_out_and_it_is_said() -> None:
    results = cells_of("sink_1", SINKS)
    results["softmax"] = replace(results["softmax"], failed=1)
    found = verdict(LESS, results)
    assert found.verdict == "reproduced"
    assert "1 seed of softmax did not train" in found.evidence


def test_a_number_that_was_not_measured_is_said() -> None:
    found = verdict(
        {"is": "within", "value": "sink_bias", "cell": "softmax", "at_least": 1.0}, cells_of("sink_1", SINKS)
    )
    assert found.verdict == "inconclusive"
    assert "Sink on the bias was not measured in softmax" in found.evidence


def test_one_seed_decides_nothing() -> None:
    one = {name: values[:1] for name, values in SINKS.items()}
    for check in (LESS, GREATER, {"is": "within", "value": "sink_1", "cell": "k_biases", "at_most": 1.0}):
        found = at_sinks(check, one)
        assert (found.verdict, found.seeds_needed) == ("inconclusive", None)
        assert "nothing is known of the spread" in found.evidence


def test_one_seed_of_a_cell_is_judged_by_what_the_others_say_of_the_spread() -> None:
    assert at_sinks(LESS, {**SINKS, "k_biases": [0.0]}).verdict == "reproduced"


def test_cells_that_never_vary_tell_nothing_of_the_spread() -> None:
    ends = {"k_biases": [0.0, 0.0, 0.0], "softmax": [100.0, 100.0, 100.0]}
    assert at_sinks(LESS, ends).verdict == "inconclusive"
    assert at_sinks({"is": "within", "cell": "k_biases", "at_most": 1.0}, ends).verdict == "inconclusive"
    assert at_sinks(LESS, {**ends, "other": [10.0, 12.0, 11.0]}).verdict == "inconclusive"  # no pair, no residual
    other = {"other": [10.0, 12.0, 11.0], "another": [20.0, 21.0, 22.5]}
    assert at_sinks(LESS, {**ends, **other}).verdict == "reproduced"


def test_a_cell_at_the_floor_against_one_with_36_percent_is_decided_with_three_seeds() -> None:
    floor = {"k_biases": [0.0, 0.0, 0.0], "softmax": [36.0, 28.0, 45.0]}
    found = at_sinks({**LESS, "at_most": 1.0}, floor)
    assert found.verdict == "reproduced"


def test_the_evidence_has_every_seed_the_interval_and_p_and_an_open_one_the_seeds_that_would_decide() -> None:
    found = at_sinks({"is": "greater", "cell": "v_biases", "than": "softmax"})
    assert "v_biases 33.0, 29.0, 39.0 % against softmax 36.0, 30.0, 41.5 %" in found.evidence
    assert "difference -2.1 points [" in found.evidence
    assert ", p 0." in found.evidence
    assert found.seeds_needed
    assert f"about {found.seeds_needed} seeds would decide" in found.evidence
    decided = at_sinks(LESS)
    assert decided.seeds_needed is None
    assert "seeds would decide" not in decided.evidence


def test_the_claim_carries_its_scale_cells_and_number() -> None:
    found = at_sinks(LESS)
    assert (found.scale, found.cells, found.quantity) == ("tiny", ["k_biases", "softmax"], "sink_1")
    assert (found.id, found.text, found.experiment) == ("claim_0", "claim 0", "made_up")


def test_claims_with_one_baseline_are_adjusted_together_and_others_are_not() -> None:
    values = {"base": [3.0, 3.01, 2.99], "a": [2.985, 2.99, 2.965], "b": [3.0, 3.02, 2.98], "c": [3.01, 3.0, 3.0]}
    less = [{"is": "less", "value": "valid_loss", "cell": cell, "than": "base"} for cell in "abc"]
    results = cells_of("valid_loss", values)
    alone, together = judged(less[0], results=results)[0], judged(*less, results=results)[0]
    assert "adjusted" not in alone.evidence
    assert "adjusted for 3 comparisons" in together.evidence
    assert (alone.verdict, together.verdict) == ("reproduced", "inconclusive")
    twice = judged(less[0], {**less[0], "at_most": 9.0}, results=results)  # one comparison, two claims about it
    assert "adjusted" not in twice[0].evidence
    elsewhere = {"is": "less", "value": "valid_loss", "cell": "c", "than": "b"}
    assert "adjusted" not in judged(less[0], elsewhere, results=results)[0].evidence


def reaching(**steps: Sequence[int | None]) -> dict[str, CellResults]:
    """Cells whose sink emerges at these steps of 1500, a seed each; None where it never does."""

    def run(seed: int, step: int | None) -> RunNumbers:
        crossed = [reading(at, sink_1=20.0 if step and at >= step else 0.5) for at in range(100, STEPS + 1, 100)]
        return run_of(seed, *crossed)

    return {cell: cell_of(*(run(seed, step) for seed, step in enumerate(several))) for cell, several in steps.items()}


def test_a_seed_that_never_got_there_counts_as_its_last_step_only_where_that_is_harder_for_the_claim() -> None:
    later = {"is": "greater", "value": "emergence_step", "cell": "slow", "than": "fast"}
    results = reaching(slow=[1300, None, 1200], fast=[400, 500, 400], mid=[700, 800, 900])
    assert verdict(later, results).verdict == "reproduced"
    assert "> 1500" in verdict(later, results).evidence
    sooner = {"is": "less", "value": "emergence_step", "cell": "slow", "than": "fast"}
    assert verdict(sooner, results).verdict == "inconclusive"  # not contradicted by a number that is a bound
    assert verdict({**sooner, "cell": "fast", "than": "slow"}, results).verdict == "reproduced"
    easier = {**later, "cell": "fast", "than": "slow"}
    assert verdict(easier, results).verdict == "inconclusive"  # its last step makes this easier
    for check, expected in (
        ({"at_least": 300.0}, "reproduced"),
        ({"at_most": 9000.0}, "inconclusive"),
        ({"at_least": 300.0, "at_most": 9000.0}, "inconclusive"),
    ):
        found = verdict({"is": "within", "value": "emergence_step", "cell": "slow", **check}, results)
        assert found.verdict == expected
    equal = {"is": "equal", "value": "emergence_step", "cell": "slow", "to": "fast", "margin": 5000.0}
    assert verdict(equal, results).verdict == "inconclusive"


def growing(*steps: tuple[int | None, int | None]) -> CellResults:
    """A cell in which the norm and the sink grow at these steps, a seed each."""

    def run(seed: int, norm: int | None, sink: int | None) -> RunNumbers:
        return run_of(
            seed,
            *(
                reading(at, sink_1=20.0 if sink and at >= sink else 0.5, norm_ratio=5.0 if norm and at >= norm else 1.0)
                for at in range(100, STEPS + 1, 100)
            ),
        )

    return cell_of(*(run(seed, norm, sink) for seed, (norm, sink) in enumerate(steps)))


@pytest.mark.parametrize(
    ("steps", "expected"),
    [
        ([(300, 900), (300, 1000), (400, 1100)], "reproduced"),
        ([(900, 300), (1000, 300), (1100, 400)], "contradicted"),
        ([(300, 400), (400, 300), (300, 300)], "inconclusive"),
        ([(300, 1000), (300, None), (400, 1200)], "reproduced"),
        ([(300, 1000), (None, 1200), (300, 1400)], "inconclusive"),
        ([(None, None), (None, None)], "inconclusive"),
    ],
)
def test_which_of_two_steps_comes_first(steps: list[tuple[int | None, int | None]], expected: str) -> None:
    check = {"is": "precedes", "cell": "softmax", "first": "norm_step", "then": "emergence_step"}
    assert verdict(check, {"softmax": growing(*steps)}).verdict == expected


@pytest.mark.parametrize(
    ("ratios", "expected"),
    [([3.0, 1.2, 2.1], 200), ([3.0, 2.4, 1.2, 2.1], 300), ([3.0, 1.2, 1.9], None), ([3.0, 2.4], 1), ([1.0, 2.0], 100)],
)
def test_a_norm_grows_from_below_so_that_an_untrained_model_does_not_count(
    ratios: list[float], expected: int | None
) -> None:
    rows = [reading(100 * at, norm_ratio=ratio) for at, ratio in enumerate(ratios)]
    assert run_of(0, *rows).value("norm_step") == expected


def test_a_run_that_never_recorded_its_heads_has_no_step_of_a_layer() -> None:
    older = cell_of(run_of(0, reading(100), reading(200)))
    newer = cell_of(run_of(0, *(replace(reading(step), sink_layers=[0.0, 0.0]) for step in (100, 200))))
    seen = observe({"older": older, "newer": newer}, "layer_step_2")
    assert "older" not in seen.by_cell
    assert seen.never_reached("newer") == 1
    assert "newer" not in observe({"newer": newer}, "layer_step_3").by_cell
    check = {"is": "precedes", "cell": "older", "first": "emergence_step", "then": "layer_step_2"}
    assert verdict(check, {"older": older}).verdict == "inconclusive"


def test_a_rate_of_one_head_counts_sequences() -> None:
    run = run_of(0, replace(reading(), sink_layers=[50.0, 0.0]), triples=400)
    results = {"softmax": cell_of(replace(run, sequences=100))}
    assert observe(results, "sink_layer_1").triples("softmax") == 100
    assert observe(results, "sink_1").triples("softmax") == 400


ALL_KINDS: list[Check] = [
    LESS,
    {**GREATER, "by": 10.0},
    {"is": "equal", "value": "sink_1", "cell": "v_biases", "to": "softmax", "margin": 15.0},
    {"is": "alike", "value": "sink_1", "of": ["v_biases", "softmax", "k_biases"], "margin": 15.0},
    {"is": "rising", "value": "sink_1", "over": ["k_biases", "v_biases", "softmax"]},
    {"is": "same_order", "value": "sink_1", "of": list(SINKS), "there": list(SINKS)},
    {"is": "within", "value": "sink_1", "cell": "softmax", "at_least": 35.0},
    {"is": "stands_at", "cell": "softmax", "position": 1},
    {"is": "appears", "cell": "softmax", "before": 1500},
]


def test_the_order_of_seeds_and_cells_changes_nothing() -> None:
    results = cells_of("sink_1", {**SINKS, "other": [5.0, 7.0, 11.0]})
    expected = judged(*ALL_KINDS, results=results)
    assert len({one.verdict for one in expected}) > 1
    draw = random.Random(0)
    for _ in range(5):
        cells = draw.sample(list(results), len(results))
        shuffled = {cell: replace(results[cell], numbers=draw.sample(list(results[cell].numbers), 3)) for cell in cells}
        assert judged(*ALL_KINDS, results=shuffled) == expected


@pytest.mark.parametrize("factor", [0.01, 3.7, 1000.0])
def test_losses_in_another_unit_have_the_same_verdicts(factor: float) -> None:
    draw = random.Random(1)
    for _ in range(30):
        losses = {cell: [3.0 + draw.gauss(0, 0.02) + 0.02 * i for _ in range(3)] for i, cell in enumerate("abc")}
        scaled = {cell: [factor * loss for loss in several] for cell, several in losses.items()}
        for kind in ("greater", "less"):
            check = {"is": kind, "cell": "c", "than": "a", "times": 1.001}
            assert at_losses(check, losses).verdict == at_losses(check, scaled).verdict
