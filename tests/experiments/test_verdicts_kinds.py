"""Every kind of claim, on made-up runs whose answer is known by hand."""

import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import pytest
from made_runs import STEPS, cell_of, cells_of, judged, reading, run_of, verdict

from sinklab.experiments.documents import CellSummary, JudgedClaim
from sinklab.experiments.quantities import RunNumbers

SINKS = {
    "softmax": [36.0, 30.0, 41.5, 27.0, 22.0],
    "k_biases": [0.0, 0.0, 0.0, 0.0, 0.0],
    "v_biases": [33.0, 29.0, 39.0, 25.0, 24.0],
    "weak": [9.0, 3.0, 7.5, 5.0, 1.0],
}
LOSSES = {
    "low": [3.000, 3.011, 2.989, 3.004, 2.995],
    "same": [3.001, 3.010, 2.991, 3.005, 2.993],
    "high": [3.300, 3.308, 3.292, 3.305, 3.296],
}

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
        ({"is": "within", "cell": "softmax", "at_least": 22.0}, "reproduced"),
        ({"is": "within", "cell": "softmax", "at_least": 10.0, "at_most": 60.0}, "reproduced"),
        ({"is": "within", "cell": "softmax", "at_least": 23.0}, "inconclusive"),
        ({"is": "within", "cell": "softmax", "at_most": 10.0}, "contradicted"),
        ({"is": "within", "cell": "weak", "at_most": 5.0}, "inconclusive"),
        ({"is": "absent", "cell": "k_biases"}, "reproduced"),
        ({"is": "absent", "cell": "softmax"}, "contradicted"),
        ({"is": "less", "cell": "k_biases", "than": "softmax"}, "reproduced"),
        ({"is": "less", "cell": "k_biases", "than": "softmax", "absent": True}, "reproduced"),
        ({"is": "less", "cell": "weak", "than": "softmax", "absent": True}, "direction only"),
        ({"is": "less", "cell": "softmax", "than": "k_biases", "absent": True}, "contradicted"),
        ({"is": "less", "cell": "weak", "than": "softmax", "at_most": 9.0}, "reproduced"),
        ({"is": "less", "cell": "weak", "than": "softmax", "at_most": 8.0}, "direction only"),
        ({"is": "less", "cell": "weak", "than": "softmax", "by": 12.0}, "reproduced"),  # 9 + 12 < 22
        ({"is": "less", "cell": "weak", "than": "softmax", "by": 13.0}, "direction only"),  # 9 + 13 is a tie with 22
        ({"is": "less", "cell": "weak", "than": "softmax", "times": 2.0}, "reproduced"),
        ({"is": "less", "cell": "weak", "than": "softmax", "times": 3.0}, "direction only"),
        ({"is": "greater", "cell": "softmax", "than": "weak", "times": 2.0, "at_least": 25.0}, "direction only"),
        ({"is": "greater", "cell": "k_biases", "than": "softmax"}, "contradicted"),
        ({"is": "greater", "cell": "k_biases", "than": "softmax", "by": 5.0}, "contradicted"),
        ({"is": "greater", "cell": "v_biases", "than": "softmax"}, "inconclusive"),
        ({"is": "equal", "cell": "v_biases", "to": "softmax", "margin": 3.0}, "reproduced"),
        ({"is": "equal", "cell": "v_biases", "to": "softmax", "margin": 2.0}, "inconclusive"),
        ({"is": "equal", "cell": "k_biases", "to": "softmax", "margin": 15.0}, "contradicted"),
        ({"is": "equal", "cell": "k_biases", "to": "softmax", "margin": 22.0}, "inconclusive"),
        ({"is": "equal", "of": ["softmax", "v_biases"], "margin": 3.0}, "reproduced"),
        ({"is": "equal", "of": ["softmax", "v_biases", "k_biases"], "margin": 15.0}, "contradicted"),
        ({"is": "equal", "of": ["softmax", "v_biases"], "margin": 2.0}, "inconclusive"),
        ({"is": "rising", "over": ["k_biases", "weak", "softmax"]}, "reproduced"),
        ({"is": "falling", "over": ["k_biases", "weak", "softmax"]}, "contradicted"),
    ],
)
def test_verdicts_of_claims_about_rates(check: Check, expected: str) -> None:
    assert at_sinks(check).verdict == expected


@pytest.mark.parametrize(
    ("check", "expected"),
    [
        ({"is": "within", "cell": "low", "at_most": 3.1}, "reproduced"),
        ({"is": "greater", "cell": "high", "than": "low"}, "reproduced"),
        ({"is": "greater", "cell": "high", "than": "low", "by": 0.28}, "reproduced"),  # 3.292 against 3.011 + 0.28
        ({"is": "greater", "cell": "high", "than": "low", "by": 0.29}, "direction only"),
        ({"is": "less", "cell": "high", "than": "low"}, "contradicted"),
        ({"is": "less", "cell": "same", "than": "low"}, "inconclusive"),
        ({"is": "equal", "cell": "same", "to": "low", "margin": 0.05}, "reproduced"),
        ({"is": "equal", "cell": "high", "to": "low", "margin": 0.05}, "contradicted"),
        ({"is": "equal", "cell": "high", "to": "low", "margin": 0.301}, "inconclusive"),
        ({"is": "equal", "of": ["low", "same", "high"], "margin": 0.05}, "contradicted"),
    ],
)
def test_verdicts_of_claims_about_losses(check: Check, expected: str) -> None:
    assert at_losses(check).verdict == expected


def test_a_difference_beyond_the_margin_on_both_sides_leaves_equality_open() -> None:
    apart = {"a": [1.0, 9.0, 1.0, 9.0, 1.0], "b": [5.0, 5.0, 5.0, 5.0, 5.0]}
    assert at_losses({"is": "equal", "cell": "a", "to": "b", "margin": 1.0}, apart).verdict == "inconclusive"
    assert (
        "at most 1 nats in magnitude at 0 of 5 seeds"
        in at_losses({"is": "equal", "of": ["b", "a"], "margin": 1.0}, apart).evidence
    )


def test_equality_of_several_cells_requires_each_within_the_margin_of_the_first() -> None:
    three = {"mid": [3.0] * 5, "up": [3.04] * 5, "down": [2.96] * 5}
    assert at_losses({"is": "equal", "of": ["mid", "up", "down"], "margin": 0.05}, three).verdict == "reproduced"
    assert at_losses({"is": "equal", "of": ["up", "mid", "down"], "margin": 0.05}, three).verdict == "contradicted"


def test_a_trend_is_inconclusive_if_neighbours_go_the_other_way_without_overlap() -> None:
    bent = {"a": [3.0, 3.01, 2.99, 3.0, 3.0], "b": [3.5, 3.505, 3.495, 3.5, 3.5], "c": [3.4, 3.41, 3.39, 3.4, 3.4],
            "d": [4.0, 4.01, 3.99, 4.0, 4.0]}  # fmt: skip
    found = at_losses({"is": "rising", "over": ["a", "b", "c", "d"]}, bent)
    assert found.verdict == "inconclusive"
    assert "From b to c, the values change in the opposite direction without overlap" in found.evidence
    straight = {**bent, "c": [3.499, 3.509, 3.491, 3.5, 3.5]}
    assert at_losses({"is": "rising", "over": ["a", "b", "c", "d"]}, straight).verdict == "reproduced"
    one_seed_falls = {"a": [3.0] * 5, "b": [3.1] * 5, "c": [3.2, 3.2, 3.2, 3.2, 2.9]}
    assert at_losses({"is": "rising", "over": ["a", "b", "c"]}, one_seed_falls).verdict == "inconclusive"


def with_evaluations(*seeds: Sequence[float]) -> dict[str, CellSummary]:
    """Cell `sigmoid` whose Sink_1 at its evaluations is given, a list per seed."""
    runs = [
        run_of(at, *(reading(100 * k + 1, sink_1=rate) for k, rate in enumerate(rates)))
        for at, rates in enumerate(seeds)
    ]
    return {"sigmoid": cell_of(*runs)}


def test_a_number_is_the_mean_of_the_last_three_evaluations() -> None:
    results = with_evaluations(*[[90.0, 0.0, 3.0, 6.0]] * 5)
    check = {"is": "within", "value": "sink_1", "cell": "sigmoid"}
    assert verdict({**check, "at_least": 2.99, "at_most": 3.01}, results).verdict == "reproduced"
    assert verdict({**check, "at_least": 31.0, "at_step": 250}, results).verdict == "reproduced"  # (90 + 0 + 3) / 3
    assert verdict({**check, "at_least": 89.0, "at_step": 99}, results).verdict == "reproduced"  # nothing before it
    beyond = verdict({**check, "at_least": 0.0, "at_step": 302}, results)
    assert (beyond.verdict, beyond.seeds) == ("no verdict", 0)
    assert "at step 302 was not measured in sigmoid" in beyond.evidence


def test_a_sink_is_absent_below_one_percent_at_each_of_the_last_three_evaluations() -> None:
    quiet, once = [50.0, 0.9, 0.0, 0.0], [0.0, 0.0, 1.2, 0.0]
    absent = {"is": "absent", "cell": "sigmoid"}
    assert verdict(absent, with_evaluations(*[quiet] * 5)).verdict == "reproduced"
    found = verdict(absent, with_evaluations(quiet, quiet, quiet, quiet, once))  # the mean of which is 0.4
    assert found.verdict == "inconclusive"
    assert "at each of the last three evaluations at 4 of 5 seeds (95 % CI: 28 to 99 % of all seeds)" in found.evidence
    assert verdict(absent, with_evaluations(*[once] * 5)).verdict == "contradicted"


def standing(*sinks: Sequence[float]) -> dict[str, CellSummary]:
    return {"fixed": cell_of(*(run_of(seed, reading(sink=rates)) for seed, rates in enumerate(sinks)))}


AT_2 = {"is": "greater", "cell": "fixed", "value": "sink_2", "than_value": "highest_rate_except_2", "at_least": 10.0}


@pytest.mark.parametrize(
    ("sinks", "expected"),
    [
        ([(0.1, 30.0, 1.0)] * 5, "reproduced"),
        ([(0.1, 6.0, 1.0)] + [(0.1, 30.0, 1.0)] * 4, "direction only"),
        ([(30.0, 0.2, 1.0)] * 5, "contradicted"),
        ([(30.0, 0.2, 1.0)] + [(0.1, 30.0, 1.0)] * 4, "inconclusive"),
        ([(30.0, 30.0, 1.0)] + [(0.1, 30.0, 1.0)] * 4, "inconclusive"),
        ([(0.0, 0.0, 0.0)] * 5, "contradicted"),
        ([(0.1, 30.0, 1.0, 1.0, 40.0, 90.0)] * 5, "reproduced"),  # few queries see the later half of the positions
        ([(0.1, 30.0, 31.0, 1.0, 40.0, 90.0)] * 5, "contradicted"),
    ],
)
def test_verdicts_of_claims_about_the_position_of_the_sink(sinks: list[Sequence[float]], expected: str) -> None:
    found = verdict(AT_2, standing(*sinks))
    assert (found.verdict, found.quantity) == (expected, "sink_2")


def test_a_claim_about_a_position_that_was_not_measured_has_no_verdict() -> None:
    found = verdict({**AT_2, "value": "sink_9", "than_value": "highest_rate_except_9"}, standing(*[(0.1, 30.0)] * 5))
    assert (found.verdict, found.evidence) == ("no verdict", "Sink_9 was not measured in fixed.")


def emerging(*rates_at: Mapping[int, float]) -> dict[str, CellSummary]:
    """Cells `softmax` whose Sink_1 at each step is given, a mapping per seed."""
    runs = [
        run_of(seed, *(reading(step, sink_1=rate) for step, rate in rates.items()))
        for seed, rates in enumerate(rates_at)
    ]
    return {"softmax": cell_of(*runs)}


EARLY = [{0: 0.0, 500: 0.3, 1000: 30.0 + seed, 1500: 36.0} for seed in range(5)]


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        ({"before": 1000}, "reproduced"),
        ({"before": 1499}, "reproduced"),
        ({"before": 999}, "contradicted"),
        ({"before": 1000, "after": 500}, "reproduced"),
        ({"before": 1500, "after": 1000}, "contradicted"),
        ({"before": 1000, "at_least": 32.0}, "inconclusive"),
        ({"before": 3000}, "no verdict"),
    ],
)
def test_verdicts_of_claims_about_the_step_at_which_the_sink_appears(said: Check, expected: str) -> None:
    """Single evaluations are judged, because the mean of three would be late."""
    check = {"is": "within", "value": "sink_1", "cell": "softmax", "at_least": 10.0, **said}
    assert verdict(check, emerging(*EARLY)).verdict == expected


def test_verdicts_of_claims_that_a_cell_trains_or_diverges() -> None:
    run = run_of(0, reading())
    for trained, failed, diverges, trains in (
        (0, 5, "reproduced", "contradicted"),
        (5, 0, "contradicted", "reproduced"),
        (1, 4, "inconclusive", "inconclusive"),
        (1, 8, "reproduced", "contradicted"),
        (0, 3, "no verdict", "no verdict"),
        (0, 0, "not run", "not run"),
    ):
        results = {"elu": cell_of(*[replace(run, seed=seed) for seed in range(trained)], failed=failed)}
        assert verdict({"is": "diverges", "cell": "elu"}, results).verdict == diverges
        assert verdict({"is": "trains", "cell": "elu"}, results).verdict == trains
    assert verdict({"is": "diverges", "cell": "elu"}, {}).verdict == "not run"


def reaching(**steps: Sequence[int | None]) -> dict[str, CellSummary]:
    """Cells whose sink emerges at these steps of 1500, a seed each; None where it never does."""

    def run(seed: int, step: int | None) -> RunNumbers:
        crossed = [reading(at, sink_1=20.0 if step and at >= step else 0.5) for at in range(100, STEPS + 1, 100)]
        return run_of(seed, *crossed)

    return {cell: cell_of(*(run(seed, step) for seed, step in enumerate(several))) for cell, several in steps.items()}


def test_a_step_that_is_never_reached_is_later_than_every_other() -> None:
    results = reaching(slow=[1300, None, 1200, None, 900], fast=[400, 500, 400, 600, 700], never=[None] * 5)
    later = {"is": "greater", "value": "emergence_step", "cell": "slow", "than": "fast"}
    assert verdict(later, results).verdict == "reproduced"
    assert "slow 1300, never, 1200, never, 900 steps" in verdict(later, results).evidence
    assert "[+200, +900], without 2 seeds at which a cell never reaches the step." in verdict(later, results).evidence
    assert verdict({**later, "than": "never"}, results).verdict == "inconclusive"  # never ties with never
    assert verdict({**later, "times": 1.2}, results).verdict == "reproduced"  # 900 against 1.2 times 700
    assert verdict({**later, "times": 1.3}, results).verdict == "direction only"
    bound = {"is": "within", "value": "emergence_step", "cell": "never"}
    assert verdict({**bound, "at_least": 300.0}, results).verdict == "reproduced"
    assert verdict({**bound, "at_most": 9000.0}, results).verdict == "contradicted"
    equal = {"is": "equal", "value": "emergence_step", "cell": "never", "to": "never", "margin": 1.0}
    assert verdict(equal, results).verdict == "inconclusive"
    rising = {"is": "rising", "value": "emergence_step", "over": ["fast", "slow", "never"]}
    assert verdict(rising, results).verdict == "reproduced"


def test_a_weak_sink_has_a_first_step_without_emerging() -> None:
    weak = run_of(0, *(reading(at, sink_1=7.0 if at >= 600 else 0.9) for at in range(200, STEPS + 1, 200)))
    assert (weak.value("sink_step"), weak.value("emergence_step")) == (600.0, math.inf)


def growing(*steps: tuple[int | None, int | None]) -> CellSummary:
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
        ([(300, 900), (300, 1000), (400, 1100), (500, 600), (100, None)], "reproduced"),
        ([(900, 300), (1000, 300), (1100, 400), (None, 600), (700, 600)], "contradicted"),
        ([(300, 900), (300, 1000), (400, 1100), (500, 600), (600, 500)], "inconclusive"),
        ([(300, 900), (300, 1000), (400, 1100), (500, 600), (600, 600)], "inconclusive"),
        ([(None, None)] * 5, "contradicted"),
    ],
)
def test_verdicts_of_claims_about_which_of_two_steps_comes_first(
    steps: list[tuple[int | None, int | None]], expected: str
) -> None:
    check = {"is": "less", "cell": "softmax", "value": "norm_step", "than_value": "emergence_step"}
    assert verdict(check, {"softmax": growing(*steps)}).verdict == expected


def test_at_least_at_most_and_margins_include_their_bound_but_above_and_below_do_not() -> None:
    """At least, at most, and a margin include their bound; above, below and absent do not."""
    flat, one = {"a": [4.0] * 5, "b": [4.0] * 5, "c": [4.0] * 5}, {"a": [1.0] * 5}
    assert at_sinks({"is": "within", "cell": "a", "at_least": 4.0}, flat).verdict == "reproduced"
    assert at_sinks({"is": "within", "cell": "a", "at_most": 4.0}, flat).verdict == "reproduced"
    assert at_sinks({"is": "absent", "cell": "a"}, one).verdict == "contradicted"
    assert at_sinks({"is": "less", "cell": "a", "than": "b"}, flat).verdict == "inconclusive"
    assert at_sinks({"is": "greater", "cell": "a", "than": "b"}, flat).verdict == "inconclusive"
    assert "In 25 of 25 pairs" in at_sinks({"is": "greater", "cell": "a", "than": "b"}, flat).evidence
    for kind in ("rising", "falling"):  # a slope of 0 is neither
        assert at_sinks({"is": kind, "over": ["a", "b", "c"]}, flat).verdict == "contradicted"
    steps = {"low": [2.0] * 5, "high": [4.0] * 5}
    assert at_sinks({"is": "equal", "cell": "high", "to": "low", "margin": 2.0}, steps).verdict == "reproduced"
    assert at_sinks({"is": "equal", "of": ["low", "high"], "margin": 2.0}, steps).verdict == "reproduced"
    for size in ({"by": 2.0}, {"times": 2.0}):
        assert at_sinks({"is": "greater", "cell": "high", "than": "low", **size}, steps).verdict == "direction only"
    low = {"is": "less", "cell": "a", "than": "b", "absent": True}
    assert at_sinks(low, {"a": [1.0] * 5, "b": [4.0] * 5}).verdict == "direction only"


def test_thresholds_of_steps_and_rates_of_a_sink_count_as_reached_if_met_exactly() -> None:
    exactly = emerging(*[{0: 0.0, 500: 1.0, 1000: 10.0, 1500: 10.0}] * 5)
    appears = {"is": "within", "value": "sink_1", "cell": "softmax", "at_least": 10.0}
    assert verdict({**appears, "before": 1000}, exactly).verdict == "reproduced"
    assert verdict({**appears, "before": 1500, "after": 1000}, exactly).verdict == "contradicted"
    assert verdict({**appears, "before": 1000, "at_least": 10.1}, exactly).verdict == "contradicted"
    run = exactly["softmax"].numbers[0]
    assert (run.value("sink_step"), run.value("emergence_step")) == (500.0, 1000.0)
    assert verdict(AT_2, standing(*[(0.1, 10.0, 1.0)] * 5)).verdict == "reproduced"
    assert verdict(AT_2, standing(*[(0.1, 9.9, 1.0)] * 5)).verdict == "direction only"
    norms = run_of(0, *(reading(step, norm_ratio=ratio) for step, ratio in ((1, 2.0), (2, 1.0), (3, 2.0))))
    assert norms.value("norm_step") == 3.0  # 2.0 at step 1 is not below the bound, and reaches it at step 3
    least = {"is": "within", "value": "sink_1", "cell": "softmax", "at_least": 5.0}
    massive = cell_of(*(run_of(seed, reading(0, norm_ratio=1.0), reading(norm_ratio=2.0)) for seed in range(5)))
    claim = {"is": "within", "value": "norm_ratio", "cell": "softmax", "at_least": 1.0}
    assert judged(claim, results={"softmax": massive}, requires_massive=True)[0].verdict == "reproduced"
    of_other = [least, {**least, "cell": "other"}]
    sinks = cells_of("sink_1", {"softmax": [10.0] * 5, "other": [10.0] * 5})
    assert [one.verdict for one in judged(*of_other, results=sinks, requires_sink=True)] == ["reproduced"] * 2


@pytest.mark.parametrize(
    ("parts", "expected"),
    [
        ([LESS, GREATER], "reproduced"),
        ([LESS, {"is": "absent", "cell": "softmax"}], "contradicted"),
        ([LESS, {"is": "within", "value": "sink_1", "cell": "softmax", "at_least": 23.0}], "inconclusive"),
        ([LESS, {**GREATER, "cell": "weak", "at_least": 2.0}], "direction only"),
        ([{**LESS, "cell": "nobody"}, LESS], "not run"),
        ([{**LESS, "cell": "nobody"}, {**LESS, "is": "greater"}], "contradicted"),
    ],
)
def test_a_claim_with_parts_requires_all_of_them_and_is_contradicted_by_one(parts: list[Check], expected: str) -> None:
    found = verdict({"is": "all", "of": parts}, cells_of("sink_1", SINKS))
    assert found.verdict == expected
    assert found.quantity == "sink_1"


ALL_KINDS: list[Check] = [
    LESS,
    {**GREATER, "by": 10.0},
    {"is": "equal", "value": "sink_1", "cell": "v_biases", "to": "softmax", "margin": 3.0},
    {"is": "equal", "value": "sink_1", "of": ["v_biases", "softmax", "k_biases"], "margin": 15.0},
    {"is": "rising", "value": "sink_1", "over": ["k_biases", "v_biases", "softmax"]},
    {"is": "within", "value": "sink_1", "cell": "softmax", "at_least": 35.0},
    {"is": "greater", "cell": "softmax", "value": "sink_1", "than_value": "highest_rate_except_1"},
    {"is": "within", "value": "sink_1", "cell": "softmax", "at_least": 10.0, "before": 1500},
]


def test_the_order_of_seeds_and_cells_and_other_cells_change_nothing() -> None:
    results = cells_of("sink_1", SINKS)
    expected = judged(*ALL_KINDS, results=results)
    assert len({one.verdict for one in expected}) > 2
    draw = random.Random(0)
    for _ in range(5):
        cells = draw.sample(list(results), len(results))
        shuffled = {
            cell: results[cell].model_copy(update={"runs": draw.sample(results[cell].runs, 5)}) for cell in cells
        }
        assert judged(*ALL_KINDS, results=shuffled) == expected
    more = {**results, **cells_of("sink_1", {"other": [90.0, 0.0, 45.0, 3.0, 70.0]})}
    assert judged(*ALL_KINDS, results=more) == expected
    alone = {cell: results[cell] for cell in ("softmax", "k_biases")}
    assert judged(LESS, results=alone)[0] == expected[0]


@pytest.mark.parametrize("transform", [lambda x: 3.7 * x, lambda x: x**0.5, lambda x: x - 100.0])
def test_comparisons_do_not_change_under_increasing_transformations(transform: Callable[[float], float]) -> None:
    draw = random.Random(1)
    for _ in range(30):
        losses = {cell: [3.0 + draw.gauss(0, 0.02) + 0.02 * i for _ in range(5)] for i, cell in enumerate("abc")}
        moved = {cell: [transform(loss) for loss in several] for cell, several in losses.items()}
        for kind in ("greater", "less"):
            check = {"is": kind, "cell": "c", "than": "a"}
            assert at_losses(check, losses).verdict == at_losses(check, moved).verdict
