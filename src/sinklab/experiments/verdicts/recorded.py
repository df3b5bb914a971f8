"""The spread between seeds that was recorded for a scale, for experiments without replicates (`spread.json`)."""

from collections.abc import Iterable, Mapping
from functools import cache
from importlib import resources
from typing import Literal

from pydantic import ConfigDict, Field

from sinklab.experiments.definition import Experiment, Scale
from sinklab.experiments.quantities import RunNumbers
from sinklab.experiments.verdicts.estimates import SeedSpread
from sinklab.files import parse_json
from sinklab.schema import ReadDocument
from sinklab.train.recipe import load_recipe

SPREAD = "spread.json"


class RecordedSpread(ReadDocument):
    """A standard deviation on the transformed scale, and its degrees of freedom."""

    sd: float = Field(gt=0)
    df: float = Field(gt=0)

    @property
    def known(self) -> SeedSpread:
        """As it is reckoned with."""
        return SeedSpread(self.sd, self.df, recorded=True)


class QuantitySpread(ReadDocument):
    """The spread of a quantity at a scale.

    Attributes:
        single: of a cell's number from seed to seed.
        paired: of what is left of it when cell and seed are taken away.
    """

    single: RecordedSpread | None = None
    paired: RecordedSpread | None = None


class RecordedSpreads(ReadDocument):
    """spread.json: the spread by scale and quantity."""

    schema_version: Literal[1] = Field(default=1, alias="schema")
    scales: dict[Scale, dict[str, QuantitySpread]] = Field(default_factory=dict)

    model_config = ConfigDict(populate_by_name=True)


@cache
def shipped_spreads() -> RecordedSpreads:
    """The spreads that come with sinklab; empty before any were recorded."""
    file = resources.files("sinklab") / "experiments" / SPREAD
    return RecordedSpreads.model_validate(parse_json(file.read_text("utf-8"))) if file.is_file() else RecordedSpreads()


def spreads_for(
    experiment: Experiment, scale: Scale, runs: Iterable[RunNumbers], spreads: RecordedSpreads
) -> Mapping[str, QuantitySpread]:
    """What was recorded for an experiment at a scale, by quantity.

    Nothing where its base is not the recipe of the scale, or a run is not as long as that.
    """
    if experiment.base.get(scale) != scale or scale not in spreads.scales:
        return {}
    steps = steps_at(scale)
    return spreads.scales[scale] if all(run.last.step == steps for run in runs) else {}


@cache
def steps_at(scale: Scale) -> int:
    """The length of the scale's own recipe, in updates."""
    return load_recipe(scale).train.steps
