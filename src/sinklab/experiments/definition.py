"""What an experiment file may say: cells that each change something in a base recipe, and claims about them.

base: tiny                                                      # or, by scale: {tiny: tiny, 60m: 60m}
cells:
  softmax: {}                                                   # the base itself
  k_biases: k_biases                                            # a variant of the catalogue, by its name
  weight_decay_1: {optim: {weight_decay: 1.0}}                  # or what changes
  sink_token_without_bos: [sink_token, {data: {bos: false}}]    # or several of both, one laid over the other
adapted:                                                        # what is different at a scale, and why
  tiny:
    - why: "eight tokens of 64 are what 256 are of 2,048"
      cells: {window_256: {model: {attention: {mask: {width: 8}}}}}
evidence: confirmatory                                          # or exploratory, of all its claims
stated: 2026-11-23                                              # the day on which its claims were written down
first_seed: 100                                                 # its runs have seeds 100 to 104
claims:
  - {id: no_sink, text: "..", check: {is: absent, cell: k_biases}}
assess: [streaming]                                             # of every run, for claims about streamed_gap_0
"""

from collections.abc import Mapping, Sequence
from datetime import date
from typing import Annotated, Any, Self, get_args

from pydantic import AfterValidator, BeforeValidator, Field, field_validator, model_validator

from sinklab.assessing.parts import PartName
from sinklab.experiments.claims import Analysis, Claim, Scale, quantities_of
from sinklab.experiments.published import Published
from sinklab.experiments.quantities import QuantityName
from sinklab.interventions.variants import VARIANTS
from sinklab.schema import Part

SCALES: tuple[Scale, ...] = get_args(Scale)

NORMS = {
    "norm_ratio",
    "norm_ratio_before_norm",
    "norm_ratio_sink_token",
    "norm_growth",
    "norm_growth_sink_token",
    "norm_step",
    "kurtosis",
}
"""Quantities that a claim about massive activations is about."""

PAPER_SCALES = ("60m", "1b")
"""Those at which the paper's own numbers were measured."""


WHAT_SCALES_ARE: Mapping[Scale, str] = {
    "tiny": "0.3 M parameters and 3 M tokens, BOS in front of every text, weight decay 0.5: not the paper's default (a "
    "natural first token, decay 0.1: 18 %) but its row with a fixed first token (74 %), at another decay",
    "mini": "width 128 and 8 M tokens, BOS in front of every text, the paper's weight decay of 0.1: its row with a "
    "fixed first token (74 %)",
    "small": "the paper's 60M model with contexts of 256 tokens and a smaller batch",
}
"""What a model of the scale stands for, where it is not the paper's own; shown with every result."""


def _overlays(said: Any) -> Any:
    """A cell as a list of overlays; a name is that of a variant."""
    return [_of_variant(one) if isinstance(one, str) else one for one in (said if isinstance(said, list) else [said])]


def _of_variant(name: str) -> Mapping[str, Any]:
    if name not in VARIANTS:
        raise ValueError(f"there is no variant {name!r} in the catalogue; there are: {', '.join(sorted(VARIANTS))}")
    return VARIANTS[name].overlay


def _is_a_folder(name: str) -> str:
    if not name or name.startswith(".") or "/" in name:
        raise ValueError(f"cell {name!r}: the name is that of a folder, without / and no . in front")
    return name


Overlays = Annotated[list[dict[str, Any]], BeforeValidator(_overlays)]
Cells = dict[Annotated[str, AfterValidator(_is_a_folder)], Overlays]


class Adaptation(Part):
    """How cells differ at one scale from what the paper did, and why.

    Attributes:
        why: the reason, a sentence.
        change: laid over every cell.
        cells: laid over these cells; one that the experiment does not have is added.
        without: cells that this scale does not have.
    """

    why: str = Field(min_length=1)
    change: Overlays = Field(default_factory=list)
    cells: Cells = Field(default_factory=dict)
    without: tuple[str, ...] = ()


class Experiment(Part):
    """Cells as overlays on a base recipe, and claims about them.

    Attributes:
        id: names its results.
        title: what it shows, in a few words.
        question: what it asks, a sentence.
        source: where the paper has it, or what else it comes from.
        base: a recipe, by the name or file that `sinklab train` takes, of each scale that there is.
        cells: by name, the overlays that are laid over the base one after the other.
        baseline: the cell that the others are compared with; the first unless given.
        adapted: by scale, what is different there.
        columns: numbers that its table shows.
        published: the paper's numbers.
        assess: what of `sinklab assess` is done with every run, on the text that it was validated on.
        evidence: of its claims, unless one says otherwise.
        stated: the day on which its claims were written down, unless one says otherwise.
        seeds: how many its verdicts are meant to rest on.
        first_seed: its runs have this seed and those after it; its table and verdicts use no others.
        asks_massive: whether its claims about norms are asked only where the trained baseline, or the cell named here,
            has at least twice its untrained norm ratio.
        rank: of `reproduce all`, the smaller first.
    """

    id: str = Field(pattern=r"^[\w.-]+$")
    title: str
    question: str = ""
    source: str = ""
    base: dict[Scale, str]
    cells: Cells = Field(min_length=1)
    baseline: str = ""
    adapted: dict[Scale, tuple[Adaptation, ...]] = Field(default_factory=dict)
    columns: tuple[QuantityName, ...] = ("sink_1", "sink_bias", "valid_loss", "norm_ratio")
    published: Published | None = None
    claims: tuple[Claim, ...] = ()
    assess: tuple[PartName, ...] = ()
    evidence: Analysis = "exploratory"
    stated: date | None = None
    seeds: int = Field(default=5, ge=1)
    first_seed: int = Field(default=0, ge=0)
    asks_massive: bool | str = False
    rank: int = 1000

    @field_validator("base", mode="before")
    @classmethod
    def _one_recipe_is_of_one_scale(cls, base: Any) -> Any:
        """A recipe by the name of a scale is that scale's; any other is of the smallest."""
        return {base if base in SCALES else SCALES[0]: base} if isinstance(base, str) else base

    @model_validator(mode="after")
    def _names_are_those_of_cells(self) -> Self:
        known = {name for scale in self.base for name in self.cells_at(scale)}
        if self.baseline and self.baseline not in known:
            raise ValueError(f"baseline {self.baseline!r} is no cell")
        for claim in self.claims:
            named = self.massive_cell(claim)
            asked = [] if claim.same_as else [*claim.cells, *([named] if named else [])]
            if missing := [cell for cell in asked if cell not in known]:
                raise ValueError(f"claim {claim.id} is about cell {missing[0]!r}, which is not there")
            if wrong := [scale for scale in claim.scales or () if scale not in self.base]:
                raise ValueError(f"claim {claim.id} is made at scale {wrong[0]!r}, which the experiment lacks")
        if wrong := [cell for cell in (self.published.rows if self.published else ()) if cell not in known]:
            raise ValueError(f"published: {wrong[0]!r} is no cell")
        for scale, adaptations in self.adapted.items():
            if scale not in self.base:
                raise ValueError(f"adapted to scale {scale!r}, which the experiment lacks")
            if wrong := [name for one in adaptations for name in one.without if name not in self.cells]:
                raise ValueError(f"{wrong[0]!r}, which scale {scale} is to be without, is no cell")
        return self

    @property
    def compared_with(self) -> str:
        """The name of the baseline."""
        return self.baseline or next(iter(self.cells))

    def cells_at(self, scale: Scale) -> dict[str, Sequence[Mapping[str, Any]]]:
        """The cells of a scale, each with all overlays that it takes there."""
        cells: dict[str, list[Mapping[str, Any]]] = {name: list(overlays) for name, overlays in self.cells.items()}
        for one in self.adapted.get(scale, ()):
            for name, overlays in one.cells.items():
                cells.setdefault(name, []).extend(overlays)
            cells = {name: [*one.change, *overlays] for name, overlays in cells.items() if name not in one.without}
        return dict(cells)

    def claims_at(self, scale: Scale) -> list[Claim]:
        """The claims that are made at a scale: those that its cells can decide, and references."""
        cells = self.cells_at(scale)
        made = [claim for claim in self.claims if claim.scales is None or scale in claim.scales]
        return [claim for claim in made if claim.same_as or all(cell in cells for cell in claim.cells)]

    def massive_cell(self, claim: Claim) -> str | None:
        """The cell whose norm must have grown for a claim to be asked; None where the claim has no such condition."""
        said = claim.asks_massive
        if said is None:
            about_norms = claim.check and NORMS & set(quantities_of(claim.check))
            said = self.asks_massive if about_norms else False
        return (self.compared_with if said is True else said) or None

    def own_seeds(self, count: int | None = None) -> range:
        """The seeds of its runs: the first so many, as many as its verdicts rest on unless given."""
        return range(self.first_seed, self.first_seed + (self.seeds if count is None else count))
