"""The paper at a glance: twenty statements, each with existing claims and numbers."""

import re

import pytest
from test_coverage import stated_claims

from benchmarks import effects, mechanism
from benchmarks.committed import PAGE, committed_summaries, page_with, summary_in
from sinklab.experiments.definition import SCALES
from sinklab.experiments.paper import PaperStatement, statements
from sinklab.experiments.quantities import quantity
from sinklab.experiments.shipped import load_experiment


def asked_at(scale: str, statement: PaperStatement) -> list[str]:
    """The claims of a statement that a scale asks."""
    found = []
    for name in statement.claims:
        experiment = load_experiment(name.partition(".")[0])
        known = {f"{experiment.id}.{claim.id}" for claim in experiment.claims_at(scale)}  # type: ignore[arg-type]
        found += [name] if scale in experiment.base and name in known else []
    return found


def test_there_are_twenty_distinct_statements() -> None:
    assert len(statements()) == 20
    assert len({one.says for one in statements()}) == 20
    assert len({one.claims[0] for one in statements()}) == 20


def test_every_claim_is_a_confirmatory_one_that_states_its_own_comparison() -> None:
    named = {claim for one in statements() for claim in one.claims}
    assert named - stated_claims() == set()


@pytest.mark.parametrize("statement", statements(), ids=lambda one: one.says)
def test_every_statement_is_asked_at_tiny_or_mini(statement: PaperStatement) -> None:
    assert asked_at("tiny", statement) or asked_at("mini", statement)
    assert {claim for scale in SCALES for claim in asked_at(scale, statement)} == set(statement.claims)


@pytest.mark.parametrize("statement", [one for one in statements() if one.number], ids=lambda one: one.says)
def test_the_number_of_a_statement_belongs_to_a_cell_and_is_in_the_papers_words(statement: PaperStatement) -> None:
    assert statement.number is not None
    experiment = load_experiment(statement.claims[0].partition(".")[0])
    assert statement.number.cell in experiment.cells_at("tiny")
    assert quantity(statement.number.value).unit == "%"
    said = [float(text) for text in re.findall(r"\d+\.\d", statement.paper)]
    assert min(said) - 0.05 <= statement.number.paper <= max(said) + 0.05


@pytest.mark.parametrize("statement", [one for one in statements() if one.laptop], ids=lambda one: one.says)
def test_at_laptop_a_statement_has_claims_and_a_number_of_that_scale(statement: PaperStatement) -> None:
    there = statement.at("laptop")
    assert asked_at("laptop", there) == list(there.claims)
    assert statement.at("tiny") == statement.at("") == statement
    if number := there.number:
        experiment = load_experiment(there.claims[0].partition(".")[0])
        assert number.cell in experiment.cells_at("laptop")
        assert quantity(number.value).unit == "%"
        assert 0 <= number.paper <= 100  # the row is in published.yaml


def test_no_claim_at_laptop_belongs_to_two_statements() -> None:
    named = {claim for one in statements() if one.laptop for claim in one.laptop.claims}
    assert len(named) == sum(len(one.laptop.claims) for one in statements() if one.laptop)


def test_a_caveat_is_one_sentence() -> None:
    for one in [*statements(), *(one.at("laptop") for one in statements())]:
        assert re.fullmatch(r"[^.]([^.]|\.\d)*\.", one.caveat), one.caveat


def test_the_page_on_the_mechanism_has_the_numbers_of_the_committed_results() -> None:
    text = mechanism.PAGE.read_text("utf-8")
    assert text == mechanism.page_with(text, summary_in(mechanism.PACKED.parent))


def test_the_archive_counts_the_verdicts_of_the_committed_results() -> None:
    text = PAGE.read_text("utf-8")
    assert text == page_with(text, committed_summaries())
    assert "| scale | finished runs | claims about | claims | reproduced |" in text


def test_the_page_of_effects_has_the_values_of_the_committed_results() -> None:
    text = effects.PAGE.read_text("utf-8")
    assert text == effects.page()
    readme = effects.README.read_text("utf-8")
    assert readme == effects.readme_with(readme)
    assert "| softmax | 60 % |" in readme
    # Computed from metrics.jsonl.gz with other code: softmax has 0, 12.75, 15.67, 18.85 and 43.71 %. With K biases, the
    # bias has 61.65, 66.85, 67.96, 68.75 and 72.67 %, and the loss is -0.0213, -0.0170, -0.0070, 0.0080 and 0.0080 nats
    # higher.
    assert "15.7 [0.0, 43.7] % at seeds 100 to 104" in text
    assert r"| bias.kind=k | 0.0 | 68.0 \[61.6, 72.7\] | -0.01 \[-0.02, +0.01\] | 100–104 |" in text
