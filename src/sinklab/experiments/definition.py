"""What an experiment file may say: a base recipe, cells that each change something in it, and claims about them.

cells:
  softmax: {}                                                   # the base itself
  k_biases: k_biases                                            # a variant of the catalogue, by its name
  weight_decay_1: {optim: {weight_decay: 1.0}}                  # or what changes
  sink_token_without_bos: [sink_token, {data: {bos: false}}]    # or several of both, one laid over the other
"""

from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, ValidationError, field_validator, model_validator

from sinklab.errors import InputError
from sinklab.files import parse_yaml
from sinklab.interventions.variants import VARIANTS
from sinklab.schema import Part

FILE = ".yaml"


def _overlays(said: Any) -> Any:
    """A cell as a list of overlays; a name is that of a variant."""
    return [_of_variant(one) if isinstance(one, str) else one for one in (said if isinstance(said, list) else [said])]


def _of_variant(name: str) -> Mapping[str, Any]:
    if name not in VARIANTS:
        raise ValueError(f"there is no variant {name!r} in the catalogue; there are: {', '.join(sorted(VARIANTS))}")
    return VARIANTS[name].overlay


Overlays = Annotated[list[dict[str, Any]], BeforeValidator(_overlays)]


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
    """Cells as overlays on a base recipe, and claims about them.

    Attributes:
        id: names its results.
        base: a recipe, by the name or file that `sinklab train` takes.
        cells: by name, the overlays that are laid over the base one after the other.
    """

    id: str = Field(pattern=r"^[\w.-]+$")
    title: str
    base: str
    cells: dict[str, Overlays] = Field(min_length=1)
    claims: tuple[Claim, ...] = ()

    @field_validator("cells")
    @classmethod
    def _names_are_folders(cls, cells: dict[str, Overlays]) -> dict[str, Overlays]:
        for name in cells:
            if not name or name.startswith(".") or "/" in name:
                raise ValueError(f"cell {name!r}: the name is that of a folder, without / and no . in front")
        return cells

    @model_validator(mode="after")
    def _claims_name_cells(self) -> Self:
        for claim in self.claims:
            if claim.check.cell is not None and claim.check.cell not in self.cells:
                raise ValueError(f"claim {claim.id} is about cell {claim.check.cell!r}, which is not there")
        return self


def experiment_ids() -> list[str]:
    """The experiments that come with sinklab."""
    folder = resources.files("sinklab") / "experiments"
    return sorted(path.name.removesuffix(FILE) for path in folder.iterdir() if path.name.endswith(FILE))


def load_experiment(name: str) -> Experiment:
    """An experiment that comes with sinklab, by its id, or one of your own, by its file.

    Raises:
        InputError: there is no such experiment, or the file is no valid one; the message names the field.
    """
    file = Path(name) if name.endswith(FILE) else resources.files("sinklab") / "experiments" / f"{name}{FILE}"
    if not file.is_file():
        known = ", ".join(experiment_ids())
        raise InputError(f"no experiment {name!r}; there are: {known}. One of your own is given as a {FILE} file")
    try:
        return Experiment.model_validate(parse_yaml(file.read_text(encoding="utf-8")))
    except ValidationError as error:
        lines = [f"  {'.'.join(map(str, one['loc'])) or 'experiment'}: {one['msg']}" for one in error.errors()]
        raise InputError("\n".join([f"{name} is not a valid experiment:", *lines])) from error
    except (OSError, ValueError) as error:
        raise InputError(f"{name} cannot be read: {error}") from error
