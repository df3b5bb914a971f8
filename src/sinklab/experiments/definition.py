"""What an experiment file may say."""

from importlib import resources
from typing import Any, Literal, Self

import yaml
from pydantic import Field, model_validator

from sinklab.errors import InputError
from sinklab.schema import Part


class Check(Part):
    """A number of one cell (or of all cells together) and the bound it is held against.

    Values: `sink_1` and `sink_bias` in percent, `valid_loss` in nats/token, `valid_loss_spread`: largest minus
    smallest validation loss over the cells, nats/token.
    """

    cell: str | None = None
    value: Literal["sink_1", "sink_bias", "valid_loss", "valid_loss_spread"]
    at_least: float | None = None
    at_most: float | None = None

    @model_validator(mode="after")
    def _one_bound_and_its_cell(self) -> Self:
        if (self.at_least is None) == (self.at_most is None):
            raise ValueError("give one of at_least and at_most")
        if (self.cell is None) != (self.value == "valid_loss_spread"):
            raise ValueError("a cell is needed for every value but valid_loss_spread, which is over all cells")
        return self


class Claim(Part):
    """A sentence and the check that decides it, seed by seed."""

    id: str
    text: str
    check: Check


class Experiment(Part):
    """Cells as overlays on a base recipe, and claims about them."""

    id: str
    title: str
    base: str
    cells: dict[str, dict[str, Any]] = Field(min_length=1)
    claims: tuple[Claim, ...] = ()

    @model_validator(mode="after")
    def _claims_name_cells(self) -> Self:
        for claim in self.claims:
            if claim.check.cell is not None and claim.check.cell not in self.cells:
                raise ValueError(f"claim {claim.id} is about cell {claim.check.cell!r}, which is not there")
        return self


def load_experiment(name: str) -> Experiment:
    """An experiment that comes with sinklab, by its id.

    Raises:
        InputError: there is no such experiment.
    """
    folder = resources.files("sinklab") / "experiments"
    file = folder / f"{name}.yaml"
    if not file.is_file():
        known = sorted(p.name[:-5] for p in folder.iterdir() if p.name.endswith(".yaml"))
        raise InputError(f"no experiment {name!r}; there are: {', '.join(known)}")
    return Experiment.model_validate(yaml.safe_load(file.read_text(encoding="utf-8")))
