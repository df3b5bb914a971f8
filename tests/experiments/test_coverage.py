"""The list of encoded parts of the paper is complete and names existing claims."""

from sinklab.experiments.paper import paper_coverage
from sinklab.experiments.shipped import experiment_ids, load_experiment

TAKEAWAYS = {"4": 2, "5": 2, "6": 3, "7": 3}
"""Number of takeaways in the box of each section of the paper."""


def stated_claims() -> set[str]:
    """Every confirmatory claim that states its own comparison, as EXPERIMENT.CLAIM."""
    found: set[str] = set()
    for name in experiment_ids():
        experiment = load_experiment(name)
        for claim in experiment.claims:
            refers = claim.same_as is not None
            if not refers and (claim.evidence or experiment.evidence) == "confirmatory":
                found.add(f"{experiment.id}.{claim.id}")
    return found


def test_every_numbered_part_of_the_paper_is_on_the_list() -> None:
    numbered = {f"table_{number}" for number in range(1, 16)}
    numbered |= {f"figure_{number}" for number in range(1, 31)}
    numbered |= {f"proposition_{number}" for number in range(1, 5)}
    numbered |= {f"takeaway_{section}.{one}" for section, count in TAKEAWAYS.items() for one in range(1, count + 1)}
    assert numbered - set(paper_coverage()) == set()
    assert {name for name in set(paper_coverage()) - numbered if not name.startswith("section_")} == set()


def test_every_claim_on_the_list_exists() -> None:
    named = {claim for part in paper_coverage().values() for claim in part.claims}
    assert named - stated_claims() == set()


def test_every_claim_of_the_paper_is_on_the_list() -> None:
    named = {claim for part in paper_coverage().values() for claim in part.claims}
    assert stated_claims() - named == set()


def test_a_part_has_claims_or_a_reason_why_there_are_none() -> None:
    assert [name for name, part in paper_coverage().items() if not part.claims and not part.without] == []
