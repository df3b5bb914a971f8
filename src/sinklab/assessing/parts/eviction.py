"""Eviction: the loss with a KV cache of C keys, by eviction policy (`cache_policies`).

The cache of a query includes its own key. Keys are evicted after every query; evicted keys do not return.
"""

from collections.abc import Iterator
from functools import partial

from sinklab.assessing.cache_policies import CachePolicy, KeyBudget, accumulated_attention, policies_of
from sinklab.assessing.part import AssessPart, PartFigure, PartNumber, PartRow
from sinklab.assessing.reading import Effect, PartInput, refused
from sinklab.assessing.settings import AssessSettings
from sinklab.models.adapter import Adapter
from sinklab.tables import PlotAxis


class Evicted(Effect):
    """Loss with a cache of `budget` keys and eviction by `policy`, on sequences within the context."""

    policy: str
    budget: int


class Eviction(AssessPart):
    """Loss by eviction policy and budget; `first` is the number n of first keys, limited to C - 1 for each budget C."""

    name = "eviction"
    question = "Which keys must a small cache keep?"
    numbers = (PartNumber("recent_keys_added", "Recent keys only, added loss", ("Recent keys", "nats added")),)
    layout = PartFigure(
        "Evicting keys",
        "Loss added to {0.unchanged.loss:.3f} by evicting keys ({0.sequences} x {0.length:,} tokens), by policy and "
        "budget; random keys are the control.",
        PlotAxis("Keys kept", "x", "keys", order=()),
    )

    first: int
    policies: list[Evicted]

    @classmethod
    def refusal(cls, adapter: Adapter, settings: AssessSettings) -> str | None:
        return refused(adapter, partial(CachePolicy("probe", accumulated_attention).evict, size=KeyBudget(2)))

    @classmethod
    def run(cls, given: PartInput) -> "Eviction":
        """Measure the loss for every eviction policy and budget."""
        reader, settings = given.reader(), given.settings
        sizes = [KeyBudget(C, min(settings.most_kept, C - 1), settings.seed) for C in settings.budgets]
        conditions = [
            ({"policy": policy.name, "budget": size.keys}, partial(policy.evict, size=size))
            for size in sizes
            for policy in policies_of(cls.name)
        ]
        found = reader.effects(Evicted, conditions)
        return cls(**reader.result_fields(), first=settings.most_kept, policies=found)

    def rows(self) -> Iterator[PartRow]:
        """The answers are all policies at the smallest budget."""
        yield self.unchanged_row()
        smallest = min(one.budget for one in self.policies)
        for one in self.policies:
            answer = f"{one.policy}, {one.budget:,} keys" if one.budget == smallest else ""
            numbers = ["recent_keys_added"] if answer and one.policy == "recent" else []
            points = [(one.policy, one.budget)]
            yield self.row(f"{one.policy}, {one.budget} keys", one, answer=answer, numbers=numbers, points=points)
